"""Times on a GPU: samples between CUDA events, taken in batches while the host runs ahead of the device.

Pure: a `Driver` (torch or CuPy, see latbench.timing.gpu_drivers) does the work, and the clock is an argument.

A sample is `mark, work, mark`. Events measure the device's time only if the host has queued all three before the
device reaches them. Otherwise they include the host's launch latency; nvbench blocks the stream with a kernel for
that reason. Here the device first flushes its L2 for as long as the host needs to queue a batch, with some reserve.

cache_mode says what lies in the L2 when a call begins:
    cold      nothing of it: a flush precedes every call. One call a sample, so no graph.
    rotated   weights, activations and results of several copies are used in turn: before a copy is used again, the
              others have touched ROTATED_TIMES_L2 times the size of the L2.
    warm      whatever the last call of the same copy left.
launch_mode: `call` launches as the library does; `graph` replays the same calls as one CUDA graph, without the launch
overhead that dominates calls of a few microseconds.

Events tick every half microsecond, so calls are repeated within a sample until the tick is below a percent. Cold
calls cannot be repeated; times below 20 microseconds say little. NVML reports the state of the device while a batch
still runs. A batch that heat or the power supply slowed down does not count, as long as there are others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from latbench.timing.sampling import Burst, Clock

Call = Callable[[], Any]

CACHE_MODES = ("cold", "rotated", "warm")
LAUNCH_MODES = ("call", "graph")

# Caches that are hashed over slices need more than their size to be displaced.
FLUSH_TIMES_L2 = 2
ROTATED_TIMES_L2 = 2
LEAST_TIMES_L2 = 1.5  # with less between two uses of a copy, part of it may stay in the L2

SHORTEST_SAMPLE_SECONDS = 2e-4  # events tick every 0.5 us: 0.25% of this
MOST_LOOPS = 1024  # nodes of a graph; capturing more takes long
BATCH_SECONDS = 5e-3
MOST_SAMPLES_A_BATCH = 50
MOST_QUEUED = 500  # calls per sample: after about a thousand queued operations the host has to wait
HEAD_START = 1.5  # reserve over the measured time for queueing a batch
MOST_FLUSHES = 400
TRIALS, TRIAL_FLUSHES = 3, 20


class NotCaptured(Exception):
    """Launches that cannot become a CUDA graph; the message is the library's."""


class DeviceState(Protocol):
    """The state of the device that timing needs."""

    @property
    def throttled(self) -> bool:
        """Whether heat or the power supply slows the device down."""


StateReader = Callable[[], DeviceState | None]
"""Reads the device's state; None where nobody can tell."""


class Driver(Protocol):
    """The functions of a CUDA library that timing needs; everything is queued on one stream."""

    @property
    def l2_bytes(self) -> int:
        """The size of the L2 in bytes."""

    def flush(self) -> None:
        """Queue a write of FLUSH_TIMES_L2 times the size of the L2, which displaces its content."""

    def mark(self) -> Any:
        """Queue an event."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the device's time between two marks that it has passed."""

    def capture(self, work: Call) -> Call:
        """Return the kernels that `work` launches as one graph. Raises RuntimeError where that is impossible."""

    def spoil(self, result: Any) -> None:
        """Queue a write of NaN to every element of an array, or of the lowest whole number where there is no NaN."""

    def wait(self) -> None:
        """Wait until the device has done everything queued; raise if it failed."""


@dataclass(frozen=True)
class TimingMode:
    """The cache mode and the launch mode of a timing."""

    cache: str
    launch: str

    def __post_init__(self) -> None:
        if self.cache not in CACHE_MODES or self.launch not in LAUNCH_MODES:
            raise ValueError(f"no timing mode {self.cache} {self.launch}")
        if self.cache == "cold" and self.launch == "graph":
            raise ValueError("a flush between the calls of a graph would be timed with them: cold calls are launched")


