"""Checks of a table: everything that the files alone can tell, row by row and between rows.

A finding belongs to a file and has a severity: `corrupt` for contradictions, `suspect` for unlikely content, `note`
for useful facts. Files are read in pieces and columns are checked as a whole. So a table of millions of rows takes
minutes at most, and each row keeps only 32 bytes in memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from latbench.base.environments import find_fault, format_file_name
from latbench.errors import BadData
from latbench.tables.layer_columns import derive_pattern_columns
from latbench.tables.plausibility import MOST_UTILISATION, explain_too_fast
from latbench.tables.point_ids import hash_keys
from latbench.tables.row_hashes import hash_rows
from latbench.tables.schema import (
    COLUMNS,
    EVERY_ROW,
    FAILED,
    OWN_CONVOLUTIONS,
    OWN_LAYERS,
    OWN_TIMES,
    PROVENANCE,
    STATUSES,
    TIMED,
    TableColumn,
    list_needed_columns,
)
from latbench.tables.storage import PART_NAME, Place, RemotePlace, parse_place
from latbench.tables.table import (
    find_untimed,
    list_environment_files,
    list_parts,
    read_environment,
    read_part_batches,
)
from latbench.tables.time_summary import summarise_sample_rows, summarise_samples

# No device of this decade is faster. A time that implies more has the wrong unit or is invented.
MOST_FLOP_PER_SECOND = 1e16
LONGEST_SECONDS = 3600.0
MOST_OF_A_FILE = 1000  # findings of one severity that are listed
_CLOSE = 1e-9  # relative tolerance: medians are computed from the stored samples by one function
_FAR_FROM_TARGET = 0.1  # whole blocks or vectors can miss the target on a small layer by up to this

_FIRST_YEAR = 2010  # no kernel for sparse networks is older
_CLOCKS_DIFFER = timedelta(days=1)
_SUMMARY = [name for name in summarise_samples([1.0]) if name != "sample_count"]
# The identity of a measurement: one run does not measure a point twice at the same moment.
_MEASUREMENT = ("point_id", "run_id", "started_at")

Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """A fault of a file of a table, or a note on it."""

    path: Place
    severity: str
    text: str


def validate_table(path: str | Place) -> Iterator[Finding]:
    """Yield every finding in the table at `path`, file by file. Raises BadData if there is no table."""
    path = parse_place(path)
    parts = list_parts(path)
    described: set[str] = set()
    processors: dict[str, int] = {}
    for file in list_environment_files(path):
        described.add(file.name)
        yield from _environment_findings(file, processors)
    measured = _Measured(parts)
    for number, part in enumerate(parts):
        if not PART_NAME.fullmatch(part.name):
            text = "not named part-<hash>.parquet: edits with valid Parquet checksums cannot be detected"
            yield Finding(part, "note", text)
        unknown: set[str] = set()
        rows, found, off_record = 0, Counter[str](), Counter[str]()
        try:
            for start, table in read_part_batches(part):
                rows += table.num_rows
                for severity, row, text in sorted(_row_findings(table, processors), key=lambda found: found[1]):
                    found[severity] += 1
                    if found[severity] <= MOST_OF_A_FILE:
                        point = table["point_id"][row]
                        yield Finding(part, severity, f"row {start + row + 1} (point {point}): {text}")
                off_record.update(_off_record(table))
                measured.add(number, start, table)
                named = pc.unique(table["env_id"].drop_null()).to_pylist()
                unknown |= {env_id for env_id in named if format_file_name(env_id) not in described}
        except BadData as error:
            yield Finding(part, "corrupt", str(error).removeprefix(f"{part}: "))
        else:
            if not rows:
                yield Finding(part, "corrupt", "it holds no rows; latbench never writes such a part")
        for severity, count in found.items():
            if count > MOST_OF_A_FILE:
                yield Finding(part, severity, f"{count - MOST_OF_A_FILE} more findings of this kind are not listed")
        for name, count in off_record.items():
            yield Finding(part, "note", f"{count} times have no {name}: their origin is not recorded")
        for env_id in sorted(unknown):
            text = f"environment {env_id} is not described: there is no {format_file_name(env_id)}"
            yield Finding(part, "suspect", text)
    yield from measured.findings(path)
    for leftover in sorted(path.glob(".*.tmp")) if path.is_dir() and not isinstance(path, RemotePlace) else []:
        yield Finding(leftover, "note", "left behind by a killed writer; it is not part of the table")


def _environment_findings(file: Place, processors: dict[str, int]) -> Iterator[Finding]:
    """Yield the fault of an environment's file; add its number of processors, if known, to {env_id: processors}."""
    try:
        environment = read_environment(file)
        fault = find_fault(environment)
    except BadData as error:
        fault = str(error).removeprefix(f"{file}: ")
    else:
        if isinstance(most := environment.get("processors"), int):
            processors[environment["env_id"]] = most
    if fault is not None:
        yield Finding(file, "corrupt", fault)


