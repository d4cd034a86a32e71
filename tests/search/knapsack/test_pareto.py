"""The frontier holds every efficient trade-off, and nothing else."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.knapsack.arrays import BadProblem
from search.knapsack.one_budget import solve
from search.knapsack.pareto import frontier
from search.knapsack.states import extend_between

Arrays = list[np.ndarray]

value = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1e-17, 1 / 3, 1e6])


def total(values: Arrays, choice: tuple[int, ...]) -> float:
    result = 0.0
    for layer, option in zip(values, choice, strict=True):
        result += float(layer[option])
    return result


def by_trying_all(seconds: Arrays, errors: Arrays) -> list[tuple[float, float]]:
    profiles = itertools.product(*(range(len(layer)) for layer in seconds))
    pairs = sorted((total(seconds, c), total(errors, c)) for c in profiles)
    front: list[tuple[float, float]] = []
    for pair in pairs:
        if not front or pair[1] < front[-1][1]:
            front.append(pair)
    return front


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.lists(st.tuples(value, value), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_efficient_pair_is_there_and_no_other(layers: list[list[tuple[float, float]]]) -> None:
    seconds = [np.array([t for t, _ in layer]) for layer in layers]
    errors = [np.array([e for _, e in layer]) for layer in layers]
    found = frontier(seconds, errors)
    assert list(zip(found.seconds.tolist(), found.errors.tolist(), strict=True)) == by_trying_all(seconds, errors)


@pytest.mark.parametrize("tiny", [1e-17, 1e-300])
def test_sums_that_round_to_equals_are_one_point(tiny: float) -> None:
    by_error = frontier([[0, tiny], [1]], [[1, 0.5], [0]])
    assert (by_error.seconds.tolist(), by_error.errors.tolist()) == ([1.0], [0.5])
    by_seconds = frontier([[0, 1], [1]], [[tiny, 0], [1]])
    assert (by_seconds.seconds.tolist(), by_seconds.errors.tolist()) == ([1.0], [1.0])


def test_each_point_is_what_solve_answers_for_its_seconds(rng: np.random.Generator) -> None:
    seconds = [np.sort(rng.random(n)) for n in rng.integers(1, 12, 13)]
    errors = [np.sort(rng.random(len(t)))[::-1] for t in seconds]
    found = frontier(seconds, errors)
    assert len(found.seconds) > 100
    for i in rng.integers(0, len(found.seconds), 20).tolist():
        solution = solve(seconds, errors, float(found.seconds[i]))
        assert (solution.seconds, solution.error) == (found.seconds[i], found.errors[i])
        assert found.choice(i) == solution.choice


def test_one_option_a_layer_is_one_point() -> None:
    found = frontier([[2.0], [3.0]], [[0.5], [0.25]])
    assert (found.seconds.tolist(), found.errors.tolist(), found.choice(0)) == ([5.0], [0.75], (0, 0))


def test_pieces_of_a_layer_make_the_same_frontier(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = rng.integers(1, 9, 7)
    seconds, errors = ([rng.integers(0, 50, n) / 7 for n in sizes] for _ in range(2))
    whole = frontier(seconds, errors)
    monkeypatch.setattr(sys.modules["search.knapsack.pareto"], "PIECE_SUMS", 40)
    monkeypatch.setattr(sys.modules["search.knapsack.pareto"], "SAMPLED_SUMS", 100)
    parts = frontier(seconds, errors)
    np.testing.assert_array_equal((parts.seconds, parts.errors), (whole.seconds, whole.errors))


def test_not_all_sums_are_formed_where_there_are_too_many(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = 0

    def counted(*given: Any) -> tuple[np.ndarray, np.ndarray]:
        nonlocal formed
        found = extend_between(*given)
        formed += len(found[0])
        return found

    monkeypatch.setattr("search.knapsack.states.extend_between", counted)
    monkeypatch.setattr(sys.modules["search.knapsack.pareto"], "PIECE_SUMS", 1000)
    seconds = [rng.random(30) for _ in range(4)]
    with pytest.raises(BadProblem, match="more than 30,000 efficient"):
        frontier(seconds, [1 - t for t in seconds], max_points=30_000)
    assert formed < 30 + 30**2 + 30**3 + 50_000  # of 30^4 in the last layer


def test_more_points_than_wanted_are_refused_with_advice(rng: np.random.Generator) -> None:
    seconds = [rng.random(9) for _ in range(9)]
    with pytest.raises(BadProblem, match=r"more than 50 efficient .*: set a resolution to merge some, such as 0\.0"):
        frontier(seconds, [1 - t for t in seconds], max_points=50)


@pytest.mark.parametrize("resolution", [1e-9, 0.03, 0.5, 100.0])
def test_with_a_resolution_each_efficient_pair_has_one_that_is_as_good_and_hardly_slower(
    resolution: float, rng: np.random.Generator
) -> None:
    seconds = [rng.random(n) for n in rng.integers(1, 7, 6)]
    errors = [rng.random(len(t)) for t in seconds]
    exact, found = by_trying_all(seconds, errors), frontier(seconds, errors, resolution=resolution)
    for i in range(len(found.seconds)):
        choice = found.choice(i)
        assert total(errors, choice) == found.errors[i]
        # Listed seconds are sums without rounding, true ones round: some units in the last place.
        assert found.seconds[i] - resolution < total(seconds, choice) <= found.seconds[i] * (1 + 1e-15)
    for spent, error in exact:
        no_worse = found.errors <= error
        assert found.seconds[no_worse].min() <= spent + resolution
    assert len(found.seconds) <= len(exact)
    if resolution == 100.0:
        assert len(found.seconds) <= len(seconds) + 1  # all but one option of a layer cost the same


def test_a_resolution_makes_few_points_of_millions(rng: np.random.Generator) -> None:
    sparsities = np.linspace(0, 0.95, 20)
    seconds = [rng.uniform(1, 3) * (1 - sparsities) + 0.05 for _ in range(30)]
    errors = [rng.uniform(1, 3) * sparsities**2 for _ in range(30)]
    with pytest.raises(BadProblem, match="set a resolution to merge some"):
        frontier(seconds, errors, max_points=20_000)
    found = frontier(seconds, errors, max_points=20_000, resolution=0.5)
    assert len(found.seconds) > 100


def test_what_is_no_problem_is_refused() -> None:
    for resolution in (-1.0, np.nan, np.inf):
        with pytest.raises(BadProblem, match="the resolution must be a finite number of seconds"):
            frontier([[1.0]], [[1.0]], resolution=resolution)
    with pytest.raises(BadProblem, match="NaN"):
        frontier([[np.nan]], [[1.0]])
