"""Before the first point each engine is asked for a small result; what cannot use the GPU is told in a sentence."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import gpu_fakes
import pytest

from latbench.backends import installed_engines
from latbench.backends.gpu import gpu_installation, gpu_probe, prepare_gpu_point
from latbench.backends.gpu.gpu_probe import Probed
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import GPU_ENGINES
from latbench.machines.gpu_discovery import UUID_VARIABLE
from latbench.machines.gpu_names import Gpu
from latbench.runners.worker import load_function
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from latbench.sweeping import gpu_machine, gpu_points
from latbench.sweeping.gpu_machine import GpuMachine, find_architecture
from latbench.sweeping.gpu_points import build_probe_points
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult

GPU = Gpu(gpu_fakes.H200["name"], gpu_fakes.H200["uuid"])


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML sees an H200 with a driver of CUDA 13.0; a test may set another."""
    nvml = gpu_fakes.FakeNvml(gpu_fakes.H200)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


# In the process of an engine ---------------------------------------------------------------------------------------


PROBES = build_probe_points("nvidia-h200", GPU_ENGINES)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What on_gpu.prepare makes of each backend's point: facts, or an exception; and a torch for CUDA."""
    answers: dict[str, Any] = {name: {"kernel_used": f"{name}.some.kernel"} for name in GPU_ENGINES}
    answers["cupy"] = {"kernel_used": "cuda.vector_sm90+finish_sm90.sm_90a"}

    def prepare(point: Point) -> Any:
        answer = answers[point.backend]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(facts=answer)

    monkeypatch.setattr(prepare_gpu_point, "prepare_gpu_point", prepare)
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), __version__="2.13.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    answers["torch"] = torch
    return answers


def test_each_engine_answers_for_itself_by_a_point(prepared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared["cublas"] = ImportError("libcublas.so.13: cannot open shared object file\n\n  Traceback ...")
    prepared["numba_cuda"] = WrongResult("3 of 7 results are wrong")
    monkeypatch.setattr("latbench.machines.cuda_libraries.find_version", lambda package: None)
    found = gpu_probe.probe_engines(PROBES)
    assert found.refusals == {
        "cublas": "libcublas.so.13 cannot be loaded: pip install nvidia-cublas",
        "numba_cuda": "3 of 7 results are wrong",
    }
    assert found.architecture == "sm_90a"
    assert set(found.libraries) == {"cublas", "cudnn", "cusparse", "cusparselt", "nvrtc", "nvvm", "triton"}
    assert gpu_probe.probe_engines({"torch_gpu": PROBES["torch_gpu"]}).architecture is None


def test_a_peer_without_a_kernel_for_this_gpu_is_no_broken_one(prepared: dict[str, Any]) -> None:
    prepared["torch_sparse"] = Unsupported("cusparselt: sparse_semi_structured is for sm_80 and newer")
    prepared["cupy"] = Unsupported("no CUDA kernel runs vector:64 on sm_52")
    assert gpu_probe.probe_engines(PROBES).refusals == {"cupy": "no CUDA kernel runs vector:64 on sm_52"}


def test_torch_has_to_be_built_for_cuda(prepared: dict[str, Any]) -> None:
    prepared["torch"].version.cuda = None
    said = "torch 2.13.0 is built without CUDA: install a CUDA build, as pytorch.org/get-started says"
    assert gpu_probe.probe_engines(PROBES).refusals == {"torch_gpu": said, "torch_sparse": said}


def test_every_backend_has_a_small_point_of_its_own() -> None:
    assert set(PROBES) == set(GPU_ENGINES)
    assert all(point.backend == name and point.shape == gpu_points.SMOKE_LINEAR for name, point in PROBES.items())
    assert all(point.pattern.refuses(point.shape) is None for point in PROBES.values())
    assert set(build_probe_points("x", ["cupy"])) == {"cupy"}


def test_an_exception_without_words_is_called_by_its_name() -> None:
    assert gpu_probe.format_error(MemoryError()) == "MemoryError"
    assert gpu_probe.format_error(RuntimeError(" two\nlines \n\nand more")) == "two lines"


def test_the_reference_is_loaded_and_cuda_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    started = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: done.append("torch")))
    monkeypatch.setitem(sys.modules, "torch", started)
    gpu_probe.load_modules(["latbench.errors"])
    assert done == ["torch"]
    with pytest.raises(ModuleNotFoundError):
        gpu_probe.load_modules(["latbench.no_such_module"])


