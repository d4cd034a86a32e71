"""`latbench sweep --gpu` as a user types it, on a GPU that is not there: what is printed, and the exit code."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_fakes
import pytest

from latbench.backends import installed_engines
from latbench.cli import sweep_points
from latbench.machines.gpu_names import Gpu
from latbench.sweeping import gpu_machine, gpu_points
from latbench.sweeping.gpu_points import list_staged_blocks, list_standard_shapes
from latbench.sweeping.settings import SweepSettings
from latbench.tables.table import read_table


class Machine(gpu_fakes.FakeMachine):  # type: ignore[misc, name-defined]
    """The GPU of these tests; a test sets what its engines refuse, or another task."""

    refused: dict[str, str] = {}  # noqa: RUF012 - the test's to set

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.device, self.refusals = gpu, gpu.device, dict(self.refused)
        self.versions |= {"cublas": "1", "cusparse": "1", "numba_cuda": "1"}

    def process(self, backend: str) -> str:
        """One for all: what processes do side by side, others test."""
        return "all"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one H200 and everything installed; `packages` and `nvml` are the test's to change."""
    at = SimpleNamespace(nvml=gpu_fakes.FakeNvml(gpu_fakes.H200), machine=Machine)
    monkeypatch.setitem(sys.modules, "pynvml", at.nvml)
    at.packages = {"torch": "2.11.0", "cupy-cuda13x": "14.2.0", "numba-cuda": "0.30.4"}
    monkeypatch.setattr(installed_engines.devices, "find_version", lambda package: at.packages.get(package, "1"))
    for name in ("cupy-cuda12x", "cupy"):
        at.packages[name] = None
    monkeypatch.setattr(gpu_machine, "GpuMachine", at.machine)
    monkeypatch.setattr(
        "latbench.sweeping.gpu_machine.GPU_SETTINGS",
        SweepSettings(rel_error=0.1, max_seconds=0.02, round_seconds=0.001),
    )
    monkeypatch.setattr(Machine, "refused", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return at


@pytest.fixture
def typed(latbench: Any, tiny: Path, tmp_path: Path) -> Any:
    """Types a small sweep of the GPU, and what a test adds."""
    small = ("--workload", tiny, "--patterns", "dense,vector:8", "--sparsities", "0.75", "-o", tmp_path / "table")
    return lambda *more: latbench("sweep", "--gpu", "h200", *small, *more)


def test_a_sweep_starts_its_engines_says_how_long_it_takes_and_measures(
    here: SimpleNamespace, typed: Any, tmp_path: Path
) -> None:
    ran = typed()
    assert ran.code == 0, ran.err
    assert "latbench: NVIDIA H200: starting torch_gpu, torch_sparse, cublas, cusparse, cupy, numba_cuda\n" in ran.err
    assert "points, about" in ran.err and "repeat the command to continue an interrupted sweep" in ran.err
    assert "speedup over the fastest dense engine" in ran.out
    frame = read_table(tmp_path / "table")
    assert set(frame["device"]) == {"nvidia-h200"} and set(frame["status"]) == {"ok"}
    assert {"cupy", "torch_gpu"} <= set(frame["backend"])
    again = typed()
    assert again.code == 0 and f"{len(frame)} were there already" in again.out
    assert len(read_table(tmp_path / "table")) == len(frame)


def test_an_engine_that_cannot_use_the_gpu_is_left_out_aloud(
    here: SimpleNamespace, typed: Any, tmp_path: Path
) -> None:
    Machine.refused["torch_sparse"] = "Triton is missing"
    here.packages["numba-cuda"] = None
    ran = typed()
    assert ran.code == 0
    assert "latbench: torch_sparse is left out: Triton is missing\n" in ran.err
    missing = "latbench: numba_cuda is left out: numba-cuda is not installed: pip install 'latbench[cuda13]'\n"
    assert missing in ran.err
    assert not {"torch_sparse", "numba_cuda"} & set(read_table(tmp_path / "table")["backend"])


WRONG = {
    "no CuPy": (
        {"cupy-cuda13x": None}, 13000, {},
        "our kernels (cupy) cannot use NVIDIA H200: cupy-cuda13x or cupy-cuda12x is not installed: pip install "
        "'latbench[cuda13]'; to measure without: --backends torch_gpu,torch_sparse",
    ),
    "no CuPy, an older driver": (
        {"cupy-cuda13x": None}, 12020, {},
        "our kernels (cupy) cannot use NVIDIA H200: cupy-cuda13x or cupy-cuda12x is not installed: pip install "
        "'latbench[cuda12]'; to measure without: --backends torch_gpu,torch_sparse",
    ),
    "a driver that is too old": (
        {}, 12020, {},
        "our kernels (cupy) cannot use NVIDIA H200: the NVIDIA driver 580.159.03 is too old: it runs CUDA 12.2, and "
        "cupy-cuda13x needs CUDA 13; install a newer driver, or make a new environment, and type pip install "
        "'.[cuda12]' in a clone of latbench"
        "; to measure without: --backends torch_gpu,torch_sparse",
    ),
    "no kernel for this GPU": (
        {}, 13000, {"cupy": "no kernel for compute capability 5.2: kernels are compiled for sm_70 and newer"},
        "our kernels (cupy) cannot use NVIDIA H200: no kernel for compute capability 5.2: kernels are compiled for "
        "sm_70 and newer; to measure without: --backends torch_gpu,torch_sparse,cublas,cusparse,numba_cuda",
    ),
    "torch for CPUs": (
        {}, 13000, {"torch_gpu": "torch 2.13.0 is built without CUDA", "torch_sparse": "the same"},
        "the dense baseline (torch_gpu) cannot use NVIDIA H200: torch 2.13.0 is built without CUDA; to measure "
        "without: --backends cublas,cusparse,cupy,numba_cuda",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_needed_and_cannot_be_had_ends_the_sweep_in_one_sentence(
    name: str, here: SimpleNamespace, typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, cuda, refused, sentence = WRONG[name]
    here.packages |= packages
    monkeypatch.setattr(here.nvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: cuda)
    Machine.refused.update(refused)
    ran = typed()
    assert ran.code == 3
    assert [line for line in ran.err.splitlines() if "starting" not in line] == [f"latbench: {sentence}"]
    assert not (tmp_path / "table").exists()
    # What it advises works.
    advised = sentence.rpartition("--backends ")[2]
    assert typed("--backends", advised).code == 0


def test_an_engine_that_is_named_has_to_work(here: SimpleNamespace, typed: Any) -> None:
    Machine.refused["cusparse"] = "libcusparse.so.12 cannot be opened"
    assert (
        "cusparse cannot use NVIDIA H200: libcusparse.so.12 cannot be opened" in typed("--backends", "cusparse").err
    )
    ran = typed("--backends", "torch_gpu,cupy")
    assert ran.code == 0 and "cusparse" not in ran.err
    assert "unknown backend 'cudnn'" in typed("--backends", "cudnn").refused(2)


def test_where_nothing_could_be_timed_the_exit_code_says_so(
    here: SimpleNamespace, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(gpu_fakes.FakeMachine.task.rpartition(":")[0])
    monkeypatch.setattr(Machine, "task", f"{script}:no_point_works")
    ran = typed()
    assert ran.code == 3
    last = ran.err.splitlines()[-1]
    assert last.startswith("latbench: nothing could be timed: ") and "points failed, " in last
    assert last.endswith("of them with error: RuntimeError: an illegal memory access was encountered")
    document = typed("--json")
    assert document.code == 3 and json.loads(document.out)["complete"] is True


def test_a_first_sweep_is_the_most_telling_part_and_the_full_one_goes_on(
    here: SimpleNamespace, latbench: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from latbench.sweeping.gpu_estimate import estimate_gpu_seconds

    arguments = ("sweep", "--gpu", "h200", "--workload", tiny, "-o", tmp_path / "table")
    shapes = [gpu_points.LinearShape(m, 24, n) for m in (16, 17, 32) for n in (1, 5)] + [
        gpu_points.LinearShape(5, 7, 3)
    ]
    full = list_staged_blocks(shapes, "nvidia-h200")
    first = [point.id for block in full[:3] for point in block]
    seconds = estimate_gpu_seconds([point for block in full[:3] for point in block])
    monkeypatch.setattr("latbench.cli.commands.sweep.QUICK_SECONDS", seconds + 1e-6)
    quick = latbench(*arguments, "--quick")
    assert quick.code == 0 and f"latbench: {len(first)} points, about" in quick.err
    rows = read_table(tmp_path / "table").sort_values("started_at", kind="stable")
    assert set(rows["point_id"]) == set(first)
    assert rows["block"].is_monotonic_increasing
    whole = latbench(*arguments)
    assert whole.code == 0 and f"{len(first)} were there already" in whole.out
    assert len(read_table(tmp_path / "table")) == sum(len(block) for block in full)


@pytest.mark.parametrize("more", [("--cpu",), ("--gpu", "h200", "--adaptive"), ("--gpu", "h200", "--on", "ray")])
def test_a_quick_sweep_is_one_of_a_gpu_here(latbench: Any, more: tuple[str, ...]) -> None:
    assert "--quick is for --gpu on this machine" in latbench("sweep", "--quick", *more).refused(2)


def test_a_quick_sweep_of_the_standard_shapes_takes_about_five_minutes() -> None:
    from latbench.sweeping.gpu_estimate import estimate_gpu_seconds

    blocks = list_staged_blocks(list_standard_shapes(), "nvidia-h200")
    quick = sweep_points.select_first_blocks(blocks, sweep_points.QUICK_SECONDS)
    wanted = [point for block in quick for point in block]
    assert 200 < estimate_gpu_seconds(wanted) <= sweep_points.QUICK_SECONDS and len(wanted) >= 100
    # All that the kernels have to show on the first shape, and dense beside ours on every large one.
    assert {point.backend for point in wanted} >= {"torch_gpu", "cupy", "torch_sparse", "cublas", "cusparse"}
    assert {point.shape for point in wanted} >= set(gpu_points.LARGE)


def test_a_dry_run_starts_nothing(here: SimpleNamespace, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "start", None)
    ran = typed("--dry-run")
    assert ran.code == 0 and "torch_gpu cublas dense 0 linear 16x24 on 1" in ran.out
