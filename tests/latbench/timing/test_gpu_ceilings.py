"""A GPU's ceilings: found on a device that is made up, kept for one GPU at its clocks, and what they rule out."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_fakes
import pytest

from latbench.machines.gpu_names import Gpu
from latbench.runners.worker_process import WorkerDied
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_machine import GpuMachine
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.sweeping.gpu_roofline import GpuPace, choose_units
from latbench.tables.plausibility import explain_too_fast
from latbench.timing import gpu_ceilings
from latbench.timing.gpu_ceilings import ORDINARY, WORKING_SETS, CeilingWork, GpuCeilings, measure_gpu_ceilings
from latbench.timing.sampling import Burst
from latbench.workloads.points import Point
from sparse_kernels.patterns import NM, Dense, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

SHAPE = LinearShape(4096, 4096, 2048)
DENSE = Dense()
DENSE_FLOP = 2 * SHAPE.m * SHAPE.k * SHAPE.n
TENSOR, CORES = 8e14, 6e13
L2, MEMORY = 6e12, 3e12
HELD = 2**25  # bytes that the made up L2 holds
PRODUCT, READS = (
    2.0 * gpu_ceilings.PACE_SIZE**3 / TENSOR,
    gpu_ceilings.PACE_BYTES / MEMORY,
)  # seconds at the usual pace
FOUND = GpuCeilings(
    dict.fromkeys(gpu_ceilings.DTYPES, TENSOR), CORES, {2**20: L2, 2 * HELD: MEMORY}, product_seconds=PRODUCT,
    sum_seconds=READS,
)  # fmt: skip


class FakeWorks:
    """Works of a device whose rates are known: the library's second product is the faster one."""

    def __init__(self, device: Any, dtypes: tuple[str, ...] = gpu_ceilings.DTYPES) -> None:
        self.device, self.dtypes = device, dtypes

    def products(self, dtype: str) -> Iterator[CeilingWork]:
        for rate in (TENSOR / 2, TENSOR) if dtype in self.dtypes else ():
            yield self._work(2.0 * gpu_ceilings.PRODUCT_SIZE**3, rate)

    def pace_product(self) -> CeilingWork:
        return self._work(2.0 * gpu_ceilings.PACE_SIZE**3, TENSOR)

    def multiply_adds(self) -> CeilingWork:
        return self._work(3e10, CORES)

    def reads(self, size: int) -> CeilingWork:
        # The smallest set keeps too few slices of the L2 busy: falling rates do not say so.
        return self._work(float(size), MEMORY if size > HELD else L2 / 3 if size == WORKING_SETS[0] else L2)

    def _work(self, done: float, rate: float) -> CeilingWork:
        return CeilingWork(done, self.device.kernel(done / rate), self.device)


def found(*dtypes: str) -> tuple[GpuCeilings, Any]:
    device = gpu_fakes.FakeDevice(launch=5e-6, tick=5e-7)
    return measure_gpu_ceilings(FakeWorks(device, dtypes), clock=device.clock), device


def test_the_ceilings_of_a_device_are_its_rates() -> None:
    its, device = found(*gpu_ceilings.DTYPES)
    assert its.tensor_flop_per_second == pytest.approx(FOUND.tensor_flop_per_second, rel=0.01)
    assert its.ordinary_flop_per_second == pytest.approx(CORES, rel=0.01)
    expected = {size: MEMORY if size > HELD else L2 for size in WORKING_SETS}
    assert its.read_bytes_per_second == pytest.approx(expected, rel=0.01)
    assert (its.product_seconds, its.sum_seconds) == pytest.approx((PRODUCT, READS), rel=0.01)
    assert device.host < 5.0  # seconds of the device


def test_an_element_type_that_tensor_cores_lack_is_bound_by_ordinary_ones() -> None:
    its, _ = found("float16")
    assert set(its.tensor_flop_per_second) == {"float16"}
    assert its.roofline_seconds(CORES, 0, "bfloat16") == pytest.approx(1.0, rel=0.01)
    assert its.roofline_seconds(TENSOR, 0, "float16") == pytest.approx(1.0, rel=0.01)


# What is possible ---------------------------------------------------------------------------------------------------


class Kept:
    """What is kept, and what is found when it is doubted."""

    def __init__(self, *found: GpuCeilings) -> None:
        self._found = iter(found)

    def get(self) -> GpuCeilings:
        return next(self._found)

    def again(self, doubted: GpuCeilings) -> GpuCeilings:
        return doubted.or_higher(next(self._found))


