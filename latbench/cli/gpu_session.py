"""A short visit to a machine with a GPU, in one command: `python -m latbench.cli.gpu_session`, which `make gpu` runs.

It installs and downloads nothing. Its steps, in this order and within --seconds altogether:

    smoke    one point of every kernel of every engine, prepared together and sampled in turn. The visit stops if the
             dense baseline or our own kernels fail, because a table of wrong numbers is worth nothing
    sweep    the standard sweep, the most telling points first
    tests    with --tests all: the GPU's own tests

Results lie flat in the output folder. Finished points are there ten seconds later, so a visit that is cut off loses
little:

    table.parquet  env-<id>.json   the table, as `latbench.tables.table` reads it
    summary.txt                    ratios to dense and to each peer, clocks, and where the time went
    log.txt                        the output of the visit
    tests.txt                      the output of pytest

A second call continues the table of the first. Points in the output folder or in `datasets/measured/<device>` are not
measured again. Points of another version of a library, of the driver or of our kernels are.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from latbench.backends.gpu.gpu_installation import explain_driver_refusals, explain_missing, find_installed
from latbench.base.engine_registry import GPU_ENGINES, list_standard
from latbench.base.files import write_bytes_atomically, write_text_atomically
from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError, PromiseMissed, UsageError
from latbench.machines.gpu_names import Gpu
from latbench.machines.nvml import find_first_gpu
from latbench.sweeping.gpu_machine import GPU_SETTINGS, GpuMachine, add_repository_to_path
from latbench.sweeping.gpu_points import list_smoke_points, list_standard_blocks
from latbench.sweeping.gpu_smoke import judge_smoke_points
from latbench.sweeping.gpu_summary import format_gpu_summary
from latbench.sweeping.gpu_tests import GpuTestOutcome, list_failures, run_all_tests
from latbench.sweeping.publisher import Publisher
from latbench.sweeping.settings import Progress, SweepOptions, SweepSettings, SweepStopped
from latbench.sweeping.sweep import choose_in_order, lock_machine, run_sweep
from latbench.sweeping.sweep_machine import SweepMachine
from latbench.tables.table import has_rows, list_environments, read_arrow_table, read_batches, read_table
from latbench.tables.writer import format_parquet, write_environment, write_part
from latbench.timing.sampling import Clock
from latbench.workloads.points import Point

SECONDS = 540.0
TEST_SHARE = 0.35  # of all seconds, at least, for --tests all
RESERVE_SECONDS = 15.0  # for writing and summing up the last block

OUT = "LATBENCH_OUT"
MOST_BYTES = 2 * 2**20  # of the output of pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "datasets" / "measured"

MOST_FAILURES = 15  # printed
MOST_LAPS = 8  # in the summary: the first blocks start engines and compile, later ones are alike


@dataclass
class Budget:
    """The division of a visit's time; `tests`: whether all tests run after the sweep."""

    seconds: float = SECONDS
    clock: Clock = time.monotonic
    tests: bool = False
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """The seconds until the visit must end."""
        return self.began + self.seconds - self.clock()

    @property
    def for_tests(self) -> float:
        """The seconds that the tests may take now: those that the sweep has left."""
        return max(0.0, self.left - RESERVE_SECONDS)

    @property
    def for_sweep(self) -> float:
        """The seconds that the sweep may take now."""
        return max(0.0, self.left - RESERVE_SECONDS - self.tests * TEST_SHARE * self.seconds)


