"""What all engines of a GPU share, by one that computes in NumPy; and what each refuses before it needs a GPU."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu_fakes
import numpy as np
import pytest

from latbench.backends.gpu import gpu_layers, prepare_gpu_point
from latbench.backends.gpu.gpu_layers import GpuLayer, round_to
from latbench.backends.gpu.prepare_gpu_point import GpuEngine
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import GPU_ENGINES
from latbench.machines.gpu_discovery import UUID_VARIABLE
from latbench.machines.gpu_names import Gpu
from latbench.runners.worker_process import TaskFailed
from latbench.sweeping import bench, gpu_points
from latbench.sweeping.gpu_machine import GpuMachine
from latbench.sweeping.gpu_points import build_gpu_point, list_standard_blocks
from latbench.tables.schema import FINISHED
from latbench.timing import gpu_events
from latbench.timing.gpu_events import NotCaptured
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, Unstructured, VectorWise
from sparse_kernels.reference import build_patches
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

LINEAR = LinearShape(48, 64, 16)
VECTORS = VectorWise(8)
CONV = Conv2dShape(3, 8, 6, 5, 16, 3, 3, padding=(1, 1))

Corrupt = Callable[[np.ndarray, int], np.ndarray]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine in the place of `cupy`; a test sets how many copies it has and what it does to their results.

    Its calls write into arrays of their own, or, with `fresh`, into a new one whenever they are called.
    """
    device = gpu_fakes.FakeDevice()
    settings = SimpleNamespace(
        copies=3, corrupt=lambda y, copy: y, device=device, capture_fails=False, fresh=False, ran=[], bytes=100
    )
    monkeypatch.setattr(prepare_gpu_point, "OPEN_DRIVERS", [device])

    def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
        shape = point.shape
        if isinstance(shape, Conv2dShape):
            y = (layer.weight @ build_patches(layer.x, shape)).reshape(shape.m, shape.batch, shape.out_h, shape.out_w)
            y = y.swapaxes(0, 1)
        else:
            y = layer.weight @ layer.x
        if settings.capture_fails:
            settings.device.capture = _fails

        def call_of(copy: int) -> Callable[[], np.ndarray]:
            def value() -> np.ndarray:
                settings.ran.append(copy)
                return settings.corrupt(round_to(y.astype(np.float32), point.dtype), copy)

            own = value()

            def call() -> np.ndarray:
                out = np.empty_like(own) if settings.fresh else own
                settings.device.kernel(2e-5, effect=lambda: np.copyto(out, value()))()
                return out

            return call

        calls = [call_of(copy) for copy in range(settings.copies)]
        return GpuEngine("fake", settings.bytes, calls, settings.device, np.float64, np.float64)

    module = ModuleType("fake_gpu_engine")
    module.prepare = prepare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_gpu_engine", module)
    monkeypatch.setitem(GPU_ENGINES, "cupy", dataclasses.replace(GPU_ENGINES["cupy"], module="fake_gpu_engine"))
    return settings


def _fails(work: object) -> None:
    raise RuntimeError("operation failed due to a previous error during capture\nand more")


def point(shape: Shape = LINEAR, pattern: Pattern = VECTORS, sparsity: float = 0.75, dtype: str = "float16") -> Point:
    kernel = gpu_points.OURS_CONV[0] if isinstance(shape, Conv2dShape) else gpu_points.OURS[0]
    return dataclasses.replace(build_gpu_point("nvidia-h200", shape, pattern, sparsity, kernel), dtype=dtype)


