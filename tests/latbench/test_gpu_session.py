"""A visit to a GPU, without one: how its time is shared out, what it writes, and where the next one goes on."""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from latbench import gpu, gpu_plan, gpu_session, gpu_summary, sweep, tables
from latbench.errors import EnvironmentUnusable, Incomplete, PromiseMissed, UsageError
from latbench.gpu_plan import DENSE, OURS
from latbench.gpu_session import Budget, Outcome, Stages
from latbench.plan import Point
from latbench.runners.local import Worker
from sparse_kernels.patterns import NM, BlockWise, Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

FAKES = Path(__file__).with_name("gpu_fakes.py")
fakes = SimpleNamespace(**runpy.run_path(str(FAKES)))

QUICK = sweep.Settings(rel_error=0.1, max_seconds=0.05, round_seconds=0.001)
SHAPE = LinearShape(256, 128, 64)
VERSIONS = {"torch_gpu": "2.11.0", "cupy": "14.2.0+0123abcd", "torch_sparse": "2.11.0"}


class FakeMachine:
    """A GPU whose workers do what gpu_fakes.py says; `version` and device are the test's to change."""

    task = f"{FAKES}:prepare"
    timer = "cuda_event"
    disturbed_status = "throttled"
    prepare_seconds = 20.0
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

    def watch(self) -> Callable[[], dict[str, Any]]:
        return lambda: {"load": 0.5}

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        return gpu.columns(states)

    def available_bytes(self) -> float:
        return 1e9

    def needed_bytes(self, point: Point) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def no_real_locks(own_lock: Path) -> None:
    """Every test locks its own device."""


def point(seed: int = fakes.FINE, shape: Any = SHAPE, sparsity: float = 0.75, kernel: Any = OURS[0]) -> Point:
    return gpu_plan.point("nvidia-h200", shape, VectorWise(32), sparsity, kernel, seed)


def dense(kernel: Any = DENSE[0], shape: Any = SHAPE) -> Point:
    return gpu_plan.point("nvidia-h200", shape, Dense(), 0.0, kernel)


def run(out: Path, *blocks: list[Point], seconds: float = 60.0, machine: FakeMachine | None = None) -> pd.DataFrame:
    machine = machine or FakeMachine()
    return gpu_session.measure(
        machine, blocks, out,
        budget=Budget(seconds + gpu_session.RESERVE_SECONDS), versions=machine.versions,
        remarks=["GPU tests: passed"], measured=out / "measured", settings=QUICK,
    )  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_session_is_shared_out() -> None:
    clock = Clock()
    budget = Budget(540.0, clock)
    assert (budget.left, budget.for_tests, budget.for_sweep) == (540.0, pytest.approx(189.0), 525.0)
    clock.now += 189.0  # tests that hang
    assert budget.for_sweep == pytest.approx(540 - 189 - gpu_session.RESERVE_SECONDS)
    clock.now += 330.0
    assert budget.for_tests == pytest.approx(6.0) and budget.for_sweep == pytest.approx(6.0)
    clock.now += 1000.0
    assert budget.for_tests == budget.for_sweep == 0.0


def test_a_session_ends_within_ten_minutes_even_if_the_last_kernel_hangs() -> None:
    from latbench.gpu_machine import GpuMachine

    assert gpu_session.SECONDS - gpu_session.RESERVE_SECONDS + GpuMachine.prepare_seconds < 600


def test_results_are_flat_files_that_read_back(tmp_path: Path) -> None:
    wanted = [dense(), point(), point(sparsity=0.9)]
    out = tmp_path / "out"
    frame = run(out, wanted)
    assert {path.name for path in out.iterdir()} == {"table.parquet", "env.parquet", "summary.txt"}
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
    with pytest.raises(Incomplete, match=r"the time is over, .* has what was measured: put it into .*nvidia-h200"):
        run(tmp_path, *late, seconds=2.0)
    kept = tables.read(tmp_path / "table.parquet")
    assert 3 <= len(kept) < 9 and set(kept["status"]) == {"ok"}
    assert "GPU tests: passed" in (tmp_path / "summary.txt").read_text()


def test_the_next_session_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    run(tmp_path, [dense(), point()])
    measured = tmp_path / "measured" / "nvidia-h200"
    measured.mkdir(parents=True)
    for name in ("table.parquet", "env.parquet"):
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
    assert gpu_session.resume(source, tmp_path / "same", "nvidia-h200", VERSIONS) == 2
    changed = {**VERSIONS, "cupy": "14.2.0+ffffffff"}
    assert gpu_session.resume(source, tmp_path / "changed", "nvidia-h200", changed) == 1
    assert set(tables.read(tmp_path / "changed")["backend"]) == {"torch_gpu"}
    assert gpu_session.resume(source, tmp_path / "other", "nvidia-a100-sxm4-80gb", VERSIONS) == 0
    assert gpu_session.resume(tmp_path / "nowhere", tmp_path / "none", "nvidia-h200", VERSIONS) == 0


