"""The edge of what was measured: which shapes lie there, and how far beyond it others do.

Shapes ordered by work, the smallest and the largest fifth are what a model of the rest would have to extrapolate to;
what it gets wrong there tells how wrong this model may be beyond the edge.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.features import Physics
from cost_models.rows import Array, shape_groups

SIDES = ("smallest", "largest")

Ranges = Mapping[str, tuple[float, float]]


def fifths(X: pd.DataFrame) -> dict[str, npt.NDArray[np.bool_]]:
    """By side, (rows,) whether a row's shape is of the fifth with the least or most multiplications; none of few."""
    shapes = shape_groups(X)
    _, first = np.unique(shapes, return_index=True)
    order = np.argsort(flop(X)[first], kind="stable")
    count = len(order) // 5
    return {
        "smallest": np.isin(shapes, order[:count]),
        "largest": np.isin(shapes, order[len(order) - count :]),
    }


def flop(X: pd.DataFrame) -> Array:
    """Multiplications and additions of the dense layer of every row, (rows,)."""
    return Physics.of(X).flop_dense


def ranges(X: pd.DataFrame, names: list[str]) -> dict[str, tuple[float, float]]:
    """The least and the largest value of each column in `names`, and of the multiplications of the dense layer."""
    found = {name: X[name].to_numpy(np.float64) for name in names} | {"flop": flop(X)}
    return {name: (float(values.min()), float(values.max())) for name, values in found.items()}


def octaves(X: pd.DataFrame, measured: Ranges) -> dict[str, Array]:
    """By side, (rows,) how many octaves a row is below or above the `measured` ranges where it is furthest; or 0."""
    below, above = np.zeros(len(X)), np.zeros(len(X))
    for name, (low, high) in measured.items():
        values = flop(X) if name == "flop" else X[name].to_numpy(np.float64)
        below = np.maximum(below, np.log2(low / values))
        above = np.maximum(above, np.log2(values / high))
    return {"smallest": below, "largest": above}
