"""Budgets kept with a probability, against every profile there is and against simulated machines."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from search.knapsack.arrays import BadProblem, Infeasible, sum_in_order
from search.knapsack.one_budget import solve
from search.problem.layers import DENSE, Interval, LayerOptions, Option, tie_layers
from search.problem.limits import parse_limits
from search.problem.problem import Problem
from search.strategies.chance_constraint import (
    assume_independent_times,
    build_tangent,
    compute_upper_seconds,
    solve_with_chance,
)
from sparse_kernels.shapes import LinearShape


def problem(rng: np.random.Generator, layers: int, options: int) -> tuple[list[np.ndarray], ...]:
    seconds = [np.sort(rng.uniform(1, 9, options))[::-1] for _ in range(layers)]
    deviations = [t * rng.uniform(0, 0.3, options) for t in seconds]
    errors = [np.sort(rng.uniform(0, 1, options)) for _ in range(layers)]
    return seconds, deviations, errors


@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_the_best_of_all_profiles_that_keep_the_budget_is_found(rng: np.random.Generator, shared: float) -> None:
    unproven = refused = 0
    for _ in range(60):
        t, d, e = problem(rng, 4, 4)
        every = list(itertools.product(range(4), repeat=4))
        uppers = [compute_upper_seconds(t, d, choice, shared) for choice in every]
        budget = float(rng.uniform(0.9 * min(uppers), np.median(uppers)))
        fitting = [
            sum(float(x[j]) for x, j in zip(e, choice, strict=True))
            for choice, it in zip(every, uppers, strict=True)
            if it <= budget
        ]
        if not fitting:
            refused += 1
            with pytest.raises(Infeasible):
                solve_with_chance(t, d, e, budget, shared)
            continue
        found, s = solve_with_chance(t, d, e, budget, shared)
        assert compute_upper_seconds(t, d, found.choice, shared) <= budget
        assert found.bound <= min(fitting) + 1e-12 <= found.error + 2e-12
        assert s == pytest.approx(compute_upper_seconds(t, d, found.choice, shared) - found.seconds)
        unproven += found.error > min(fitting) + 1e-12
    assert refused >= 1
    assert unproven <= 3  # within a cell the tangent may hide a profile that only just keeps the budget


def test_options_without_any_deviation_are_options() -> None:
    t, d, e = [np.array([1.0, 0.5])], [np.array([0.0, 0.4])], [np.array([0.0, 1.0])]
    assert solve_with_chance(t, d, e, 1.0)[0] == solve(t, e, 1.0)
    with pytest.raises(Infeasible):
        solve_with_chance(t, d, e, 0.89)
    assert solve_with_chance(t, d, e, 0.91)[0].choice == (1,)


def test_the_bound_holds_where_a_profile_just_keeps_the_budget(rng: np.random.Generator) -> None:
    for _ in range(100):
        t, d, e = problem(rng, 3, 3)
        choice = tuple(rng.integers(0, 3, 3).tolist())
        found, _ = solve_with_chance(t, d, e, compute_upper_seconds(t, d, choice))
        assert found.bound <= sum(float(x[j]) for x, j in zip(e, choice, strict=True)) + 1e-12


def test_layers_on_their_own_allow_more_than_layers_that_all_fail_together(rng: np.random.Generator) -> None:
    t, d, e = problem(rng, 30, 12)
    budget = 0.5 * sum(float(x.max()) for x in t)
    together = solve([a + b for a, b in zip(t, d, strict=True)], e, budget)
    independent, _ = solve_with_chance(t, d, e, budget)
    certain = solve(t, e, budget)
    assert certain.error < independent.error < together.error
    assert independent.bound > 0.97 * independent.error


def test_the_budget_is_kept_as_often_as_wanted(rng: np.random.Generator) -> None:
    t, d, e = problem(rng, 20, 8)
    budget = 0.6 * sum(float(x.max()) for x in t)
    quantile = 1.2816  # a tenth of normal deviations is larger
    shared = 2.0
    found, _ = solve_with_chance(t, [quantile * x for x in d], e, budget, quantile * shared)
    own = np.array([x[j] for x, j in zip(d, found.choice, strict=True)])
    trials = found.seconds + rng.normal(0, 1, (20000, 20)) @ own + shared * rng.normal(0, 1, 20000)
    assert 0.89 <= (trials <= budget).mean() <= 0.93


def test_a_tangent_is_never_below_the_root(rng: np.random.Generator) -> None:
    t, d, _ = problem(rng, 5, 3)
    for at in (0.1, 1.0, 5.0):
        within, room = build_tangent(t, d, 40.0, 0.5, at)
        for choice in itertools.product(range(3), repeat=5):
            spent = sum(float(x[j]) for x, j in zip(within, choice, strict=True))
            assert compute_upper_seconds(t, d, choice, 0.5) <= spent + 40.0 - room + 1e-12


def test_without_deviations_it_is_the_plain_problem(rng: np.random.Generator) -> None:
    t, d, e = problem(rng, 5, 6)
    nothing = [np.zeros_like(x) for x in d]
    assert solve_with_chance(t, nothing, e, 20.0) == (solve(t, e, 20.0), 0.0)


def test_what_states_no_problem_is_refused(rng: np.random.Generator) -> None:
    t, d, e = problem(rng, 3, 3)
    with pytest.raises(BadProblem, match="shape of the seconds"):
        solve_with_chance(t, d[:2], e, 20.0)
    with pytest.raises(BadProblem, match="finite and not negative"):
        solve_with_chance(t, [-x for x in d], e, 20.0)
    with pytest.raises(BadProblem, match="finite and not negative"):
        solve_with_chance(t, d, e, 20.0, math.nan)


def searched(rng: np.random.Generator, layers: int = 12, options: int = 8) -> Problem:
    t, d, e = problem(rng, layers, options)
    names = (Option(DENSE, 0.0), *(Option("unstructured", 0.5 + i / 100) for i in range(1, options)))
    found = [
        LayerOptions(f"fc{i}", names, *it, shape=LinearShape(m=8 + i, k=8, n=1))
        for i, it in enumerate(zip(t, map(np.subtract, t, d), map(np.add, t, d), e, strict=True))
    ]
    found[3] = replace(found[2], name="twin", errors=found[3].errors)
    total = sum(float(layer.seconds.max()) for layer in found)
    fixed, dense = Interval(3.0, 2.5, 3.5), Interval(total, 0.99 * total, 1.01 * total)
    return Problem((tie_layers(found[:2]), *found[2:]), fixed, dense, "torch")


def test_a_problem_whose_layers_err_on_their_own_promises_no_more_than_it_may(rng: np.random.Generator) -> None:
    asked = searched(rng)
    target = 1.7
    found = assume_independent_times(asked, target)
    best, careful = found.solve(target), asked.solve(target)
    assert best.error < careful.error
    own = [layer.high - layer.seconds for layer in asked.layers[1:]]
    tied = [part.high - part.seconds for part in asked.layers[0].parts]  # of two shapes: each errs on its own
    deviations = [np.hypot(*tied), own[0] * math.sqrt(2), own[1] * math.sqrt(2), *own[2:]]  # own[:2] are the twins
    seconds, budget = [layer.seconds for layer in asked.layers], asked.dense.low / target - asked.fixed.value
    exact, _ = solve_with_chance(seconds, deviations, asked.errors, budget, 0.5)
    assert best.error == pytest.approx(exact.error)
    predicted = found.predict(best.choice)
    assert predicted.high - asked.fixed.value == pytest.approx(
        compute_upper_seconds(seconds, deviations, best.choice, 0.5), rel=1e-3
    )
    assert predicted.low < predicted.value == asked.predict(best.choice).value
    for _ in range(300):
        choice = tuple(int(rng.integers(0, len(layer.options))) for layer in found.layers)
        high = found.predict(choice).high - asked.fixed.value
        assert high >= compute_upper_seconds(seconds, deviations, choice, 0.5) * (1 - 1e-12)
    parts = found.layers[0].parts
    assert parts[0].high + parts[1].high == pytest.approx(found.layers[0].high)


def degenerate(rng: np.random.Generator) -> Problem:
    """One to three layers of one to four options, some certain, some all but certain, in any unit of time."""
    options, unit = int(rng.integers(1, 5)), 10.0 ** rng.integers(-9, 3)
    layers = []
    for i in range(int(rng.integers(1, 4))):
        t = np.sort(rng.uniform(0.1, 2, options))[::-1] * unit
        d = t * rng.uniform(0, 0.4, options) * rng.choice([0.0, 1e-12, 1e-6, 1.0, 1.0], options)
        e = np.sort(rng.uniform(0, 1, options)) * rng.choice([0.0, 1.0, 1.0])
        names = tuple(Option("unstructured", j / 10) for j in range(options))
        layers.append(
            LayerOptions(f"fc{i}", names, t, t - d, t + d, e, shape=LinearShape(m=int(rng.integers(1, 3)), k=8, n=1))
        )
    dense, shared = sum(float(it.high.max()) for it in layers), float(rng.choice([0.0, 1e-12, 0.1])) * unit
    around = float(rng.choice([0.0, 0.1])) * unit
    fixed = Interval(around, around - shared, around + shared)
    return Problem(
        tuple(layers), fixed, Interval(dense + around, 0.99 * dense + around, 1.01 * dense + around), "torch"
    )


def test_upper_ends_are_never_too_low_and_never_above_what_they_were(rng: np.random.Generator) -> None:
    moved = 0
    for _ in range(100):
        asked = degenerate(rng)
        every = list(itertools.product(range(len(asked.layers[0].options)), repeat=len(asked.layers)))
        target = asked.speedup(asked.predict(every[int(rng.integers(len(every)))])).low * float(rng.uniform(0.8, 1.1))
        found = assume_independent_times(asked, target)
        moved += found is not asked
        shared = asked.fixed.high - asked.fixed.value
        for choice in every:
            seconds, alike = 0.0, dict.fromkeys((1, 2), 0.0)  # layers of one shape err together
            for layer, j in zip(asked.layers, choice, strict=True):
                seconds += float(layer.seconds[j])
                alike[layer.shape.m] += float(layer.high[j] - layer.seconds[j])
            needed = asked.fixed.value + seconds + math.hypot(shared, *alike.values())
            assert found.predict(choice).high >= needed * (1 - 1e-12)
        for before, after in zip(asked.layers, found.layers, strict=True):
            assert (after.high <= before.high).all() and (after.low >= before.low).all()
            assert (after.low <= after.seconds).all() and (after.seconds <= after.high).all()
    assert moved > 20


def test_what_just_keeps_the_budget_is_found_and_what_does_not_is_refused(rng: np.random.Generator) -> None:
    for _ in range(60):
        asked = degenerate(rng)
        t, e = [layer.seconds for layer in asked.layers], asked.errors
        d, shared = [layer.high - layer.seconds for layer in asked.layers], asked.fixed.high - asked.fixed.value
        every = itertools.product(range(len(t[0])), repeat=len(t))
        uppers = {choice: compute_upper_seconds(t, d, choice, shared) for choice in every}
        least = min(uppers.values())
        for budget in (least, 1.0001 * least, float(np.median(list(uppers.values())))):
            found, _ = solve_with_chance(t, d, e, budget, shared)
            assert uppers[found.choice] <= budget
            errors = [
                sum_in_order(x[j] for x, j in zip(e, c, strict=True)) for c, it in uppers.items() if it <= budget
            ]
            assert found.bound <= min(errors) <= found.error + 1e-12
        with pytest.raises(Infeasible) as refused:
            solve_with_chance(t, d, e, 0.999 * least, shared)
        assert refused.value.fastest_seconds == pytest.approx(least, rel=1e-6)


def test_a_profile_without_any_deviation_says_nothing_of_the_others() -> None:
    # Dense is certain and best, and keeps the budget; what the tangent at no deviation says of the other is nothing.
    options = (Option(DENSE, 0.0), Option("unstructured", 0.5))
    t, d, e = np.array([3e-3, 2e-3]), np.array([0.0, 1e-3]), np.array([0.0, 1.0])
    asked = Problem(
        (LayerOptions("fc", options, t, t - d, t + d, e),), Interval(0, 0, 0), Interval(3e-3, 3e-3, 3e-3), "torch"
    )
    assert assume_independent_times(asked, 1.0).layers[0].high.tolist() == (t + d).tolist()


def test_a_target_that_is_out_of_reach_leaves_the_problem_as_it_is(rng: np.random.Generator) -> None:
    asked = searched(rng)
    assert assume_independent_times(asked, 40.0) is asked


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"minimum": {"fc0": 0.52, "fc1": 0.54, "fc2": 0.56}, "maximum": {"fc3": 0.53}, "fixed": {"fc4": "dense"}},
        {"tied": [["fc0", "fc5", "fc6"], ["fc1", "fc2"]]},
        {"tied": [["fc0", "fc5"]], "maximum": {"fc0": 0.55}, "minimum": {"fc6": 0.51}},
    ],
)
def test_layers_of_one_shape_err_alike_whatever_limits_leave_them(limits: dict, rng: np.random.Generator) -> None:
    asked = searched(rng)
    one = replace(asked.layers[1], shape=LinearShape(m=8, k=8, n=1))
    free = replace(asked, layers=tuple(replace(one, name=f"fc{i}") for i in range(7)))
    limited = replace(free, dense=Interval(*(3 * x for x in asked.dense.ends))).limited(
        parse_limits(limits, "limits")
    )
    found = assume_independent_times(limited, 1.2)
    assert found is not limited
    for _ in range(100):
        choice = tuple(int(rng.integers(0, len(layer.options))) for layer in found.layers)
        seconds, high = (
            sum_in_order(values(layer)[j] for layer, j in zip(limited.layers, choice, strict=True))
            for values in (lambda it: it.seconds, lambda it: it.high)
        )
        together = seconds + math.hypot(high - seconds, limited.fixed.high - limited.fixed.value)
        assert found.predict(choice).high - limited.fixed.value >= together * (1 - 1e-12)
