"""Hold-outs to judge a model by: random shapes, a family of layers, and the smallest or the largest shapes.

Each is harder than the one before. Random shapes have neighbours on all sides. A family leaves no layer of its kind.
The smallest and the largest shapes must be extrapolated to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from cost_models.features.measured_ranges import select_outer_fifths
from cost_models.rows.row_keys import RowMask
from cost_models.rows.shape_groups import Groups, group_by_shape, split_by_shape

FOLDS = 5


def build_hold_outs(X: pd.DataFrame, random_state: int = 0) -> dict[str, list[RowMask]]:
    """Build the masks of rows to hold out, for `evaluate_held_out`.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
    random_state : int
        Seed of the folds of random shapes.

    Returns
    -------
    dict of str to list of ndarray of bool, shape (rows,)
        Masks by name: "shapes" (five folds), "layer families", "smallest fifth" and "largest fifth". A name is
        missing if nothing can be held out.
    """
    masks: dict[str, Sequence[RowMask]] = {
        "shapes": list(_yield_masks(split_by_shape(group_by_shape(X), FOLDS, random_state))),
        "layer families": list(_yield_masks(group_by_family(X))),
        **{f"{side} fifth": [edge] for side, edge in select_outer_fifths(X).items() if edge.any()},
    }
    return {name: list(of_name) for name, of_name in masks.items() if of_name}


def group_by_family(X: pd.DataFrame) -> Groups:
    """Return the number of each row's layer family, (rows,).

    A family holds the convolutions with the same kernel size and stride, or the linear layers that widen, narrow or
    keep the number of features.
    """
    names = [name for name in ("kh", "kw", "stride_h", "stride_w") if name in X.columns]
    convolution = X[names].fillna(0).astype(np.int64).astype(str).agg("x".join, axis=1) if names else ""
    aspect = np.sign(X["m"].to_numpy(np.float64) - X["k"].to_numpy(np.float64)).astype(int).astype(str)
    family = np.where(X["op"].eq("conv2d"), "conv2d " + pd.Series(convolution, index=X.index), aspect)
    return np.asarray(pd.factorize(family)[0], dtype=np.int64)


def _yield_masks(groups: Groups) -> Iterator[RowMask]:
    """Yield the mask of every group; none if there is only one, because nothing would be left to fit."""
    for group in range(int(groups.max()) + 1 if groups.any() else 0):
        yield groups == group
