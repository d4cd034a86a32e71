"""What a machine can do at most, and how fast it is just now: two fixed pieces of work, timed every few bursts of a
sweep in the same turns.

Frequency, neighbours on the same chip and heat slow a machine for seconds or minutes without a trace in its counters.
Fixed work shows them all, but for one, which slows only what threads do together: see
`latbench.sweeping.core_placement`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Generic

import numpy as np

from latbench.machines.ceilings import AnyCeilings, AnyWithPace, Ceilings, Kept
from latbench.runners.worker_process import Prepared, TaskFailed, Worker, WorkerDied
from latbench.sweeping.core_placement import BURST_SECONDS, MOST_DEATHS, PREPARE_SECONDS, Placement
from latbench.timing.sampling import Clock
from latbench.workloads.points import Point

EVERY = 10  # bursts of 15 ms: a sixth of the time goes into the reference
READING_SECONDS = 0.008
NEAREST = 9  # readings around a moment that tell the pace then: one alone is off by several percent
SLOW_SPELL = 1.15  # over the typical pace of the sweep; the pace of a quiet machine stays within 5%

KERNELS = ("build_product", "build_sum")


@dataclass(frozen=True)
class Reading:
    """The seconds a call of each reference kernel at a time of `perf_counter`."""

    at: float
    product: float
    total: float
    preempted: bool


@dataclass(frozen=True)
class Reference:
    """How long the reference kernels took at some moments, weighed as some work is bound by what they show, and how
    long they usually take; whether most of these moments lie in a slow spell of this sweep.
    """

    seconds: Sequence[float]
    usual_seconds: float
    slow_spell: bool


class Roofline(ABC, Generic[AnyCeilings]):
    """What a device can do at most, beside which a sweep judges its times; a device may also have a pace."""

    def __init__(self, kept: Kept[AnyCeilings]) -> None:
        self.ceilings = kept.get()
        self._kept, self._doubted = kept, False

    @abstractmethod
    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """The least that `kernel` can take for a point of so many operations on so many bytes."""

    def doubt(self) -> bool:
        """Measure the ceilings again, once in a sweep, because something was faster than they allow: they may have
        been found while others took the machine. Whether they may have changed.
        """
        if self._doubted:
            return False
        self._doubted = True
        with contextlib.suppress(TaskFailed, WorkerDied):
            self.ceilings = self._kept.again(self.ceilings)
        return True

    def turn(self) -> None:
        """Called before every burst of others: times fixed work, if there is any and it is its turn."""

    def reference(self, at: Sequence[float], flop: float, size: float) -> Reference | None:
        """What fixed work took around these times of the clock, for work of so many operations on so many bytes. None
        while that is not known.
        """
        return None

    def apart(self) -> bool:
        """Called after every burst of others: whether it cannot count, because cores were apart (`placement`)."""
        return False

    def close(self) -> None:
        """End what was started."""


class Pace(Roofline[AnyWithPace]):
    """Keeps a reference worker and what it said so far; `ceilings` hold what is usual.

    The worker prepares KERNELS of `module`.
    """

    module: ClassVar[str]

    def __init__(self, worker: Worker, kept: Kept[AnyWithPace], clock: Clock = perf_counter) -> None:
        super().__init__(kept)
        self.readings: list[Reading] = []
        self._worker, self._clock = worker, clock
        self._prepared: list[Prepared] = []
        self._bursts = self._deaths = 0

    @property
    def given_up(self) -> bool:
        """Whether the reference worker died so often in a row that it is not asked again. Nothing is known of the
        pace then.
        """
        return self._deaths >= MOST_DEATHS

    def turn(self) -> None:
        """Times the reference kernels if it is their turn."""
        if self._bursts % EVERY == 0 and not self.given_up:
            self._read()
        self._bursts += 1

    def _read(self) -> None:
        at = self._clock()
        try:
            if not self._prepared or not self._worker.holds(self._prepared[0]):
                self._prepared = [
                    self._worker.prepare(f"{self.module}:{name}", timeout=PREPARE_SECONDS) for name in KERNELS
                ]
            product, total = (
                self._worker.burst(kernel, READING_SECONDS, timeout=BURST_SECONDS) for kernel in self._prepared
            )
        except TaskFailed:  # it is tried again at its next turn
            return
        except WorkerDied as death:
            self._deaths += death.reason != "late"
            return
        self._deaths = 0
        seconds = [float(np.median(burst.samples)) for burst in (product, total)]
        self.readings.append(Reading(at, seconds[0], seconds[1], product.preempted or total.preempted))

    def reference(self, at: Sequence[float], flop: float, size: float) -> Reference | None:
        """See Roofline. None while there is no reading, and once the reference worker is given up."""
        if not self.readings or self.given_up:
            return None

        def typical(readings: list[Reading]) -> float:
            return self.ceilings.reference_seconds(*_typical(readings), flop, size)

        def around(moment: float) -> float:
            after = bisect(self.readings, moment, key=lambda reading: reading.at)
            near = self.readings[max(0, after - NEAREST) : after + NEAREST]
            return typical(sorted(near, key=lambda reading: abs(reading.at - moment))[:NEAREST])

        seconds = [around(moment) for moment in at]
        slow_spell = bool(np.median(seconds) > SLOW_SPELL * typical(self.readings))
        usual = self.ceilings.reference_seconds(self.ceilings.product_seconds, self.ceilings.sum_seconds, flop, size)
        return Reference(seconds, usual, slow_spell)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


class CpuPace(Pace[Ceilings]):
    """Of a CPU, on which others run so many threads."""

    module = "latbench.backends.cpu.cpu_reference"

    def __init__(self, worker: Worker, kept: Kept[Ceilings], threads: int, clock: Clock = perf_counter) -> None:
        super().__init__(worker, kept, clock)
        self._placement = Placement(worker, threads)

    def apart(self) -> bool:
        """See Roofline."""
        return self._placement.apart()

    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """See Roofline: on a CPU all kernels have the same units."""
        return self.ceilings.roofline_seconds(flop, size, point.dtype_a)


def _typical(readings: list[Reading]) -> tuple[float, float]:
    counted = [reading for reading in readings if not reading.preempted] or readings
    return float(np.median([r.product for r in counted])), float(np.median([r.total for r in counted]))
