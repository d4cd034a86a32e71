"""A visit to a GPU, without one: how its time is shared out, what it writes, and where the next one goes on."""

import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest

from latbench import sweep, tables
from latbench.errors import EnvironmentUnusable, Incomplete, PromiseMissed, UsageError
from latbench.gpu import nvml, points, session
from latbench.gpu.ceilings import GpuCeilings
from latbench.gpu.machine import GpuMachine
from latbench.gpu.names import Gpu
from latbench.gpu.points import DENSE, OURS
from latbench.gpu.roofline import GpuPace
from latbench.gpu.session import Budget, Outcome, Stages, Stopwatch, Swept
from latbench.gpu.summary import compared
from latbench.pace import Roofline
from latbench.plan import Point
from latbench.runners.local import TaskFailed, Worker, WorkerDied
from sparse_kernels.patterns import NM, Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

FAKES = Path(__file__).with_name("gpu_fakes.py")
fakes = SimpleNamespace(**runpy.run_path(str(FAKES)))

ENVIRONMENT = f"env-{'e' * 16}.json"
PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
QUICK = sweep.Settings(rel_error=0.1, max_seconds=0.05, round_seconds=0.001)
SHAPE = LinearShape(256, 128, 64)
VERSIONS = {"torch_gpu": "2.11.0", "cupy": "14.2.0+0123abcd", "torch_sparse": "2.11.0"}


class FakeMachine:
    """A GPU whose workers do what gpu_fakes.py says; `version` and device are the test's to change."""

    task = f"{FAKES}:prepare"
    timer = "cuda_event"
    disturbed_status = "throttled"
    start_seconds = prepare_seconds = burst_seconds = 20.0
    device = "nvidia-h200"

    def __init__(self) -> None:
        self.versions = dict(VERSIONS)

    def environment(self) -> dict[str, Any]:
        return {"env_id": "e" * 16, "device": self.device, "device_uuid_hash": "0" * 12, "driver": "580"}

    def version(self, backend: str) -> str | None:
        return self.versions[backend]

    def process(self, backend: str) -> str:
        return "all"

    def worker(self, process: str) -> Worker:
        return Worker(threads=1, name=process)

    def start(self, backends: Sequence[str]) -> None:
        assert set(backends) == set(VERSIONS)

    def close(self) -> None:
        pass

    def watch(self) -> Callable[[], dict[str, Any]]:
        return lambda: {"load": 0.5}

    def pace(self) -> Roofline[Any] | None:
        """None but where a test is about it."""
        return None

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        return nvml.columns(states)

    def available_bytes(self) -> float:
        return 1e9

    def needed_bytes(self, point: Point) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def no_real_locks(own_lock: Path) -> None:
    """Every test locks its own device."""


def point(seed: int = fakes.FINE, shape: Any = SHAPE, sparsity: float = 0.75, kernel: Any = OURS[0]) -> Point:
    return points.point("nvidia-h200", shape, VectorWise(32), sparsity, kernel, seed)


def dense(kernel: Any = DENSE[0], shape: Any = SHAPE) -> Point:
    return points.point("nvidia-h200", shape, Dense(), 0.0, kernel)


def sweep_into(out: Path, *blocks: list[Point], seconds: float = 60.0, machine: FakeMachine | None = None) -> Swept:
    machine = machine or FakeMachine()
    return session.measure(
        machine, blocks, out,
        budget=Budget(seconds + session.RESERVE_SECONDS), versions=machine.versions,
        remarks=["GPU tests: passed"], measured=out / "measured", settings=QUICK,
    )  # fmt: skip


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
    budget = Budget(540.0, clock)
    assert (budget.left, budget.for_tests, budget.for_sweep) == (540.0, pytest.approx(189.0), 525.0)
    clock.now += 189.0  # tests that hang
    assert budget.for_sweep == pytest.approx(540 - 189 - session.RESERVE_SECONDS)
    clock.now += 330.0
    assert budget.for_tests == pytest.approx(6.0) and budget.for_sweep == pytest.approx(6.0)
    clock.now += 1000.0
    assert budget.for_tests == budget.for_sweep == 0.0


