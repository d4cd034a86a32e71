"""On a GPU: what every backend computes there, and that what is timed has plausible times. Run by `make gpu`."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from latbench import devices, gpu_plan
from latbench.backends import Unsupported, gpu
from latbench.gpu_machine import installed
from latbench.gpu_timing import Mode, prepare
from latbench.plan import Point
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # of libraries that are not ours

PATTERNS = (
    Dense(), VectorWise(128), VectorWise(64), VectorWise(32), VectorWise(16), ShflBW(128), ShflBW(64), ShflBW(32),
    BlockWise(64, 64), BlockWise(128, 64), NM(2, 4), NM(1, 4), Unstructured(),
)  # fmt: skip
LINEAR = (LinearShape(256, 512, 256), LinearShape(128, 64, 8), LinearShape(391, 517, 129), LinearShape(130, 70, 1))
CONVOLUTIONS = (
    Conv2dShape(16, 64, 14, 14, 128, 3, 3, padding=(1, 1)),
    Conv2dShape(3, 32, 9, 7, 70, 3, 3, stride=(2, 2), padding=(1, 1)),
    Conv2dShape(8, 64, 7, 7, 96, 1, 1),
)


@pytest.fixture(scope="module", autouse=True)
def this_gpu() -> Iterator[None]:
    """Skips where there is none; watches the one there is."""
    found, reason = devices.gpus()
    if not found:
        pytest.skip(reason)
    before = os.environ.get(gpu.UUID)
    os.environ[gpu.UUID] = found[0].uuid
    yield
    if before is None:
        del os.environ[gpu.UUID]


def computed(shape: Shape, pattern: Pattern, kernel: gpu_plan.Kernel, dtype: str = "float16") -> float:
    """The largest error of what a kernel computes; skips what it does not do, raises where it is wrong."""
    backend, name, layout = kernel
    if backend not in installed():
        pytest.skip(f"{backend} is not installed")
    sparsity = 0.0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else 0.8
    point = Point(
        "gpu", backend, name, shape, pattern, sparsity, threads=1, epilogue="none",
        cache_mode="warm", launch_mode="call", dtype=dtype, layout=layout,
    )  # fmt: skip
    try:
        return float(gpu.prepare(point).facts["max_rel_err"])
    except Unsupported as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_our_linear_kernels_are_right(pattern: Pattern, shape: Shape, dtype: str) -> None:
    assert 0 <= computed(shape, pattern, gpu_plan.OURS[0], dtype) < 2.0**-7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_our_convolutions_are_right(pattern: Pattern, shape: Shape, dtype: str) -> None:
    assert 0 <= computed(shape, pattern, gpu_plan.OURS_CONV[0], dtype) < 2.0**-7


@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_numbas_linear_kernels_are_right(pattern: Pattern, shape: Shape) -> None:
    assert 0 <= computed(shape, pattern, gpu_plan.NUMBA[0]) < 2.0**-10


@pytest.mark.parametrize("kernel", [*gpu_plan.DENSE, *gpu_plan.DENSE_AGAIN], ids="-".join)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_the_dense_baseline_is_right(kernel: gpu_plan.Kernel, shape: Shape) -> None:
    assert 0 <= computed(shape, Dense(), kernel) < 2.0**-10


PEERS = [
    *((NM(2, 4), kernel) for kernel in gpu_plan.SEMI_STRUCTURED),
    *((BlockWise(64, 64), kernel) for kernel in (*gpu_plan.BSR, *gpu_plan.BSR_TUNED)),
    *((Unstructured(), kernel) for kernel in gpu_plan.CSR),
]


@pytest.mark.parametrize(
    ("pattern", "kernel"), PEERS, ids=lambda it: "-".join(it) if isinstance(it, tuple) else str(it)
)
def test_the_sparse_peers_are_right(pattern: Pattern, kernel: gpu_plan.Kernel) -> None:
    assert 0 <= computed(LinearShape(256, 512, 256), pattern, kernel) < 2.0**-10


@pytest.mark.parametrize("kernel", gpu_plan.DENSE_CONV, ids="-".join)
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_the_dense_convolutions_are_right(kernel: gpu_plan.Kernel, shape: Shape) -> None:
    assert 0 <= computed(shape, Dense(), kernel) < 2.0**-10


def test_times_grow_with_the_work_and_agree_between_modes() -> None:
    pytest.importorskip("torch")
    import torch

    from latbench.gpu_drivers import torch_driver

    driver = torch_driver()
    medians = {}
    for size in (2048, 4096):
        a = torch.randn(size, size, dtype=torch.float16, device="cuda")
        b = torch.empty_like(a)
        calls = [lambda a=a, b=b: torch.mm(a, a, out=b)]
        for mode in (Mode("warm", "call"), Mode("warm", "graph"), Mode("rotated", "graph")):
            timer = prepare(calls, driver, mode, facts={})
            medians[size, mode] = float(np.median(timer.burst(0.05).samples))
    for mode in {mode for _, mode in medians}:
        assert 4 < medians[4096, mode] / medians[2048, mode] < 16  # eight times the work
    for size in (2048, 4096):
        of_size = [seconds for (each, _), seconds in medians.items() if each == size]
        assert max(of_size) < 1.3 * min(of_size)


def test_cold_calls_are_slower_than_warm_ones() -> None:
    torch = pytest.importorskip("torch")
    from latbench.gpu_drivers import torch_driver

    x = torch.randn(2048, 2048, dtype=torch.float16, device="cuda")  # 8 MB: lies in the L2 of a large GPU
    y = torch.empty_like(x)
    if torch.cuda.get_device_properties(0).L2_cache_size < 3 * x.numel() * 2:
        pytest.skip("the L2 of this GPU does not hold what is read")
    driver = torch_driver()
    cold, warm = (
        float(np.median(prepare([lambda: torch.add(x, x, out=y)], driver, mode, facts={}).burst(0.05).samples))
        for mode in (Mode("cold", "call"), Mode("warm", "call"))
    )
    assert cold > 1.2 * warm
