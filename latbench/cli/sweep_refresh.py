"""`latbench sweep --refresh TABLE`: times a sample of a table's old times again, and says which have moved."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from latbench.cli.json_output import print_json
from latbench.cli.sweep_device import SweepCommandOptions, SweepDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from latbench.sweeping.settings import SweepStopped
    from latbench.tables.compare import Change
    from latbench.tables.storage import Place
    from latbench.workloads.old_times import Move

_LOG = logging.getLogger(__name__)


def find_threads(table: str) -> int | None:
    """Return the number of threads of a table's latest rows; None if there are several, or none is recorded."""
    from latbench.tables.table import read_table

    found = read_table(table, ["threads"])["threads"].dropna().unique()
    return int(found[0]) if len(found) == 1 else None


def refresh_table(path: str, device: SweepDevice, how: SweepCommandOptions) -> None:
    """Time a sample of the old times of the table at `path` on `device` again, and print how each group has moved.

    The new rows are kept in the table. Raises what a sweep raises; what was timed until then is judged.
    """
    from latbench.tables.compare import read_compared_rows
    from latbench.tables.storage import parse_place
    from latbench.workloads.old_times import sample_old_points

    table = parse_place(path)
    old = _select_old(read_compared_rows(table), device, table)
    old = old[old["backend"].isin(device.installed.engines)].reset_index(drop=True)
    points = sample_old_points(old, how.seed)
    if not points:
        device.close()
        _LOG.warning(f"{table}: no time is of another version of an engine than the installed one")
        if how.as_json:
            print_json({"table": str(table), "groups": []})
        return
    _LOG.warning(
        f"{len(old)} times of {table} are of other versions than the installed ones: {len(points)} are timed"
    )
    stopped = _time_again(table, device, how, points)
    _tell_moves(table, old, device, how)
    if stopped is not None:
        raise stopped


def _tell_moves(table: Place, old: pd.DataFrame, device: SweepDevice, how: SweepCommandOptions) -> None:
    """Print how each group of old times has moved."""
    from latbench.tables.compare import read_compared_rows
    from latbench.workloads.old_times import judge_moves

    moves = judge_moves(old, _compare(old, read_compared_rows(table), device))
    if how.as_json:
        print_json({"table": str(table), "groups": [vars(move) for move in moves]})
        return
    _print_moves(moves)


def _select_old(rows: pd.DataFrame, device: SweepDevice, table: Place) -> pd.DataFrame:
    """Return the old times of the device in the table. Raises UsageError where no row is of the device."""
    from latbench.errors import UsageError
    from latbench.workloads.old_times import select_old_times

    here = rows[(rows["device"] == device.device) & (rows["threads"] == device.threads)]
    if here.empty:
        found = rows[["device", "threads"]].drop_duplicates().sort_values(["device", "threads"])
        named = ", ".join(f"{name} with {count:g} threads" for name, count in found.itertuples(index=False))
        raise UsageError(
            f"{table} has no row of {device.device} with {device.threads} threads, which this is, but of {named}"
        )
    return select_old_times(here, device.current(here))


def _time_again(
    table: Place, device: SweepDevice, how: SweepCommandOptions, points: Sequence[object]
) -> SweepStopped | None:
    """Measure the points, close the device, and return what stopped it early, if anything did."""
    from latbench.cli.progress_bar import live
    from latbench.cli.sweep_report import report_time_left
    from latbench.sweeping.settings import SweepOptions, SweepStopped

    options = SweepOptions(seed=how.seed, time_budget=how.time_budget, wait_seconds=how.wait_seconds)
    try:
        with live() as tell:
            device.run(
                table, lambda frame: points, options=options, report=report_time_left(tell, options.time_budget)
            )
    except SweepStopped as stopped:
        return stopped
    finally:
        device.close()
    return None


def _compare(old: pd.DataFrame, rows: pd.DataFrame, device: SweepDevice) -> list[Change]:
    """Return the points of `old` that have a new time, compared, at the machine's usual pace where that is known."""
    from latbench.tables.compare import compare_tables
    from latbench.tables.table import select_timed

    new = select_timed(rows[device.current(rows) & rows["point_id"].isin(set(old["point_id"]))])
    if new.empty:
        return []
    before = old[old["point_id"].isin(set(new["point_id"]))]
    paced = all(frame["reference_seconds"].notna().all() for frame in (before, new))
    return compare_tables(before, new, corrected=paced)


def _print_moves(moves: Sequence[Move]) -> None:
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_ratio

    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("verdict", "left"), ("engine and kernels", "left"), ("old times", "right"), ("timed again", "right"),
        ("new / old", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for move in moves:
        ratio = format_ratio(move.ratio, move.low, move.high) if move.timed else "no time"
        table.add_row(move.verdict, move.group, str(move.old), str(move.timed), ratio)
    console = Console()
    console.print(table)
    moved = sum(move.old for move in moves if move.verdict in ("FASTER", "SLOWER"))
    console.print(
        f"{moved} old times are of kernels that have moved. The same `latbench sweep` as before times all old points "
        "again",
        highlight=False,
        soft_wrap=True,
    )
