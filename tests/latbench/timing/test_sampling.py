"""The timing loop under a clock that the tests turn themselves: no real time passes."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from latbench.machines.devices import CpuTimes
from latbench.timing import sampling
from latbench.timing.sampling import (
    BUDGET_STRETCH,
    FEWEST_ROUNDS,
    FEWEST_SAMPLES,
    NOISY_ERROR,
    Burst,
    ResourceUsage,
    Sampler,
    StopRule,
    Timing,
    WallClock,
    calibrate_inner_loops,
    estimate_burst_error,
    read_process_usage,
    sample_burst,
    sample_callable,
    sample_interleaved,
)


class FakeClock:
    """Reads `now`; reading costs nothing, running costs what the run says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.calls += 1
            self.now += seconds()

        return call


def alone() -> ResourceUsage:
    """The usage of a process that nothing disturbs."""
    return ResourceUsage(0, 0.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_steady_run_converges_at_once(clock: FakeClock) -> None:
    timing = sample_callable(
        clock.run(lambda: 0.001), StopRule(rel_error=0.01, max_seconds=10), clock=clock, usage=alone
    )
    assert timing.converged and timing.stop_reason == "relative_error"
    assert timing.samples == pytest.approx([1e-3] * len(timing.samples), rel=1e-9)
    assert len(timing.samples) >= FEWEST_SAMPLES and len(timing.bursts) == FEWEST_ROUNDS
    assert clock.now < 1.0


@pytest.mark.parametrize("seconds", [1e-9, 3e-7, 9e-5, 1.1e-4, 0.2])
def test_a_sample_is_long_enough_to_be_read(clock: FakeClock, seconds: float) -> None:
    loops = calibrate_inner_loops(clock.run(lambda: seconds), clock=clock)
    longest_needed = max(1, round(sampling.SHORTEST_SAMPLE_SECONDS / seconds))
    assert min(longest_needed, sampling.MOST_INNER_LOOPS) <= loops <= 2 * longest_needed + 1
    samples = sample_burst(clock.run(lambda: seconds), 0.0, loops, clock=clock, usage=alone)
    assert samples.samples == pytest.approx([seconds], rel=1e-6)


def test_one_long_reading_makes_no_sample_short(clock: FakeClock) -> None:
    """As when another process takes the core once: the first time that many calls are timed."""
    costs = itertools.chain([1e-6, 1e-2], itertools.repeat(1e-6))
    loops = calibrate_inner_loops(clock.run(lambda: next(costs)), clock=clock)
    assert loops * 1e-6 >= 0.99 * sampling.SHORTEST_SAMPLE_SECONDS


def test_calibration_ends_even_where_the_clock_stands(clock: FakeClock) -> None:
    assert calibrate_inner_loops(clock.run(lambda: 0.0), clock=clock) == sampling.MOST_INNER_LOOPS


def test_the_first_sample_of_a_burst_is_not_kept(clock: FakeClock) -> None:
    costs = iter([9.0] + [1.0] * 20)  # cold caches, then warm
    samples = sample_burst(clock.run(lambda: next(costs)), 4.5, 1, clock=clock, usage=alone)
    assert samples.samples == [1.0] * 5


def test_noise_is_a_fact_and_not_an_exception(clock: FakeClock) -> None:
    costs = itertools.cycle([1e-3, 9e-3])
    run = clock.run(lambda: next(costs))
    timing = sample_callable(run, StopRule(rel_error=0.001, max_seconds=0.5), clock=clock, usage=alone)
    assert not timing.converged and timing.stop_reason == "budget"
    assert timing.relative_error > NOISY_ERROR
    # It may stretch its budget, and no further.
    assert 0.5 <= clock.now <= BUDGET_STRETCH * 0.5 + 0.2


def test_a_well_known_median_ends_with_the_budget(clock: FakeClock, rng: np.random.Generator) -> None:
    run = clock.run(lambda: float(rng.normal(1e-3, 1e-4)))
    timing = sample_callable(run, StopRule(rel_error=1e-05, max_seconds=0.5), clock=clock, usage=alone)
    assert timing.stop_reason == "budget" and timing.relative_error < NOISY_ERROR
    assert clock.now < 0.7


def test_a_median_that_moves_no_more_is_a_plateau(clock: FakeClock) -> None:
    pattern = iter([1.0, 1.0, 1.08, 0.92] * 10_000)  # symmetric: the median stands, the interval stays wide for long
    run = clock.run(lambda: 5e-3 * next(pattern))
    timing = sample_callable(run, StopRule(rel_error=0.001, max_seconds=100), clock=clock, usage=alone)
    assert timing.stop_reason in ("plateau", "relative_error")
    assert np.median(timing.samples) == pytest.approx(5e-3, rel=1e-3)
    assert clock.now < 50


def test_what_more_samples_do_not_improve_is_a_plateau(clock: FakeClock) -> None:
    def sample(_: float) -> Burst:
        clock.now += 0.01
        # Slower and slower: every burst is exact, and each says something else.
        return Burst([1e-3 * (1 + clock.now)] * 10)

    timing = dict(sample_interleaved({"run": sample}, StopRule(rel_error=0.001, max_seconds=100), clock=clock))["run"]
    assert timing.stop_reason == "plateau" and clock.now < 2
    assert timing.relative_error > 0.001


def test_bursts_that_disagree_are_an_error_however_many_samples_they_have(clock: FakeClock) -> None:
    medians = itertools.cycle([1.0e-3, 1.1e-3, 1.2e-3])

    def sample(_: float) -> Burst:
        clock.now += 0.01
        return Burst([next(medians)] * 10_000)

    timing = dict(sample_interleaved({"run": sample}, StopRule(rel_error=0.01, max_seconds=0.2), clock=clock))["run"]
    low, high = np.quantile(timing.samples, [0.45, 0.55])
    assert low == high  # as independent samples they would know the median exactly
    assert not timing.converged and timing.relative_error > 0.03


def test_who_asks_is_told_before_every_burst(clock: FakeClock) -> None:
    happened: list[str] = []

    def sample(_: float) -> Burst:
        happened.append("burst")
        clock.now += 0.01
        return Burst([1e-3] * 10)

    dict(sample_interleaved({"run": sample}, clock=clock, between=lambda: happened.append("between")))
    assert happened == ["between", "burst"] * FEWEST_ROUNDS


def test_raw_samples_are_kept_in_order(clock: FakeClock) -> None:
    def rising() -> Iterator[float]:
        seconds = 1e-3
        while True:
            yield seconds
            seconds *= 1.001

    costs = rising()
    timing = sample_callable(
        clock.run(lambda: next(costs)), StopRule(rel_error=1e-09, max_seconds=0.3), clock=clock, usage=alone
    )
    assert timing.samples == sorted(timing.samples)
    drift = timing.drift()
    assert drift is not None and drift > 1.01
    assert [sample for burst in timing.bursts for sample in burst.samples] == timing.samples


def sampler(clock: FakeClock, happened: list[str], name: str, seconds: float, count: int) -> Sampler:
    """Bursts of `count` samples that take their time on the clock, and are noted."""

    def sample(_: float) -> Burst:
        happened.append(name)
        clock.now += count * seconds
        return Burst([seconds] * count)

    return sample


def test_every_session_gives_as_many_rounds_before_the_next_begins(clock: FakeClock) -> None:
    happened: list[str] = []
    finished = dict(
        sample_interleaved(
            {name: sampler(clock, happened, name, 0.001, count=10) for name in "ab"},
            StopRule(max_seconds=1, sessions=3),
            clock=clock,
            renew=lambda session: happened.append(f"session {session}"),
        )
    )
    rounds = 2 * sampling.SESSION_ROUNDS
    assert happened[rounds] == "session 1" and happened[2 * rounds + 1] == "session 2"
    assert sorted(happened) == sorted(["a", "b"] * 3 * sampling.SESSION_ROUNDS + ["session 1", "session 2"])
    assert {timing.stop_reason for timing in finished.values()} == {"relative_error"}


def test_a_slow_run_waits_for_the_next_session_when_its_seconds_are_used(clock: FakeClock) -> None:
    happened: list[str] = []
    of = (("slow", 0.05), ("quick", 1e-3))
    found = sample_interleaved(
        {name: sampler(clock, happened, name, seconds, count=2) for name, seconds in of},
        StopRule(max_seconds=0.7, sessions=3),
        clock=clock,
        renew=lambda session: happened.append("|"),
    )
    timings = dict(found)
    sessions = "".join(name[0] for name in happened).split("|")
    assert [each.count("s") for each in sessions] == [7, 7, 7]
    assert [each.count("q") for each in sessions] == [sampling.SESSION_ROUNDS] * 3
    assert len(timings["slow"].bursts) == 21 and timings["slow"].stop_reason == "relative_error"


def test_nothing_is_built_anew_when_all_runs_failed(clock: FakeClock) -> None:
    sessions: list[int] = []
    found = sample_interleaved({"a": lambda _: Burst([])}, StopRule(sessions=3), clock=clock, renew=sessions.append)
    assert dict(found)["a"].stop_reason == "failed" and sessions == []


def test_runs_take_turns(clock: FakeClock) -> None:
    order: list[str] = []
    samplers = {
        name: sampler(clock, order, name, seconds, count=4)
        for name, seconds in (("a", 1e-3), ("b", 2e-3), ("c", 3e-3))
    }
    finished = dict(sample_interleaved(samplers, StopRule(rel_error=0.01, max_seconds=1), clock=clock))
    assert {name: timing.samples[0] for name, timing in finished.items()} == {"a": 1e-3, "b": 2e-3, "c": 3e-3}
    rounds = [set(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == [{"a", "b", "c"}] * FEWEST_ROUNDS


def test_a_slowdown_in_the_middle_hits_all_alike(clock: FakeClock) -> None:
    def sampler(seconds: float) -> Sampler:
        def sample(_: float) -> Burst:
            slow = 1.5 if 0.2 < clock.now < 0.6 else 1.0
            clock.now += 10 * seconds * slow
            return Burst([seconds * slow] * 10)

        return sample

    samplers = {"fast": sampler(1e-3), "slow": sampler(2e-3)}
    finished = dict(sample_interleaved(samplers, StopRule(rel_error=1e-09, max_seconds=0.6), clock=clock))
    means = {name: np.mean(timing.samples) for name, timing in finished.items()}
    # Measured one after the other, the ratio would be up to 1.5 times off.
    assert means["slow"] / means["fast"] == pytest.approx(2, rel=0.1)


def test_who_gives_nothing_drops_out_and_the_others_go_on(clock: FakeClock) -> None:
    def broken(_: float) -> Burst:
        return Burst([])

    def works(_: float) -> Burst:
        clock.now += 0.01
        return Burst([0.001] * 10)

    finished = dict(sample_interleaved({"broken": broken, "works": works}, clock=clock))
    assert finished["broken"].stop_reason == "failed" and finished["broken"].samples == []
    assert finished["works"].converged


def test_very_slow_calls_get_enough_samples_for_an_interval(clock: FakeClock) -> None:
    timing = sample_callable(clock.run(lambda: 0.25), StopRule(max_seconds=1.0), clock=clock, usage=alone)
    assert len(timing.samples) >= 6 and np.isfinite(timing.relative_error)


def used(
    switches: int = 0, cpu: float = 0.0, waited: float | None = 0.0, stolen: int = 0, ticks: int | None = 6
) -> ResourceUsage:
    """What a process used when it had used so much more than at the start."""
    machine = None if ticks is None else CpuTimes(1000 + ticks, 70 + stolen)
    return ResourceUsage(10 + switches, 5 + cpu, None if waited is None else 2 + waited, machine)


@pytest.mark.parametrize(
    ("after", "reasons"),
    [
        # 30 ms of CPU time: what an undisturbed run may have is one switch and 60 a second.
        (used(2, 0.03, None), ()),
        (used(3, 0.03, None), ("preempted",)),
        (used(300, 0.03, None), ("preempted",)),
        (used(300, 0.057, 0.002), ()),  # threads waited for 2 ms of 59 in which they could have run, however often
        (used(0, 0.057, 0.004), ("preempted",)),
        (used(0, 0.03, stolen=1), ("stolen",)),
        (used(0, 0.03, 0.01, stolen=1), ("preempted", "stolen")),
        (used(0, 0.03, None, ticks=None), ()),
        # The same share of more threads and processors: as little, or as much.
        (used(300, 32 * 0.03, 0.02), ()),
        (used(300, 32 * 0.03, 0.08), ("preempted",)),
        (used(0, 32 * 0.03, stolen=4, ticks=96), ()),
        (used(0, 32 * 0.03, stolen=6, ticks=96), ("stolen",)),
    ],
)
def test_a_burst_that_others_cut_into_says_so(
    clock: FakeClock, after: ResourceUsage, reasons: tuple[str, ...]
) -> None:
    readings = iter([used(ticks=0 if after.machine else None), after])
    burst = sample_burst(clock.run(lambda: 1e-2), 0.03, 1, clock=clock, usage=lambda: next(readings))
    assert burst.reasons == reasons and burst.preempted is bool(reasons)


def test_this_process_knows_how_long_it_waited_for_a_core() -> None:
    before, after = read_process_usage(), read_process_usage()
    assert after.cpu_seconds >= before.cpu_seconds and after.switches >= before.switches
    if before.waited_seconds is not None:
        assert after.waited_seconds is not None and after.waited_seconds >= before.waited_seconds > 0


def test_a_burst_at_a_low_clock_does_not_count(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    hertz = iter([3e9, 2.9e9, 2.2e9, 2.3e9, None])
    monkeypatch.setattr(sampling, "read_scaling_hertz", lambda: next(hertz))
    monkeypatch.setattr("latbench.timing.sampling.sample_burst", lambda *args: Burst([1e-3], reasons=()))
    timer = WallClock(lambda: None)
    bursts = [timer.burst(0.01) for _ in range(5)]
    assert [burst.preempted for burst in bursts] == [False, False, True, False, False]
    assert bursts[2].reasons == ("slow_clock",)


def test_preempted_bursts_do_not_count_once_there_are_enough_others(clock: FakeClock) -> None:
    busy = iter([True, True, True, True, False, True] + [False] * 100)

    def sample(_: float) -> Burst:
        clock.now += 0.03
        preempted = next(busy)
        return Burst([9e-3 if preempted else 1e-3] * 10, preempted)

    timing = dict(sample_interleaved({"run": sample}, clock=clock))["run"]
    # Four slow bursts agree to the last digit, and are no reason to stop.
    assert timing.converged and not timing.preempted and timing.samples == [1e-3] * 50
    assert timing.discarded == 50


def test_where_others_never_rest_the_result_says_so(clock: FakeClock) -> None:
    def sample(_: float) -> Burst:
        clock.now += 0.03
        return Burst([9e-3] * 10, preempted=True)

    timing = dict(sample_interleaved({"run": sample}, StopRule(max_seconds=0.3), clock=clock))["run"]
    assert timing.stop_reason == "budget" and timing.preempted and not timing.converged
    assert set(timing.samples) == {9e-3} and clock.now < 1.0


def test_garbage_is_collected_again_afterwards(clock: FakeClock) -> None:
    import gc

    seen: list[bool] = []

    def run() -> None:
        seen.append(gc.isenabled())
        clock.now += 1.0

    sample_burst(run, 1.0, 1, clock=clock, usage=alone)
    assert gc.isenabled() and not any(seen)


def test_a_rest_is_no_measuring_time(clock: FakeClock) -> None:
    """An engine whose threads must come to rest is measured for as long as any other."""

    def bursts(rest: float) -> int:
        rng = np.random.default_rng(0)

        def sampler(seconds: float) -> Burst:
            clock.now += seconds + rest
            return Burst(list(rng.uniform(1e-3, 2e-3, 10)), rest_seconds=rest)

        found = sample_interleaved(
            {"it": sampler}, StopRule(max_seconds=0.4, round_seconds=0.015, rel_error=1e-06), clock=clock
        )
        return len(next(found)[1].bursts)

    assert bursts(0.04) == bursts(0.0) > 10


def test_no_time_at_all_is_an_error_and_no_crash() -> None:
    timing = Timing()
    for _ in range(3):
        timing.add(Burst([0.0] * 10))
    assert timing.relative_error == np.inf


def test_how_bursts_disagree_is_known_by_itself() -> None:
    assert estimate_burst_error([[1e-3] * 9]) is None
    assert estimate_burst_error([[1e-3] * 9, [1e-3] * 9]) == 0
    # Normal medians of a known spread: the 95% interval of their median is 1.96 * 1.2533 / sqrt(count) of it.
    medians = np.random.default_rng(0).normal(1e-3, 2e-5, 4000)
    found = estimate_burst_error([[median] * 3 for median in medians])
    assert found == pytest.approx(1.96 * 1.2533 * 0.02 / 4000**0.5, rel=0.1)
    timing = Timing()
    for median in (1e-3, 1.2e-3, 1e-3, 1.2e-3):
        timing.add(Burst([median] * 20))
    assert timing.burst_error == timing.relative_error > 0.1
