"""All that one short visit to a machine with a GPU can do: `python -m latbench.gpu.session`, which `make gpu` runs.

The GPU's own tests first, then the standard sweep, the most telling points first, within SECONDS altogether. Nothing
needs to be installed and nothing is fetched. Results lie flat in the folder that the environment variable
LATBENCH_OUT names, written again after a block every ten seconds: a session that is cut off has lost little:

    table.parquet  env-<id>.json   the table, as `latbench.tables` reads it
    summary.txt                    ratios to dense and to each peer, and where the time went
    tests.txt                      what pytest said

Where `datasets/measured/<device>` has a table, its points are not measured again, unless they are of another version
of a library or of our kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latbench import devices, files, sweep, tables
from latbench.errors import Incomplete, LatbenchError, PromiseMissed, UsageError
from latbench.gpu import nvml, points, summary
from latbench.gpu.machine import SETTINGS, GpuMachine, installed, repository_on_path
from latbench.measure import Clock
from latbench.plan import Point

if TYPE_CHECKING:
    import pandas as pd

SECONDS = 540.0
TEST_SHARE = 0.35  # of all, at most
RESERVE_SECONDS = 15.0  # for the last block to be written and summed up
PUBLISH_SECONDS = 10.0  # between two times that the table is written: the larger it is, the longer that takes

OUT = "LATBENCH_OUT"
MOST_BYTES = 16 * 2**20  # of a file

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "datasets" / "measured"
TESTS = ("tests/latbench/test_gpu_device.py", "tests/cuda/test_torch_layers.py", "tests/numba_cuda")

# What pyproject.toml asks of pytest needs plugins that such a machine may lack, and it has others: none is loaded
# that is not named. Of a test that takes a minute its output says where it is just then; it goes on.
PYTEST = (
    "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider",
    "-v", "--tb=short", "--maxfail=20", "--continue-on-collection-errors",
    "-o", "faulthandler_timeout=60", "-o", "markers=gpu\ntimed\nslow", *TESTS,
)  # fmt: skip
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
WIDE = {"COLUMNS": "200"}  # so that what failed is summed up with its reason
MOST_SIDE_BY_SIDE = 8  # processes of tests, each with up to four workers on the GPU
UNTIMED_SHARE = 0.7  # of the time for tests; those that compare times have what is left after that
_NO_TESTS = 5  # pytest's exit code where nothing was collected
_STATUS = "PASSED|FAILED|ERROR|SKIPPED"
_ENDED = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] ({_STATUS}) |.*?::.*? ({_STATUS})\b)", re.MULTILINE
)  # xdist's, or pytest's
_SUMMED_UP = re.compile(r"^(?:FAILED|ERROR) \S*\.py.*", re.MULTILINE)
MOST_TOLD = 15  # failures
MOST_LAPS = 8  # in the summary: it is the first blocks that starting and compiling slow down


@dataclass
class Budget:
    """How the time of a session is shared out."""

    seconds: float = SECONDS
    clock: Clock = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """Seconds until the session has to be over."""
        return self.began + self.seconds - self.clock()

    @property
    def for_tests(self) -> float:
        """Seconds that the tests may take: a share of all, so that a hanging one leaves time to measure."""
        return max(0.0, min(TEST_SHARE * self.seconds, self.left - RESERVE_SECONDS))

    @property
    def for_sweep(self) -> float:
        """Seconds that the sweep may take now."""
        return max(0.0, self.left - RESERVE_SECONDS)


class Stopwatch:
    """Adds up the seconds of what a session does, one thing at a time."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.laps: list[str] = []
        self._before: dict[str, float] = {}  # the seconds at the end of the last lap
        self._clock = clock
        self._activity, self._began = "", clock()

    def turn_to(self, activity: str) -> None:
        """What was done so far ends now, and `activity` begins."""
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
        return "times: " + ", ".join(f"{activity} {seconds:.0f} s" for activity, seconds in self.seconds.items())


@dataclass(frozen=True)
class Outcome:
    """How the GPU's tests went: `status` is passed, failed, or late if there was no time for all and none failed;
    `verdict` says it in a few words, `output` is what pytest printed.
    """

    status: str
    verdict: str
    output: str


