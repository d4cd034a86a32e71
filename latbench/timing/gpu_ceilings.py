"""What a GPU can do at most: operations a second of its tensor cores and of its ordinary cores, bytes read a second.

The roofline of `latbench.machines.ceilings`, for a device with two kinds of units. Tensor cores are as fast as a
library's large dense products (of zeros, which take the least power, so that the clocks stay up), ordinary cores as
chains of float32 multiply-adds: every kernel has to sum in float32, or its result would be refused. Only the
operations of kept weights count. So 2:4 weights may be twice as fast as the same layer dense, which is what sparse
tensor cores do.

Bytes come from working sets of rising size, from the L2 on: no kernel finds anything in the first-level caches. What
a kernel writes goes beside what it reads, and counts for nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from latbench.machines.ceilings import (
    bound_memory_seconds,
    make_non_increasing,
    take_higher_rates,
    weigh_reference_seconds,
)
from latbench.timing.gpu_events import Call, Driver, EventTimer, TimingMode, build_event_timer
from latbench.timing.sampling import Clock

ORDINARY = "ordinary"  # units of a kernel that uses no tensor cores
DTYPES = ("float16", "bfloat16")
WORKING_SETS = tuple(2**power for power in range(20, 30))  # bytes: the largest passes any L2 four times

PRODUCT_SIZE = 8192  # rows and columns: many tiles for each multiprocessor
PACE_SIZE = 4096  # some hundred microseconds, in matrices that a small GPU has room for all the time
PACE_BYTES = 2**28  # no L2 holds half of it
WARM_UP_SECONDS = 0.2  # clocks rise when there is something to do
_SECONDS = 0.04  # of samples, for each rate


@dataclass(frozen=True)
class GpuCeilings:
    """Of one GPU at its present clocks.

    tensor_flop_per_second: by element type, without those that its tensor cores do not know; read_bytes_per_second:
    by size of the working set in bytes, which rises; product_seconds and sum_seconds: what the reference kernels of a
    sweep usually take.
    """

    tensor_flop_per_second: dict[str, float]
    ordinary_flop_per_second: float
    read_bytes_per_second: dict[int, float]
    product_seconds: float
    sum_seconds: float

    def roofline_seconds(self, flop: float, size: float, units: str) -> float:
        """The least that so many operations on so many bytes can take; `units` is the element type that tensor cores
        may multiply, or ORDINARY.
        """
        rate = max(self.ordinary_flop_per_second, self.tensor_flop_per_second.get(units, 0.0))
        return max(flop / rate, bound_memory_seconds(self.read_bytes_per_second, size))

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """See WithPace. All units have one clock: so work on the ordinary ones is weighed as work on tensor cores."""
        compute = flop / max(self.ordinary_flop_per_second, *self.tensor_flop_per_second.values())
        return weigh_reference_seconds(
            product_seconds, sum_seconds, compute, bound_memory_seconds(self.read_bytes_per_second, size)
        )

    def or_higher(self, other: GpuCeilings) -> GpuCeilings:
        """The higher of two ceilings, rate by rate."""
        return GpuCeilings(
            take_higher_rates(self.tensor_flop_per_second, other.tensor_flop_per_second),
            max(self.ordinary_flop_per_second, other.ordinary_flop_per_second),
            take_higher_rates(self.read_bytes_per_second, other.read_bytes_per_second),
            min(self.product_seconds, other.product_seconds),
            min(self.sum_seconds, other.sum_seconds),
        )


@dataclass(frozen=True)
class CeilingWork:
    """A call that does so many operations, or reads so many bytes (`done`), and what times it."""

    done: float
    call: Call
    driver: Driver


class CeilingWorks(Protocol):
    """The pieces of work that find the ceilings of a GPU."""

    def products(self, dtype: str) -> Iterable[CeilingWork]:
        """Large dense products by a library; none where the tensor cores do not know the element type."""

    def pace_product(self) -> CeilingWork:
        """A dense product of float16 matrices of PACE_SIZE rows and columns."""

    def multiply_adds(self) -> CeilingWork:
        """Float32 multiply-adds on the ordinary cores."""

    def reads(self, size: int) -> CeilingWork:
        """Reads of a working set of `size` bytes."""


def measure_gpu_ceilings(works: CeilingWorks, clock: Clock = perf_counter) -> GpuCeilings:
    """Measure the ceilings of the GPU that does `works`; takes about two seconds. Raises what its libraries raise."""
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
    """What times the work, launched as a library does."""
    return build_event_timer([work.call], work.driver, TimingMode("warm", "call"), clock=clock)


def _usual(work: CeilingWork, clock: Clock) -> float:
    return float(np.median(build_call_timer(work, clock).burst(_SECONDS).samples))


def _rate(work: CeilingWork, clock: Clock) -> float:
    """The highest rate at which `work` is done, a second."""
    return work.done / min(build_call_timer(work, clock).burst(_SECONDS).samples)
