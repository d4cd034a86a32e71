"""A sweep: measures points block by block and writes each finished block to the table at once.

A block is a layer's shape; shapes of few points share one. Each engine has a process of its own. All points of a
block are prepared and checked first, and then sampled in turn. A failure is a row as well, and a kernel that has
killed its process twice is not tried again in the run. Points that the table has already are skipped, so the same
command continues an interrupted sweep. A `Bench` measures blocks, on this machine or on a node
(`latbench.sweeping.cluster`); a `Sweep` keeps the records and writes the rows.

Fixed work is timed every few bursts (`latbench.sweeping.roofline_pace`). Each row says how much slower than usual it
was (reference_ratio), and has a column with the time corrected for that. A point that was timed in a slow spell is
measured again. Bursts during which the host had moved the cores apart do not count
(`latbench.sweeping.core_placement`). Times that are impossible, or far off their neighbours, get a status
(`latbench.tables.plausibility`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latbench.base.files import delay_interrupts, remove_abandoned
from latbench.base.number_format import format_seconds
from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.runners.device_lock import WAIT_SECONDS, lock_device
from latbench.sweeping.bench import Bench
from latbench.sweeping.settings import (
    CPU_SETTINGS,
    DEFAULT_OPTIONS,
    Progress,
    Row,
    SweepOptions,
    SweepSettings,
    SweepStopped,
    SweepSummary,
    TimeLeft,
    TimeUsedUp,
)
from latbench.sweeping.sweep_machine import SweepMachine
from latbench.tables.plausibility import SPIKE_RATIO, find_spikes
from latbench.tables.point_ids import convert_to_plain, hash_key
from latbench.tables.schema import DISTURBED, FINISHED, KEY_COLUMNS, SCHEMA, TIMED
from latbench.tables.storage import Place
from latbench.tables.table import GrowingTable
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.workloads.points import Point, group_into_blocks

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)

PointChooser = Callable[["pd.DataFrame | None"], Iterable[Point]]
"""Names the points to measure next, given the table so far without its samples (None while there is none). It is
called until it names nothing new."""
_CHOSEN_BY = [field.name for field in SCHEMA if field.name != "samples_seconds"]


def _describe_row(row: Mapping[str, Any]) -> str:
    """Return a measured row as one line."""
    layer = f"{row['pattern']} {row['sparsity_target']:g} {row['op']} {row['m']}x{row['k']} on {row['n']}"
    samples = row.get("samples_seconds")
    time = "" if samples is None or not len(samples) else f", {format_seconds(float(np.median(samples)))}"
    return f"measured {row['backend']} {row['kernel_requested']} {layer}: {row['status']}{time}"


def choose_in_order(blocks: Sequence[Sequence[Point]]) -> PointChooser:
    """Return a PointChooser that names one block after the other. No block may be empty."""
    left = iter(blocks)
    return lambda table: next(left, [])


def run_sweep(
    folder: Place,
    choose: PointChooser,
    *,
    machine: SweepMachine,
    settings: SweepSettings = CPU_SETTINGS,
    options: SweepOptions = DEFAULT_OPTIONS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
) -> SweepSummary:
    """Measure points on `machine` and write them to the table in `folder`.

    Points that have a finished row in the table are skipped.

    Parameters
    ----------
    folder
        The table; it is created where it does not exist.
    choose
        Names the points.
    machine
        Measures them.
    settings
        How carefully each point is measured.
    options
        Order, limits and repetitions.
    report
        Gets the progress.
    saved
        Is called after each block that was written.

    Returns
    -------
    SweepSummary
        The status of each measured point, and the number of skipped ones.

    Raises
    ------
    SweepStopped
        The sweep was interrupted or its time is over; everything finished is written.
    UsageError
        The table is of another device.
    BadData
        The table cannot be read. Damage that comes during the sweep is raised at its end.
    EnvironmentUnusable
        The disk refuses a block, which alone is lost; or another process measures on the device.
    """
    with (
        lock_machine(machine, options.wait_seconds, report),
        Bench(machine, options.seed, settings) as bench,
    ):
        return _carry_out(Sweep(folder, LocalSite(bench), settings, options, report, saved), choose)


def run_sweep_on_cluster(
    folder: Place,
    choose: PointChooser,
    *,
    elsewhere: MeasurementSite,
    settings: SweepSettings = CPU_SETTINGS,
    options: SweepOptions = DEFAULT_OPTIONS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
) -> SweepSummary:
    """Measure several blocks at a time `elsewhere`; this process writes the table.

    Raises SweepStopped also when no node is left; all else is as in `run_sweep`.
    """
    # Each node locks its own device; this lock is for the table, which needs one writer at a time.
    table = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with lock_device(elsewhere.device, table, wait_seconds=options.wait_seconds, waiting=_waiting(report)):
        return _carry_out(Sweep(folder, elsewhere, settings, options, report, saved), choose)


def lock_machine(
    machine: SweepMachine,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context that locks the machine's device exclusively.

    Raises EnvironmentUnusable where another process has held the lock for `wait_seconds`.
    """
    unit = machine.environment()["device_uuid_hash"]
    return lock_device(machine.device, unit, wait_seconds=wait_seconds, waiting=_waiting(report))


