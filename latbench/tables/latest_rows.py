"""One row per point from a table of any length: the latest valid one.

Memory grows with the number of points, not of rows. The table is read twice. The first pass keeps 25 bytes a row and
forgets all but the latest row of each point from time to time. The second pass fills the requested columns in narrow
types: texts become categories of one to four bytes, sizes float32 where that is exact. With all key columns a point
takes 100 bytes (150 with convolutions), however often it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from latbench.tables.row_hashes import hash_rows
from latbench.tables.schema import SCHEMA
from latbench.tables.storage import Place
from latbench.tables.table import BATCH_ROWS, list_parts, read_batches, read_part_batches

if TYPE_CHECKING:
    import pandas as pd

RowFilter = Callable[[pa.Table], pa.Array]
"""Which rows of a piece count: (rows,) booleans."""


def accept_every_row(piece: pa.Table) -> pa.Array:
    """Accept all rows (a RowFilter)."""
    return pa.repeat(True, piece.num_rows)


_PENDING_ROWS = 1 << 20  # rows between two reductions, unless there are more points
_EXACT_FLOAT32 = 2**24  # float32 holds all integers up to this


def read_latest(
    path: str | Place,
    columns: Sequence[str],
    *,
    group_columns: Sequence[str],
    accept: RowFilter,
    filter_columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Read the latest accepted row for each value of the columns `group_columns`, in the table's order.

    Among rows with a time, status ok outranks noisy, as in `select_timed`. Texts become categories in alphabetical
    order; point_id becomes an integer of 64 bits. Raises BadData as `read_table` does.

    Parameters
    ----------
    path
        The table.
    columns
        Columns of the result; lists are not possible.
    group_columns
        Columns that identify a point.
    accept
        Accepts rows; it gets pieces with `group_columns`, status, started_at and `filter_columns`.
    filter_columns
        Further columns for `accept`.
    """
    import pandas as pd

    files, chosen = _found(path, group_columns, accept, filter_columns)
    pa.default_memory_pool().release_unused()  # memory of the first pass, which the columns need now
    filled = [_column(SCHEMA.field(name), len(chosen)) for name in columns]
    done = 0
    for piece in _chosen(files, chosen, columns):
        for column, name in zip(filled, columns, strict=True):
            column.put(done, piece[name])
        done += piece.num_rows
    return pd.DataFrame({name: filled.pop(0).series() for name in columns}, copy=False)


def read_latest_arrow(
    path: str | Place,
    columns: Sequence[str],
    *,
    group_columns: Sequence[str],
    accept: RowFilter,
    filter_columns: Sequence[str] = (),
) -> pa.Table:
    """Read the rows of `read_latest` as an Arrow table: with lists, and with plain texts."""
    files, chosen = _found(path, group_columns, accept, filter_columns)
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    return pa.concat_tables([schema.empty_table(), *_chosen(files, chosen, columns)])


def _found(
    path: str | Place, group_columns: Sequence[str], accept: RowFilter, filter_columns: Sequence[str]
) -> tuple[list[_File], NDArray[np.int64]]:
    """Return the files of a table, and the numbers of the selected rows."""
    wanted = list(dict.fromkeys([*group_columns, "status", "started_at", *filter_columns]))
    files: list[_File] = []
    latest = _Latest()
    for part in list_parts(path):
        start = first = sum(file.rows for file in files)
        for piece in read_batches(part, wanted):
            mask = pc.fill_null(accept(piece), False).to_numpy(zero_copy_only=False)
            latest.add(piece.filter(pa.array(mask)), start + np.flatnonzero(mask), group_columns)
            start += piece.num_rows
        files.append(_File(part, start - first))
    return files, latest.rows()


@dataclass(frozen=True)
class _File:
    part: Place
    rows: int


class _Latest:
    """The latest row of each key so far: hash of the key, whether it is settled, its time, its number."""

    def __init__(self) -> None:
        self._seen: list[tuple[NDArray[Any], ...]] = []
        self._kept = self._pending = 0

    def add(self, piece: pa.Table, numbers: NDArray[np.int64], group_columns: Sequence[str]) -> None:
        """Add the rows of `piece`, which have these numbers."""
        key = hash_rows(piece.select(list(group_columns)))[:, 0]
        settled = pc.equal(piece["status"], "ok").fill_null(False).to_numpy().astype(np.uint8)
        moment = piece["started_at"].cast(pa.int64()).fill_null(np.iinfo(np.int64).max).to_numpy()
        self._seen.append((key, settled, moment, numbers))
        self._pending += len(numbers)
        if self._pending > max(_PENDING_ROWS, self._kept):
            self._reduce()

    def _reduce(self) -> None:
        columns, self._seen = list(zip(*self._seen, strict=True)), []
        # One column at a time, so that only one exists twice.
        key, settled, moment, number = (np.concatenate(columns.pop(0)) for _ in range(4))
        order = np.lexsort((number, moment, settled, key))
        ordered = key[order]
        last = np.append(ordered[1:] != ordered[:-1], True)[: len(order)]
        order = order[last]
        self._seen = [(key[order], settled[order], moment[order], number[order])]
        self._kept, self._pending = len(order), 0

    def rows(self) -> NDArray[np.int64]:
        """Return the numbers of the latest rows, rising, and forget all else."""
        if not self._seen:
            return np.empty(0, np.int64)
        self._reduce()
        numbers: NDArray[np.int64] = np.sort(self._seen[0][3])
        self._seen = []
        return numbers


