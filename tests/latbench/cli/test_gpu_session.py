"""A visit to a GPU, without one: how its time is shared out, what it writes, and where the next one goes on."""

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_fakes
import pandas as pd
import pytest

from latbench.cli import gpu_session
from latbench.cli.gpu_session import Budget, Stopwatch, Swept
from latbench.errors import EnvironmentUnusable, Incomplete, PromiseMissed, UsageError
from latbench.machines.gpu_names import Gpu
from latbench.runners.worker_process import END_SECONDS, LEAST_SECONDS, TaskFailed, WorkerDied
from latbench.sweeping import gpu_points, roofline_pace
from latbench.sweeping.gpu_points import DENSE, OURS, build_gpu_point
from latbench.sweeping.gpu_roofline import GpuPace
from latbench.sweeping.gpu_smoke import judge_smoke_points
from latbench.sweeping.gpu_summary import compare_kernels, format_gpu_summary
from latbench.sweeping.gpu_tests import GpuTestOutcome
from latbench.sweeping.roofline_pace import SweepRoofline
from latbench.sweeping.settings import NO_ROOFLINE, NOISY_CHANCES, SweepOptions, SweepSettings, SweepStopped
from latbench.sweeping.sweep import choose_in_order, run_sweep
from latbench.tables.table import read_environments, read_table, select_timed
from latbench.timing.gpu_ceilings import GpuCeilings
from latbench.workloads.points import Point
from sparse_kernels.patterns import NM, Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

ENVIRONMENT = f"env-{'e' * 16}.json"
QUICK = SweepSettings(rel_error=0.1, max_seconds=0.05, round_seconds=0.001)
SHAPE = LinearShape(256, 128, 64)
VERSIONS: dict[str, str] = gpu_fakes.PACKAGES


FakeMachine: Any = gpu_fakes.FakeMachine


@pytest.fixture(autouse=True)
def no_real_locks(own_lock: Path) -> None:
    """Every test locks its own device."""


def point(seed: int = gpu_fakes.FINE, shape: Any = SHAPE, sparsity: float = 0.75, kernel: Any = OURS[0]) -> Point:
    return build_gpu_point("nvidia-h200", shape, VectorWise(32), sparsity, kernel, seed)


def dense(kernel: Any = DENSE[0], shape: Any = SHAPE) -> Point:
    return build_gpu_point("nvidia-h200", shape, Dense(), 0.0, kernel)


def sweep_into(
    out: Path, *blocks: list[Point], seconds: float = 60.0, machine: Any = None, smoke_points: Sequence[Point] = ()
) -> Swept:
    machine = machine or FakeMachine()
    try:
        return gpu_session.measure_visit(gpu_session.Visit(
            machine, blocks, out, Budget(seconds + gpu_session.RESERVE_SECONDS), ["a remark"], smoke_points,
            sources=(out, out / "measured"), settings=QUICK,
        ))  # fmt: skip
    finally:
        machine.close()


def run(out: Path, *blocks: list[Point]) -> pd.DataFrame:
    swept = sweep_into(out, *blocks)
    assert swept.table is not None and swept.late is None
    return swept.table


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_session_is_shared_out() -> None:
    clock = Clock()
    budget, with_tests = Budget(540.0, clock), Budget(540.0, clock, tests=True)
    assert (budget.left, budget.for_sweep) == (540.0, 540.0 - gpu_session.RESERVE_SECONDS)
    assert with_tests.for_sweep == pytest.approx(540.0 - 189.0 - gpu_session.RESERVE_SECONDS)
    clock.now += with_tests.for_sweep  # a sweep that takes all it may
    assert with_tests.for_tests == pytest.approx(189.0) and with_tests.for_sweep == pytest.approx(0.0)
    clock.now += 1000.0
    assert budget.for_sweep == with_tests.for_tests == with_tests.for_sweep == 0.0


def test_a_session_ends_within_ten_minutes_even_if_the_last_kernel_hangs() -> None:
    # Requests are cut at the end of the budget: what is left is to end the process, and to write.
    assert gpu_session.SECONDS + LEAST_SECONDS + END_SECONDS < 600


def test_results_are_flat_files_that_read_back(tmp_path: Path) -> None:
    wanted = [dense(), point(), point(sparsity=0.9)]
    out = tmp_path / "out"
    frame = run(out, wanted)
    assert {path.name for path in out.iterdir()} == {"table.parquet", ENVIRONMENT, "summary.txt"}
    published = read_table(out / "table.parquet")
    assert set(published["point_id"]) == set(frame["point_id"]) == {each.id for each in wanted}
    assert (published["status"] == "ok").all() and (published["device"] == "nvidia-h200").all()
    row = published[published["sparsity_target"] == 0.9].iloc[0]
    assert row["median_seconds"] == pytest.approx(1e-5) and row["timer"] == "cuda_graph"
    assert (row["clock_hertz"], row["power_watts"], row["event_reasons"]) == (1.5e9, 600.0, "sw_power_cap")
    assert row["backend_version"] == "14.2.0" and row["dtype_w"] == "float16"
    assert (row["cache_mode"], row["launch_mode"], row["epilogue"]) == ("rotated", "graph", "none")
    assert read_environments(out / "table.parquet")["driver"].tolist() == ["580"]


