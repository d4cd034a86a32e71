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
import queue
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from latbench.backends import installed_engines
from latbench.backends.cpu import cpu_reference, prepare_point
from latbench.base import cgroups, files
from latbench.base.environments import env_id
from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.machines import devices
from latbench.machines.ceilings import Ceilings, Kept
from latbench.runners.device_lock import WAIT_SECONDS, device_lock
from latbench.runners.worker_process import Prepared, TaskFailed, Worker, WorkerDied
from latbench.sweeping import core_placement as placement
from latbench.sweeping.roofline_pace import CpuPace, Roofline
from latbench.tables import plausibility as gates
from latbench.tables import table as tables
from latbench.tables.storage import Place
from latbench.timing import sampling as measure
from latbench.workloads import points as plan
from latbench.workloads.minimum_work import inside_share
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

if TYPE_CHECKING:
    import pandas as pd

Choose = Callable[["pd.DataFrame | None"], Iterable[Point]]
"""What to measure next, given the table so far without its samples (None while there is none); called until it names
nothing new.
"""
_CHOSEN_BY = [field.name for field in tables.SCHEMA if field.name != "samples_seconds"]

# A rerun measures a point again unless it has a row with one of these: the causes of errors may be gone.
# Noise may be gone, too, but a noisy row was given all its chances: it is measured again only if that is asked for.
FINISHED = ("ok", "unsupported", "incorrect")

NOISY_CHANCES = 3  # disturbances come in spells, and a later try is often a quiet one
DISTURBED = ("noisy", "throttled", "spike")  # the statuses that get them

PREPARE = "latbench.backends.cpu.prepare_point:prepare_point"  # what a worker is asked to do with a point

PREPARE_SECONDS = 300.0  # compiling and tuning a kernel takes seconds; this is a hang
BURST_SECONDS = 120.0  # for one of Settings.round_seconds
CEILINGS_SECONDS = 120.0  # to find a CPU's: they take some seconds, most of them compiling

MOST_DEATHS = 2  # of workers, by a backend's kernels for one format: the next would cost as long again

NO_ROOFLINE = "no_roofline"  # flag of a row: what the device can do at most could not be measured

SecondsLeft = Callable[[], "float | None"]
"""How many seconds a run still has; None: any time."""


class TimeLeft(NamedTuple):
    """The seconds that are left for points, which have any time while a run has measured nothing; and for what is
    timed beside them, which is worth no more than the run's budget.
    """

    points: SecondsLeft = lambda: None
    beside: SecondsLeft = lambda: None


_FAILURES = {
    "Unsupported": "unsupported", "WrongResult": "incorrect", "MemoryError": "oom", "OutOfMemoryError": "oom",
}  # fmt: skip