@dataclass(frozen=True)
class BatchPlan:
    """How a batch of samples is taken.

    Parameters
    ----------
    inner_loops
        Calls per sample.
    samples
        Samples per batch.
    flushes
        Cache flushes that keep the device busy while the host queues the batch.
    """

    inner_loops: int
    samples: int
    flushes: int


class EventTimer:
    """Work that is ready to be sampled; a `Timer`. `inner_loops` calls make one sample.

    It keeps a reference to the calls `needed`, because a graph knows only the addresses of their arrays.
    """

    def __init__(
        self,
        work: Call,
        driver: Driver,
        mode: TimingMode,
        batch: BatchPlan,
        *,
        needed: Sequence[Call] = (),
        watch: StateReader = lambda: None,
        clock: Clock = perf_counter,
    ) -> None:
        self.inner_loops, self.samples, self.flushes = batch.inner_loops, batch.samples, batch.flushes
        self.facts: dict[str, Any] = {
            "timer": "cuda_event",
            "l2_flush_bytes": FLUSH_TIMES_L2 * driver.l2_bytes if mode.cache == "cold" else None,
        }
        self._work, self._driver, self._mode, self._needed = work, driver, mode, needed
        self._watch, self._clock = watch, clock

    def run(self) -> None:
        """Do the work of one sample, and wait for it."""
        _wait_for(self._driver, self._work)

    def burst(self, seconds: float) -> Burst:
        """Return samples taken for about `seconds`, at least one batch, in seconds a call."""
        end = self._clock() + seconds
        self.run()  # warm up: other work took the caches and let the clocks fall
        batches = [self._batch()]
        while self._clock() < end:
            batches.append(self._batch())
        quiet = [batch for batch in batches if not batch.throttled]
        counted = quiet or batches
        return Burst(
            [sample for batch in counted for sample in batch.samples],
            preempted=not quiet,
            states=tuple(batch.state for batch in counted if batch.state is not None),
            discarded=sum(len(batch.samples) for batch in batches) - sum(len(batch.samples) for batch in counted),
        )

    def _batch(self) -> _Batch:
        for _ in range(self.flushes):
            self._driver.flush()
        if self._mode.cache == "warm":
            self._work()  # undo the flushes, which only gained time for the host
        marks = [_sample(self._driver, self._mode, self._work) for _ in range(self.samples)]
        state = self._watch()  # the device still runs what was queued
        self._driver.wait()
        return _Batch([self._driver.seconds(*pair) / self.inner_loops for pair in marks], state)


@dataclass(frozen=True)
class _Batch:
    samples: list[float]
    state: DeviceState | None

    @property
    def throttled(self) -> bool:
        return self.state is not None and self.state.throttled


def build_event_timer(
    calls: Sequence[Call],
    driver: Driver,
    mode: TimingMode,
    *,
    watch: StateReader = lambda: None,
    clock: Clock = perf_counter,
) -> EventTimer:
    """Find out how often to repeat calls and how far the host must run ahead; capture the graph.

    Parameters
    ----------
    calls
        They do the same work on copies of their own. Only the first is used unless the mode is rotated.
    driver
        Runs and times them.
    mode
        Cache and launch mode.
    watch
        Reads the state of the device.
    clock
        Returns seconds.

    Raises
    ------
    NotCaptured
        The calls cannot become a graph. Other exceptions of a call pass through.
    """
    used = list(calls) if mode.cache == "rotated" else list(calls)[:1]
    for call in used:
        _wait_for(driver, call)  # compiles, and allocates what a capture may not
    gained = _gained(driver, clock)
    room = MOST_FLUSHES * gained / HEAD_START / 2  # for one sample and its warm-up

    def turn() -> None:
        _all(used)

    most = MOST_LOOPS
    if mode.launch == "call":
        most = min(MOST_QUEUED, int(room * len(used) / _queueing_seconds(driver, turn, clock)))
    loops = choose_inner_loops(mode, once=_seconds_of(driver, turn) / len(used), copies=len(used), most=most)
    work = _repeated(used, loops)
    if mode.launch == "graph":
        work = _capture(driver, work)
    queueing = _queueing_seconds(driver, lambda: _sample(driver, mode, work), clock)
    samples = choose_batch_size(seconds=_seconds_of(driver, work), queueing=queueing, room=room)
    return EventTimer(
        work,
        driver,
        mode,
        BatchPlan(
            inner_loops=loops,
            samples=samples,
            flushes=choose_flushes(queueing=(samples + 1) * queueing, gained=gained),
        ),
        needed=used,
        watch=watch,
        clock=clock,
    )