def test_every_block_is_saved_at_once(tmp_path: Path) -> None:
    shapes = [LinearShape(8 * m, 128, 64) for m in (1, 2, 3)]
    late = [[point(gpu_fakes.LATE, shape, s) for s in (0.5, 0.75, 0.9)] for shape in shapes]
    swept = sweep_into(tmp_path, *late, seconds=2.0)
    said = r"the time is over; .* has the finished points, .* goes on .*nvidia-h200, or given by --table"
    assert re.match(said, str(swept.late))
    kept = read_table(tmp_path / "table.parquet")
    assert 3 <= len(kept) < 9 and set(kept["status"]) == {"ok"}
    assert swept.table is not None and set(swept.table["point_id"]) == set(kept["point_id"])
    assert "a remark" in (tmp_path / "summary.txt").read_text()


def test_a_session_without_time_to_measure_publishes_what_was_there_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    nothing = sweep_into(out, [dense()], seconds=0.0)
    assert nothing.table is None and "before anything was measured" in str(nothing.late)
    assert not out.exists()
    run(out, [dense()])
    measured = out / "measured"
    measured.mkdir(parents=True)
    for name in ("table.parquet", ENVIRONMENT):
        (out / name).rename(measured / name)
    kept = sweep_into(out, [dense(), point()], seconds=0.0)
    assert kept.table is not None and len(kept.table) == 1 and kept.late is not None
    assert len(read_table(out / "table.parquet")) == 1


def test_the_summary_says_where_the_time_went(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point(gpu_fakes.LATE)])
    said = re.search(r"times: preparing (\d+) s, timing \d+ s", (tmp_path / "summary.txt").read_text())
    assert said
    assert "\nblock 1: " in (tmp_path / "summary.txt").read_text()
    clock = Clock()
    watch = Stopwatch(clock)
    for activity, seconds in (("tests", 3.0), ("timing", 1.0), ("tests", 2.0), ("timing", 0.5)):
        watch.turn_to(activity)
        clock.now += seconds
    assert watch.seconds == {"tests": 5.0, "timing": 1.0}  # and what goes on now
    watch.turn_to("writing")
    assert str(watch) == "times: tests 5 s, timing 2 s"
    watch.lap("block 1")
    clock.now += 2.0
    watch.turn_to("timing")
    watch.lap("block 2")
    watch.lap("block 3")
    assert watch.laps == ["block 1: tests 5.0 s, timing 1.5 s", "block 2: writing 2.0 s", "block 3: no time"]


def test_the_next_session_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point()])
    before = read_table(tmp_path / "table.parquet")
    after = run(tmp_path, [dense(), point(), point(sparsity=0.9)])
    assert len(after) == 3 and set(before["run_id"]) < set(after["run_id"])
    kept = after[after["point_id"].isin(before["point_id"])]
    assert set(kept["run_id"]) == set(before["run_id"])
    assert "2 rows were there before, 3 points are wanted" in (tmp_path / "summary.txt").read_text()


def test_the_next_visit_loses_no_row_whatever_changed(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point()])
    source = tmp_path / "source"
    source.mkdir()
    for name in ("table.parquet", ENVIRONMENT):
        (source / name).write_bytes((tmp_path / name).read_bytes())
    machine = FakeMachine()
    machine.versions["cupy"] = "14.3.0"  # with which only one of the points is measured again
    swept = sweep_into(tmp_path, [point(sparsity=0.9)], machine=machine)
    assert swept.table is not None and len(swept.table) == 3
    versions = swept.table.set_index(["backend", "sparsity_target"])["backend_version"].to_dict()
    assert versions[("cupy", 0.75)] == "14.2.0" and versions[("cupy", 0.9)] == "14.3.0"
    assert gpu_session.resume([source, tmp_path, source], tmp_path / "twice", "nvidia-h200") == 3
    assert gpu_session.resume([tmp_path / "nowhere"], tmp_path / "none", "nvidia-h200") == 0
    with pytest.raises(UsageError, match=r"has a table of nvidia-h200, and this machine has nvidia-a100-pcie: name"):
        gpu_session.resume([source], tmp_path / "other", "nvidia-a100-pcie")


def test_what_is_finished_is_written_whatever_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    broken = [point(shape=LARGER)]
    process = machine.process
    machine.process = lambda backend: process(backend) if backend == "torch_gpu" else _fail("no such process")
    with pytest.raises(RuntimeError, match="no such process"):
        sweep_into(tmp_path, [dense()], broken, machine=machine)
    assert len(read_table(tmp_path / "table.parquet")) == 1


def _fail(words: str) -> None:
    raise RuntimeError(words)