class Machine(Protocol):
    """What a sweep measures on; `Cpu` here, a GPU in `latbench.sweeping.gpu_machine`."""

    @property
    def device(self) -> str:
        """Its name in tables."""

    @property
    def task(self) -> str:
        """The "module:function" that a worker is asked to make a point ready with."""

    @property
    def start_seconds(self) -> float:
        """How much longer it may take in a process that has just started."""

    @property
    def prepare_seconds(self) -> float:
        """How long that may take before it counts as a hang."""

    @property
    def burst_seconds(self) -> float:
        """How long a burst may take before it counts as a hang."""

    @property
    def timer(self) -> str:
        """What a point that gives no timer of its own is timed by."""

    @property
    def disturbed_status(self) -> str:
        """The status of a point that was disturbed whenever it was sampled: noisy or throttled."""

    @property
    def threads_of_processes(self) -> Executor | None:
        """Threads in which the processes of a block get their points ready side by side; None: one after the other.

        The threads outlive the processes: Linux ends a worker with the thread that started it.
        """

    @property
    def host_task(self) -> str | None:
        """The "module:function" that does the part of getting a point ready that leaves the device alone. Processes
        do it side by side; the rest (`task`) takes turns, because it also finds out how long the point takes.
        """

    def environment(self) -> dict[str, Any]:
        """What is told of its environment: texts and numbers by name, env_id among them."""

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """What stands in the column backend_version: of the engine, its libraries and our kernels. `families` are our
        kernel families that were tried until one ran the point; None: all that may be.
        """

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Of each row of a table, whether it timed the versions that are here now."""

    def process(self, backend: str) -> str:
        """The name of the process that runs a backend; several may share one."""

    def worker(self, process: str) -> Worker:
        """A process of that name, not yet started."""

    def watch(self) -> Callable[[], dict[str, Any]]:
        """Begins to watch the whole machine; call the result for the telemetry columns of the time since."""

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """The telemetry columns of one row, from what its bursts reported."""

    def pace(self, seconds_left: SecondsLeft) -> Roofline[Any] | None:
        """What it can do at most, and the fixed work that is timed every few bursts, unless the device tells itself
        when it is slow; None where neither is wanted. `seconds_left` bounds every request to its worker. Raises
        TaskFailed or WorkerDied where it cannot be measured.
        """

    def available_bytes(self) -> float:
        """The memory that points of one block may take together."""

    def needed_bytes(self, point: Point) -> float:
        """About what one of them takes."""


class Cpu:
    """This machine's CPU, with `threads` threads for each engine."""

    timer = "perf_counter"
    disturbed_status = "noisy"
    threads_of_processes = None  # kernels are tuned by timing them, and each has all cores
    host_task = None
    start_seconds = 0.0  # prepare_seconds has room for it
    burst_seconds = BURST_SECONDS

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.device = devices.cpu_device()

    @property
    def task(self) -> str:
        """See Machine."""
        return PREPARE

    @property
    def prepare_seconds(self) -> float:
        """See Machine."""
        return PREPARE_SECONDS

    def environment(self) -> dict[str, Any]:
        """See Machine."""
        return devices.environment(self.threads)

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """See Machine."""
        return installed_engines.find_version(point.backend)

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See Machine: a row of a CPU holds whatever its version."""
        return np.ones(len(table), bool)

    def process(self, backend: str) -> str:
        """One a backend: spinning threads of one would slow the next."""
        return backend

    def worker(self, process: str) -> Worker:
        """See Machine."""
        return Worker(threads=self.threads, name=process)

    def watch(self) -> Callable[[], dict[str, Any]]:
        """See Machine."""
        before = devices.cpu_times()
        return lambda: devices.telemetry(before)

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """Nothing: a CPU is only watched as a whole."""
        return {}

    def pace(self, seconds_left: SecondsLeft) -> CpuPace:
        """A product, a sum over memory, what cores hand on; and the CPU's ceilings, measured when there are none."""
        worker = Worker(threads=self.threads, name="reference")
        worker.seconds_left = seconds_left

        def find() -> Ceilings:
            found: Ceilings = worker.call(
                "latbench.backends.cpu.cpu_reference:measure_ceilings", self.threads, timeout=CEILINGS_SECONDS
            )
            return found

        try:
            return CpuPace(worker, Kept(self.device, self.threads, cpu_reference.WORK, find), self.threads)
        except BaseException:
            worker.close()
            raise

    def available_bytes(self) -> float:
        """See Machine."""
        machine, granted = psutil.virtual_memory().available, cgroups.available_bytes()
        return float(machine if granted is None else min(machine, granted)) / 4

    def needed_bytes(self, point: Point) -> float:
        """See Machine."""
        return _needed_bytes(point)


@dataclass(frozen=True)
class Settings:
    """How carefully a point is measured: until its median is known to `rel_error` or for `max_seconds`, in bursts of
    `round_seconds` that take turns with those of `block_points` points at least.

    In each of several `sessions` the engines' processes are new, and get the points in another order: where in memory
    things lie speeds a point up or slows it down by a percent or two for as long as they lie there.
    """

    rel_error: float = 0.01
    max_seconds: float = 0.4
    round_seconds: float = 0.015
    block_points: int = 24
    sessions: int = 1


SETTINGS = Settings()
"""Of a CPU."""


@dataclass(frozen=True)
class Progress:
    """Where a sweep is: `done` of `total` points have a row; `activity` says what it does now."""

    done: int
    total: int
    activity: str


@dataclass(frozen=True)
class Summary:
    """What a sweep did: the status of each point measured now, by point_id, and how many the table had before."""

    statuses: dict[str, str]
    skipped: int


def in_order(blocks: Sequence[Sequence[Point]]) -> Choose:
    """Return a Choose that gives a sweep one block after the other, in this order. No block may be empty."""
    left = iter(blocks)
    return lambda table: next(left, [])


