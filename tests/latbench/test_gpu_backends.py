"""What all engines of a GPU share, by one that computes in NumPy; and what each refuses before it needs a GPU."""

import dataclasses
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from latbench import gpu_plan
from latbench.backends import Unsupported, gpu
from latbench.backends.gpu import GpuEngine
from latbench.devices import Gpu
from latbench.gpu_layers import GpuLayer, rounded
from latbench.gpu_machine import GpuMachine
from latbench.plan import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, Unstructured, VectorWise
from sparse_kernels.reference import patches
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

fakes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gpu_fakes.py"))))

LINEAR = LinearShape(48, 64, 16)
VECTORS = VectorWise(8)
CONV = Conv2dShape(3, 8, 6, 5, 16, 3, 3, padding=(1, 1))

Corrupt = Callable[[np.ndarray, int], np.ndarray]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine in the place of `cupy`; a test sets how many copies it has and what it does to their results."""
    settings = SimpleNamespace(copies=3, corrupt=lambda y, copy: y, device=fakes.FakeDevice(), capture_fails=False)

    def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
        shape = point.shape
        if isinstance(shape, Conv2dShape):
            y = (layer.weight @ patches(layer.x, shape)).reshape(shape.m, shape.batch, shape.out_h, shape.out_w)
            y = y.swapaxes(0, 1)
        else:
            y = layer.weight @ layer.x
        results = [
            settings.corrupt(rounded(y.astype(np.float32), point.dtype), copy) for copy in range(settings.copies)
        ]
        if settings.capture_fails:
            settings.device.capture = _fails
        kernel = settings.device.kernel(2e-5)
        calls = [_call(kernel, result) for result in results]
        return GpuEngine("fake", 100, calls, settings.device, np.float64, np.float64)

    module = ModuleType("fake_gpu_engine")
    module.prepare = prepare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_gpu_engine", module)
    monkeypatch.setitem(gpu.BACKENDS, "cupy", dataclasses.replace(gpu.BACKENDS["cupy"], module="fake_gpu_engine"))
    return settings


def _call(kernel: Callable[[], None], result: np.ndarray) -> Callable[[], np.ndarray]:
    def call() -> np.ndarray:
        kernel()
        return result

    return call


def _fails(work: object) -> None:
    raise RuntimeError("operation failed due to a previous error during capture\nand more")


def point(shape: Shape = LINEAR, pattern: Pattern = VECTORS, sparsity: float = 0.75, dtype: str = "float16") -> Point:
    kernel = gpu_plan.OURS_CONV[0] if isinstance(shape, Conv2dShape) else gpu_plan.OURS[0]
    return dataclasses.replace(gpu_plan.point("nvidia-h200", shape, pattern, sparsity, kernel), dtype=dtype)


@pytest.mark.parametrize("shape", [LINEAR, CONV, LinearShape(5, 7, 3), Conv2dShape(1, 4, 3, 3, 8, 1, 1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_point_is_checked_and_ready_to_be_timed(engine: SimpleNamespace, shape: Shape, dtype: str) -> None:
    timed = gpu.prepare(point(shape, dtype=dtype))
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
        gpu.prepare(point(shape))


def test_copies_may_differ_by_rounding(engine: SimpleNamespace) -> None:
    engine.corrupt = lambda y, copy: y.astype(np.float64) * (1 + copy * 2.0**-24)
    assert gpu.prepare(point()).facts["max_rel_err"] > 0


def test_columns_past_the_first_slice_are_checked(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "COLUMNS_AT_ONCE", 5)

    def last_column(y: np.ndarray, copy: int) -> np.ndarray:
        y[:, -1] += 1
        return y

    engine.corrupt = last_column
    with pytest.raises(WrongResult, match="results are wrong"):
        gpu.prepare(point())


def test_what_cannot_be_captured_is_unsupported_with_the_reason(engine: SimpleNamespace) -> None:
    engine.capture_fails = True
    with pytest.raises(
        Unsupported, match="fake cannot be captured into a CUDA graph: operation failed due to a prev"
    ):
        gpu.prepare(point())


def test_a_pattern_that_does_not_fit_is_unsupported(engine: SimpleNamespace) -> None:
    with pytest.raises(Unsupported, match="one block of block:64x64 covers the whole 48x64 layer"):
        gpu.prepare(point(pattern=BlockWise(64, 64)))


class Ended(BaseException):
    """In place of the end of the process."""


def test_a_broken_context_ends_the_process(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    def broken() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(gpu.os, "_exit", end)
    timed = gpu.prepare(point())
    engine.device.wait = broken
    with pytest.raises(Ended, match=str(gpu.BROKEN)):
        timed.burst(0.0)
    assert capsys.readouterr().err == (
        "RuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered\n"
    )


def test_an_error_that_the_context_survives_is_only_an_error(engine: SimpleNamespace) -> None:
    def fails(y: np.ndarray, copy: int) -> np.ndarray:
        raise RuntimeError("out of something")

    engine.corrupt = fails
    with pytest.raises(RuntimeError, match="out of something"):
        gpu.prepare(point())


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
        ("torch_sparse", "csr", "token_major", LINEAR, Unstructured(), "takes feature_major activations"),
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
        gpu.prepare(gpu_plan.point("x", shape, pattern, sparsity, (backend, kernel, layout)))


def test_parameters_of_the_triton_kernel_step_to_valid_neighbours() -> None:
    from latbench.backends.torch_sparse import stepped

    assert [stepped("num_warps", v, d, n=96, rows=16) for v, d in ((4, 1), (4, -1), (1, -1))] == [8, 2, 1]
    assert [stepped("num_stages", v, d, n=96, rows=16) for v, d in ((1, 1), (1, -1), (3, -1))] == [2, 1, 2]
    for value in (1, 2, 3, 6):
        for direction in (-1, 1):
            split = stepped("SPLIT_N", value, direction, n=96, rows=16)
            assert 96 % split == 0 and 1 <= split <= 6
    assert stepped("SPLIT_N", 4, 1, n=96, rows=16) == 6 or 96 % stepped("SPLIT_N", 4, 1, n=96, rows=16) == 0


def test_a_version_of_ours_changes_with_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    monkeypatch.setattr(gpu.sparse_kernels, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpu.devices, "version", lambda package: "14.2.0" if package == "cupy-cuda12x" else None)
    versions = []
    for name, text in (("a.cu", "1"), ("a.cu", "2"), ("b.py", "2"), ("notes.md", "x")):
        (folder / name).write_text(text)
        gpu.digest.cache_clear()
        versions.append(gpu.BACKENDS["cupy"].version())
    gpu.digest.cache_clear()
    assert len(set(versions)) == 3 and versions[2] == versions[3]  # prose is no source
    assert all(str(version).startswith("14.2.0+") for version in versions)
    monkeypatch.setattr(gpu.devices, "version", lambda package: None)
    assert gpu.BACKENDS["cupy"].version() is None and gpu.BACKENDS["torch_gpu"].version() is None


def test_every_backend_of_the_plan_has_a_module() -> None:
    assert set(gpu_plan.BACKENDS) == set(gpu.BACKENDS)
    root = Path(gpu.__file__).parent
    for backend in gpu.BACKENDS.values():
        assert (root / f"{backend.module.rpartition('.')[2]}.py").is_file()


def test_workers_see_one_gpu_and_ours_may_crash_alone() -> None:
    machine = GpuMachine(Gpu("NVIDIA H200", "GPU-3f2a"))
    assert machine.device == "nvidia-h200"
    worker = machine.worker("cupy")
    assert worker._environment["CUDA_VISIBLE_DEVICES"] == worker._environment[gpu.UUID] == "GPU-3f2a"
    shared = [name for name in gpu.BACKENDS if machine.process(name) in ("cupy", "numba_cuda")]
    assert shared == ["cupy", "numba_cuda"]


def test_memory_of_a_point_covers_its_copies() -> None:
    machine = GpuMachine(Gpu("NVIDIA H200", "GPU-3f2a"))
    small, large = point(LinearShape(64, 64, 64)), point(LinearShape(11008, 4096, 8192))
    assert machine.needed_bytes(small) == 64 * (2 * 64 * 64 * 0.25 + 2 * 64 * 128)
    assert machine.needed_bytes(large) == 2 * (2 * 11008 * 4096 * 0.25 + 2 * 8192 * (11008 + 4096))
