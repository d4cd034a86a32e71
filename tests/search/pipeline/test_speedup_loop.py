"""The promise is measured: searched, timed, corrected, searched again. Machines here are formulas."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from latbench.errors import PromiseMissed, UsageError
from search.knapsack.arrays import Choice, Infeasible, sum_in_order
from search.pipeline.search_job import build_search_round
from search.pipeline.search_request import SearchPlan
from search.pipeline.speedup_loop import (
    MeasuredSpeedup,
    PromisedProfile,
    TargetMissed,
    TimeProfiles,
    calibrate_to,
    interpolate,
    pool_sessions,
    run_speedup_loop,
)
from search.problem.layers import DENSE, Interval, LayerOptions, Option, expand_choice
from search.problem.limits import Limits
from search.problem.problem import Problem
from search.problem.second_budget import SecondBudget
from search.strategies.evaluation_budget import SearchResult
from search.strategies.run_strategy import STRATEGIES, StrategySettings, run_strategy
from search.task import Task
from search.traced_layers import list_prunable_layers
from search.whole_model.sessions import Session
from search.whole_model.timings import Timings

SPARSITIES = (0.0, 0.5, 0.6, 0.75, 0.8, 0.9, 0.95)
OPTIONS = tuple(Option(DENSE if s == 0 else "vector:8", s) for s in SPARSITIES)
LAYERS = 6
DENSE_SECONDS = 10.0
FIXED = 0.5


def problem(spread: float = 0.02) -> Problem:
    seconds = np.array([1.5 * (1 - s) + 0.05 for s in SPARSITIES])
    errors = np.array([s**3 for s in SPARSITIES])
    layers = tuple(
        LayerOptions(f"fc{i}", OPTIONS, seconds, seconds * (1 - spread), seconds * (1 + spread), errors * (1 + i))
        for i in range(LAYERS)
    )
    return Problem(
        layers, Interval(FIXED, FIXED, FIXED), Interval(DENSE_SECONDS, DENSE_SECONDS, DENSE_SECONDS), "torch"
    )


def loss(choice: Choice) -> float:
    return sum((1 + i) * SPARSITIES[j] ** 2 for i, j in enumerate(choice))


class Evaluator:
    """Losses by a formula; on fewer than all batches, another one. `asked` are the profiles judged on all."""

    def __init__(self, loss: Callable[[Choice], float] = loss, few: Callable[[Choice], float] | None = None) -> None:
        self._loss, self._few = loss, few or loss
        self.batches = 1 if few is None else 4
        self.asked: set[Choice] = set()

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        if batches < self.batches:
            return list(map(self._few, choices))
        self.asked.update(choices)
        return list(map(self._loss, choices))

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("a formula has no gradient")


def machine(slowness: float, noise: float = 0.01) -> tuple[TimeProfiles, list[Choice]]:
    """A machine on which the layers take `slowness` times what is predicted; and what it was asked to time."""
    asked: list[Choice] = []

    def measure(choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        asked.extend(choice for choice in choices if choice not in asked)
        return [measure_one(choice) for choice in choices]

    def measure_one(choice: Choice) -> MeasuredSpeedup:
        seconds = FIXED + slowness * sum(float(problem().layers[0].seconds[j]) for j in choice)
        value = DENSE_SECONDS / seconds
        dense = Interval(DENSE_SECONDS, DENSE_SECONDS, DENSE_SECONDS)
        return MeasuredSpeedup(Interval(value, value * (1 - noise), value * (1 + noise)), dense, "onnxruntime")

    return measure, asked


PLAN = SearchPlan(evaluations=150)


def quiet(what: str, done: int | None, total: int | None) -> None:
    return None


def promised(
    problem: Problem,
    evaluator: Evaluator,
    measure: TimeProfiles,
    target: float,
    plan: SearchPlan = PLAN,
    **options: Any,
) -> PromisedProfile:  # fmt: skip
    search = build_search_round(plan, target, evaluator, quiet, **options)
    return run_speedup_loop(problem, search, measure, target)


@pytest.mark.parametrize("slowness", [0.8, 0.95, 1.0, 1.1, 1.3])
def test_what_is_returned_was_measured_to_keep_the_promise(slowness: float) -> None:
    measure, asked = machine(slowness)
    kept = promised(problem(), Evaluator(), measure, 2.0)
    assert kept.found.choice in asked
    assert kept.measured.speedup.low >= 2.0
    assert len(asked) <= 4
    predicted = kept.problem.predict(kept.found.choice)
    assert predicted.value == pytest.approx(kept.measured.seconds.value)
    assert (predicted.low, predicted.high) == pytest.approx((kept.measured.seconds.low, kept.measured.seconds.high))
    assert kept.problem.speedup(predicted).low == pytest.approx(kept.measured.speedup.low)


def test_speed_to_spare_is_turned_into_accuracy() -> None:
    measure, asked = machine(0.7)
    kept = promised(problem(), Evaluator(), measure, 2.0)
    assert loss(kept.found.choice) < loss(asked[0])
    assert kept.measured.speedup.low < measure(asked[:1])[0].speedup.low


def test_a_machine_that_is_too_slow_is_said_with_what_it_reached() -> None:
    # No correction helps: whatever is timed is slow.
    dense = Interval(DENSE_SECONDS, DENSE_SECONDS, DENSE_SECONDS)
    slow = MeasuredSpeedup(Interval(1.2, 1.1, 1.3), dense, "torch")
    with pytest.raises((PromiseMissed, Infeasible), match=r"2x is infeasible: the best is 1\.\d+x|best reached"):
        promised(problem(), Evaluator(), lambda choices: [slow] * len(choices), 2.0)


def test_a_profile_that_one_bad_session_failed_may_hold_when_it_is_timed_again() -> None:
    steady, asked = machine(1.0)
    sessions: list[int] = []

    def measure(choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        sessions.append(len(choices))
        found = steady(choices)
        return [replace(one, speedup=Interval(1.5, 1.4, 1.6)) for one in found] if len(sessions) == 1 else found

    kept = promised(problem(), Evaluator(), measure, 2.0)
    assert sessions[:2] == [1, 2]
    assert kept.found.loss == min(loss(choice) for choice in asked if steady([choice])[0].speedup.low >= 2.0)


def session(dense: float, name: str, *pruned: float) -> Session:
    """A profile timed in as many buildings as it has seconds."""
    blocks = {"torch": [[dense] * 5] * len(pruned), "openvino": [[9.0] * 5] * len(pruned)}
    timings = Timings({**blocks, name: [[one] * 5 for one in pruned]}, {}, tuple(range(len(pruned))))
    return Session({name: {"fc1": ("dense", 0.0)}}, timings)


def test_sessions_are_pooled_and_more_of_them_promise_more() -> None:
    first = session(4.0, "a", 1.9, 2.0, 2.1)
    one = pool_sessions([first], "a", 0.9)
    two = pool_sessions([first, session(4.0, "b", 1.0, 1.0, 1.0), first], "a", 0.9)
    assert one.speedup.value == two.speedup.value == pytest.approx(2.0, rel=2e-3)
    assert one.speedup.low < two.speedup.low < 2.0 < two.speedup.high < one.speedup.high
    assert (two.dense, two.dense_engine) == (Interval(4.0, 4.0, 4.0), "torch")


def test_a_speedup_is_over_the_engine_that_was_the_fastest_in_each_session() -> None:
    slow = session(12.0, "a", 2.0, 2.0, 2.0)  # there openvino is faster, with 9
    assert pool_sessions([slow], "a", 0.9).dense_engine == "openvino"
    both = pool_sessions([slow, session(4.5, "a", 1.0, 1.0, 1.0)], "a", 0.9)
    assert both.speedup.value == pytest.approx(4.5)


def test_rounds_close_in_where_seconds_are_no_line() -> None:
    # Sparse layers are as fast as predicted, others much slower: one correction for all overshoots either way.
    def measure(choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        found = []
        for choice in choices:
            layers = sum_in_order(float(problem().layers[0].seconds[j]) ** 0.6 for j in choice)
            value = DENSE_SECONDS / (FIXED + 0.9 * layers)
            dense = Interval(DENSE_SECONDS, DENSE_SECONDS, DENSE_SECONDS)
            found.append(MeasuredSpeedup(Interval(value, 0.97 * value, 1.03 * value), dense, "torch"))
        return found

    for target in (2.0, 2.4, 2.8):
        kept = promised(problem(), Evaluator(), measure, target)
        assert target <= kept.measured.speedup.low <= 1.12 * target


class Crooked:
    """A machine of its own: options are off by some per cent each, seconds bend, and sessions scatter.

    Sums are in order: those of `sum` have other last bits from Python 3.12 on, and then other profiles are tried.
    `reached` is what its fastest profile reaches. `find` looks for the least of other errors than the layers have.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        alone = [rng.uniform(0.5, 2) * (1 - 0.95 * np.array(SPARSITIES)) for _ in range(LAYERS)]
        errors = [rng.uniform(0.2, 1) * np.array(SPARSITIES) ** 2 for _ in range(LAYERS)]
        self._weights = [e * rng.uniform(0.3, 3) for e in errors]
        fixed = 0.1 * sum_in_order(float(t[0]) for t in alone)
        self._dense = sum_in_order(float(t[0]) for t in alone) + fixed
        layers = [
            LayerOptions(f"fc{i}", OPTIONS, t, 0.97 * t, 1.03 * t, e)
            for i, (t, e) in enumerate(zip(alone, errors, strict=True))
        ]
        whole = Interval(self._dense, self._dense, self._dense)
        self.problem = Problem(tuple(layers), Interval(fixed, 0.95 * fixed, 1.05 * fixed), whole, "torch")
        slower, bend, around = rng.uniform(0.75, 1.4), rng.uniform(0.5, 1.3), fixed * rng.uniform(0.6, 1.8)
        self._inside = [slower * t[0] * (t / t[0]) ** bend * np.exp(rng.normal(0, 0.05, len(t))) for t in alone]
        self._around = around
        self._found: dict[Choice, list[float]] = {}
        self.sessions = 0
        self.reached = self._speedup(tuple(int(t.argmin()) for t in self._inside))

    def _speedup(self, choice: Choice) -> float:
        inside = sum_in_order(float(t[j]) for t, j in zip(self._inside, choice, strict=True))
        return self._dense / (self._around + inside)

    def measure(self, choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        self.sessions += 1
        answers = []
        for choice in choices:
            log = math.log(self._speedup(choice)) + self._rng.normal(0, 0.013)
            known = self._found.setdefault(choice, [])
            known.append(log)
            value, room = math.exp(np.mean(known)), math.exp(0.03 + 0.02 / len(known))
            answers.append(MeasuredSpeedup(Interval(value, value / room, value * room), self.problem.dense, "torch"))
        return answers

    def find(self, problem: Problem, number: int, missed: Collection[Choice], target: float) -> SearchResult:
        choice = problem.solver(target)(self._weights if number else problem.errors).choice
        loss = sum_in_order(float(e[j]) for e, j in zip(self._weights, choice, strict=True))
        return SearchResult(choice, loss, "staged", (), 1.0, False)


def test_rounds_find_what_is_to_be_had_in_few_sessions_on_any_machine() -> None:
    # Always these 80 machines, wherever the test lies: of 400 others, one took nine sessions.
    rng = np.random.default_rng(1099890453)
    sessions, spare = [], []
    for _ in range(80):
        machine = Crooked(rng)
        target = float(rng.uniform(1.1, 0.85 * min(machine.reached, 5.0)))
        search = functools.partial(machine.find, target=target)
        kept = run_speedup_loop(machine.problem, search, machine.measure, target)  # never missed, never refused
        assert kept.measured.speedup.low >= target
        sessions.append(machine.sessions)
        spare.append(kept.measured.speedup.low / target - 1)
    assert max(sessions) <= 6 and np.mean(sessions) < 3.5
    assert np.median(spare) < 0.025 and np.mean(spare) < 0.05


@pytest.mark.parametrize("lows", [(1.9, 1.95, 2.2), (2.4, 2.2, 1.8), (1.5, 1.6, 1.7), (2.9, 2.8, 2.7), (1.99, 2.01)])
def test_no_round_leaves_what_is_bracketed_or_goes_astray(lows: tuple[float, ...]) -> None:
    # Profiles by rising seconds as predicted, of which the machine makes whatever it likes.
    exact, target = problem(spread=0.0), 2.0
    choices = [(j,) * LAYERS for j in (4, 3, 2)][: len(lows)]
    times = {
        choice: MeasuredSpeedup(Interval(1.05 * low, low, 1.1 * low), exact.dense, "torch")
        for choice, low in zip(choices, lows, strict=True)
    }
    for order in itertools.permutations(choices):
        known = {choice: times[choice] for choice in order}
        aimed = interpolate(exact, known, target, 1.0)
        most = max_seconds(exact, aimed, target)
        kept = [seconds(exact, choice) for choice in choices if known[choice].speedup.low >= target]
        missed = [seconds(exact, choice) for choice in choices if known[choice].speedup.low < target]
        if kept and missed and max(kept) < min(missed):
            assert max(kept) <= most * (1 + 1e-9) and most < min(missed)
        elif not kept:
            assert 0 < most < min(missed)
        elif not missed:
            assert max(kept) < most < 20 * max(kept)


def seconds(problem: Problem, choice: Choice) -> float:
    return sum_in_order(float(layer.seconds[j]) for layer, j in zip(problem.layers, choice, strict=True))


def max_seconds(predicted: Problem, aimed: Problem, target: float) -> float:
    """How many seconds, as predicted, layers may take that reach the target in another problem."""
    scale = aimed.safe_seconds[0][0] / predicted.safe_seconds[0][0]
    return float(aimed.dense.low / target - aimed.fixed.high) / scale


def test_of_an_end_that_stays_ever_less_counts() -> None:
    # The dense model is far off what the line to the fastest says: plain regula falsi would creep.
    exact, target = problem(spread=0.0), 2.0
    far, *near = [(0,) * LAYERS, (4,) * LAYERS, (3, *(4,) * (LAYERS - 1)), (3, 3, *(4,) * (LAYERS - 2))]
    lows = {far: 0.5, near[0]: 2.2, near[1]: 2.19, near[2]: 2.18}
    times: dict[Choice, MeasuredSpeedup] = {}
    most = []
    for choice, low in lows.items():
        times[choice] = MeasuredSpeedup(Interval(low, low, low), exact.dense, "torch")
        if len(times) > 1:
            aimed = interpolate(exact, times, target, 1.0)
            most.append(max_seconds(exact, aimed, target) - seconds(exact, choice))
    assert most[0] < most[1] < most[2]
    assert max(most) < seconds(exact, far) - seconds(exact, near[2])


def test_before_a_target_is_refused_the_fastest_profile_is_timed() -> None:
    # Twice as slow as predicted at first; then it turns out that this was of one profile, not of all.
    exact, fastest = problem(spread=0.0), (6,) * LAYERS
    solved = exact.solve(5.0).choice
    assert solved != fastest
    kept = promised(exact, Evaluator(), off({solved: 3.0}), 5.0)
    assert kept.measured.speedup.low >= 5.0
    slow, asked = machine(1.9, noise=0.0)
    with pytest.raises(PromiseMissed) as said:
        promised(exact, Evaluator(), slow, 6.0)
    assert fastest in asked
    [best] = slow([fastest])
    assert str(said.value).startswith(f"no measured profile kept 6x: of {len(asked)} profiles timed end to end")
    assert f"the best reached {best.speedup.value:.2f}x" in str(said.value)
    assert "it is out of reach: the fastest possible profile was among them; 5% of the time is in layers that" in str(
        said.value
    )


def test_a_verification_does_not_refuse_what_was_not_timed() -> None:
    exact, target = problem(spread=0.0), 5.0
    solved = exact.solve(target).choice
    dense = exact.dense
    busy = MeasuredSpeedup(Interval(1.5, 1.5, 1.5), dense, "torch")
    pessimistic = calibrate_to(exact, solved, busy)
    for before in ({}, {solved: loss(solved)}):
        kept = run_speedup_loop(
            pessimistic, build_search_round(PLAN, target, Evaluator(), quiet), machine(1.0, noise=0.0)[0], target,
            before=before,
        )  # fmt: skip
        assert kept.measured.speedup.low >= target
    assert kept.found.loss <= loss(solved)


def test_rounds_close_in_from_the_fastest_profile_as_from_any_other() -> None:
    # Whatever takes more than 75% of the seconds that should do just misses: so do all of the first rounds.
    exact, target = problem(spread=0.0), 2.0
    enough = 0.75 * exact.budget(target)
    asked: list[Choice] = []

    def measure(choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        asked.extend(choice for choice in choices if choice not in asked)
        found = []
        for choice in choices:
            value, more = exact.speedup(exact.predict(choice)).value, seconds(exact, choice) - enough
            if more > 0:
                value = (0.999 - 0.0005 * more) * target
            found.append(MeasuredSpeedup(Interval(value, value, value), exact.dense, "torch"))
        return found

    kept = run_speedup_loop(exact, build_search_round(PLAN, target, Evaluator(), quiet), measure, target)
    fastest = (6,) * LAYERS
    missed = asked.index(fastest)
    assert missed >= 3 and all(seconds(exact, choice) > enough for choice in asked[:missed])
    assert target <= kept.measured.speedup.low < 1.35 * target < measure([fastest])[0].speedup.low
    assert kept.found.loss < loss(fastest)


def test_the_bound_is_of_what_keeps_the_promise_as_it_was_measured() -> None:
    # A verified profile is too slow as predicted; the machine is faster, and it is kept.
    exact, target = problem(spread=0.0), 2.0
    solved, better = exact.solve(target).choice, scaled(exact, 0.8).solve(target).choice

    def search(problem: Problem, number: int, missed: Collection[Choice]) -> SearchResult:
        return SearchResult(solved, 1.0, "staged", (), 1.0, False)

    kept = run_speedup_loop(exact, search, machine(0.79, noise=0.0)[0], target, before={better: 0.5})
    assert kept.found.choice == better
    whole = functools.reduce(np.add.outer, kept.problem.safe_seconds).ravel() + kept.problem.fixed.high
    errors = functools.reduce(np.add.outer, kept.problem.errors).ravel()
    least = errors[kept.problem.dense.low / whole >= target * (1 - 1e-9)].min()
    assert kept.bound == pytest.approx(least)
    assert kept.bound <= sum_in_order(float(e[j]) for e, j in zip(exact.errors, better, strict=True)) * (1 + 1e-12)


def test_of_a_target_far_out_of_reach_only_the_fastest_profile_is_timed() -> None:
    measure, asked = machine(1.0)
    with pytest.raises(TargetMissed, match="no measured profile kept 15x: of 1 profiles") as missed:
        promised(problem(), Evaluator(), measure, 15.0)
    assert asked == [problem().fastest()]
    assert missed.value.best is not None and 7 < missed.value.best.target < 9  # as predicted it reaches 8.0x


def test_what_predictions_leave_open_is_measured_before_it_is_refused() -> None:
    target = 9.0  # as predicted the fastest profile reaches 8.0x, by the favourable ends of its layers 9.8x
    kept = promised(problem(spread=0.3), Evaluator(), machine(0.7, noise=0.0)[0], target)
    assert kept.measured.speedup.low >= target
    with pytest.raises(PromiseMissed, match=r"of 1 profiles timed end to end.*; it is out of reach"):
        promised(problem(spread=0.3), Evaluator(), machine(1.0)[0], target)
    with pytest.raises(TargetMissed, match=r"the best reached 9\.76x"):  # of 10x
        promised(problem(spread=0.3), Evaluator(), machine(0.7, noise=0.0)[0], 10.0)


def test_wide_intervals_do_not_refuse_what_measuring_can_settle() -> None:
    measure, _ = machine(1.0)
    with pytest.raises(Infeasible, match="lower end must reach the target"):
        problem(spread=9.0).budget(3.0)
    kept = promised(problem(spread=9.0), Evaluator(), measure, 3.0)
    assert kept.measured.speedup.low >= 3.0


def test_what_few_batches_like_best_is_judged_again_by_all() -> None:
    def loss(choice: Choice) -> float:  # other layers matter than their errors say, so that the search has work to do
        return sum((LAYERS - i) * SPARSITIES[j] ** 2 for i, j in enumerate(choice))

    def few(choice: Choice) -> float:
        # What few images say: off by up to a fifth, always the same for the same profile.
        return loss(choice) * (0.8 + 0.4 * np.random.default_rng(choice).random())

    evaluator = Evaluator(loss, few)
    kept = promised(problem(), evaluator, machine(1.0)[0], 2.0, replace(PLAN, batches=2))
    assert kept.found.loss == loss(kept.found.choice)
    tried = {one.choice for one in kept.found.trace}
    assert len(evaluator.asked) < len(tried) / 2
    assert loss(kept.found.choice) == min(map(loss, evaluator.asked & tried))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_a_second_budget(strategy: str) -> None:
    # What is in the first layers is heavy: without the budget they are pruned least.
    costs = {f"fc{i}": {it: (LAYERS - i) * (1 - it.sparsity) for it in OPTIONS} for i in range(LAYERS)}
    free = run_strategy(StrategySettings(strategy, 100, 0), problem(), 2.0, Evaluator())
    used = sum(costs[name][it] for name, it in expand_choice(problem().layers, free.choice).items())
    asked = replace(problem(), second_budget=SecondBudget(costs, 0.9 * used))
    found = run_strategy(StrategySettings(strategy, 100, 0), asked, 2.0, Evaluator(), known={free.choice: "before"})
    assert found.trace and all(asked.keeps(one.choice, 2.0) for one in found.trace)
    assert found.loss >= free.loss
    heavy = replace(problem(), second_budget=SecondBudget(costs, 0.1))
    with pytest.raises(Infeasible, match="that budget alone is too small"):
        run_strategy(StrategySettings(strategy, 9, 0), heavy, 2.0, Evaluator())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_the_promise(strategy: str) -> None:
    kept = promised(problem(), Evaluator(), machine(1.1)[0], 2.0, replace(PLAN, strategy=strategy))
    assert kept.measured.speedup.low >= 2.0
    assert kept.found.loss == loss(kept.found.choice)
    if strategy == "spdy":  # not the profile of the first round, which the published search does not have
        assert kept.found.found_by == "spdy"


def test_a_first_round_that_ruins_the_model_is_not_the_last() -> None:
    once = run_strategy(StrategySettings("once", 1, 0), problem(), 2.0, Evaluator()).choice
    evaluator = Evaluator(lambda choice: math.inf if choice == once else loss(choice))
    kept = promised(problem(), evaluator, machine(1.0)[0], 2.0)
    assert kept.found.choice != once and math.isfinite(kept.found.loss)


def test_a_time_budget_counts_from_the_beginning_and_ends_all_rounds() -> None:
    moments = iter(range(1000))
    evaluator = Evaluator()
    limited = replace(PLAN, time_budget=6.5)
    kept = promised(problem(), evaluator, machine(1.0)[0], 2.0, limited, clock=lambda: float(next(moments)))
    assert kept.measured.speedup.low >= 2.0
    assert kept.found.out_of_time
    assert len(evaluator.asked) < 60


def scaled(problem: Problem, by: float) -> Problem:
    layers = (replace(it, seconds=it.seconds * by, low=it.low * by, high=it.high * by) for it in problem.layers)
    return replace(problem, layers=tuple(layers))


def fits(problem: Problem, choice: Choice, target: float) -> bool:
    return problem.speedup(problem.predict(choice)).low >= target


def test_after_its_time_a_corrected_round_keeps_the_best_of_what_is_known() -> None:
    now = 0.0
    evaluator = Evaluator()
    search = build_search_round(replace(PLAN, time_budget=5.0), 2.0, evaluator, quiet, clock=lambda: now)
    first = search(problem(), 1, ())
    now = 9.0
    evaluator.asked.clear()
    spent = sum(float(problem().safe_seconds[0][j]) for j in first.choice)
    slower = scaled(problem(), 1.0001 * problem().budget(2.0) / spent)
    known = [one for one in first.trace if fits(slower, one.choice, 2.0)]
    assert first.choice not in [one.choice for one in known] != []
    second = search(slower, 2, ())
    assert second.loss == min(one.loss for one in known) < loss(slower.solve(2.0).choice)
    assert evaluator.asked <= {one.choice for one in known}  # nothing new was judged
    assert second.out_of_time and second.spent == 0
    # What missed is passed over while anything else fits.
    assert search(slower, 3, [second.choice]).loss == min(one.loss for one in known if one.choice != second.choice)


def test_what_an_earlier_round_judged_costs_nothing() -> None:
    search = build_search_round(replace(PLAN, evaluations=20), 2.0, Evaluator(), quiet)
    first = search(problem(), 1, ())
    second = search(problem(), 2, ())
    assert first.spent == 20 and second.spent > 0
    assert {one.choice for one in first.trace} < {one.choice for one in second.trace}
    assert second.loss <= first.loss


def off(slow: Mapping[Choice, float]) -> TimeProfiles:
    """A machine on which all is as predicted, but some profiles take longer."""
    steady, _ = machine(1.0, noise=0.0)

    def one(choice: Choice) -> MeasuredSpeedup:
        [found] = steady([choice])
        value = found.speedup.value / slow.get(choice, 1.0)
        return replace(found, speedup=Interval(value, value, value))

    return lambda choices: list(map(one, choices))


def test_a_profile_that_missed_does_not_end_the_rounds() -> None:
    exact, wanted = problem(spread=0.0), 2.0
    search = build_search_round(PLAN, wanted, Evaluator(), quiet)
    solved, best = search(exact, 0, ()), search(exact, 1, ())
    assert best.loss < solved.loss
    next_best = min(one.loss for one in best.trace if one.choice != best.choice)
    kept = promised(exact, Evaluator(), off({best.choice: 1.03}), wanted)
    assert kept.found.choice != best.choice
    assert next_best <= kept.found.loss < solved.loss


def test_what_missed_is_told_to_the_search_and_corrects_the_prediction_when_it_is_all_there_is() -> None:
    exact = problem(spread=0.0)
    solved, faster = exact.solve(2.0).choice, (4,) * LAYERS  # by its layers, that is; it turns out much slower
    asked: list[tuple[Problem, set[Choice]]] = []

    def search(problem: Problem, number: int, missed: Collection[Choice]) -> SearchResult:
        asked.append((problem, set(missed)))
        choice = faster if number else solved
        return SearchResult(choice, loss(choice), "staged", (), 1.0, False)

    def measure(choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        dense = Interval(DENSE_SECONDS, DENSE_SECONDS, DENSE_SECONDS)
        values = [2.01 if choice == solved else 1.5 for choice in choices]
        return [MeasuredSpeedup(Interval(value, value, value), dense, "torch") for value in values]

    assert run_speedup_loop(exact, search, measure, 2.0).found.choice == solved
    assert [missed for _, missed in asked[:4]] == [set(), set(), {faster}, {faster}]
    assert fits(asked[2][0], faster, 2.0)  # as the profile that held says
    assert not fits(asked[3][0], faster, 2.0)


def test_a_verified_profile_that_missed_is_not_found_again() -> None:
    exact, wanted = problem(spread=0.0), 2.0
    best = build_search_round(PLAN, wanted, Evaluator(), quiet)(exact, 1, ())
    measure = off({best.choice: 1.01})
    search = build_search_round(PLAN, wanted, Evaluator(), quiet)
    kept = run_speedup_loop(exact, search, measure, 2.0, before={best.choice: best.loss})
    assert kept.found.choice != best.choice
    assert kept.measured.speedup.low >= 2.0


def test_where_all_that_is_found_missed_the_prediction_is_corrected_by_it() -> None:
    # The strategy `once` has one answer, and that is slower than the layers say: the next is for fewer seconds.
    exact, plan = problem(spread=0.0), replace(PLAN, strategy="once")
    first = build_search_round(plan, 2.0, Evaluator(), quiet)(exact, 0, ())
    kept = promised(exact, Evaluator(), off({first.choice: 1.03}), 2.0, plan)
    assert kept.found.choice != first.choice and kept.measured.speedup.low >= 2.0


def test_the_same_seed_gives_the_same_profile() -> None:
    results = [promised(problem(), Evaluator(), machine(1.1)[0], 2.5).found for _ in range(2)]
    assert results[0] == results[1]


def task(*excluded: str) -> Task:
    example = types.SimpleNamespace(example=lambda: (torch.zeros(2, 4),))
    return Task("t", "t", "s", example, Limits(excluded=excluded))


def test_layers_are_those_that_can_be_pruned_but_for_the_excluded() -> None:
    # The last one cannot be pruned anyway: it is no mistake to exclude it.
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Unflatten(1, (1, 3)), nn.ConvTranspose1d(1, 1, 1)
    )
    for excluded, left in (((), ["0", "2"]), (("0",), ["2"]), (("4",), ["0", "2"]), (("[0-1]", "4"), ["2"])):
        assert list(list_prunable_layers(task(*excluded), model.eval())) == left
    with pytest.raises(UsageError, match="excluded: no layer is called 'fc'; the model has 0, 2, 4"):
        list_prunable_layers(task("fc"), model)
    with pytest.raises(UsageError, match="no layer that can be pruned"):
        list_prunable_layers(task("0", "2"), model)