def test_a_session_ends_within_ten_minutes_even_if_the_last_kernel_hangs() -> None:
    last = GpuMachine.start_seconds + GpuMachine.prepare_seconds
    assert session.SECONDS - session.RESERVE_SECONDS + last < 600


def test_results_are_flat_files_that_read_back(tmp_path: Path) -> None:
    wanted = [dense(), point(), point(sparsity=0.9)]
    out = tmp_path / "out"
    frame = run(out, wanted)
    assert {path.name for path in out.iterdir()} == {"table.parquet", ENVIRONMENT, "summary.txt"}
    published = tables.read(out / "table.parquet")
    assert set(published["point_id"]) == set(frame["point_id"]) == {each.id for each in wanted}
    assert (published["status"] == "ok").all() and (published["device"] == "nvidia-h200").all()
    row = published[published["sparsity_target"] == 0.9].iloc[0]
    assert row["median_seconds"] == pytest.approx(1e-5) and row["timer"] == "cuda_graph"
    assert (row["clock_hertz"], row["power_watts"], row["event_reasons"]) == (1.5e9, 600.0, "sw_power_cap")
    assert row["backend_version"] == "14.2.0+0123abcd" and row["dtype_w"] == "float16"
    assert (row["cache_mode"], row["launch_mode"], row["epilogue"]) == ("rotated", "graph", "none")
    assert tables.read_env(out / "table.parquet")["driver"].tolist() == ["580"]


def test_every_block_is_saved_at_once(tmp_path: Path) -> None:
    shapes = [LinearShape(8 * m, 128, 64) for m in (1, 2, 3)]
    late = [[point(fakes.LATE, shape, s) for s in (0.5, 0.75, 0.9)] for shape in shapes]
    swept = sweep_into(tmp_path, *late, seconds=2.0)
    said = r"the time is over, .* has what was measured: put it into .*nvidia-h200"
    assert re.match(said, str(swept.late))
    kept = tables.read(tmp_path / "table.parquet")
    assert 3 <= len(kept) < 9 and set(kept["status"]) == {"ok"}
    assert swept.table is not None and set(swept.table["point_id"]) == set(kept["point_id"])
    assert "GPU tests: passed" in (tmp_path / "summary.txt").read_text()


def test_a_session_without_time_to_measure_publishes_what_was_there_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    nothing = sweep_into(out, [dense()], seconds=0.0)
    assert nothing.table is None and "before anything was measured" in str(nothing.late)
    assert not out.exists()
    run(out, [dense()])
    measured = out / "measured" / "nvidia-h200"
    measured.mkdir(parents=True)
    for name in ("table.parquet", ENVIRONMENT):
        (out / name).rename(measured / name)
    kept = sweep_into(out, [dense(), point()], seconds=0.0)
    assert kept.table is not None and len(kept.table) == 1 and kept.late is not None
    assert len(tables.read(out / "table.parquet")) == 1


def test_the_summary_says_where_the_time_went(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point(fakes.LATE)])
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
    measured = tmp_path / "measured" / "nvidia-h200"
    measured.mkdir(parents=True)
    for name in ("table.parquet", ENVIRONMENT):
        (measured / name).write_bytes((tmp_path / name).read_bytes())
    before = tables.read(measured)
    after = run(tmp_path, [dense(), point(), point(sparsity=0.9)])
    assert len(after) == 3 and set(before["run_id"]) < set(after["run_id"])
    kept = after[after["point_id"].isin(before["point_id"])]
    assert set(kept["run_id"]) == set(before["run_id"])
    assert "2 rows were there before, 3 points are wanted" in (tmp_path / "summary.txt").read_text()


def test_changed_kernels_are_measured_again_and_other_devices_left_alone(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point()])
    source = tmp_path / "source"
    source.mkdir()
    (source / "table.parquet").write_bytes((tmp_path / "table.parquet").read_bytes())
    assert session.resume(source, tmp_path / "same", "nvidia-h200", VERSIONS) == 2
    changed = {**VERSIONS, "cupy": "14.2.0+ffffffff"}
    assert session.resume(source, tmp_path / "changed", "nvidia-h200", changed) == 1
    assert set(tables.read(tmp_path / "changed")["backend"]) == {"torch_gpu"}
    assert session.resume(source, tmp_path / "other", "nvidia-a100-sxm4-80gb", VERSIONS) == 0
    assert session.resume(tmp_path / "nowhere", tmp_path / "none", "nvidia-h200", VERSIONS) == 0


