"""Verdict on the smoke points, which show whether every engine works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latbench.base.engine_registry import GPU_ENGINES, list_standard
from latbench.sweeping.gpu_tests import GpuTestOutcome
from latbench.tables.schema import TIMED

if TYPE_CHECKING:
    import pandas as pd

_NAMED = ("backend", "kernel_requested", "pattern", "layout")
_TIMED = (*TIMED, "throttled", "spike")  # statuses of rows whose result was correct


def judge_smoke_points(rows: pd.DataFrame | None) -> GpuTestOutcome:
    """Sum up the smoke points.

    Parameters
    ----------
    rows
        The rows of smoke points in the table.

    Returns
    -------
    TestOutcome
        ``failed`` where a point of a standard engine failed, where none of its points was timed, or where nothing
        was. A refusal is no failure, nor is one of its optional kernels. Its output has a line for each point without
        a time, with the reason.
    """
    if rows is None or rows.empty:
        return GpuTestOutcome("failed", "smoke: no point was tried", "")
    latest = rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    timed = latest["status"].isin(_TIMED)
    refused = latest["status"] == "unsupported"
    failed = latest[~timed & ~refused]
    asked, worked = set(latest["backend"]), set(latest["backend"][timed])
    standard = list_standard(GPU_ENGINES)
    without = asked.intersection(standard) - worked
    optional = {(name, kernel) for name in standard for kernel in GPU_ENGINES[name].optional_kernels}
    names = zip(failed["backend"], failed["kernel_requested"], strict=True)
    needed = [pair for pair in names if pair[0] in standard and pair not in optional]
    lines = [
        f"  {row['status']}: {' '.join(row[name] for name in _NAMED)}: {row['error']}"
        for _, row in latest[~timed].iterrows()
    ]
    counts = f"{int(timed.sum())} of {len(latest)} points timed, {int(refused.sum())} refused, {len(failed)} failed"
    if needed or without or not timed.any():
        return GpuTestOutcome("failed", f"smoke: FAILED: {counts}", "\n".join(lines))
    return GpuTestOutcome("passed", f"smoke: passed: {counts}", "\n".join(lines))
