"""Which units to keep: the most score for a wanted number of elements, the same answer every time.

A unit is what a pattern keeps or drops as one: an element, a block, a vector. Ties go to the lower index.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating]
Mask = NDArray[np.bool_]


def check_scores(scores: Scores) -> None:
    """Refuse scores (m, k) that cannot be ranked: wrong rank, empty, not real numbers, NaN, infinite or negative."""
    if not isinstance(scores, np.ndarray) or scores.ndim != 2 or min(scores.shape) < 1:
        found = f"an array of shape {scores.shape}" if isinstance(scores, np.ndarray) else type(scores).__name__
        raise ValueError(f"scores must be a matrix (m, k) with at least one row and one column, not {found}")
    if not np.issubdtype(scores.dtype, np.floating):
        raise TypeError(f"scores must be floating-point numbers, not {scores.dtype}")
    wrong = ~np.isfinite(scores) | (scores < 0)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"scores must be finite and not negative: {np.count_nonzero(wrong)} are not, the first is "
            f"{scores[row, column]} at row {row}, column {column}"
        )


def check_sparsity(sparsity: float) -> None:
    """Refuse a sparsity (the share of elements dropped) outside [0, 1]."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is the share of weights dropped, between 0 and 1, not {sparsity}")


def select_top(totals: Scores, count: int) -> Mask:
    """Return the `count` largest of totals (units,), as a mask of the same shape; ties go to the lower index."""
    if count <= 0:
        return np.zeros(totals.shape, bool)
    if count >= totals.size:
        return np.ones(totals.shape, bool)
    least = np.partition(totals, totals.size - count)[totals.size - count]
    kept: Mask = totals > least
    kept[np.flatnonzero(totals == least)[: count - np.count_nonzero(kept)]] = True
    return kept


def select_top_units(totals: Scores, sizes: NDArray[np.int64], wanted: float) -> Mask:
    """Return the units to keep: as close to `wanted` elements as possible, and among such choices the most score.

    Whole units are all of one size; those at the edges of a matrix are smaller, of at most three other sizes. For
    every possible number of edge units the number of whole ones follows. So the best combination is found exactly,
    and no edge unit is favoured or held back by its size.

    totals: float64 (units,), the score of each unit. sizes: int64 (units,), the elements of each.
    """
    kinds, members = np.unique(sizes, return_counts=True)
    whole = kinds[np.argmax(members)]
    edges = kinds[kinds != whole]
    numbers = [np.arange(count + 1) for count in members[kinds != whole]]
    counts = [grid.ravel() for grid in np.meshgrid(*numbers)]
    elements = np.zeros(math.prod(map(len, numbers)))
    score = np.zeros_like(elements)
    for kind, count in zip(edges, counts, strict=True):
        elements += kind * count
        score += _best_sums(totals[sizes == kind])[count]
    whole_sums = _best_sums(totals[sizes == whole])
    whole_count = np.floor((wanted - elements) / whole + 0.5).astype(np.int64).clip(0, len(whole_sums) - 1)
    gap = np.abs(wanted - elements - whole * whole_count)
    score += whole_sums[whole_count]
    score[gap > gap.min() + 1e-6] = -math.inf
    best = int(np.argmax(score))
    kept = np.zeros(totals.shape, bool)
    for kind, count in zip([whole, *edges], [whole_count, *counts], strict=True):
        of_kind = np.flatnonzero(sizes == kind)
        kept[of_kind[select_top(totals[of_kind], int(count[best]))]] = True
    return kept


def select_top_vectors(
    scores: Scores, v: int, sparsity: float
) -> tuple[Mask, NDArray[np.float64], NDArray[np.int64]]:
    """Return the vectors of v consecutive rows x 1 column to keep of scores (m, k), chosen over the whole matrix.

    Returns kept bool (groups, k), the scores of all vectors float64 (groups, k), and the rows int64 (groups,) of each
    group: v, fewer in the last where m is no multiple of v.
    """
    first_rows = np.arange(0, scores.shape[0], v)
    totals = np.add.reduceat(scores, first_rows, axis=0, dtype=np.float64)
    heights = np.minimum(v, scores.shape[0] - first_rows)
    sizes = np.broadcast_to(heights[:, None], totals.shape)
    kept = select_top_units(totals.ravel(), sizes.ravel(), (1 - sparsity) * scores.size)
    return kept.reshape(totals.shape), totals, heights


def _best_sums(totals: Scores) -> NDArray[np.float64]:
    """(units + 1,): the sum of the i largest totals, at i."""
    return np.concatenate([[0.0], np.cumsum(np.sort(totals)[::-1], dtype=np.float64)])