def least(point: Point, kernel: str = "", density: float = 1.0, size: float = 0.0) -> float:
    """The least seconds for `point` with so many of its weights kept, reading so many bytes."""
    written = 2 * point.shape.m * point.shape.n
    return GpuPace(None, Kept(FOUND)).seconds(point, kernel, density * DENSE_FLOP, size + written)  # type: ignore[arg-type]


def point(kernel: gpu_points.Kernel, pattern: Any = DENSE, shape: Shape = SHAPE) -> Point:
    return build_gpu_point("nvidia-h200", shape, pattern, getattr(pattern, "sparsity", 0.0), kernel)


def test_2_to_4_weights_may_be_twice_as_fast_as_dense_ones_and_not_more() -> None:
    dense_seconds = DENSE_FLOP / TENSOR
    of_sparse = least(point(gpu_points.CUSPARSELT[0], NM(2, 4)), density=0.5)
    assert least(point(gpu_points.DENSE[0])) == pytest.approx(dense_seconds)
    assert explain_too_fast(dense_seconds / 2, of_sparse) is None
    assert explain_too_fast(dense_seconds / 2.6, of_sparse) is not None
    assert explain_too_fast(dense_seconds / 1.3, least(point(gpu_points.DENSE[0]))) is not None


@pytest.mark.parametrize(
    ("kernel", "pattern", "used", "expected"),
    [
        (gpu_points.OURS[0], VectorWise(64), "cuda.vector.sm_80", "float16"),
        (gpu_points.OURS[0], Unstructured(), "cuda.csr.sm_80", ORDINARY),
        (gpu_points.NUMBA[0], VectorWise(64), "numba_cuda.vector", ORDINARY),
        (gpu_points.CSR[0], Unstructured(), "cusparse.csr", "float16"),  # nobody knows what a library uses
    ],
)
def test_only_kernels_known_to_use_no_tensor_cores_are_bound_by_ordinary_ones(
    kernel: gpu_points.Kernel, pattern: Any, used: str, expected: str
) -> None:
    it = point(kernel, pattern)
    assert choose_units(it, used) == expected
    assert least(it, used) == pytest.approx(DENSE_FLOP / (CORES if expected == ORDINARY else TENSOR))
    assert choose_units(replace(it, dtype="bfloat16", dtype_a="bfloat16"), used) == (
        ORDINARY if expected == ORDINARY else "bfloat16"
    )


@pytest.mark.parametrize(("size", "rate"), [(2**10, L2), (HELD, L2), (2 * HELD, MEMORY), (2**40, MEMORY)])
def test_what_is_read_comes_from_the_l2_at_best_and_what_is_written_is_free(size: int, rate: float) -> None:
    assert least(point(gpu_points.DENSE[0]), density=0.0, size=size) == pytest.approx(size / rate)


def test_a_library_may_do_with_fewer_products_where_filters_overlap() -> None:
    wide, narrow = Conv2dShape(16, 64, 14, 14, 64, 3, 3), Conv2dShape(16, 64, 14, 14, 64, 1, 1)
    assert least(point(gpu_points.DENSE_CONV[0], shape=wide), size=L2) == pytest.approx(L2 / MEMORY)  # Winograd
    for it in (point(gpu_points.DENSE_CONV[0], shape=narrow), point(gpu_points.OURS_CONV[0], VectorWise(64), wide)):
        assert least(it) == pytest.approx(DENSE_FLOP / TENSOR)


def test_doubted_ceilings_rise_once_and_never_fall() -> None:
    higher = replace(FOUND, tensor_flop_per_second={"float16": 2 * TENSOR}, ordinary_flop_per_second=CORES / 2)
    roofline = GpuPace(None, Kept(FOUND, higher))  # type: ignore[arg-type]
    assert roofline.doubt() and not roofline.doubt()
    assert roofline.ceilings.tensor_flop_per_second["float16"] == 2 * TENSOR
    assert roofline.ceilings.ordinary_flop_per_second == CORES
    assert roofline.ceilings.read_bytes_per_second == FOUND.read_bytes_per_second


# How fast it is just now --------------------------------------------------------------------------------------------


class Slowing:
    """A reference worker on a GPU whose units fall to half their speed, and whose memory stays as it is."""

    def __init__(self) -> None:
        self.seconds = {"build_product": PRODUCT, "build_sum": READS}

    def prepare(self, function: str, timeout: float) -> Any:
        module, _, name = function.partition(":")
        assert module == "latbench.backends.gpu.gpu_reference" and name in self.seconds
        return name

    def holds(self, prepared: Any) -> bool:
        return True

    def burst(self, prepared: Any, seconds: float, timeout: float) -> Burst:
        return Burst([self.seconds[prepared]] * 3, preempted=False)


