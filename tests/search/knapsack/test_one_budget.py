"""The exact solver against brute force, a MILP solver and known-wrong solvers, and on published tables."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from latbench.importers.text_formats import read_spdy
from search.knapsack.arrays import BadProblem, Infeasible, Solution
from search.knapsack.one_budget import find_efficient, solve
from search.knapsack.states import MOST_STATES, LeastError, States, extend_states

Arrays = list[np.ndarray]


def total(values: Arrays, choice: tuple[int, ...]) -> float:
    """The caller's own sum: plain float addition in layer order."""
    result = 0.0
    for layer, option in zip(values, choice, strict=True):
        result += float(layer[option])
    return result


def brute_force(seconds: Arrays, errors: Arrays, budget: float) -> tuple[float, float] | None:
    """(error, seconds) of the best profile by trying all, None when nothing fits."""
    profiles = itertools.product(*(range(len(layer)) for layer in seconds))
    fitting = [(total(errors, c), t) for c in profiles if (t := total(seconds, c)) <= budget]
    return min(fitting, default=None)


def check(
    solver: Callable[[Arrays, Arrays, float], Solution], seconds: Arrays, errors: Arrays, budget: float
) -> None:
    """What every answer must satisfy, against all profiles."""
    best = brute_force(seconds, errors, budget)
    if best is None:
        try:
            solver(seconds, errors, budget)
        except Infeasible as error:
            assert error.fastest_seconds == total(seconds, tuple(int(np.argmin(t)) for t in seconds))
            return
        raise AssertionError("an infeasible problem got an answer")
    solution = solver(seconds, errors, budget)
    assert total(seconds, solution.choice) == solution.seconds <= budget
    assert total(errors, solution.choice) == solution.error
    assert (solution.error, solution.seconds) == best
    assert solution.bound == solution.error


def random_problem(rng: np.random.Generator, layers: int, most: int) -> tuple[Arrays, Arrays, float]:
    sizes = rng.integers(1, most + 1, layers)
    seconds = [rng.random(n) for n in sizes]
    errors = [rng.random(n) for n in sizes]
    low, high = sum(t.min() for t in seconds), sum(t.max() for t in seconds)
    return seconds, errors, float(rng.uniform(0.95 * low, high))


def test_small_problems_agree_with_brute_force(rng: np.random.Generator) -> None:
    for _ in range(60):
        check(solve, *random_problem(rng, layers=int(rng.integers(1, 6)), most=5))


# Few distinct values: many ties, sums that differ by one rounding, zeros and equal options.
value = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1e-17, 1 / 3, 1e6])


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.tuples(value, value), min_size=1, max_size=4), min_size=1, max_size=4),
    st.one_of(value, st.floats(0, 3)),
)
def test_ties_and_roundings_agree_with_brute_force(layers: list[list[tuple[float, float]]], budget: float) -> None:
    seconds = [np.array([t for t, _ in layer]) for layer in layers]
    errors = [np.array([e for _, e in layer]) for layer in layers]
    check(solve, seconds, errors, budget)


def tight_problem(rng: np.random.Generator, layers: int, most: int) -> tuple[Arrays, Arrays, float]:
    """The budget is what some profile takes, to the last bit, or one bit less."""
    seconds, errors, _ = random_problem(rng, layers, most)
    budget = total(seconds, tuple(int(rng.integers(len(t))) for t in seconds))
    return seconds, errors, budget if rng.random() < 0.5 else float(np.nextafter(budget, 0))


def test_a_budget_is_kept_and_used_to_the_last_bit(rng: np.random.Generator) -> None:
    for _ in range(80):
        check(solve, *tight_problem(rng, layers=4, most=4))


def test_negative_errors_are_as_good_as_any(rng: np.random.Generator) -> None:
    for _ in range(20):
        seconds, errors, budget = random_problem(rng, layers=4, most=4)
        check(solve, seconds, [e - 0.5 for e in errors], budget)


