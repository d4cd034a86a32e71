"""The sweep, with engines that misbehave on purpose: what fails is a row, what is finished is never lost."""

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import worker_tasks

from latbench.errors import BadData, EnvironmentUnusable, Incomplete, UsageError
from latbench.machines.ceilings import Ceilings
from latbench.machines.devices import name_cpu
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from latbench.sweeping import sweep
from latbench.sweeping.bench import Bench, split_to_fit
from latbench.sweeping.core_placement import CORES_APART
from latbench.sweeping.engine_workers import EngineWorkers
from latbench.sweeping.roofline_pace import ReferenceTimes
from latbench.sweeping.settings import NO_ROOFLINE, NOISY_CHANCES, Progress, SweepOptions, SweepSettings, SweepSummary
from latbench.sweeping.sweep import Sweep, run_sweep
from latbench.sweeping.sweep_machine import CpuMachine, estimate_cpu_bytes
from latbench.tables.schema import TIMED
from latbench.tables.table import hash_table, read_environments, read_table, select_timed
from latbench.tables.writer import write_part
from latbench.timing.sampling import FEWEST_ROUNDS, Burst
from latbench.workloads.points import Point
from sparse_kernels.patterns import BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

TASKS = Path(worker_tasks.__file__)

QUICK = SweepSettings(rel_error=0.2, max_seconds=0.02, round_seconds=0.001, block_points=1)


@pytest.fixture(autouse=True)
def misbehaving_engines(monkeypatch: pytest.MonkeyPatch, own_lock: Path) -> None:
    """Workers run `prepare` of worker_tasks.py, where a point's seed says what goes wrong."""
    monkeypatch.setattr("latbench.sweeping.sweep_machine.PREPARE", f"{TASKS}:prepare")
    monkeypatch.setattr("latbench.sweeping.sweep_machine.PREPARE_SECONDS", 3.0)
    monkeypatch.setattr(CpuMachine, "pace", lambda self, seconds_left: None)  # finding the ceilings takes seconds


VECTORS = VectorWise(8)


def point(
    m: int = 8, behaviour: int = worker_tasks.FINE, backend: str = "numba", pattern: Pattern = VECTORS
) -> Point:
    pattern, sparsity = (pattern, 0.5) if backend == "numba" else (Dense(), 0.0)
    return Point(name_cpu(), backend, "auto", LinearShape(m, 8, 4), pattern, sparsity, 1, seed=behaviour)


def measure(folder: Path, *points: Point, **options: object) -> SweepSummary:
    machine = CpuMachine(threads=1)
    return run_sweep(folder, lambda table: points, machine=machine, settings=QUICK, **options)  # type: ignore[arg-type]


def test_a_block_is_measured_and_every_row_says_how(tmp_path: Path) -> None:
    points = [point(), point(backend="torch"), point(m=9)]
    summary = measure(tmp_path, *points)
    frame = read_table(tmp_path)
    assert summary.skipped == 0 and set(summary.statuses) == set(frame["point_id"]) == {p.id for p in points}
    assert len(list(tmp_path.glob("part-*.parquet"))) == 2  # one a layer shape
    row = frame.loc[frame["point_id"] == points[0].id].iloc[0]
    assert row["kernel_used"] == "fake.0" and row["timer"] == "perf_counter"
    samples = len(row["samples_seconds"])
    assert row["median_seconds"] > 4e-4 and row["sample_count"] == samples >= FEWEST_ROUNDS
    assert row["env_id"] == read_environments(tmp_path)["env_id"].item()
    assert row["load"] >= 0 and row["stop_reason"]