class _Measured:
    """The rows read so far, in 32 bytes each: the point, the measurement, the whole row, and its place."""

    def __init__(self, parts: list[Place]) -> None:
        self.parts = parts
        self._points: list[Hashes] = []
        self._measurements: list[Hashes] = []
        self._contents: list[Hashes] = []
        self._at: list[Hashes] = []
        self._blocks: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, number: int, start: int, table: pa.Table) -> None:
        """Add the rows of part `number` from row `start` on."""
        for seen, columns in (
            (self._points, ["point_id"]), (self._measurements, _MEASUREMENT), (self._contents, table.column_names),
        ):  # fmt: skip
            seen.append(hash_rows(table.select(list(columns)))[:, 0].copy())
        self._at.append(np.arange(start, start + table.num_rows, dtype=np.uint64) + np.uint64(number << 40))
        known = table.select(["run_id", "block"]).drop_null()
        for pair in known.group_by(["run_id", "block"]).aggregate([]).to_pylist():
            self._blocks[pair["run_id"]].add(pair["block"])

    def findings(self, path: Place) -> Iterator[Finding]:
        """Yield contradictions between rows of one measurement, and the number of repeated rows."""
        if not self._at:
            return
        measurements = np.concatenate(self._measurements)
        order = np.argsort(measurements, kind="stable")
        again = _again(measurements[order])
        contents, at = np.concatenate(self._contents), np.concatenate(self._at)
        conflicts = again[contents[order[again + 1]] != contents[order[again]]]
        for index in conflicts:
            (first, row), (part, other) = (self._where(int(at[order[i]])) for i in (index, index + 1))
            text = f"row {other}: the same measurement as in row {row} of {first.name}, with other values"
            yield Finding(part, "corrupt", text)
        if copies := len(again) - len(conflicts):
            yield Finding(path, "note", f"{copies} rows are there more than once; `latbench merge` keeps one of each")
        del measurements, order, contents, at
        repeats = _again(np.sort(np.concatenate(self._points)))
        if repeated := len(repeats) - int((np.diff(repeats) == 1).sum()):
            yield Finding(path, "note", f"{repeated} points have more than one row: readers take the latest")

        for run, blocks in sorted(self._blocks.items()):
            # A run numbers its blocks in the order of their parts. Damaged parts may have been deleted, as advised.
            if missing := max(blocks) + 1 - len({block for block in blocks if block >= 0}):
                text = (
                    f"run {run} has rows of {len(blocks)} blocks, and {missing} more were written: parts are missing"
                )
                yield Finding(path, "note", text)

    def _where(self, place: int) -> tuple[Place, int]:
        return self.parts[place >> 40], (place & ((1 << 40) - 1)) + 1


def _again(ordered: Hashes) -> NDArray[np.int64]:
    """Return the positions whose next value in this rising array is equal."""
    return np.flatnonzero(ordered[1:] == ordered[:-1])


# Rows: each check yields (severity, row, text) of the rows that fail it ---------------------------------------------

_Found = Iterator[tuple[str, int, str]]


def _row_findings(table: pa.Table, processors: Mapping[str, int]) -> _Found:
    checks = (
        _identity, _words, _ranges, _structure, _shape, _sparsity, _times, _samples, _comparisons, _physics, _moments,
    )  # fmt: skip
    for check in checks:
        yield from check(table)
    yield from _threads(table, processors)


