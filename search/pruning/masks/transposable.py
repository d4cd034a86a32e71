"""Transposable N:M masks: N of M both along the rows and along the columns (Hubara et al. 2021, section 5).

With one, the forward product by W and the input gradient's by W^T both run on N:M kernels. A matrix falls into M x M
tiles, each on its own. The best mask of a tile that keeps exactly N is a min-cost flow: the source gives N to each
row, each row 1 to each column, each column N to the sink. As a linear program its matrix is totally unimodular, so
that an optimal vertex, which the simplex method ends at, is whole. Sorting a tile's scores and taking whatever still
has room is quick, and keeps at least half of that score; it keeps at most N, and may have more score where it leaves
a row short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.patterns import NM

VARIABLES = 16_384  # of one linear program: many small tiles are solved together


def transposable_mask(scores: NDArray[np.floating], pattern: NM, *, exact: bool = True) -> NDArray[np.bool_]:
    """The mask, bool (m, k), of most score among those that keep exactly N, or one that keeps at most N and at least
    half as much score; scores (m, k) are not negative.

    Raises ValueError where m or k is no multiple of `pattern.of`.
    """
    m, k = scores.shape
    of = pattern.of
    if m % of or k % of:
        raise ValueError(f"transposable {pattern} needs both sides in multiples of {of}, not {m}x{k}")
    tiles = scores.reshape(m // of, of, k // of, of).swapaxes(1, 2).reshape(-1, of, of).astype(np.float64)
    if exact:
        each = max(1, VARIABLES // of**2)
        parts = [_by_flow(tiles[start : start + each], pattern) for start in range(0, len(tiles), each)]
        masks = np.concatenate(parts)
    else:
        masks = _by_sorting(tiles, pattern)
    return masks.reshape(m // of, k // of, of, of).swapaxes(1, 2).reshape(m, k)


def _by_flow(tiles: NDArray[np.float64], pattern: NM) -> NDArray[np.bool_]:
    """Tiles (t, M, M) as one linear program."""
    from scipy import sparse  # here: every process that times a whole model would import it, for half a second
    from scipy.optimize import linprog

    t, of, _ = tiles.shape
    rows = sparse.kron(sparse.eye_array(t * of), np.ones((1, of)))
    columns = sparse.kron(sparse.eye_array(t), sparse.kron(np.ones((1, of)), sparse.eye_array(of)))
    largest = tiles.max(axis=(1, 2), keepdims=True)
    scaled = tiles / np.where(largest > 0, largest, 1)  # tolerances are absolute; tiles do not depend on each other
    found = linprog(
        -scaled.ravel(), A_eq=sparse.vstack([rows, columns]), b_eq=np.full(2 * t * of, pattern.keep), bounds=(0, 1),
        method="highs-ds",
    )  # fmt: skip
    if not found.success:
        raise ArithmeticError(f"the solver found no transposable mask: {found.message}")
    masks: NDArray[np.bool_] = found.x.reshape(tiles.shape) > 0.5
    return masks


def _by_sorting(tiles: NDArray[np.float64], pattern: NM) -> NDArray[np.bool_]:
    """All tiles at once: the r-th largest score of each is taken if its row and its column have room."""
    t, of, _ = tiles.shape
    order = np.argsort(-tiles.reshape(t, -1), axis=1, kind="stable")
    masks = np.zeros(tiles.shape, bool)
    in_row, in_column = np.zeros((t, of), int), np.zeros((t, of), int)
    every = np.arange(t)
    for place in order.T:
        row, column = np.divmod(place, of)
        room = (in_row[every, row] < pattern.keep) & (in_column[every, column] < pattern.keep)
        masks[every, row, column] = room
        in_row[every, row] += room
        in_column[every, column] += room
    return masks