def test_each_failure_is_a_row_and_the_others_are_measured(tmp_path: Path) -> None:
    behaviours = {
        worker_tasks.FINE: ("ok", None),
        worker_tasks.REFUSES: ("unsupported", "not here"),
        worker_tasks.IS_WRONG: ("incorrect", "off by one"),
        worker_tasks.RAISES: ("error", "RuntimeError: boom"),
        worker_tasks.CRASHES: ("error", "the numba worker ended with exit code 7: the last words"),
        worker_tasks.HANGS: ("timeout", "the numba worker gave no answer for 3 s"),
        worker_tasks.EATS_MEMORY: ("oom", None),
        worker_tasks.CRASHES_LATER: ("error", "the numba worker ended with exit code 7: the last words"),
        worker_tasks.RAISES_LATER: ("error", "RuntimeError: boom in the middle"),
    }
    # What kills its worker does so in formats of their own: two deaths of one would end its chances.
    formats: dict[int, Pattern] = {worker_tasks.HANGS: BlockWise(4, 4), worker_tasks.CRASHES_LATER: Unstructured()}
    numba = (point(behaviour=behaviour, pattern=formats.get(behaviour, VECTORS)) for behaviour in behaviours)
    measure(tmp_path, *numba, point(backend="torch"))
    frame = read_table(tmp_path)
    assert set(frame["status"][frame["backend"] == "torch"]) <= {"ok", "noisy"}
    found = frame[frame["backend"] == "numba"].drop_duplicates("pattern_seed", keep="last").set_index("pattern_seed")
    for behaviour, (status, error) in behaviours.items():
        assert found["status"][behaviour] in ((status, "noisy") if status == "ok" else (status,))
        if error is not None:
            assert found["error"][behaviour] == error
        if status != "ok":
            assert pd.isna(found["median_seconds"][behaviour])


def test_a_format_that_killed_two_workers_is_left_alone_until_the_next_run(tmp_path: Path) -> None:
    deadly = [point(behaviour=worker_tasks.CRASHES, pattern=VectorWise(v)) for v in (2, 4)]
    spared = point(behaviour=worker_tasks.REFUSES)
    others = [point(behaviour=worker_tasks.REFUSES, pattern=ShflBW(8)), point(backend="torch")]
    statuses = measure(tmp_path, *deadly, spared, *others).statuses
    assert statuses[others[0].id] == "unsupported" and statuses[others[1].id] in ("ok", "noisy")
    row = read_table(tmp_path).set_index("point_id").loc[spared.id]
    assert (row["status"], row["error"]) == (
        "error",
        "not tried in this run: 2 workers died of numba vector points, "
        "the last because the numba worker ended with exit code 7: the last words",
    )
    assert measure(tmp_path, spared).statuses == {spared.id: "unsupported"}


def test_a_kernel_that_killed_two_workers_takes_no_other_along(tmp_path: Path) -> None:
    deadly = [replace(point(behaviour=worker_tasks.CRASHES, pattern=VectorWise(v)), kernel="wide") for v in (2, 4)]
    spared = point(behaviour=worker_tasks.REFUSES, pattern=VectorWise(4))
    given_up = replace(point(behaviour=worker_tasks.REFUSES), kernel="wide")
    statuses = measure(tmp_path, *deadly, spared, given_up).statuses
    assert statuses[spared.id] == "unsupported" and statuses[given_up.id] == "error"
    error = read_table(tmp_path).set_index("point_id").loc[given_up.id, "error"]
    assert error.startswith("not tried in this run: 2 workers died of numba wide vector points")


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "measure_block", lambda *args, **more: pytest.fail("measured"))
    (tmp_path / "file.parquet").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file, but a sweep writes into a folder"):
        measure(tmp_path / "file.parquet", point())
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        measure(tmp_path / "file.parquet" / "folder", point())