def _threads(table: pa.Table, processors: Mapping[str, int]) -> _Found:
    """Yield rows with more threads than the process of their environment could use at the same time."""
    environments = table["env_id"].combine_chunks().dictionary_encode()
    known = np.array([*(processors.get(name, math.inf) for name in environments.dictionary.to_pylist()), math.inf])
    most = known[environments.indices.fill_null(-1).to_numpy()]
    threads = _reals(table, "threads")
    yield from _each(
        "corrupt", threads > most,
        lambda row: f"threads is {threads[row]:g}, and this process could use {most[row]:g} processors",
    )  # fmt: skip


def _identity(table: pa.Table) -> _Found:
    # Published times may name a layer without its operation.
    imported = pc.and_(pc.equal(table["purpose"], "import"), pc.not_equal(table["model"], ""))
    without_op = imported.fill_null(False).to_numpy()
    for name in list_needed_columns(EVERY_ROW):
        missing = table[name].is_null().to_numpy()
        yield from _each("corrupt", missing & ~without_op if name == "op" else missing, _always(f"{name} is null"))
    ids = hash_keys(table)
    wrong = pc.not_equal(table["point_id"], pa.chunked_array([ids])).fill_null(False).to_numpy()
    yield from _each("corrupt", wrong, lambda row: f"its key hashes to {ids[row]}")
    status = table["status"]
    unknown = ~pc.is_in(status, pa.array(STATUSES)).to_numpy() & status.is_valid().to_numpy()
    yield from _each("corrupt", unknown, lambda row: f"unknown status {status[row].as_py()!r}")
    failed = pc.is_in(status, pa.array(FAILED)).to_numpy()
    with_time = failed & table["median_seconds"].is_valid().to_numpy()
    yield from _each(
        "corrupt", with_time, lambda row: f"status {status[row].as_py()} with a time: such a row has none"
    )


def _off_record(table: pa.Table) -> Counter[str]:
    """Return how many of our own times lack each column of provenance."""
    ours = _timed_here(table)
    missing = {name: int((ours & table[name].is_null().to_numpy()).sum()) for name in list_needed_columns(PROVENANCE)}
    return Counter({name: count for name, count in missing.items() if count})


def _timed_here(table: pa.Table) -> Bools:
    timed: Bools = pc.is_in(table["status"], pa.array(TIMED)).to_numpy()
    return timed & ~_imported(table)


def _words(table: pa.Table) -> _Found:
    for column in COLUMNS.values():
        if column.allowed:
            values = table[column.name]
            strange = ~pc.is_in(values, pa.array(column.allowed)).to_numpy() & values.is_valid().to_numpy()
            said = f"latbench writes {', '.join(column.allowed)}"
            yield from _each("suspect", strange, _unlike(column.name, values, said))


def _ranges(table: pa.Table) -> _Found:
    for column in COLUMNS.values():
        if column.limits and column.name not in _SUMMARY:
            values = _reals(table, column.name)
            yield from _each("corrupt", _outside(column, values), _out_of_range(column, values))


def _outside(column: TableColumn, values: Reals) -> Bools:
    """Return (rows,) whether a value is infinite or outside the limits of its column; NaN is inside."""
    outside: Bools = np.isinf(values)
    if column.minimum is not None:
        outside |= values < column.minimum
    if column.above is not None:
        outside |= values <= column.above
    if column.maximum is not None:
        outside |= values > column.maximum
    return outside


def _out_of_range(column: TableColumn, values: Reals) -> Callable[[int], str]:
    return _valued(column.name, values, f": it must be {column.limits}")


def _structure(table: pa.Table) -> _Found:
    """Yield rows whose pattern columns contradict the pattern; rows of whole models are skipped."""
    patterns = table["pattern"].combine_chunks().dictionary_encode()
    layer = pc.not_equal(table["op"], "model").fill_null(True).to_numpy()
    index = patterns.indices.fill_null(-1).to_numpy()
    for level, pattern in enumerate(patterns.dictionary.to_pylist()):
        rows = index == level
        try:
            expected = derive_pattern_columns(pattern)
        except ValueError as error:
            yield from _each("corrupt", rows, _always(str(error)))
            continue
        if expected["format"] is None:
            yield from _each("corrupt", rows & layer, _always(f"{pattern} is the pattern of no layer"))
        for name, value in expected.items():
            column = table[name]
            same = column.is_null() if value is None else pc.equal(column, value).fill_null(False)
            yield from _each(
                "corrupt", rows & layer & ~same.to_numpy(), _unlike(name, column, f"pattern {pattern} says {value}")
            )


