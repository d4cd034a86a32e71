"""Performance ceilings of a GPU: operations a second of tensor cores and ordinary cores, bytes read a second.

This is the roofline of `latbench.machines.ceilings` for a device with two kinds of units. The rate of tensor cores is
that of a library's large dense products. The factors are zeros, which take the least power, so that the clocks stay
up. The rate of ordinary cores is that of chains of float32 multiply-adds. Every kernel has to sum in float32, or its
result would be refused. Only the operations of kept weights count. So 2:4 weights may be twice as fast as the same
layer dense, as sparse tensor cores are.

Bytes come from working sets of rising size, from the L2 on, because no kernel finds its data in the first-level
caches. Writes overlap with reads and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from latbench.base.engine_registry import BFLOAT16, FLOAT16, FP8, INT8
from latbench.machines.ceilings import (
    bound_memory_seconds,
    make_non_increasing,
    take_higher_rates,
    weigh_reference_seconds,
)
from latbench.timing.gpu_events import Call, Driver, EventTimer, TimingMode, build_event_timer
from latbench.timing.sampling import Clock

ORDINARY = "ordinary"  # units of a kernel that uses no tensor cores
DTYPES = (FLOAT16, BFLOAT16, FP8, INT8)
WORKING_SETS = tuple(2**power for power in range(20, 30))  # bytes: the largest passes any L2 four times

PRODUCT_SIZE = 8192  # rows and columns: many tiles for each multiprocessor
PACE_SIZE = 4096  # some hundred microseconds; the matrices fit permanently on a small GPU
PACE_BYTES = 2**28  # no L2 holds half of it
WARM_UP_SECONDS = 0.2  # clocks rise when there is something to do
_SECONDS = 0.04  # of sampling for each rate


@dataclass(frozen=True)
class GpuCeilings:
    """The ceilings of one GPU at its present clocks.

    Parameters
    ----------
    tensor_flop_per_second
        By element type, without those that its tensor cores lack.
    ordinary_flop_per_second
        Float32 operations a second on ordinary cores.
    read_bytes_per_second
        By size of the working set in bytes; sizes rise.
    product_seconds, sum_seconds
        Usual times of a sweep's reference kernels.
    """

    tensor_flop_per_second: dict[str, float]
    ordinary_flop_per_second: float
    read_bytes_per_second: dict[int, float]
    product_seconds: float
    sum_seconds: float

    def roofline_seconds(self, flop: float, size: float, units: str) -> float:
        """Return the shortest time for so many operations on so many bytes.

        `units` is the element type that tensor cores may multiply, or ORDINARY.
        """
        rate = max(self.ordinary_flop_per_second, self.tensor_flop_per_second.get(units, 0.0))
        return max(flop / rate, bound_memory_seconds(self.read_bytes_per_second, size))

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """Return both reference times as one (`CeilingsWithPace`).

        All units share one clock, so work on ordinary cores is weighed as work on tensor cores in float16.
        """
        compute = flop / max(self.ordinary_flop_per_second, self.tensor_flop_per_second.get(FLOAT16, 0.0))
        return weigh_reference_seconds(
            product_seconds, sum_seconds, compute, bound_memory_seconds(self.read_bytes_per_second, size)
        )

    def or_higher(self, other: GpuCeilings) -> GpuCeilings:
        """Return the higher rates and the shorter usual times of two measurements."""
        return GpuCeilings(
            take_higher_rates(self.tensor_flop_per_second, other.tensor_flop_per_second),
            max(self.ordinary_flop_per_second, other.ordinary_flop_per_second),
            take_higher_rates(self.read_bytes_per_second, other.read_bytes_per_second),
            min(self.product_seconds, other.product_seconds),
            min(self.sum_seconds, other.sum_seconds),
        )


@dataclass(frozen=True)
class CeilingWork:
    """A call with so many operations or read bytes (`done`), and the driver that times it."""

    done: float
    call: Call
    driver: Driver


class CeilingWorks(Protocol):
    """The pieces of work that measure the ceilings of a GPU."""

    def products(self, dtype: str) -> Iterable[CeilingWork]:
        """Return large dense products by a library; none where the tensor cores lack the element type."""

    def pace_product(self) -> CeilingWork:
        """Return a dense product of float16 matrices of PACE_SIZE rows and columns."""

    def multiply_adds(self) -> CeilingWork:
        """Return float32 multiply-adds on the ordinary cores."""

    def reads(self, size: int) -> CeilingWork:
        """Return reads of a working set of `size` bytes."""


def measure_gpu_ceilings(works: CeilingWorks, clock: Clock = perf_counter) -> GpuCeilings:
    """Measure the ceilings of a GPU in about two seconds. Raises what its libraries raise."""
    ordinary = works.multiply_adds()
    end = clock() + WARM_UP_SECONDS
    while clock() < end:
        ordinary.call()
        ordinary.driver.wait()
    products = {dtype: [_rate(work, clock) for work in works.products(dtype)] for dtype in DTYPES}
    return GpuCeilings(
        {dtype: max(rates) for dtype, rates in products.items() if rates},
        _rate(ordinary, clock),
        make_non_increasing({size: _rate(works.reads(size), clock) for size in WORKING_SETS}),
        _usual(works.pace_product(), clock),
        _usual(works.reads(PACE_BYTES), clock),
    )


def build_call_timer(work: CeilingWork, clock: Clock = perf_counter) -> EventTimer:
    """Return a timer of the work, launched as a library launches it."""
    return build_event_timer([work.call], work.driver, TimingMode("warm", "call"), clock=clock)


def _usual(work: CeilingWork, clock: Clock) -> float:
    return float(np.median(build_call_timer(work, clock).burst(_SECONDS).samples))


def _rate(work: CeilingWork, clock: Clock) -> float:
    """Return the highest rate of `work`, per second."""
    return work.done / min(build_call_timer(work, clock).burst(_SECONDS).samples)