def test_what_a_death_took_along_is_ready_again_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    for name in ("prepare", "burst"):

        def note(self: object, *args: object, name: str = name, run: object = getattr(EngineWorkers, name)) -> object:
            happened.append(f"{name} {args[0].seed}")  # type: ignore[attr-defined]
            return run(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(EngineWorkers, name, note)
    crashes = point(behaviour=worker_tasks.CRASHES, pattern=BlockWise(4, 4))
    measure(tmp_path, point(), crashes, point(behaviour=worker_tasks.CRASHES_LATER))
    frame = read_table(tmp_path).set_index("pattern_seed")
    assert frame["status"][worker_tasks.FINE] in ("ok", "noisy")
    crash = happened.index(f"prepare {worker_tasks.CRASHES}")
    first_burst = next(i for i, event in enumerate(happened) if event.startswith("burst"))
    assert f"prepare {worker_tasks.FINE}" in happened[crash:first_burst]
    # The other death comes in a burst: its own is the last event before what it took along is prepared.
    later = happened[first_burst:]
    for i, event in enumerate(later):
        if event == f"prepare {worker_tasks.FINE}":
            assert later[i - 1] == f"burst {worker_tasks.CRASHES_LATER}"


def test_every_session_has_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[str, int]] = []
    prepare = EngineWorkers.prepare

    def note(engines: EngineWorkers, which: Point) -> None:
        prepare(engines, which)
        began.append((which.id, engines.prepared(which).generation))

    monkeypatch.setattr(EngineWorkers, "prepare", note)
    points = [point(m=m) for m in range(8, 14)]
    settings = replace(QUICK, max_seconds=1.0, block_points=10, sessions=2)
    run_sweep(tmp_path, lambda table: points, machine=CpuMachine(threads=1), settings=settings)
    frame = read_table(tmp_path)
    assert set(frame["status"]) <= {"ok", "noisy"} and len(frame) == len(points)
    assert all(frame["sample_count"] >= 2 * FEWEST_ROUNDS)
    first, second = began[: len(points)], began[len(points) :]
    assert {name for name, _ in first} == {name for name, _ in second} == {which.id for which in points}
    assert {number for _, number in first}.isdisjoint(number for _, number in second)
    assert [name for name, _ in first] != [name for name, _ in second]
    assert read_environments(tmp_path)["sessions"].item() == 2


def test_a_point_that_fails_in_a_later_session_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, fine, short = EngineWorkers.prepare, point(m=8), point(m=9)
    tried: list[Point] = []

    def only_once(engines: EngineWorkers, which: Point) -> None:
        tried.append(which)
        if tried.count(short) > 1 and which == short:
            raise TaskFailed("MemoryError", "no memory", "")
        prepare(engines, which)

    monkeypatch.setattr(EngineWorkers, "prepare", only_once)
    settings = replace(QUICK, max_seconds=1.0, block_points=10, sessions=2)
    statuses = run_sweep(
        tmp_path, lambda table: [fine, short], machine=CpuMachine(threads=1), settings=settings
    ).statuses
    assert statuses[short.id] == "oom" and statuses[fine.id] in ("ok", "noisy")


def test_a_rerun_skips_what_is_finished_and_retries_what_may_work_now(tmp_path: Path) -> None:
    final = [point(behaviour=b) for b in (worker_tasks.REFUSES, worker_tasks.IS_WRONG)]
    again = [point(behaviour=b) for b in (worker_tasks.RAISES, worker_tasks.EATS_MEMORY)]
    measure(tmp_path, *final, *again)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("part-*.parquet")}
    summary = measure(tmp_path, *final, *again)
    assert summary.skipped == 2 and set(summary.statuses) == {p.id for p in again}
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())


def test_a_table_with_every_point_starts_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, point(behaviour=worker_tasks.REFUSES))
    monkeypatch.setattr("latbench.sweeping.sweep_machine.PREPARE", "no_such_module:prepare")
    assert measure(tmp_path, point(behaviour=worker_tasks.REFUSES)) == SweepSummary({}, 1)


def test_who_chooses_sees_the_table_and_is_asked_until_content(tmp_path: Path) -> None:
    seen: list[int] = []

    def choose(table: pd.DataFrame | None) -> list[Point]:
        seen.append(0 if table is None else len(table))
        refused = [point(m=m, behaviour=worker_tasks.REFUSES) for m in (1, 2, 3)]
        return refused[: len(seen)]

    run_sweep(tmp_path, choose, machine=CpuMachine(threads=1), settings=QUICK)
    assert seen == [0, 1, 2, 3]


