"""The rows a cost model learns from, and how a row says which curve it belongs to.

X is a pandas frame with the columns of `latbench.tables.table.KEY` (others are welcome), one row a point; y is
seconds. A curve is what is left of a key without its sparsity: one layer shape, pattern, kernel, device and way of
measuring.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cost_models.refusals import BadRows
from latbench.errors import BadData, UsageError
from latbench.tables import latest_rows as latest
from latbench.tables import table as tables
from latbench.tables.storage import Place

KEY = [field.name for field in tables.KEY]
CURVE = [name for name in KEY if name != "sparsity_target"]
SHAPE = [name for name in KEY[KEY.index("op") : KEY.index("pattern")] if name != "model"]

Array = npt.NDArray[np.float64]


Where = Mapping[str, str]
"""Values by column, of KEY or backend_version, as text: rows with these alone."""


def training_rows(table: pd.DataFrame, where: Where | None = None) -> tuple[pd.DataFrame, Array]:
    """The layers of a table that a cost model learns from: X, one valid row a point, and y, their median seconds.

    Whole models and verifications are left out, and what is not as `where` says. Raises UsageError for a column that
    rows are not told apart by, BadData if nothing is left, or rows of what cannot be a layer.
    """
    where = _checked(where)
    layers = table["op"].ne("model") & table["purpose"].ne("verify")
    for name, text in where.items():
        layers &= table[name].isin([value for value in table[name].unique() if str(plain(value)) == text])
    rows = _some(tables.timed(table[layers]), where)
    return rows.reset_index(drop=True), rows["median_seconds"].to_numpy(np.float64)


COLUMNS = [
    *KEY, "backend_version", "median_seconds", "low_seconds", "high_seconds", "drift_ratio", "reference_ratio",
]  # fmt: skip


def read_training_rows(table: str | Place, where: Where | None = None) -> tuple[pd.DataFrame, Array]:
    """`training_rows` of the table at a path or URI, with the columns that models use; read in pieces, so that memory
    grows with its points (`latbench.tables.latest_rows`).
    """
    where = _checked(where)

    def useful(piece: pa.Table) -> pa.Array:
        # What others published may not say which operation it is.
        layer = pc.and_(pc.not_equal(piece["op"], "model").fill_null(True), pc.not_equal(piece["purpose"], "verify"))
        mask = pc.and_(layer, pc.is_in(piece["status"], pa.array(tables.TIMED)))
        for name, text in where.items():
            mask = pc.and_(mask, pc.equal(pc.cast(piece[name], pa.string()), text).fill_null(False))
        return mask

    rows = latest.frame(table, COLUMNS, per=["point_id"], useful=useful, looked_at=["op", "purpose", *where])
    return _some(rows, where), rows["median_seconds"].to_numpy(np.float64)


def _checked(where: Where | None) -> Where:
    known = [*KEY, "backend_version"]
    if unknown := [name for name in where or {} if name not in known]:
        raise UsageError(f"rows are not told apart by {unknown[0]}, only by {', '.join(known)}")
    return where or {}


def _some(rows: pd.DataFrame, where: Where) -> pd.DataFrame:
    if rows.empty:
        said = " and ".join(f"{name} {text}" for name, text in where.items())
        raise BadData(f"the table holds no valid time of a layer{f' with {said}' if said else ''}; sweep one first")
    tables.refuse_nonsense(rows)
    return rows


def checked(X: pd.DataFrame, y: npt.ArrayLike) -> Array:
    """`y` as float64 (rows of X,). Raises ValueError unless it is positive, finite and as long as X, at least one;
    TypeError for an X that is no frame.
    """
    if not isinstance(X, pd.DataFrame):
        raise TypeError("X must be a pandas frame with the columns of `latbench.tables.table.KEY`, one row a point")
    seconds = np.asarray(y, dtype=np.float64)
    if seconds.shape != (len(X),) or seconds.size == 0:
        raise ValueError(
            f"X has {len(X)} rows and y the shape {seconds.shape}: one time a row is needed, at least one"
        )
    if not (np.isfinite(seconds).all() and seconds.min() > 0):
        raise ValueError("y must be positive finite seconds")
    return seconds


def sparsities(X: pd.DataFrame) -> Array:
    """The sparsity of every row, in [0, 1], to nine digits. Raises BadRows for anything else."""
    if "sparsity_target" not in X.columns:
        raise BadRows("X has no column sparsity_target")
    values = X["sparsity_target"].to_numpy(np.float64).round(9)
    if (outside := np.flatnonzero(~((values >= 0) & (values <= 1)))).size:
        raise BadRows(
            f"sparsity_target must lie in [0, 1], and it is {values[outside[0]]} in {outside.size} rows: "
            "`latbench validate` names them"
        )
    return values


def keys(X: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Hashable, ...]]:
    """The values of `columns`, a tuple a row; missing values are None, and 3.0 is 3, whatever the frame's dtypes."""
    if not columns:
        return [()] * len(X)
    return list(zip(*([plain(value) for value in X[name].tolist()] for name in columns), strict=True))


def plain(value: Hashable) -> Hashable:
    """None for a missing value, a whole number for one without a fraction: as a key holds it, whatever the dtype."""
    if value is None or value is pd.NA or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shape_groups(X: pd.DataFrame) -> npt.NDArray[np.int64]:
    """(rows,) a number for each layer shape, to split hold-outs by. Rows without m differ by `model` instead."""
    shape = [name for name in SHAPE if name in X.columns]
    instead = keys(X, [name for name in ("model",) if name in X.columns])
    known = X["m"].notna() if "m" in X.columns else np.zeros(len(X), bool)
    groups = [key if sure else other for key, other, sure in zip(keys(X, shape), instead, known, strict=True)]
    seen: dict[tuple[Hashable, ...], int] = {}
    return np.array([seen.setdefault(group, len(seen)) for group in groups], dtype=np.int64)


def count_shapes(X: pd.DataFrame) -> int:
    """How many layer shapes X has, as hold-outs tell them apart."""
    return int(shape_groups(X).max(initial=-1)) + 1


def split_by_shape(shapes: npt.NDArray[np.int64], folds: int, random_state: int) -> npt.NDArray[np.int64]:
    """(rows,) which fold each row is held out with; a shape falls into one fold as a whole."""
    count = int(shapes.max()) + 1
    if folds < 2:
        raise ValueError(f"shapes are held out in 2 parts or more (folds), not {folds}")
    fold: npt.NDArray[np.int64] = np.random.default_rng(random_state).permutation(count) % min(folds, count)
    return fold[shapes]


def describe(row: dict[str, Hashable]) -> str:
    """A point in a user's words: `linear 768x768x128 shflbw:32`, as far as the columns of `row` say."""
    shape = "x".join(str(row[name]) for name in ("m", "k", "n") if row.get(name) is not None)
    words = [row.get("op"), shape or row.get("model") or "a layer of unknown shape", row.get("pattern")]
    text = " ".join(str(word) for word in words if word)
    return f"{text} on {row['backend']}" if row.get("backend") else text
