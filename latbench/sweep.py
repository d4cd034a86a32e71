"""A sweep: measures points block by block and writes each finished block to the table at once.

A block is a layer's shape; shapes of few points share one. Each engine has a process of its own; all points of a
block are prepared and checked first, and then sampled in turn. What fails is a row as well, and a kernel that has
killed its process twice is left alone for the rest of the run. A point that the table has already is skipped, so that
the same sweep goes on where it was stopped, in whatever way it was.

Every few bursts fixed work is timed (`latbench.pace`). How much slower it is than usual stands in each row
(reference_ratio), and the time corrected for it in a column of its own; a point that was timed in a slow spell gets
other chances. What is not physically possible, or far off its neighbours, is a status (`latbench.gates`).
"""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from latbench import backends, cgroups, devices, gates, measure, plan, tables
from latbench.backends import reference
from latbench.ceilings import Ceilings, Kept
from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.least_work import inside_share
from latbench.pace import Pace
from latbench.places import Place
from latbench.plan import Point
from latbench.runners.local import Prepared, TaskFailed, Worker, WorkerDied, device_lock
from sparse_kernels.cpu.target import rotated_bytes

if TYPE_CHECKING:
    import pandas as pd

Choose = Callable[["pd.DataFrame | None"], Iterable[Point]]
"""What to measure next, given the table so far without its samples (None while there is none); called until it names
nothing new.
"""
_CHOSEN_BY = [field.name for field in tables.SCHEMA if field.name != "samples_seconds"]

# A rerun measures a point again unless it has a row with one of these: errors may be gone, and so may noise.
FINISHED = ("ok", "unsupported", "incorrect")

NOISY_CHANCES = 3  # disturbances come in spells, and a later try is often a quiet one

PREPARE = "latbench.backends:prepare"  # what a worker is asked to do with a point

PREPARE_SECONDS = 300.0  # compiling and tuning a kernel takes seconds; this is a hang
BURST_SECONDS = 120.0  # for one of Settings.round_seconds

MOST_DEATHS = 2  # of workers, by a backend's kernels for one format: the next would cost as long again

_FAILURES = {
    "Unsupported": "unsupported", "WrongResult": "incorrect", "MemoryError": "oom", "OutOfMemoryError": "oom",
}  # fmt: skip


class Machine(Protocol):
    """What a sweep measures on; `Cpu` here, a GPU in `latbench.gpu.machine`."""

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

    def environment(self) -> dict[str, Any]:
        """The row of env.parquet."""

    def version(self, backend: str) -> str | None:
        """What stands in the column backend_version."""

    def process(self, backend: str) -> str:
        """The name of the process that runs a backend; several may share one."""

    def worker(self, process: str) -> Worker:
        """A process of that name, not yet started."""

    def watch(self) -> Callable[[], dict[str, Any]]:
        """Begins to watch the whole machine; call the result for the telemetry columns of the time since."""

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """The telemetry columns of one row, from what its bursts reported."""

    def pace(self) -> Pace | None:
        """The fixed work that is timed every few bursts; None where the device tells itself when it is slow."""

    def available_bytes(self) -> float:
        """The memory that points of one block may take together."""

    def needed_bytes(self, point: Point) -> float:
        """About what one of them takes."""


