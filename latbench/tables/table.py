"""The table, version 3: one row per measured point, the same columns whether it was swept, verified or imported.

A table is a flat folder of `part-<id>.parquet` files with `env-<env_id>.json` beside them, or a single Parquet file;
on this machine or wherever `latbench.tables.storage` reaches. Files are only ever added, each whole and under a name
that its content gives, so several writers need no lock. Units are in the column names, the identity of a point is in
columns, raw samples are kept. Times are in seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from latbench.base import environments
from latbench.base.median_interval import median_interval
from latbench.errors import BadData
from latbench.tables import row_hashes as digests
from latbench.tables import storage as places
from latbench.tables.storage import Place
from sparse_kernels import patterns

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 3

_text, _whole, _real = pa.string(), pa.int64(), pa.float64()

# What was measured: the key. Rows with equal keys are the same point, and `point_id` is the hash of these columns.
KEY = [
    pa.field("purpose", _text),  # sweep, verify, baseline, import
    pa.field("device", _text),  # lower-case with hyphens: amd-epyc-..., nvidia-h200
    pa.field("backend", _text),  # numba, torch, onnxruntime, ...
    pa.field("op", _text),  # linear, conv2d, model
    pa.field("model", _text),  # the task of a whole-model row, else ""
    pa.field("m", _whole),  # output features
    pa.field("k", _whole),  # input features
    pa.field("n", _whole),  # tokens; of a convolution output positions x batch
    *(pa.field(name, _whole) for name in (
        "batch", "c_in", "h", "w", "c_out", "kh", "kw",
        "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w",
    )),  # null where op is linear
    pa.field("pattern", _text),  # dense, unstructured, nm:2:4, block:32x32, vector:32, shflbw:32, profile
    pa.field("sparsity_target", _real),
    pa.field("pattern_seed", _whole),
    pa.field("dtype_w", _text),
    pa.field("dtype_a", _text),
    pa.field("dtype_out", _text),
    pa.field("layout", _text),  # feature_major, token_major, blocked, nchw
    pa.field("epilogue", _text),  # none, bias, bias+relu, bias+gelu
    pa.field("kernel_requested", _text),
    pa.field("context", _text),  # isolated, network
    pa.field("cache_mode", _text),  # rotated (weights of several copies in turn), warm, cold
    pa.field("launch_mode", _text),  # call, graph
    pa.field("threads", _whole),
]  # fmt: skip

IDENTITY = [
    pa.field("schema_version", _whole),
    pa.field("point_id", _text),
    pa.field("run_id", _text),
    pa.field("env_id", _text),
    pa.field("block", _whole),  # points of one block are interleaved
    pa.field("seq", _whole),
    pa.field("started_at", pa.timestamp("us", tz="UTC")),
    pa.field("backend_version", _text),
    pa.field("device_uuid_hash", _text),
]

# Follows from the pattern and the mask that was timed; repeated in columns so that readers can filter.
STRUCTURE = [
    pa.field("format", _text),  # dense, unstructured, nm, block, vector, shflbw
    *(pa.field(name, _whole) for name in ("block_h", "block_w", "v", "nm_n", "nm_m")),
    pa.field("kernel_used", _text),
    pa.field("sparsity_actual", _real),
    pa.field("nnz", _whole),
]

TIME = [
    pa.field("timer", _text),
    pa.field("l2_flush_bytes", _whole),
    pa.field("weight_copies", _whole),  # that took turns; flag in_cache or in_l2 where they may all have stayed there
    pa.field("pinning", _text),
    pa.field("samples_seconds", pa.list_(pa.field("element", _real))),  # each one call, means of inner_loops
    *(pa.field(f"{name}_seconds", _real) for name in (
        "median", "min", "mean", "q25", "q75", "p95", "std", "low", "high",
    )),  # low and high: 95% interval of the median
    pa.field("burst_error", _real),  # half that interval over the median, as bursts disagree; null: not known
    pa.field("sample_count", _whole),
    pa.field("inner_loops", _whole),
    pa.field("discarded_samples", _whole),  # taken while the device was disturbed, and left out
    pa.field("corrected_seconds", _real),  # median_seconds / reference_ratio: what it may take when all is as usual
]  # fmt: skip

PHYSICS = [
    pa.field("flop_dense", _whole),
    pa.field("flop_nnz", _whole),
    pa.field("bytes_min", _whole),
    pa.field("roofline_seconds", _real),
    pa.field("utilisation", _real),
]

TELEMETRY = [
    pa.field("clock_hertz", _real),
    pa.field("power_watts", _real),
    pa.field("temperature_celsius", _real),
    pa.field("event_reasons", _text),
    pa.field("load", _real),
    pa.field("steal_fraction", _real),
    pa.field("drift_ratio", _real),  # the later half of the samples over the earlier
    pa.field("reference_seconds", _real),  # a fixed piece of work, as far as it shows what bounds this one, meanwhile
    pa.field("reference_usual_seconds", _real),  # what it takes on this machine when all is quiet
    pa.field("reference_ratio", _real),  # of these two
]

QUALITY = [
    pa.field("stop_reason", _text),  # relative_error, plateau, budget
    pa.field("status", _text),  # one of STATUSES
    pa.field("max_rel_err", _real),
    # Joined by plus signs; preempted: other processes took the cores, or heat slowed a GPU down, in most bursts;
    # clock_set_back: started_at is not what the clock said, but after the row that this one replaces;
    # in_cache, in_l2: even the most copies of so small a layer may have stayed in a CPU's caches, in a GPU's L2.
    pa.field("flags", _text),
    pa.field("error", _text),
]

LEAST_SIZES = {"m": 1, "k": 1, "n": 0}
"""The least numbers of output features, input features and tokens that a layer can have."""

SCHEMA = pa.schema([*IDENTITY, *KEY, *STRUCTURE, *TIME, *PHYSICS, *TELEMETRY, *QUALITY])

TIMED = ("ok", "noisy")
# impossible: faster than the device can be, or no time at all. spike: far above its neighbours in sparsity, until it
# has been measured a second time.
STATUSES = (
    *TIMED, "throttled", "impossible", "spike", "unsupported", "oom", "incorrect", "timeout", "error",
)  # fmt: skip

# A rerun measures a point again unless it has a row with one of these: the causes of errors may be gone.
# Noise may be gone, too, but a noisy row was given all its chances: it is measured again only if that is asked for.
FINISHED = ("ok", "unsupported", "incorrect")

DISTURBED = ("noisy", "throttled", "spike")  # the statuses that are measured again: a later try is often a quiet one

# The name of a part tells its content, so that damage of any kind shows when it is read.
PART_NAME = re.compile(r"part-([0-9a-f]{16})\.parquet")

UNFINISHED = "unfinished.txt"  # lies beside the parts of a table while there are more to come

# Of a piece that is read: rows, and bytes in memory, because a row may have a hundred thousand samples.
BATCH_ROWS, BATCH_BYTES = 1 << 15, 64 * 2**20
_MOST_SAMPLES = 10_000_000  # of a row; a number beyond is damage
_TEXT_BYTES = 24  # of a text in memory, with its offset; typical of the columns here
_READ_WHOLE_BYTES = 64 * 2**20  # a larger file is read twice: once for its hash, once for its rows


# Identity ---------------------------------------------------------------------------------------------------------


def point_id(row: Mapping[str, Any]) -> str:
    """The hash of the key columns of `row`: 16 hexadecimal digits, the same for a dict and for a row of a frame.

    A missing value, None and NaN are the same; 3 and 3.0 are the same; reals count to nine digits.
    """
    key = [_canonical(field.type, row.get(field.name)) for field in KEY]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _canonical(kind: pa.DataType, value: Any) -> str | int | None:
    value = plain(kind, value)
    return f"{value + 0.0:.9g}" if isinstance(value, float) else value


def plain(kind: pa.DataType, value: Any) -> str | int | float | None:
    """A value of a text, whole or real column as Python has it, whatever a frame made of it: NaN is None, 3.0 3."""
    if value is None or value != value:
        return None
    if kind == _whole:
        return int(value)
    return float(value) if kind == _real else str(value)


def point_ids(table: pa.Table) -> list[str]:
    """The hash of the key columns of every row of `table`, as `point_id` gives it."""
    texts = [_json_texts(table[field.name].combine_chunks(), field.type) for field in KEY]
    keys = pc.binary_join_element_wise(*texts, ", ")
    return [hashlib.sha256(f"[{key}]".encode()).hexdigest()[:16] for key in keys.to_pylist()]


def _json_texts(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Each value of a key column as JSON; keys repeat few values, so each is written once."""
    encoded = column.dictionary_encode()
    values = [json.dumps(_canonical(kind, value)) for value in encoded.dictionary.to_pylist()]
    return pa.array([*values, "null"]).take(encoded.indices.fill_null(len(values)))


