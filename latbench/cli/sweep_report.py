"""The output of `latbench sweep`: time left, counts, reasons of failures and a table of speedups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from latbench.cli.sweep_points import format_duration

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from latbench.cli.progress_bar import Tell
    from latbench.sweeping.settings import Progress, SweepSummary
    from latbench.tables.storage import Place
    from latbench.workloads.points import Point

FAILED = ("throttled", "impossible", "oom", "incorrect", "timeout", "error")
"""The statuses whose reasons a summary lists."""


def check_any_time(frame: pd.DataFrame | None, points: Sequence[Point]) -> None:
    """Raise EnvironmentUnusable where a finished sweep has no time of any of `points`.

    The message gives the most frequent failure, which is what is wrong with the machine or the request.
    """
    from latbench.errors import EnvironmentUnusable
    from latbench.tables.table import select_timed

    keys = {point.id for point in points}
    rows = None if frame is None else frame[frame["point_id"].isin(keys)]
    if rows is None or rows.empty or len(select_timed(rows)):
        return
    latest = rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    reasons = (latest["status"] + ": " + latest["error"].fillna("no reason was given")).value_counts()
    raise EnvironmentUnusable(
        f"nothing could be timed: {len(latest)} of {len(points)} points failed, {reasons.iloc[0]} of them with "
        f"{reasons.index[0]}"
    )


def build_summary(
    folder: Place, device: str, summary: SweepSummary, frame: pd.DataFrame | None, seconds: float
) -> dict[str, Any]:
    """Build the JSON summary of a sweep; statuses count the points of this run."""
    from collections import Counter

    return {
        "table": str(folder),
        "device": device,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(Counter(summary.statuses.values()).items())),
        "skipped": summary.skipped,
        "rows": 0 if frame is None else len(frame),
    }


def print_summary(folder: Place, points: Sequence[Point], summary: SweepSummary, frame: pd.DataFrame) -> None:
    """Print the outcome of a sweep; `frame` holds the rows of the table."""
    from collections import Counter

    from rich.console import Console

    console = Console()
    counts = Counter(summary.statuses.values())
    fresh = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    known = f"{summary.skipped} were there already" if summary.skipped else ""
    console.print(f"{folder}: " + "; ".join(part for part in (fresh, known) if part), highlight=False, soft_wrap=True)
    ours = frame[frame["point_id"].isin(set(summary.statuses))]  # of this run, and earlier tries
    _print_faults(console, ours, counts["noisy"])
    speedups = build_speedup_table(frame[frame["point_id"].isin({point.id for point in points})])
    if speedups is not None:
        heading, table = speedups
        console.print(f"\n{heading}", highlight=False, soft_wrap=True)
        console.print(table)


def _print_faults(console: Console, rows: pd.DataFrame, noisy: int) -> None:
    """Print why points failed, and how many have no roofline, are noisy or were disturbed."""
    import os

    from latbench.machines.processors import count_cores
    from latbench.sweeping.settings import NO_ROOFLINE
    from latbench.tables.table import select_timed

    latest = rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    failed = latest[latest["status"].isin(FAILED)]
    for (status, error), own in failed.groupby(["status", "error"], sort=False):
        console.print(f"{len(own)} {status}: {error}", highlight=False, soft_wrap=True)
    without = int(latest["flags"].str.contains(NO_ROOFLINE, na=False).sum())
    if without:
        console.print(
            f"{without} points have no roofline, because measuring it failed: impossible times are not detected",
            highlight=False,
            soft_wrap=True,
        )
    disturbed = int(select_timed(rows)["flags"].str.contains("preempted|slow_spell", na=False).sum())
    for count, what in (
        (noisy, "are noisy, their intervals are wide: --remeasure measures them again"),
        (disturbed, "were measured while other programs took or slowed the cores: their times may be too long"),
    ):
        if count:
            load = f"the load is {os.getloadavg()[0]:.1f} on {count_cores()} cores"
            console.print(f"{count} points {what} ({load})", highlight=False, soft_wrap=True)


def build_speedup_table(frame: pd.DataFrame) -> tuple[str, Table] | None:
    """Build a table of median speedups by pattern and engine (rows) and sparsity (columns), and its heading.

    A speedup is over the fastest dense engine of the same layer shape and setting; the median is over layer shapes.
    Rounded points are compared with dense engines of the same type and of wider ones. None where no sparse point has
    a dense one to compare with.
    """
    from rich.table import Table

    from latbench.base.engine_registry import FLOAT32
    from latbench.report.point_frames import (
        SETTING,
        SHAPE,
        WIDER,
        add_wider_rivals,
        format_engine,
        has_weights_of_another_type,
    )
    from latbench.tables.table import select_timed

    timed = add_wider_rivals(select_timed(frame))
    names = zip(timed["backend"], timed["kernel_requested"], strict=True)
    timed = timed.assign(engine=[format_engine(*pair) for pair in names])
    layer = [*SHAPE, *SETTING]  # times of different modes are not compared
    other = has_weights_of_another_type(timed["backend"], timed["dtype_w"])
    dense = timed[(timed["pattern"] == "dense") & ~other]
    fastest = dense.loc[dense.groupby(layer, dropna=False)["median_seconds"].idxmin()].set_index(layer)
    fastest = fastest[["median_seconds", "engine"]].add_prefix("dense_")
    sparse = timed[timed["pattern"] != "dense"].join(fastest, on=layer)
    sparse = sparse.assign(speedup=sparse["dense_median_seconds"] / sparse["median_seconds"]).dropna(subset="speedup")
    if sparse.empty:
        return None
    engines = [
        f"{'' if dtype == FLOAT32 else f'in {dtype} '}"
        f"{_format_counts(rows.drop_duplicates(layer)['dense_engine'].value_counts())}"
        for dtype, rows in sorted(sparse.groupby("dtype_a"), key=lambda found: str(found[0]) in WIDER)
    ]
    medians = sparse.pivot_table(
        index=["pattern", "engine"], columns="sparsity_target", values="speedup", aggfunc="median"
    )
    heading = f"speedup over the fastest dense engine ({'; '.join(engines)}), median of layers:"
    table = Table("pattern", "engine", box=None, pad_edge=False)
    for sparsity in medians.columns:
        table.add_column(f"{sparsity:.0%}", justify="right")
    for (pattern, engine), row in medians.sort_index().iterrows():
        table.add_row(pattern, engine, *("" if value != value else f"{value:.2f}x" for value in row))
    return heading, table


def _format_counts(counts: pd.Series) -> str:
    """Return how many layers each engine is the fastest for, as a text."""
    names = sorted(counts.index, key=lambda name: (-counts[name], name))
    return f"{', '.join(f'{name} in {counts[name]}' for name in names)} of {counts.sum()} layers"


def report_time_left(tell: Tell, time_budget: float | None = None) -> Callable[[Progress], None]:
    """Return what a sweep reports to. It adds the time left, by the pace so far and at most the budget (seconds)."""
    import time

    began, before = time.monotonic(), None

    def report(now: Progress) -> None:
        nonlocal before
        before = now.done if before is None else before
        left = ""
        if before < now.done < now.total:  # the number of repeats after that is unknown
            passed = time.monotonic() - began
            seconds = passed / (now.done - before) * (now.total - now.done)
            if time_budget is not None:
                seconds = max(0.0, min(seconds, time_budget - passed))
            left = f", about {format_duration(seconds)} left"
        tell(now.activity + left, now.done, now.total or None)

    return report
