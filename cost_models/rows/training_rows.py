"""Training rows of a cost model: the valid layer times of a table, X with key columns and y in seconds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cost_models.rows.row_keys import KEY, FloatArray, normalize_key_value
from latbench.errors import BadData, UsageError
from latbench.tables.latest_rows import read_latest
from latbench.tables.layer_columns import check_layers
from latbench.tables.schema import TIMED
from latbench.tables.storage import Place
from latbench.tables.table import select_timed

Where = Mapping[str, str]
"""A filter of rows: the required value, as text, of some columns of KEY or of backend_version."""

COLUMNS = [
    *KEY, "backend_version", "median_seconds", "low_seconds", "high_seconds", "drift_ratio", "reference_ratio",
]  # fmt: skip
"""The columns that cost models use."""


def select_training_rows(table: pd.DataFrame, where: Where | None = None) -> tuple[pd.DataFrame, FloatArray]:
    """Select the layer times of a table that a cost model learns from; whole models and verifications are left out.

    Parameters
    ----------
    table : DataFrame
        A table as `latbench.tables.table.read_table` returns it.
    where : mapping of str to str, optional
        Required values by column, as text, such as {"backend": "numba"}.

    Returns
    -------
    X : DataFrame of shape (rows, columns)
        One valid row a point.
    y : ndarray of shape (rows,)
        Median seconds.

    Raises
    ------
    UsageError
        `where` names a column that does not identify rows.
    BadData
        No row is left, or a row has values that no layer can have.
    """
    where = _check_filter(where)
    layers = table["op"].ne("model") & table["purpose"].ne("verify")
    for name, text in where.items():
        matching = [value for value in table[name].unique() if str(normalize_key_value(value)) == text]
        layers &= table[name].isin(matching)
    rows = _check_rows(select_timed(table[layers]), where)
    return rows.reset_index(drop=True), rows["median_seconds"].to_numpy(np.float64)


def read_training_rows(table: str | Place, where: Where | None = None) -> tuple[pd.DataFrame, FloatArray]:
    """Read the training rows of a stored table, in pieces, so that memory grows with its points and not its rows.

    Parameters
    ----------
    table : str or Place
        Path or URI of the table's folder, or `bundled://NAME`.
    where : mapping of str to str, optional
        Required values by column, as text, such as {"backend": "numba"}.

    Returns
    -------
    X : DataFrame of shape (rows, len(COLUMNS))
        One valid row a point.
    y : ndarray of shape (rows,)
        Median seconds.

    Raises
    ------
    UsageError
        `where` names a column that does not identify rows.
    BadData
        There is no such table, no row is left, or a row has values that no layer can have.
    """
    where = _check_filter(where)

    def is_training_row(piece: pa.Table) -> pa.Array:
        # Published tables may lack the operation: such rows are layers.
        layer = pc.and_(pc.not_equal(piece["op"], "model").fill_null(True), pc.not_equal(piece["purpose"], "verify"))
        mask = pc.and_(layer, pc.is_in(piece["status"], pa.array(TIMED)))
        for name, text in where.items():
            mask = pc.and_(mask, pc.equal(pc.cast(piece[name], pa.string()), text).fill_null(False))
        return mask

    rows = read_latest(
        table, COLUMNS, group_columns=["point_id"], accept=is_training_row, filter_columns=["op", "purpose", *where]
    )
    return _check_rows(rows, where), rows["median_seconds"].to_numpy(np.float64)


def check_seconds(X: pd.DataFrame, y: npt.ArrayLike) -> FloatArray:
    """Return `y` as float64 of shape (rows,).

    Raises ValueError unless it holds one positive finite time for each row of X, and TypeError if X is no frame.
    """
    if not isinstance(X, pd.DataFrame):
        raise TypeError(
            "X must be a pandas frame with the columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point"
        )
    seconds = np.asarray(y, dtype=np.float64)
    if seconds.shape != (len(X),) or seconds.size == 0:
        raise ValueError(
            f"X has {len(X)} rows and y the shape {seconds.shape}: one time a row is needed, at least one"
        )
    if not (np.isfinite(seconds).all() and seconds.min() > 0):
        raise ValueError("y must be positive finite seconds")
    return seconds


def _check_filter(where: Where | None) -> Where:
    known = [*KEY, "backend_version"]
    if unknown := [name for name in where or {} if name not in known]:
        raise UsageError(f"{unknown[0]} does not identify rows; filter by one of {', '.join(known)}")
    return where or {}


def _check_rows(rows: pd.DataFrame, where: Where) -> pd.DataFrame:
    """Return the rows; raise BadData for none and for impossible layers."""
    if rows.empty:
        condition = " and ".join(f"{name} {text}" for name, text in where.items())
        raise BadData(
            f"the table holds no valid time of a layer{f' with {condition}' if condition else ''}; sweep one first"
        )
    check_layers(rows)
    return rows
