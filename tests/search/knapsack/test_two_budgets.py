"""Two budgets at once, against brute force and a MILP solver."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from search.knapsack.arrays import BadProblem, Infeasible
from search.knapsack.one_budget import solve
from search.knapsack.states import find_efficient_in_three
from search.knapsack.two_budgets import solve_two

Arrays = list[np.ndarray]

value = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1e-17, 1 / 3, 1e6])


def total(values: Arrays, choice: tuple[int, ...]) -> float:
    result = 0.0
    for layer, option in zip(values, choice, strict=True):
        result += float(layer[option])
    return result


def check(seconds: Arrays, errors: Arrays, budget: float, other: Arrays, other_budget: float) -> None:
    """What every answer must satisfy, against all profiles."""
    profiles = itertools.product(*(range(len(layer)) for layer in seconds))
    fitting = [
        (total(errors, c), t)
        for c in profiles
        if (t := total(seconds, c)) <= budget and total(other, c) <= other_budget
    ]
    if not fitting:
        with pytest.raises(Infeasible):
            solve_two(seconds, errors, budget, other, other_budget)
        return
    solution = solve_two(seconds, errors, budget, other, other_budget)
    assert total(seconds, solution.choice) == solution.seconds <= budget
    assert total(other, solution.choice) <= other_budget
    assert total(errors, solution.choice) == solution.error == solution.bound
    assert (solution.error, solution.seconds) == min(fitting)


def random_problem(rng: np.random.Generator, layers: int, most: int) -> tuple[Arrays, Arrays, float, Arrays, float]:
    sizes = rng.integers(1, most + 1, layers)
    seconds, errors, other = ([rng.random(n) for n in sizes] for _ in range(3))
    budgets = [
        float(rng.uniform(sum(v.min() for v in values), sum(v.mean() for v in values) + 0.3))
        for values in (seconds, other)
    ]
    return seconds, errors, budgets[0], other, budgets[1]


def test_small_problems_agree_with_brute_force(rng: np.random.Generator) -> None:
    for _ in range(60):
        check(*random_problem(rng, layers=int(rng.integers(1, 6)), most=5))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(value, value, value), min_size=1, max_size=4), min_size=1, max_size=4),
    st.one_of(value, st.floats(0, 3)),
    st.one_of(value, st.floats(0, 3)),
)
def test_ties_and_roundings_agree_with_brute_force(
    layers: list[list[tuple[float, float, float]]], budget: float, other_budget: float
) -> None:
    seconds, errors, other = ([np.array([option[i] for option in layer]) for layer in layers] for i in range(3))
    check(seconds, errors, budget, other, other_budget)


def milp(seconds: Arrays, errors: Arrays, budget: float, other: Arrays, other_budget: float) -> float:
    sizes = [len(t) for t in seconds]
    result = optimize.milp(
        np.concatenate(errors),
        integrality=np.ones(sum(sizes)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(sparse.block_diag([np.ones((1, n)) for n in sizes], format="csr"), 1, 1),
            optimize.LinearConstraint(
                np.stack([np.concatenate(seconds), np.concatenate(other)]), -np.inf, [budget, other_budget]
            ),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert result.status == 0, result.message
    return float(result.fun)


def test_medium_problems_agree_with_mixed_integer_programming(rng: np.random.Generator) -> None:
    # Whole numbers: both sides add them without rounding, so that the results are equal, not close.
    for _ in range(3):
        sizes = rng.integers(2, 10, 12)
        seconds, errors, other = ([rng.integers(1, 1000, n).astype(float) for n in sizes] for _ in range(3))
        budget, other_budget = (float(round(sum(v.mean() for v in values))) for values in (seconds, other))
        solution = solve_two(seconds, errors, budget, other, other_budget)
        assert solution.error == solution.bound == round(milp(seconds, errors, budget, other, other_budget))
        assert solution.seconds <= budget
        assert total(other, solution.choice) <= other_budget


def test_a_budget_that_does_not_bind_changes_nothing(rng: np.random.Generator) -> None:
    seconds, errors, budget, other, _ = random_problem(rng, 8, 6)
    assert solve_two(seconds, errors, budget, other, 1e9) == solve(seconds, errors, budget)


def test_a_search_that_is_cut_short_keeps_both_budgets_and_an_honest_bound(rng: np.random.Generator) -> None:
    seconds, errors, other = ([rng.random(6) for _ in range(12)] for _ in range(3))
    budget, other_budget = (sum(v.mean() for v in values) * 0.8 for values in (seconds, other))
    exact = solve_two(seconds, errors, budget, other, other_budget)
    assert exact.bound == exact.error
    for width in (1, 3, 40):
        short = solve_two(seconds, errors, budget, other, other_budget, max_states=width)
        assert total(seconds, short.choice) == short.seconds <= budget
        assert total(other, short.choice) <= other_budget
        assert short.bound <= exact.error <= short.error


def test_states_that_another_beats_in_all_three_are_dropped(rng: np.random.Generator) -> None:
    states = rng.integers(0, 6, (60, 3)).astype(float)
    states = states[np.lexsort(states.T[::-1])]
    beaten = [
        any((b <= a).all() and ((b < a).any() or j < i) for j, b in enumerate(states)) for i, a in enumerate(states)
    ]
    np.testing.assert_array_equal(find_efficient_in_three(*states.T.copy()), ~np.array(beaten))


def test_a_huge_error_in_place_of_an_infinite_one_leaves_the_proof_as_it_is(rng: np.random.Generator) -> None:
    seconds = [np.sort(rng.random(12))[::-1] * rng.random() for _ in range(20)]
    errors = [np.linspace(0, 1, 12) ** 2 * rng.random() for _ in range(20)]
    other = [rng.random(12) * rng.random() for _ in range(20)]
    budget, other_budget = (sum(0.6 * v.min() + 0.4 * v.max() for v in values) for values in (seconds, other))
    exact = solve_two(seconds, errors, budget, other, other_budget)
    huge = [np.append(errors[0], 1e13), *errors[1:]]
    tempting = ([np.append(of[0], 0.0), *of[1:]] for of in (seconds, other))
    fast, light = tempting
    solution = solve_two(fast, huge, budget, light, other_budget)
    assert (solution.choice, solution.error) == (exact.choice, exact.error) and solution.bound == solution.error


def test_states_without_end_are_cut_before_they_fill_the_memory(rng: np.random.Generator) -> None:
    # Error = constant - seconds - other: every state is efficient, and looks as good as any other.
    seconds, other = ([rng.random(60) for _ in range(3)] for _ in range(2))
    errors = [2 - t - o for t, o in zip(seconds, other, strict=True)]
    exact = solve_two(seconds, errors, 1.35, other, 1.35, max_states=60**3)
    assert exact.bound == exact.error
    for room in (100, 2000):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("search.knapsack.states.MOST_STATES", room)
            short = solve_two(seconds, errors, 1.35, other, 1.35, max_states=room // 10)
        assert total(seconds, short.choice) <= 1.35 and total(other, short.choice) <= 1.35
        assert short.bound <= exact.error <= short.error


def test_budgets_that_exclude_each_other_are_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"keeps the other budget of 1\.5: the least that one takes is 3"):
        solve_two([[1.0, 2.0]], [[0.0, 0.0]], 1.5, [[3.0, 1.0]], 1.5)
    with pytest.raises(Infeasible, match="the fastest one takes 1 s"):
        solve_two([[1.0, 2.0]], [[0.0, 0.0]], 0.5, [[3.0, 1.0]], 1.5)


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(BadProblem, match=r"the other budget .* negative"):
        solve_two([[1.0]], [[1.0]], 1.0, [[-1.0]], 1.0)
    with pytest.raises(BadProblem, match=r"the other budget .* shape"):
        solve_two([[1.0]], [[1.0]], 1.0, [[1.0, 2.0]], 1.0)
    with pytest.raises(BadProblem, match=r"^layer 0 has seconds or errors that are NaN"):
        solve_two([[np.nan]], [[0.0]], 1.0, [[1.0]], 1.0)
    with pytest.raises(BadProblem, match="the other budget must be a finite number"):
        solve_two([[1.0]], [[1.0]], 1.0, [[1.0]], np.inf)