# Of the machine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the workers of a GpuMachine answer, by process: a value, or an exception. Each takes a moment."""
    known: dict[str, Any] = {}

    def call(worker: Worker, function: str, *args: Any, timeout: float) -> Any:
        assert callable(load_function(function)) and timeout == GpuMachine.start_seconds + GpuMachine.prepare_seconds
        known.setdefault("asked", []).append((worker.name, function.rpartition(":")[2], args))
        time.sleep(0.3)
        answer = known.get(worker.name, Probed({}, {}))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Worker, "call", call)
    packages = {"torch": "2.11.0", "cupy-cuda13x": "14.2.0", "numba-cuda": "0.30.4"}
    monkeypatch.setattr(installed_engines.devices, "find_version", packages.get)
    monkeypatch.setattr("latbench.machines.cuda_libraries.find_version", packages.get)
    known["packages"] = packages
    return known


def test_processes_start_together_and_are_handed_out_once(answers: dict[str, Any]) -> None:
    at = GpuMachine(GPU)
    began = time.monotonic()
    assert at.start(list(GPU_ENGINES)) == {}
    assert time.monotonic() - began < 1.5  # seven processes, 0.3 s each
    first = at.worker("ceilings")
    assert first.name == "ceilings" and at.worker("ceilings") is not first
    asked = {name: (verb, [list(each) for each in args]) for name, verb, args in answers["asked"]}
    assert asked == {
        "torch": ("probe_engines", [["torch_gpu"]]), "torch_sparse": ("probe_engines", [["torch_sparse"]]),
        "cupy_peers": ("probe_engines", [["cublas", "cusparse"]]), "cupy": ("probe_engines", [["cupy"]]),
        "numba_cuda": ("probe_engines", [["numba_cuda"]]),
        "ceilings": ("load_modules", [["latbench.backends.gpu.gpu_reference"]]),
        "reference": ("load_modules", [["latbench.backends.gpu.gpu_reference"]]),
    }  # fmt: skip
    at.close()
    at.close()


