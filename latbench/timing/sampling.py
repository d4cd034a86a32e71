"""The sampling loop: bursts of samples, several callables in turn, until each median is known well enough.

Pure: the clock is an argument, and nothing here knows what is timed. One sample is the mean of `inner_loops` calls,
so that the clock's resolution and cost stay far below it. Callables are sampled in rounds, a short burst each in
random order. So a machine that slows down slows them all (google/benchmark#1051: this cuts run-to-run variance by
40%), and the bursts of one callable are far apart in time. How much they disagree is part of the error. A noisy
result is a fact (`converged` is false), not an exception.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import numpy as np

from latbench.base.median_interval import bound_median
from latbench.machines import devices
from latbench.machines.devices import read_cpu_times, read_scaling_hertz

Clock = Callable[[], float]
Run = Callable[[], object]


class ResourceUsage(NamedTuple):
    """Resources that this process has used or missed; None where the system does not say.

    Parameters
    ----------
    switches
        Involuntary context switches.
    cpu_seconds
        CPU time.
    waited_seconds
        Time that all its threads together waited for a core.
    machine
        Clock ticks of the machine.
    """

    switches: int
    cpu_seconds: float
    waited_seconds: float | None = None
    machine: devices.CpuTimes | None = None


UsageReader = Callable[[], ResourceUsage]
"""Reads what this process used so far."""

SHORTEST_SAMPLE_SECONDS = 1e-4  # a thousand times the cost of reading perf_counter (50-100 ns)
MOST_INNER_LOOPS = 1_000_000

FEWEST_SAMPLES = 10
FEWEST_ROUNDS = 5  # the spread between bursts is part of the noise
PLATEAU_ROUNDS = 6
SESSION_ROUNDS = 16  # rounds of each of several sessions: about as many as a single session has
# nvbench's idea: stop where more samples do not reduce the error. Twice as many independent ones would by 29%.
PLATEAU_GAIN, PLATEAU_BURSTS = 0.05, 16
NOISY_ERROR = 0.1  # above this error a callable may use its budget BUDGET_STRETCH times
BUDGET_STRETCH = 2
SLOW_BUDGET_STRETCH = 20  # for calls so slow that the six samples of an interval are missing

# Measured on two cores: alone, a run is preempted 0 to 3 times in a burst of 30 ms, about 25 times a CPU second;
# beside one to four busy processes 200 to 300 times, and its median is 1.3 to 13 times longer.
PREEMPTIONS_PER_SECOND = 60
# Share of a burst that threads waited for a core, of the time that they ran or waited.
# Measured on two cores with two threads: 0.25% alone, 20% and more beside one busy process. Context switches need not
# show it, because a thread may wake up on a busy core.
MOST_WAITED = 0.05
# Share of all processors' time that the hypervisor gave to others in a burst. It is counted in ticks of 10 ms: on two
# cores a tick is a third of a burst of 15 ms, on 64 cores a hundredth.
MOST_STOLEN = 0.05
SLOW_CLOCK = 0.75  # of the fastest clock so far: nvbench's threshold

PREEMPTED, STOLEN, SLOWED = "preempted", "stolen", "slow_clock"


@dataclass(frozen=True)
class Burst:
    """Samples taken one after the other, in seconds a call.

    Parameters
    ----------
    samples
        The samples.
    preempted
        Whether other processes took the cores, or heat slowed a GPU down.
    states
        States that the device reported.
    reasons
        How the disturbance showed.
    discarded
        Further samples that were left out at once.
    rest_seconds
        Time for threads to come to rest afterwards.
    began
        Start, by the clock of the sampling loop.
    """

    samples: list[float]
    preempted: bool = False
    states: tuple[Any, ...] = ()
    reasons: tuple[str, ...] = ()
    discarded: int = 0
    rest_seconds: float = 0.0
    began: float = math.nan


Sampler = Callable[[float], Burst]
"""Times something for about the given seconds; a burst without samples if it cannot go on."""


@dataclass
class Timing:
    """All samples so far, burst by burst. Preempted bursts do not count as long as there are enough others."""

    bursts: list[Burst] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    stop_reason: str = ""

    def add(self, burst: Burst) -> None:
        """Add a burst."""
        self.bursts.append(burst)
        samples = np.sort(self.samples)
        self.medians.append(float(np.median(samples)))
        self.errors.append(max(_sample_error(samples), self.burst_error or 0.0))

    @property
    def preempted(self) -> bool:
        """Whether preempted bursts count, because there are too few others."""
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
    def discarded(self) -> int:
        """How many samples do not count."""
        every = sum(len(burst.samples) + burst.discarded for burst in self.bursts)
        return every - sum(len(burst.samples) for burst in self.counted)

    @property
    def reasons(self) -> list[str]:
        """How disturbances showed, in all bursts."""
        return sorted({reason for burst in self.bursts for reason in burst.reasons})

    @property
    def states(self) -> list[Any]:
        """The device's states during the bursts that count."""
        return [state for burst in self.counted for state in burst.states]

    @property
    def converged(self) -> bool:
        """Whether the median is known to the wanted error."""
        return self.stop_reason == "relative_error"

    @property
    def relative_error(self) -> float:
        """Half of the 95% interval of the median over the median; infinite with too few samples.

        The larger of two estimates: from independent samples, and from the medians of the bursts.
        """
        return self.errors[-1]

    @property
    def burst_error(self) -> float | None:
        """The error estimated from the medians of the bursts; None with one burst."""
        return estimate_burst_error([burst.samples for burst in self.counted])

    def drift(self) -> float | None:
        """Return the median of the later half of the counted bursts over that of the earlier half; None with one
        burst.
        """
        bursts = self.counted
        if len(bursts) < 2:
            return None
        early, late = (
            np.median([sample for burst in half for sample in burst.samples])
            for half in (bursts[: len(bursts) // 2], bursts[len(bursts) // 2 :])
        )
        return float(late / early)


def _sample_error(ordered: np.ndarray) -> float:
    """Return half of the 95% interval of the median of rising samples, over the median."""
    low, high = bound_median(ordered)
    middle = float(np.median(ordered))
    return math.inf if low is None or high is None or middle <= 0 else (high - low) / 2 / middle


# The standard error of a median of normal values is this much larger than that of their mean (sqrt(pi / 2)), and the
# median absolute deviation this much smaller than the standard deviation.
_OF_A_MEDIAN, _MAD = 1.2533, 0.6745


def estimate_burst_error(bursts: Sequence[Sequence[float]]) -> float | None:
    """Return half of the 95% interval of the median of the medians of `bursts`, over it.

    None with a single burst, because the next may differ.
    """
    if len(bursts) < 2:
        return None
    medians = np.array([np.median(burst) for burst in bursts])
    middle = float(np.median(medians))
    if middle <= 0:  # an invalid time, which `explain_impossible` reports
        return math.inf
    deviation = float(np.median(np.abs(medians - middle))) / _MAD
    return 1.96 * _OF_A_MEDIAN * deviation / math.sqrt(len(medians)) / middle


class Timer(Protocol):
    """Work that is ready to be timed; `inner_loops` calls make one sample."""

    @property
    def inner_loops(self) -> int:
        """Calls per sample."""

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the point's row."""

    def burst(self, seconds: float) -> Burst:
        """Return samples taken for about `seconds`, at least one."""


class WallClock:
    """A timer of a callable by this process's clock.

    The callable's attribute `facts` holds columns of the point's row. With the attribute `rest_seconds`, its threads
    spin for that long after a call. A burst then ends when they have come to rest, before another engine is timed.
    """

    def __init__(self, run: Run) -> None:
        self.inner_loops = calibrate_inner_loops(run)
        self.facts: dict[str, Any] = getattr(run, "facts", {})
        self._run = run
        self._rest_seconds: float = getattr(run, "rest_seconds", 0.0)
        self._fastest_hertz = 0.0

    def burst(self, seconds: float) -> Burst:
        """Return samples taken for about `seconds`, at least one."""
        taken = replace(sample_burst(self._run, seconds, self.inner_loops), rest_seconds=self._rest_seconds)
        hertz = read_scaling_hertz()  # while the cores are still warm from it
        sleep(self._rest_seconds)
        if hertz is None:
            return taken
        self._fastest_hertz = max(self._fastest_hertz, hertz)
        if hertz >= SLOW_CLOCK * self._fastest_hertz:
            return taken
        return replace(taken, preempted=True, reasons=(*taken.reasons, SLOWED))


_THREADS = Path("/proc/self/task")


def read_process_usage() -> ResourceUsage:
    """Return the resources that all threads of this process used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    waited = 0
    try:
        for thread in _THREADS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it just ended
                waited += int((thread / "schedstat").read_bytes().split()[1])
    except (OSError, IndexError):  # not Linux, or a kernel that keeps no count
        return ResourceUsage(used.ru_nivcsw, used.ru_utime + used.ru_stime)
    return ResourceUsage(used.ru_nivcsw, used.ru_utime + used.ru_stime, waited / 1e9, read_cpu_times())


def calibrate_inner_loops(run: Run, *, clock: Clock = perf_counter) -> int:
    """Return how many calls of `run` make a sample long enough for the clock; calls it a few times."""
    run()
    loops = 1
    while loops < MOST_INNER_LOOPS:
        seconds = _time(run, loops, clock)
        if seconds >= SHORTEST_SAMPLE_SECONDS:  # one long reading may be a disturbance
            seconds = min(seconds, _time(run, loops, clock))
        if seconds >= SHORTEST_SAMPLE_SECONDS:
            break
        # Aim a little higher, but never leap after one short reading.
        wanted = 1.2 * SHORTEST_SAMPLE_SECONDS / max(seconds, 1e-9)
        loops = min(MOST_INNER_LOOPS, max(loops + 1, int(loops * min(wanted, 10.0))))
    return loops


def sample_burst(
    run: Run,
    seconds: float,
    inner_loops: int,
    *,
    clock: Clock = perf_counter,
    usage: UsageReader = read_process_usage,
) -> Burst:
    """Return samples of `run` taken for about `seconds`, at least one; each is the mean of `inner_loops` calls.

    One untimed sample goes first, because other work took the caches and let this work's threads sleep. Garbage is
    not collected meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        before = usage()
        _time(run, inner_loops, clock)
        end = clock() + seconds
        samples = [_time(run, inner_loops, clock) / inner_loops]
        while clock() < end:
            samples.append(_time(run, inner_loops, clock) / inner_loops)
        after = usage()
    finally:
        if collecting:
            gc.enable()
    reasons = find_disturbances(before, after)
    return Burst(samples, bool(reasons), reasons=reasons)


def find_disturbances(before: ResourceUsage, after: ResourceUsage) -> tuple[str, ...]:
    """Return how it shows that others had the cores between two readings: PREEMPTED, STOLEN, or nothing.

    Where the system counts how long threads waited for a core, context switches are ignored, because each may be
    short.
    """
    ran = after.cpu_seconds - before.cpu_seconds
    if before.waited_seconds is not None and after.waited_seconds is not None:
        waited = after.waited_seconds - before.waited_seconds
        preempted = waited > MOST_WAITED * (ran + waited)
    else:
        preempted = after.switches - before.switches > 1 + PREEMPTIONS_PER_SECOND * ran
    stolen = False
    if before.machine is not None and after.machine is not None:
        ticks = after.machine.total - before.machine.total
        stolen = after.machine.steal - before.machine.steal > MOST_STOLEN * ticks
    return ((PREEMPTED,) if preempted else ()) + ((STOLEN,) if stolen else ())


def _time(run: Run, loops: int, clock: Clock) -> float:
    start = clock()
    for _ in range(loops):
        run()
    return clock() - start


@dataclass(frozen=True)
class StopRule:
    """When the sampling of a callable ends.

    It ends for one of four reasons, which is the `stop_reason` of its Timing:

    - ``relative_error``: the 95% interval of its median is within `rel_error` of the median on either side.
    - ``plateau``: the median stayed within a quarter of that error for several rounds although samples scatter, or
      twice as many bursts have not narrowed the interval.
    - ``budget``: it has used `max_seconds`. It may use twice as much while the median is not known to 10%, or while
      too few bursts were undisturbed; and longer while calls are so slow that six samples are missing.
    - ``failed``: its sampler returned no samples.

    Parameters
    ----------
    rel_error
        Wanted half of the 95% confidence interval of the median, over the median.
    max_seconds
        Seconds of sampling in each session.
    round_seconds
        Seconds of a burst.
    sessions
        Sessions, between which everything is built anew.
    """

    rel_error: float = 0.01
    max_seconds: float = 2.0
    round_seconds: float = 0.05
    sessions: int = 1


DEFAULT_RULE = StopRule()


def sample_callable(
    run: Run, rule: StopRule = DEFAULT_RULE, *, clock: Clock = perf_counter, usage: UsageReader = read_process_usage
) -> Timing:
    """Sample one callable in this process until `rule` ends it; see `sample_interleaved`."""
    loops = calibrate_inner_loops(run, clock=clock)

    def sampler(seconds: float) -> Burst:
        return sample_burst(run, seconds, loops, clock=clock, usage=usage)

    return next(sample_interleaved({"run": sampler}, rule, clock=clock))[1]


def sample_interleaved(
    samplers: Mapping[str, Sampler],
    rule: StopRule = DEFAULT_RULE,
    *,
    clock: Clock = perf_counter,
    order: random.Random | None = None,
    between: Callable[[], None] = lambda: None,
    renew: Callable[[int], None] = lambda session: None,
) -> Iterator[tuple[str, Timing]]:
    """Sample several callables in rounds, one burst each per round, and yield each as it finishes.

    With several sessions, each but the last has SESSION_ROUNDS rounds; then `renew` builds everything anew. Each
    session adds `rule.max_seconds` to what a callable may use. A callable that has used its seconds waits for the
    next session. None finishes before the last session.

    Parameters
    ----------
    samplers
        A sampler for each callable, by name.
    rule
        When the sampling of each callable ends.
    clock
        Returns seconds.
    order
        Shuffles each round.
    between
        Is called before every burst.
    renew
        Is called with the number of each session from 1 on.
    """
    shuffle = (order or random.Random(0)).shuffle
    timings = {name: Timing() for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    for session in range(rule.sessions):
        if session and timings:
            renew(session)
        last, granted = session == rule.sessions - 1, (session + 1) * rule.max_seconds
        for rounds in itertools.count(1) if last else range(SESSION_ROUNDS):
            names = [name for name in timings if last or spent[name] < granted]
            if not names:
                break
            shuffle(names)
            for name in names:
                between()
                timing, start = timings[name], clock()
                sampled = samplers[name](rule.round_seconds)
                spent[name] += clock() - start - sampled.rest_seconds
                if not sampled.samples:
                    timing.stop_reason = "failed"
                else:
                    timing.add(replace(sampled, began=start))
                    if last and (rule.sessions == 1 or rounds >= SESSION_ROUNDS or spent[name] >= granted):
                        timing.stop_reason = _stop(timing, spent[name], rule.rel_error, granted)
                if timing.stop_reason:
                    yield name, timings.pop(name)


def _stop(timing: Timing, spent: float, rel_error: float, max_seconds: float) -> str:
    error = timing.relative_error
    known = len(timing.bursts) >= FEWEST_ROUNDS and error <= NOISY_ERROR and not timing.preempted
    if known and error <= rel_error and len(timing.samples) >= FEWEST_SAMPLES:
        return "relative_error"
    recent = timing.medians[-PLATEAU_ROUNDS:]
    steady = len(timing.medians) > PLATEAU_ROUNDS and max(recent) - min(recent) <= rel_error / 4 * recent[-1]
    bursts = len(timing.errors)
    useless = bursts >= PLATEAU_BURSTS and error > (1 - PLATEAU_GAIN) * timing.errors[bursts // 2 - 1]
    if known and (steady or useless):
        return "plateau"
    most = BUDGET_STRETCH if math.isfinite(error) else SLOW_BUDGET_STRETCH
    if (known and spent >= max_seconds) or spent >= most * max_seconds:
        return "budget"
    return ""