def test_a_summary_that_fails_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_session, "format_gpu_summary", lambda *_: _fail("no such column"))
    told: list[str] = []
    machine = FakeMachine()
    blocks = [[dense()], [point()]]
    gpu_session.measure_visit(
        gpu_session.Visit(machine, blocks, tmp_path, Budget(60.0), settings=QUICK, tell=told.append)
    )
    machine.close()
    assert len(read_table(tmp_path / "table.parquet")) == 2
    assert "the results could not be written this time: RuntimeError: no such column" in told


def test_a_sweep_measures_again_what_the_table_has_of_another_version(tmp_path: Path) -> None:
    first, second = FakeMachine(), FakeMachine()
    second.versions["cupy"] = "14.3.0"
    wanted = [dense(), point()]
    before = run_sweep(tmp_path, choose_in_order([wanted]), machine=first, settings=QUICK)
    after = run_sweep(tmp_path, choose_in_order([wanted]), machine=second, settings=QUICK)
    assert len(before.statuses) == 2 and after.statuses == {point().id: "ok"} and after.skipped == 1
    rows = read_table(tmp_path)
    assert sorted(rows["backend_version"][rows["backend"] == "cupy"]) == ["14.2.0", "14.3.0"]
    assert select_timed(rows).set_index("backend")["backend_version"]["cupy"] == "14.3.0"
    again = run_sweep(tmp_path, choose_in_order([wanted]), machine=second, settings=QUICK)
    assert not again.statuses and again.skipped == 2
    first.close()
    second.close()


def test_what_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    seeds = {gpu_fakes.REFUSED: "unsupported", gpu_fakes.WRONG: "incorrect", gpu_fakes.HOT: "throttled"}
    frame = run(tmp_path, [dense(), *(point(seed) for seed in seeds)])
    found = frame.drop_duplicates("point_id", keep="last").set_index("pattern_seed")["status"]
    assert {seed: found[seed] for seed in seeds} == seeds
    summary = (tmp_path / "summary.txt").read_text()
    assert "1 unsupported: cupy auto: no such kernel here" in summary
    assert "1 incorrect: cupy auto: 3 of 7 results are wrong" in summary
    assert re.search(
        r"vector:32 +75% +25\.00 us .* 4\.00x float16 dense  fake throttled hw_thermal_slowdown", summary
    )


def test_a_throttled_point_gets_other_chances_and_its_rows_say_so(tmp_path: Path) -> None:
    frame = run(tmp_path, [dense(), point(gpu_fakes.HOT)])
    hot = frame[frame["pattern_seed"] == gpu_fakes.HOT].sort_values("started_at")
    tries = 1 + NOISY_CHANCES
    assert hot["status"].tolist() == ["throttled"] * tries
    assert hot["error"].tolist() == [
        f"slowed down by hw_thermal_slowdown on try {i + 1} of {tries}" for i in range(tries)
    ]
    assert (frame["pattern_seed"] == 0).sum() == 1  # what was not disturbed is not repeated


# What the GPU can do at most ---------------------------------------------------------------------------------------


class Found:
    """Ceilings with so many operations a second, the next ones each time they are measured."""

    def __init__(self, *flop_per_second: float) -> None:
        self.rates = list(flop_per_second)

    def get(self) -> GpuCeilings:
        rate = self.rates.pop(0)
        return GpuCeilings({"float16": rate}, rate, {1: 1e12}, 2e-4, 1e-4)

    def again(self, doubted: GpuCeilings) -> GpuCeilings:
        return doubted.or_higher(self.get())


class NoReference:
    """A reference worker that dies whenever it is asked."""

    def prepare(self, function: str, timeout: float) -> Any:
        raise WorkerDied("crash", f"the reference worker that had {function} is gone")

    def close(self) -> None:
        pass


class Bounded(FakeMachine):
    """A machine whose ceilings are those, or that fails to find them."""

    def __init__(self, *found: float, failure: Exception | None = None) -> None:
        super().__init__()
        self._kept, self._failure = Found(*found), failure

    def pace(self, seconds_left: Any) -> SweepRoofline[Any]:
        if self._failure is not None:
            raise self._failure
        return GpuPace(NoReference(), self._kept)  # type: ignore[arg-type]

    @property
    def measured_again(self) -> bool:
        return not self._kept.rates


POSSIBLE, IMPOSSIBLE = 2e11, 1e10  # operations a second: the fake's points do 2 million in 25 and in 100 us


def test_what_is_above_the_roofline_is_a_status_and_no_time(tmp_path: Path) -> None:
    machine = Bounded(IMPOSSIBLE, IMPOSSIBLE)
    frame = sweep_into(tmp_path, [dense(), point()], machine=machine).table
    assert frame is not None and machine.measured_again
    rows = frame.set_index("backend")
    assert rows["status"].to_dict() == {"torch_gpu": "impossible", "cupy": "impossible"}
    assert rows["median_seconds"].isna().all() and rows["roofline_seconds"].eq(2e-4).all()
    assert "faster than this device can (0.0002 s)" in rows["error"]["cupy"]
    assert "1 impossible: cupy auto: 2.5e-05 s is 8 times faster" in (tmp_path / "summary.txt").read_text()