def _chosen(files: Iterable[_File], chosen: NDArray[np.int64], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows with the rising numbers `chosen`, in pieces; files without any are not opened."""
    first = 0
    for file in files:
        own = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, first + file.rows)] - first
        first += file.rows
        if not len(own):
            continue
        for start, piece in read_part_batches(file.part, columns):
            here = own[np.searchsorted(own, start) : np.searchsorted(own, start + piece.num_rows)] - start
            if len(here):
                yield piece.take(pa.array(here))


# Columns that are filled piece by piece ----------------------------------------------------------------------------


def _column(field: pa.Field, rows: int) -> _Codes | _Numbers | _Wholes:
    if field.name == "point_id":
        return _Numbers(np.empty(rows, np.uint64), lambda values: hash_rows(pa.table({"point_id": values}))[:, 0])
    if pa.types.is_string(field.type):
        return _Codes(rows)
    if pa.types.is_timestamp(field.type):
        return _Moments(np.empty(rows, "M8[us]"), _moments)
    if pa.types.is_floating(field.type):
        return _Numbers(np.empty(rows), _reals)
    if pa.types.is_integer(field.type):
        return _Wholes(rows)
    raise ValueError(f"column {field.name} of {field.type} is no single value a row")


def _reals(values: pa.ChunkedArray) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.cast(pa.float64()).fill_null(np.nan).to_numpy()
    return found


def _moments(values: pa.ChunkedArray) -> NDArray[Any]:
    found: NDArray[Any] = values.cast(pa.timestamp("us")).to_numpy()
    return found


class _Numbers:
    """A column of values of one dtype."""

    def __init__(self, values: NDArray[Any], read: Callable[[pa.ChunkedArray], NDArray[Any]]) -> None:
        self._values, self._read = values, read

    def put(self, start: int, values: pa.ChunkedArray) -> None:
        """Set the rows from `start` on."""
        self._values[start : start + len(values)] = self._read(values)

    def series(self) -> Any:
        """Return the column for a frame, without a copy."""
        return self._values


class _Moments(_Numbers):
    """A column of times in UTC."""

    def series(self) -> Any:
        import pandas as pd

        return pd.Series(self._values).dt.tz_localize("UTC")


class _Wholes:
    """A column of integers: int64 where every row has one, else floats with NaN; no memory while all are null."""

    def __init__(self, rows: int) -> None:
        self._values: NDArray[Any] = np.broadcast_to(np.float32(np.nan), rows)

    def put(self, start: int, values: pa.ChunkedArray) -> None:
        """Set the rows from `start` on."""
        if values.null_count == len(values) and not self._values.flags.writeable:
            return
        if start == 0 and not values.null_count:
            self._values = np.empty(len(self._values), np.int64)
        elif not self._values.flags.writeable:
            self._values = self._values.copy()
        if self._values.dtype == np.int64 and not values.null_count:
            self._values[start : start + len(values)] = values.to_numpy()
            return
        reals = _reals(values)
        exact = self._values.dtype == np.float32 and not (np.abs(reals) > _EXACT_FLOAT32).any()
        if not exact and self._values.dtype != np.float64:
            self._values = self._values.astype(np.float64)
        self._values[start : start + len(values)] = reals

    def series(self) -> Any:
        """Return the column for a frame, without a copy."""
        return self._values


class _Codes:
    """A column of texts, each stored once."""

    def __init__(self, rows: int) -> None:
        self._codes = np.empty(rows, np.int8)
        self._levels: dict[str, int] = {}

    def put(self, start: int, values: pa.ChunkedArray) -> None:
        """Set the rows from `start` on."""
        encoded = values.combine_chunks().dictionary_encode()
        for text in encoded.dictionary.to_pylist():
            self._levels.setdefault(text, len(self._levels))
        codes = np.array([*(self._levels[text] for text in encoded.dictionary.to_pylist()), -1])
        kind = np.min_scalar_type(-len(self._levels) - 1)
        if kind.itemsize > self._codes.itemsize:
            self._codes = self._codes.astype(kind)
        self._codes[start : start + len(values)] = codes[encoded.indices.fill_null(-1).to_numpy()]

    def series(self) -> Any:
        """Return the column for a frame: categories in alphabetical order."""
        import pandas as pd

        texts = sorted(self._levels)
        place = {text: code for code, text in enumerate(texts)}
        moved = np.array([*(place[text] for text in self._levels), -1], self._codes.dtype)
        for start in range(0, len(self._codes), BATCH_ROWS):  # in pieces: all at once would need a copy
            some = slice(start, start + BATCH_ROWS)
            self._codes[some] = moved[self._codes[some]]
        return pd.Categorical.from_codes(self._codes, categories=pd.Index(texts, dtype=object))
