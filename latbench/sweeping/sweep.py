"""A sweep: measures points block by block and writes each finished block to the table at once.

A block is a layer's shape; shapes of few points share one. Each engine has a process of its own; all points of a
block are prepared and checked first, and then sampled in turn. What fails is a row as well, and a kernel that has
killed its process twice is left alone for the rest of the run. A point that the table has already is skipped, so that
the same sweep goes on where it was stopped, in whatever way it was. A `Bench` measures blocks, on this machine or on
a node elsewhere (`latbench.sweeping.cluster`); a `Sweep` keeps the books and writes what was measured.

Every few bursts fixed work is timed (`latbench.sweeping.roofline_pace`). How much slower it is than usual stands in
each row (reference_ratio), and the time corrected for it in a column of its own; a point that was timed in a slow
spell gets other chances. Bursts from when a host had moved the cores apart do not count
(`latbench.sweeping.core_placement`). What is not physically possible, or far off its neighbours, is a status
(`latbench.tables.plausibility`).
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latbench.base import files
from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.runners.device_lock import WAIT_SECONDS, device_lock
from latbench.sweeping.bench import Bench
from latbench.sweeping.settings import (
    CPU_SETTINGS,
    Progress,
    Row,
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
from latbench.workloads import points as plan
from latbench.workloads.points import Point

if TYPE_CHECKING:
    import pandas as pd

Choose = Callable[["pd.DataFrame | None"], Iterable[Point]]
"""What to measure next, given the table so far without its samples (None while there is none); called until it names
nothing new.
"""
_CHOSEN_BY = [field.name for field in SCHEMA if field.name != "samples_seconds"]


def in_order(blocks: Sequence[Sequence[Point]]) -> Choose:
    """Return a Choose that gives a sweep one block after the other, in this order. No block may be empty."""
    left = iter(blocks)
    return lambda table: next(left, [])


def run(
    folder: Place,
    choose: Choose,
    *,
    machine: SweepMachine,
    seed: int = 0,
    settings: SweepSettings = CPU_SETTINGS,
    time_budget: float | None = None,
    remeasure: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
    expected: int = 0,
    chances_last: bool = False,
) -> SweepSummary:
    """Measure what `choose` names on `machine` and write it to the table in `folder`; `saved` is called after every
    block. What the table has is skipped, noisy rows too unless they are to be taken again (`remeasure`). `expected`:
    how many points `choose` will name altogether, where it names them by and by; `chances_last`: disturbed points are
    measured again after all others, not after the choice that named them.

    Raises Stopped, an Incomplete, with everything finished written, when interrupted or when `time_budget` seconds
    are over before the points are; UsageError if the table is of another device, BadData if it cannot be read: at
    once, or where it is damaged meanwhile after all is measured;
    EnvironmentUnusable where the disk refuses, which costs the block that could not be written and no other, and
    where another process has measured on the device for `wait_seconds`.
    """
    with alone(machine, wait_seconds, report), Bench(machine, seed, settings) as bench:
        here = _Here(bench)
        return _carry_out(
            Sweep(folder, here, seed, settings, time_budget, remeasure, report, saved, expected),
            choose,
            chances_last,
        )


def spread(
    folder: Place,
    choose: Choose,
    *,
    elsewhere: Where,
    seed: int = 0,
    settings: SweepSettings = CPU_SETTINGS,
    time_budget: float | None = None,
    remeasure: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
    expected: int = 0,
    chances_last: bool = False,
) -> SweepSummary:
    """As `run`, but blocks are measured `elsewhere`, several at a time; this process writes the table.

    Raises Stopped also where nobody is left there to measure.
    """
    # Who measures holds its own device; of writers there may be one a table.
    table = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with device_lock(elsewhere.device, table, wait_seconds=wait_seconds, waiting=_waiting(report)):
        return _carry_out(
            Sweep(folder, elsewhere, seed, settings, time_budget, remeasure, report, saved, expected),
            choose,
            chances_last,
        )


def alone(
    machine: SweepMachine,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other process of this machine measures on the device.

    Raises EnvironmentUnusable where another one has measured there for `wait_seconds`.
    """
    unit = machine.environment()["device_uuid_hash"]
    return device_lock(machine.device, unit, wait_seconds=wait_seconds, waiting=_waiting(report))


def _waiting(report: Callable[[Progress], None]) -> Callable[[str], None]:
    return lambda holder: report(Progress(0, 0, f"waiting: {holder}"))