def milp(seconds: Arrays, errors: Arrays, budget: float) -> float:
    """The least error by mixed-integer programming: x[l, j] = 1 where layer l takes option j."""
    sizes = [len(t) for t in seconds]
    one_a_layer = sparse.block_diag([np.ones((1, n)) for n in sizes], format="csr")
    result = optimize.milp(
        np.concatenate(errors),
        integrality=np.ones(sum(sizes)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_a_layer, 1, 1),
            optimize.LinearConstraint(np.concatenate(seconds)[None, :], -np.inf, budget),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0, result.message
    return float(result.fun)


def test_medium_problems_agree_with_mixed_integer_programming(rng: np.random.Generator) -> None:
    # Whole numbers: both sides add them without rounding, so that the results are equal, not close.
    for _ in range(4):
        sizes = rng.integers(1, 14, 17)
        seconds = [rng.integers(1, 1000, n).astype(float) for n in sizes]
        errors = [rng.integers(1, 1000, n).astype(float) for n in sizes]
        low, high = sum(t.min() for t in seconds), sum(t.max() for t in seconds)
        budget = float(round(low + 0.3 * (high - low)))
        solution = solve(seconds, errors, budget)
        assert solution.error == solution.bound == round(milp(seconds, errors, budget))
        assert solution.seconds <= budget


def nearest_bucket(seconds: Arrays, errors: Arrays, budget: float, buckets: int = 100) -> Solution:
    """Wrong: seconds rounded to the nearest bucket, as SPDY's release does, so that the budget can be broken."""
    width = budget / buckets
    whole = [np.rint(t / width) for t in seconds]
    choice = solve(whole, errors, float(buckets)).choice
    return Solution(choice, total(seconds, choice), total(errors, choice), total(errors, choice))


def upper_bucket(seconds: Arrays, errors: Arrays, budget: float, buckets: int = 100) -> Solution:
    """Wrong: seconds rounded up keep the budget but not the optimum, and may call a feasible problem infeasible."""
    width = budget / buckets
    choice = solve([np.ceil(t / width) for t in seconds], errors, float(buckets)).choice
    return Solution(choice, total(seconds, choice), total(errors, choice), total(errors, choice))


def one_at_a_time(seconds: Arrays, errors: Arrays, budget: float) -> Solution:
    """Wrong: from the fastest profile, the option that gains most a second first."""
    choice = [int(np.argmin(t)) for t in seconds]
    while True:
        moves = [
            ((errors[i][choice[i]] - errors[i][j]) / (seconds[i][j] - seconds[i][choice[i]] + 1e-12), i, j)
            for i in range(len(seconds))
            for j in range(len(seconds[i]))
            if errors[i][j] < errors[i][choice[i]] and total(seconds, (*choice[:i], j, *choice[i + 1 :])) <= budget
        ]
        if not moves:
            break
        _, i, j = max(moves)
        choice[i] = j
    done = tuple(choice)
    return Solution(done, total(seconds, done), total(errors, done), total(errors, done))


def sorted_sums(seconds: Arrays, errors: Arrays, budget: float) -> Solution:
    """Wrong by one rounding: the layers are added in another order than the caller adds them."""
    solution = solve(seconds[::-1], errors[::-1], budget)
    choice = solution.choice[::-1]
    return Solution(choice, total(seconds, choice), total(errors, choice), total(errors, choice))


@pytest.mark.parametrize("wrong", [nearest_bucket, upper_bucket, one_at_a_time, sorted_sums])
def test_wrong_solvers_are_caught(wrong: Callable[..., Solution], rng: np.random.Generator) -> None:
    problems = [make(rng, layers=5, most=4) for make in (random_problem, tight_problem) for _ in range(100)]
    feasible = [problem for problem in problems if brute_force(*problem) is not None]
    with pytest.raises((AssertionError, Infeasible)):
        for problem in feasible:
            check(wrong, *problem)


def convex_problem(rng: np.random.Generator, layers: int, options: int) -> tuple[Arrays, Arrays, float]:
    """The faster, the worse, quadratically: many profiles come close to the optimum."""
    seconds = [np.sort(rng.random(options))[::-1] * rng.random() for _ in range(layers)]
    errors = [np.linspace(0, 1, options) ** 2 * rng.random() for _ in range(layers)]
    low, high = sum(t.min() for t in seconds), sum(t.max() for t in seconds)
    return seconds, errors, float(low + 0.4 * (high - low))


@pytest.mark.parametrize(("layers", "options"), [(60, 20), (300, 40), (1000, 8)])
def test_many_layers_are_proven(layers: int, options: int, rng: np.random.Generator) -> None:
    seconds, errors, budget = convex_problem(rng, layers, options)
    solution = solve(seconds, errors, budget)
    assert total(seconds, solution.choice) == solution.seconds <= budget
    assert total(errors, solution.choice) == solution.error == solution.bound


def test_a_huge_error_in_place_of_an_infinite_one_leaves_the_proof_as_it_is(rng: np.random.Generator) -> None:
    seconds, errors, budget = convex_problem(rng, 30, 20)
    exact = solve(seconds, errors, budget)
    seconds[0], errors[0] = np.append(seconds[0], 0.0), np.append(errors[0], 1e12)
    solution = solve(seconds, errors, budget, max_states=2000)
    assert (solution.choice, solution.error) == (exact.choice, exact.error) and solution.bound == solution.error


def test_the_unit_of_seconds_and_errors_does_not_count(rng: np.random.Generator) -> None:
    seconds, errors, budget = convex_problem(rng, 20, 10)
    solution, unit = solve(seconds, errors, budget), 2.0**-600
    tiny = solve([unit * t for t in seconds], [unit * e for e in errors], unit * budget)
    assert (tiny.choice, tiny.error, tiny.bound) == (solution.choice, unit * solution.error, unit * solution.bound)


def test_a_narrow_search_is_honest_about_its_bound(rng: np.random.Generator) -> None:
    seconds, errors, budget = convex_problem(rng, 80, 30)
    exact = solve(seconds, errors, budget)
    assert exact.bound == exact.error
    for width in (1, 5, 30, 31, 1000):
        narrow = solve(seconds, errors, budget, max_states=width)
        assert total(seconds, narrow.choice) == narrow.seconds <= budget
        assert narrow.bound <= exact.error <= narrow.error


def test_states_agree_with_numpy(rng: np.random.Generator) -> None:
    # Few distinct values, so that sums tie; one more layer, by outer sums, interpolation and a running minimum.
    for _ in range(30):
        spent = np.unique(rng.integers(0, 30, 12)) / 7
        error = np.unique(rng.integers(0, 40, 60))[: len(spent)][::-1] / 7
        spent = spent[: len(error)]
        seconds, errors = rng.integers(0, 9, 5) / 7, rng.integers(0, 9, 5) / 7
        left, after = np.cumsum(rng.random(6)), 3 - np.cumsum(rng.random(6))
        curve = LeastError(left, after)
        horizon, ceiling = float(rng.uniform(1, 8)), float(rng.uniform(2, 9))
        sums, wrong = np.add.outer(seconds, spent).ravel(), np.add.outer(errors, error).ravel()
        bound = wrong + np.interp(horizon - sums, left, after, left=np.inf)
        keep = np.flatnonzero(bound <= ceiling)
        keep = keep[find_efficient(sums[keep], wrong[keep])]
        *got, dropped = extend_states(States(spent, error), seconds, errors, curve, horizon, ceiling, 99)
        np.testing.assert_array_equal(got, (sums[keep], wrong[keep]))
        assert dropped == np.inf
        *got, dropped = extend_states(States(spent, error), seconds, errors, curve, horizon, ceiling, 3)
        bounds = np.sort(bound[keep])
        left_in = got[1] + np.interp(horizon - got[0], left, after)
        assert np.sort(left_in) == pytest.approx(bounds[:3])
        assert dropped == (pytest.approx(bounds[3]) if len(keep) > 3 else np.inf)


def test_sums_without_end_are_cut_before_they_fill_the_memory(rng: np.random.Generator) -> None:
    # Every sum is efficient and looks as good as any other.
    spent = np.sort(rng.random(3000))
    seconds = rng.random(100)
    assert len(spent) * len(seconds) > MOST_STATES
    left, after = np.array([0.0, 9.0]), np.array([9.0, 0.0])
    states, curve = States(spent, 1 - spent), LeastError(left, after)
    sums, error, dropped = extend_states(states, seconds, 1 - seconds, curve, 8.0, 99.0, 1000)
    assert len(sums) == 1000 and (np.diff(sums) > 0).all() and error == pytest.approx(2 - sums)
    assert np.isin(sums, np.add.outer(spent, seconds)).all()
    assert dropped == pytest.approx(3.0)  # 2 - s, and 9 less the 8 - s that are left


def test_infeasible_is_said_not_guessed() -> None:
    with pytest.raises(Infeasible, match="the fastest one takes 3 s") as caught:
        solve([[1.0, 4.0], [2.0]], [[1.0, 0.0], [0.0]], 2.9)
    assert caught.value.fastest_seconds == 3.0
    with pytest.raises(Infeasible):
        solve([[1.0]], [[0.0]], -1.0)


def test_a_single_option_and_zero_seconds_work() -> None:
    assert solve([[0.0]], [[2.5]], 0.0) == Solution((0,), 0.0, 2.5, 2.5)
    assert solve([[3.0, 1.0, 1.0]], [[0.0, 5.0, 4.0]], 2.0).choice == (2,)


@pytest.mark.parametrize(
    ("seconds", "errors", "budget", "sentence"),
    [
        ([[1.0], [1.0]], [[1.0]], 2.0, "2 layers, errors for 1"),
        ([], [], 2.0, "no layer"),
        ([[1.0, 2.0]], [[1.0]], 2.0, r"layer 0 has seconds of shape \(2,\)"),
        ([[1.0], []], [[1.0], []], 2.0, "layer 1 .* at least one"),
        ([[1.0], [np.nan]], [[1.0], [1.0]], 2.0, "layer 1 .* NaN"),
        ([[1.0]], [[np.inf]], 2.0, "layer 0 .* infinite"),
        ([[-1.0]], [[1.0]], 2.0, "negative seconds: -1"),
        ([[1.0]], [[1.0]], np.nan, "budget .* not nan"),
        ([[1.0]], [[1.0]], None, "budget .* not None"),
        ([[1.0]], [[1.0]], "2", "budget .* not 2"),
        ([["x"]], [[1.0]], 2.0, "layer 0 has seconds or errors that are no numbers"),
        ([[1.0, [2.0]]], [[1.0, 2.0]], 2.0, "layer 0 has seconds or errors that are no numbers"),
        ([[1e-310, 1.0]], [[1.0, 0.0]], 2.0, "layer 0 has seconds of 1e-310: at least 1e-300, or 0"),
        ([[1.0, 2.0]] * 3, [[1e308, 0.0]] * 3, 3.0, "their sum is not finite"),
        ([[1.0, 1e308]] * 3, [[1.0, 0.0]] * 3, 3.0, "their sum is not finite"),
    ],
)
def test_what_is_no_problem_is_refused(seconds: list, errors: list, budget: float, sentence: str) -> None:
    with pytest.raises(BadProblem, match=sentence):
        solve(seconds, errors, budget)
    assert issubclass(BadProblem, ValueError)


def test_a_search_that_is_cut_short_says_what_that_may_have_cost(rng: np.random.Generator) -> None:
    # Error = constant - seconds: the relaxation cannot tell profiles apart, so every state survives its bound.
    seconds = [rng.random(9) for _ in range(31)]
    errors = [1 - t for t in seconds]
    budget = 0.5 * sum(t.min() for t in seconds) + 0.5 * sum(t.max() for t in seconds)
    solution = solve(seconds, errors, budget, max_states=3)
    assert solution.seconds <= budget
    assert solution.bound <= 31 - budget + 1e-9  # the relaxation's own bound: nothing can do better
    assert solution.bound < solution.error


@pytest.mark.parametrize("table", ["rn18_unstr", "rn34_unstr", "rn50_unstr", "rn50_4block", "yolov5s_unstr"])
def test_published_tables_are_solved_to_the_optimum(data: Path, table: str, rng: np.random.Generator) -> None:
    base, prunable, seconds = spdy_table(data / "spdy_tables" / f"{table}.txt")
    fastest = total(seconds, tuple(int(np.argmin(t)) for t in seconds))
    for coefficients in (np.ones(len(seconds)), rng.random(len(seconds))):
        errors = [c * np.linspace(0, 1, len(t)) ** 2 for c, t in zip(coefficients, seconds, strict=True)]
        for target in (1.5, 2.0, 3.0):
            budget = base / target - (base - prunable)
            if budget < fastest:
                with pytest.raises(Infeasible):
                    solve(seconds, errors, budget)
                continue
            solution = solve(seconds, errors, budget)
            assert total(seconds, solution.choice) == solution.seconds <= budget
            assert solution.error == solution.bound


def test_resnet50_at_twice_the_speed_agrees_with_mixed_integer_programming(data: Path) -> None:
    base, prunable, seconds = spdy_table(data / "spdy_tables" / "rn50_unstr.txt")
    assert len(seconds) == 54
    # The table holds whole microseconds and the prior whole multiples of 1/1681: exact in both solvers.
    micro = [np.rint(1e6 * t) for t in seconds]
    squares = [np.arange(len(t), dtype=float) ** 2 for t in seconds]
    budget = float(np.floor(1e6 * (base / 2 - (base - prunable))))
    solution = solve(micro, squares, budget)
    assert solution.seconds <= budget
    assert solution.error == solution.bound == round(milp(micro, squares, budget))


def spdy_table(path: Path) -> tuple[float, float, Arrays]:
    """Base and prunable seconds, and each layer's (one of the files ends with a layer that has none)."""
    table = read_spdy(path)
    return table.base, table.prunable, [np.array([t for t, _ in layer]) for layer in table.layers.values() if layer]