def test_a_reference_that_hangs_while_it_starts_is_not_waited_for(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = threading.Event()
    monkeypatch.setattr(gpu_machine, "BUSY_SECONDS", 0.1)
    monkeypatch.setattr(Worker, "kill", lambda worker: killed.set())
    monkeypatch.setattr(GpuMachine, "_load", lambda at, worker: killed.wait(30.0))
    at = GpuMachine(GPU)
    at.start(["torch_gpu"])
    began = time.monotonic()
    assert at.worker("reference").name == "reference"
    assert killed.is_set() and time.monotonic() - began < 10
    at.close()


def test_versions_are_those_that_the_processes_have_loaded(answers: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_machine, "find_library_versions", lambda: {"cublas": "13.0 of the wheel", "nvrtc": None})
    answers["torch"] = Probed({}, {"cublas": "13.1.0.3", "nvrtc": None})
    answers["cupy"] = Probed({}, {"nvrtc": "13.0"}, "sm_90a")
    answers["cupy_peers"] = Probed({}, {"cublas": "13.1.1"})
    at = GpuMachine(GPU)
    before = at.environment()
    assert at.versions.libraries["cublas"] == "13.0 of the wheel"
    at.start(list(GPU_ENGINES))
    assert at.versions.libraries == {"cublas": "13.0 of the wheel", "nvrtc": None, "driver": "580.159.03"}
    assert at.versions.loaded["torch"]["cublas"] == "13.1.0.3" and at.versions.loaded["cupy"]["nvrtc"] == "13.0"
    assert at.versions.architecture == "sm_90a" and at.versions.packages["cupy"] == "14.2.0"
    after = at.environment()
    assert (before["cublas"], after["cublas"]) == ("13.0 of the wheel", "13.1.0.3 and 13.1.1")
    assert (before["nvrtc"], after["nvrtc"]) == (None, "13.0")
    assert before["env_id"] != after["env_id"] and after["device"] == "nvidia-h200"
    at.close()


@pytest.mark.parametrize("capability", ["9.0", "5.2", None])
def test_before_it_is_asked_a_gpu_has_the_kernels_of_its_number(capability: str | None) -> None:
    assert find_architecture(capability) == ("sm_90a" if capability == "9.0" else None)


def test_a_process_that_dies_takes_its_engines_along_and_no_others(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers["cupy_peers"] = WorkerDied("crash", "the cupy_peers worker ended by signal SIGSEGV")
    answers["torch_sparse"] = Probed({"torch_sparse": "Triton is missing"}, {})
    answers["ceilings"] = TaskFailed("ImportError", "no torch", "")
    at = GpuMachine(GPU)
    closed: list[str] = []
    monkeypatch.setattr(Worker, "close", lambda worker: closed.append(worker.name))
    assert at.start(list(GPU_ENGINES)) == {
        "cublas": "the cupy_peers worker ended by signal SIGSEGV",
        "cusparse": "the cupy_peers worker ended by signal SIGSEGV",
        "torch_sparse": "Triton is missing",
    }
    assert set(closed) == {"cupy_peers", "torch_sparse"}  # of no use, and in the way
    at.close()


def test_what_is_made_for_a_newer_driver_is_refused(answers: dict[str, Any], a_gpu: Any) -> None:
    a_gpu.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12040
    refusals = gpu_installation.explain_driver_refusals(GPU, GPU_ENGINES)
    assert set(refusals) == {"cublas", "cusparse", "cupy", "numba_cuda"}
    assert refusals["cupy"] == (
        "the NVIDIA driver 580.159.03 is too old: it runs CUDA 12.4, and cupy-cuda13x needs CUDA 13; install a newer "
        "driver, or make a new environment, and type pip install '.[cuda12]' in a clone of latbench"
    )


@pytest.mark.parametrize(("cuda", "extra"), [(13010, "cuda13"), (12040, "cuda12"), (14000, "cuda13")])
def test_what_is_missing_is_named_with_the_extra_for_the_driver(
    cuda: int, extra: str, answers: dict[str, Any], a_gpu: Any
) -> None:
    a_gpu.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda
    del answers["packages"]["cupy-cuda13x"]
    missing = gpu_installation.explain_missing(GPU)
    said = f"cupy-cuda13x or cupy-cuda12x is not installed: pip install 'latbench[{extra}]'"
    assert missing == dict.fromkeys(("cublas", "cusparse", "cupy", "numba_cuda"), said)
    assert (
        "cupy" not in gpu_installation.find_installed() and gpu_installation.find_installed()["torch_gpu"] == "2.11.0"
    )


@pytest.mark.parametrize(
    ("cuda", "capability", "extra"),
    [("13.0", "9.0", "cuda13"), ("13.0", "7.5", "cuda13"), ("13.0", "7.0", "cuda12"), ("12.8", "9.0", "cuda12"),
     (None, None, "cuda13"), ("13.0", "12.1", "cuda13")],
)  # fmt: skip
def test_the_extra_is_for_the_driver_and_for_the_gpu(cuda: str | None, capability: str | None, extra: str) -> None:
    assert gpu_installation.find_extra(cuda, capability) == extra


def test_a_cupy_that_would_load_another_cudas_libraries_is_refused(answers: dict[str, Any]) -> None:
    answers["packages"] |= {"cupy-cuda13x": None, "cupy-cuda12x": "14.2.0", "nvidia-cublas": "13.1.1.3"}
    refusals = gpu_installation.explain_driver_refusals(GPU, GPU_ENGINES)
    assert set(refusals) == {"cublas", "cusparse", "cupy", "numba_cuda"}
    said = "cupy-cuda12x would load the libraries of CUDA 13, which are installed too (nvidia-cublas)"
    assert said in refusals["cupy"]


def test_workers_see_one_gpu_and_ours_may_crash_alone() -> None:
    at = GpuMachine(Gpu("NVIDIA H200", "GPU-3f2a"))
    assert at.device == "nvidia-h200"
    worker = at.worker("cupy")
    assert worker._environment["CUDA_VISIBLE_DEVICES"] == worker._environment[UUID_VARIABLE] == "GPU-3f2a"
    assert [at.process(name) for name in ("cupy", "numba_cuda", "torch_gpu")] == ["cupy", "numba_cuda", "torch"]
    shared = [name for name in GPU_ENGINES if at.process(name) in ("cupy", "numba_cuda")]
    assert shared == ["cupy", "numba_cuda"]
