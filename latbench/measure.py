"""The timing loop: bursts of samples, several runs in turn, until each median is known well enough.

Pure: the clock is an argument, nothing here knows what it times. One sample is the mean of `inner_loops` calls, so
that the clock's own resolution and cost stay far below it. Runs are sampled in rounds, a burst each in random order:
a machine that slows down slows them all (google/benchmark#1051: this cuts run-to-run variance by 40%).
A noisy result is a fact (`converged` is false), not an exception.
"""

from __future__ import annotations

import gc
import math
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from latbench.tables import median_interval

Clock = Callable[[], float]
Run = Callable[[], object]
Usage = Callable[[], tuple[int, float]]
"""Involuntary context switches and CPU seconds of this process so far."""

SHORTEST_SAMPLE_SECONDS = 1e-4  # a thousand times what reading perf_counter costs (50-100 ns)
MOST_INNER_LOOPS = 1_000_000

FEWEST_SAMPLES = 10
FEWEST_ROUNDS = 3  # the spread between bursts is part of the noise
PLATEAU_ROUNDS = 6
NOISY_ERROR = 0.1  # a run whose median is not even known to this may use its budget STRETCH times over
STRETCH = 2
SLOW_STRETCH = 20  # calls so slow that they have not even given the six samples of an interval by then

# Measured on two cores: alone, a run is preempted 0 to 3 times in a burst of 30 ms, about 25 times a CPU second;
# beside one to four busy processes 200 to 300 times, and its median is 1.3 to 13 times longer.
PREEMPTIONS_PER_SECOND = 60


@dataclass(frozen=True)
class Burst:
    """Samples taken one after the other, in seconds a call.

    `preempted` if other processes took the cores then, or if a GPU was slowed down by heat. `states`: what the device
    reported meanwhile, if it reports anything.
    """

    samples: list[float]
    preempted: bool = False
    states: tuple[Any, ...] = ()


Sampler = Callable[[float], Burst]
"""Times something for about the given seconds; a burst without samples if it cannot go on."""


