"""Changes between two tables: points are matched by key, and each pair is judged by its samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from latbench.errors import BadData, UsageError
from latbench.tables.comparability import MODES
from latbench.tables.latest_rows import accept_every_row, read_latest_arrow
from latbench.tables.point_ids import convert_to_plain, hash_key
from latbench.tables.schema import KEY_COLUMNS, TIMED
from latbench.tables.significance import (
    FASTER,
    SAME,
    SLOWER,
    UNCLEAR,
    ChangeVerdict,
    estimate_spread,
    judge_change,
    judge_together,
)
from latbench.tables.storage import Place
from latbench.tables.table import select_timed

MISSING, NEW = "MISSING", "NEW"
KINDS = (SLOWER, MISSING, UNCLEAR, FASTER, SAME, NEW)
"""The verdicts on a point, the most alarming first. MISSING and NEW have a time on one side only."""


_COLUMNS = list(dict.fromkeys([
    *(field.name for field in KEY_COLUMNS), *MODES, "point_id", "status", "error", "started_at",
    "median_seconds", "samples_seconds", "reference_seconds", "reference_usual_seconds", "flags",
    "backend_version", "kernel_used",
]))  # fmt: skip


def read_compared_rows(path: str | Place) -> pd.DataFrame:
    """Read the latest row of each point with each status that it ever had, as `compare_tables` needs them.

    Memory grows with the points, however often each was measured. Raises BadData as `read_table` does.
    """
    found = read_latest_arrow(path, _COLUMNS, group_columns=["point_id", "status"], accept=accept_every_row)
    return found.to_pandas(self_destruct=True)


# The mode columns that are not part of the key.
_WAYS = [name for name in MODES if name not in {field.name for field in KEY_COLUMNS}]


@dataclass(frozen=True)
class Change:
    """A point of either table.

    Parameters
    ----------
    key
        Its key columns.
    kind
        One of KINDS.
    before, after
        Median seconds in each table; None without a time.
    ratio, low, high
        after / before and its confidence interval; None without two times, the interval also without samples.
    reason
        Why there is no verdict.
    """

    key: dict[str, Any]
    kind: str
    before: float | None
    after: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def compare_tables(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    threshold: float = 0.02,
    across: Sequence[str] = (),
    corrected: bool = False,
) -> list[Change]:
    """Return every point that has a time in either table.

    The most slowed points come first, those that could not be compared last. Points match if their keys are equal,
    apart from the columns `across`. How much equal work differs between two runs is estimated from all points
    together, which are also judged together.

    Parameters
    ----------
    before, after
        Frames of `read_compared_rows`.
    threshold
        Relative changes below this count as equal.
    across
        Key columns that may differ, such as the thread count.
    corrected
        Divide times by how much slower than usual the reference work was meanwhile. The usual time is that of the
        first table, because it may have been measured anew since.

    Raises
    ------
    UsageError
        A table has several points that differ only in `across`.
    BadData
        The tables have no point in common, or a row lacks the reference for `corrected`.
    """
    old, new = _by_key(before, across, "first"), _by_key(after, across, "second")
    if old.keys().isdisjoint(new):
        raise BadData("the tables have no point with a time in common: nothing can be compared")
    if corrected:
        usual = {key: row["reference_usual_seconds"] for key, row in old.items() if _alike(row, new.get(key))}
        old, new = ({key: _corrected(row, usual.get(key)) for key, row in rows.items()} for rows in (old, new))
    pairs = [(row, new[key]) for key, row in old.items() if key in new]
    between = estimate_spread([_seconds(second) / _seconds(first) for first, second in pairs])
    ways = [name for name in _WAYS if name not in across]
    reasons = [_no_verdict(*pair, ways) for pair in pairs]
    known = [pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None]
    verdicts = iter(judge_together([_verdict(*pair, threshold, between) for pair in known]))
    changes = [_change(*pair, reason, verdicts) for pair, reason in zip(pairs, reasons, strict=True)]
    failures = _failures(after, across)
    for key, row in old.items():
        if key not in new:
            reason = failures.get(key, "not in the second table")
            changes.append(Change(_key(row), MISSING, _seconds(row), None, reason=reason))
    changes += [
        Change(_key(row), NEW, None, _seconds(row), reason="no time in the first table")
        for key, row in new.items() if key not in old
    ]  # fmt: skip
    return sorted(changes, key=lambda change: (change.ratio is None, -(change.ratio or 0), KINDS.index(change.kind)))


def _by_key(frame: pd.DataFrame, across: Sequence[str], which: str) -> dict[Hashable, dict[str, Any]]:
    found: dict[Hashable, dict[str, Any]] = {}
    for row in select_timed(frame).to_dict("records"):
        if (key := _matched(row, across)) in found:
            raise UsageError(
                f"the {which} table has several points that differ only in {' or '.join(across)}: which of them to "
                "compare is not known; give tables of one kind"
            )
        found[key] = {str(name): value for name, value in row.items()}
    return found


def _matched(row: dict[Any, Any], across: Sequence[str]) -> Hashable:
    return hash_key(row | dict.fromkeys(across)) if across else row["point_id"]


def _failures(frame: pd.DataFrame, across: Sequence[str]) -> dict[Hashable, str]:
    """Return why each point has no time: the status and the error of its latest row."""
    failed = frame[~frame["status"].isin(TIMED)].sort_values("started_at", kind="stable")
    return {
        _matched(row, across): f"{row['status']}: {row['error']}" if isinstance(row["error"], str) else row["status"]
        for row in failed.to_dict("records")
    }


def _no_verdict(old: dict[str, Any], new: dict[str, Any], ways: Sequence[str]) -> str | None:
    """Return why two rows of a point cannot be judged; None if they can. Recorded `ways` must agree."""
    if any(row["samples_seconds"] is None or len(row["samples_seconds"]) == 0 for row in (old, new)):
        return "a time without samples"
    disturbed = {flag for row in (old, new) for flag in _flags(row)} & _DISTURBED
    # One measurement in two copies has not changed, whatever disturbed it.
    if disturbed and not np.array_equal(old["samples_seconds"], new["samples_seconds"]):
        return f"disturbed in every try: {', '.join(sorted(disturbed))}"
    for name in ways:
        then, now = old[name], new[name]
        if pd.notna(then) and pd.notna(now) and then != now:
            return f"timed in another way: {name} was {then}, and is {now}"
    return None


def _verdict(old: dict[str, Any], new: dict[str, Any], threshold: float, between: float) -> ChangeVerdict:
    samples = [row["samples_seconds"] for row in (old, new)]
    try:
        return judge_change(*samples, threshold=threshold, between=between)
    except ValueError as error:
        raise BadData(
            f"point {new['point_id']}: {error}; `latbench validate` tells which table is damaged"
        ) from error


def _change(
    old: dict[str, Any], new: dict[str, Any], reason: str | None, verdicts: Iterator[ChangeVerdict]
) -> Change:
    """Return the change of a point, with the next verdict unless there is a `reason` against one."""
    key, before, after = _key(new), _seconds(old), _seconds(new)
    if reason is not None:
        return Change(key, UNCLEAR, before, after, after / before, reason=reason)
    found = next(verdicts)
    return Change(key, found.kind, before, after, found.ratio, found.low, found.high)


_DISTURBED = {"preempted", "slow_spell"}  # rows with these flags cannot show a change


def _flags(row: dict[str, Any]) -> list[str]:
    return row["flags"].split("+") if isinstance(row["flags"], str) else []


def _alike(row: dict[str, Any], other: dict[str, Any] | None) -> bool:
    return other is not None and row["device"] == other["device"]


def _corrected(row: dict[str, Any], usual: float | None) -> dict[str, Any]:
    """Return the row with its times at the usual pace; by default the row's own."""
    ratio = (row["reference_seconds"] or 0.0) / (usual or row["reference_usual_seconds"] or 1.0)
    if not ratio > 0:
        raise BadData(f"point {row['point_id']} has no reference_ratio: how slow the machine was then is not known")
    samples = None if row["samples_seconds"] is None else [sample / ratio for sample in row["samples_seconds"]]
    return row | {"samples_seconds": samples, "median_seconds": row["median_seconds"] / ratio}


def _seconds(row: dict[str, Any]) -> float:
    return float(row["median_seconds"])


def _key(row: dict[str, Any]) -> dict[str, Any]:
    return {field.name: convert_to_plain(field.type, row[field.name]) for field in KEY_COLUMNS}
