"""Reading of tables: a flat folder of `part-<id>.parquet` files, or a single Parquet file.

Descriptions of environments, `env-<env_id>.json`, lie beside the parts; on this machine or wherever
`latbench.tables.storage` reaches.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from latbench.base.environments import ENVIRONMENT_FILE, parse_environment
from latbench.errors import BadData
from latbench.tables.row_hashes import hash_multiset, hash_rows
from latbench.tables.schema import SCHEMA, SCHEMA_VERSION, TIMED
from latbench.tables.storage import PART_NAME, UNFINISHED, Place, hide_secrets, open_input, parse_place, read_bytes

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)

# Limits of a piece: rows, and bytes in memory, because a row may have a hundred thousand samples.
BATCH_ROWS, BATCH_BYTES = 1 << 15, 64 * 2**20
_MOST_SAMPLES = 10_000_000  # per row; a greater number is damage
_TEXT_BYTES = 24  # typical memory of a text in these columns, with its offset
_READ_WHOLE_BYTES = 64 * 2**20  # a larger file is read twice: once for its hash, once for its rows


def read_table(path: str | Place, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read a table as a pandas frame.

    Files that are still being written and descriptions of environments are left out.

    Parameters
    ----------
    path
        A folder, one Parquet file, or a URI.
    columns
        Names of columns; by default all columns of the schema.

    Returns
    -------
    pandas.DataFrame
        One row per measurement. Times are in seconds.

    Raises
    ------
    BadData
        The table is missing, empty, foreign, damaged or of another schema version. The message names the file.
    """
    return read_arrow_table(path, columns).to_pandas(self_destruct=True)