@dataclass
class Timing:
    """What was sampled so far, burst by burst. Preempted bursts do not count as long as there are enough others."""

    bursts: list[Burst] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    stop_reason: str = ""

    def add(self, burst: Burst) -> None:
        """Take in a burst."""
        self.bursts.append(burst)
        self.medians.append(float(np.median(self.samples)))

    @property
    def preempted(self) -> bool:
        """Whether preempted bursts had to be counted, because there were not enough others."""
        quiet = sum(not burst.preempted for burst in self.bursts)
        return quiet < min(FEWEST_ROUNDS, len(self.bursts))

    @property
    def counted(self) -> list[Burst]:
        """The bursts that count."""
        return self.bursts if self.preempted else [burst for burst in self.bursts if not burst.preempted]

    @property
    def samples(self) -> list[float]:
        """The samples that count, in the order they were taken."""
        return [sample for burst in self.counted for sample in burst.samples]

    @property
    def states(self) -> list[Any]:
        """What the device reported during the bursts that count."""
        return [state for burst in self.counted for state in burst.states]

    @property
    def converged(self) -> bool:
        """Whether the median is known to the error that was asked for."""
        return self.stop_reason == "relative_error"

    @property
    def relative_error(self) -> float:
        """Half the 95% interval of the median over the median; infinite while there are too few samples to tell."""
        low, high = median_interval(np.sort(self.samples))
        return float("inf") if low is None or high is None else (high - low) / 2 / self.medians[-1]

    def drift(self) -> float | None:
        """The median of the later half of the counted bursts over that of the earlier half; None with one burst."""
        bursts = self.counted
        if len(bursts) < 2:
            return None
        early, late = (
            np.median([sample for burst in half for sample in burst.samples])
            for half in (bursts[: len(bursts) // 2], bursts[len(bursts) // 2 :])
        )
        return float(late / early)


class Timer(Protocol):
    """Something that is ready to be timed and knows how; `inner_loops` calls make one sample."""

    @property
    def inner_loops(self) -> int:
        """How many calls each sample is the mean of."""

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the point's row."""

    def burst(self, seconds: float) -> Burst:
        """Samples taken for about `seconds`, at least one."""


class WallClock:
    """Times a callable by this process's clock; its `facts`, if it has any, are columns of the point's row."""

    def __init__(self, run: Run) -> None:
        self.inner_loops = calibrate(run)
        self.facts: dict[str, Any] = getattr(run, "facts", {})
        self._run = run

    def burst(self, seconds: float) -> Burst:
        """Samples taken for about `seconds`, at least one."""
        return burst(self._run, seconds, self.inner_loops)


def process_usage() -> tuple[int, float]:
    """Involuntary context switches and CPU seconds of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nivcsw, used.ru_utime + used.ru_stime


def calibrate(run: Run, *, clock: Clock = perf_counter) -> int:
    """How many calls of `run` make one sample long enough to be read off the clock; calls it a few times."""
    run()
    loops = 1
    while loops < MOST_INNER_LOOPS:
        seconds = _time(run, loops, clock)
        if seconds >= SHORTEST_SAMPLE_SECONDS:
            break
        # Aim a little beyond, but never trust one short reading with a leap.
        wanted = 1.2 * SHORTEST_SAMPLE_SECONDS / max(seconds, 1e-9)
        loops = min(MOST_INNER_LOOPS, max(loops + 1, int(loops * min(wanted, 10.0))))
    return loops


def burst(
    run: Run, seconds: float, inner_loops: int, *, clock: Clock = perf_counter, usage: Usage = process_usage
) -> Burst:
    """Samples of `run` taken for about `seconds`, at least one: each the mean seconds a call of `inner_loops` calls.

    One untimed sample goes first: what ran before took the caches and put this run's threads to sleep. Garbage is not
    collected meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        switches, cpu_seconds = usage()
        _time(run, inner_loops, clock)
        end = clock() + seconds
        samples = [_time(run, inner_loops, clock) / inner_loops]
        while clock() < end:
            samples.append(_time(run, inner_loops, clock) / inner_loops)
        now_switches, now_cpu_seconds = usage()
    finally:
        if collecting:
            gc.enable()
    allowed = 1 + PREEMPTIONS_PER_SECOND * (now_cpu_seconds - cpu_seconds)
    return Burst(samples, now_switches - switches > allowed)


def _time(run: Run, loops: int, clock: Clock) -> float:
    start = clock()
    for _ in range(loops):
        run()
    return clock() - start


def measure(
    run: Run,
    *,
    rel_error: float = 0.01,
    max_seconds: float = 2.0,
    round_seconds: float = 0.05,
    clock: Clock = perf_counter,
    usage: Usage = process_usage,
) -> Timing:
    """Time one callable in this process; see `interleave` for when it stops."""
    loops = calibrate(run, clock=clock)

    def sampler(seconds: float) -> Burst:
        return burst(run, seconds, loops, clock=clock, usage=usage)

    finished = interleave(
        {"run": sampler}, rel_error=rel_error, max_seconds=max_seconds, round_seconds=round_seconds, clock=clock
    )
    return next(finished)[1]


def interleave(
    samplers: Mapping[str, Sampler],
    *,
    rel_error: float = 0.01,
    max_seconds: float = 2.0,
    round_seconds: float = 0.05,
    clock: Clock = perf_counter,
    order: random.Random | None = None,
) -> Iterator[tuple[str, Timing]]:
    """Sample all `samplers` in rounds, a burst of about `round_seconds` each, and yield each as it finishes.

    One finishes when the 95% interval of its median is within `rel_error` of it on either side (relative_error), when
    its median has stayed within a quarter of that for several rounds although samples scatter (plateau), when it has
    used `max_seconds` (budget; up to twice that while it is not known to 10%, or bursts were preempted and too
    few were not; longer for calls so slow that there are not six yet), or when it returns no samples (failed).
    `order` shuffles the rounds.
    """
    shuffle = (order or random.Random(0)).shuffle
    timings = {name: Timing() for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    while timings:
        names = list(timings)
        shuffle(names)
        for name in names:
            timing, start = timings[name], clock()
            sampled = samplers[name](round_seconds)
            spent[name] += clock() - start
            if sampled.samples:
                timing.add(sampled)
                timing.stop_reason = _stop(timing, spent[name], rel_error, max_seconds)
            else:
                timing.stop_reason = "failed"
            if timing.stop_reason:
                yield name, timings.pop(name)


def _stop(timing: Timing, spent: float, rel_error: float, max_seconds: float) -> str:
    error = timing.relative_error
    known = len(timing.bursts) >= FEWEST_ROUNDS and error <= NOISY_ERROR and not timing.preempted
    if known and error <= rel_error and len(timing.samples) >= FEWEST_SAMPLES:
        return "relative_error"
    recent = timing.medians[-PLATEAU_ROUNDS:]
    steady = len(timing.medians) > PLATEAU_ROUNDS and max(recent) - min(recent) <= rel_error / 4 * recent[-1]
    if known and steady:
        return "plateau"
    most = STRETCH if math.isfinite(error) else SLOW_STRETCH
    if (known and spent >= max_seconds) or spent >= most * max_seconds:
        return "budget"
    return ""
