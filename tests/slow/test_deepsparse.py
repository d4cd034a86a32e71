"""The real DeepSparse, set up if it is not: its process, its analysis, a model verified."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latbench.backends.cpu import deepsparse, deepsparse_environment
from latbench.backends.cpu.deepsparse import Operation
from latbench.backends.cpu.deepsparse_environment import Environment
from latbench.base.engine_registry import DEEPSPARSE, DENSE_INT8, list_rivals
from latbench.errors import EnvironmentUnusable
from latbench.importers.text_formats import convert_rows_to_spdy
from latbench.runners.worker import load_function
from latbench.tables.table import read_table, select_timed
from latbench.tables.writer import write_part
from search.artifacts.onnx_export import export_onnx, find_layer_values
from search.artifacts.profile import LayerChoice, Profile
from search.deployment import Deployment
from search.pipeline import search_job
from search.pipeline.measure_in_network import RunSchedule, build_layer_rows, select_task_rows, time_layers_in_network
from search.pipeline.search_request import Promise, SearchPlan, SearchRequest, read_inputs
from search.pipeline.verify import PRUNED, verify
from search.pruning.storage.model_folder import save_pruned
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.end_to_end import EngineBuilder, ModelTimer
from search.whole_model.timings import Timings
from sparse_kernels.patterns import Unstructured
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(600)]

TASK = """
from collections import OrderedDict
import torch
name = "little"
def model():
    torch.manual_seed(0)
    layers = {"fc1": torch.nn.Linear(256, 512), "relu": torch.nn.ReLU(), "fc2": torch.nn.Linear(512, 64)}
    return torch.nn.Sequential(OrderedDict(layers)).eval()
