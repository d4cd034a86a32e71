"""Sweeps on nodes that are none: what is handed out, what is written, and what becomes of points that lose nodes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import node_tasks
import pytest

from latbench.cli.sweep_device import SweepCommandOptions, open_cluster
from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.runners.block_scheduler import FunctionCall, LostNodes, Node
from latbench.runners.device_lock import lock_device
from latbench.runners.worker import load_function
from latbench.sweeping import sweep
from latbench.sweeping.cluster import (
    ClusterSite,
    NodeBench,
    NodeInventory,
    hash_sources,
    inspect_node,
    open_matching_machine,
    survey_nodes,
)
from latbench.sweeping.settings import SweepOptions, SweepSettings, SweepStopped, SweepSummary
from latbench.sweeping.sweep import run_sweep, run_sweep_on_cluster
from latbench.tables.table import read_environments, read_table
from latbench.workloads.points import Point
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

TASKS = Path(node_tasks.__file__)
DEVICE = "nvidia-a100-sxm4-80gb"
QUICK = SweepSettings(max_seconds=0.02, round_seconds=0.0005, block_points=4)


def node(name: str) -> Node:
    return Node(name, name, 8.0, 1.0, ("A100",))


class FakeNodes:
    """Nodes that are this process, one block after the other. A block with a `deadly` point loses its nodes, `most`
    of them in all; `seen` is what nodes say of themselves.
    """

    def __init__(self, deadly: Callable[[Point], bool] = lambda point: False, most: int = 99, **seen: Any) -> None:
        self.nodes = [node(name) for name in seen or ("a", "b", "c")]
        self.seen, self.deadly, self.most = seen, deadly, most
        self.handed: list[int] = []

    def keep(self, kept: Iterable[Node]) -> None:
        self.nodes = list(kept)

    def ask(self, function: str, *args: Any) -> dict[Node, Any]:
        return {each: self.seen[each.name] for each in self.nodes}

    def run(
        self,
        prepare: FunctionCall,
        items: Iterable[list[Point]],
        arguments: Callable[[list[Point]], tuple[Any, ...]],
        *,
        tries: int = 2,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[list[Point], Any]]:
        name, *given = prepare
        with contextlib.closing(load_function(name)(*given)) as measure:
            for block in items:
                self.handed.append(len(block))
                if self.most <= 0:
                    raise Incomplete("every node that could measure is lost")
                if any(map(self.deadly, block)):
                    self.most -= tries
                    yield block, LostNodes(("it burned",) * tries)
                else:
                    yield block, measure(*arguments(block))


@pytest.fixture(autouse=True)
def no_other_sweep(own_lock: Path) -> None:
    """Made-up nodes lock the device as others do."""


def point(m: int, sparsity: float = 0.5) -> Point:
    return Point(DEVICE, "cupy", "auto", LinearShape(m, 8, 4), VectorWise(8), sparsity, 1)


def points(shapes: int) -> list[Point]:
    return [point(m, sparsity) for m in range(1, shapes + 1) for sparsity in (0.5, 0.75)]


def measure(folder: Path, wanted: list[Point], taken: FakeNodes, **options: Any) -> SweepSummary:
    there = ClusterSite(taken, DEVICE, (f"{TASKS}:Machine",), 0, QUICK)
    return run_sweep_on_cluster(folder, lambda table: wanted, elsewhere=there, settings=QUICK, **options)


def test_a_table_from_nodes_is_one_from_here(tmp_path: Path) -> None:
    wanted = points(3)
    assert set(measure(tmp_path / "there", wanted, FakeNodes()).statuses.values()) == {"ok"}
    machine = load_function(f"{TASKS}:Machine")()
    run_sweep(tmp_path / "here", lambda table: wanted, machine=machine, settings=QUICK)
    here, there = (read_table(tmp_path / name) for name in ("here", "there"))
    assert set(here["point_id"]) == set(there["point_id"]) and len(here) == len(there) == 6
    assert (here.notna().any() == there.notna().any()).all()  # the same columns are filled
    assert set(there["env_id"]) == set(read_environments(tmp_path / "there")["env_id"])
    assert there.groupby("block")["seq"].max().add(1).tolist() == there.groupby("block").size().tolist()


def test_what_is_there_is_not_handed_out_again(tmp_path: Path) -> None:
    measure(tmp_path, points(2), FakeNodes())
    again = FakeNodes()
    assert measure(tmp_path, points(3), again).skipped == 4
    assert again.handed == [2]


def test_there_are_blocks_for_all_nodes(tmp_path: Path) -> None:
    few, many = FakeNodes(), FakeNodes()
    measure(tmp_path / "few", points(3), few)
    measure(tmp_path / "many", points(12), many)
    assert few.handed == [2] * 3 and many.handed == [4] * 6


def test_a_point_that_takes_nodes_down_is_found_and_recorded(tmp_path: Path) -> None:
    taken = FakeNodes(deadly=lambda each: each == point(2))
    statuses = measure(tmp_path, points(6), taken).statuses
    assert statuses == {each.id: "error" if each == point(2) else "ok" for each in points(6)}
    assert sorted(taken.handed) == [1, 1, 1, 1, 4, 4, 4]
    row = read_table(tmp_path).set_index("point_id").loc[point(2).id]
    assert row["error"] == "cupy may take nodes down, this point was alone on one: it burned"
    assert len(read_table(tmp_path)) == 12


def test_when_no_node_is_left_what_is_measured_is_kept(tmp_path: Path) -> None:
    said = r"every node that could measure is lost: 9 of 12 points are in .*, and the same command goes on"
    with pytest.raises(SweepStopped, match=said) as stopped:
        measure(tmp_path, points(6), FakeNodes(deadly=lambda each: each.shape.m == 2, most=3))
    assert len(read_table(tmp_path)) == len(stopped.value.summary.statuses) == 9
    assert measure(tmp_path, points(6), FakeNodes()).skipped == 8


def test_a_used_up_time_budget_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Incomplete, match="time budget is used up: 0 of 12 points"):
        measure(tmp_path, points(6), FakeNodes(), options=SweepOptions(time_budget=0.0))
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(sweep, "monotonic", lambda: float(next(clock)))
    taken = FakeNodes()
    with pytest.raises(Incomplete, match="time budget is used up: 4 of 12 points"):
        measure(tmp_path, points(6), taken, options=SweepOptions(time_budget=15.0))
    assert taken.handed == [4]


class BusyNodes(FakeNodes):
    """Nodes that others have, for ever."""

    def run(self, prepare: FunctionCall, items: Iterable[list[Point]], *args: Any, **more: Any) -> Iterator[Any]:
        for _ in items:
            while True:
                more["waiting"]()
        yield


def test_a_time_budget_is_kept_while_others_have_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(sweep, "monotonic", lambda: float(next(clock)))
    with pytest.raises(Incomplete, match="time budget is used up: 0 of 12 points"):
        measure(tmp_path, points(6), BusyNodes(), options=SweepOptions(time_budget=100.0))


def test_a_node_that_runs_out_of_time_keeps_what_it_has(tmp_path: Path) -> None:
    with contextlib.closing(NodeBench((f"{TASKS}:Machine",), 0, QUICK, 0.0)) as on_node:
        assert on_node(points(2), False, 0.0) == []
        [(environment, rows)] = on_node(points(2), False, None)
    assert [row["status"] for row in rows] == ["ok"] * 4 and {row["env_id"] for row in rows} == {
        environment["env_id"]
    }


def test_an_interruption_keeps_what_came_back(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Incomplete, match="interrupted: 4 of 12 points"):
        measure(tmp_path, points(6), FakeNodes(), saved=interrupt)
    assert len(read_table(tmp_path)) == 4


def seen(device: str = DEVICE, cores: int = 8, backends: str = "cupy torch_gpu", sources: str = "") -> NodeInventory:
    return NodeInventory(device, cores, 2 * cores, frozenset(backends.split()), sources or hash_sources(), ())


def test_nodes_have_in_common_what_all_of_one_device_have() -> None:
    taken = FakeNodes(a=seen(), b=seen("nvidia-a100-pcie-40gb"), c=seen(cores=4, backends="cupy"))
    told: list[str] = []
    assert survey_nodes(taken, "a100", told.append) == seen(cores=4, backends="cupy")
    assert [each.name for each in taken.nodes] == ["a", "c"]
    assert told == [f"node b is left out: it has nvidia-a100-pcie-40gb, and this table is of {DEVICE} only"]


def test_nodes_with_another_latbench_are_refused() -> None:
    with pytest.raises(EnvironmentUnusable, match="node a has another latbench than this one"):
        survey_nodes(FakeNodes(a=seen(sources="older")), "a100", lambda line: None)


def test_a_node_says_what_it_has() -> None:
    its = inspect_node(None)
    assert its.cores >= 1 and {"numba", "torch"} <= its.backends and its.sources == hash_sources()


def test_a_late_node_with_too_few_processors_is_left_out() -> None:
    common = inspect_node(None)
    machine = "latbench.sweeping.sweep_machine:CpuMachine"
    assert open_matching_machine(common, None, (machine, common.processors)).device == common.device
    with pytest.raises(EnvironmentUnusable, match=rf"{common.processors + 1} threads: this process may use"):
        open_matching_machine(common, None, (machine, common.processors + 1))


def test_a_cluster_refuses_more_threads_than_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = FakeNodes(a=seen("a-cpu", 8), b=seen("a-cpu", 2))
    closed: list[bool] = []
    nodes.close = lambda: closed.append(True)  # type: ignore[attr-defined]
    monkeypatch.setattr("latbench.runners.ray_nodes.RayNodes", lambda gpu: nodes)
    how = SweepCommandOptions(0, None, 0.0, 1, False, False, True, False)
    assert open_cluster("ray", None, 4, how, ()).threads == 4
    with pytest.raises(UsageError, match="--threads 5: one of the nodes may use 4 processors only"):
        open_cluster("ray", None, 5, how, ())
    assert closed == [True]


def test_a_node_waits_for_another_sweep_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    on_node = NodeBench((f"{TASKS}:Machine",), 0, QUICK, wait_seconds=0.0)
    unit = on_node._bench.environment["device_uuid_hash"]
    with (
        contextlib.closing(on_node),
        lock_device(DEVICE, unit),
        pytest.raises(EnvironmentUnusable, match="another latbench process measures"),
    ):
        on_node([point(1)], 0, None)