class Stopwatch:
    """Adds up the seconds of each activity of a visit, one at a time."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.laps: list[str] = []
        self._before: dict[str, float] = {}  # the seconds at the end of the last lap
        self._clock = clock
        self._activity, self._began = "", clock()

    def turn_to(self, activity: str) -> None:
        """End the current activity and begin another."""
        now = self._clock()
        if self._activity:
            self.seconds[self._activity] = self.seconds.get(self._activity, 0.0) + now - self._began
        self._activity, self._began = activity, now

    def lap(self, name: str) -> None:
        """Record under `name` the seconds of each activity since the last lap."""
        since = {each: seconds - self._before.get(each, 0.0) for each, seconds in self.seconds.items()}
        took = ", ".join(f"{each} {seconds:.1f} s" for each, seconds in since.items() if seconds >= 0.05)
        self.laps.append(f"{name}: {took or 'no time'}")
        self._before = dict(self.seconds)

    def __str__(self) -> str:
        every = list(self.seconds.items())  # a copy, because another thread adds to them
        return "times: " + ", ".join(f"{activity} {seconds:.0f} s" for activity, seconds in every)


def resume(sources: Sequence[Path], folder: Path, device: str) -> int:
    """Copy the rows of the tables at `sources` into `folder`. A sweep ignores rows of another version.

    A folder without a table is allowed.

    Returns
    -------
    int
        The number of copied rows; a row of several sources counts once.

    Raises
    ------
    UsageError
        If a table is of another device.
    """
    seen: set[tuple[Any, ...]] = set()
    for source in sources:
        if not source.is_dir() or not has_rows(source):
            continue
        rows = [row for batch in read_batches(source) for row in batch.to_pylist()]
        if others := {row["device"] for row in rows} - {device}:
            raise UsageError(
                f"{source} has a table of {', '.join(sorted(others))}, and this machine has {device}: name another "
                "folder"
            )
        fresh = [row for row in rows if (row["point_id"], row["started_at"]) not in seen]
        seen |= {(row["point_id"], row["started_at"]) for row in fresh}
        if fresh:
            write_part(folder, fresh)
        for environment in list_environments(source):
            write_environment(folder, environment)
    return len(seen)


def publish(folder: Path, out: Path, environment: Mapping[str, Any], remarks: Sequence[str]) -> None:
    """Write the table in `folder` to `out` as one file, then its environments, then the summary.

    Each file is replaced atomically. Raises EnvironmentUnusable if the disk refuses.
    """
    if not any(folder.glob("part-*.parquet")):
        return
    write_bytes_atomically(out / "table.parquet", format_parquet(read_arrow_table(folder)))
    for row in list_environments(folder):
        write_environment(out, row)
    write_text_atomically(out / "summary.txt", format_gpu_summary(read_table(folder), environment, list(remarks)))


@dataclass(frozen=True)
class Swept:
    """The outcome of a sweep.

    Attributes
    ----------
    table
        The published table; None if nothing was measured.
    late
        The error to raise if it did not come to its end.
    smoke
        The outcome of the smoke points; None without any.
    interrupted
        Whether the user interrupted it.
    """

    table: pd.DataFrame | None
    late: Incomplete | None = None
    smoke: GpuTestOutcome | None = None
    interrupted: bool = False


class SmokeFailed(Exception):
    """The dense baseline or our own kernels do not work, so nothing more is measured."""


@dataclass(frozen=True)
class Visit:
    """What a visit measures, and where its results go.

    Attributes
    ----------
    machine : SweepMachine
        The GPU.
    blocks : sequence of sequence of Point
        The points of the sweep, the most telling block first.
    out : Path
        Folder of the results.
    budget : Budget
        The time of the visit.
    remarks : sequence of str
        Lines for the summary.
    smoke_points : sequence of Point
        Points that must work before the blocks are measured; none by default.
    sources : sequence of Path
        Tables whose rows count as measured where they are current.
    settings : SweepSettings
        Settings of the sampling.
    watch : Stopwatch
        Adds up the seconds of each activity.
    tell : callable
        Receives lines for the user.
    """

    machine: SweepMachine
    blocks: Sequence[Sequence[Point]]
    out: Path
    budget: Budget
    remarks: Sequence[str] = ()
    smoke_points: Sequence[Point] = ()
    sources: Sequence[Path] = ()
    settings: SweepSettings = GPU_SETTINGS
    watch: Stopwatch = field(default_factory=Stopwatch)
    tell: Callable[[str], None] = lambda line: None

    @property
    def wanted(self) -> int:
        """The number of points."""
        return sum(len(block) for block in (self.smoke_points, *self.blocks))


class SmokeFirst:
    """Chooses the smoke points first, and the blocks in order once these have passed; `outcome` is their outcome."""

    def __init__(self, visit: Visit) -> None:
        self.outcome: GpuTestOutcome | None = None
        self._visit = visit
        self._asked = not visit.smoke_points
        self._in_order = choose_in_order(visit.blocks)

    def __call__(self, table: pd.DataFrame | None) -> Iterable[Point]:
        """Return the next points for a table. Raises SmokeFailed where the smoke points did not pass."""
        if not self._asked:
            self._asked = True
            return self._visit.smoke_points
        if self._visit.smoke_points and self.outcome is None:
            ids = {point.id for point in self._visit.smoke_points}
            self.outcome = judge_smoke_points(None if table is None else table[table["point_id"].isin(ids)])
            for line in self.outcome.output.splitlines():
                self._visit.tell(line)
            self._visit.tell(self.outcome.verdict)
            if self.outcome.status == "failed":
                raise SmokeFailed
        return self._in_order(table)


def measure_visit(visit: Visit) -> Swept:
    """Sweep the smoke points, and then the blocks, until all is measured or the budget ends.

    Raises whatever a sweep raises, but for Incomplete.
    """
    environment, choose = visit.machine.environment(), SmokeFirst(visit)
    with _open_folder() as folder:
        known = resume(visit.sources, folder, visit.machine.device)
        notes = [*visit.remarks, f"{known} rows were there before, {visit.wanted} points are wanted"]

        def write() -> None:
            verdicts = [] if choose.outcome is None else [choose.outcome.verdict]
            laps = visit.watch.laps[:MOST_LAPS]
            publish(folder, visit.out, environment, [*notes, *verdicts, str(visit.watch), *laps])

        with Publisher(write, visit.tell) as publisher:
            if known:
                publisher.changed()
            stopped = _sweep(visit, folder, choose, publisher)
        table = read_table(folder) if any(folder.glob("part-*.parquet")) else None
    interrupted = stopped is not None and stopped.interrupted
    late: Incomplete | None = None
    if stopped is not None:
        late = _unfinished("interrupted" if interrupted else "the time is over", visit.out, visit.machine.device)
    if table is None and not interrupted:
        late = Incomplete("the time was over before anything was measured: allow more --seconds")
    return Swept(table, late, choose.outcome, interrupted)


def _sweep(visit: Visit, folder: Path, choose: SmokeFirst, publisher: Publisher) -> SweepStopped | None:
    """Run the sweep, and publish after each block; return what stopped it before its end, if anything did."""
    watch = visit.watch

    def report(now: Progress) -> None:
        watch.turn_to(now.activity.partition(":")[0])

    def saved() -> None:
        watch.turn_to("writing")
        watch.lap(f"block {len(watch.laps) + 1}")
        publisher.changed()
        visit.tell(f"block {len(watch.laps)} done, {visit.budget.left:.0f} s left")

    try:
        run_sweep(
            folder, choose, machine=visit.machine, settings=visit.settings, report=report, saved=saved,
            options=SweepOptions(time_budget=visit.budget.for_sweep, expected=visit.wanted, chances_last=True),
        )  # fmt: skip
    except SweepStopped as error:
        return error
    except SmokeFailed:
        pass
    return None


def _unfinished(why: str, out: Path, device: str) -> Incomplete:
    return Incomplete(
        f"{why}; {out} has the finished points, and the same command goes on from there; so does one on another "
        f"machine with this table in {MEASURED / device}, or given by --table"
    )


@contextmanager
def _open_folder() -> Iterator[Path]:
    """Make a folder for the table, and delete it in the end."""
    folder = Path(tempfile.mkdtemp(prefix="latbench-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m latbench.cli.gpu_session",
        description="Measure the standard sweep on this machine's GPU, as far as the time allows.",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit for everything, in seconds (default %(default)g)"
    )
    parser.add_argument(
        "--tests", choices=("none", "smoke", "all"), default="smoke",
        help="tests: smoke, one point of every kernel before the sweep (default); all, also the GPU's own tests",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=os.environ.get(OUT), help=f"folder for the results (default: the variable {OUT})"
    )
    parser.add_argument(
        "--table", type=Path,
        help="table whose current points are not measured again (default datasets/measured/<device>)",
    )  # fmt: skip
    return parser.parse_args(given)


def pay_visit(given: Sequence[str] | None = None) -> None:
    """Pay one visit to this machine's GPU. Raises a LatbenchError for the user."""
    asked = parse_arguments(given)
    budget = Budget(asked.seconds, tests=asked.tests == "all")
    if asked.out is None:
        raise UsageError(f"the folder for the results is missing: name it with --out, or in the variable {OUT}")
    if not RESERVE_SECONDS < asked.seconds < math.inf:
        raise UsageError(
            f"--seconds {asked.seconds:g} is too short or not finite: the end of a visit alone takes "
            f"{RESERVE_SECONDS:g} s"
        )
    out: Path = asked.out
    gpu = find_first_gpu()
    if asked.table is not None and not (asked.table.is_dir() and has_rows(asked.table)):
        raise UsageError(f"--table {asked.table} has no table: name a folder with the parts of one")
    add_repository_to_path()
    log = Log(out)
    log(f"{gpu.name}: {budget.seconds:.0f} s, tests: {asked.tests}")
    swept = _measure_gpu(gpu, out, budget, asked, log)
    if swept.table is not None:
        log((out / "summary.txt").read_text())
    tests = None
    if asked.tests == "all" and not swept.interrupted and (swept.smoke is None or swept.smoke.status == "passed"):
        tests = run_all_tests(budget.for_tests)
        write_text_atomically(out / "tests.txt", tests.output[-MOST_BYTES:])
        log(tests.verdict)
        if tests.status == "failed":
            for line in list_failures(tests.output)[:MOST_FAILURES]:
                log(f"  {line[:200]}")
    verdict = judge_visit([each for each in (swept.smoke, tests) if each is not None], swept)
    if verdict is not None:
        raise verdict