def _waiting(report: Callable[[Progress], None]) -> Callable[[str], None]:
    return lambda holder: report(Progress(0, 0, f"waiting: {holder}"))


def _carry_out(sweep: Sweep, choose: PointChooser) -> SweepSummary:
    """Measure until `choose` names nothing new; measure disturbed points again after each choice or at the end."""
    if isinstance(sweep.folder, Path):  # a store never holds partial objects
        remove_abandoned(sweep.folder)
    if isinstance(sweep.folder, Path) and sweep.folder.is_file():
        raise UsageError(f"{sweep.folder} is a file, but a sweep writes into a folder: give one with -o")
    measured: list[Point] = []
    try:
        while (wanted := sweep.select_new(choose(sweep.table()))) is not None:
            if todo := sweep.select_remaining(wanted):
                sweep.make_folder()
                sweep.measure_all(todo)
                measured += todo
            if not sweep.options.chances_last:
                sweep.measure_disturbed(todo)
        if sweep.options.chances_last:
            sweep.measure_disturbed(measured)
    except (KeyboardInterrupt, TimeUsedUp, Incomplete) as end:
        why = "interrupted" if isinstance(end, KeyboardInterrupt) else str(end)
        kept = f"{sweep.done} of {sweep.total} points are in {sweep.folder}"
        stopped = SweepStopped(f"{why}: {kept}, and the same command goes on from there")
        stopped.summary = SweepSummary(sweep.statuses, len(sweep.skipped))
        stopped.interrupted = isinstance(end, KeyboardInterrupt)
        raise stopped from None
    if sweep.growing_table.damage is not None:  # damage that came during the sweep
        raise sweep.growing_table.damage
    return SweepSummary(sweep.statuses, len(sweep.skipped))