def structure(pattern: str) -> dict[str, Any]:
    """The structure columns that follow from a pattern's spec alone: format, block_h, block_w, v, nm_n, nm_m.

    All are null for `profile`, the pattern of a model whose layers have one each.
    """
    empty: dict[str, Any] = dict.fromkeys(("format", "block_h", "block_w", "v", "nm_n", "nm_m"))
    if pattern == "profile":
        return empty
    parsed = patterns.parse(pattern)
    match parsed:
        case patterns.BlockWise():
            sizes = {"block_h": parsed.rows, "block_w": parsed.cols}
        case patterns.VectorNM():
            sizes = {"v": parsed.v, "nm_n": parsed.keep, "nm_m": parsed.of}
        case patterns.VectorWise() | patterns.ShflBW():
            sizes = {"v": parsed.v}
        case patterns.NM():
            sizes = {"nm_n": parsed.keep, "nm_m": parsed.of}
        case _:
            sizes = {}
    return empty | {"format": parsed.format} | sizes


# Time -------------------------------------------------------------------------------------------------------------


def summarise(samples: Sequence[float], burst_error: float | None = None) -> dict[str, Any]:
    """The time columns of `samples` (seconds a call): the only place where a median is computed.

    low_seconds and high_seconds bound the median with 95% confidence by order statistics (Conover, Practical
    Nonparametric Statistics, section 3.2), without an assumption on the distribution; they are None with fewer than
    six samples, which cannot bound it. That takes every sample for independent: where the bursts they come from
    disagree by more, `burst_error`, the interval reaches as far to either side, by that factor.
    Raises ValueError for no samples or one that is not a positive finite number.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    if ordered.size == 0 or not (np.isfinite(ordered).all() and ordered[0] > 0):
        raise ValueError(f"samples must be positive finite seconds, at least one, not {list(samples)[:5]}")
    low, high = median_interval(ordered)
    q25, median, q75, p95 = np.quantile(ordered, [0.25, 0.5, 0.75, 0.95])
    if low is not None and high is not None and burst_error is not None:
        low, high = min(low, float(median) / (1 + burst_error)), max(high, float(median) * (1 + burst_error))
    return {
        "median_seconds": float(median),
        "min_seconds": float(ordered[0]),
        "mean_seconds": float(ordered.mean()),
        "q25_seconds": float(q25),
        "q75_seconds": float(q75),
        "p95_seconds": float(p95),
        "std_seconds": float(ordered.std(ddof=1)) if ordered.size > 1 else None,
        "low_seconds": low,
        "high_seconds": high,
        "sample_count": int(ordered.size),
    }


# Writing ----------------------------------------------------------------------------------------------------------


def write_part(folder: str | Place, rows: Iterable[Mapping[str, Any]]) -> Place:
    """Write `rows` as a new part of the table in `folder` and return its place; a part is never changed afterwards.

    A row gives its key, how it was measured, its status and, if that is ok, samples_seconds; what follows from these
    (schema_version, point_id, structure and time columns) is filled in here. Missing columns are null.
    Raises ValueError for an unknown column, a wrong type, an unknown status or an ok row without samples, and
    EnvironmentUnusable where the disk refuses.
    """
    complete = [_complete(row) for row in rows]
    if not complete:
        raise ValueError("a part needs at least one row")
    try:
        table = pa.Table.from_pylist(complete, schema=SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"a row does not fit the table: {error}") from error
    return write_rows(places.at(folder), table)


def _complete(row: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(row) - set(SCHEMA.names)
    if unknown:
        raise ValueError(f"a table has no column {', '.join(sorted(unknown))}")
    if row.get("status") not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {row.get('status')!r}")
    filled = {"started_at": datetime.now(UTC), **structure(row["pattern"]), **row}
    filled |= {"schema_version": SCHEMA_VERSION, "point_id": point_id(row)}
    if row.get("samples_seconds") is not None:
        filled |= summarise(row["samples_seconds"], row.get("burst_error"))
    elif row["status"] in TIMED:
        raise ValueError(f"a row with status {row['status']} needs samples_seconds")
    return filled | _compared(filled)


def _compared(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that set a time beside what the device can do, and beside how it did meanwhile."""
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