def interrupt_at(activity: str, done: int) -> Callable[[Progress], None]:
    def report(now: Progress) -> None:
        if now.activity.startswith(activity) and now.done >= done:
            raise KeyboardInterrupt

    return report


def test_an_interruption_keeps_what_is_finished_and_the_same_sweep_goes_on(tmp_path: Path) -> None:
    points = [point(m=m) for m in (1, 2, 3)]
    with pytest.raises(Incomplete, match=r"1 of 3 points are in .* the same command goes on"):
        measure(tmp_path, *points, report=interrupt_at("preparing", 1))
    assert len(read_table(tmp_path)) == 1
    assert len(measure(tmp_path, *points).statuses) >= 2
    assert set(read_table(tmp_path)["point_id"]) == {p.id for p in points}


def test_an_interruption_inside_a_block_keeps_its_finished_points(tmp_path: Path) -> None:
    points = [point(behaviour=worker_tasks.REFUSES), point(), point(backend="torch")]
    with pytest.raises(Incomplete):
        measure(tmp_path, *points, report=interrupt_at("timing", 2))
    frame = read_table(tmp_path)
    assert "unsupported" in set(frame["status"]) and 1 <= len(frame) <= 2


def test_an_interruption_while_a_block_is_written_comes_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_part

    def interrupted(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("latbench.sweeping.sweep.write_part", interrupted)
    with pytest.raises(Incomplete, match="1 of 2 points"):
        measure(tmp_path, point(m=1, behaviour=worker_tasks.REFUSES), point(m=2, behaviour=worker_tasks.REFUSES))
    assert len(read_table(tmp_path)) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_used_up_time_budget_is_said(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="time budget is used up: 0 of 2 points"):
        measure(tmp_path, point(m=1), point(m=2), options=SweepOptions(time_budget=0.0))


def test_a_table_of_another_device_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    measure(tmp_path, point(behaviour=worker_tasks.REFUSES))
    frame = read_table(tmp_path)
    row = {name: value for name, value in frame.iloc[0].items() if not pd.isna(value)}
    write_part(tmp_path, [row | {"device": "nvidia-h200"}])
    with pytest.raises(UsageError, match="nvidia-h200"):
        measure(tmp_path, point())


def test_a_damaged_part_stops_the_sweep_before_it_measures(tmp_path: Path) -> None:
    measure(tmp_path, point(behaviour=worker_tasks.REFUSES))
    part = next(tmp_path.glob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[:-50])
    with pytest.raises(BadData, match=part.name):
        measure(tmp_path, point())


def test_a_part_that_is_damaged_meanwhile_is_named_after_all_else_is_measured(tmp_path: Path) -> None:
    damaged: list[Path] = []
    seen: list[int] = []

    def damage_the_first() -> None:
        if not damaged:
            damaged.extend(tmp_path.glob("part-*.parquet"))
            damaged[0].write_bytes(damaged[0].read_bytes()[:-50])

    def choose(table: pd.DataFrame | None) -> list[Point]:
        seen.append(0 if table is None else len(table))
        return [point(m=len(seen), behaviour=worker_tasks.REFUSES)] if len(seen) <= 4 else []

    def run() -> None:
        run_sweep(tmp_path, choose, machine=CpuMachine(threads=1), settings=QUICK, saved=damage_the_first)

    with pytest.raises(BadData, match=r"part-.*: damaged") as said:
        run()
    assert str(damaged[0]) in str(said.value)
    assert seen == [0, 0, 1, 2, 3]  # of the first it never heard
    whole = set(tmp_path.glob("part-*.parquet")) - set(damaged)
    assert sorted(int(read_table(part)["m"].iloc[0]) for part in whole) == [2, 3, 4]
    with pytest.raises(BadData, match=damaged[0].name):
        run()
    assert len(seen) == 5  # a part that was damaged before stops it at once


def test_what_is_measured_last_is_the_latest_whatever_the_clock_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latbench.sweeping.sweep.FINISHED", ())
    runs: list[str] = []
    for year in (2026, 2016, 2016, 2027):
        now = datetime(year, 6, 1, tzinfo=UTC)
        monkeypatch.setattr("latbench.sweeping.bench.datetime", SimpleNamespace(now=lambda zone, now=now: now))
        measure(tmp_path, point(behaviour=worker_tasks.REFUSES))
        [run] = set(read_table(tmp_path)["run_id"]) - set(runs)
        runs.append(run)
    rows = read_table(tmp_path).sort_values("started_at")
    assert list(rows["run_id"]) == runs and rows["started_at"].is_unique
    assert list(rows["flags"].fillna("")) == ["", "clock_set_back", "clock_set_back", ""]
    assert list(rows["started_at"].dt.year) == [2026, 2026, 2026, 2027]


def test_leftovers_of_a_killed_sweep_are_removed(tmp_path: Path) -> None:
    of_now, of_long_ago = (tmp_path / f".part-{name}.parquet.abc.tmp" for name in ("0123", "4567"))
    for leftover in (of_now, of_long_ago):
        leftover.write_bytes(b"half a part")
    os.utime(of_long_ago, times=(1e9, 1e9))
    measure(tmp_path, point(behaviour=worker_tasks.REFUSES))
    assert not of_long_ago.exists()
    assert of_now.exists()  # another process may be writing it


def test_a_disk_that_refuses_costs_only_what_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path, point(m=1, behaviour=worker_tasks.REFUSES))
    before = hash_table(tmp_path)

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EnvironmentUnusable, match="No space left on device"):
        measure(tmp_path, point(m=2, behaviour=worker_tasks.REFUSES))
    assert hash_table(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_points_that_need_more_memory_than_there_is_go_one_after_the_other() -> None:
    points = [point(behaviour=b) for b in range(5)]
    assert [len(part) for part in split_to_fit(points, 1e12)] == [5]
    assert [len(part) for part in split_to_fit(points, 1.0)] == [1] * 5
    assert [p for part in split_to_fit(points, 2e8) for p in part] == points


def test_layers_whose_copies_stay_small_share_a_block_however_large_the_caches_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "latbench.backends.cpu.prepare_point.count_cold_bytes", lambda: 720 * 2**20
    )  # a host's cache, in a virtual machine
    small, large = point(m=64), replace(point(), shape=LinearShape(4096, 4096, 1))
    assert [len(part) for part in split_to_fit([small] * 24, 6e9)] == [24]
    assert [len(part) for part in split_to_fit([large] * 24, 6e9)] == [3] * 8
    dense, sparse = (replace(point(m=512), sparsity=sparsity) for sparsity in (0.0, 0.9))
    assert estimate_cpu_bytes(sparse) < estimate_cpu_bytes(dense) / 4
    # A few weights, but each copy of them has its images laid out: only a few such points fit.
    stem = replace(point(), shape=Conv2dShape(1, 3, 640, 640, 32, 6, 6, (2, 2), (2, 2)))
    assert max(len(part) for part in split_to_fit([stem] * 24, 6e9)) <= 4


