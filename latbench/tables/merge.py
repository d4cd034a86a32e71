"""Merging of tables, in memory of one hash per row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from latbench.base.engine_version import describe_mixture
from latbench.errors import BadData, UsageError
from latbench.tables.comparability import MODES, describe_device_difference, describe_mode_difference
from latbench.tables.row_hashes import find_first_occurrences, hash_rows
from latbench.tables.schema import TIMED
from latbench.tables.storage import Place, hide_secrets, parse_place
from latbench.tables.table import list_environments, list_parts, read_batches
from latbench.tables.writer import mark_unfinished, write_environment, write_rows

# Limits of a written part in memory, whichever comes first.
PART_ROWS, PART_BYTES = 1 << 17, 256 * 2**20


@dataclass(frozen=True)
class MergeResult:
    """What a merge wrote.

    Parameters
    ----------
    parts
        The new files.
    rows
        Rows in them.
    read
        Rows in all sources.
    mixtures
        By device and engine, what the rows name in several versions, in words.
    """

    parts: list[Place]
    rows: int
    read: int
    mixtures: dict[tuple[str, str], str]


def merge_tables(sources: Sequence[str | Place], folder: str | Place, *, mixed: bool = False) -> MergeResult:
    """Write every row of several tables as a new table in `folder`, equal rows once, with their environments.

    Nothing is written before all sources were read once. The new table is unreadable until it is complete, because a
    table with missing parts would look whole.

    Parameters
    ----------
    sources
        The tables.
    folder
        The new table.
    mixed
        Allow tables of different devices or modes.

    Raises
    ------
    UsageError
        The tables are of different devices or modes.
    BadData
        A table cannot be read, or there are no rows.
    EnvironmentUnusable
        The disk refuses.
    """
    # The list of parts is read once, because a sweep may add some meanwhile.
    into, given = parse_place(folder), {parse_place(source): list_parts(source) for source in sources}
    values: dict[Place, _Values] = {source: _Values() for source in given}
    hashes = []
    for source, table in _tables(given):
        values[source].add(table)
        hashes.append(hash_rows(table))
    if not hashes:
        raise BadData(f"nothing to merge: there are no rows in {', '.join(hide_secrets(str(s)) for s in given)}")
    if not mixed:
        _check_alike(values)
    first = find_first_occurrences(np.concatenate(hashes))
    environments = [row for source in given for row in list_environments(source)]
    every = (table for _, table in _tables(given))
    with mark_unfinished(into):
        for row in environments:
            write_environment(into, row)
        written = [write_rows(into, table) for table in _pieces(_chosen(every, first))]
    return MergeResult(written, int(first.sum()), len(first), _describe_mixtures(values.values()))


class _Values(defaultdict[str, set[Hashable]]):
    """The devices and modes of a table, by column; `versions` of engines by device and engine."""

    def __init__(self) -> None:
        super().__init__(set)
        self.versions: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def add(self, table: pa.Table) -> None:
        for name in ("device", *MODES):
            self[name].update(pc.unique(table[name].drop_null()).to_pylist())
        timed = table.filter(pc.is_in(table["status"], pa.array(TIMED)))
        named = timed.select(["device", "backend", "backend_version"]).drop_null()
        for row in named.group_by(named.column_names).aggregate([]).to_pylist():
            self.versions[row["device"], row["backend"]].add(row["backend_version"])


def _describe_mixtures(values: Iterable[_Values]) -> dict[tuple[str, str], str]:
    together: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for own in values:
        for key, versions in own.versions.items():
            together[key] |= versions
    mixtures = {key: describe_mixture(versions) for key, versions in sorted(together.items())}
    return {key: mixture for key, mixture in mixtures.items() if mixture}


def _check_alike(values: dict[Place, _Values]) -> None:
    for unlike in (describe_device_difference(values), describe_mode_difference(values)):
        if unlike is not None:
            raise UsageError(f"the tables do not belong together: {unlike}; --allow-mixed merges them nevertheless")


def _tables(parts: Mapping[Place, Sequence[Place]]) -> Iterator[tuple[Place, pa.Table]]:
    """Yield the rows of each source in pieces."""
    return ((source, table) for source, own in parts.items() for part in own for table in read_batches(part))


def _chosen(pieces: Iterable[pa.Table], chosen: NDArray[np.bool_]) -> Iterator[pa.Table]:
    """Yield the rows for which `chosen` (rows of all pieces,) is true."""
    start = 0
    for table in pieces:
        yield table.filter(pa.array(chosen[start : start + table.num_rows]))
        start += table.num_rows


def _pieces(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in pieces of at most PART_ROWS rows and PART_BYTES bytes."""
    waiting: list[pa.Table] = []
    for piece in pieces:
        for small in _small(piece):
            together = [*waiting, small]
            rows, size = sum(table.num_rows for table in together), sum(table.nbytes for table in together)
            if waiting and (rows > PART_ROWS or size > PART_BYTES):
                yield pa.concat_tables(waiting)
                together = [small]
            waiting = together
    if waiting:
        yield pa.concat_tables(waiting)


def _small(piece: pa.Table) -> Iterator[pa.Table]:
    """Yield slices of a piece, several of which make a part."""
    rows = max(1, min(PART_ROWS // 8, PART_BYTES * piece.num_rows // (8 * max(piece.nbytes, 1))))
    return (piece.slice(start, rows) for start in range(0, piece.num_rows, rows))