def _unlike(name: str, column: pa.ChunkedArray, other: str) -> Callable[[int], str]:
    return lambda row: f"{name} is {column[row]}, and {other}"


def _shape(table: pa.Table) -> _Found:
    conv = pc.equal(table["op"], "conv2d").fill_null(False).to_numpy()
    linear = pc.equal(table["op"], "linear").fill_null(False).to_numpy()
    ours = _timed_here(table)
    for rows, needed in (
        (ours & (linear | conv), OWN_LAYERS), (ours & conv, OWN_CONVOLUTIONS), (ours, OWN_TIMES),
    ):  # fmt: skip
        for name in list_needed_columns(needed):
            yield from _each("corrupt", rows & table[name].is_null().to_numpy(), _always(f"{name} is null"))
    k, kh, kw, c_in = (_reals(table, name) for name in ("k", "kh", "kw", "c_in"))
    wrong = conv & (k != kh * kw * c_in) & ~np.isnan(c_in)
    yield from _each(
        "corrupt",
        wrong,
        lambda row: f"k is {k[row]:g}, but the convolution has {kh[row]:g}x{kw[row]:g}x{c_in[row]:g}",
    )


def _sparsity(table: pa.Table) -> _Found:
    target, actual, nnz = (_reals(table, name) for name in ("sparsity_target", "sparsity_actual", "nnz"))
    layer = pc.not_equal(table["op"], "model").fill_null(True).to_numpy()
    yield from _each(
        "corrupt", layer & table["sparsity_target"].is_null().to_numpy(), _always("sparsity_target is null")
    )
    weights = _reals(table, "m") * _reals(table, "k")
    with np.errstate(divide="ignore", invalid="ignore"):
        wrong = (nnz < 0) | (nnz > weights) | (np.abs(1 - nnz / weights - actual) > _CLOSE)
    yield from _each(
        "corrupt", wrong,
        lambda row: f"nnz {nnz[row]:.0f} of {weights[row]:.0f} weights contradicts a sparsity of {actual[row]:g}",
    )  # fmt: skip
    far = ~wrong & ~np.isnan(nnz) & (np.abs(actual - target) > _FAR_FROM_TARGET)
    yield from _each("suspect", far, lambda row: f"sparsity {actual[row]:g} where {target[row]:g} was requested")


def _times(table: pa.Table) -> _Found:
    for name in _SUMMARY:
        seconds = _reals(table, name, null=1.0)  # so that NaN is wrong, and null is not
        wrong = _outside(COLUMNS[name], seconds) | np.isnan(seconds)
        yield from _each("corrupt", wrong, _out_of_range(COLUMNS[name], seconds))
    absent = find_untimed(table) & table["median_seconds"].is_null().to_numpy()
    yield from _each("corrupt", absent, lambda row: f"status {table['status'][row]} and no time")


def _samples(table: pa.Table) -> _Found:
    lists = table["samples_seconds"].combine_chunks()
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    bad = np.zeros(len(lengths), bool)
    bad[np.repeat(np.arange(len(lengths)), lengths)[~((flat > 0) & (flat < math.inf))]] = True
    yield from _each(
        "corrupt", bad, lambda row: f"samples must be positive finite seconds, not {_few(lists[row].as_py())}"
    )
    counts = _reals(table, "sample_count", null=0.0)
    yield from _each(
        "corrupt", counts != lengths, lambda row: f"sample_count is {counts[row]:g}, and it has {lengths[row]}"
    )
    columns = {name: _reals(table, name) for name in _SUMMARY}
    burst_errors = _reals(table, "burst_error").copy()
    burst_errors[burst_errors < 0] = math.nan
    for length in np.unique(lengths[(lengths > 0) & ~bad]):
        rows = np.flatnonzero((lengths == length) & ~bad)
        summary = summarise_sample_rows(flat[starts[rows, None] + np.arange(length)], burst_errors[rows])
        for name, expected in summary.items():
            found = columns[name][rows]
            # Relative to the median, because the spread of equal samples is rounding only.
            close = np.abs(found - expected) <= _CLOSE * summary["median_seconds"]
            for index in np.flatnonzero(~close & ~(np.isnan(found) & np.isnan(expected))):
                said = "none" if np.isnan(expected[index]) else f"{float(expected[index])!r}"
                yield "corrupt", int(rows[index]), f"{name} is {float(found[index])!r}, and its samples give {said}"
    bare = (lengths == 0) & ~np.isnan(columns["median_seconds"])
    yield from _each("suspect", bare & ~_imported(table), lambda _: "a time without the samples it comes from")