def test_a_time_budget_ends_inside_a_block_once_something_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(sweep, "monotonic", lambda: float(next(clock)))
    with pytest.raises(Incomplete, match=r"used up: 1 of 3 points"):
        measure(tmp_path, point(m=1), point(m=2), point(m=3), options=SweepOptions(time_budget=25.0))
    assert len(read_table(tmp_path)) == 1


class MadeUpPace:
    """A machine that is `ratio` times slower than usual, and can do `flop_per_second`."""

    def __init__(
        self,
        ratio: float = 1.0,
        slow_spell: bool = False,
        flop_per_second: float = 1e9,
        again: float | None = None,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self.ceilings = Ceilings(flop_per_second, {1: 1e9}, 1.0, 1.0)
        self.turns, self.doubts, self._again = 0, 0, again
        self._ratio, self._slow_spell = ratio, slow_spell

    def turn(self) -> None:
        self.turns += 1

    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        return self.ceilings.roofline_seconds(flop, size)

    def doubt(self) -> bool:
        """The first time the ceilings are measured anew, if others are to be found."""
        self.doubts += 1
        if self.doubts == 1 and self._again is not None:
            self.ceilings = replace(self.ceilings, flop_per_second=self._again)
        return self.doubts == 1

    def reference(self, at: Sequence[float], flop: float, size: float) -> ReferenceTimes:
        assert self.turns and list(at) == sorted(at)
        return ReferenceTimes([self._ratio * 3e-3 for _ in at], 3e-3, self._slow_spell)

    def apart(self) -> bool:
        return self._apart

    def close(self) -> None:
        self.turns = -1


def paced(monkeypatch: pytest.MonkeyPatch, pace: MadeUpPace) -> MadeUpPace:
    monkeypatch.setattr(CpuMachine, "pace", lambda self, seconds_left: pace)
    return pace


def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes do is seen in no burst: a point is never noisy."""
    burst = Burst([1e-3] * 4)
    monkeypatch.setattr(EngineWorkers, "burst", lambda engines, point, seconds: burst)


def test_a_row_says_what_the_machine_can_and_how_slow_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = paced(monkeypatch, MadeUpPace(ratio=1.25))
    measure(tmp_path, point())
    row = read_table(tmp_path).iloc[0]
    assert row["reference_seconds"] == pytest.approx(3.75e-3) and row["reference_usual_seconds"] == 3e-3
    assert row["reference_ratio"] == pytest.approx(1.25)
    assert row["corrected_seconds"] == pytest.approx(row["median_seconds"] / 1.25)
    assert row["median_seconds"] == np.median(row["samples_seconds"])  # as it was measured
    assert row["roofline_seconds"] == 2e-6 and row["utilisation"] == 2e-6 / row["median_seconds"]
    assert row["discarded_samples"] >= 0
    assert pace.turns == -1


def test_each_burst_is_seen_beside_the_pace_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is twice as slow for two bursts of five, which the median of all does not show."""

    class Stumbling(MadeUpPace):
        def reference(self, at: Sequence[float], flop: float, size: float) -> ReferenceTimes:
            return ReferenceTimes([3e-3 * (2.0 if i in (1, 3) else 1.0) for i in range(len(at))], 3e-3, False)

    def burst(engines: EngineWorkers, which: Point, seconds: float) -> Burst:
        number = next(numbers)
        return Burst([1e-3 * (2.0 if number in (1, 3) else 1.0)] * 4)

    numbers = iter(range(100))
    paced(monkeypatch, Stumbling())
    monkeypatch.setattr(EngineWorkers, "burst", burst)
    measure(tmp_path, point())
    row = read_table(tmp_path).iloc[-1]
    assert row["corrected_seconds"] == pytest.approx(1e-3) and row["reference_ratio"] == pytest.approx(1.0)
    assert sorted(set(row["samples_seconds"])) == [1e-3, 2e-3]


def test_bursts_from_when_cores_were_apart_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(MadeUpPace):
        """Cores are apart for one burst of three."""

        def apart(self) -> bool:
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked % 3 == 0

    bursts = itertools.count(1)
    paced(monkeypatch, Moving())
    plain = Worker.burst

    def burst(worker: Worker, *given: Any, **more: Any) -> Burst:
        plain(worker, *given, **more)
        return Burst([2e-3 if next(bursts) % 3 == 0 else 1e-3] * 5)

    monkeypatch.setattr(Worker, "burst", burst)
    measure(tmp_path, point())
    row = read_table(tmp_path).iloc[-1]
    assert row["status"] == "ok" and row["discarded_samples"] >= 5
    assert set(row["samples_seconds"]) == {1e-3} and row["event_reasons"] == CORES_APART


def test_a_point_whose_cores_were_always_apart_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, MadeUpPace(apart=True))
    measure(tmp_path, point())
    frame = read_table(tmp_path)
    assert len(frame) == 1 + NOISY_CHANCES
    assert frame["flags"].str.contains("preempted").all() and (frame["event_reasons"] == CORES_APART).all()