class Stopped(Incomplete):
    """A sweep that was interrupted (by the user), or used up its time; `summary` is of what it measured."""

    summary: Summary
    interrupted = False


def run(
    folder: Place,
    choose: Choose,
    *,
    machine: Machine,
    seed: int = 0,
    settings: Settings = SETTINGS,
    time_budget: float | None = None,
    remeasure: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
    expected: int = 0,
    chances_last: bool = False,
) -> Summary:
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
    settings: Settings = SETTINGS,
    time_budget: float | None = None,
    remeasure: bool = False,
    wait_seconds: float = WAIT_SECONDS,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
    expected: int = 0,
    chances_last: bool = False,
) -> Summary:
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
    machine: Machine,
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


def _carry_out(sweep: Sweep, choose: Choose, chances_last: bool) -> Summary:
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
        stopped = Stopped(f"{why}: {kept}, and the same command goes on from there")
        stopped.summary = Summary(sweep.statuses, len(sweep.skipped))
        stopped.interrupted = isinstance(end, KeyboardInterrupt)
        raise stopped from None
    if sweep.growing.damage is not None:  # it came after the start, and has stopped nothing
        raise sweep.growing.damage
    return Summary(sweep.statuses, len(sweep.skipped))


class TimeUsedUp(Exception):
    """The time budget of a run is over."""

    def __str__(self) -> str:
        return "the time budget is used up"


Row = dict[str, Any]
"""A row of the table as it is measured, columns by name; its run and its block are filled in when it is kept."""


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
        settings: Settings,
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
        self.growing = tables.Growing(folder, _CHOSEN_BY)
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
            self.newest |= tables.newest(every, left.keys())
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
        for chance in range(1, NOISY_CHANCES + 1):
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
        rows = tables.after(self.newest, ({**row, "run_id": self.run_id, "block": self.block} for row in rows))
        self._judge_spikes(rows)
        with files.uninterrupted():
            if environment is not None:
                tables.write_environment(self.folder, environment)
            tables.write_part(self.folder, rows)
            self.statuses |= {tables.point_id(row): row["status"] for row in rows}
            self.newest |= {tables.point_id(row): row["started_at"] for row in rows}
            self.block += 1
            self._saved()

    def _judge_spikes(self, rows: list[dict[str, Any]]) -> None:
        """A point far above its neighbours in sparsity is no time before it has been seen twice, about alike.

        Its neighbours are of this block, or of earlier ones and runs: those of one curve mostly share a block, but an
        adaptive sweep comes back to it. A row that is written stays as it is, whatever its neighbours turn out to be.
        """
        timed = [row for row in rows if row["status"] in tables.TIMED]
        for row in timed:
            self.curves.setdefault(_curve(row), {})[row["sparsity_target"]] = float(np.median(row["samples_seconds"]))
        for row in timed:
            medians, key = self.curves[_curve(row)], tables.point_id(row)
            if row["sparsity_target"] not in gates.spikes(medians):
                continue
            now, before = medians[row["sparsity_target"]], self.spikes.get(key, 0.0)
            if before / gates.SPIKE < now < before * gates.SPIKE:
                row["flags"] = "+".join(flag for flag in (row["flags"], "spike") if flag)
            else:
                self.spikes[key] = now
                row |= {"status": "spike", "error": f"{gates.SPIKE} times its neighbours in sparsity, or more"}

    def _recall(self, table: pd.DataFrame, points: Iterable[Point]) -> None:
        """Take from the table what earlier runs found of the curves of `points`, to judge spikes by."""
        wanted = {_curve(point.key()) for point in points} - self.curves.keys()
        alike = [(place, {key[place] for key in wanted}) for place in range(len(_CURVE))]
        rows = table[table["status"].isin((*tables.TIMED, "spike")) & table["median_seconds"].notna()]
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


Keep = Callable[[Mapping[str, Any], Sequence[Row]], None]
"""Takes an environment and the rows that were measured in it."""