def test_ceilings_too_low_to_be_true_are_measured_again_before_a_time_is_refused(tmp_path: Path) -> None:
    machine = Bounded(IMPOSSIBLE, POSSIBLE)
    frame = sweep_into(tmp_path, [dense(), point()], machine=machine).table
    assert frame is not None and machine.measured_again and set(frame["status"]) == {"ok"}
    assert frame["roofline_seconds"].eq(1e-5).all() and set(frame["flags"]) == {""}
    utilisation = frame.set_index("backend")["utilisation"]
    assert utilisation["cupy"] == pytest.approx(0.4) and utilisation["torch_gpu"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "failure", [TaskFailed("OutOfMemoryError", "512 MiB", ""), WorkerDied("timeout", "no answer for 70 s")]
)
def test_without_a_roofline_the_sweep_goes_on_and_its_rows_say_so(tmp_path: Path, failure: Exception) -> None:
    frame = sweep_into(tmp_path, [dense(), point()], machine=Bounded(failure=failure)).table
    assert frame is not None and set(frame["status"]) == {"ok"}
    assert frame["roofline_seconds"].isna().all() and set(frame["flags"]) == {NO_ROOFLINE}
    assert "fake no_roofline" in (tmp_path / "summary.txt").read_text()


def test_why_there_is_no_roofline_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    run_sweep(
        tmp_path, lambda _: [dense(), point()], machine=Bounded(failure=WorkerDied("oom", "it is gone")),
        settings=QUICK, report=lambda progress: told.append(progress.activity),
    )  # fmt: skip
    assert told.count("no roofline: it is gone") == 1


def test_a_process_that_starts_may_take_longer_for_its_first_point(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.prepare_seconds = 0.2
    first = sweep_into(tmp_path / "first", [point(gpu_fakes.LATE)], machine=machine).table
    assert first is not None and first["status"].tolist() == ["ok"]
    machine = FakeMachine()
    machine.prepare_seconds = 0.2
    second = sweep_into(tmp_path / "second", [point(sparsity=0.9), point(gpu_fakes.LATE)], machine=machine).table
    assert second is not None
    rows = second.set_index("sparsity_target")
    assert rows["status"].to_dict() == {0.9: "ok", 0.75: "timeout"}
    assert rows["error"][0.75] == "the cupy worker gave no answer for 0.2 s"


def test_kernels_that_hang_cost_a_moment_each_and_no_more_than_two(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.burst_seconds = 0.2
    stuck = [point(gpu_fakes.STUCK, sparsity=sparsity) for sparsity in (0.5, 0.75, 0.9, 0.95)]
    frame = sweep_into(tmp_path, [dense(), *stuck], machine=machine).table
    assert frame is not None
    of_stuck = frame[frame["pattern_seed"] == gpu_fakes.STUCK]
    assert of_stuck["status"].value_counts().to_dict() == {"timeout": 2, "error": 2}
    skipped = of_stuck["error"][of_stuck["status"] == "error"]
    assert skipped.str.startswith("not tried in this run: 2 workers died of cupy vector points").all()
    assert frame.set_index("point_id")["status"][dense().id] == "ok"


# Side by side, and in time ------------------------------------------------------------------------------------------


LOGGING = """
import json, os, time
from pathlib import Path
LOG = Path(__file__).with_suffix(".log")

def note(what, began):
    with LOG.open("a") as file:
        file.write(json.dumps([what, os.getpid(), began, time.monotonic()]) + "\\n")

def draw(point):
    began = time.monotonic()
    time.sleep(0.4)
    note("host", began)

def prepare(point):
    began = time.monotonic()
    time.sleep(0.1)
    note("device", began)
    return Timer()

class Timer:
    inner_loops = 10
    facts = {"kernel_used": "fake", "nnz": 1, "flop_nnz": 2_000_000, "bytes_min": 100_000}
    def burst(self, seconds):
        from latbench.timing.sampling import Burst
        return Burst([1e-4] * 10)
"""


def test_processes_work_side_by_side_on_the_host_and_in_turn_on_the_gpu(tmp_path: Path) -> None:
    script = tmp_path / "logging_tasks.py"
    script.write_text(LOGGING)
    machine = FakeMachine()
    machine.host_task, machine.task = f"{script}:draw", f"{script}:prepare"
    kernels = (DENSE[0], gpu_points.BSR[0], OURS[0])
    wanted = [build_gpu_point("nvidia-h200", SHAPE, VectorWise(32), s, each) for each in kernels for s in (0.5, 0.75)]
    swept = sweep_into(tmp_path / "out", wanted, machine=machine)
    assert swept.table is not None and set(swept.table["status"]) == {"ok"}
    noted = [json.loads(line) for line in script.with_suffix(".log").read_text().splitlines()]
    host = [(began, ended, pid) for what, pid, began, ended in noted if what == "host"]
    device = sorted((began, ended, pid) for what, pid, began, ended in noted if what == "device")
    assert len(host) == len(device) == 6 and len({pid for *_, pid in device}) == 3
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(device))
    apart = [(a, b) for a, b in itertools.combinations(host, 2) if a[2] != b[2]]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in apart)  # two processes drew at the same time