def _capture(driver: Driver, work: Call) -> Call:
    try:
        graph = driver.capture(work)
    except RuntimeError as error:
        raise NotCaptured(str(error)) from error
    _wait_for(driver, graph)
    return graph


def choose_inner_loops(mode: TimingMode, *, once: float, copies: int, most: int = MOST_LOOPS) -> int:
    """Return how many calls of `once` seconds make a sample; whole turns of `copies`, so that all weigh the same."""
    if mode.cache == "cold":
        return 1
    turns = math.ceil(SHORTEST_SAMPLE_SECONDS / max(once, 1e-9) / copies)
    return copies * max(1, min(turns, most // copies))


def choose_batch_size(*, seconds: float, queueing: float, room: float) -> int:
    """Return how many samples make a batch.

    A sample takes the device `seconds` and the host `queueing`; the device can be kept busy for `room` seconds
    meanwhile.
    """
    return max(1, min(MOST_SAMPLES_A_BATCH, int(BATCH_SECONDS / seconds), int(room / max(queueing, 1e-9))))


def choose_flushes(*, queueing: float, gained: float) -> int:
    """Return how many flushes keep the device busy while the host queues a batch, if each gains so much time."""
    return max(1, min(MOST_FLUSHES, math.ceil(HEAD_START * queueing / gained)))


def choose_copies(bytes_each: int, l2_bytes: int, most: int) -> int:
    """Return how many copies that touch `bytes_each` to use in turn, at most `most`.

    The others then touch ROTATED_TIMES_L2 times the size of the L2 before a copy is used again.
    """
    return min(most, 1 + -(-ROTATED_TIMES_L2 * l2_bytes // max(1, bytes_each)))


def displaces_cache(bytes_each: int, l2_bytes: int, copies: int) -> bool:
    """Return whether the other copies displace what a copy left in the L2."""
    return (copies - 1) * bytes_each >= LEAST_TIMES_L2 * l2_bytes


def _repeated(calls: Sequence[Call], loops: int) -> Call:
    if loops == 1:
        return calls[0]
    turn = list(itertools.islice(itertools.cycle(calls), loops))
    return lambda: _all(turn)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _sample(driver: Driver, mode: TimingMode, work: Call) -> tuple[Any, Any]:
    if mode.cache == "cold":
        driver.flush()
    start = driver.mark()
    work()
    return start, driver.mark()


def _wait_for(driver: Driver, work: Call) -> None:
    work()
    driver.wait()


def _seconds_of(driver: Driver, work: Call) -> float:
    """Return the median time of `work`, after flushes that let the host run ahead as in a measurement."""
    times = []
    for _ in range(TRIALS):
        for _ in range(TRIAL_FLUSHES):
            driver.flush()
        start = driver.mark()
        work()
        end = driver.mark()
        driver.wait()
        times.append(driver.seconds(start, end))
    return max(float(np.median(times)), 1e-9)


def _gained(driver: Driver, clock: Clock) -> float:
    """Return by how much each flush lets the host get ahead of the device; at least a tenth of the flush."""
    flush = _seconds_of(driver, driver.flush)
    return max(flush - _queueing_seconds(driver, driver.flush, clock), flush / 10)


def _queueing_seconds(driver: Driver, run: Call, clock: Clock) -> float:
    """Return the median time that the host takes to queue `run`."""
    times = []
    for _ in range(TRIALS):
        began = clock()
        run()
        times.append(clock() - began)
        driver.wait()
    return max(float(np.median(times)), 1e-9)