def commands() -> list[list[str]]:
    """What runs the tests: first those that may share the GPU, in several processes where xdist is installed; then
    those that compare times, which have it to themselves.
    """
    alone = [sys.executable, "-P", *PYTEST, "-m"]
    beside: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        beside = ["-p", "xdist", "-n", str(min(MOST_SIDE_BY_SIDE, devices.cores())), "--dist", "worksteal"]
    return [[*alone, "gpu and not timed", *beside], [*alone, "gpu and timed"]]


def run_all_tests(seconds: float, clock: Clock = time.monotonic) -> Outcome:
    """Run the GPU's tests for at most `seconds` altogether."""
    end = clock() + seconds
    untimed, timed = commands()
    first = run_tests(UNTIMED_SHARE * seconds, untimed)
    return both(first, run_tests(max(0.0, end - clock()), timed, "GPU tests of times"))


def both(first: Outcome, second: Outcome) -> Outcome:
    """Two runs as one: it failed if one of them did, and was late if one was."""
    statuses = first.status, second.status
    worst = next(status for status in ("failed", "late", "passed") if status in statuses)
    return Outcome(worst, f"{first.verdict}; {second.verdict}", f"{first.output.rstrip()}\n\n{second.output}")


def run_tests(seconds: float, command: Sequence[str], name: str = "GPU tests") -> Outcome:
    """Run tests for at most `seconds`, in a process of their own: a kernel may take it down."""
    # What pytest started may outlive it and hold on to a pipe: a file needs no patience.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **NO_PLUGINS, **WIDE},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            if code is None:  # also where this is interrupted: xdist's processes go on without pytest
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    if code is None:
        ended = [match[1] or match[2] for match in _ENDED.finditer(text)]
        failed = ended.count("FAILED") + ended.count("ERROR")
        so_far = f"{ended.count('PASSED')} passed and {failed} failed so far"
        return Outcome("failed" if failed else "late", f"{name}: not done after {seconds:.0f} s, {so_far}", text)
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
    if code == _NO_TESTS:
        return Outcome("failed", f"{name}: there are none", text)
    passed = code == 0 and " passed" in last  # pytest is content where everything is skipped
    how = "passed" if passed else f"FAILED (exit code {code})"
    return Outcome("passed" if passed else "failed", f"{name}: {how}: {last.strip('= ')}", text)


def failures(output: str) -> list[str]:
    """A line for each test that failed: as pytest sums them up, or as it went on where it did not come to that."""
    found = _SUMMED_UP.findall(output)
    summed_up = {line.split(" - ")[0].partition(" ")[2] for line in found}
    for match in _ENDED.finditer(output):
        if (match[1] or match[2]) in ("FAILED", "ERROR"):
            line = output[match.start() :].partition("\n")[0].strip()
            if not any(name in line for name in summed_up):
                found.append(line)
    return found


class Stages:
    """Hands a sweep one block after the other, without what the table has already; no block is offered twice."""

    def __init__(self, blocks: Sequence[Sequence[Point]]) -> None:
        self._blocks = list(blocks)
        self.points = sum(len(block) for block in blocks)

    def __call__(self, table: pd.DataFrame | None) -> list[Point]:
        """The next block with points that have no finished row; empty when all are done."""
        finished = set() if table is None else set(table["point_id"][table["status"].isin(sweep.FINISHED)])
        while self._blocks:
            block = [point for point in self._blocks.pop(0) if point.id not in finished]
            if block:
                return block
        return []


def resume(source: Path, folder: Path, device: str, versions: dict[str, str]) -> int:
    """Copy the rows of the table at `source` that still hold into `folder`; returns how many.

    Rows of another device, or of a backend whose version is another now, are left behind. No table is no failure.
    """
    if not source.is_dir() or not any(source.glob("*.parquet")):
        return 0
    rows = [
        row for batch in tables.batches(source) for row in batch.to_pylist()
        if row["device"] == device and row["backend_version"] == versions.get(row["backend"])
    ]  # fmt: skip
    if rows:
        tables.write_part(folder, rows)
        for environment in tables.environment_rows(source):
            tables.write_environment(folder, environment)
    return len(rows)


def publish(folder: Path, out: Path, environment: dict[str, Any], remarks: list[str]) -> None:
    """Write the table in `folder` to `out` as one file, with its environments and the summary.

    Each file is replaced whole. Raises EnvironmentUnusable where the disk refuses.
    """
    files.write_bytes_atomically(out / "table.parquet", tables.to_parquet(tables.load(folder)))
    for row in tables.environment_rows(folder):
        tables.write_environment(out, row)
    files.write_text_atomically(out / "summary.txt", summary.text(tables.read(folder), environment, remarks))