@pytest.mark.parametrize("shape", [LINEAR, CONV, LinearShape(5, 7, 3), Conv2dShape(1, 4, 3, 3, 8, 1, 1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_point_is_checked_and_ready_to_be_timed(engine: SimpleNamespace, shape: Shape, dtype: str) -> None:
    timed = prepare_gpu_point.prepare_gpu_point(point(shape, dtype=dtype))
    facts = timed.facts
    assert facts["kernel_used"] == "fake" and 0 <= facts["max_rel_err"] < 2.0**-7
    assert facts["nnz"] == round((1 - facts["sparsity_actual"]) * shape.m * shape.k)
    assert facts["flop_nnz"] == 2 * facts["nnz"] * shape.n
    samples = timed.burst(0.0).samples
    assert samples and np.allclose(samples, 2e-5)


@pytest.mark.parametrize("shape", [LINEAR, CONV])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_result_of_any_copy_is_found(engine: SimpleNamespace, shape: Shape, wrong: int) -> None:
    engine.corrupt = lambda y, copy: y + (copy == wrong) * np.float32(0.5)
    with pytest.raises(WrongResult, match="results are wrong"):
        prepare_gpu_point.prepare_gpu_point(point(shape))


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_checked_is_what_the_graph_computes(engine: SimpleNamespace, fresh: bool) -> None:
    engine.fresh = fresh
    eager = engine.copies * (1 + 1 + 2 * gpu_events.TRIALS)  # enough calls for all that comes before the capture

    def wrong_later(y: np.ndarray, copy: int) -> np.ndarray:
        return y + np.float32(0.5) * (len(engine.ran) > eager)

    engine.corrupt = wrong_later
    with pytest.raises(WrongResult, match="results are wrong"):
        prepare_gpu_point.prepare_gpu_point(point())


@pytest.mark.parametrize("fresh", [False, True])
def test_a_graph_that_computes_nothing_is_found(engine: SimpleNamespace, fresh: bool) -> None:
    engine.fresh = fresh
    capture = engine.device.capture

    def empty(work: Callable[[], object]) -> Callable[[], None]:
        capture(work)
        return capture(lambda: None)  # type: ignore[no-any-return]

    engine.device.capture = empty
    with pytest.raises(WrongResult, match="got nan"):
        prepare_gpu_point.prepare_gpu_point(point())


def test_no_copy_writes_where_another_has_its_result() -> None:
    kept = [prepare_gpu_point.LastResult(lambda: np.zeros(3)) for _ in range(3)]
    for _ in range(2):
        for call in kept:
            call()
    assert len({id(call.last) for call in kept}) == 3


@pytest.mark.parametrize(("weight_bytes", "flags"), [(100, "in_l2"), (2**26, "")])
def test_rows_that_the_cache_may_hold_are_marked(engine: SimpleNamespace, weight_bytes: int, flags: str) -> None:
    engine.bytes = weight_bytes
    assert prepare_gpu_point.prepare_gpu_point(point()).facts["flags"] == flags
    engine.copies = 1
    assert prepare_gpu_point.prepare_gpu_point(dataclasses.replace(point(), cache_mode="warm")).facts["flags"] == ""


def test_copies_may_differ_by_rounding(engine: SimpleNamespace) -> None:
    engine.corrupt = lambda y, copy: y.astype(np.float64) * (1 + copy * 2.0**-24)
    assert prepare_gpu_point.prepare_gpu_point(point()).facts["max_rel_err"] > 0


def test_columns_past_the_first_slice_are_checked(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_gpu_point, "COLUMNS_AT_ONCE", 5)

    def last_column(y: np.ndarray, copy: int) -> np.ndarray:
        y[:, -1] += 1
        return y

    engine.corrupt = last_column
    with pytest.raises(WrongResult, match="results are wrong"):
        prepare_gpu_point.prepare_gpu_point(point())


def test_what_cannot_be_captured_is_an_error_that_a_later_run_tries_again(engine: SimpleNamespace) -> None:
    engine.capture_fails = True
    said = "fake cannot be captured into a CUDA graph: operation failed due to a prev"
    with pytest.raises(NotCaptured, match=said) as caught:
        prepare_gpu_point.prepare_gpu_point(point())
    failure = TaskFailed(type(caught.value).__name__, str(caught.value), "")
    outcome = bench.classify_failure(failure)
    assert outcome["status"] == "error" and outcome["status"] not in FINISHED and said in outcome["error"]


def test_what_leaves_the_gpu_alone_is_done_before_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[Pattern] = []
    packed = gpu_layers.pack
    monkeypatch.setattr(
        gpu_layers, "pack", lambda w, mask, pattern: packs.append(pattern) or packed(w, mask, pattern)
    )
    for kernel, times in (
        (gpu_points.OURS[0], 1),
        (gpu_points.DENSE[0], 0),
        (gpu_points.BSR[0], 1),
        (gpu_points.CUSPARSELT[0], 0),
    ):
        gpu_layers._layer.cache_clear()
        packs.clear()
        wanted = build_gpu_point("x", LINEAR, NM(2, 4), 0.5, kernel)
        prepare_gpu_point.pack_gpu_point(wanted)
        prepare_gpu_point.pack_gpu_point(wanted)
        assert len(packs) == times, kernel
    prepare_gpu_point.pack_gpu_point(
        build_gpu_point("x", LINEAR, BlockWise(64, 64), 0.5, gpu_points.OURS[0])
    )  # refused when it is prepared


def test_a_pattern_that_does_not_fit_is_unsupported(engine: SimpleNamespace) -> None:
    with pytest.raises(Unsupported, match="one block of block:64x64 covers the whole 48x64 layer"):
        prepare_gpu_point.prepare_gpu_point(point(pattern=BlockWise(64, 64)))


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not end: it raises Ended with its exit code."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(prepare_gpu_point.os, "_exit", end)


@pytest.mark.usefixtures("ends")
def test_a_broken_context_ends_the_process(engine: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered\nmore")

    timed = prepare_gpu_point.prepare_gpu_point(point())
    engine.device.wait = broken
    with pytest.raises(Ended, match=str(prepare_gpu_point.BROKEN)):
        timed.burst(0.0)
    assert capsys.readouterr().err == (
        "RuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered\n"
    )


@pytest.mark.usefixtures("ends")
def test_a_library_that_breaks_cuda_before_there_is_a_driver_ends_the_process(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuses(y: np.ndarray, copy: int) -> np.ndarray:
        raise Unsupported("an internal error")

    engine.corrupt = refuses
    monkeypatch.setattr(prepare_gpu_point, "OPEN_DRIVERS", [])
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=broken)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(Ended):
        prepare_gpu_point.prepare_gpu_point(point())


def test_an_error_that_the_context_survives_is_only_an_error(engine: SimpleNamespace) -> None:
    def fails(y: np.ndarray, copy: int) -> np.ndarray:
        raise KeyError("out of something")

    engine.corrupt = fails
    with pytest.raises(KeyError, match="out of something"):
        prepare_gpu_point.prepare_gpu_point(point())


@pytest.mark.usefixtures("ends")
def test_a_context_that_breaks_while_a_point_is_built_ends_the_process(engine: SimpleNamespace) -> None:
    def broken() -> None:
        raise RuntimeError("cudaErrorLaunchFailure")

    def refuses(y: np.ndarray, copy: int) -> np.ndarray:
        raise Unsupported("no such kernel")

    engine.corrupt = refuses
    with pytest.raises(Unsupported):
        prepare_gpu_point.prepare_gpu_point(point())
    engine.device.wait = broken
    with pytest.raises(Ended):
        prepare_gpu_point.prepare_gpu_point(point())


# Each engine, as far as it goes without a GPU ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kernel", "layout", "shape", "pattern", "said"),
    [
        ("torch_gpu", "cublas", "feature_major", LINEAR, VectorWise(8), "multiplies dense weights, not vector:8"),
        ("torch_gpu", "cublas", "nchw", LINEAR, Dense(), "takes token_major or feature_major activations, not nchw"),
        ("torch_sparse", "bsr", "nchw", CONV, BlockWise(8, 8), "torch has no sparse convolutions"),
        ("torch_sparse", "magic", "feature_major", LINEAR, BlockWise(8, 8), "torch has no sparse kernel magic"),
        ("torch_sparse", "bsr", "feature_major", LINEAR, BlockWise(32, 16), "does not divide"),
        ("torch_sparse", "bsr", "feature_major", LinearShape(48, 64, 7), BlockWise(16, 16), "multiples of 16, not 7"),
        ("torch_sparse", "cutlass", "feature_major", LINEAR, NM(1, 4), "multiplies 2:4 weights, not nm:1:4"),
        ("torch_sparse", "cusparselt_tuned", "token_major", LINEAR, NM(2, 4), "takes feature_major"),
        ("torch_sparse", "csr", "feature_major", LINEAR, Unstructured(), "torch has no sparse kernel csr: known are"),
        ("torch_sparse", "torchao", "token_major", LINEAR, NM(2, 4), "torchao's 2:4 kernel multiplies fp8"),
        ("cusparse", "csr", "token_major", LINEAR, Unstructured(), "takes feature_major activations"),
        ("cublas", "matmul", "feature_major", LINEAR, Unstructured(), "multiplies dense weights, not unstructured"),
        ("cusparse", "csr", "feature_major", LINEAR, BlockWise(8, 8), "multiplies unstructured weights"),
        ("cusparse", "coo", "feature_major", LINEAR, Unstructured(), "is asked for csr or bsr here, not coo"),
        ("cupy", "mine", "feature_major", LINEAR, VectorWise(8), "the kernel is auto, not mine"),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_do_is_a_sentence(
    backend: str, kernel: str, layout: str, shape: Shape, pattern: Pattern, said: str
) -> None:
    if backend in ("cublas", "cusparse", "cupy"):
        pytest.importorskip("cupy")
    sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.0 if isinstance(pattern, Dense) else 0.5
    with pytest.raises(Unsupported, match=said):
        prepare_gpu_point.prepare_gpu_point(build_gpu_point("x", shape, pattern, sparsity, (backend, kernel, layout)))


@pytest.mark.parametrize("backend", GPU_ENGINES)
def test_kernels_of_16_bits_are_not_timed_as_if_they_read_bytes(backend: str) -> None:
    wanted = build_gpu_point("x", LINEAR, NM(2, 4), 0.5, (backend, "auto", "token_major"), precision="fp8")
    with pytest.raises(Unsupported, match=f"{backend} auto has no kernel for fp8"):
        prepare_gpu_point.prepare_gpu_point(wanted)


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("n", [64, 128, 2048, 192, 16])
def test_parameters_of_the_triton_kernel_cut_the_tokens_into_powers_of_two(rows: int, n: int) -> None:
    from latbench.backends.gpu.torch_sparse import list_parameters

    first, *others = list_parameters(rows, n)
    assert first is None  # what torch chooses
    assert len(others) <= 9 and (others or n == 16)
    for meta in others:
        assert meta is not None and n % meta["SPLIT_N"] == 0
        assert n // meta["SPLIT_N"] in (64, 128, 256)


class Times:
    """The seconds that candidates take, or what they raise; a clock that goes on by a second with each."""

    def __init__(self, *results: float | Exception) -> None:
        self.results, self.tried = results, []  # type: ignore[var-annotated]

    def __call__(self, candidate: int) -> float:
        self.tried.append(candidate)
        result = self.results[candidate]
        if isinstance(result, Exception):
            raise result
        return result

    def clock(self) -> float:
        return float(len(self.tried))


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ((3.0, 1.0, 2.0), 1),
        ((1.0, 3.0, 2.0), 0),
        ((RuntimeError("out of shared memory"), 3.0, 2.0), 2),
        ((2.0, ValueError("no such warps"), float("nan")), 0),
    ],
)
def test_the_fastest_candidate_wins_and_refusals_are_passed_over(results: Any, best: int) -> None:
    from latbench.timing.fastest_candidate import find_fastest

    assert find_fastest(range(3), Times(*results), limit=99.0, clock=lambda: 0.0) == best


def test_a_search_ends_in_time_and_always_with_a_candidate() -> None:
    from latbench.timing.fastest_candidate import find_fastest

    for limit, tried in ((-1.0, [0]), (1.5, [0, 1]), (9.0, [0, 1, 2])):
        times = Times(2.0, 1.0, 3.0)
        assert find_fastest(range(3), times, limit=limit, clock=times.clock) == min(1, len(tried) - 1)
        assert times.tried == tried
    with pytest.raises(RuntimeError, match="the first"):
        find_fastest(range(2), Times(RuntimeError("the first"), RuntimeError("the second")), limit=9.0)


def test_what_a_library_refuses_is_unsupported_in_its_own_words() -> None:
    from latbench.backends.gpu.torch_sparse import _try

    def refuses() -> None:
        raise RuntimeError("Supported only on GPUs with compute capability 8.x")

    it = build_gpu_point("x", LINEAR, NM(2, 4), 0.5, gpu_points.CUTLASS[0])
    with pytest.raises(Unsupported, match=r"^torch cutlass: Supported only on GPUs with compute capability 8\.x$"):
        _try(it, refuses)
    assert _try(it, lambda: 3) == 3


def test_memory_that_runs_out_says_nothing_of_what_torch_supports() -> None:
    import torch

    from latbench.backends.gpu.torch_sparse import _try

    def runs_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        _try(build_gpu_point("x", LINEAR, NM(2, 4), 0.5, gpu_points.CUTLASS[0]), runs_out)
    assert bench.classify_failure(TaskFailed("OutOfMemoryError", "CUDA out of memory", ""))["status"] == "oom"


def test_every_backend_of_the_plan_has_a_module() -> None:
    planned = {each.backend for block in list_standard_blocks("x") for each in block}
    assert planned == set(GPU_ENGINES)
    root = Path(prepare_gpu_point.__file__).parent
    for backend in GPU_ENGINES.values():
        assert (root / f"{backend.module.rpartition('.')[2]}.py").is_file()


def test_workers_see_one_gpu_and_ours_may_crash_alone() -> None:
    machine = GpuMachine(Gpu("NVIDIA H200", "GPU-3f2a"))
    assert machine.device == "nvidia-h200"
    worker = machine.worker("cupy")
    assert worker._environment["CUDA_VISIBLE_DEVICES"] == worker._environment[UUID_VARIABLE] == "GPU-3f2a"
    shared = [name for name in GPU_ENGINES if machine.process(name) in ("cupy", "numba_cuda")]
    assert shared == ["cupy", "numba_cuda"]


def test_memory_of_a_point_covers_its_copies() -> None:
    machine = GpuMachine(Gpu("NVIDIA H200", "GPU-3f2a"))
    small, large = point(LinearShape(64, 64, 64)), point(LinearShape(11008, 4096, 8192))
    each = 2 * 64 * 64 * 0.25 + 2 * 64 * 128
    assert machine.needed_bytes(small) == 512 * each
    assert machine.needed_bytes(dataclasses.replace(small, launch_mode="call")) == 64 * each
    assert machine.needed_bytes(large) >= 2 * (2 * 11008 * 4096 * 0.25 + 2 * 8192 * (11008 + 4096))