def test_what_fails_side_by_side_takes_nothing_else_along(tmp_path: Path) -> None:
    kernels = {
        gpu_fakes.FINE: OURS[0],
        gpu_fakes.CRASHES: DENSE[0],
        gpu_fakes.REFUSED: gpu_points.BSR[0],
        gpu_fakes.DIES: gpu_points.CSR[0],
    }
    machine = FakeMachine()
    machine.versions["cusparse"] = "14.2.0"
    wanted = [point(seed, kernel=kernel) for seed, kernel in kernels.items()]
    table = sweep_into(tmp_path, [*wanted, point(sparsity=0.9, kernel=gpu_points.CSR[0])], machine=machine).table
    assert table is not None
    found = table.set_index(["pattern_seed", "backend"])["status"].to_dict()
    assert found == {
        (gpu_fakes.FINE, "cupy"): "ok", (gpu_fakes.CRASHES, "torch_gpu"): "error",
        (gpu_fakes.REFUSED, "torch_sparse"): "unsupported",
        (gpu_fakes.DIES, "cusparse"): "error", (gpu_fakes.FINE, "cusparse"): "ok",
    }  # fmt: skip


def test_an_interruption_while_points_get_ready_ends_at_once(tmp_path: Path) -> None:
    machine = FakeMachine()
    wanted = [point(gpu_fakes.HANGS), point(kernel=DENSE[0]), point(kernel=gpu_points.BSR[0])]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGUSR1))
    began = time.monotonic()
    try:
        timer.start()
        with pytest.raises(SweepStopped, match=r"interrupted: \d of 3 points"):
            run_sweep(tmp_path, choose_in_order([wanted]), machine=machine, settings=QUICK)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    machine.close()
    assert time.monotonic() - began < 12  # the machine would wait for 40 s
    assert all(worker.generation == 0 for worker in machine.workers)


@pytest.mark.parametrize("seed", ["HANGS", "STUCK"])
def test_a_budget_ends_what_hangs_too(seed: str, tmp_path: Path) -> None:
    began = time.monotonic()
    swept = sweep_into(tmp_path, [dense()], [point(), point(getattr(gpu_fakes, seed), sparsity=0.5)], seconds=4.0)
    assert time.monotonic() - began < 12  # a request may take 20 s, and the first of a process 40 s
    assert swept.late is not None and swept.table is not None
    assert "timeout" not in set(swept.table["status"])  # nobody knows whether it would have been one
    assert dense().id in set(swept.table["point_id"])


class HangingReference(FakeMachine):
    """A machine whose reference worker hangs when it is first asked."""

    def pace(self, seconds_left: Any) -> SweepRoofline[Any]:
        worker = self.worker("reference")
        worker.seconds_left = seconds_left
        return Hanging(worker, Found(POSSIBLE))  # type: ignore[arg-type]


class Hanging(GpuPace):
    module = gpu_fakes.__file__


def test_a_hanging_reference_costs_a_budget_no_more_than_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    blocks = [[dense(), point()], [point(sparsity=0.9)]]
    swept = sweep_into(tmp_path / "late", *blocks, seconds=5.0, machine=HangingReference())
    assert time.monotonic() - began < 5 + LEAST_SECONDS + 8
    assert swept.late is not None
    monkeypatch.setattr(roofline_pace, "PREPARE_SECONDS", 0.5)
    swept = sweep_into(tmp_path / "whole", *blocks, machine=HangingReference())
    assert swept.late is None and swept.table is not None and set(swept.table["status"]) == {"ok"}
    assert swept.table["reference_seconds"].isna().all() and swept.table["roofline_seconds"].notna().all()


def test_what_is_finished_is_written_while_a_process_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session.Publisher.__init__, "__defaults__", (0.2,))
    seen: list[int] = []
    publish = gpu_session.publish

    def note(folder: Path, out: Path, environment: Any, remarks: Any) -> None:
        publish(folder, out, environment, remarks)
        seen.append(len(read_table(out / "table.parquet")))

    monkeypatch.setattr(gpu_session, "publish", note)
    sweep_into(tmp_path, [dense()], [point(gpu_fakes.HANGS)], seconds=4.0)
    assert seen[0] == 1 and len(seen) >= 2  # before the end, in which it is written once more


