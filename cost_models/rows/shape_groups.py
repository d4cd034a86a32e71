"""Groups of rows with the same layer shape: hold-outs are split by them, never by single rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.rows.row_keys import SHAPE, RowMask

Groups = npt.NDArray[np.int64]
"""(rows,) the number of each row's group, from 0."""


def group_by_shape(X: pd.DataFrame) -> Groups:
    """Return the number of each row's layer shape. Rows without m are grouped by `model` instead.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`.

    Returns
    -------
    ndarray of int, shape (rows,)
        Numbers from 0, in the order of first appearance.
    """
    known = X["m"].notna().to_numpy() if "m" in X.columns else np.zeros(len(X), bool)
    numbers = np.zeros(len(X), np.int64)
    for rows, names in ((known, SHAPE), (~known, ("model",))):
        for name in (name for name in names if name in X.columns and rows.any()):
            values, count = pd.factorize(X[name].to_numpy()[rows], use_na_sentinel=True)
            # Numbers stay below the count of rows, so that products of them fit into 64 bits.
            numbers[rows] = pd.factorize(numbers[rows] * (len(count) + 1) + values + 1)[0]
    codes: Groups = pd.factorize(2 * numbers + known)[0].astype(np.int64)
    return codes


def count_shapes(X: pd.DataFrame) -> int:
    """Return the number of different layer shapes in X."""
    return int(group_by_shape(X).max(initial=-1)) + 1


def split_by_shape(shapes: Groups, folds: int, random_state: int) -> Groups:
    """Return the cross-validation fold of each row; all rows of one shape fall into the same fold.

    Parameters
    ----------
    shapes : ndarray of int, shape (rows,)
        As `group_by_shape` returns them.
    folds : int
        Number of folds, at least 2. Fewer shapes than folds give one fold a shape.
    random_state : int
        Seed of the random assignment.

    Returns
    -------
    ndarray of int, shape (rows,)
        Fold numbers from 0.

    Raises
    ------
    ValueError
        `folds` is less than 2.
    """
    count = int(shapes.max()) + 1
    if folds < 2:
        raise ValueError(f"shapes are held out in 2 parts or more (folds), not {folds}")
    fold: Groups = np.random.default_rng(random_state).permutation(count) % min(folds, count)
    return fold[shapes]


_FEWEST = 10  # shapes of which no interval of 90% could be calibrated otherwise


def select_shapes(shapes: Groups, most_rows: int, random_state: int) -> RowMask:
    """Return a mask of rows: all, or those of whole shapes drawn at random, about `most_rows` of them at most.

    Parameters
    ----------
    shapes : ndarray of int, shape (rows,)
        As `group_by_shape` returns them.
    most_rows : int
        Rows to select at most, but for ten shapes.
    random_state : int
        Seed of the draw.
    """
    rows = np.bincount(shapes)
    order = np.random.default_rng(random_state).permutation(len(rows))
    kept: list[int] = []
    total = 0
    for shape in order:
        if total + rows[shape] <= most_rows or len(kept) < _FEWEST:
            kept.append(shape)
            total += rows[shape]
    selected: RowMask = np.isin(shapes, kept)
    return selected
