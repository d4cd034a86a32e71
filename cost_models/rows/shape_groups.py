"""Groups of rows with the same layer shape: hold-outs are split by them, never by single rows."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.rows.row_keys import SHAPE, extract_keys

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
    shape = [name for name in SHAPE if name in X.columns]
    models = extract_keys(X, [name for name in ("model",) if name in X.columns])
    known = X["m"].notna() if "m" in X.columns else np.zeros(len(X), bool)
    groups = [
        key if has_shape else model
        for key, model, has_shape in zip(extract_keys(X, shape), models, known, strict=True)
    ]
    numbers: dict[tuple[Hashable, ...], int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)


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