def _measure_gpu(gpu: Gpu, out: Path, budget: Budget, asked: argparse.Namespace, log: Log) -> Swept:
    """Start the engines and measure. Raises EnvironmentUnusable without the dense baseline or our kernels."""
    watch = Stopwatch()
    watch.turn_to("starting")
    machine = GpuMachine(gpu)
    try:
        refusals = explain_missing(gpu) | explain_driver_refusals(gpu, find_installed())
        with lock_machine(machine):  # its processes would disturb a sweep that measures there now
            refusals |= machine.start([name for name in find_installed() if name not in refusals])
        usable = [name for name in find_installed() if name not in refusals]
        remarks = [f"{name} is left out: {reason}" for name, reason in refusals.items()]
        for remark in remarks:
            log(remark)
        for name in list_standard(GPU_ENGINES):
            if name in refusals:
                raise EnvironmentUnusable(f"nothing to measure without {name}: {refusals[name]}")
        return measure_visit(
            Visit(
                machine,
                list_standard_blocks(machine.device, usable),
                out,
                budget,
                remarks,
                smoke_points=[] if asked.tests == "none" else list_smoke_points(machine.device, usable),
                sources=(out, asked.table or MEASURED / machine.device),
                watch=watch,
                tell=log,
            )
        )
    finally:
        machine.close()


