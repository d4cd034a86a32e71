"""A short visit to a machine with a GPU, in one command: `python -m latbench.cli.gpu_session`, which `make gpu` runs.

Nothing needs to be installed and nothing is fetched. What it does, in this order, within --seconds altogether:

    smoke    one point of every kernel of every engine, prepared together and sampled in turn. Stops where the dense
             baseline or our own kernels fail: a table of wrong numbers is worth nothing
    sweep    the standard sweep, the most telling points first
    tests    with --tests all: the GPU's own tests

Results lie flat in the output folder. Whatever is finished is there ten seconds later, so a visit that is cut off has
lost little:

    table.parquet  env-<id>.json   the table, as `latbench.tables.table` reads it
    summary.txt                    ratios to dense and to each peer, clocks, and where the time went
    log.txt                        what was printed
    tests.txt                      what pytest printed

A second call continues the first one's table: points that the output folder or `datasets/measured/<device>` has are
not measured again, unless they are of another version of a library, of the driver or of our kernels.
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

from latbench.backends.gpu_installation import NEEDED, installed, missing, refused_by_driver
from latbench.base.files import write_bytes_atomically, write_text_atomically
from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError, PromiseMissed, UsageError
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
TEST_SHARE = 0.35  # of all, at least, for the tests where all are asked for
RESERVE_SECONDS = 15.0  # for the last block to be written and summed up

OUT = "LATBENCH_OUT"
MOST_BYTES = 2 * 2**20  # of what pytest printed

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "datasets" / "measured"

MOST_TOLD = 15  # failures
MOST_LAPS = 8  # in the summary: starting and compiling slow the first blocks down, later ones are alike


@dataclass
class Budget:
    """How the time of a visit is shared out. `tests`: whether all tests run after the sweep."""

    seconds: float = SECONDS
    clock: Clock = time.monotonic
    tests: bool = False
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """Seconds until the visit has to be over."""
        return self.began + self.seconds - self.clock()

    @property
    def for_tests(self) -> float:
        """Seconds that the tests may take now: what the sweep has left."""
        return max(0.0, self.left - RESERVE_SECONDS)

    @property
    def for_sweep(self) -> float:
        """Seconds that the sweep may take now."""
        return max(0.0, self.left - RESERVE_SECONDS - self.tests * TEST_SHARE * self.seconds)


class Stopwatch:
    """Adds up the seconds of what a visit does, one thing at a time."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.laps: list[str] = []
        self._before: dict[str, float] = {}  # the seconds at the end of the last lap
        self._clock = clock
        self._activity, self._began = "", clock()

    def turn_to(self, activity: str) -> None:
        """End what was done so far; `activity` begins."""
        now = self._clock()
        if self._activity:
            self.seconds[self._activity] = self.seconds.get(self._activity, 0.0) + now - self._began
        self._activity, self._began = activity, now

    def lap(self, name: str) -> None:
        """Note under `name` what each activity took since the last lap."""
        since = {each: seconds - self._before.get(each, 0.0) for each, seconds in self.seconds.items()}
        took = ", ".join(f"{each} {seconds:.1f} s" for each, seconds in since.items() if seconds >= 0.05)
        self.laps.append(f"{name}: {took or 'no time'}")
        self._before = dict(self.seconds)

    def __str__(self) -> str:
        every = list(self.seconds.items())  # at once: another thread adds to them
        return "times: " + ", ".join(f"{activity} {seconds:.0f} s" for activity, seconds in every)


def resume(sources: Sequence[Path], folder: Path, device: str) -> int:
    """Copy the rows of the tables at `sources` into `folder`. Those of another version count for nothing in a sweep.

    A folder without a table is no failure.

    Returns
    -------
    int
        How many rows were copied; a row that several sources have counts once.

    Raises
    ------
    UsageError
        Where a table is of another device.
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

    Each file is replaced whole. Raises EnvironmentUnusable where the disk refuses.
    """
    if not any(folder.glob("part-*.parquet")):
        return
    write_bytes_atomically(out / "table.parquet", format_parquet(read_arrow_table(folder)))
    for row in list_environments(folder):
        write_environment(out, row)
    write_text_atomically(out / "summary.txt", format_gpu_summary(read_table(folder), environment, list(remarks)))