class MeasurementSite(Protocol):
    """A place where blocks are measured: this machine, or a cluster."""

    @property
    def device(self) -> str:
        """The device's name in tables."""

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return for each row of a table whether it timed the present versions of the engines."""

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """Measure `points` block by block and pass the rows of each block to `sweep.write_block`.

        Raises TimeUsedUp when `sweep.check_time` does.
        """


class Sweep:
    """The records of one run: which points have a row, and how much time is left."""

    def __init__(
        self,
        folder: Place,
        site: MeasurementSite,
        settings: SweepSettings,
        options: SweepOptions,
        report: Callable[[Progress], None],
        saved: Callable[[], None],
    ) -> None:
        self.finished = FINISHED if options.remeasure else (*FINISHED, "noisy")
        self.folder, self.site, self.settings, self.options = folder, site, settings, options
        self._report, self._saved = report, saved
        self.statuses: dict[str, str] = {}
        self.skipped: set[str] = set()
        self.run_id = uuid.uuid4().hex[:12]
        self.end = None if options.time_budget is None else monotonic() + options.time_budget
        self.growing_table = GrowingTable(folder, _CHOSEN_BY)
        self.newest_starts: dict[str, datetime] = {}  # start of each point's newest row, by point_id
        self.total = 0
        self.repeated = ""  # what is said after each activity while points are measured again
        self._named: set[str] = set()  # all points named so far, by point_id
        self.block = 0
        self.spikes: dict[str, float] = {}  # medians of points with the status spike, by point_id
        self.curves: dict[tuple[Any, ...], dict[float, float]] = {}  # medians by sparsity

    @property
    def done(self) -> int:
        """How many points have a row."""
        return len(self.statuses) + len(self.skipped)

    def table(self) -> pd.DataFrame | None:
        """Return the table so far, without rows of other versions of the engines; None while there is none."""
        table = self._every_row()
        return None if table is None else table[self.site.current(table)]

    def _every_row(self) -> pd.DataFrame | None:
        table = self.growing_table.frame()
        if table is None:
            return None
        others = set(table["device"]) - {self.site.device}
        if others:
            raise UsageError(
                f"{self.folder} is a table of {', '.join(sorted(others))}, and what measures now is "
                f"{self.site.device}: give another folder with -o"
            )
        return table

    def select_new(self, points: Iterable[Point]) -> list[Point] | None:
        """Return `points`, or None if the run knows all of them already."""
        wanted = list(points)
        ids = {point.id for point in wanted}
        if ids <= self._named:
            return None
        self._named |= ids
        return wanted

    def select_remaining(self, points: Iterable[Point]) -> list[Point]:
        """Return the points without a finished row that this run has not tried yet."""
        wanted = {point.id: point for point in points}
        table = self.table()
        finished = set() if table is None else set(table["point_id"][table["status"].isin(self.finished)])
        finished = set() if self.options.again else finished - self._find_outranked(table)
        self.skipped |= (wanted.keys() & finished) - self.statuses.keys()
        left = {key: point for key, point in wanted.items() if key not in finished and key not in self.statuses}
        every = self._every_row()
        if table is not None and every is not None and left:
            self.newest_starts |= find_newest_starts(every, left.keys())
            self._recall(table, left.values())
        return list(left.values())

    def _find_outranked(self, table: pd.DataFrame | None) -> set[str]:
        """Return the points of which readers take an old time, because the one of the present versions is noisy."""
        from latbench.workloads.old_times import select_old_times  # with pandas and scipy

        every = self._every_row()
        if table is None or every is None or len(table) == len(every):
            return set()
        old = select_old_times(every, self.site.current(every))
        return set(old["point_id"]) & set(table["point_id"][table["status"] == "noisy"])

    def make_folder(self) -> None:
        """Create the folder before anything is measured. Raises EnvironmentUnusable where that is impossible."""
        if isinstance(self.folder, Path):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EnvironmentUnusable(f"cannot write {self.folder}: {error.strerror}") from error

    def measure_all(self, points: Sequence[Point], chance: int = 0) -> None:
        """Measure `points` block by block; `chance` counts their earlier tries in this run."""
        named = len({point.id for point in points} | self.statuses.keys()) + len(self.skipped)
        self.total = max(self.options.expected, named)
        self.repeated = " (again, because others disturbed it)" if chance else ""
        self.site.measure(points, self, chance)

    def time_left(self) -> TimeLeft:
        """Return the limits of this run's requests."""
        return TimeLeft(self.seconds_left, lambda: None if self.end is None else self.end - monotonic())

    def measure_disturbed(self, points: Sequence[Point]) -> None:
        """Measure the disturbed ones of `points` again, as often as the settings allow."""
        for chance in range(1, self.settings.noisy_chances + 1):
            again = [point for point in points if self.statuses[point.id] in DISTURBED]
            self.measure_all(again, chance)

    def seconds_left(self) -> float | None:
        """Return the seconds for what begins now; None: no limit.

        The first block of a run has no limit, because a run without any result could never continue.
        """
        return self.end - monotonic() if self.end is not None and self.statuses else None

    def check_time(self, even_first: bool = False) -> None:
        """Raise TimeUsedUp when the time is over and something is measured; with `even_first` in any case."""
        if self.end is not None and (self.statuses or even_first) and monotonic() >= self.end:
            raise TimeUsedUp

    def tell(self, activity: str, finished: int = 0) -> None:
        """Report the present activity; `finished` points have an outcome that is not kept yet."""
        self._report(Progress(min(self.done + finished, self.total), self.total, activity + self.repeated))

    def write_block(self, environment: Mapping[str, Any] | None, rows: Sequence[Row]) -> None:
        """Write the rows of a block as a part of the table; `environment` is None if nothing was measured."""
        rows = date_after(self.newest_starts, ({**row, "run_id": self.run_id, "block": self.block} for row in rows))
        self._judge_spikes(rows)
        with delay_interrupts():
            if environment is not None:
                write_environment(self.folder, environment)
            write_part(self.folder, rows)
            for row in rows:
                _LOG.info(_describe_row(row))
            self.statuses |= {hash_key(row): row["status"] for row in rows}
            self.newest_starts |= {hash_key(row): row["started_at"] for row in rows}
            self.block += 1
            self._saved()

    def _judge_spikes(self, rows: list[dict[str, Any]]) -> None:
        """Give a point far above its neighbours in sparsity the status spike, unless a second measurement agrees.

        Its neighbours are of this block, or of earlier blocks and runs. Points of one curve mostly share a block, but
        an adaptive sweep returns to it. A written row stays as it is.
        """
        timed = [row for row in rows if row["status"] in TIMED]
        for row in timed:
            self.curves.setdefault(_curve(row), {})[row["sparsity_target"]] = float(np.median(row["samples_seconds"]))
        for row in timed:
            medians, key = self.curves[_curve(row)], hash_key(row)
            if row["sparsity_target"] not in find_spikes(medians):
                continue
            now, before = medians[row["sparsity_target"]], self.spikes.get(key, 0.0)
            if before / SPIKE_RATIO < now < before * SPIKE_RATIO:
                row["flags"] = "+".join(flag for flag in (row["flags"], "spike") if flag)
            else:
                self.spikes[key] = now
                row |= {"status": "spike", "error": f"{SPIKE_RATIO} times its neighbours in sparsity, or more"}

    def _recall(self, table: pd.DataFrame, points: Iterable[Point]) -> None:
        """Read what earlier runs found on the curves of `points`, to judge spikes."""
        wanted = {_curve(point.key()) for point in points} - self.curves.keys()
        alike = [(place, {key[place] for key in wanted}) for place in range(len(_CURVE))]
        rows = table[table["status"].isin((*TIMED, "spike")) & table["median_seconds"].notna()]
        for place, values in alike:  # filter column by column, so that few rows are left
            if None not in values:
                rows = rows[rows[_CURVE[place].name].isin(values)]
        for row in rows.sort_values("started_at", kind="stable").to_dict("records"):
            if (key := _curve(row)) in wanted:
                if row["status"] == "spike":
                    self.spikes[row["point_id"]] = row["median_seconds"]
                else:
                    self.curves.setdefault(key, {})[row["sparsity_target"]] = row["median_seconds"]


class LocalSite:
    """This machine, in this process."""

    def __init__(self, bench: Bench) -> None:
        self.device = bench.machine.device
        self.bench = bench

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See MeasurementSite."""
        return self.bench.machine.current(table)

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """See MeasurementSite."""
        for block in group_into_blocks(points, sweep.options.seed, sweep.settings.block_points):
            for chunk in self.bench.split_to_fit(block):
                sweep.check_time(even_first=True)
                self.bench.measure_block(
                    chunk, sweep.write_block, chance=chance, tell=sweep.tell, time_left=sweep.time_left()
                )


_CURVE = [field for field in KEY_COLUMNS if field.name != "sparsity_target"]


def _curve(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return a row's key without its sparsity, equal for a frame's row and a new one."""
    return tuple(convert_to_plain(field.type, row.get(field.name)) for field in _CURVE)