def example(): return (torch.linspace(-1, 1, 32 * 256).sin().view(32, 256),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """DeepSparse in a cache of these tests, which nobody has to prepare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            deepsparse_environment.install_environment(deepsparse.check_environment)
        except EnvironmentUnusable as error:  # no Python that is old enough, or no such processor
            pytest.skip(str(error))
        yield deepsparse_environment.find_environment()


@pytest.fixture
def little(tmp_path: Path) -> Task:
    (tmp_path / "little.py").write_text(TASK)
    return load_task(str(tmp_path / "little.py"))


def test_it_is_set_up_anew_in_an_empty_cache(
    installed: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    assert deepsparse_environment.install_environment(deepsparse.check_environment)
    assert not deepsparse_environment.install_environment(deepsparse.check_environment)
    assert deepsparse_environment.find_environment().python.is_relative_to(tmp_path)
    assert deepsparse_environment.remove_environment()
    assert deepsparse_environment.find_deepsparse_version() is None


def test_convolutions_sparse_and_dense_are_what_torch_computes(
    installed: Environment, rng: np.random.Generator, tmp_path: Path
) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 24, 3, stride=2),
        torch.nn.Flatten(), torch.nn.Linear(24 * 49, 7),
    ).eval()  # fmt: skip
    inputs = (torch.randn(5, 3, 16, 16),)
    for sparsity in (0.0, 0.9):
        for module in (model[2], model[4]):
            matrix = weight_matrix(module)
            mask = Unstructured().mask(matrix.square().numpy(), sparsity)
            set_weight_matrix(module, torch.where(torch.from_numpy(mask), matrix, 0.0))
        export_onnx(model, inputs, tmp_path / "model.onnx")
        arrays = [inputs[0].numpy()]
        with deepsparse.load_model(tmp_path / "model.onnx", arrays, threads=2, environment=installed) as loaded:
            [y] = loaded.outputs()
        with torch.no_grad():
            expected = model.double()(inputs[0].double()).numpy()
        model.float()
        # A thousand float32 additions in any order stay within 1e-5 of the largest value.
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_the_analysis_tells_each_layers_time_and_sparsity(
    installed: Environment, little: Task, tmp_path: Path
) -> None:
    model, inputs = little.model(), little.example().arguments
    path = tmp_path / "model.onnx"
    export_onnx(model, inputs, path)
    values = find_layer_values(model, inputs, path)
    assert list(values.values()) == ["fc1", "fc2"]
    for sparsity in (None, 0.9):
        operations = deepsparse.time_operations(
            path, [inputs[0].numpy()], threads=2, environment=installed, sparsity=sparsity
        )
        found = {values[value]: it for it in operations for value in it.outputs if value in values}
        assert set(found) == {"fc1", "fc2"}
        assert all(it.seconds > 0 and abs(it.sparsity - (sparsity or 0.0)) < 0.02 for it in found.values())


def test_layer_times_become_a_table(installed: Environment, little: Task, tmp_path: Path) -> None:
    assert time_layers_in_network(little, tmp_path / "table", installed, RunSchedule({0.8: 2}), threads=2) == []
    table = select_timed(read_table(tmp_path / "table"))
    swept = table[table["purpose"] == "sweep"]
    assert set(zip(swept["model"], swept["sparsity_target"], strict=True)) == {
        (name, sparsity) for name in ("little", "little:fc1", "little:fc2") for sparsity in (0.0, 0.8)
    }
    assert set(swept["sample_count"]) == {2}
    assert table["purpose"].value_counts().to_dict() == {"sweep": 6, "baseline": 1}


# Every linear layer and convolution, wherever it is and whatever DeepSparse makes of the network around it.
@pytest.mark.parametrize(
    "name", ["resnet50", "mobilenetv1", "yolov5s", pytest.param("bert_base", marks=pytest.mark.long)]
)
def test_every_layer_of_the_networks_of_spdy_has_a_time(installed: Environment, name: str, tmp_path: Path) -> None:
    task = load_task(str(ROOT / f"tests/tasks/{name}.py"))
    assert time_layers_in_network(task, tmp_path / "table", installed, RunSchedule({0.75: 1}), threads=2) == []
    timings = convert_rows_to_spdy(select_task_rows(task, tmp_path / "table", 2), task.name)
    assert list(timings.layers) == list(list_prunable_layers(task, task.model()))
    assert 0 < timings.prunable < timings.base


def by_formula(engines: Mapping[str, EngineBuilder], **_: Any) -> Timings:
    """What runs on DeepSparse is built and run; but what it takes does not hang on how busy this machine is."""
    blocks = {}
    for name, engine in engines.items():
        if name == "deepsparse" or "deepsparse" in engine.arguments:
            with load_function(engine.function)(*engine.arguments) as built:
                assert min(built.burst(0.0).samples) > 0
        choices = engine.arguments[-1] if isinstance(engine.arguments[-1], Mapping) else {}
        kept = np.mean([1 - option.sparsity for option in choices.values()]) if choices else 1.0
        blocks[name] = [[2e-3 if name == PRUNED else 1e-3 + 3e-3 * float(kept)] * 5] * 4
    return Timings(blocks, {})


def test_a_search_on_deepsparse_gives_a_profile_that_is_pruned_and_verified_there(
    installed: Environment, little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelTimer, "time", lambda self, engines, **options: by_formula(engines, **options))
    shapes, database = list_prunable_layers(little, little.model()), tmp_path / "database"
    analyses = {
        sparsity: [[Operation("gemm", (name,), sparsity, 1.5e-3 * (1 - sparsity)) for name in shapes]]
        for sparsity in (0.0, 0.8, 0.9)
    }
    values = {name: name for name in shapes}
    write_part(
        tmp_path / "table", build_layer_rows("little", shapes, values, analyses, threads=2, batch=32, calls=20)
    )
    inputs = read_inputs(little, tmp_path / "table", None, database)
    request = SearchRequest(Promise(1.8), Deployment(2, "deepsparse"), plan=SearchPlan(evaluations=5))
    found = search_job.search(inputs, request)
    assert found.backend == "deepsparse"
    # One layer at 80% is not fast enough, and both are.
    assert {choice.pattern for choice in found.layers.values()} == {"unstructured"}
    found.save(tmp_path / "profile.json")
    given = ["--profile", tmp_path / "profile.json", "--database", database, "-o", tmp_path / "pruned"]
    command = [ROOT / ".venv/bin/latbench", "prune", little.reference, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict = verify(little, tmp_path / "pruned", tmp_path / "verify")  # on deepsparse, without being told
    assert (verdict.backend, verdict.measured_speedup, verdict.met) == ("deepsparse", 2.0, True)
    assert {"torch", "onnxruntime", "deepsparse", PRUNED} <= set(verdict.engines)
    assert (tmp_path / "verify" / "pruned.onnx").is_file()


def test_a_pruned_model_is_verified_against_dense_engines_and_its_own_dense_form(
    installed: Environment, little: Task, tmp_path: Path
) -> None:
    model, masks = little.model(), {}
    for name in ("fc1", "fc2"):
        matrix = weight_matrix(model.get_submodule(name))
        masks[name] = torch.from_numpy(Unstructured().mask(matrix.square().numpy(), 0.9))
        set_weight_matrix(model.get_submodule(name), torch.where(masks[name], matrix, 0.0))
    choice = LayerChoice("unstructured", 0.9, 1e-3, 1e-3, 1e-3, 0.1)
    numbers = dict.fromkeys([
        "dense_seconds", "dense_seconds_low", "dense_seconds_high", "fixed_seconds", "fixed_seconds_low",
        "fixed_seconds_high", "predicted_seconds", "predicted_low", "predicted_high", "loss", "error", "bound",
        "confidence", "additivity_before", "additivity_after",
    ], 1.0)  # fmt: skip
    texts = dict.fromkeys(["device", "dense_engine", "strategy", "table_hash", "model_hash", "inputs"], "x")
    profile = Profile(
        task="little", layers={"fc1": choice, "fc2": choice}, backend="numba", threads=1, batch=32, ceiling=None,
        seed=0, target=1e-3, **numbers, **texts,
    )  # fmt: skip
    save_pruned(tmp_path / "pruned", model, masks, profile, {"task": "little"})
    on_deepsparse = Deployment(1, DEEPSPARSE)
    verdict = verify(little, tmp_path / "pruned", tmp_path / "verify", deployment=on_deepsparse)
    assert verdict.backend == "deepsparse" and verdict.met
    # What dense int8 would take is told beside the rivals, where its engine is installed.
    assert set(verdict.engines) == {*list_rivals(DEEPSPARSE), DENSE_INT8, PRUNED}
    assert verdict.score_pruned == pytest.approx(little.score(model))
    table = read_table(tmp_path / "verify").set_index("kernel_used")
    assert table.loc[["deepsparse", PRUNED], "backend"].tolist() == ["deepsparse", "deepsparse"]
    assert (tmp_path / "verify" / "pruned.onnx").is_file()