def test_what_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    seeds = {fakes.REFUSED: "unsupported", fakes.WRONG: "incorrect", fakes.HOT: "throttled"}
    frame = run(tmp_path, [dense(), *(point(seed) for seed in seeds)]).drop_duplicates("point_id", keep="last")
    found = frame.set_index("pattern_seed")["status"]
    assert {seed: found[seed] for seed in seeds} == seeds
    summary = (tmp_path / "summary.txt").read_text()
    assert "1 unsupported: cupy auto: no such kernel here" in summary
    assert "1 incorrect: cupy auto: 3 of 7 results are wrong" in summary
    assert "1 throttled: cupy auto" in summary


def test_blocks_are_offered_once_and_without_what_is_finished() -> None:
    first, second, third = ([point(shape=LinearShape(8 * m, 128, 64))] for m in (1, 2, 3))
    stages = Stages([first, second, third])
    finished = pd.DataFrame({"point_id": [second[0].id, first[0].id], "status": ["ok", "noisy"]})
    assert stages.points == 3
    assert [stages(finished), stages(finished), stages(None)] == [first, third, []]


# The standard sweep -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standard() -> list[list[Point]]:
    return gpu_plan.standard("nvidia-h200")


def test_the_standard_sweep_is_bounded_and_of_one_shape_a_block(standard: list[list[Point]]) -> None:
    every = [each for block in standard for each in block]
    assert 400 <= len(every) <= gpu_plan.MOST_POINTS and len({each.id for each in every}) == len(every)
    for block in standard:
        assert 1 <= len(block) <= gpu_plan.BLOCK_POINTS and len({each.shape for each in block}) == 1


def test_what_tells_most_comes_first(standard: list[list[Point]]) -> None:
    first = standard[0]
    assert first[0].shape == LinearShape(4096, 4096, 2048)
    assert {str(each.pattern) for each in first} >= {"dense", "vector:128", "shflbw:64", "nm:2:4"}
    layouts = {(each.kernel, each.layout) for each in first if each.backend == "torch_gpu"}
    assert layouts == {
        (name, layout) for name in ("cublas", "cublaslt") for layout in ("feature_major", "token_major")
    }
    # The first shape meets every backend, in well under a quarter of the points.
    of_first = [each for block in standard[:6] for each in block if each.shape == first[0].shape]
    assert {each.backend for each in of_first} == set(gpu_plan.BACKENDS) and len(of_first) < 100


def test_every_shape_has_dense_to_compare_with_before_any_sparse_point(standard: list[list[Point]]) -> None:
    seen = set()
    for block in standard:
        seen |= {each.shape for each in block if isinstance(each.pattern, Dense)}
        assert block[0].shape in seen
    assert seen == set(gpu_plan.standard_shapes())


def test_the_standard_sweep_covers_the_workloads(standard: list[list[Point]]) -> None:
    shapes = {each.shape for block in standard for each in block}
    assert {LinearShape(512, 2048, 2048), LinearShape(3072, 768, 128), LinearShape(4096, 1024, 128)} <= shapes
    assert LinearShape(11008, 4096, 2048) in shapes
    assert sum(isinstance(shape, Conv2dShape) for shape in shapes) >= 6
    sparsities = {each.sparsity for block in standard for each in block}
    assert {0.5, 0.75, 0.9, 0.95} <= sparsities
    assert all(each.dtype == "float16" and each.epilogue == "none" for block in standard for each in block)


def test_only_installed_backends_are_asked() -> None:
    blocks = gpu_plan.standard("nvidia-h200", backends=["cupy", "torch_gpu"])
    assert {each.backend for block in blocks for each in block} == {"cupy", "torch_gpu"}


def test_numba_is_launched_because_it_cannot_be_captured() -> None:
    assert gpu_plan.point("x", SHAPE, Dense(), 0.0, gpu_plan.NUMBA[0]).launch_mode == "call"


def test_a_user_may_ask_for_any_pattern_and_sparsity() -> None:
    asked = gpu_plan.points([SHAPE, SHAPE], "x", patterns=[BlockWise(32, 32), NM(2, 4)], sparsities=(0.7,))
    assert {(str(each.pattern), each.sparsity) for each in asked} == {("block:32x32", 0.7), ("nm:2:4", 0.5)}
    assert {each.kernel for each in asked if each.pattern == NM(2, 4)} == {"auto", "cusparselt", "cutlass"}
    everything = gpu_plan.points([SHAPE], "x")
    assert {each.backend for each in everything} == set(gpu_plan.BACKENDS)