@dataclass(frozen=True)
class Swept:
    """The table that is published, None if there is none; and what to say where the time was over too early."""

    table: pd.DataFrame | None
    late: Incomplete | None


def measure(
    machine: sweep.Machine,
    blocks: Sequence[Sequence[Point]],
    out: Path,
    *,
    budget: Budget,
    versions: dict[str, str],
    remarks: list[str],
    measured: Path = MEASURED,
    settings: sweep.Settings = SETTINGS,
    watch: Stopwatch | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Swept:
    """Sweep `blocks` on `machine` into `out` until they are measured or the budget ends.

    Raises whatever a sweep raises, but for Incomplete.
    """
    stages, environment = Stages(blocks), machine.environment()
    watch = watch or Stopwatch()
    with _folder() as folder:
        kept = resume(measured / machine.device, folder, machine.device, versions)
        notes = [*remarks, f"{kept} rows were there before, {stages.points} points are wanted"]

        written = -math.inf  # when, by the budget's clock

        def write() -> None:
            nonlocal written
            publish(folder, out, environment, [*notes, str(watch), *watch.laps[:MOST_LAPS]])
            written = budget.clock()

        def saved() -> None:
            watch.turn_to("writing")
            watch.lap(f"block {len(watch.laps) + 1}")
            if budget.clock() - written >= PUBLISH_SECONDS:
                write()
            tell(f"block {len(watch.laps)} done, {budget.left:.0f} s left")

        def report(now: sweep.Progress) -> None:
            watch.turn_to(now.activity.partition(":")[0])

        if kept:
            saved()
        late = None
        try:
            sweep.run(
                folder, stages, machine=machine, settings=settings, time_budget=budget.for_sweep,
                report=report, saved=saved,
            )  # fmt: skip
        except Incomplete as error:
            late = error
        if not any(folder.glob("part-*.parquet")):
            return Swept(None, Incomplete("the time was over before anything was measured: see tests.txt"))
        write()
        if late is not None:
            late = Incomplete(
                f"the time is over, {out} has what was measured: put it into {measured / machine.device}, "
                "and the next session goes on from there"
            )
        return Swept(tables.read(folder), late)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="latbench-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """One session on this machine's GPU; raises what is to be said to the user."""
    budget = Budget()
    named = os.environ.get(OUT)
    if not named:
        raise UsageError(f"name a folder for the results in the environment variable {OUT}")
    out = Path(named)
    out.mkdir(parents=True, exist_ok=True)
    device = nvml.only_gpu()
    repository_on_path()
    _tell(f"{device.name}: tests of the GPU, at most {budget.for_tests:.0f} s")
    watch = Stopwatch()
    watch.turn_to("tests")
    tests = run_all_tests(budget.for_tests)
    files.write_text_atomically(out / "tests.txt", tests.output[-MOST_BYTES // 8 :])
    _tell(tests.verdict)
    if tests.status == "failed":
        for line in failures(tests.output)[:MOST_TOLD]:
            _tell(f"  {line[:200]}")
    versions = installed()
    blocks = points.standard(device.device, backends=versions)
    machine = GpuMachine(device)
    watch.turn_to("starting")
    machine.start(versions)
    try:
        swept = measure(
            machine, blocks, out,
            budget=budget, versions=versions, remarks=[tests.verdict], watch=watch, tell=_tell,
        )  # fmt: skip
    finally:
        machine.close()
    if swept.table is not None:
        _tell((out / "summary.txt").read_text())
    verdict = judge(tests, swept)
    if verdict is not None:
        raise verdict


def judge(tests: Outcome, swept: Swept) -> LatbenchError | None:
    """What the session ends with: a wrong result or a failed test weighs more than what there was no time for."""
    wrong = 0 if swept.table is None else int((swept.table["status"] == "incorrect").sum())
    if tests.status == "failed" or wrong:
        nothing = "" if swept.table is not None else "; nothing was measured"
        return PromiseMissed(f"{tests.verdict}; {wrong} points are incorrect{nothing}: see summary.txt and tests.txt")
    if swept.late is None and tests.status == "late":
        return Incomplete(f"{tests.verdict}: see tests.txt")
    return swept.late


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run() -> int:
    """Run a session and return its exit code; an expected failure is one line on stderr."""
    try:
        main()
    except LatbenchError as error:
        _tell(f"latbench: {' '.join(str(error).split())}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run())