def test_a_point_of_a_slow_spell_gets_other_chances_and_then_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced(monkeypatch, MadeUpPace(ratio=1.5, slow_spell=True))
    measure(tmp_path, point())
    frame = read_table(tmp_path)
    assert len(frame) == 1 + NOISY_CHANCES
    assert frame["flags"].str.contains("slow_spell").all()
    assert (frame["status"] == "noisy").sum() >= NOISY_CHANCES


def test_a_user_is_told_that_disturbed_points_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all points have an outcome, and the sweep seems to hang."""
    monkeypatch.setattr(Bench, "_status", lambda *_: "noisy")
    told: list[str] = []
    measure(tmp_path, point(), report=lambda now: told.append(now.activity))
    again = " (again, because others disturbed it)"
    assert not told[0].endswith(again) and told[-1].startswith("timing: 1 points") and told[-1].endswith(again)


def test_a_noisy_row_had_its_chances_and_is_measured_again_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as always:
        always.setattr(Bench, "_status", lambda *_: "noisy")
        measure(tmp_path, point())
    assert measure(tmp_path, point()).skipped == 1
    assert set(read_table(tmp_path)["status"]) == {"noisy"}
    assert set(measure(tmp_path, point(), options=SweepOptions(remeasure=True)).statuses) == {point().id}


def test_faster_than_the_machine_can_is_a_status_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paced(monkeypatch, MadeUpPace(flop_per_second=1.0))
    assert measure(tmp_path, point()).statuses == {point().id: "impossible"}
    row = read_table(tmp_path).iloc[0]
    assert pd.isna(row["median_seconds"]) and "faster than this device can" in row["error"]
    assert select_timed(read_table(tmp_path)).empty


@pytest.mark.parametrize("pace", [MadeUpPace(flop_per_second=1.0, again=1e9), MadeUpPace(ratio=0.5)])
def test_ceilings_too_low_to_be_true_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: MadeUpPace
) -> None:
    paced(monkeypatch, pace)
    undisturbed(monkeypatch)
    assert measure(tmp_path, point()).statuses == {point().id: "ok"}
    assert pace.doubts == 1


@pytest.mark.parametrize("failure", [WorkerDied("oom", "gone"), TaskFailed("MemoryError", "64 MiB", "")])
def test_without_a_reference_the_points_are_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    asked: list[int] = []

    def fail(machine: CpuMachine, seconds_left: Any) -> None:
        asked.append(1)
        raise failure

    monkeypatch.setattr(CpuMachine, "pace", fail)
    undisturbed(monkeypatch)
    assert measure(tmp_path, point()).statuses == {point().id: "ok"}
    frame = read_table(tmp_path)
    assert frame["reference_ratio"].isna().all() and frame["roofline_seconds"].isna().all() and len(asked) == 1
    assert frame["flags"].item() == NO_ROOFLINE  # so that no silence passes for possible


def test_a_clock_that_goes_backwards_is_a_status_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineWorkers, "burst", lambda *args: Burst([1e-3, -1e-3, 1e-3] * 4))
    assert measure(tmp_path, point()).statuses == {point().id: "impossible"}
    assert "the clock went backwards" in read_table(tmp_path)["error"].item()


def curve(behaviour: int) -> list[Point]:
    return [replace(point(behaviour=behaviour), sparsity=sparsity) for sparsity in (0.5, 0.75, 0.9)]


def test_a_spike_is_no_time_until_it_is_seen_twice(tmp_path: Path) -> None:
    points = curve(worker_tasks.SPIKES)
    measure(tmp_path, *points)
    frame = read_table(tmp_path)
    middle = frame[frame["sparsity_target"] == 0.75].sort_values("started_at")
    assert middle["status"].iloc[0] == "spike" and "neighbours" in middle["error"].iloc[0]
    assert middle["status"].iloc[-1] in TIMED and "spike" in middle["flags"].iloc[-1]
    assert not frame["flags"][frame["sparsity_target"] != 0.75].str.contains("spike").any()


def test_a_spike_that_does_not_come_back_is_forgotten(tmp_path: Path) -> None:
    measure(tmp_path, *curve(worker_tasks.SPIKES_ONCE))
    frame = read_table(tmp_path)
    middle = frame[frame["sparsity_target"] == 0.75].sort_values("started_at")
    assert middle["status"].iloc[0] == "spike" and middle["status"].iloc[-1] in TIMED
    assert "spike" not in middle["flags"].iloc[-1]
    assert select_timed(frame)["median_seconds"].max() < 0.005


def _spiking(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Every point takes 1 ms; at 75% it takes the next of `times` at each try, the last one ever after."""
    undisturbed(monkeypatch)
    tries = itertools.chain(times, itertools.repeat(times[-1]))
    now = [0.0]
    measure_all = Sweep.measure_all

    def another_try(self: Sweep, points: Sequence[Point], chance: int = 0) -> None:
        now[0] = next(tries) if points else now[0]
        measure_all(self, points, chance)

    def burst(self: object, point: Point, seconds: float) -> Burst:
        time = now[0] if point.sparsity == 0.75 else 1e-3
        return Burst([time, 1.001 * time, 0.999 * time, time], began=0.0)

    monkeypatch.setattr(Sweep, "measure_all", another_try)
    monkeypatch.setattr(EngineWorkers, "burst", burst)