class Cpu:
    """This machine's CPU, with `threads` threads for each engine."""

    timer = "perf_counter"
    disturbed_status = "noisy"
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

    def version(self, backend: str) -> str | None:
        """See Machine."""
        return backends.version(backend)

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

    def pace(self) -> Pace:
        """A dense product and a sum over memory; the ceilings of the CPU, which are measured when there are none."""
        worker = Worker(threads=self.threads, name="reference")

        def find() -> Ceilings:
            found: Ceilings = worker.call("latbench.backends.reference:find", self.threads)
            return found

        try:
            return Pace(worker, Kept(self.device, self.threads, reference.WORK, find))
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
    """

    rel_error: float = 0.01
    max_seconds: float = 0.4
    round_seconds: float = 0.015
    block_points: int = 24


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


class Stopped(Incomplete):
    """A sweep that was interrupted, or used up its time; `summary` is of what it measured."""

    summary: Summary


def run(
    folder: Place,
    choose: Choose,
    *,
    machine: Machine,
    seed: int = 0,
    settings: Settings = Settings(),
    time_budget: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    saved: Callable[[], None] = lambda: None,
) -> Summary:
    """Measure what `choose` names on `machine` and write it to the table in `folder`; `saved` is called after every
    block.

    Raises Stopped, an Incomplete, with everything finished written, when interrupted or when `time_budget` seconds
    are over before the points are; UsageError if the table is of another device, BadData if it cannot be read;
    EnvironmentUnusable where the disk refuses, which costs the block that could not be written and no other.
    """
    device = machine.device

    def waiting() -> None:
        report(Progress(0, 0, f"waiting: another latbench process measures on {device}"))

    with device_lock(device, waiting=waiting), _Engines(machine) as engines:
        _remove_leftovers(folder)
        sweep = _Sweep(folder, machine, engines, seed, settings, report, saved, time_budget)
        try:
            while todo := sweep.remaining(choose(sweep.table())):
                sweep.measure_all(todo)
                for chance in range(1, NOISY_CHANCES + 1):
                    again = [point for point in todo if sweep.statuses[point.id] in ("noisy", "spike")]
                    sweep.measure_all(again, last=chance == NOISY_CHANCES)
        except (KeyboardInterrupt, _TimeUsedUp) as end:
            why = "interrupted" if isinstance(end, KeyboardInterrupt) else "the time budget is used up"
            kept = f"{sweep.done} of {sweep.total} points are in {folder}"
            stopped = Stopped(f"{why}: {kept}, and the same command goes on from there")
            stopped.summary = Summary(sweep.statuses, len(sweep.skipped))
            raise stopped from None
        return Summary(sweep.statuses, len(sweep.skipped))


class _TimeUsedUp(Exception):
    """The time budget of a run is over."""


class _Sweep:
    """The state of one run: what has a row by now, and where time goes."""

    def __init__(
        self,
        folder: Place,
        machine: Machine,
        engines: _Engines,
        seed: int,
        settings: Settings,
        report: Callable[[Progress], None],
        saved: Callable[[], None],
        time_budget: float | None,
    ) -> None:
        self.folder, self.machine, self.seed, self.settings = folder, machine, seed, settings
        self.engines, self.report, self.saved = engines, report, saved
        self.statuses: dict[str, str] = {}
        self.skipped: set[str] = set()
        self.deaths: dict[tuple[str, str], list[str]] = {}  # of workers, with their reasons, by backend and format
        self.run_id = uuid.uuid4().hex[:12]
        self.environment = machine.environment()
        self.end = None if time_budget is None else monotonic() + time_budget
        self.growing = tables.Growing(folder, _CHOSEN_BY)
        self.total = 0
        self.block = 0
        self.last = False
        self.spikes: dict[str, float] = {}  # the median of each point that was one, by its id
        self.curves: dict[tuple[Any, ...], dict[float, float]] = {}  # of this run: medians by sparsity

    @property
    def done(self) -> int:
        """How many points have a row."""
        return len(self.statuses) + len(self.skipped)

    def table(self) -> pd.DataFrame | None:
        """The table so far; None while there is none."""
        table = self.growing.frame()
        if table is None:
            return None
        others = set(table["device"]) - {self.machine.device}
        if others:
            raise UsageError(
                f"{self.folder} is a table of {', '.join(sorted(others))}, and this machine is "
                f"{self.machine.device}: give another folder with -o"
            )
        return table

    def remaining(self, points: Iterable[Point]) -> list[Point]:
        """Of `points` those without a finished row that this run has not tried yet."""
        wanted = {point.id: point for point in points}
        table = self.table()
        finished = set() if table is None else set(table["point_id"][table["status"].isin(FINISHED)])
        self.skipped |= (wanted.keys() & finished) - self.statuses.keys()
        return [point for key, point in wanted.items() if key not in finished and key not in self.statuses]

    def measure_all(self, points: Sequence[Point], last: bool = False) -> None:
        """Measure `points` block by block.

        Where other processes take the cores all the time, a steady median counts as noisy, unless this is the `last`
        chance: then it is what there is, and the row says so in its flags.
        """
        self.last = last
        self.total = len({point.id for point in points} | self.statuses.keys()) + len(self.skipped)
        tables.write_environment(self.folder, self.environment)
        for block in plan.blocks(points, self.seed, self.settings.block_points):
            for chunk in _fitting(block, self.machine.available_bytes(), self.machine.needed_bytes):
                self._check_time(even_first=True)
                self._measure_block(chunk)

    def _check_time(self, even_first: bool = False) -> None:
        """Stop when the time is over. But a run that measures nothing at all would never get anywhere by being
        repeated, so its first block goes on.
        """
        if self.end is not None and (self.statuses or even_first) and monotonic() >= self.end:
            raise _TimeUsedUp

    def _measure_block(self, points: list[Point]) -> None:
        rows: list[dict[str, Any]] = []
        started, watched = datetime.now(UTC), self.machine.watch()
        try:
            for point, outcome in self._outcomes(points):
                rows.append(self._row(point, outcome, len(rows), started))
        finally:
            # Also on the way out of an interruption: what is finished is written.
            if rows:
                state = watched()
                self._judge_spikes(rows)
                tables.write_part(self.folder, [{**state, **row} for row in rows])
                self.statuses |= {tables.point_id(row): row["status"] for row in rows}
                self.saved()
        self.block += 1
        self.engines.drop()

    def _outcomes(self, points: list[Point]) -> Iterator[tuple[Point, _Outcome]]:
        """Each point with its timing, or with how it failed; as they finish."""
        ready: dict[str, Point] = {}
        done = self.done
        for number, point in enumerate(points):
            self.report(Progress(done, self.total, f"preparing: {point}"))
            failure = self._prepare(point)
            if failure is None:
                ready[str(number)] = point
            else:
                yield point, failure
        done += len(points) - len(ready)
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

        finished = measure.interleave(
            {name: sampler(name) for name in ready},
            rel_error=self.settings.rel_error,
            max_seconds=self.settings.max_seconds,
            round_seconds=self.settings.round_seconds,
            order=random.Random(f"{self.seed} {self.block}"),
            between=self.engines.keep_pace,
        )
        activity = f"timing: {len(points)} points from {plan.describe(points[0].shape)} on"
        self.report(Progress(done, self.total, activity))
        for count, (name, timing) in enumerate(finished, start=1):
            self.report(Progress(min(done + count, self.total), self.total, activity))
            point = ready.pop(name)
            yield point, failures.get(name) or self._timed(point, timing)

    def _prepare(self, point: Point) -> _Outcome | None:
        """Get a point ready; if that cannot be, how it failed."""
        self._check_time()
        if (skipped := self._given_up(point)) is not None:
            return skipped
        try:
            self.engines.prepare(point)
        except (TaskFailed, WorkerDied) as error:
            return self._failed(point, error)
        return None

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
        if isinstance(failure, WorkerDied) and failure.reason in ("crash", "timeout"):
            self.deaths.setdefault((point.backend, point.pattern.format), []).append(str(failure))
        return _failed(failure)

    def _given_up(self, point: Point) -> _Outcome | None:
        """The outcome of a point that is not tried, because its like have killed enough workers."""
        deaths = self.deaths.get((point.backend, point.pattern.format), [])
        if len(deaths) < MOST_DEATHS:
            return None
        reason = f"not tried in this run: {len(deaths)} workers died of {point.backend} {point.pattern.format} points"
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
        flags = (
            "preempted" if timing.preempted else "",
            "slow_spell" if slow_spell else "",
            prepared.facts.get("flags"),
        )
        outcome = {
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
            **prepared.facts,
            "flags": "+".join(flag for flag in flags if flag),
        }
        if why is not None:
            return outcome | {"status": "impossible", "error": why, "samples_seconds": None, "burst_error": None}
        return outcome

    def _beside(self, point: Point, timing: measure.Timing, facts: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The columns that compare a time with what the machine can and with its pace meanwhile; whether it was timed
        in a spell in which the machine was slower than in the rest of this sweep.
        """
        pace = self.engines.pace
        if pace is None or "flop_nnz" not in facts or "bytes_min" not in facts:
            return {}, False
        flop, size = facts["flop_nnz"] * inside_share(point.shape), facts["bytes_min"]
        columns = {"roofline_seconds": pace.ceilings.roofline_seconds(flop, size)}
        reference = pace.reference(timing.began, flop, size)
        if reference is None:
            return columns, False
        columns |= {"reference_seconds": reference.seconds, "reference_usual_seconds": reference.usual_seconds}
        return columns, reference.slow_spell

    def _judge_spikes(self, rows: list[dict[str, Any]]) -> None:
        """A point far above its neighbours in sparsity is no time before it has been seen twice.

        Its neighbours are of this block or of earlier ones of this run: those of one curve mostly share a block, but
        an adaptive sweep comes back to it. A row that is written stays as it is, whatever its neighbours turn out to
        be.
        """
        for row in rows:
            first = self.spikes.get(tables.point_id(row))
            if first is not None and row["status"] in tables.TIMED:
                again = float(np.median(row["samples_seconds"]))
                if first / gates.SPIKE < again < first * gates.SPIKE:
                    row["flags"] = "+".join(flag for flag in (row["flags"], "spike") if flag)
        for row in rows:
            if row["status"] in tables.TIMED:
                self.curves.setdefault(_curve(row), {})[row["sparsity_target"]] = float(
                    np.median(row["samples_seconds"])
                )
        for row in [row for row in rows if row["status"] in tables.TIMED]:
            medians, key = self.curves[_curve(row)], tables.point_id(row)
            if key not in self.spikes and row["sparsity_target"] in gates.spikes(medians):
                self.spikes[key] = medians[row["sparsity_target"]]
                row |= {"status": "spike", "error": f"{gates.SPIKE} times its neighbours in sparsity, or more"}

    def _status(self, known: bool, disturbed: bool) -> str:
        if disturbed and self.machine.disturbed_status != "noisy":
            return self.machine.disturbed_status
        return "ok" if known and (self.last or not disturbed) else "noisy"

    def _row(self, point: Point, outcome: _Outcome, seq: int, started: datetime) -> dict[str, Any]:
        return {
            **point.key(),
            "run_id": self.run_id,
            "env_id": self.environment["env_id"],
            "block": self.block,
            "seq": seq,
            "started_at": started,
            "backend_version": self.machine.version(point.backend),
            "device_uuid_hash": self.environment["device_uuid_hash"],
            "timer": self.machine.timer,
            "pinning": "none",
            **outcome,
        }


