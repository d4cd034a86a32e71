"""Search, prune and verify for a GPU that is not there: NVML is a fake, and times of whole models are a formula."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_fakes
import pandas as pd
import pytest

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.model_file import save
from cost_models.rows.training_rows import read_training_rows
from latbench.cli.commands.prune import prune as prune_command
from latbench.cli.commands.search import search as search_command
from latbench.cli.commands.verify import verify as verify_command
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from latbench.machines.processors import count_cores
from latbench.report.sections.trade_off import read_trade_offs
from latbench.sweeping.gpu_points import DENSE, OURS, build_gpu_point
from latbench.tables.storage import parse_place
from latbench.tables.table import hash_table, read_table
from latbench.tables.writer import write_part
from latbench.workloads.workload import Layer, Workload, write_workload
from search import check_task
from search.artifacts.profile import Profile, read_profile
from search.inputs.gpu_rows import read_gpu_rows
from search.whole_model import timed_device
from search.whole_model.end_to_end import BUILDS, EngineBuilder, ModelTimer
from search.whole_model.timings import Timings
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.shapes import LinearShape

TASK = """
import torch
name, deploy_device = "little", "cuda"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 128)).eval()
def example(): return (torch.linspace(-1, 1, 64 * 128).sin().view(64, 128),)
def calibration(): return [example()]
def loss(model, batch): return (model(*batch) - reference(*batch)).square().mean()
def score(model): return 1.0
reference = model()
"""
SHAPES = (LinearShape(64, 128, 64), LinearShape(128, 64, 64))
DEVICE = "nvidia-h200"
GPU = "search.whole_model.gpu_engines:"


def build_rows(device: str = DEVICE) -> list[dict[str, Any]]:
    """Rows of a sweep in which a layer takes 4 us dense, and as much less as weights are dropped."""
    rows = []
    for shape in SHAPES:
        points = [build_gpu_point(device, shape, Dense(), 0.0, kernel) for kernel in DENSE]
        points += [
            build_gpu_point(device, shape, VectorWise(32), sparsity, OURS[0]) for sparsity in (0.25, 0.5, 0.75, 0.9)
        ]
        for point in points:
            seconds = 4e-6 * (1 - point.sparsity) * (2 if point.layout == "token_major" else 1)
            rows.append({
                **point.key(), "run_id": "r", "env_id": "e" * 16, "block": 0, "seq": len(rows), "status": "ok",
                "kernel_used": "fake", "timer": "cuda_event", "stop_reason": "budget",
                "started_at": pd.Timestamp("2026-11-30", tz="UTC"), "samples_seconds": [seconds] * 9,
            })  # fmt: skip
    return rows


class Machine:
    """Times engines by what they keep of the weights, and keeps what it was asked for, each time and in all."""

    def __init__(self) -> None:
        self.asked: dict[str, EngineBuilder] = {}
        self.times: list[set[str]] = []
        self.checks: list[tuple[int, bool]] = []
        self.calls: list[tuple[Any, ...]] = []

    def time(self, engines: Mapping[str, EngineBuilder], **options: Any) -> Timings:
        self.asked.update(engines)
        self.times.append(set(engines))
        self.required = options["required"]
        dense = {"torch-gpu": 2e-5, "torch-gpu-folded": 1.9e-5, "torch-gpu-compiled": 1.8e-5}
        blocks = {}
        for name, engine in engines.items():
            choices = engine.arguments[-1] if isinstance(engine.arguments[-1], Mapping) else None
            if engine.function == f"{GPU}build_folder_on_gpu":
                choices = read_profile(Path(engine.arguments[2]) / "profile.json").options
            seconds = dense.get(name, 1e-6)
            if choices is not None and not engine.function.endswith("build_free_on_gpu"):
                seconds += sum(8e-6 * (1 - option.sparsity) for option in choices.values())
            if name != "tensorrt":
                blocks[name] = [[seconds] * 5] * BUILDS
        return Timings(blocks, {"tensorrt": "ModuleNotFoundError: No module"}, tuple(range(BUILDS)))

    def call(self, *given: Any) -> Any:
        self.calls.append(given)
        return 1.0, 0.9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(gpu_fakes.H200))
    monkeypatch.setattr(timed_device, "_fingerprint_kernels", lambda capability: f"kernels of {capability}")
    monkeypatch.setattr(check_task, "_check_score_in_worker", lambda *given: found.checks.append(given[2:]))
    found = Machine()
    monkeypatch.setattr(ModelTimer, "time", lambda self, *given, **options: found.time(*given, **options))
    monkeypatch.setattr(ModelTimer, "call", lambda self, *given, timeout: found.call(*given))
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path]:
    """A task, a GPU's table of its layers, and a cost model of that."""
    (tmp_path / "little.py").write_text(TASK)
    table = tmp_path / "table"
    write_part(table, build_rows())
    X, seconds = read_training_rows(parse_place(table), {})
    save(tmp_path / "m.json", AnchoredLookup().fit(X, seconds), hash_table(parse_place(table)), X)
    return str(tmp_path / "little.py"), str(table), tmp_path / "m.json"


def run_search(files: tuple[str, str, Path], folder: Path, **options: Any) -> Profile:
    task, table, model = files
    options = {"target": 2.0, "evaluations": 10, "model": model, **options}
    search_command(task, table, folder / "database", folder / "profile.json", **options)
    return read_profile(folder / "profile.json")


