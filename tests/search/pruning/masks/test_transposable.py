"""Transposable masks against every mask there is, min-cost flows and the bound of sorting."""

import itertools

import networkx
import numpy as np
import pytest

from search.pruning.masks.transposable import find_transposable_mask
from sparse_kernels.patterns import NM


def every_mask(of: int, keep: int) -> np.ndarray:
    rows = [np.isin(np.arange(of), kept) for kept in itertools.combinations(range(of), keep)]
    tiles = (np.array(tile) for tile in itertools.product(rows, repeat=of))
    return np.array([tile for tile in tiles if (tile.sum(axis=0) == keep).all()])


def flow_value(tile: np.ndarray, keep: int) -> int:
    """The most score of whole numbers, by networkx's network simplex."""
    graph = networkx.DiGraph()
    of = len(tile)
    for i in range(of):
        graph.add_edge("source", ("row", i), capacity=keep, weight=0)
        graph.add_edge(("column", i), "sink", capacity=keep, weight=0)
        for j in range(of):
            graph.add_edge(("row", i), ("column", j), capacity=1, weight=-int(tile[i, j]))
    graph.add_node("source", demand=-keep * of)
    graph.add_node("sink", demand=keep * of)
    return -int(networkx.min_cost_flow_cost(graph))


def tiles_of(matrix: np.ndarray, of: int) -> np.ndarray:
    m, k = matrix.shape
    return matrix.reshape(m // of, of, k // of, of).swapaxes(1, 2).reshape(-1, of, of)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_exact_masks_are_the_best_of_all_4x4_masks(keep: int, rng: np.random.Generator) -> None:
    scores = rng.random((12, 20))
    mask = find_transposable_mask(scores, NM(keep, 4))
    candidates = every_mask(4, keep)
    for tile, found in zip(tiles_of(scores, 4), tiles_of(mask, 4), strict=True):
        assert (found.sum(axis=0) == keep).all()
        assert (found.sum(axis=1) == keep).all()
        assert (tile * found).sum() == pytest.approx((candidates * tile).sum(axis=(1, 2)).max())


@pytest.mark.parametrize(("keep", "of"), [(2, 8), (4, 8), (1, 16), (4, 16)])
def test_exact_masks_have_the_value_of_the_flow_and_sorting_at_least_half(
    keep: int, of: int, rng: np.random.Generator
) -> None:
    scores = rng.integers(0, 1000, (2 * of, of)).astype(float)
    exact, quick = (find_transposable_mask(scores, NM(keep, of), exact=exact) for exact in (True, False))
    for tile, best, sorted_ in zip(*(tiles_of(a, of) for a in (scores, exact, quick)), strict=True):
        value = flow_value(tile, keep)
        assert (tile * best).sum() == value
        assert value / 2 <= (tile * sorted_).sum() <= value
        assert max(sorted_.sum(axis=0).max(), sorted_.sum(axis=1).max()) <= keep


def test_sorting_can_be_as_bad_as_its_bound() -> None:
    """1:2 of [[1.01, 1], [1, 0]]: the largest blocks both others, whose sum is nearly twice as much."""
    scores = np.array([[1.01, 1.0], [1.0, 0.0]])
    assert (scores * find_transposable_mask(scores, NM(1, 2))).sum() == 2.0
    assert (scores * find_transposable_mask(scores, NM(1, 2), exact=False)).sum() == pytest.approx(1.01)


def test_scores_of_all_sizes_and_zeros_are_solved_to_the_end() -> None:
    scores = np.kron(np.diag([1e-30, 1e30]), np.eye(4))
    mask = find_transposable_mask(scores, NM(1, 4))
    assert np.array_equal(mask[:4, :4], np.eye(4, dtype=bool))
    assert np.array_equal(mask[4:, 4:], np.eye(4, dtype=bool))
    assert mask.sum() == 16
    assert find_transposable_mask(np.zeros((4, 4)), NM(2, 4)).sum() == 8


def test_sides_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(ValueError, match="needs both sides in multiples of 4, not 4x6"):
        find_transposable_mask(np.ones((4, 6)), NM(2, 4))
