"""Detection of cores that do not share a cache at the moment.

A host may move the cores of a virtual machine apart, and back. On two virtual cores of an AMD EPYC this happens every
few seconds or minutes. These times were measured together and apart:

- one core reads 256 KiB that another has changed: 3 us and 9 us,
- threads start: 1.2 us and 2.2 us,
- a 1x1 convolution whose threads read each other's layout: 101 us and 240 us.

Work of a single thread is not slower, and no counter shows the change. A median over both states means nothing, so
bursts with the cores apart count as disturbed. `tests/benchmarks/placement.py` shows both states on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from latbench.runners.worker_process import PreparedTask, TaskFailed, Worker, WorkerDied

HANDOVER_TASK = "latbench.backends.cpu.cpu_reference:build_hand_over"
CORES_APART = "cores_apart"  # its name in a burst's reasons
READING_SECONDS = 0.001

# Time limits of reference work; and the deaths in a row after which its worker is given up.
PREPARE_SECONDS, BURST_SECONDS = 60.0, 10.0
MOST_DEATHS = 2

# Threshold between together and apart, over the best reading. Cores apart take 2.8 times as long, at least 2.6. One
# direction alone is slow at times (1.9 times, the mean of both), and no layer is slower then.
APART_RATIO = 2.3
BEST_QUANTILE = 0.1  # of the readings: the best reading, robustly
MOST_READINGS = 100_000  # kept readings: half an hour
UPDATE_ALWAYS_UNTIL, UPDATE_EVERY = (
    200,
    50,
)  # the quantile is computed for each of the first readings, later once in so many

Result = TypeVar("Result")


class CorePlacement:
    """Measures how long cores take for data that another core has changed, and keeps the readings.

    Bursts before the cores were first together count as undisturbed, because the best reading is unknown until then.
    """

    def __init__(self, worker: Worker, threads: int) -> None:
        self._worker, self._threads = worker, threads
        self._known = threads > 1
        self._prepared: PreparedTask | None = None
        self._readings: deque[float] = deque(maxlen=MOST_READINGS)
        self._last = self._at_best = 0.0
        self._count = self._deaths = 0

    def apart(self) -> bool:
        """Return whether cores are further apart than at best, now or at the last call.

        False where that cannot be known: with one thread, or where threads cannot choose their core.
        """
        reading = self._read() if self._known else None
        if reading is None:
            return False
        before, self._last = self._last, reading
        self._readings.append(reading)
        self._count += 1
        if self._count <= UPDATE_ALWAYS_UNTIL or self._count % UPDATE_EVERY == 0:
            self._at_best = float(np.quantile(self._readings, BEST_QUANTILE, method="lower"))
        return max(before, reading) > APART_RATIO * self._at_best

    def together(self, timed: Callable[[], Result], tries: int) -> tuple[Result, bool]:
        """Call `timed` until cores are together, at most `tries` times; return its result and whether they were."""
        for _ in range(tries):
            result = timed()
            if not self.apart():
                return result, True
        return result, False

    def _read(self) -> float | None:
        """Return the seconds that a core takes; None if this reading failed."""
        try:
            if self._prepared is None or not self._worker.holds(self._prepared):
                self._prepared = self._worker.prepare(HANDOVER_TASK, self._threads, timeout=PREPARE_SECONDS)
            burst = self._worker.burst(self._prepared, READING_SECONDS, timeout=BURST_SECONDS)
            self._deaths = 0
            return float(np.median(burst.samples))
        except TaskFailed:
            self._known = False
        except WorkerDied as death:  # the next call tries again, unless there were too many deaths
            self._deaths += death.reason != "late"
            self._known = self._deaths < MOST_DEATHS
        return None
