"""The timing loop: bursts of samples, several runs in turn, until each median is known well enough.

Pure: the clock is an argument, nothing here knows what it times. One sample is the mean of `inner_loops` calls, so
that the clock's own resolution and cost stay far below it. Runs are sampled in rounds, a burst each in random order:
a machine that slows down slows them all (google/benchmark#1051: this cuts run-to-run variance by 40%).
A noisy result is a fact (`converged` is false), not an exception.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from latbench.tables import median_interval

Clock = Callable[[], float]
Run = Callable[[], object]
Sampler = Callable[[float], list[float]]
"""Times something for about the given seconds and returns its samples; none at all if it cannot go on."""

SHORTEST_SAMPLE_SECONDS = 1e-4  # a thousand times what reading perf_counter costs (50-100 ns)
FEWEST_SAMPLES = 10
FEWEST_ROUNDS = 3  # the spread between bursts is part of the noise
PLATEAU_ROUNDS = 6
NOISY_ERROR = 0.1  # a run whose median is not even known to this may use its budget STRETCH times over
STRETCH = 4
MOST_INNER_LOOPS = 1_000_000


@dataclass
class Timing:
    """What was sampled so far: seconds a call, in the order they were taken; `rounds[i]` is where burst i begins."""

    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    stop_reason: str = ""

    @property
    def converged(self) -> bool:
        """Whether the median is known to the error that was asked for."""
        return self.stop_reason == "relative_error"

    def add(self, burst: list[float]) -> None:
        """Take in a burst of samples."""
        self.rounds.append(len(self.samples))
        self.samples.extend(burst)
        self.medians.append(float(np.median(self.samples)))

    @property
    def relative_error(self) -> float:
        """Half the 95% interval of the median over the median; infinite while there are too few samples to tell."""
        low, high = median_interval(np.sort(self.samples))
        return float("inf") if low is None or high is None else (high - low) / 2 / self.medians[-1]

    def drift(self) -> float | None:
        """The median of the later half of the bursts over that of the earlier half; None with one burst."""
        if len(self.rounds) < 2:
            return None
        half = self.rounds[len(self.rounds) // 2]
        return float(np.median(self.samples[half:]) / np.median(self.samples[:half]))


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


def burst(run: Run, seconds: float, inner_loops: int, *, clock: Clock = perf_counter) -> list[float]:
    """Samples of `run` taken for about `seconds`, at least one: each the mean seconds a call of `inner_loops` calls.

    One untimed sample goes first: what ran before took the caches and put this run's threads to sleep. Garbage is not
    collected meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        _time(run, inner_loops, clock)
        end = clock() + seconds
        samples = [_time(run, inner_loops, clock) / inner_loops]
        while clock() < end:
            samples.append(_time(run, inner_loops, clock) / inner_loops)
    finally:
        if collecting:
            gc.enable()
    return samples


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
) -> Timing:
    """Time one callable in this process; see `interleave` for when it stops."""
    loops = calibrate(run, clock=clock)

    def sampler(seconds: float) -> list[float]:
        return burst(run, seconds, loops, clock=clock)

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
    used `max_seconds` (budget; up to four times that while it is not known to 10%), or when it returns no samples
    (failed). `order` shuffles the rounds.
    """
    shuffle = (order or random.Random(0)).shuffle
    timings = {name: Timing() for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    while timings:
        names = list(timings)
        shuffle(names)
        for name in names:
            timing, start = timings[name], clock()
            samples = samplers[name](round_seconds)
            spent[name] += clock() - start
            if samples:
                timing.add(samples)
            timing.stop_reason = _stop(timing, spent[name], rel_error, max_seconds) if samples else "failed"
            if timing.stop_reason:
                yield name, timings.pop(name)


def _stop(timing: Timing, spent: float, rel_error: float, max_seconds: float) -> str:
    rounds, error = len(timing.rounds), timing.relative_error
    if rounds >= FEWEST_ROUNDS and len(timing.samples) >= FEWEST_SAMPLES and error <= rel_error:
        return "relative_error"
    recent = timing.medians[-PLATEAU_ROUNDS:]
    steady = rounds > PLATEAU_ROUNDS and max(recent) - min(recent) <= rel_error / 4 * recent[-1]
    if steady and error <= NOISY_ERROR:
        return "plateau"
    if (spent >= max_seconds and error <= NOISY_ERROR) or spent >= STRETCH * max_seconds:
        return "budget"
    return ""