def read_arrow_table(path: str | Place, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table as `read_table` does, as an Arrow table."""
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    return pa.concat_tables([schema.empty_table(), *read_batches(path, columns)])


class GrowingTable:
    """A table that is read repeatedly while others add parts; each part is read once.

    Parts whose names are hashes of their content never change; any other file is read each time. `damage` is the
    error of files that could not be read the last time, and were left out.
    """

    def __init__(self, folder: Place, columns: Sequence[str]) -> None:
        self._folder, self._columns = folder, list(columns)
        self._read: dict[Place, pa.Table] | None = None
        self._frame: pd.DataFrame | None = None
        self.damage: BadData | None = None

    def frame(self) -> pd.DataFrame | None:
        """Return the present rows with `columns`; None while there are none.

        The first call raises BadData as `read_table` does. Later ones set `damage` instead, because a sweep that adds
        rows must not stop when other parts are damaged.
        """
        before, self.damage = self._read, None
        now = {part: table for part in self._parts() if (table := self._table(part)) is not None}
        if before is None or list(now.items()) != list(before.items()):
            self._frame = pa.concat_tables(now.values()).to_pandas() if now else None
        self._read = now
        return self._frame

    def _parts(self) -> list[Place]:
        try:
            return list_parts(self._folder) if has_rows(self._folder) else []
        except BadData as error:
            self._note(error)
            return list(self._read or ())

    def _table(self, part: Place) -> pa.Table | None:
        known = None if self._read is None else self._read.get(part)
        if known is not None and PART_NAME.fullmatch(part.name):
            return known
        try:
            return read_arrow_table(part, self._columns)
        except BadData as error:
            self._note(error)
            return known

    def _note(self, error: BadData) -> None:
        if self._read is None:
            raise error
        self.damage = error


def read_batches(path: str | Place, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the table in pieces of at most BATCH_ROWS rows and about BATCH_BYTES bytes."""
    wanted = list(SCHEMA.names if columns is None else columns)
    judged = list(dict.fromkeys([*wanted, "status", "median_seconds"]))
    for part in list_parts(path):
        for start, table in read_part_batches(part, judged):
            if (untimed := np.flatnonzero(find_untimed(table))).size:
                status = table["status"][untimed[0]]
                raise BadData(f"{part}, row {start + untimed[0] + 1}: status {status} and no positive time")
            yield table.select(wanted)


def select_rows(
    path: str | Place,
    columns: Sequence[str],
    wanted: Callable[[pa.Table], pa.Array],
    filter_columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Read `columns` of the rows for which `wanted` is true.

    `wanted` gets pieces of the table with `columns` and `filter_columns`, and returns booleans (rows,). Memory grows
    with the selected rows.
    """
    read = list(dict.fromkeys([*columns, *filter_columns]))
    empty = pa.schema([SCHEMA.field(name) for name in columns]).empty_table()
    found = (piece.filter(pc.fill_null(wanted(piece), False)).select(columns) for piece in read_batches(path, read))
    return pa.concat_tables([empty, *found]).to_pandas(self_destruct=True)


def find_untimed(table: pa.Table) -> NDArray[np.bool_]:
    """Return (rows,) whether a row's status promises a time but it has no positive finite one."""
    timed = pc.is_in(table["status"], pa.array(TIMED)).to_numpy()
    seconds = table["median_seconds"].to_numpy()
    found: NDArray[np.bool_] = timed & ~((seconds > 0) & (seconds < math.inf))
    return found


def read_environments(path: str | Place) -> pd.DataFrame:
    """Read the environments of a table as a frame, one row each with its env_id; empty where none are known."""
    import pandas as pd

    return pd.DataFrame(list_environments(path))


def list_environments(path: str | Place) -> list[dict[str, Any]]:
    """Return the environments of a table as plain values. Raises BadData for a damaged file."""
    return [read_environment(file) for file in list_environment_files(path)]


def list_environment_files(path: str | Place) -> list[Place]:
    """Return the files that describe the environments of a table."""
    path = parse_place(path)
    folder = path.parent if path.is_file() else path
    files = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((file for file in files if ENVIRONMENT_FILE.fullmatch(file.name)), key=lambda file: file.name)


def read_environment(file: Place) -> dict[str, Any]:
    """Return the environment that a file describes. Raises BadData, naming the file, for a damaged one."""
    try:
        return parse_environment(file.name, read_bytes(file))
    except ValueError as error:
        raise BadData(f"{file}: {error}; delete it, and a sweep describes its machine again") from error


def has_table(path: str | Place) -> bool:
    """Return whether there is a file or a folder with content at `path`."""
    path = parse_place(path)
    return path.is_file() or (path.is_dir() and any(True for _ in path.iterdir()))


def list_parts(path: str | Place) -> list[Place]:
    """Return the Parquet files of a table (a folder or one file). Raises BadData if there are none."""
    path = parse_place(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadData(f"{path}: no such table")
    if not (found := _parts_in(path)):
        raise BadData(f"{path}: an empty table, there is no part-*.parquet in it; `latbench sweep` measures one")
    return found


def has_rows(path: str | Place) -> bool:
    """Return whether there is a table with rows at `path`."""
    path = parse_place(path)
    return path.is_file() or (path.is_dir() and bool(_parts_in(path)))


def _parts_in(folder: Place) -> list[Place]:
    files: list[Place] = sorted(folder.iterdir(), key=lambda file: file.name)
    if any(file.name == UNFINISHED for file in files):
        raise BadData(
            f"{folder}: unfinished, `latbench merge` still writes it or was interrupted: delete it and merge again"
        )
    return [file for file in files if file.name.endswith(".parquet") and not file.name.startswith(".")]


def read_part_batches(part: Place, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """Yield one file of a table in pieces: the number of rows before, and the piece.

    The values are not checked. Raises BadData, naming the file, as `read_table` does.
    """
    wanted = [SCHEMA.field(name) for name in (SCHEMA.names if columns is None else columns)]
    start = 0
    with _opened(part) as file:
        _check_schema(part, file)
        _check_counts(part, file.metadata)
        for batch in file.iter_batches(_batch_rows(part, file, wanted), columns=[field.name for field in wanted]):
            columns = [_cast(part, batch.column(field.name), field) for field in wanted]
            yield start, pa.table(columns, pa.schema(wanted))
            start += batch.num_rows


def _batch_rows(part: Place, file: parquet.ParquetFile, wanted: Sequence[pa.Field]) -> int:
    """Return how many rows of a file to read at once, from the average memory of a row.

    The column sample_count tells the size of the samples. The footer would tell too, but asking a damaged footer for
    its columns ends the process.
    """
    rows = int(file.metadata.num_rows)
    size = rows * sum(_TEXT_BYTES if pa.types.is_string(field.type) else 8 for field in wanted)
    if any(pa.types.is_list(field.type) for field in wanted):
        for batch in file.iter_batches(columns=["sample_count"]):
            counts = _cast(part, batch.column(0), SCHEMA.field("sample_count")).fill_null(0).to_numpy()
            size += 8 * int(counts.clip(0, _MOST_SAMPLES).sum())
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


@contextmanager
def _opened(path: Place) -> Iterator[parquet.ParquetFile]:
    """Open the Parquet file at `path` and check its content against its name. Raises BadData for any fault."""
    _LOG.info(f"reading {hide_secrets(str(path))}")
    with open_input(path) as stream:
        content = pa.BufferReader(stream.read()) if stream.size() <= _READ_WHOLE_BYTES else stream
        named = PART_NAME.fullmatch(path.name)
        if named and not hashlib.file_digest(content, "sha256").hexdigest().startswith(named[1]):
            raise BadData(
                f"{path}: damaged, truncated or edited, its content does not match the hash in its name; "
                "delete it, and a sweep measures its points again"
            )
        content.seek(0)
        try:
            with parquet.ParquetFile(content, page_checksum_verification=True) as file:
                yield file
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadData(f"{path}: not a readable Parquet file ({reason})") from error


def _check_schema(path: Place, file: parquet.ParquetFile) -> None:
    names = file.schema_arrow.names
    if "schema_version" not in names or "point_id" not in names:
        raise BadData(f"{path}: not a latbench table (its columns are {', '.join(names[:4]) or 'none'} ...)")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise BadData(f"{path}: not a latbench table, it has the column {twice[0]} twice")
    column = (batch.column(0) for batch in file.iter_batches(columns=["schema_version"]))
    for version in {version for values in column for version in pc.unique(values).to_pylist()} - {SCHEMA_VERSION}:
        raise BadData(f"{path}: table version {version}, this latbench reads {SCHEMA_VERSION}")
    if missing := [name for name in SCHEMA.names if name not in names]:
        raise BadData(f"{path}: not a whole latbench table, it has no column {', '.join(missing[:4])}")


def _check_counts(path: Place, metadata: parquet.FileMetaData) -> None:
    """Raise BadData if the footer, which has no checksum, contradicts itself on the number of rows."""
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(groups):
        raise BadData(f"{path}: damaged, its footer tells of {metadata.num_rows} rows and of {sum(groups)}")


def _cast(path: Place, column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise BadData(f"{path}: column {field.name} does not hold {field.type} ({error})") from error


def select_timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a time, one per point: the latest with status ok, else the latest noisy one.

    The interval of a noisy time says how well it is known. Throttled and incorrect rows hold no valid time.

    Parameters
    ----------
    frame
        Rows of `read_table`.

    Returns
    -------
    pandas.DataFrame
        The selected rows, in the same order.
    """
    rows = np.flatnonzero(frame["status"].isin(TIMED))
    ranked = frame[["point_id", "status", "started_at"]].iloc[rows].set_axis(rows)
    ranked = ranked.assign(settled=ranked["status"] == "ok").sort_values(["settled", "started_at"], kind="stable")
    kept = np.sort(ranked.drop_duplicates("point_id", keep="last").index)
    return frame if len(kept) == len(frame) else frame.iloc[kept]


def hash_table(path: str | Place) -> str:
    """Return the hash of the rows of a table, independent of their order and of the division into parts."""
    sums, count = np.zeros(2, np.uint64), 0
    for table in read_batches(path):
        sums += hash_rows(table).sum(axis=0, dtype=np.uint64)
        count += table.num_rows
    return hash_multiset(sums, count)