# The summary ------------------------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_dense_and_to_the_fastest_peer(tmp_path: Path) -> None:
    peers = [gpu_plan.point("nvidia-h200", SHAPE, NM(2, 4), 0.5, kernel) for kernel in gpu_plan.SEMI_STRUCTURED[:2]]
    ours = gpu_plan.point("nvidia-h200", SHAPE, NM(2, 4), 0.5, OURS[0])
    frame = run(tmp_path, [dense(DENSE[0]), dense(DENSE[1]), point(), ours, *peers])
    rows = gpu_summary.compared(frame).set_index("point_id")
    assert rows["dense_seconds"].tolist() == pytest.approx([1e-4] * 6)
    assert rows.loc[ours.id, "peer_seconds"] == pytest.approx(1e-4)
    assert pd.isna(rows.loc[point().id, "peer_seconds"])
    summary = (tmp_path / "summary.txt").read_text()
    assert "nm:2:4         50% cupy         auto        2.00x dense   2.00x peer  1 shapes" in summary
    assert "vector:32      75% cupy         auto        4.00x dense      -  peer  1 shapes" in summary
    assert "linear 256x128 on 64" in summary and "0.1 TFLOP/s" in summary


def test_other_shapes_and_other_cache_modes_are_not_compared(tmp_path: Path) -> None:
    frame = run(tmp_path, [dense(shape=LinearShape(512, 128, 64))], [point()])
    assert gpu_summary.compared(frame).set_index("point_id")["dense_seconds"].isna()[point().id]
    cold = frame.assign(cache_mode="cold", m=256)
    mixed = pd.concat([cold[cold["pattern"] == "dense"], frame[frame["pattern"] != "dense"]])
    assert gpu_summary.compared(mixed).set_index("point_id")["dense_seconds"].isna()[point().id]


def test_convolutions_are_named_by_their_filters(tmp_path: Path) -> None:
    shape = Conv2dShape(2, 8, 5, 6, 64, 3, 3)
    run(tmp_path, [dense(gpu_plan.DENSE_CONV[0], shape), point(shape=shape, kernel=gpu_plan.OURS_CONV[0])])
    assert "conv2d 64x8x3x3 on 2x5x6" in (tmp_path / "summary.txt").read_text()


# Tests and verdict ------------------------------------------------------------------------------------------------


def test_the_gpus_tests_are_judged_by_their_exit_code() -> None:
    python = sys.executable
    passed = gpu_session.run_tests(30.0, [python, "-c", "print('== 3 passed in 1.0s ==')"])
    assert passed.passed and passed.verdict == "GPU tests: passed: 3 passed in 1.0s"
    failed = gpu_session.run_tests(30.0, [python, "-c", "print('1 failed'); raise SystemExit(1)"])
    assert not failed.passed and failed.verdict == "GPU tests: FAILED (exit code 1): 1 failed"
    skipped = gpu_session.run_tests(30.0, [python, "-c", "print('275 skipped')"])
    assert not skipped.passed and "275 skipped" in skipped.verdict
    none = gpu_session.run_tests(30.0, [python, "-c", "raise SystemExit(5)"])
    assert not none.passed and none.verdict == "GPU tests: there are none"


def test_tests_that_hang_are_stopped_and_quoted() -> None:
    code = "import time; print('collecting', flush=True); time.sleep(60)"
    stopped = gpu_session.run_tests(1.0, [sys.executable, "-c", code])
    assert not stopped.passed and stopped.verdict == "GPU tests: not done after 1 s"
    assert stopped.output == "collecting\n"


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("status", ["ok", "incorrect"])
@pytest.mark.parametrize("late", [None, Incomplete("the time is over")])
def test_a_wrong_result_weighs_more_than_points_that_are_left(
    passed: bool, status: str, late: Incomplete | None
) -> None:
    table = pd.DataFrame({"status": ["ok", status]})
    verdict = gpu_session.judge(Outcome(passed, "GPU tests: said so", ""), table, late)
    if not passed or status == "incorrect":
        assert isinstance(verdict, PromiseMissed) and "GPU tests: said so" in str(verdict)
    else:
        assert verdict is late


def test_a_machine_without_a_gpu_is_told_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fakes.FakeNvml(driver=False))
    monkeypatch.setenv(gpu_session.OUT, str(tmp_path))
    assert gpu_session.run() == EnvironmentUnusable.exit_code == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("latbench: no NVIDIA driver; this needs a machine with")
    assert not list(tmp_path.iterdir())


def test_a_folder_for_the_results_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(gpu_session.OUT, raising=False)
    assert gpu_session.run() == UsageError.exit_code
    assert "LATBENCH_OUT" in capsys.readouterr().err


def test_a_disk_that_refuses_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        run(blocked, [dense()])
