"""`latbench sweep --refresh TABLE`: times a sample of a table's old times again, and says which have moved."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
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
    from latbench.workloads.points import Point

_LOG = logging.getLogger(__name__)


def find_threads(table: str) -> int | None:
    """Return the number of threads of a table's rows; None if there are several, or none is recorded."""
    from latbench.tables.table import read_table

    found = read_table(table, ["threads"])["threads"].dropna().unique()
    return int(found[0]) if len(found) == 1 else None


def refresh_table(path: str, device: SweepDevice, how: SweepCommandOptions) -> None:
    """Time a sample of the old times of the table at `path` on `device` again, and print how each group has moved.

    The new rows are kept in the table. Raises what a sweep raises; what was timed until then is judged.
    """
    from latbench.tables.compare import read_compared_rows
    from latbench.tables.storage import parse_place
    from latbench.workloads.old_times import (
        find_machine_part,
        judge_moves,
        sample_old_points,
        sample_unchanged_points,
        select_old_times,
    )

    table = parse_place(path)
    before = read_compared_rows(table)
    here = _select_here(before, device, table)
    current = device.current(here)
    installed = here["backend"].isin(device.installed.engines).to_numpy()
    here, current = here[installed].reset_index(drop=True), current[installed]
    old = select_old_times(here, current)
    points = sample_old_points(old, how.seed)
    if not points:
        device.close()
        _LOG.warning(f"{table}: no time is of another version of an engine than the installed one")
        if how.as_json:
            print_json({"table": str(table), "machine": None, "groups": []})
        return
    unchanged = sample_unchanged_points(here, current, how.seed)
    _LOG.warning(
        f"{len(old)} times of {table} are of other versions than the installed ones: {len(points)} are timed, and "
        f"{len(unchanged)} of unchanged engines"
    )
    began = datetime.now(UTC)
    stopped = _time_again(table, device, how, [*points, *unchanged])
    after = read_compared_rows(table)
    after = after[after["started_at"] >= began]
    machine = find_machine_part(_compare(here[current], after, unchanged, device))
    moves = judge_moves(old, _compare(old, after, points, device, machine is None), machine)
    if how.as_json:
        part = None if machine is None else dict(zip(("ratio", "low", "high"), machine, strict=True))
        print_json({"table": str(table), "machine": part, "groups": [vars(move) for move in moves]})
    else:
        _print_moves(moves, machine)
    if stopped is not None:
        raise stopped


def _select_here(rows: pd.DataFrame, device: SweepDevice, table: Place) -> pd.DataFrame:
    """Return the rows of the device. Raises UsageError where the table has none."""
    from latbench.errors import UsageError

    here = rows[(rows["device"] == device.device) & (rows["threads"] == device.threads)]
    if here.empty:
        found = rows[["device", "threads"]].drop_duplicates().sort_values(["device", "threads"])
        named = ", ".join(f"{name} with {count:g} threads" for name, count in found.itertuples(index=False))
        raise UsageError(
            f"{table} has no row of this machine, {device.device} with {device.threads} threads: it has {named}"
        )
    return here.reset_index(drop=True)


def _time_again(
    table: Place, device: SweepDevice, how: SweepCommandOptions, points: Sequence[Point]
) -> SweepStopped | None:
    """Measure the points, close the device, and return what stopped it early, if anything did."""
    from latbench.cli.progress_bar import live
    from latbench.cli.sweep_report import report_time_left
    from latbench.sweeping.settings import SweepOptions, SweepStopped

    options = SweepOptions(how.seed, how.time_budget, again=True, wait_seconds=how.wait_seconds)
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


def _compare(
    before: pd.DataFrame,
    after: pd.DataFrame,
    points: Sequence[Point],
    device: SweepDevice,
    at_usual_pace: bool = False,
) -> list[Change]:
    """Return the points that have a new time, compared; where that is known, at the machine's usual pace if asked."""
    from latbench.tables.compare import compare_tables
    from latbench.tables.table import select_timed

    wanted = {point.id for point in points}
    new = select_timed(after[device.current(after) & after["point_id"].isin(wanted)])
    if new.empty:
        return []
    old = select_timed(before[before["point_id"].isin(set(new["point_id"]))])
    paced = at_usual_pace and all(frame["reference_seconds"].notna().all() for frame in (old, new))
    return compare_tables(old, new, corrected=paced)


def _print_moves(moves: Sequence[Move], machine: tuple[float, float, float] | None) -> None:
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
    if machine is None:
        part = "no engine of the table is unchanged, so these ratios include what the machine itself changed"
    else:
        part = f"the machine's part: unchanged engines take {format_ratio(*machine)} of their old time"
    console.print(part, highlight=False, soft_wrap=True)
    moved = sum(move.old for move in moves if move.verdict in ("FASTER", "SLOWER"))
    console.print(
        f"{moved} old times are of kernels that have moved. The same `latbench sweep` as before times all old points "
        "again",
        highlight=False,
        soft_wrap=True,
    )