def newest(frame: pd.DataFrame, points: Collection[str]) -> dict[str, datetime]:
    """When the newest row of each of `points` was started that `frame` holds."""
    started = frame["started_at"][frame["point_id"].isin(points)].groupby(frame["point_id"]).max().dropna()
    return {str(point): moment.to_pydatetime() for point, moment in started.items()}


def after(earlier: Mapping[str, datetime], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, each of them started after the row of its point that `earlier` tells of.

    The latest row of a point is the one that counts. Where a clock was set back since, or the clocks of two machines
    differ, a new row would not be it: its started_at is moved, and its flags say clock_set_back.
    """
    found = []
    for row in rows:
        started, before = row.get("started_at") or datetime.now(UTC), earlier.get(point_id(row))
        flags = row.get("flags")
        if before is not None and started <= before:
            started = before + timedelta(microseconds=1)
            flags = "+".join(filter(None, (flags, "clock_set_back")))
        found.append({**row, "started_at": started, "flags": flags})
    return found


def write_rows(folder: Place, table: pa.Table) -> Place:
    """Write `table`, which has the columns of SCHEMA, as a new part of the table in `folder` and return its place."""
    content = to_parquet(table)
    path = folder / f"part-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    places.write(path, content)
    return path


def write_environment(folder: str | Place, environment: Mapping[str, Any]) -> None:
    """Describe `environment` (texts and numbers by name, `env_id` among them) beside the table in `folder`.

    A description that is there already is left as it is, unless it is damaged. Raises EnvironmentUnusable where the
    disk refuses.
    """
    path = places.at(folder) / environments.file_name(environment["env_id"])
    content = environments.to_json(environment)
    if not path.is_file() or places.read(path) != content:
        places.write(path, content)


@contextmanager
def unfinished(folder: Place) -> Iterator[None]:
    """The table in `folder` is refused by whoever reads it until the context is left without an exception."""
    mark = folder / UNFINISHED
    places.write(mark, b"latbench is writing this table, or was interrupted while it did.\n")
    yield
    places.remove(mark)


def to_parquet(table: pa.Table) -> pa.Buffer:
    """`table` as the content of a Parquet file, compressed, every page with a checksum."""
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


# Reading ----------------------------------------------------------------------------------------------------------


def read(path: str | Place, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows of the table at `path` (a folder or one Parquet file), with the columns of SCHEMA, or those named.

    What is being written or describes the environment is left out. Raises BadData, naming the file, for one that is
    missing, empty, foreign, damaged or of another schema version.
    """
    return load(path, columns).to_pandas(self_destruct=True)


def load(path: str | Place, columns: Sequence[str] | None = None) -> pa.Table:
    """What `read` gives, as an Arrow table."""
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    return pa.concat_tables([schema.empty_table(), *batches(path, columns)])


class Growing:
    """A table that is read again and again while others add parts: each part is read once.

    Parts whose names tell their content never change; any other file is read each time. `damage`: what could not be
    read the last time, which is left out.
    """

    def __init__(self, folder: Place, columns: Sequence[str]) -> None:
        self._folder, self._columns = folder, list(columns)
        self._read: dict[Place, pa.Table] | None = None
        self._frame: pd.DataFrame | None = None
        self.damage: BadData | None = None

    def frame(self) -> pd.DataFrame | None:
        """Its rows now, with `columns`; None while there is none. Raises BadData as `read` does the first time; from
        then on only `damage` tells, because whoever adds to a table is not to stop for what befalls the rest of it.
        """
        before, self.damage = self._read, None
        now = {part: table for part in self._parts() if (table := self._table(part)) is not None}
        if before is None or list(now.items()) != list(before.items()):
            self._frame = pa.concat_tables(now.values()).to_pandas() if now else None
        self._read = now
        return self._frame

    def _parts(self) -> list[Place]:
        try:
            return parts(self._folder) if holds_rows(self._folder) else []
        except BadData as error:
            self._note(error)
            return list(self._read or ())

    def _table(self, part: Place) -> pa.Table | None:
        known = None if self._read is None else self._read.get(part)
        if known is not None and PART_NAME.fullmatch(part.name):
            return known
        try:
            return load(part, self._columns)
        except BadData as error:
            self._note(error)
            return known

    def _note(self, error: BadData) -> None:
        if self._read is None:
            raise error
        self.damage = error


def batches(path: str | Place, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The table at `path` in pieces of at most BATCH_ROWS rows and about BATCH_BYTES, which need not fit into memory
    together.
    """
    wanted = list(SCHEMA.names if columns is None else columns)
    judged = list(dict.fromkeys([*wanted, "status", "median_seconds"]))
    for part in parts(path):
        for start, table in part_batches(part, judged):
            if (untimed := np.flatnonzero(without_time(table))).size:
                status = table["status"][untimed[0]]
                raise BadData(f"{part}, row {start + untimed[0] + 1}: status {status} and no positive time")
            yield table.select(wanted)


def select(
    path: str | Place, columns: Sequence[str], wanted: Callable[[pa.Table], pa.Array], looked_at: Sequence[str] = ()
) -> pd.DataFrame:
    """What `read` gives, but only the rows of a piece that are `wanted`: (rows,) booleans of a piece with `columns`
    and those `looked_at`. Memory grows with these rows.
    """
    read = list(dict.fromkeys([*columns, *looked_at]))
    empty = pa.schema([SCHEMA.field(name) for name in columns]).empty_table()
    found = (piece.filter(pc.fill_null(wanted(piece), False)).select(columns) for piece in batches(path, read))
    return pa.concat_tables([empty, *found]).to_pandas(self_destruct=True)


def without_time(table: pa.Table) -> NDArray[np.bool_]:
    """(rows,) whether a row's status says that it has a time, and it has no positive finite one."""
    timed = pc.is_in(table["status"], pa.array(TIMED)).to_numpy()
    seconds = table["median_seconds"].to_numpy()
    found: NDArray[np.bool_] = timed & ~((seconds > 0) & (seconds < math.inf))
    return found


def read_env(path: str | Place) -> pd.DataFrame:
    """The environments of the table at `path`, a row each with its env_id; empty where none are known."""
    import pandas as pd

    return pd.DataFrame(environment_rows(path))


def environment_rows(path: str | Place) -> list[dict[str, Any]]:
    """The environments of the table at `path` in plain values. Raises BadData for a damaged file."""
    return [read_environment(file) for file in environment_files(path)]


def environment_files(path: str | Place) -> list[Place]:
    """The files that describe the environments of the table at `path`."""
    path = places.at(path)
    folder = path.parent if path.is_file() else path
    files = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((file for file in files if environments.NAME.fullmatch(file.name)), key=lambda file: file.name)


def read_environment(file: Place) -> dict[str, Any]:
    """The environment that a file describes. Raises BadData, naming the file, for a damaged one."""
    try:
        return environments.from_json(file.name, places.read(file))
    except ValueError as error:
        raise BadData(f"{file}: {error}; delete it, and a sweep describes its machine again") from error


def exists(path: str | Place) -> bool:
    """Whether there is a table at `path`, if only one without rows: a file, or a folder with anything in it."""
    path = places.at(path)
    return path.is_file() or (path.is_dir() and any(True for _ in path.iterdir()))


def parts(path: str | Place) -> list[Place]:
    """The Parquet files with rows of the table at `path` (a folder or one file). Raises BadData if there are none."""
    path = places.at(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadData(f"{path}: no such table")
    if not (found := _parts_in(path)):
        raise BadData(f"{path}: an empty table, there is no part-*.parquet in it; `latbench sweep` measures one")
    return found


def holds_rows(path: str | Place) -> bool:
    """Whether there is a table with rows at `path`."""
    path = places.at(path)
    return path.is_file() or (path.is_dir() and bool(_parts_in(path)))


def _parts_in(folder: Place) -> list[Place]:
    files: list[Place] = sorted(folder.iterdir(), key=lambda file: file.name)
    if any(file.name == UNFINISHED for file in files):
        raise BadData(
            f"{folder}: unfinished, `latbench merge` still writes it or was interrupted: delete it and merge again"
        )
    return [file for file in files if file.name.endswith(".parquet") and not file.name.startswith(".")]


def part_batches(part: Place, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """One file of a table in pieces: the number of rows before, and the columns of SCHEMA or those named.

    What rows say is not looked at. Raises BadData, naming the file, as `read` does.
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
    """How many rows of a file come into memory at once, by what one takes there on average.

    By the column that says how many samples a row has: the footer would tell too, but asking a damaged one for its
    columns ends the process.
    """
    size = file.metadata.num_rows * sum(_TEXT_BYTES if field.type == _text else 8 for field in wanted)
    if any(pa.types.is_list(field.type) for field in wanted):
        for batch in file.iter_batches(columns=["sample_count"]):
            counts = _cast(part, batch.column(0), SCHEMA.field("sample_count")).fill_null(0).to_numpy()
            size += 8 * int(counts.clip(0, _MOST_SAMPLES).sum())
    return max(1, min(BATCH_ROWS, BATCH_BYTES * file.metadata.num_rows // max(size, 1)))


@contextmanager
def _opened(path: Place) -> Iterator[parquet.ParquetFile]:
    """The Parquet file at `path`, its content checked against its name; whatever is wrong with it is BadData."""
    with places.open_input(path) as stream:
        content = pa.BufferReader(stream.read()) if stream.size() <= _READ_WHOLE_BYTES else stream
        named = PART_NAME.fullmatch(path.name)
        if named and not hashlib.file_digest(content, "sha256").hexdigest().startswith(named[1]):
            raise BadData(
                f"{path}: damaged, truncated or edited, its content is not what its name promises; "
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
    """That a file's footer, which has no checksum, agrees with itself on how many rows there are."""
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(groups):
        raise BadData(f"{path}: damaged, its footer tells of {metadata.num_rows} rows and of {sum(groups)}")


def _cast(path: Place, column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise BadData(f"{path}: column {field.name} does not hold {field.type} ({error})") from error


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that hold a time, one a point: the latest with status ok, else the latest that is noisy.

    A noisy time is known less well, and its interval says how well; a throttled or incorrect one is no time.
    """
    rows = np.flatnonzero(frame["status"].isin(TIMED))
    ranked = frame[["point_id", "status", "started_at"]].iloc[rows].set_axis(rows)
    ranked = ranked.assign(settled=ranked["status"] == "ok").sort_values(["settled", "started_at"], kind="stable")
    kept = np.sort(ranked.drop_duplicates("point_id", keep="last").index)
    return frame if len(kept) == len(frame) else frame.iloc[kept]


def refuse_nonsense(layers: pd.DataFrame) -> None:
    """Raises BadData for rows whose pattern, size or sparsity is that of no layer: they time nothing that could be.

    `latbench validate` finds more, and names the files. Of what others published, sizes may be unknown.
    """
    wrong = [f"pattern {pattern}" for pattern in layers["pattern"].unique() if not _is_pattern(pattern)]
    for name, least in (*LEAST_SIZES.items(), ("sparsity_target", 0)):
        values = layers[name].to_numpy(np.float64, na_value=np.nan)
        most = 1 if name == "sparsity_target" else np.inf
        wrong += [f"{name} {value:g}" for value in values[(values < least) | (values > most)][:1]]
    if wrong:
        raise BadData(f"the table holds layers that cannot be, such as of {wrong[0]}: `latbench validate` names them")


def _is_pattern(spec: object) -> bool:
    try:
        return isinstance(spec, str) and structure(spec)["format"] is not None
    except ValueError:
        return False


def table_hash(path: str | Place) -> str:
    """The hash of the rows of the table at `path`, whatever their order and however they are split into parts."""
    sums, count = np.zeros(2, np.uint64), 0
    for table in batches(path):
        sums += digests.rows(table).sum(axis=0, dtype=np.uint64)
        count += table.num_rows
    return digests.of_multiset(sums, count)