def test_blocks_are_measured_in_their_order_and_those_that_the_table_has_end_nothing(tmp_path: Path) -> None:
    first, second, third = ([point(shape=LinearShape(8 * m, 128, 64))] for m in (1, 2, 3))
    machine, told = FakeMachine(), []
    run_sweep(tmp_path / "table", choose_in_order([second]), machine=machine, settings=QUICK)
    summary = run_sweep(
        tmp_path / "table",
        choose_in_order([third, second, first]),
        machine=machine,
        settings=QUICK,
        options=SweepOptions(expected=3),
        report=lambda progress: told.append((progress.done, progress.total)),
    )
    machine.close()
    assert list(summary.statuses) == [third[0].id, first[0].id] and summary.skipped == 1
    assert {total for _, total in told} == {3} and max(told) == (3, 3)


def test_a_kernel_that_nothing_depends_on_fails_without_ending_a_visit() -> None:
    made = {"backend": "torch_gpu", "pattern": "dense", "layout": "token_major", "started_at": 0, "error": "wrong"}
    rows = [
        {**made, "point_id": kernel, "kernel_requested": kernel, "status": status}
        for kernel, status in (("cublas", "ok"), ("fp8_rows", "incorrect"), ("int8", "error"))
    ]
    passed = judge_smoke_points(pd.DataFrame(rows))
    assert passed.status == "passed" and "1 of 3 points timed, 0 refused, 2 failed" in passed.verdict
    assert "incorrect: torch_gpu fp8_rows dense token_major: wrong" in passed.output
    failed = judge_smoke_points(pd.DataFrame([*rows, {**rows[0], "point_id": "x", "status": "incorrect"}]))
    assert failed.status == "failed"


# The summary ------------------------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_dense_and_to_the_fastest_peer(tmp_path: Path) -> None:
    peers = [build_gpu_point("nvidia-h200", SHAPE, NM(2, 4), 0.5, kernel) for kernel in gpu_points.CUSPARSELT[:2]]
    ours = build_gpu_point("nvidia-h200", SHAPE, NM(2, 4), 0.5, OURS[0])
    frame = run(tmp_path, [dense(DENSE[0]), dense(DENSE[1]), point(), ours, *peers])
    rows = compare_kernels(frame).set_index("point_id")
    assert rows["dense_seconds"].tolist() == pytest.approx([1e-4] * 6)
    assert rows.loc[ours.id, "peer_seconds"] == pytest.approx(1e-4)
    assert pd.isna(rows.loc[point().id, "peer_seconds"])
    summary = (tmp_path / "summary.txt").read_text()
    both = {of: f"{of}x float16 dense   {of}x float16 dense" for of in ("2.00", "4.00")}
    assert f"nm:2:4         50% cupy         auto        {both['2.00']}   2.00x peer  1 shapes" in summary
    assert f"vector:32      75% cupy         auto        {both['4.00']}      -  peer  1 shapes" in summary
    assert "linear 256x128 on 64" in summary and "0.1 TFLOP/s" in summary


def test_ratios_name_the_type_of_their_baseline(tmp_path: Path) -> None:
    fp8 = build_gpu_point("nvidia-h200", SHAPE, Dense(), 0.0, gpu_points.DENSE_FP8[0], precision="fp8")
    sparse = replace(point(), dtype_w="fp8", dtype_a="fp8", dtype="bfloat16")
    frame = run(tmp_path, [dense(), fp8, point(), sparse])
    # A time in fp8 that a device could have: dense in 60 us, where float16 takes 100 us and 25 us with vectors.
    frame.loc[frame["point_id"] == fp8.id, "median_seconds"] = 6e-5
    rows = compare_kernels(frame).set_index("point_id")
    assert rows.loc[point().id, ["dense_seconds", "any_dense_seconds"]].tolist() == pytest.approx([1e-4, 6e-5])
    assert rows.loc[sparse.id, ["dense_seconds", "any_dense_seconds"]].tolist() == pytest.approx([6e-5, 6e-5])
    summary = format_gpu_summary(frame, {}, [])
    assert "vector:32      75% cupy         auto        4.00x float16 dense   2.40x fp8 dense" in summary
    assert "vector:32      75% cupy         auto        2.40x fp8 dense   2.40x fp8 dense" in summary
    assert re.search(r"vector:32 +75% +25\.00 us .* 4\.00x float16 dense, 2\.40x fp8 dense  fake", summary)
    assert re.search(r"dense +0% +60\.00 us .* 1\.00x fp8 dense  fake", summary)


def test_nothing_is_compared_with_a_throttled_time(tmp_path: Path) -> None:
    fast = build_gpu_point("nvidia-h200", SHAPE, Dense(), 0.0, DENSE[0], gpu_fakes.HOT)
    slow = dense(gpu_points.CUSPARSELT[0])
    frame = run(tmp_path, [fast, slow, point(), point(gpu_fakes.HOT, sparsity=0.9)])
    rows = compare_kernels(frame).set_index("point_id")
    assert rows["dense_seconds"].tolist() == pytest.approx([2e-4] * 4)
    summary = (tmp_path / "summary.txt").read_text()
    assert "vector:32      75% cupy         auto        8.00x float16 dense" in summary
    assert "vector:32      90% cupy" not in summary  # no median of throttled times