def test_what_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    seeds = {fakes.REFUSED: "unsupported", fakes.WRONG: "incorrect", fakes.HOT: "throttled"}
    frame = run(tmp_path, [dense(), *(point(seed) for seed in seeds)])
    found = frame.drop_duplicates("point_id", keep="last").set_index("pattern_seed")["status"]
    assert {seed: found[seed] for seed in seeds} == seeds
    summary = (tmp_path / "summary.txt").read_text()
    assert "1 unsupported: cupy auto: no such kernel here" in summary
    assert "1 incorrect: cupy auto: 3 of 7 results are wrong" in summary
    assert re.search(r"vector:32 +75% +25\.00 us .* 4\.00x dense  fake throttled hw_thermal_slowdown", summary)


def test_a_throttled_point_gets_other_chances_and_its_rows_say_so(tmp_path: Path) -> None:
    frame = run(tmp_path, [dense(), point(fakes.HOT)])
    hot = frame[frame["pattern_seed"] == fakes.HOT].sort_values("started_at")
    tries = 1 + sweep.NOISY_CHANCES
    assert hot["status"].tolist() == ["throttled"] * tries
    assert hot["error"].tolist() == [
        f"slowed down by hw_thermal_slowdown in try {i + 1} of {tries}" for i in range(tries)
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

    def prepare(self, function: str) -> Any:
        raise WorkerDied("crash", f"the reference worker that had {function} is gone")

    def close(self) -> None:
        pass


class Bounded(FakeMachine):
    """A machine whose ceilings are those, or that fails to find them."""

    def __init__(self, *found: float, failure: Exception | None = None) -> None:
        super().__init__()
        self._kept, self._failure = Found(*found), failure

    def pace(self) -> Roofline[Any]:
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
    assert frame["roofline_seconds"].isna().all() and set(frame["flags"]) == {sweep.NO_ROOFLINE}
    assert "fake no_roofline" in (tmp_path / "summary.txt").read_text()


def test_why_there_is_no_roofline_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    sweep.run(
        tmp_path, lambda _: [dense(), point()], machine=Bounded(failure=WorkerDied("oom", "it is gone")),
        settings=QUICK, report=lambda progress: told.append(progress.activity),
    )  # fmt: skip
    assert told.count("no roofline: it is gone") == 1


def test_a_process_that_starts_may_take_longer_for_its_first_point(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.prepare_seconds = 0.2
    first = sweep_into(tmp_path / "first", [point(fakes.LATE)], machine=machine).table
    assert first is not None and first["status"].tolist() == ["ok"]
    second = sweep_into(tmp_path / "second", [dense(), point(fakes.LATE)], machine=machine).table
    assert second is not None
    rows = second.set_index("backend")
    assert rows["status"].to_dict() == {"torch_gpu": "ok", "cupy": "timeout"}
    assert rows["error"]["cupy"] == "the all worker gave no answer for 0.2 s"


def test_kernels_that_hang_cost_a_moment_each_and_no_more_than_two(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.burst_seconds = 0.2
    stuck = [point(fakes.STUCK, sparsity=sparsity) for sparsity in (0.5, 0.75, 0.9, 0.95)]
    frame = sweep_into(tmp_path, [dense(), *stuck], machine=machine).table
    assert frame is not None
    of_stuck = frame[frame["pattern_seed"] == fakes.STUCK]
    assert of_stuck["status"].value_counts().to_dict() == {"timeout": 2, "error": 2}
    skipped = of_stuck["error"][of_stuck["status"] == "error"]
    assert skipped.str.startswith("not tried in this run: 2 workers died of cupy vector points").all()
    assert frame.set_index("point_id")["status"][dense().id] == "ok"


def test_blocks_are_offered_once_and_without_what_is_finished() -> None:
    first, second, third = ([point(shape=LinearShape(8 * m, 128, 64))] for m in (1, 2, 3))
    stages = Stages([first, second, third])
    finished = pd.DataFrame({"point_id": [second[0].id, first[0].id], "status": ["ok", "noisy"]})
    assert stages.points == 3
    assert [stages(finished), stages(finished), stages(None)] == [first, third, []]


# The summary ------------------------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_dense_and_to_the_fastest_peer(tmp_path: Path) -> None:
    peers = [points.point("nvidia-h200", SHAPE, NM(2, 4), 0.5, kernel) for kernel in points.CUSPARSELT[:2]]
    ours = points.point("nvidia-h200", SHAPE, NM(2, 4), 0.5, OURS[0])
    frame = run(tmp_path, [dense(DENSE[0]), dense(DENSE[1]), point(), ours, *peers])
    rows = compared(frame).set_index("point_id")
    assert rows["dense_seconds"].tolist() == pytest.approx([1e-4] * 6)
    assert rows.loc[ours.id, "peer_seconds"] == pytest.approx(1e-4)
    assert pd.isna(rows.loc[point().id, "peer_seconds"])
    summary = (tmp_path / "summary.txt").read_text()
    assert "nm:2:4         50% cupy         auto        2.00x dense   2.00x peer  1 shapes" in summary
    assert "vector:32      75% cupy         auto        4.00x dense      -  peer  1 shapes" in summary
    assert "linear 256x128 on 64" in summary and "0.1 TFLOP/s" in summary


def test_nothing_is_compared_with_a_throttled_time(tmp_path: Path) -> None:
    fast = points.point("nvidia-h200", SHAPE, Dense(), 0.0, DENSE[0], fakes.HOT)
    slow = dense(points.CUSPARSELT[0])
    frame = run(tmp_path, [fast, slow, point(), point(fakes.HOT, sparsity=0.9)])
    rows = compared(frame).set_index("point_id")
    assert rows["dense_seconds"].tolist() == pytest.approx([2e-4] * 4)
    summary = (tmp_path / "summary.txt").read_text()
    assert "vector:32      75% cupy         auto        8.00x dense" in summary
    assert "vector:32      90% cupy" not in summary  # no median of throttled times


def test_other_shapes_and_other_cache_modes_are_not_compared(tmp_path: Path) -> None:
    frame = run(tmp_path, [dense(shape=LinearShape(512, 128, 64))], [point()])
    assert compared(frame).set_index("point_id")["dense_seconds"].isna()[point().id]
    cold = frame.assign(cache_mode="cold", m=256)
    mixed = pd.concat([cold[cold["pattern"] == "dense"], frame[frame["pattern"] != "dense"]])
    assert compared(mixed).set_index("point_id")["dense_seconds"].isna()[point().id]


def test_convolutions_are_named_by_their_filters(tmp_path: Path) -> None:
    shape = Conv2dShape(2, 8, 5, 6, 64, 3, 3)
    run(tmp_path, [dense(points.DENSE_CONV[0], shape), point(shape=shape, kernel=points.OURS_CONV[0])])
    assert "conv2d 64x8x3x3 on 2x5x6" in (tmp_path / "summary.txt").read_text()


# Tests and verdict ------------------------------------------------------------------------------------------------


def test_the_gpus_tests_are_judged_by_their_exit_code() -> None:
    python = sys.executable
    passed = session.run_tests(30.0, [python, "-c", "print('== 3 passed in 1.0s ==')"])
    assert passed.status == "passed" and passed.verdict == "GPU tests: passed: 3 passed in 1.0s"
    failed = session.run_tests(30.0, [python, "-c", "print('1 failed'); raise SystemExit(1)"])
    assert failed.status == "failed" and failed.verdict == "GPU tests: FAILED (exit code 1): 1 failed"
    skipped = session.run_tests(30.0, [python, "-c", "print('275 skipped')"])
    assert skipped.status == "failed" and "275 skipped" in skipped.verdict
    none = session.run_tests(30.0, [python, "-c", "raise SystemExit(5)"])
    assert none.status == "failed" and none.verdict == "GPU tests: there are none"


ALONE = [
    "a.py::test_one[FAILED] PASSED   [ 10%]",
    "a.py::test_two {} [ 20%]",
    "a.py::test_three SKIPPED (it said ERROR and FAILED) [ 30%]",
    "a.py::test_four",
]
SIDE_BY_SIDE = [
    "a.py::test_one[FAILED] ",
    "a.py::test_two ",
    "[gw0] [  5%] PASSED a.py::test_one[FAILED] ",
    "a.py::test_three ",
    "[gw11] [ 20%] {} a.py::test_two ",
    "[gw0] [100%] SKIPPED a.py::test_three ",
    "a.py::test_four ",
]


@pytest.mark.parametrize("lines", [ALONE, SIDE_BY_SIDE], ids=["alone", "xdist"])
@pytest.mark.parametrize(("second", "status"), [("PASSED", "late"), ("FAILED", "failed"), ("ERROR", "failed")])
def test_tests_that_take_too_long_are_stopped_and_fail_only_if_one_did(
    second: str, status: str, lines: list[str]
) -> None:
    lines = [line.format(second) for line in lines]
    code = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(60)"
    stopped = session.run_tests(1.0, [sys.executable, "-c", code])
    counts = (2, 0) if second == "PASSED" else (1, 1)
    assert stopped.status == status
    assert stopped.verdict == "GPU tests: not done after 1 s, {} passed and {} failed so far".format(*counts)
    assert stopped.output.splitlines() == lines
    assert session.failures(stopped.output) == (
        [] if second == "PASSED" else [line.strip() for line in lines if f"{second} " in line and "two" in line]
    )


def test_what_tests_have_started_is_stopped_with_them_and_not_waited_for() -> None:
    inner = "import time; print('began', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid, flush=True)"
    stopped = session.run_tests(2.0, [sys.executable, "-c", f"{code}; import time; time.sleep(60)"])
    pid = int(stopped.output.split()[0])
    assert stopped.status == "late" and "began" in stopped.output
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


TESTS = """
import os
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_right(number):
    assert "PYTEST_XDIST_WORKER" in os.environ
    assert number == 2

@pytest.mark.gpu
@pytest.mark.timed
def test_time():
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_other():
    assert False
"""


def test_only_tests_that_compare_times_have_the_gpu_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the process that this test may run in
    (tmp_path / "test_it.py").write_text(TESTS)
    options = [str(tmp_path) if it == str(session.ROOT) else it for it in session.PYTEST[: -len(session.TESTS)]]
    monkeypatch.setattr(session, "PYTEST", [*options, str(tmp_path / "test_it.py")])
    outcome = session.run_all_tests(60.0)
    assert outcome.status == "failed"
    assert re.fullmatch(
        r"GPU tests: FAILED \(exit code 1\): 1 failed, 1 passed.*; GPU tests of times: passed: 1 passed.*",
        outcome.verdict,
    )
    assert re.search(r"^\[gw\d\] \[ *\d+%\] PASSED .*::test_right\[2\]", outcome.output, re.MULTILINE)
    (told,) = session.failures(outcome.output)
    assert re.match(r"FAILED .*test_it.py::test_right\[1\] - ", told), outcome.output
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    assert [("-n" in command, command.count("-m")) for command in session.commands()] == [(False, 2)] * 2


@pytest.mark.parametrize(
    ("first", "second", "worst"),
    [
        ("passed", "passed", "passed"),
        ("late", "passed", "late"),
        ("passed", "late", "late"),
        ("late", "failed", "failed"),
    ],
)
def test_two_runs_are_worth_what_the_worse_one_is(first: str, second: str, worst: str) -> None:
    outcome = session.both(Outcome(first, "one", "a"), Outcome(second, "two", "b"))
    assert outcome == Outcome(worst, "one; two", "a\n\nb")


def test_what_the_first_tests_do_not_need_the_second_have(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(), []

    def run_tests(seconds: float, command: Sequence[str], name: str = "") -> Outcome:
        given.append(seconds)
        clock.now += 50.0
        return Outcome("passed", name, "")

    monkeypatch.setattr(session, "run_tests", run_tests)
    session.run_all_tests(189.0, clock)
    assert given == [pytest.approx(0.7 * 189), pytest.approx(139)]


def test_the_gpus_tests_run_without_plugins_and_are_those_of_the_device_first() -> None:
    collected = []
    for command in (
        [sys.executable, "-P", *session.PYTEST, "-m", which] for which in ("gpu and not timed", "gpu and timed")
    ):
        outcome = session.run_tests(60.0, [*command, "--collect-only", "-qq"])
        collected.append([line for line in outcome.output.splitlines() if "::" in line])
    assert len(collected[1]) == 4 and all("test_gpu_device.py::" in line for line in collected[1])
    found = list(dict.fromkeys(line.partition("::")[0] for line in collected[0]))
    # Numba's skip as a file.
    assert found == ["tests/latbench/test_gpu_device.py", "tests/cuda/test_torch_layers.py"], outcome
    asked = session.run_tests(30.0, [sys.executable, "-c", f"import os; print(os.environ[{PLUGINS!r}], 'passed')"])
    assert asked.verdict == "GPU tests: passed: 1 passed"


@pytest.mark.parametrize("tests", ["passed", "failed", "late"])
@pytest.mark.parametrize("status", ["ok", "incorrect"])
@pytest.mark.parametrize("late", [None, Incomplete("the time is over")])
def test_a_wrong_result_weighs_more_than_what_there_was_no_time_for(
    tests: str, status: str, late: Incomplete | None
) -> None:
    table = pd.DataFrame({"status": ["ok", status]})
    verdict = session.judge(Outcome(tests, "GPU tests: said so", ""), Swept(table, late))
    if tests == "failed" or status == "incorrect":
        assert isinstance(verdict, PromiseMissed) and "GPU tests: said so" in str(verdict)
    elif tests == "late" and late is None:
        assert isinstance(verdict, Incomplete) and "GPU tests: said so" in str(verdict)
    else:
        assert verdict is late


def test_where_nothing_was_measured_the_tests_are_still_told() -> None:
    late = Incomplete("the time was over before anything was measured")
    failed = session.judge(Outcome("failed", "GPU tests: FAILED", ""), Swept(None, late))
    assert isinstance(failed, PromiseMissed) and "GPU tests: FAILED; 0 points are incorrect; nothing" in str(failed)
    assert session.judge(Outcome("passed", "GPU tests: passed", ""), Swept(None, late)) is late


def test_a_machine_without_a_gpu_is_told_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fakes.FakeNvml(driver=False))
    monkeypatch.setenv(session.OUT, str(tmp_path))
    assert session.run() == EnvironmentUnusable.exit_code == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("latbench: no NVIDIA driver is installed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("tests", "code"), [("passed", 0), ("failed", 1), ("late", 4)])
def test_a_whole_session_tells_what_it_found_and_ends_with_its_code(
    tests: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv(session.OUT, str(out))
    monkeypatch.setattr(session, "MEASURED", tmp_path)
    output = "FAILED tests/a.py::test_one - wrong"
    monkeypatch.setattr(session, "run_all_tests", lambda seconds: Outcome(tests, "GPU tests: as told", output))
    monkeypatch.setattr(session.nvml, "only_gpu", lambda: Gpu("NVIDIA H200", "GPU-1"))
    monkeypatch.setattr(session, "GpuMachine", lambda gpu: FakeMachine())
    monkeypatch.setattr(session, "installed", lambda: VERSIONS)
    monkeypatch.setattr(session.points, "standard", lambda device, backends: [[dense(), point()]])
    assert session.run() == code
    assert {path.name for path in out.iterdir()} == {"table.parquet", ENVIRONMENT, "summary.txt", "tests.txt"}
    said = capsys.readouterr().err
    assert "NVIDIA H200: tests of the GPU, at most 189 s\nGPU tests: as told\n" in said
    assert "block 1 done, " in said and "4.00x dense" in said and "times: tests 0 s, starting 0 s, preparing" in said
    assert (f"GPU tests: as told\n  {output}\n" in said) == (tests == "failed")
    assert (out / "tests.txt").read_text() == output


def test_a_folder_for_the_results_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(session.OUT, raising=False)
    assert session.run() == UsageError.exit_code
    assert "LATBENCH_OUT" in capsys.readouterr().err


def test_a_disk_that_refuses_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        run(blocked, [dense()])