def _carry_out(sweep: Sweep, choose: Choose, chances_last: bool) -> SweepSummary:
    """Measure until `choose` is content, and what was disturbed a few times more: after each choice, or at last."""
    if isinstance(sweep.folder, Path):  # an object in a store is there when it is whole: nothing is left behind
        files.remove_abandoned(sweep.folder)
    if isinstance(sweep.folder, Path) and sweep.folder.is_file():
        raise UsageError(f"{sweep.folder} is a file, and a table that grows is a folder: give one with -o")
    measured: list[Point] = []
    try:
        while (wanted := sweep.new(choose(sweep.table()))) is not None:
            if todo := sweep.remaining(wanted):
                sweep.make_folder()
                sweep.measure_all(todo)
                measured += todo
            if not chances_last:
                sweep.measure_disturbed(todo)
        if chances_last:
            sweep.measure_disturbed(measured)
    except (KeyboardInterrupt, TimeUsedUp, Incomplete) as end:
        why = "interrupted" if isinstance(end, KeyboardInterrupt) else str(end)
        kept = f"{sweep.done} of {sweep.total} points are in {sweep.folder}"
        stopped = SweepStopped(f"{why}: {kept}, and the same command goes on from there")
        stopped.summary = SweepSummary(sweep.statuses, len(sweep.skipped))
        stopped.interrupted = isinstance(end, KeyboardInterrupt)
        raise stopped from None
    if sweep.growing.damage is not None:  # it came after the start, and has stopped nothing
        raise sweep.growing.damage
    return SweepSummary(sweep.statuses, len(sweep.skipped))