@pytest.mark.parametrize(
    ("flop", "size", "slower"), [(1e13, 2**20, 2.0), (1e6, 2**40, 1.0), (TENSOR, MEMORY, math.sqrt(2))]
)
def test_work_is_as_much_slower_as_what_bounds_it(flop: float, size: float, slower: float) -> None:
    worker = Slowing()
    pace = GpuPace(worker, Kept(FOUND))  # type: ignore[arg-type]
    pace.turn()
    quiet = pace.reference([0.0], flop, size)
    assert quiet is not None and quiet.seconds[0] == pytest.approx(quiet.usual_seconds)
    worker.seconds["build_product"] *= 2
    pace = GpuPace(worker, Kept(FOUND))  # type: ignore[arg-type]
    pace.turn()
    found = pace.reference([0.0], flop, size)
    assert found is not None and found.seconds[0] / found.usual_seconds == pytest.approx(slower, rel=0.02)


# What is kept -------------------------------------------------------------------------------------------------------


class FakeWorker:
    """Finds the next of `found` whenever it is asked; None: it dies."""

    def __init__(self, *found: GpuCeilings | None) -> None:
        self.found, self.asked, self.closed = list(found), 0, 0

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed += 1

    def call(self, function: str, timeout: float) -> GpuCeilings:
        assert function == "latbench.backends.gpu.gpu_reference:measure_ceilings" and timeout < 120
        self.asked += 1
        answer = self.found.pop(0)
        if answer is None:
            raise WorkerDied("timeout", "the reference worker gave no answer for 70 s")
        return answer


CLOCKS = {"application_megahertz": 1980, "application_memory_megahertz": 3201}
Paced = Callable[..., GpuPace]


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch, own_lock: Path) -> Paced:
    """The roofline of a new sweep on a GPU that is an H200 but for the settings given."""

    def pace(worker: FakeWorker, **settings: Any) -> GpuPace:
        device = {**gpu_fakes.H200, **CLOCKS, **settings}
        monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(device))
        monkeypatch.setattr(GpuMachine, "worker", lambda machine, process: worker)
        return GpuMachine(Gpu(device["name"], device["uuid"])).pace(lambda: None)

    return pace


def test_ceilings_are_measured_once_a_gpu_and_read_again(paced: Paced, own_lock: Path) -> None:
    worker = FakeWorker(FOUND)
    assert paced(worker).ceilings == paced(worker).ceilings == FOUND
    assert worker.asked == worker.closed == 1  # its memory is others' again
    (path,) = (own_lock / "latbench" / "ceilings").iterdir()
    assert path.name.startswith("nvidia-h200-") and path.name.endswith("-1.json")
    document = json.loads(path.read_text())
    assert document["tensor_flop_per_second"]["float16"] == TENSOR and gpu_fakes.H200["uuid"] not in path.read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"application_megahertz": 1410},
        {"application_memory_megahertz": 1600},
        {"max_sm_megahertz": 1785},
        {"limit_milliwatts": 400_000},
    ],
    ids=str,
)
def test_a_gpu_with_other_clocks_or_another_power_limit_is_measured_again(
    paced: Paced, changed: dict[str, int]
) -> None:
    slower = replace(FOUND, ordinary_flop_per_second=CORES / 2)
    worker = FakeWorker(FOUND, slower)
    paced(worker)
    assert paced(worker, **changed).ceilings == slower and worker.asked == 2


def test_another_gpu_of_the_same_name_has_ceilings_of_its_own(paced: Paced) -> None:
    worker = FakeWorker(FOUND, replace(FOUND, ordinary_flop_per_second=1.0))
    paced(worker)
    assert paced(worker, uuid="GPU-another").ceilings.ordinary_flop_per_second == 1.0
    assert paced(worker).ceilings == FOUND and worker.asked == 2


def test_a_damaged_file_is_measured_again(paced: Paced, own_lock: Path) -> None:
    worker = FakeWorker(FOUND, FOUND)
    paced(worker)
    (path,) = (own_lock / "latbench" / "ceilings").iterdir()
    path.write_text(path.read_text()[:-40])
    assert paced(worker).ceilings == FOUND and worker.asked == 2


def test_a_worker_that_dies_leaves_nothing_behind(paced: Paced, own_lock: Path) -> None:
    worker = FakeWorker(None)
    with pytest.raises(WorkerDied):
        paced(worker)
    assert worker.closed == 2  # as the ceilings' process, and as the reference's
    assert not (own_lock / "latbench" / "ceilings").exists()