def test_other_shapes_and_other_cache_modes_are_not_compared(tmp_path: Path) -> None:
    frame = run(tmp_path, [dense(shape=LinearShape(512, 128, 64))], [point()])
    assert compare_kernels(frame).set_index("point_id")["dense_seconds"].isna()[point().id]
    cold = frame.assign(cache_mode="cold", m=256)
    mixed = pd.concat([cold[cold["pattern"] == "dense"], frame[frame["pattern"] != "dense"]])
    assert compare_kernels(mixed).set_index("point_id")["dense_seconds"].isna()[point().id]


def test_convolutions_are_named_by_their_filters(tmp_path: Path) -> None:
    shape = Conv2dShape(2, 8, 5, 6, 64, 3, 3)
    run(tmp_path, [dense(gpu_points.DENSE_CONV[0], shape), point(shape=shape, kernel=gpu_points.OURS_CONV[0])])
    assert "conv2d 64x8x3x3 on 2x5x6" in (tmp_path / "summary.txt").read_text()


# Tests and verdict ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tests", ["passed", "failed", "late"])
@pytest.mark.parametrize("status", ["ok", "incorrect"])
@pytest.mark.parametrize("late", [None, Incomplete("the time is over")])
def test_a_wrong_result_weighs_more_than_what_there_was_no_time_for(
    tests: str, status: str, late: Incomplete | None
) -> None:
    table = pd.DataFrame({"status": ["ok", status]})
    verdict = gpu_session.judge_visit([GpuTestOutcome(tests, "GPU tests: said so", "")], Swept(table, late))
    if tests == "failed" or status == "incorrect":
        assert isinstance(verdict, PromiseMissed) and "GPU tests: said so" in str(verdict)
    elif tests == "late" and late is None:
        assert isinstance(verdict, Incomplete) and "GPU tests: said so" in str(verdict)
    else:
        assert verdict is late


def test_where_nothing_was_measured_the_tests_are_still_told() -> None:
    late = Incomplete("the time was over before anything was measured")
    failed = gpu_session.judge_visit([GpuTestOutcome("failed", "GPU tests: FAILED", "")], Swept(None, late))
    assert isinstance(failed, PromiseMissed) and "GPU tests: FAILED; nothing was measured" in str(failed)
    assert gpu_session.judge_visit([GpuTestOutcome("passed", "GPU tests: passed", "")], Swept(None, late)) is late
    assert gpu_session.judge_visit([], Swept(None, late)) is late


def test_a_machine_without_a_gpu_is_told_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(driver=False))
    monkeypatch.setenv(gpu_session.OUT, str(tmp_path))
    assert gpu_session.run_visit([]) == EnvironmentUnusable.exit_code == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("latbench: no NVIDIA driver is installed")
    assert not list(tmp_path.iterdir())


# A whole visit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a GPU that is not there, and the standard sweep in two blocks."""
    at = SimpleNamespace(out=tmp_path / "out", machine=FakeMachine(), smoke=[dense(), point(shape=LARGER)])
    monkeypatch.setenv(gpu_session.OUT, str(at.out))
    monkeypatch.setattr(gpu_session, "MEASURED", tmp_path)
    monkeypatch.setattr(gpu_session, "find_first_gpu", lambda: Gpu("NVIDIA H200", "GPU-1"))
    monkeypatch.setattr(gpu_session, "GpuMachine", lambda gpu: at.machine)
    monkeypatch.setattr(
        gpu_session, "explain_missing", lambda gpu: {"numba_cuda": "numba-cuda is not installed: install it"}
    )
    monkeypatch.setattr(gpu_session, "explain_driver_refusals", lambda gpu, backends: {})
    monkeypatch.setattr(gpu_session, "find_installed", lambda: VERSIONS)
    blocks = [[dense(), point()], [point(sparsity=0.9)]]
    monkeypatch.setattr(gpu_session, "list_standard_blocks", lambda device, backends: blocks)
    monkeypatch.setattr(gpu_session, "list_smoke_points", lambda device, backends: at.smoke)
    return at


LARGER = LinearShape(512, 128, 64)


