"""A search on DeepSparse: layers from its own table, engines built as it runs them, options that go together."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from latbench.backends.cpu import deepsparse, deepsparse_environment
from latbench.backends.cpu.deepsparse import Operation
from latbench.backends.cpu.deepsparse_environment import Environment
from latbench.base.engine_registry import BFLOAT16, INT8, MODEL_ENGINES, PRUNED_ENGINES, runs_on_gpu
from latbench.cli import main
from latbench.errors import BadData
from latbench.tables.writer import write_part
from search.artifacts.layer_database import Database, hash_model
from search.deployment import Deployment
from search.pipeline import search_job
from search.pipeline.measure_in_network import build_layer_rows
from search.pipeline.search_request import CandidateOptions, SearchInputs
from search.pipeline.search_setup import build_layers
from search.pipeline.speedup_loop import pool_sessions
from search.problem.layers import DENSE, Option
from search.pruning.one_shot.fill_database import fill_database, hash_pruning_inputs
from search.task import Task, load_task
from search.whole_model import model_engines
from search.whole_model.end_to_end import EngineBuilder, ModelTimer
from search.whole_model.engine_builders import build_dense_engines
from search.whole_model.sessions import Session
from search.whole_model.timings import Timings
from sparse_kernels.oracle import WrongResult
from sparse_kernels.shapes import LinearShape

TASK = """
from collections import OrderedDict
import torch
name = "little"
def model():
    torch.manual_seed(0)
    layers = {"fc1": torch.nn.Linear(24, 32), "relu": torch.nn.ReLU(), "fc2": torch.nn.Linear(32, 5)}
    return torch.nn.Sequential(OrderedDict(layers)).eval()
