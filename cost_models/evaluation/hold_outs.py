"""What is held out to judge a model on: shapes at random, a family of layers, the smallest or the largest shapes.

Each is harder than the one before. Random shapes have neighbours on all sides; a family has none of its kind; the
edges are extrapolated to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.features import measured_ranges as frontier
from cost_models.rows.row_keys import shape_groups, split_by_shape

Mask = npt.NDArray[np.bool_]

FOLDS = 5


def hold_outs(X: pd.DataFrame, random_state: int = 0) -> dict[str, list[Mask]]:
    """By name, the masks (rows,) of what is held out at a time; names for which nothing can be are left out."""
    found: dict[str, Sequence[Mask]] = {
        "shapes": list(_each(split_by_shape(shape_groups(X), FOLDS, random_state))),
        "layer families": list(_each(families(X))),
        **{f"{side} fifth": [edge] for side, edge in frontier.fifths(X).items() if edge.any()},
    }
    return {name: list(masks) for name, masks in found.items() if masks}


def families(X: pd.DataFrame) -> npt.NDArray[np.int64]:
    """(rows,) a number for the family of each row's layer: convolutions with the same kernel size and stride, linear
    layers that widen, narrow, or keep the number of features.
    """
    names = [name for name in ("kh", "kw", "stride_h", "stride_w") if name in X.columns]
    convolution = X[names].fillna(0).astype(np.int64).astype(str).agg("x".join, axis=1) if names else ""
    aspect = np.sign(X["m"].to_numpy(np.float64) - X["k"].to_numpy(np.float64)).astype(int).astype(str)
    family = np.where(X["op"].eq("conv2d"), "conv2d " + pd.Series(convolution, index=X.index), aspect)
    return np.asarray(pd.factorize(family)[0], dtype=np.int64)


def _each(groups: npt.NDArray[np.int64]) -> Iterator[Mask]:
    """Every group in turn; none if there is but one, since nothing would be left."""
    for group in range(int(groups.max()) + 1 if groups.any() else 0):
        yield groups == group
