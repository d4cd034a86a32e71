"""Transposable N:M masks: N of M both along the rows and along the columns (Hubara et al. 2021, section 5).

With such a mask both the forward product by W and the input gradient's by W^T run on N:M kernels. A matrix falls into
independent M x M tiles. The best mask of a tile that keeps exactly N is a min-cost flow. The source gives N to each
row, each row 1 to each column, and each column N to the sink. The matrix of this linear program is totally
unimodular. So an optimal vertex, at which the simplex method ends, has whole numbers.

The quick method sorts a tile's scores and takes each that still has room. It keeps at least half of the best score
and at most N of M. It may have a higher score where it leaves a row short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.patterns import NM

VARIABLES = 16_384  # of one linear program, which solves many small tiles together


def find_transposable_mask(scores: NDArray[np.floating], pattern: NM, *, exact: bool = True) -> NDArray[np.bool_]:
    """Find a transposable N:M mask with a high total score.

    Parameters
    ----------
    scores : ndarray of shape (m, k)
        Non-negative scores.
    pattern : NM
        The pattern.
    exact : bool
        True keeps exactly N and has the highest score among such masks. False keeps at most N, with at least half of
        that score.

    Returns
    -------
    ndarray of bool, shape (m, k)
        True marks a kept weight.

    Raises
    ------
    ValueError
        m or k is no multiple of M.
    """
    m, k = scores.shape
    of = pattern.of
    if m % of or k % of:
        raise ValueError(f"transposable {pattern} needs both sides in multiples of {of}, not {m}x{k}")
    tiles = scores.reshape(m // of, of, k // of, of).swapaxes(1, 2).reshape(-1, of, of).astype(np.float64)
    if exact:
        each = max(1, VARIABLES // of**2)
        parts = [_solve_tiles(tiles[start : start + each], pattern) for start in range(0, len(tiles), each)]
        masks = np.concatenate(parts)
    else:
        masks = _sort_tiles(tiles, pattern)
    return masks.reshape(m // of, k // of, of, of).swapaxes(1, 2).reshape(m, k)


def _solve_tiles(tiles: NDArray[np.float64], pattern: NM) -> NDArray[np.bool_]:
    """Return the optimal masks of tiles (t, M, M), by one linear program."""
    from scipy import sparse  # late: it takes half a second, also in processes that time a whole model
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


def _sort_tiles(tiles: NDArray[np.float64], pattern: NM) -> NDArray[np.bool_]:
    """Return quick masks: the r-th largest score of each tile is taken if its row and its column have room."""
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
