"""Does every engine work? Judges the smoke points: one of each engine, prepared together and sampled in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latbench.backends.gpu_installation import NEEDED
from latbench.sweeping.gpu_tests import Outcome
from latbench.tables.schema import TIMED

if TYPE_CHECKING:
    import pandas as pd

_NAMED = ("backend", "kernel_requested", "pattern", "layout")
_TIMED = (*TIMED, "throttled", "spike")  # the statuses of rows whose result was right


def judge(rows: pd.DataFrame | None) -> Outcome:
    """Sum up how the smoke points went.

    Parameters
    ----------
    rows
        Of the table, those of smoke points.

    Returns
    -------
    Outcome
        ``failed`` where a point of NEEDED failed, where none of an engine of NEEDED was timed, or where nothing was.
        Otherwise a refusal is no failure. Its output has a line for each point that was not timed, with the reason.
    """
    if rows is None or rows.empty:
        return Outcome("failed", "smoke: no point was tried", "")
    latest = rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    timed = latest["status"].isin(_TIMED)
    refused = latest["status"] == "unsupported"
    failed = latest[~timed & ~refused]
    asked, worked = set(latest["backend"]), set(latest["backend"][timed])
    without = asked.intersection(NEEDED) - worked
    needed = failed[failed["backend"].isin(NEEDED)]
    lines = [
        f"  {row['status']}: {' '.join(row[name] for name in _NAMED)}: {row['error']}"
        for _, row in latest[~timed].iterrows()
    ]
    counts = f"{int(timed.sum())} of {len(latest)} points timed, {int(refused.sum())} refused, {len(failed)} failed"
    if len(needed) or without or not timed.any():
        return Outcome("failed", f"smoke: FAILED: {counts}", "\n".join(lines))
    return Outcome("passed", f"smoke: passed: {counts}", "\n".join(lines))