def judge_visit(outcomes: Sequence[GpuTestOutcome], swept: Swept) -> LatbenchError | None:
    """Return the error that a visit ends with; a wrong result or a failed test comes before unfinished work."""
    wrong = 0 if swept.table is None else int((swept.table["status"] == "incorrect").sum())
    said = "; ".join(outcome.verdict for outcome in outcomes)
    if wrong or any(outcome.status == "failed" for outcome in outcomes):
        counts = f"{wrong} points are incorrect" if swept.table is not None else "nothing was measured"
        return PromiseMissed(f"{'; '.join(filter(None, (said, counts)))}: see log.txt and summary.txt")
    if swept.late is None and any(outcome.status == "late" for outcome in outcomes):
        return Incomplete(f"{said}: see tests.txt")
    return swept.late


class Log:
    """Prints lines to stderr and appends them to log.txt in a folder, which it makes.

    Raises EnvironmentUnusable if it cannot write there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {folder}: {error.strerror}; name another folder") from error

    def __call__(self, line: str) -> None:
        """Print one line and append it to the log."""
        _print(line)
        with (
            contextlib.suppress(OSError),
            self._path.open("a") as file,
        ):  # the writer of the table reports a full disk
            file.write(line + "\n")


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run_visit(given: Sequence[str] | None = None) -> int:
    """Pay a visit and return its exit code; an expected failure is one line on stderr."""
    try:
        pay_visit(given)
    except LatbenchError as error:
        _print(f"latbench: {' '.join(str(error).split())}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_visit())