@pytest.mark.parametrize(
    ("times", "ends"),
    [
        ((0.1, 0.1), ["spike", "ok twice"]),
        ((0.1, 0.2, 0.2), ["spike", "spike", "ok twice"]),
        ((0.1, 0.05, 0.1, 0.05), ["spike"] * 4),  # never alike: no time
        ((0.1, 1e-3), ["spike", "ok"]),
    ],
)
def test_a_spike_has_to_come_back_as_it_was(
    times: Sequence[float], ends: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spiking(monkeypatch, *times)
    measure(tmp_path, *curve(0))
    frame = read_table(tmp_path)
    middle = frame[frame["sparsity_target"] == 0.75].sort_values("started_at")
    flagged = middle["flags"].str.contains("spike")
    assert [f"{status}{' twice' * twice}" for status, twice in zip(middle["status"], flagged, strict=True)] == ends


def test_another_run_judges_spikes_by_what_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low, middle, high = curve(0)
    _spiking(monkeypatch, 1e-3, 0.1, 0.1)
    measure(tmp_path, low, high)
    measure(tmp_path, middle)
    frame = read_table(tmp_path)
    ours = frame[frame["sparsity_target"] == 0.75].sort_values("started_at")
    assert ours["status"].tolist() == ["spike", "ok"] and "spike" in ours["flags"].iloc[-1]


def test_a_spike_shows_beside_neighbours_of_earlier_blocks(tmp_path: Path) -> None:
    low, middle, high = curve(worker_tasks.SPIKES_ONCE)
    steps = iter([[low, high], [middle], []])
    run_sweep(tmp_path, lambda _: next(steps), machine=CpuMachine(1), settings=QUICK)
    frame = read_table(tmp_path)
    assert frame[frame["sparsity_target"] == 0.75].sort_values("started_at")["status"].iloc[0] == "spike"
    assert set(frame["status"][frame["sparsity_target"] != 0.75]) <= set(TIMED)