def _comparisons(table: pa.Table) -> _Found:
    """Yield rows whose derived columns contradict the columns that they follow from."""
    median, roofline, meanwhile, usual = (
        _reals(table, name)
        for name in ("median_seconds", "roofline_seconds", "reference_seconds", "reference_usual_seconds")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = meanwhile / usual
        derived = {"utilisation": roofline / median, "reference_ratio": ratio, "corrected_seconds": median / ratio}
    for name, expected in derived.items():
        found = _reals(table, name)
        missing = np.isnan(expected)
        wrong = ~(np.abs(found - expected) <= _CLOSE * np.abs(expected)) & ~missing
        yield from _each("corrupt", wrong, _valued(name, found, ", but the columns beside it give another value"))
        bare = missing & ~np.isnan(found)
        yield from _each("corrupt", bare, _valued(name, found, ", and the columns that it follows from are missing"))
    timed = pc.is_in(table["status"], pa.array(TIMED)).to_numpy()
    fast = timed & (median > 0) & (median * MOST_UTILISATION < roofline)
    yield from _each(
        "corrupt",
        fast,
        lambda row: f"status {table['status'][row]}, but {explain_too_fast(median[row], roofline[row])}",
    )


def _physics(table: pa.Table) -> _Found:
    median = _reals(table, "median_seconds")
    long = median > LONGEST_SECONDS
    yield from _each(
        "suspect", long & ~np.isinf(median), lambda row: f"a call of {median[row]:g} s: times are in seconds"
    )
    m, k, n, sparsity, nnz = (_reals(table, name) for name in ("m", "k", "n", "sparsity_target", "nnz"))
    dense, kept = (_reals(table, name) for name in ("flop_dense", "flop_nnz"))
    layer = pc.not_equal(table["op"], "model").fill_null(False).to_numpy()
    for name, found, weights in (("flop_dense", dense, m * k), ("flop_nnz", kept, nnz)):
        wrong = layer & (np.abs(found - 2 * weights * n) > _CLOSE * found)
        yield from _each("corrupt", wrong, _valued(name, found, ": it must be two for each weight and position"))
    work = np.where(np.isnan(kept), 2 * m * k * n * (1 - sparsity), kept)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(median > 0, work / median, 0.0)
    yield from _each(
        "suspect", rate > MOST_FLOP_PER_SECOND,
        lambda row: f"{rate[row]:.2g} operations a second is beyond any device: times are in seconds",
    )  # fmt: skip


def _moments(table: pa.Table) -> _Found:
    moments = table["started_at"]
    earliest, latest = datetime(_FIRST_YEAR, 1, 1, tzinfo=UTC), datetime.now(UTC) + _CLOCKS_DIFFER
    odd = pc.or_(pc.less(moments, earliest), pc.greater(moments, latest)).fill_null(False).to_numpy()
    yield from _each("suspect", odd, lambda row: f"started_at is {moments[row]}: a clock was wrong")


def _imported(table: pa.Table) -> Bools:
    found: Bools = pc.equal(table["purpose"], "import").fill_null(False).to_numpy()
    return found


def _each(severity: str, failing: Bools, text: Callable[[int], str]) -> _Found:
    return ((severity, int(row), text(int(row))) for row in np.flatnonzero(failing))


def _always(text: str) -> Callable[[int], str]:
    return lambda _: text


def _valued(name: str, values: Reals, remark: str = "") -> Callable[[int], str]:
    return lambda row: f"{name} is {values[row]:g}{remark}"


def _reals(table: pa.Table, name: str, null: float = math.nan) -> Reals:
    """Return a column as float64 (rows,)."""
    values: Reals = table[name].cast(pa.float64(), safe=False).fill_null(null).to_numpy()  # whole numbers rounded
    return values


def _few(samples: list[float | None]) -> str:
    return f"{samples[:5]}{' ...' if len(samples) > 5 else ''}"