def test_a_visit_is_smoke_then_the_sweep_and_a_second_call_goes_on(
    visit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_session.run_visit(["--seconds", "40"]) == 0
    assert {path.name for path in visit.out.iterdir()} == {"table.parquet", ENVIRONMENT, "summary.txt", "log.txt"}
    said = capsys.readouterr().err
    assert (
        "NVIDIA H200: 40 s, tests: smoke\nnumba_cuda is left out: numba-cuda is not installed: install it\n" in said
    )
    smoke, measured = said.index("smoke: passed: 2 of 2 points timed"), said.index("block 2 done")
    assert said.index("block 1 done") < smoke < measured and "4.00x float16 dense" in said
    assert (visit.out / "log.txt").read_text().startswith("NVIDIA H200: 40 s")
    first = read_table(visit.out / "table.parquet")
    assert len(first) == 4 and set(first["status"]) == {"ok"}
    visit.machine = FakeMachine()
    assert gpu_session.run_visit(["--seconds", "40", "--tests", "none"]) == 0
    assert "4 rows were there before, 3 points are wanted" in (visit.out / "summary.txt").read_text()
    assert len(read_table(visit.out / "table.parquet")) == 4


@pytest.mark.parametrize(("tests", "code"), [("passed", 0), ("failed", 1), ("late", 4)])
def test_all_tests_come_after_the_sweep_and_decide_with_it(
    tests: str, code: int, visit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, given = "FAILED tests/a.py::test_one - wrong", []

    def run_all_tests(seconds: float) -> GpuTestOutcome:
        given.append(seconds)
        assert len(read_table(visit.out / "table.parquet")) == 4
        return GpuTestOutcome(tests, "GPU tests: as told", output)

    monkeypatch.setattr(gpu_session, "run_all_tests", run_all_tests)
    assert gpu_session.run_visit(["--tests", "all", "--seconds", "60"]) == code
    assert given and 0.35 * 60 <= given[0] <= 60 - gpu_session.RESERVE_SECONDS
    said = capsys.readouterr().err
    assert (f"GPU tests: as told\n  {output}\n" in said) == (tests == "failed")
    assert (visit.out / "tests.txt").read_text() == output


@pytest.mark.parametrize(("broken", "code"), [("cupy", 1), ("torch_gpu", 1), ("torch_sparse", 0)])
def test_where_what_is_needed_fails_the_smoke_nothing_more_is_measured(
    broken: str, code: int, visit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = {"cupy": OURS[0], "torch_gpu": DENSE[0], "torch_sparse": gpu_points.BSR[0]}[broken]
    visit.smoke = [
        dense(DENSE[1]),
        point(shape=LARGER),
        point(gpu_fakes.CRASHES, kernel=kernel),
        point(gpu_fakes.REFUSED),
    ]
    assert gpu_session.run_visit(["--seconds", "40"]) == code
    said = capsys.readouterr().err
    verdict = "FAILED" if code else "passed"
    assert f"smoke: {verdict}: 2 of 4 points timed, 1 refused, 1 failed\n" in said
    assert f"  error: {broken} {kernel[1]} vector:32 feature_major: RuntimeError: it is broken\n" in said
    assert "  unsupported: cupy auto vector:32 feature_major: no such kernel here\n" in said
    assert len(read_table(visit.out / "table.parquet")) == (4 if code else 7)
    assert (said.rstrip().splitlines()[-1].startswith("latbench: smoke: FAILED")) == bool(code)


@pytest.mark.parametrize("name", ["cupy", "torch_gpu"])
def test_a_visit_without_our_kernels_or_without_the_baseline_ends_before_it_measures(
    name: str, visit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    visit.machine.refusals = {name: "it is built without CUDA"}
    assert gpu_session.run_visit(["--seconds", "40"]) == EnvironmentUnusable.exit_code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"latbench: nothing to measure without {name}: it is built without CUDA"
    assert not (visit.out / "table.parquet").exists()


def test_a_smoke_in_which_no_kernel_of_ours_runs_is_none(visit: SimpleNamespace) -> None:
    visit.smoke = [dense(), point(gpu_fakes.REFUSED)]
    assert gpu_session.run_visit(["--seconds", "40"]) == PromiseMissed.exit_code


def test_an_interruption_ends_the_visit_and_starts_no_tests(
    visit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visit.smoke = [dense()]
    watch, blocks = visit.machine.watch, itertools.count()

    def interrupt() -> Any:
        if next(blocks):  # at the begin of the second block
            raise KeyboardInterrupt
        return watch()

    visit.machine.watch = interrupt
    monkeypatch.setattr(gpu_session, "run_all_tests", lambda seconds: _fail("tests were started"))
    assert gpu_session.run_visit(["--tests", "all", "--seconds", "60"]) == Incomplete.exit_code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"latbench: interrupted; {visit.out} has")


@pytest.mark.parametrize("at", ["--out", "--table"])
def test_a_folder_that_cannot_be_used_is_told_in_a_line(
    at: str, visit: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = gpu_session.run_visit(["--seconds", "40", at, str(blocked)])
    assert code == (EnvironmentUnusable.exit_code if at == "--out" else UsageError.exit_code)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("latbench: ") and str(blocked) in said[0]


@pytest.mark.parametrize(
    ("given", "words"), [(["--seconds", "5"], "--seconds 5 is too short"), (["--seconds", "nan"], "--seconds nan")]
)
def test_a_visit_without_time_is_refused(
    visit: SimpleNamespace, given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_session.run_visit(given) == UsageError.exit_code
    assert words in capsys.readouterr().err


def test_a_folder_for_the_results_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(gpu_session.OUT, raising=False)
    assert gpu_session.run_visit([]) == UsageError.exit_code
    assert "LATBENCH_OUT" in capsys.readouterr().err


def test_a_disk_that_refuses_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        run(blocked, [dense()])
