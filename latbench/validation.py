"""Is a table what it claims to be? What `tables.read` cannot see from the schema alone.

A finding is of a file and has a severity: `corrupt` where the content contradicts itself, `suspect` where it is
unlikely, `note` where it is only worth knowing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latbench import gates, tables
from latbench.errors import BadData

# No device of this decade computes or moves more; a time that implies it has the wrong unit or is of no real run.
MOST_FLOP_PER_SECOND = 1e16
LONGEST_SECONDS = 3600.0
_CLOSE = 1e-9  # medians are computed from the very samples beside them, by one function


@dataclass(frozen=True)
class Finding:
    """What is wrong, or worth knowing, with a file of a table."""

    path: Path
    severity: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Everything found in the table at `path`, file by file. Raises BadData if there is no table at all."""
    counts: Counter[str] = Counter()
    for part in tables.parts(path):
        try:
            rows = tables.read_part(part).to_pylist()
        except BadData as error:
            yield Finding(part, "corrupt", str(error).removeprefix(f"{part}: "))
            continue
        for row in rows:
            for severity, text in _row_findings(row):
                yield Finding(part, severity, f"point {row['point_id']}: {text}")
        counts.update(row["point_id"] for row in rows if row["status"] == "ok")
    repeated = sum(count > 1 for count in counts.values())
    if repeated:
        yield Finding(path, "note", f"{repeated} points are measured more than once: readers take the latest")
    for leftover in sorted(path.glob(".*.tmp")) if path.is_dir() else []:
        yield Finding(leftover, "note", "left behind by a writer that was killed; it is no part of the table")


def _row_findings(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if row["point_id"] != tables.point_id(row):
        yield "corrupt", f"its key hashes to {tables.point_id(row)}"
    if row["status"] not in tables.STATUSES:
        yield "corrupt", f"unknown status {row['status']!r}"
    try:
        structure = tables.structure(row["pattern"])
    except ValueError as error:
        yield "corrupt", str(error)
    else:
        if row["op"] != "model":
            for name in [name for name, value in structure.items() if row[name] != value]:
                yield "corrupt", f"{name} is {row[name]}, and pattern {row['pattern']} says {structure[name]}"
    yield from _shape_findings(row)
    if row["median_seconds"] is not None:
        yield from _time_findings(row)


def _shape_findings(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if row["op"] == "conv2d" and row["c_in"] is not None and row["k"] != row["kh"] * row["kw"] * row["c_in"]:
        yield "corrupt", f"k is {row['k']}, and the convolution has {row['kh']}x{row['kw']}x{row['c_in']}"
    if row["nnz"] is None or row["sparsity_actual"] is None:
        return
    weights = row["m"] * row["k"]
    if not 0 <= row["nnz"] <= weights or abs(1 - row["nnz"] / weights - row["sparsity_actual"]) > _CLOSE:
        yield "corrupt", f"nnz {row['nnz']} of {weights} weights is no sparsity of {row['sparsity_actual']:g}"
    # Whole blocks or vectors can miss a target on a small layer; a tenth of the layer is more than that.
    elif isinstance(row["sparsity_target"], float) and abs(row["sparsity_actual"] - row["sparsity_target"]) > 0.1:
        yield "suspect", f"sparsity {row['sparsity_actual']:g} where {row['sparsity_target']:g} was wanted"


def _time_findings(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    median = row["median_seconds"]
    if not 0 < median < math.inf:
        yield "corrupt", f"a time of {median} s"
        return
    samples = row["samples_seconds"]
    if samples:
        try:
            summary = tables.summarise(samples)
        except ValueError as error:
            yield "corrupt", str(error)
            return
        for name, value in summary.items():
            if not _same(row[name], value):
                yield "corrupt", f"{name} is {row[name]}, and its samples give {value}"
    elif row["purpose"] != "import":
        yield "suspect", "a time without the samples it comes from"
    if median > LONGEST_SECONDS:
        yield "suspect", f"a call of {median:g} s: times are in seconds"
    yield from _comparison_findings(row)
    work = row["flop_nnz"] if row["flop_nnz"] is not None else _flop(row)
    if work is not None and work / median > MOST_FLOP_PER_SECOND:
        yield "suspect", f"{work / median:.2g} operations a second is beyond any device: times are in seconds"


def _comparison_findings(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Columns that follow from the median and what stands beside it."""
    median, roofline, ratio = row["median_seconds"], row["roofline_seconds"], row["reference_ratio"]
    derived = {
        "utilisation": None if roofline is None else roofline / median,
        "corrected_seconds": None if ratio is None else median / ratio,
    }
    for name, value in derived.items():
        if value is not None and not _same(row[name], value):
            yield "corrupt", f"{name} is {row[name]}, and the columns beside it give {value}"
    if row["status"] in tables.TIMED and roofline is not None and (why := gates.too_fast(median, roofline)):
        yield "corrupt", f"status {row['status']}, but {why}"


def _flop(row: dict[str, Any]) -> float | None:
    sizes = (row["m"], row["k"], row["n"], row["sparsity_target"])
    return None if None in sizes else 2 * math.prod(sizes[:3]) * (1 - sizes[3])


def _same(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=_CLOSE)
