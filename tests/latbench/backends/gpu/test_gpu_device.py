"""On a GPU: what every backend computes there, and that what is timed has plausible times. Run by `make gpu`.

Every point is prepared as a sweep does it, in a worker process: a kernel that crashes or hangs costs one test.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from latbench.backends.gpu.gpu_installation import find_installed
from latbench.machines.gpu_discovery import list_gpus
from latbench.runners.worker_process import START_SECONDS, PreparedTask, TaskFailed, Worker
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_machine import GpuMachine
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.sweeping.roofline_pace import READING_SECONDS, SLOW_SPELL
from latbench.tables.plausibility import explain_too_fast
from latbench.timing.gpu_ceilings import WORKING_SETS
from latbench.timing.gpu_events import TimingMode
from latbench.workloads.points import Point
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # of libraries that are not ours

SECONDS = 40.0  # for a point

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


class Workers:
    """The processes that a sweep on this GPU would have."""

    def __init__(self, machine: GpuMachine) -> None:
        self.machine = machine
        self._workers: dict[str, Worker] = {}

    def worker(self, point: Point) -> Worker:
        process = self.machine.process(point.backend)
        if process not in self._workers:
            self._workers[process] = self.machine.worker(process)
        return self._workers[process]

    def prepare(self, point: Point) -> PreparedTask:
        """The point, ready to be timed; skips what its backend does not do, raises where it is wrong."""
        if point.backend not in find_installed():
            pytest.skip(f"{point.backend} is not installed")
        worker = self.worker(point)
        seconds = SECONDS + (0 if worker.generation else START_SECONDS)
        try:
            return worker.prepare(self.machine.task, point, timeout=seconds)
        except TaskFailed as failure:
            if failure.kind == "Unsupported":
                pytest.skip(failure.message)
            raise

    def median(self, point: Point) -> float:
        """The median of its times, in seconds."""
        prepared, worker = self.prepare(point), self.worker(point)
        samples = worker.sample(prepared, 0.05, timeout=SECONDS)
        worker.drop([prepared])
        return float(np.median(samples))

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Skips where there is no GPU."""
    found, reason = list_gpus()
    if not found:
        pytest.skip(reason)
    started = Workers(GpuMachine(found[0]))
    yield started
    started.close()


def computed(
    workers: Workers, shape: Shape, pattern: Pattern, kernel: gpu_points.Kernel, dtype: str = "float16"
) -> float:
    """The largest error of what a kernel computes."""
    sparsity = 0.0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else 0.8
    point = build_gpu_point("gpu", shape, pattern, sparsity, kernel, precision=dtype)
    point = dataclasses.replace(point, cache_mode="warm")
    prepared = workers.prepare(point)
    workers.worker(point).drop([prepared])
    return float(prepared.facts["max_rel_err"])


# What tells most comes first: there may be no time for all. Of several decorators the lowest varies slowest.


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_our_linear_kernels_are_right(workers: Workers, pattern: Pattern, shape: Shape, dtype: str) -> None:
    assert 0 <= computed(workers, shape, pattern, gpu_points.OURS[0], dtype) < 2.0**-7


@pytest.mark.parametrize("kernel", [*gpu_points.DENSE, *gpu_points.DENSE_AGAIN], ids="-".join)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_the_dense_baseline_is_right(workers: Workers, kernel: gpu_points.Kernel, shape: Shape) -> None:
    assert 0 <= computed(workers, shape, Dense(), kernel) < 2.0**-8


@pytest.mark.parametrize("kernel", [*gpu_points.DENSE_TURNED, *gpu_points.DENSE_SEARCHED], ids="-".join)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_order_of_dense_operands_is_right(
    workers: Workers, kernel: gpu_points.Kernel, shape: Shape, dtype: str
) -> None:
    assert 0 <= computed(workers, shape, Dense(), kernel, dtype) < 2.0**-7


BYTES = [
    *(("fp8", kernel) for kernel in gpu_points.DENSE_FP8), *(("int8", kernel) for kernel in gpu_points.DENSE_INT8),
    *(("int4", kernel) for kernel in gpu_points.DENSE_INT4),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "kernel"), BYTES, ids=lambda it: it if isinstance(it, str) else "-".join(it))
@pytest.mark.parametrize("n", [1, 8, 16, 64, 512])
def test_dense_layers_of_bytes_are_right(workers: Workers, dtype: str, kernel: gpu_points.Kernel, n: int) -> None:
    assert 0 <= computed(workers, LinearShape(1024, 4096, n), Dense(), kernel, dtype) < 2.0**-7


SPARSE_BYTES = [
    *(("fp8", kernel) for kernel in (*gpu_points.CUSPARSELT_BYTES, *gpu_points.TORCHAO)),
    *(("int8", kernel) for kernel in gpu_points.CUSPARSELT_BYTES),
]


@pytest.mark.parametrize(
    ("dtype", "kernel"), SPARSE_BYTES, ids=lambda it: it if isinstance(it, str) else "-".join(it)
)
@pytest.mark.parametrize("n", [16, 512])
def test_2_to_4_layers_of_bytes_are_right(workers: Workers, dtype: str, kernel: gpu_points.Kernel, n: int) -> None:
    assert 0 <= computed(workers, LinearShape(1024, 4096, n), NM(2, 4), kernel, dtype) < 2.0**-7


