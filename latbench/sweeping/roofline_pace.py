"""Ceilings of a machine and its present pace, from two fixed pieces of work that are timed every few bursts.

Clock frequency, neighbours on the same chip and heat slow a machine for seconds or minutes without a trace in its
counters. Fixed work shows them all. The one exception slows only the exchange between threads: see
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

from latbench.machines.ceilings import AnyCeilings, AnyCeilingsWithPace, CachedCeilings, Ceilings
from latbench.runners.worker_process import PreparedTask, TaskFailed, Worker, WorkerDied
from latbench.sweeping.core_placement import BURST_SECONDS, MOST_DEATHS, PREPARE_SECONDS, CorePlacement
from latbench.timing.sampling import Clock
from latbench.workloads.points import Point

READ_EVERY_BURSTS = 10  # bursts of 15 ms: a sixth of the time goes into the reference
READING_SECONDS = 0.008
NEAREST_READINGS = 9  # readings that give the pace at a moment; a single one is off by several percent
SLOW_SPELL = 1.15  # over the typical pace of the sweep; a quiet machine varies within 5%

REFERENCE_KERNELS = ("build_product", "build_sum")


@dataclass(frozen=True)
class PaceReading:
    """The seconds a call of each reference kernel at a time of `perf_counter`."""

    at: float
    product: float
    total: float
    preempted: bool


@dataclass(frozen=True)
class ReferenceTimes:
    """Times of the reference kernels at some moments, weighed for one kind of work.

    Parameters
    ----------
    seconds
        The times at these moments.
    usual_seconds
        The usual time.
    slow_spell
        Whether most of these moments lie in a slow spell of this sweep.
    """

    seconds: Sequence[float]
    usual_seconds: float
    slow_spell: bool


class SweepRoofline(ABC, Generic[AnyCeilings]):
    """The ceilings of a device, which bound a sweep's times; a device may also have a pace."""

    def __init__(self, kept: CachedCeilings[AnyCeilings]) -> None:
        self.ceilings = kept.get()
        self._kept, self._doubted = kept, False

    @abstractmethod
    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """Return the shortest time of `kernel` for a point with so many operations on so many bytes."""

    def doubt(self) -> bool:
        """Measure the ceilings again because a time beat them; once in a sweep.

        They may have been measured while others used the machine. Returns whether they may have changed.
        """
        if self._doubted:
            return False
        self._doubted = True
        with contextlib.suppress(TaskFailed, WorkerDied):
            self.ceilings = self._kept.again(self.ceilings)
        return True

    def turn(self) -> None:
        """Time the reference work, if there is any and it is its turn; called before every burst."""

    def reference(self, at: Sequence[float], flop: float, size: float) -> ReferenceTimes | None:
        """Return the reference times around these times of the clock; None while they are unknown.

        They are weighed for work of so many operations on so many bytes.
        """
        return None

    def apart(self) -> bool:
        """Return whether the last burst cannot count because cores were apart; called after every burst."""
        return False

    def close(self) -> None:
        """End what was started."""


class ReferencePace(SweepRoofline[AnyCeilingsWithPace]):
    """A reference worker and its readings; `ceilings` hold the usual times.

    The worker prepares REFERENCE_KERNELS of `module`.
    """

    module: ClassVar[str]

    def __init__(
        self, worker: Worker, kept: CachedCeilings[AnyCeilingsWithPace], clock: Clock = perf_counter
    ) -> None:
        super().__init__(kept)
        self.readings: list[PaceReading] = []
        self._worker, self._clock = worker, clock
        self._prepared: list[PreparedTask] = []
        self._bursts = self._deaths = 0

    @property
    def given_up(self) -> bool:
        """Whether the reference worker died so often in a row that it is not used again; the pace is unknown then."""
        return self._deaths >= MOST_DEATHS

    def turn(self) -> None:
        """Time the reference kernels if it is their turn."""
        if self._bursts % READ_EVERY_BURSTS == 0 and not self.given_up:
            self._read()
        self._bursts += 1

    def _read(self) -> None:
        at = self._clock()
        try:
            if not self._prepared or not self._worker.holds(self._prepared[0]):
                self._prepared = [
                    self._worker.prepare(f"{self.module}:{name}", timeout=PREPARE_SECONDS)
                    for name in REFERENCE_KERNELS
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
        self.readings.append(PaceReading(at, seconds[0], seconds[1], product.preempted or total.preempted))

    def reference(self, at: Sequence[float], flop: float, size: float) -> ReferenceTimes | None:
        """See SweepRoofline. None while there is no reading, and once the reference worker is given up."""
        if not self.readings or self.given_up:
            return None

        def typical(readings: list[PaceReading]) -> float:
            return self.ceilings.reference_seconds(*_typical(readings), flop, size)

        def around(moment: float) -> float:
            after = bisect(self.readings, moment, key=lambda reading: reading.at)
            near = self.readings[max(0, after - NEAREST_READINGS) : after + NEAREST_READINGS]
            return typical(sorted(near, key=lambda reading: abs(reading.at - moment))[:NEAREST_READINGS])

        seconds = [around(moment) for moment in at]
        slow_spell = bool(np.median(seconds) > SLOW_SPELL * typical(self.readings))
        usual = self.ceilings.reference_seconds(self.ceilings.product_seconds, self.ceilings.sum_seconds, flop, size)
        return ReferenceTimes(seconds, usual, slow_spell)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


class CpuPace(ReferencePace[Ceilings]):
    """The pace of a CPU on which engines run `threads` threads."""

    module = "latbench.backends.cpu.cpu_reference"

    def __init__(
        self, worker: Worker, kept: CachedCeilings[Ceilings], threads: int, clock: Clock = perf_counter
    ) -> None:
        super().__init__(worker, kept, clock)
        self._placement = CorePlacement(worker, threads)

    def apart(self) -> bool:
        """See SweepRoofline."""
        return self._placement.apart()

    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """See SweepRoofline: on a CPU all kernels use the same units."""
        return self.ceilings.roofline_seconds(flop, size, point.dtype_a)


def _typical(readings: list[PaceReading]) -> tuple[float, float]:
    counted = [reading for reading in readings if not reading.preempted] or readings
    return float(np.median([r.product for r in counted])), float(np.median([r.total for r in counted]))