@dataclass(frozen=True)
class Swept:
    """What a sweep left.

    Attributes
    ----------
    table
        What is published; None if nothing was measured.
    late
        What to say where it did not come to its end.
    smoke
        How the smoke points went; None if there were none.
    interrupted
        Whether the user ended it.
    """

    table: pd.DataFrame | None
    late: Incomplete | None = None
    smoke: GpuTestOutcome | None = None
    interrupted: bool = False


class SmokeFailed(Exception):
    """The dense baseline or our own kernels do not work: nothing more is measured."""


def measure(
    machine: SweepMachine,
    blocks: Sequence[Sequence[Point]],
    out: Path,
    *,
    budget: Budget,
    remarks: Sequence[str] = (),
    smoke_points: Sequence[Point] = (),
    sources: Sequence[Path] = (),
    settings: SweepSettings = GPU_SETTINGS,
    watch: Stopwatch | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Swept:
    """Sweep `smoke_points`, and where they went well `blocks`, into `out`, until all is measured or the budget ends.

    `sources` are tables whose rows count as measured where they are current. Raises whatever a sweep raises, but for
    Incomplete.
    """
    in_order, environment = choose_in_order(blocks), machine.environment()
    wanted = sum(len(block) for block in (smoke_points, *blocks))
    watch = watch or Stopwatch()
    asked = not smoke_points
    judged: list[GpuTestOutcome] = []

    def choose(table: pd.DataFrame | None) -> Iterable[Point]:
        nonlocal asked
        if not asked:
            asked = True
            return smoke_points
        if smoke_points and not judged:
            ids = {point.id for point in smoke_points}
            judged.append(judge_smoke_points(None if table is None else table[table["point_id"].isin(ids)]))
            for line in judged[0].output.splitlines():
                tell(line)
            tell(judged[0].verdict)
            if judged[0].status == "failed":
                raise SmokeFailed
        return in_order(table)

    with _folder() as folder:
        kept = resume(sources, folder, machine.device)
        notes = [*remarks, f"{kept} rows were there before, {wanted} points are wanted"]

        def write() -> None:
            said = [each.verdict for each in judged]
            publish(folder, out, environment, [*notes, *said, str(watch), *watch.laps[:MOST_LAPS]])

        def report(now: Progress) -> None:
            watch.turn_to(now.activity.partition(":")[0])

        late: Incomplete | None = None
        interrupted = False
        with Publisher(write, tell) as publisher:

            def saved() -> None:
                watch.turn_to("writing")
                watch.lap(f"block {len(watch.laps) + 1}")
                publisher.changed()
                tell(f"block {len(watch.laps)} done, {budget.left:.0f} s left")

            if kept:
                publisher.changed()
            try:
                run_sweep(
                    folder, choose, machine=machine, settings=settings, report=report, saved=saved,
                    options=SweepOptions(time_budget=budget.for_sweep, expected=wanted, chances_last=True),
                )  # fmt: skip
            except SweepStopped as error:
                interrupted = error.interrupted
                late = _unfinished("interrupted" if interrupted else "the time is over", out, machine.device)
            except SmokeFailed:
                pass
        table = read_table(folder) if any(folder.glob("part-*.parquet")) else None
        if table is None and not interrupted:
            late = Incomplete("the time was over before anything was measured: give it more --seconds")
        return Swept(table, late, judged[0] if judged else None, interrupted)


def _unfinished(why: str, out: Path, device: str) -> Incomplete:
    return Incomplete(
        f"{why}; {out} has what was measured, and the same command goes on from there; so does one on another "
        f"machine that finds this table in {MEASURED / device}, or by --table"
    )


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="latbench-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m latbench.cli.gpu_session",
        description="Measure the standard sweep on this machine's GPU, as far as the time allows.",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything (default %(default)g)")
    parser.add_argument(
        "--tests", choices=("none", "smoke", "all"), default="smoke",
        help="smoke: one point of every kernel before the sweep (default); all: the GPU's own tests after it, too",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=os.environ.get(OUT), help=f"folder for the results (default: the variable {OUT})"
    )
    parser.add_argument(
        "--table", type=Path,
        help="table whose points are not measured again where they are current (default datasets/measured/<device>)",
    )  # fmt: skip
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Pay one visit to this machine's GPU; raises what is to be said to the user."""
    asked = arguments(given)
    budget = Budget(asked.seconds, tests=asked.tests == "all")
    if asked.out is None:
        raise UsageError(f"there is no folder for the results: name one with --out, or in the variable {OUT}")
    if not RESERVE_SECONDS < asked.seconds < math.inf:
        raise UsageError(
            f"--seconds {asked.seconds:g} is too short, or no number: the end alone needs {RESERVE_SECONDS:g}"
        )
    out: Path = asked.out
    gpu = find_first_gpu()
    if asked.table is not None and not (asked.table.is_dir() and has_rows(asked.table)):
        raise UsageError(f"--table {asked.table} has no table: name a folder with the parts of one")
    add_repository_to_path()
    log = Log(out)
    watch = Stopwatch()
    watch.turn_to("starting")
    machine = GpuMachine(gpu)
    try:
        log(f"{gpu.name}: {budget.seconds:.0f} s, tests: {asked.tests}")
        refusals = missing(gpu) | refused_by_driver(gpu, installed())
        with lock_machine(machine):  # its processes would disturb a sweep that measures there now
            refusals |= machine.start([name for name in installed() if name not in refusals])
        usable = [name for name in installed() if name not in refusals]
        remarks = [f"{name} is left out: {reason}" for name, reason in refusals.items()]
        for remark in remarks:
            log(remark)
        for name in NEEDED:
            if name in refusals:
                raise EnvironmentUnusable(f"nothing to measure without {name}: {refusals[name]}")
        swept = measure(
            machine, list_standard_blocks(machine.device, usable), out,
            budget=budget, remarks=remarks, watch=watch, tell=log,
            smoke_points=[] if asked.tests == "none" else list_smoke_points(machine.device, usable),
            sources=(out, asked.table or MEASURED / machine.device),
        )  # fmt: skip
    finally:
        machine.close()
    if swept.table is not None:
        log((out / "summary.txt").read_text())
    tests = None
    if asked.tests == "all" and not swept.interrupted and (swept.smoke is None or swept.smoke.status == "passed"):
        tests = run_all_tests(budget.for_tests)
        write_text_atomically(out / "tests.txt", tests.output[-MOST_BYTES:])
        log(tests.verdict)
        if tests.status == "failed":
            for line in list_failures(tests.output)[:MOST_TOLD]:
                log(f"  {line[:200]}")
    verdict = judge([each for each in (swept.smoke, tests) if each is not None], swept)
    if verdict is not None:
        raise verdict


def judge(outcomes: Sequence[GpuTestOutcome], swept: Swept) -> LatbenchError | None:
    """Return what a visit ends with: a wrong result or a failed test weighs more than what there was no time for."""
    wrong = 0 if swept.table is None else int((swept.table["status"] == "incorrect").sum())
    said = "; ".join(outcome.verdict for outcome in outcomes)
    if wrong or any(outcome.status == "failed" for outcome in outcomes):
        counts = f"{wrong} points are incorrect" if swept.table is not None else "nothing was measured"
        return PromiseMissed(f"{'; '.join(filter(None, (said, counts)))}: see log.txt and summary.txt")
    if swept.late is None and any(outcome.status == "late" for outcome in outcomes):
        return Incomplete(f"{said}: see tests.txt")
    return swept.late


class Log:
    """Prints lines to stderr and adds them to log.txt in a folder, which it makes.

    Raises EnvironmentUnusable where the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {folder}: {error.strerror}; name another folder") from error

    def __call__(self, line: str) -> None:
        """Print and keep one line."""
        _print(line)
        with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk is told by the table's writer
            file.write(line + "\n")


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run(given: Sequence[str] | None = None) -> int:
    """Pay a visit and return its exit code; an expected failure is one line on stderr."""
    try:
        main(given)
    except LatbenchError as error:
        _print(f"latbench: {' '.join(str(error).split())}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run())
