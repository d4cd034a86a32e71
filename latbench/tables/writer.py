"""Writing of tables: parts, whose names are the hashes of their content, and descriptions of environments.

Files are only ever added, each whole, so several writers need no lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from latbench.base.environments import format_environment, format_file_name
from latbench.tables.layer_columns import derive_pattern_columns
from latbench.tables.point_ids import hash_key
from latbench.tables.schema import SCHEMA, SCHEMA_VERSION, STATUSES, TIMED
from latbench.tables.storage import UNFINISHED, Place, parse_place, read_bytes, remove_file, write_bytes
from latbench.tables.time_summary import summarise_samples

if TYPE_CHECKING:
    import pandas as pd


def write_part(folder: str | Place, rows: Iterable[Mapping[str, Any]]) -> Place:
    """Write rows as a new part of the table in `folder`; a part is never changed afterwards.

    schema_version, point_id, pattern columns and time columns are filled in. Missing columns are null.

    Parameters
    ----------
    folder
        The table.
    rows
        At least one row. Each gives its key, how it was measured, its status and, if that is ok, samples_seconds.

    Returns
    -------
    Place
        The new file.

    Raises
    ------
    ValueError
        A column is unknown or has the wrong type, a status is unknown, or an ok row has no samples.
    EnvironmentUnusable
        The disk refuses.
    """
    complete = [_complete_row(row) for row in rows]
    if not complete:
        raise ValueError("a part needs at least one row")
    try:
        table = pa.Table.from_pylist(complete, schema=SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"a row does not fit the table: {error}") from error
    return write_rows(parse_place(folder), table)


def _complete_row(row: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(row) - set(SCHEMA.names)
    if unknown:
        raise ValueError(f"a table has no column {', '.join(sorted(unknown))}")
    if row.get("status") not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {row.get('status')!r}")
    filled = {"started_at": datetime.now(UTC), **derive_pattern_columns(row["pattern"]), **row}
    filled |= {"schema_version": SCHEMA_VERSION, "point_id": hash_key(row)}
    if row.get("samples_seconds") is not None:
        filled |= summarise_samples(row["samples_seconds"], row.get("burst_error"))
    elif row["status"] in TIMED:
        raise ValueError(f"a row with status {row['status']} needs samples_seconds")
    return filled | _derive_ratios(filled)


def _derive_ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns that compare a time with the roofline and with the reference."""
    columns = {}
    median, roofline, meanwhile, usual = (
        row.get(name)
        for name in ("median_seconds", "roofline_seconds", "reference_seconds", "reference_usual_seconds")
    )
    if roofline is not None and median is not None:
        columns["utilisation"] = roofline / median
    if meanwhile is not None and usual is not None:
        columns["reference_ratio"] = meanwhile / usual
        if median is not None:
            columns["corrected_seconds"] = median / columns["reference_ratio"]
    return columns


def find_newest_starts(frame: pd.DataFrame, points: Collection[str]) -> dict[str, datetime]:
    """Return the start of the newest row of each of `points` in `frame`."""
    started = frame["started_at"][frame["point_id"].isin(points)].groupby(frame["point_id"]).max().dropna()
    return {str(point): moment.to_pydatetime() for point, moment in started.items()}


def date_after(earlier: Mapping[str, datetime], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `rows`, each started after the earlier row of its point.

    The latest row of a point is the valid one. Where a clock was set back, or clocks of two machines differ, a new
    row would not be the latest: its started_at is moved, and its flags say clock_set_back.
    """
    found = []
    for row in rows:
        started, before = row.get("started_at") or datetime.now(UTC), earlier.get(hash_key(row))
        flags = row.get("flags")
        if before is not None and started <= before:
            started = before + timedelta(microseconds=1)
            flags = "+".join(filter(None, (flags, "clock_set_back")))
        found.append({**row, "started_at": started, "flags": flags})
    return found


def write_rows(folder: Place, table: pa.Table) -> Place:
    """Write `table`, which has the columns of SCHEMA, as a new part in `folder` and return its place."""
    content = format_parquet(table)
    path = folder / f"part-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    write_bytes(path, content)
    return path


def write_environment(folder: str | Place, environment: Mapping[str, Any]) -> None:
    """Describe `environment` (texts and numbers by name, with `env_id`) beside the table in `folder`.

    An existing description stays, unless it is damaged. Raises EnvironmentUnusable where the disk refuses.
    """
    path = parse_place(folder) / format_file_name(environment["env_id"])
    content = format_environment(environment)
    if not path.is_file() or read_bytes(path) != content:
        write_bytes(path, content)


@contextmanager
def mark_unfinished(folder: Place) -> Iterator[None]:
    """Make readers refuse the table in `folder` until the context ends without an exception."""
    mark = folder / UNFINISHED
    write_bytes(mark, b"latbench is writing this table, or was interrupted while it did.\n")
    yield
    remove_file(mark)


def format_parquet(table: pa.Table) -> pa.Buffer:
    """Return `table` as the content of a compressed Parquet file; every page has a checksum."""
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()