_Outcome = dict[str, Any]


def _curve(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is left of a row's key without its sparsity."""
    return tuple(row.get(field.name) for field in tables.KEY if field.name != "sparsity_target")


def _failed(failure: TaskFailed | WorkerDied) -> _Outcome:
    if isinstance(failure, WorkerDied):
        status = failure.reason if failure.reason in ("timeout", "oom") else "error"
        return {"status": status, "error": str(failure)}
    status = _FAILURES.get(failure.kind, "error")
    return {"status": status, "error": failure.message if status in ("unsupported", "incorrect") else str(failure)}


class _Engines:
    """A machine's workers, and in them the points of the block."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pace: Pace | None = None
        self._asked_for_pace = False
        self._workers: dict[str, Worker] = {}
        self._prepared: dict[Point, Prepared] = {}

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        if self.pace is not None:
            self.pace.close()

    def keep_pace(self) -> None:
        """Before every burst: time the reference kernels, if it is their turn."""
        if not self._asked_for_pace:
            self._asked_for_pace = True
            # Points are worth having without it: their rows then say nothing of the machine's pace.
            with contextlib.suppress(TaskFailed, WorkerDied):
                self.pace = self.machine.pace()
        if self.pace is not None:
            self.pace.turn()

    def prepare(self, point: Point) -> None:
        """Get the point ready in the worker of its engine."""
        worker = self._worker(point.backend)
        seconds = self.machine.prepare_seconds + (0 if worker.generation else self.machine.start_seconds)
        self._prepared[point] = worker.prepare(self.machine.task, point, timeout=seconds)

    def prepared(self, point: Point) -> Prepared:
        """The point as it was prepared last; its worker may be gone since."""
        return self._prepared[point]

    def holds(self, point: Point) -> bool:
        """Whether the point is ready: false once the worker that had it died."""
        return self._worker(point.backend).holds(self._prepared[point])

    def burst(self, point: Point, seconds: float) -> measure.Burst:
        """Time the point for about `seconds`."""
        worker = self._worker(point.backend)
        return worker.burst(self._prepared[point], seconds, timeout=self.machine.burst_seconds)

    def drop(self) -> None:
        """Free all points; the workers stay, with what they imported and compiled."""
        for worker in self._workers.values():
            with contextlib.suppress(WorkerDied):  # then all is freed
                worker.drop(self._prepared.values(), timeout=self.machine.burst_seconds)
        self._prepared.clear()

    def _worker(self, backend: str) -> Worker:
        process = self.machine.process(backend)
        if process not in self._workers:
            self._workers[process] = self.machine.worker(process)
        return self._workers[process]


def _needed_bytes(point: Point) -> float:
    shape = point.shape
    weight, activations = 4 * shape.m * shape.k, 4 * shape.n * (shape.m + shape.k)
    return 3 * weight + 2 * rotated_bytes() + 2 * activations


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


def _remove_leftovers(folder: Place) -> None:
    """What a killed sweep was writing; nothing else writes here while the device is locked. A store has nothing left:
    an object is there when it is whole.
    """
    for leftover in folder.glob(".*.parquet.*.tmp") if isinstance(folder, Path) else ():
        try:
            leftover.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {folder}: {error.strerror or error}") from error
