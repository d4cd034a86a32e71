"""The key of a table's row: which columns identify a point, a curve and a layer shape.

X is a pandas frame with the columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point, and maybe others.
A curve holds the points that differ only in sparsity: one layer shape, pattern, kernel, device and way of measuring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.refusals import BadRows
from latbench.tables.schema import KEY_COLUMNS

KEY = [field.name for field in KEY_COLUMNS]
"""The columns that identify a point."""

CURVE = [name for name in KEY if name != "sparsity_target"]
"""The columns that identify a curve."""

SHAPE = [name for name in KEY[KEY.index("op") : KEY.index("pattern")] if name != "model"]
"""The columns that identify a layer shape."""

FloatArray = npt.NDArray[np.float64]
RowMask = npt.NDArray[np.bool_]
"""(rows,) whether each row is selected."""


def extract_sparsities(X: pd.DataFrame) -> FloatArray:
    """Return the sparsity of every row, rounded to nine digits.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Needs the column `sparsity_target`.

    Returns
    -------
    ndarray of shape (rows,)
        Values in [0, 1].

    Raises
    ------
    BadRows
        The column is missing, or a value lies outside [0, 1].
    """
    if "sparsity_target" not in X.columns:
        raise BadRows("X has no column sparsity_target")
    values: FloatArray = X["sparsity_target"].to_numpy(np.float64).round(9)
    if (outside := np.flatnonzero(~((values >= 0) & (values <= 1)))).size:
        raise BadRows(
            f"sparsity_target must lie in [0, 1], and it is {values[outside[0]]} in {outside.size} rows: "
            "`latbench validate` names them"
        )
    return values


def extract_keys(X: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Hashable, ...]]:
    """Return the values of `columns` as one tuple a row, each value as `normalize_key_value` returns it."""
    if not columns:
        return [()] * len(X)
    return list(zip(*([normalize_key_value(value) for value in X[name].tolist()] for name in columns), strict=True))


def normalize_key_value(value: Hashable) -> Hashable:
    """Return None for a missing value and an int for a whole number: keys must not depend on the frame's dtypes."""
    if value is None or value is pd.NA or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def describe_point(row: dict[str, Hashable]) -> str:
    """Return a point in words, such as `linear 768x768x128 shflbw:32`, from the columns that `row` has."""
    shape = "x".join(str(row[name]) for name in ("m", "k", "n") if row.get(name) is not None)
    words = [row.get("op"), shape or row.get("model") or "a layer of unknown shape", row.get("pattern")]
    text = " ".join(str(word) for word in words if word)
    return f"{text} on {row['backend']}" if row.get("backend") else text
