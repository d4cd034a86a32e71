"""Do the cores of this machine share a cache just now? A host may move those of a virtual machine apart, and back.

On two virtual cores of an AMD EPYC it does so every few seconds or minutes. 256 KiB that one core has changed take
the next one 3 us, or 9 us then; threads start in 1.2 us, or 2.2; a 1x1 convolution whose threads read what the other
laid out takes 101 us, or 240. Nothing that a thread does by itself is any slower, nor does a counter show it. Between
such states no median means anything, so bursts from when the cores were apart count as disturbed.
`tests/benchmarks/placement.py` shows both on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from latbench.runners.worker_process import Prepared, TaskFailed, Worker, WorkerDied

TASK = "latbench.backends.cpu.cpu_reference:build_hand_over"
APART = "cores_apart"  # how a burst's reasons name it
READING_SECONDS = 0.001

# Fixed work that takes longer than this hangs; a worker that died so often in a row would cost as long again.
PREPARE_SECONDS, BURST_SECONDS = 60.0, 10.0
MOST_DEATHS = 2

# How much longer than at best cores take for what another has changed while they are apart: 2.8 times, the least that
# was seen 2.6. One direction alone takes as long at times (1.9 times, the mean of both), and no layer feels that.
TIMES = 2.3
AT_BEST = 0.1  # this quantile of the readings
MOST_READINGS = 100_000  # that are kept: of half an hour
FEW, SELDOM = 200, 50  # with more readings than that, what they are at best is worked out once in so many

Result = TypeVar("Result")


class Placement:
    """Asks `worker` how long its cores take for what another one of so many has changed, and keeps what it said.

    What was timed before cores were first seen together counts: how fast they are at best is not known until then.
    """

    def __init__(self, worker: Worker, threads: int) -> None:
        self._worker, self._threads = worker, threads
        self._known = threads > 1
        self._prepared: Prepared | None = None
        self._readings: deque[float] = deque(maxlen=MOST_READINGS)
        self._last = self._at_best = 0.0
        self._count = self._deaths = 0

    def apart(self) -> bool:
        """Whether cores are further apart than they were at best, now or when this was asked last. False where that
        cannot be known: of one thread, or where threads cannot choose their core.
        """
        reading = self._read() if self._known else None
        if reading is None:
            return False
        before, self._last = self._last, reading
        self._readings.append(reading)
        self._count += 1
        if self._count <= FEW or self._count % SELDOM == 0:
            self._at_best = float(np.quantile(self._readings, AT_BEST, method="lower"))
        return max(before, reading) > TIMES * self._at_best

    def together(self, timed: Callable[[], Result], tries: int) -> tuple[Result, bool]:
        """What `timed` returns, called so often at most, until cores are together; and whether they were."""
        for _ in range(tries):
            result = timed()
            if not self.apart():
                return result, True
        return result, False

    def _read(self) -> float | None:
        """The seconds that a core takes; None if nothing says so this time."""
        try:
            if self._prepared is None or not self._worker.holds(self._prepared):
                self._prepared = self._worker.prepare(TASK, self._threads, timeout=PREPARE_SECONDS)
            burst = self._worker.burst(self._prepared, READING_SECONDS, timeout=BURST_SECONDS)
            self._deaths = 0
            return float(np.median(burst.samples))
        except TaskFailed:
            self._known = False
        except WorkerDied as death:  # it is tried again the next time, unless that would cost as long again
            self._deaths += death.reason != "late"
            self._known = self._deaths < MOST_DEATHS
        return None