class Bench:
    """A machine with its engines, ready to measure blocks of points."""

    def __init__(self, machine: Machine, seed: int, settings: Settings) -> None:
        self.machine, self.seed, self.settings = machine, seed, settings
        self._time_left = TimeLeft()
        self.engines = _Engines(machine, TimeLeft(lambda: self._time_left.points(), lambda: self._time_left.beside()))
        self.environment = machine.environment()
        if settings.sessions > 1:
            environment = {**self.environment, "sessions": settings.sessions}
            self.environment = {**environment, "env_id": env_id(environment)}
        self.deaths: dict[str, list[str]] = {}  # of workers, with their reasons, by the kernel that they died of
        self.block = 0
        self.chance = 0
        self._tell: Callable[[str, int], None] = lambda activity, finished: None
        self._turn = threading.Lock()  # of the processes, on the device
        self._stop = threading.Event()  # set when nothing more is to be prepared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engines.close()

    def fitting(self, points: list[Point]) -> Iterator[list[Point]]:
        """`points` in parts that fit into the memory that there is now."""
        return _fitting(points, self.machine.available_bytes(), self.machine.needed_bytes)

    def measure_block(
        self,
        points: list[Point],
        keep: Keep,
        *,
        chance: int = 0,
        tell: Callable[[str, int], None] = lambda activity, finished: None,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Measure `points` in turns, and hand what is finished to `keep`, also on the way out of an interruption.

        Where other processes take the cores all the time, a steady median counts as noisy, unless this is the last
        `chance`: then it is what there is, and the row says so in its flags. `tell` is called with what is done and
        how many points have an outcome. Raises TimeUsedUp when the time is over, also in the middle of a request.
        """
        self.chance, self._tell, self._time_left = chance, tell, time_left or TimeLeft()
        rows: list[Row] = []
        started, watched = datetime.now(UTC), self.machine.watch()
        try:
            for point, outcome in self._outcomes(points):
                rows.append(self._row(point, outcome, len(rows), started))
        finally:
            if rows:
                with files.uninterrupted():
                    state = watched()
                    keep(self.environment, [{**state, **row} for row in rows])
        self.block += 1
        self.engines.drop()

    def _outcomes(self, points: list[Point]) -> Iterator[tuple[Point, _Outcome]]:
        """Each point with its timing, or with how it failed; as they finish."""
        failed = set()
        for number, failure in self._prepare_all(points):
            if failure is not None:
                failed.add(number)
                yield points[number], failure
        ready = {str(number): point for number, point in enumerate(points) if number not in failed}
        done = len(failed)
        # What the death of a worker took along is prepared again here, or at the end of the burst that the death was
        # in: never in a burst of its own, where the time would count.
        failures = self._restore(ready)

        def sampler(name: str) -> measure.Sampler:
            def sample(seconds: float) -> measure.Burst:
                self._check_time()
                failure = failures.get(name) or self._given_up(ready[name])
                if failure is None:
                    try:
                        return self.engines.burst(ready[name], seconds)
                    except (TaskFailed, WorkerDied) as error:
                        failure = self._failed(ready[name], error)
                failures[name] = failure
                others = {other: point for other, point in ready.items() if other not in failures}
                failures.update(self._restore(others))
                return measure.Burst([])

            return sample

        order = random.Random(f"{self.seed} {self.block}")

        def renew(session: int) -> None:
            self._tell(f"preparing again, session {session + 1} of {self.settings.sessions}", done)
            self.engines.restart()
            left = [name for name in ready if name not in failures]
            order.shuffle(left)
            failures.update(self._restore({name: ready[name] for name in left}))

        finished = measure.interleave(
            {name: sampler(name) for name in ready},
            rel_error=self.settings.rel_error,
            max_seconds=self.settings.max_seconds,
            round_seconds=self.settings.round_seconds,
            order=order,
            between=self._keep_pace,
            sessions=self.settings.sessions,
            renew=renew,
        )
        activity = f"timing: {len(points)} points from {plan.describe(points[0].shape)} on"
        self._tell(activity, done)
        for count, (name, timing) in enumerate(finished, start=done + 1):
            self._tell(activity, count)
            done, point = count, ready.pop(name)
            yield point, failures.get(name) or self._timed(point, timing)

    def _keep_pace(self) -> None:
        """Before every burst: time the reference kernels, if it is their turn."""
        try:
            self.engines.keep_pace()
        except (TaskFailed, WorkerDied) as error:
            self._tell(f"no roofline: {error}", 0)

    def _prepare_all(self, points: Sequence[Point]) -> Iterator[tuple[int, _Outcome | None]]:
        """The number of each point as it is ready (None) or has failed: one after the other, or side by side in the
        processes of their engines where the machine has threads for them.
        """
        threads = self.machine.threads_of_processes
        if threads is None:
            for number, point in enumerate(points):
                self._tell(f"preparing: {point}", 0)
                yield number, self._prepare(point)
            return
        by_process: dict[str, list[int]] = {}
        for number, point in enumerate(points):
            by_process.setdefault(self.machine.process(point.backend), []).append(number)
        ended: queue.SimpleQueue[tuple[int, _Outcome | BaseException | None]] = queue.SimpleQueue()
        self._stop.clear()

        def of_one_process(numbers: Sequence[int]) -> None:
            for number in numbers:
                try:
                    ended.put((number, self._prepare(points[number])))
                except BaseException as error:  # noqa: BLE001 - raised again by who waits for it
                    ended.put((number, error))
                    return

        self._tell(f"preparing: {len(points)} points in {len(by_process)} processes", 0)
        running = [threads.submit(of_one_process, numbers) for numbers in by_process.values()]
        try:
            for _ in points:
                number, outcome = ended.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                self._tell(f"preparing: {points[number]} is ready", 0)
                yield number, outcome
        except BaseException:
            self._stop.set()
            self.engines.kill()  # so that no thread waits for an answer any longer
            wait(running)
            self.engines.restart()
            raise
        finally:
            self._stop.clear()

    def _prepare(self, point: Point) -> _Outcome | None:
        """Get a point ready; if that cannot be, how it failed."""
        self._check_time()
        if (skipped := self._given_up(point)) is not None:
            return skipped
        try:
            self.engines.prepare_on_host(point)
            with self._turn:
                self._check_time()
                self.engines.prepare(point)
        except (TaskFailed, WorkerDied) as error:
            return self._failed(point, error)
        return None

    def _check_time(self) -> None:
        left = self._time_left.points()
        if self._stop.is_set() or (left is not None and left <= 0):
            raise TimeUsedUp

    def _restore(self, points: Mapping[str, Point]) -> dict[str, _Outcome]:
        """Prepare again those of `points` that were lost with their workers; how those failed that could not be."""
        failures: dict[str, _Outcome] = {}
        while lost := [
            name for name, point in points.items() if name not in failures and not self.engines.holds(point)
        ]:
            for name in lost:
                if (failure := self._prepare(points[name])) is not None:
                    failures[name] = failure
        return failures

    def _failed(self, point: Point, failure: TaskFailed | WorkerDied) -> _Outcome:
        if isinstance(failure, WorkerDied) and failure.reason == "late":
            raise TimeUsedUp
        if isinstance(failure, WorkerDied) and failure.reason in ("crash", "timeout"):
            self.deaths.setdefault(_kernel(point), []).append(str(failure))
        return _failed(failure)

    def _given_up(self, point: Point) -> _Outcome | None:
        """The outcome of a point that is not tried, because its like have killed enough workers."""
        deaths = self.deaths.get(_kernel(point), [])
        if len(deaths) < MOST_DEATHS:
            return None
        reason = f"not tried in this run: {len(deaths)} workers died of {_kernel(point)} points"
        return {"status": "error", "error": f"{reason}, the last because {deaths[-1]}"}

    def _timed(self, point: Point, timing: measure.Timing) -> _Outcome:
        prepared = self.engines.prepared(point)
        known = timing.relative_error <= measure.NOISY_ERROR
        beside, slow_spell = self._beside(point, timing, prepared.facts)
        why = gates.impossible(timing.samples, beside.get("roofline_seconds"))
        usual, meanwhile = (beside.get(name, 1.0) for name in ("reference_usual_seconds", "reference_seconds"))
        faster_than_usual = meanwhile * gates.MOST_UTILISATION < usual
        if (why is not None or faster_than_usual) and self.engines.pace is not None and self.engines.pace.doubt():
            beside, slow_spell = self._beside(point, timing, prepared.facts)
            why = gates.impossible(timing.samples, beside.get("roofline_seconds"))
        facts = dict(prepared.facts)
        families = facts.pop("kernel_families", None)
        flags = (
            "preempted" if timing.preempted else "",
            "slow_spell" if slow_spell else "",
            NO_ROOFLINE if self.engines.without_pace else "",
            facts.get("flags"),
        )
        outcome = {
            "backend_version": self.machine.version(point, families),
            "status": self._status(known, timing.preempted or slow_spell),
            "stop_reason": timing.stop_reason,
            "samples_seconds": timing.samples,
            "burst_error": timing.burst_error,
            "discarded_samples": timing.discarded,
            "inner_loops": prepared.inner_loops,
            "drift_ratio": timing.drift(),
            "event_reasons": "+".join(timing.reasons),
            **beside,
            **self.machine.columns(timing.states),
            **facts,
            "flags": "+".join(flag for flag in flags if flag),
        }
        if why is not None:
            return outcome | {"status": "impossible", "error": why, "samples_seconds": None, "burst_error": None}
        if outcome["status"] == "throttled":
            by = outcome["event_reasons"] or "what it does not say"
            outcome["error"] = f"slowed down by {by} in try {self.chance + 1} of {1 + NOISY_CHANCES}"
        return outcome

    def _beside(self, point: Point, timing: measure.Timing, facts: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The columns that compare a time with what the machine can and with its pace meanwhile; whether it was timed
        in a spell in which the machine was slower than in the rest of this sweep.
        """
        pace = self.engines.pace
        if pace is None or "flop_nnz" not in facts or "bytes_min" not in facts:
            return {}, False
        flop, size = facts["flop_nnz"] * inside_share(point.shape), facts["bytes_min"]
        columns = {"roofline_seconds": pace.seconds(point, facts.get("kernel_used", ""), flop, size)}
        reference = pace.reference([burst.began for burst in timing.counted], flop, size)
        if reference is None:
            return columns, False
        # Each burst beside the pace around it: by what factor their median was longer than at the usual pace.
        at_usual_pace = [
            reference.usual_seconds / seconds * sample
            for burst, seconds in zip(timing.counted, reference.seconds, strict=True)
            for sample in burst.samples
        ]
        corrected, ratio = float(np.median(at_usual_pace)), 1.0
        if corrected > 0:  # what took no time at all is impossible at any pace
            ratio = float(np.median(timing.samples)) / corrected
        columns |= {
            "reference_seconds": ratio * reference.usual_seconds,
            "reference_usual_seconds": reference.usual_seconds,
        }
        return columns, reference.slow_spell

    def _status(self, known: bool, disturbed: bool) -> str:
        if disturbed and self.machine.disturbed_status != "noisy":
            return self.machine.disturbed_status
        return "ok" if known and (self.chance == NOISY_CHANCES or not disturbed) else "noisy"

    def _row(self, point: Point, outcome: _Outcome, seq: int, started: datetime) -> dict[str, Any]:
        return {
            **point.key(),
            "env_id": self.environment["env_id"],
            "seq": seq,
            "started_at": started,
            "backend_version": self.machine.version(point),
            "device_uuid_hash": self.environment["device_uuid_hash"],
            "timer": self.machine.timer,
            "pinning": "none",
            **outcome,
        }


_Outcome = dict[str, Any]


def _kernel(point: Point) -> str:
    """What a point runs, in words: its backend, the kernel if one was asked for, and its format."""
    asked = "" if point.kernel == "auto" else f" {point.kernel}"
    return f"{point.backend}{asked} {point.pattern.format}"


_CURVE = [field for field in tables.KEY if field.name != "sparsity_target"]


def _curve(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What is left of a row's key without its sparsity; of a frame's row as of one that was just measured."""
    return tuple(tables.plain(field.type, row.get(field.name)) for field in _CURVE)


def _failed(failure: TaskFailed | WorkerDied) -> _Outcome:
    if isinstance(failure, WorkerDied):
        status = failure.reason if failure.reason in ("timeout", "oom") else "error"
        return {"status": status, "error": str(failure)}
    status = _FAILURES.get(failure.kind, "error")
    return {"status": status, "error": failure.message if status in ("unsupported", "incorrect") else str(failure)}


class _Engines:
    """A machine's workers, and in them the points of the block. `time_left` bounds every request to them."""

    def __init__(self, machine: Machine, time_left: TimeLeft) -> None:
        self.machine, self._time_left = machine, time_left
        self.pace: Roofline[Any] | None = None
        self.without_pace = False  # because it could not be had
        self._asked_for_pace = False
        self._workers: dict[str, Worker] = {}
        self._prepared: dict[Point, Prepared] = {}
        self._served: dict[str, int] = {}  # the generation of each worker that was asked for a point

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        if self.pace is not None:
            self.pace.close()

    def kill(self) -> None:
        """Kill the workers while other threads wait for their answers. `restart` when no thread does any more."""
        for worker in list(self._workers.values()):
            worker.kill()

    def restart(self) -> None:
        """End the workers that have points; the next that is asked of them starts new ones."""
        for worker in self._workers.values():
            worker.close()

    def keep_pace(self) -> None:
        """Before every burst: time the reference kernels, if it is their turn. The first time, and then only, raises
        TaskFailed or WorkerDied where there will be none: points are worth having without them, if their rows say so.
        """
        if not self._asked_for_pace:
            self._asked_for_pace = self.without_pace = True
            self.pace = self.machine.pace(self._time_left.beside)
            self.without_pace = False
        if self.pace is not None:
            self.pace.turn()

    def prepare_on_host(self, point: Point) -> None:
        """Do what leaves the device alone, where the machine tells the two apart."""
        if self.machine.host_task is not None:
            worker = self._worker(point.backend)
            worker.call(self.machine.host_task, point, timeout=self._prepare_seconds(worker))

    def prepare(self, point: Point) -> None:
        """Get the point ready in the worker of its engine."""
        worker = self._worker(point.backend)
        seconds = self._prepare_seconds(worker)
        try:
            self._prepared[point] = worker.prepare(self.machine.task, point, timeout=seconds)
        finally:
            self._served[worker.name] = worker.generation

    def _prepare_seconds(self, worker: Worker) -> float:
        """A process may take longer until it has been asked for its first point: it imports and starts the device."""
        served = worker.generation and self._served.get(worker.name) == worker.generation
        return self.machine.prepare_seconds + (0 if served else self.machine.start_seconds)

    def prepared(self, point: Point) -> Prepared:
        """The point as it was prepared last; its worker may be gone since."""
        return self._prepared[point]

    def holds(self, point: Point) -> bool:
        """Whether the point is ready: false once the worker that had it died."""
        return self._worker(point.backend).holds(self._prepared[point])

    def burst(self, point: Point, seconds: float) -> measure.Burst:
        """Time the point for about `seconds`."""
        worker = self._worker(point.backend)
        taken = worker.burst(self._prepared[point], seconds, timeout=self.machine.burst_seconds)
        if self.pace is None:
            return taken
        began = perf_counter()
        apart = self.pace.apart()
        taken = replace(taken, rest_seconds=taken.rest_seconds + perf_counter() - began)  # no time of the point's
        return replace(taken, preempted=True, reasons=(*taken.reasons, placement.APART)) if apart else taken

    def drop(self) -> None:
        """Free all points; the workers stay, with what they imported and compiled."""
        for worker in self._workers.values():
            with contextlib.suppress(WorkerDied):  # then all is freed
                worker.drop(self._prepared.values(), timeout=self.machine.burst_seconds)
        self._prepared.clear()

    def _worker(self, backend: str) -> Worker:
        process = self.machine.process(backend)
        if process not in self._workers:
            self._workers[process] = worker = self.machine.worker(process)
            worker.seconds_left = self._time_left.points
        return self._workers[process]


def _needed_bytes(point: Point) -> float:
    """About what a point takes: its weight, and copies of it until they pass the caches or are as many as there may
    be; an engine may hold each of them twice, as it was given and as it is multiplied. A convolution's go with its
    images, which each thread may lay out.
    """
    shape = point.shape
    weight, activations = 4 * shape.m * shape.k, 4 * shape.n * (shape.m + shape.k)
    packed = weight * min(1.0, 2 * (1 - point.sparsity))  # what is kept brings its place along
    if isinstance(shape, Conv2dShape):
        packed += 4 * shape.batch * shape.c_in * shape.h * shape.w * point.threads
    copies = min(prepare_point.count_cold_bytes() + packed, prepare_point.MOST_COPIES * packed)
    return 3 * weight + 2 * copies + 2 * activations


def _fitting(
    points: list[Point], available: float, needed: Callable[[Point], float] = _needed_bytes
) -> Iterator[list[Point]]:
    """`points` in parts that together need no more than `available` bytes, one point at least."""
    part: list[Point] = []
    total = 0.0
    for point in points:
        if part and total + needed(point) > available:
            yield part
            part, total = [], 0.0
        part.append(point)
        total += needed(point)
    if part:
        yield part