PEERS = [
    *((NM(2, 4), kernel) for kernel in (*gpu_points.CUSPARSELT, *gpu_points.CUTLASS)),
    *((BlockWise(64, 64), kernel) for kernel in (*gpu_points.BSR, *gpu_points.BSR_TUNED)),
    *((Unstructured(), kernel) for kernel in gpu_points.CSR),
]


@pytest.mark.parametrize(
    ("pattern", "kernel"), PEERS, ids=lambda it: "-".join(it) if isinstance(it, tuple) else str(it)
)
def test_the_sparse_peers_are_right(workers: Workers, pattern: Pattern, kernel: gpu_points.Kernel) -> None:
    assert 0 <= computed(workers, LinearShape(256, 512, 256), pattern, kernel) < 2.0**-10


def test_points_that_are_ready_together_are_sampled_in_turn(workers: Workers) -> None:
    # As in a sweep's block. What one of them reads must not have become another's memory: kernels that read the rows
    # of x from their own arrays would follow whatever was written there.
    patterns = (Dense(), VectorWise(64), VectorWise(128), ShflBW(64), NM(2, 4))
    wanted = [
        build_gpu_point("gpu", LinearShape(512, 1024, n), pattern, 0.0 if isinstance(pattern, Dense) else 0.5, kernel)
        for n in (256, 512)
        for pattern in patterns
        for kernel in ((*gpu_points.OURS, *gpu_points.DENSE) if isinstance(pattern, Dense) else gpu_points.OURS)
    ]
    ready = [(workers.worker(point), workers.prepare(point)) for point in wanted]
    for _ in range(3):
        for worker, prepared in ready:
            assert min(worker.sample(prepared, 0.01, timeout=SECONDS)) > 0
    for worker, prepared in ready:
        worker.drop([prepared])


def dense(size: int, cache: str, launch: str, n: int | None = None) -> Point:
    point = build_gpu_point("gpu", LinearShape(size, size, n or size), Dense(), 0.0, gpu_points.DENSE[0])
    return dataclasses.replace(point, cache_mode=cache, launch_mode=launch)


@pytest.mark.timed
def test_times_grow_with_the_work_and_agree_between_modes(workers: Workers) -> None:
    modes = (TimingMode("warm", "call"), TimingMode("warm", "graph"), TimingMode("rotated", "graph"))
    medians = {
        (size, mode): workers.median(dense(size, mode.cache, mode.launch)) for size in (2048, 4096) for mode in modes
    }
    for mode in modes:
        assert 4 < medians[4096, mode] / medians[2048, mode] < 16  # eight times the work
    for size in (2048, 4096):
        of_size = [medians[size, mode] for mode in modes]
        assert max(of_size) < 1.3 * min(of_size)


@pytest.mark.timed
def test_cold_calls_are_slower_than_warm_ones(workers: Workers) -> None:
    # 13 MB of weights, for so few tokens that reading them is all the work.
    both = [dense(2560, cache, "call", n=8) for cache in ("cold", "warm")]
    if workers.prepare(both[0]).facts["l2_flush_bytes"] < 2 * 2 * 2560**2 * 2:
        pytest.skip("the L2 of this GPU does not hold what is read")
    cold, warm = map(workers.median, both)
    assert cold > warm


@pytest.mark.timed
def test_the_ceilings_are_in_order(workers: Workers) -> None:
    with workers.machine.worker("reference") as worker:
        found = worker.call("latbench.backends.gpu.gpu_reference:measure_ceilings", timeout=START_SECONDS + SECONDS)
    assert found.tensor_flop_per_second["float16"] > found.ordinary_flop_per_second > 1e11
    rates = [found.read_bytes_per_second[size] for size in WORKING_SETS]
    assert rates == sorted(rates, reverse=True) and rates[0] > 1.2 * rates[-1] > 1e10  # from the L2, and past it
    large = workers.median(dense(4096, "warm", "graph"))
    assert explain_too_fast(large, found.roofline_seconds(2 * 4096**3, 0, "float16")) is None


@pytest.mark.timed
def test_fixed_work_of_a_sweep_takes_what_it_took_when_the_ceilings_were_found(workers: Workers) -> None:
    with workers.machine.worker("reference") as worker:
        found = worker.call("latbench.backends.gpu.gpu_reference:measure_ceilings", timeout=START_SECONDS + SECONDS)
        for name, usual in (("build_product", found.product_seconds), ("build_sum", found.sum_seconds)):
            prepared = worker.prepare(f"latbench.backends.gpu.gpu_reference:{name}")
            assert np.median(worker.sample(prepared, READING_SECONDS)) == pytest.approx(usual, rel=SLOW_SPELL - 1)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_our_convolutions_are_right(workers: Workers, pattern: Pattern, shape: Shape, dtype: str) -> None:
    assert 0 <= computed(workers, shape, pattern, gpu_points.OURS_CONV[0], dtype) < 2.0**-7


@pytest.mark.parametrize("kernel", gpu_points.DENSE_CONV, ids="-".join)
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_the_dense_convolutions_are_right(workers: Workers, kernel: gpu_points.Kernel, shape: Shape) -> None:
    assert 0 <= computed(workers, shape, Dense(), kernel) < 2.0**-8


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_numbas_linear_kernels_are_right(workers: Workers, pattern: Pattern, shape: Shape) -> None:
    assert 0 <= computed(workers, shape, pattern, gpu_points.NUMBA[0]) < 2.0**-10