def test_a_task_for_a_gpu_is_searched_pruned_and_verified_there(
    files: tuple[str, str, Path], machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_search(files, tmp_path)
    assert (found.backend, found.device, found.threads, found.precisions) == ("cupy", DEVICE, 1, "float16")
    assert found.dense_engine == "torch-gpu-compiled"
    assert {name: each.function for name, each in machine.asked.items() if "torch" in name or name == "tensorrt"} == {
        "torch-gpu": f"{GPU}build_dense_torch_gpu",
        "torch-gpu-folded": f"{GPU}build_dense_torch_gpu_folded",
        "torch-gpu-compiled": f"{GPU}build_dense_torch_gpu_compiled",
        "tensorrt": f"{GPU}build_dense_tensorrt",
    }
    assert {each.arguments[:2] for each in machine.asked.values()} == {(files[0], "float16")}
    functions = {each.function.removeprefix(GPU) for each in machine.asked.values()}
    assert {"build_random_on_gpu", "build_database_on_gpu", "build_free_on_gpu"} <= functions
    prune_command(files[0], tmp_path / "profile.json", tmp_path / "database", tmp_path / "pruned", joint=False)
    capsys.readouterr()
    verify_command(files[0], tmp_path / "pruned", tmp_path / "verify")
    said = " ".join(capsys.readouterr().out.split())
    assert "promise kept" in said and "measured on a GPU in float16 against torch-gpu-compiled, 2x promised" in said
    assert "tensorrt was left out: ModuleNotFoundError: No module" in said
    # Only the probes and the verification try an engine that failed; the promise's rival must run again.
    assert ["tensorrt" in names for names in machine.times] == [True, *[False] * (len(machine.times) - 2), True]
    assert {"torch-gpu", "torch-gpu-compiled", "pruned"} <= set(machine.required)
    assert machine.checks == [(count_cores(), True)] * 2  # of the search and of the verification
    assert machine.calls == [("torch-gpu", f"{GPU}score_on_gpu", files[0], "float16", str(tmp_path / "pruned"))]
    verdict = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert (verdict["device"], verdict["precision"], verdict["score_pruned"]) == (DEVICE, "float16", 0.9)
    rows = read_table(tmp_path / "verify").set_index("kernel_used")
    assert set(rows["device"]) == {DEVICE} and set(rows["launch_mode"]) == {"graph"}
    assert set(rows["timer"]) == {"cuda_event"} and set(rows["dtype_w"]) == {"float16"} == set(rows["dtype_out"])
    assert rows.loc["pruned", "backend"] == "cupy" and rows.loc["torch-gpu", "kernel_requested"] == "eager"
    machine.asked.clear()
    verify_command(files[0], tmp_path / "pruned", tmp_path / "verify")
    assert not machine.asked  # it is up to date


def test_a_report_shows_what_a_searched_profile_cost(
    files: tuple[str, str, Path], machine: Machine, tmp_path: Path
) -> None:
    found = run_search(files, tmp_path)
    workload = Workload("little", "made up", tuple(map(Layer, found.layers, SHAPES)))
    write_workload(workload, tmp_path / "w.yaml")
    frame = read_trade_offs(read_table(files[1]), found, str(tmp_path / "w.yaml"), tmp_path / "database")
    uniform = frame[frame["kind"] == "uniform"].set_index("name")
    assert uniform.loc["dense", "seconds"] > uniform.loc["vector:32 at 0.75", "seconds"]


def test_the_command_line_overrules_the_task(files: tuple[str, str, Path], machine: Machine, tmp_path: Path) -> None:
    found = run_search(files, tmp_path, backend="cupy", precisions=["bfloat16"], gpu="h200:0")
    assert found.precisions == "bfloat16" and found.deployment.gpu == DEVICE
    assert {each.arguments[1] for each in machine.asked.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 2}, "--threads does not go with cupy"),
        ({"precisions": ["int8"]}, "--precision int8 does not go with cupy: on a GPU the whole model has one type"),
        ({"precisions": ["float16", "bfloat16"]}, "--precision float16,bfloat16 does not go with cupy"),
        ({"deploy": "openvino"}, "--deploy openvino does not go with cupy"),
        ({"most_bytes": 1e6}, "--most-bytes does not go with cupy"),
        ({"model": None}, "--cost-model is missing"),
        ({"backend": "numba", "gpu": "h200"}, "--gpu h200 does not go with numba, which runs on a CPU"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, files: tuple[str, str, Path], machine: Machine, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        run_search(files, tmp_path, **options)
    assert not machine.asked


def test_another_gpu_than_that_of_the_table_is_refused(
    files: tuple[str, str, Path], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**gpu_fakes.H200, "name": "NVIDIA H100 PCIe"}
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(other))
    with pytest.raises(
        BadData, match="no times of layers of a model on nvidia-h100-pcie: `latbench sweep --gpu nvidia-h100-pcie"
    ):
        run_search(files, tmp_path)
    with pytest.raises(EnvironmentUnusable, match="h200 requested, but this machine has NVIDIA H100 PCIe"):
        run_search(files, tmp_path, gpu="h200")


def test_rows_of_a_gpu_stand_for_layers_of_a_model(tmp_path: Path) -> None:
    write_part(tmp_path, [*build_rows(), *build_rows("nvidia-h100")])
    rows = read_gpu_rows(tmp_path, set(SHAPES), DEVICE).rows
    assert set(rows["device"]) == {DEVICE}
    assert set(rows.loc[rows["pattern"] == "dense", "layout"]) == {"token_major"}
    assert set(rows.loc[rows["pattern"] != "dense", "backend"]) == {"cupy"}
    assert len(rows) == len(SHAPES) * (2 + 4)


def test_workers_see_the_gpu_alone(machine: Machine) -> None:
    from search.deployment import Deployment

    device = timed_device.find_timed_device(Deployment(1, "cupy", ("float16",)))
    with device.build_timer(1) as timer:
        environment = timer._build_worker("any")._environment
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["LATBENCH_GPU_UUID"] == gpu_fakes.H200["uuid"]
    assert device.describe_versions()["kernels"] == "kernels of 9.0"