class Where(Protocol):
    """Where blocks are measured: this machine, or several elsewhere."""

    @property
    def device(self) -> str:
        """Its name in tables, the same for all."""

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Of each row of a table, whether it timed versions that are there now."""

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """Measure `points` block by block and give `sweep.keep` the rows of each block. Raises TimeUsedUp when
        `sweep.check_time` does.
        """


class Sweep:
    """The books of one run: what has a row by now, and how much time is left."""

    def __init__(
        self,
        folder: Place,
        where: Where,
        seed: int,
        settings: SweepSettings,
        time_budget: float | None,
        remeasure: bool,
        report: Callable[[Progress], None],
        saved: Callable[[], None],
        expected: int = 0,
    ) -> None:
        self._expected = expected
        self.finished = FINISHED if remeasure else (*FINISHED, "noisy")
        self.folder, self.where, self.seed, self.settings = folder, where, seed, settings
        self._report, self._saved = report, saved
        self.statuses: dict[str, str] = {}
        self.skipped: set[str] = set()
        self.run_id = uuid.uuid4().hex[:12]
        self.end = None if time_budget is None else monotonic() + time_budget
        self.growing = GrowingTable(folder, _CHOSEN_BY)
        self.newest: dict[str, datetime] = {}  # when the newest row of a point was started, by its id
        self.total = 0
        self._named: set[str] = set()  # every point that was ever wanted, by its id
        self.block = 0
        self.spikes: dict[str, float] = {}  # the median of each point that was one, by its id
        self.curves: dict[tuple[Any, ...], dict[float, float]] = {}  # medians by sparsity

    @property
    def done(self) -> int:
        """How many points have a row."""
        return len(self.statuses) + len(self.skipped)

    def table(self) -> pd.DataFrame | None:
        """The table so far, without rows of versions that are not here any more; None while there is none."""
        table = self._every_row()
        return None if table is None else table[self.where.current(table)]

    def _every_row(self) -> pd.DataFrame | None:
        table = self.growing.frame()
        if table is None:
            return None
        others = set(table["device"]) - {self.where.device}
        if others:
            raise UsageError(
                f"{self.folder} is a table of {', '.join(sorted(others))}, and what measures now is "
                f"{self.where.device}: give another folder with -o"
            )
        return table

    def new(self, points: Iterable[Point]) -> list[Point] | None:
        """Return `points`, or None if none of them is wanted for the first time."""
        wanted = list(points)
        ids = {point.id for point in wanted}
        if ids <= self._named:
            return None
        self._named |= ids
        return wanted

    def remaining(self, points: Iterable[Point]) -> list[Point]:
        """Of `points` those without a finished row that this run has not tried yet."""
        wanted = {point.id: point for point in points}
        table = self.table()
        finished = set() if table is None else set(table["point_id"][table["status"].isin(self.finished)])
        self.skipped |= (wanted.keys() & finished) - self.statuses.keys()
        left = {key: point for key, point in wanted.items() if key not in finished and key not in self.statuses}
        every = self._every_row()
        if table is not None and every is not None and left:
            self.newest |= find_newest_starts(every, left.keys())
            self._recall(table, left.values())
        return list(left.values())

    def make_folder(self) -> None:
        """Raises EnvironmentUnusable where that cannot be, before anything is measured that could not be kept."""
        if isinstance(self.folder, Path):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EnvironmentUnusable(f"cannot write {self.folder}: {error.strerror}") from error

    def measure_all(self, points: Sequence[Point], chance: int = 0) -> None:
        """Measure `points` block by block, for the first time or as their so many-th chance after that."""
        named = len({point.id for point in points} | self.statuses.keys()) + len(self.skipped)
        self.total = max(self._expected, named)
        self.where.measure(points, self, chance)

    def time_left(self) -> TimeLeft:
        """What bounds the requests of this run."""
        return TimeLeft(self.seconds_left, lambda: None if self.end is None else self.end - monotonic())

    def measure_disturbed(self, points: Sequence[Point]) -> None:
        """Measure those of `points` again that were disturbed, as often as they have chances."""
        for chance in range(1, self.settings.noisy_chances + 1):
            again = [point for point in points if self.statuses[point.id] in DISTURBED]
            self.measure_all(again, chance)

    def seconds_left(self) -> float | None:
        """How long what is begun now may take: any time where there is no budget. A run that measures nothing at all
        would never get anywhere by being repeated, so its first block goes on.
        """
        return self.end - monotonic() if self.end is not None and self.statuses else None

    def check_time(self, even_first: bool = False) -> None:
        """Raise TimeUsedUp when the time is over, to whoever has measured something; `even_first`: to all."""
        if self.end is not None and (self.statuses or even_first) and monotonic() >= self.end:
            raise TimeUsedUp

    def tell(self, activity: str, finished: int = 0) -> None:
        """Report what is done now; `finished` points have an outcome that is not kept yet."""
        self._report(Progress(min(self.done + finished, self.total), self.total, activity))

    def keep(self, environment: Mapping[str, Any] | None, rows: Sequence[Row]) -> None:
        """Write the rows of a block, measured in `environment` (None: not measured), as a part of the table."""
        rows = date_after(self.newest, ({**row, "run_id": self.run_id, "block": self.block} for row in rows))
        self._judge_spikes(rows)
        with files.uninterrupted():
            if environment is not None:
                write_environment(self.folder, environment)
            write_part(self.folder, rows)
            self.statuses |= {hash_key(row): row["status"] for row in rows}
            self.newest |= {hash_key(row): row["started_at"] for row in rows}
            self.block += 1
            self._saved()

    def _judge_spikes(self, rows: list[dict[str, Any]]) -> None:
        """A point far above its neighbours in sparsity is no time before it has been seen twice, about alike.

        Its neighbours are of this block, or of earlier ones and runs: those of one curve mostly share a block, but an
        adaptive sweep comes back to it. A row that is written stays as it is, whatever its neighbours turn out to be.
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
        """Take from the table what earlier runs found of the curves of `points`, to judge spikes by."""
        wanted = {_curve(point.key()) for point in points} - self.curves.keys()
        alike = [(place, {key[place] for key in wanted}) for place in range(len(_CURVE))]
        rows = table[table["status"].isin((*TIMED, "spike")) & table["median_seconds"].notna()]
        for place, values in alike:  # few are left to look at one by one
            if None not in values:
                rows = rows[rows[_CURVE[place].name].isin(values)]
        for row in rows.sort_values("started_at", kind="stable").to_dict("records"):
            if (key := _curve(row)) in wanted:
                if row["status"] == "spike":
                    self.spikes[row["point_id"]] = row["median_seconds"]
                else:
                    self.curves.setdefault(key, {})[row["sparsity_target"]] = row["median_seconds"]


class _Here:
    """This machine, in this process."""

    def __init__(self, bench: Bench) -> None:
        self.device = bench.machine.device
        self.bench = bench

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See Where."""
        return self.bench.machine.current(table)

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """See Where."""
        for block in plan.blocks(points, sweep.seed, sweep.settings.block_points):
            for chunk in self.bench.fitting(block):
                sweep.check_time(even_first=True)
                self.bench.measure_block(
                    chunk, sweep.keep, chance=chance, tell=sweep.tell, time_left=sweep.time_left()
                )


_CURVE = [field for field in KEY_COLUMNS if field.name != "sparsity_target"]


def _curve(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What is left of a row's key without its sparsity; of a frame's row as of one that was just measured."""
    return tuple(convert_to_plain(field.type, row.get(field.name)) for field in _CURVE)