def example(): return (torch.linspace(-1, 1, 3 * 24).sin().view(3, 24),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""
SHAPES = {"fc1": LinearShape(32, 24, 3), "fc2": LinearShape(5, 32, 3)}
ON_DEEPSPARSE = Deployment(2, "deepsparse")
CHOICES = {"fc1": Option("unstructured", 0.75), "fc2": Option(DENSE, 0.0)}

BFLOAT16_ENGINES = tuple(name for name, engine in MODEL_ENGINES.items() if engine.precision == BFLOAT16)
INT8_ENGINES = tuple(name for name, engine in MODEL_ENGINES.items() if engine.precision == INT8)


class Compiled:
    """Stands for a model that DeepSparse compiled: what the ONNX file says, run by ONNX Runtime."""

    def __init__(self, path: Path, inputs: Sequence[np.ndarray]) -> None:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.computed = session.run(None, {session.get_inputs()[0].name: inputs[0]})
        self.weights = {
            name: weight
            for it in onnx.load(path).graph.initializer
            if (weight := numpy_helper.to_array(it)).ndim == 2
            for name, shape in SHAPES.items()
            if weight.shape in ((shape.m, shape.k), (shape.k, shape.m))
        }

    def outputs(self) -> list[np.ndarray]:
        return self.computed

    def kept(self, layer: str) -> float:
        return float((self.weights[layer] != 0).mean())


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))
    (tmp_path / "little.py").write_text(TASK)
    return load_task(str(tmp_path / "little.py"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        deepsparse_environment, "find_environment", lambda: Environment(Path("python"), Path("engine"))
    )
    monkeypatch.setattr(deepsparse, "load_model", lambda path, inputs, **_: Compiled(path, inputs))


def inputs_of(task: Task, table: Path, database: Path) -> SearchInputs:
    model = task.model()
    return SearchInputs(task, model, table, None, database, hash_model(model), "table", hash_pruning_inputs(task))


def analysed(dense: float, sparse: float) -> dict[float, list[list[Operation]]]:
    """Both layers dense and at 75%, each once."""
    return {
        sparsity: [[Operation("gemm", (name,), sparsity, seconds) for name in SHAPES]]
        for sparsity, seconds in ((0.0, dense), (0.75, sparse))
    }


def test_layers_come_from_the_table_of_the_network(little: Task, tmp_path: Path) -> None:
    values = {name: name for name in SHAPES}
    made = build_layer_rows("little", SHAPES, values, analysed(4e-3, 1e-3), threads=2, batch=3, calls=20)
    write_part(tmp_path / "table", made)
    inputs = inputs_of(little, tmp_path / "table", tmp_path / "database")
    layers = build_layers(inputs, ON_DEEPSPARSE, CandidateOptions(), 0.8, SHAPES)
    assert [layer.name for layer in layers] == ["fc1", "fc2"]
    assert layers[0].options == (Option(DENSE, 0.0), Option("unstructured", 0.75))
    assert layers[1].seconds.tolist() == [4e-3, 1e-3]
    with pytest.raises(BadData, match="on deepsparse with 1 threads and batch 3: `latbench layers` measures it"):
        build_layers(inputs, Deployment(1, "deepsparse"), CandidateOptions(), 0.8, SHAPES)


def test_deepsparse_is_a_dense_engine_only_where_the_pruned_model_runs_there(little: Task) -> None:
    own = build_dense_engines(little, Deployment(2, "numba"))
    assert len({engine.worker for engine in own.values()}) == len(own)  # one's threads would slow the next
    assert list(own) == ["torch", "torch-mkldnn", "onnxruntime", "openvino", "numba"]
    assert list(build_dense_engines(little, Deployment(2, "deepsparse"))) == [*own, "deepsparse"]
    halves, bytes_ = (Deployment(2, precisions=("float32", each)) for each in ("bfloat16", "int8"))
    assert list(build_dense_engines(little, halves)) == [*own, *BFLOAT16_ENGINES]
    assert list(build_dense_engines(little, bytes_)) == [*own, *BFLOAT16_ENGINES, *INT8_ENGINES]


@pytest.mark.parametrize("backend", [name for name in PRUNED_ENGINES if not runs_on_gpu(name)])
def test_profiles_are_timed_on_the_backend_beside_its_dense_engines(
    backend: str, little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, EngineBuilder] = {}

    def timed(self: ModelTimer, wanted: dict[str, EngineBuilder], **_: Any) -> Timings:
        asked.update(wanted)
        times = {"deepsparse": 2e-3, "pruned": 1e-3}
        return Timings({name: [[times.get(name, 3e-3)] * 5] * 4 for name in wanted}, {})

    monkeypatch.setattr(ModelTimer, "time", timed)
    inputs = inputs_of(little, tmp_path / "table", tmp_path / "database")
    profiles = {"pruned": CHOICES}

    def time(seconds: dict[str, float]) -> Timings:
        before = [Timings({name: [[value]] * 5 for name, value in seconds.items()}, {})]
        return search_job.time_profiles(
            inputs, Deployment(2, backend), profiles, ModelTimer(2), lambda _: True, before=before,
            progress=lambda *_: None,
        )  # fmt: skip

    timings = time({})
    assert asked["pruned"].function == "search.whole_model.model_engines:build_database_pruned"
    assert backend in asked["pruned"].arguments and inputs.model_hash in asked["pruned"].arguments
    found = pool_sessions([Session(profiles, timings)], "pruned", 0.9)
    fastest = "deepsparse" if backend == "deepsparse" else "torch"
    assert found.dense_engine == fastest
    assert found.speedup.value == pytest.approx(2.0 if backend == "deepsparse" else 3.0)
    asked.clear()
    time({"torch": 9.0, "onnxruntime": 1.0, "openvino": 1.05})
    own = ["torch-mkldnn", "onnxruntime", "openvino", "numba"]  # of oneDNN and our own nothing is known
    assert [name for name in asked if name not in ("pruned", "deepsparse")] == own


def test_what_deepsparse_compiles_has_the_zeros_that_were_asked_for(
    little: Task, installed: None, tmp_path: Path
) -> None:
    inputs = inputs_of(little, tmp_path / "table", tmp_path / "database")
    fill_database(little, inputs.model, {"fc1": [CHOICES["fc1"]]}, Database(inputs.database, inputs.model_hash))
    stored = str(inputs.database), inputs.model_hash
    built: list[Any] = [
        model_engines.build_dense_deepsparse(little.reference, 2),
        model_engines.build_random_pruned(little.reference, 2, "deepsparse", CHOICES),
        model_engines.build_database_pruned(little.reference, 2, "deepsparse", *stored, CHOICES),
    ]
    assert [compiled.kept("fc1") for compiled in built] == [1.0, 0.25, 0.25]
    assert [compiled.kept("fc2") for compiled in built] == [1.0, 1.0, 1.0]
    own: Any = model_engines.build_database_pruned(little.reference, 2, "numba", *stored, CHOICES)
    np.testing.assert_allclose(own().numpy(), built[2].computed[0], rtol=1e-5, atol=1e-6)


def test_a_model_that_deepsparse_computes_wrongly_is_not_timed(
    little: Task, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "outputs", lambda self: [-y for y in self.computed])
    with pytest.raises(WrongResult, match="DeepSparse and torch compute different outputs"):
        model_engines.build_dense_deepsparse(little.reference, 2)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--backend", "deepspars"], 2, "unknown backend 'deepspars': known are numba, deepsparse"),
        (["--strategy", "grid"], 2, "unknown strategy 'grid': known are staged, spdy, evopress, once, uniform"),
        (["--cost-model", "m.json", "--time-budget", "soon"], 2, "a duration is a number followed by s, m or h"),
        ([], 2, "--cost-model is missing: give the cost model that `latbench fit` makes of the table"),
        (
            ["--backend", "deepsparse", "--cost-model", "m.json"],
            2,
            "--cost-model, --patterns, --sparsities and --precision do not go with",
        ),
        (
            ["--backend", "deepsparse", "--patterns", "nm:2:4"],
            2,
            "--cost-model, --patterns, --sparsities and --precision do not go",
        ),
        (
            ["--backend", "deepsparse", "--sparsities", "fine"],
            2,
            "--cost-model, --patterns, --sparsities and --precision do not go",
        ),
        (
            ["--backend", "deepsparse", "--most-bytes", "9"],
            2,
            "--most-bytes does not go with deepsparse, because its packed sizes are unknown",
        ),
        (["--cost-model", "m.json", "--sparsities", "much"], 2, "a sparsity is a number such as 0.75, not 'much'"),
        (
            ["--cost-model", "m.json", "--errors", "loss"],
            2,
            "--errors is output, weight or a file, and there is no file",
        ),
        (["--cost-model", "m.json", "--limits", "none.yaml"], 5, "none.yaml: no such file"),
        (["--backend", "deepsparse"], 3, "DeepSparse is not set up here: run `latbench setup deepsparse` once"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_any_work(
    options: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(deepsparse_environment, "explain_refusal", lambda: None)
    monkeypatch.chdir(tmp_path)
    given = ["--target", "2", "--table", "absent", "--database", "database", "-o", "profile.json", *options]
    monkeypatch.setattr(sys, "argv", ["latbench", "search", "digits", *given])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert err.startswith(f"latbench: {said}") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_licence_is_said_before_a_search(
    little: Task, installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--backend", "deepsparse", "--target", "2", "--table", tmp_path / "absent", "--database", tmp_path / "d"]
    given += ["-o", tmp_path / "profile.json"]
    monkeypatch.setattr(sys, "argv", ["latbench", "search", little.reference, *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capsys.readouterr()
    assert "for evaluation in development and testing environments only" in out
    assert ended.value.code == 5 and err.endswith("absent: no such table\n")


def test_a_random_mask_never_reaches_a_dense_layer(little: Task, installed: None) -> None:
    dense = dict.fromkeys(SHAPES, Option(DENSE, 0.0))
    compiled: Any = model_engines.build_random_pruned(little.reference, 2, "deepsparse", dense)
    with torch.inference_mode():
        expected = little.example().call(little.model()).numpy()
    np.testing.assert_allclose(compiled.computed[0], expected, rtol=1e-5, atol=1e-6)
