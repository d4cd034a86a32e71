"""Sweeps on a real Ray cluster of made-up nodes on this machine, of which some are lost on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import node_tasks
import psutil
import pytest
from pyarrow import parquet

from latbench.runners.ray_nodes import RayNodes
from latbench.runners.worker import load_function
from latbench.sweeping.cluster import ClusterSite
from latbench.sweeping.settings import SweepSettings, SweepSummary
from latbench.sweeping.sweep import run_sweep, run_sweep_on_cluster
from latbench.tables.table import read_environments, read_table
from latbench.workloads.points import Point
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LATBENCH = Path(sys.executable).with_name("latbench")
TASKS = Path(node_tasks.__file__)
DEVICE = "nvidia-a100-sxm4-80gb"
FINE, KILLS = range(2)  # as in node_tasks.py

QUICK = SweepSettings(max_seconds=0.2, round_seconds=0.02, block_points=4)


@pytest.fixture(scope="module")
def cluster(ray_head: Any) -> Any:
    """Beside the head three nodes with an A100 that is none, and a node without a GPU.

    Each has a cache folder, by which node_tasks.py tells them apart, and locks of its own: on one machine, too, they
    are to measure at the same time.
    """
    gpu = {"num_gpus": 1, "resources": {"accelerator_type:A100": 1}}
    ray_head.a100s = [
        ray_head.small_node(
            num_cpus=1,
            env_vars=dict.fromkeys(("XDG_CACHE_HOME", "LATBENCH_LOCKS"), str(ray_head.folder / str(number))),
            **(gpu if number < 3 else {}),
        )
        for number in range(4)
    ][:3]
    return ray_head


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def point(m: int, sparsity: float = 0.5, behaviour: int = FINE) -> Point:
    return Point(DEVICE, "cupy", "auto", LinearShape(m, 8, 4), VectorWise(8), sparsity, 1, seed=behaviour)


def measure(folder: Path, points: list[Point], **options: Any) -> tuple[SweepSummary, dict[str, str]]:
    """What a sweep did, and which nodes it lost."""
    with RayNodes("a100") as taken:
        there = ClusterSite(taken, DEVICE, (f"{TASKS}:Machine",), 0, QUICK)
        return run_sweep_on_cluster(
            folder, lambda table: points, elsewhere=there, settings=QUICK, **options
        ), taken.lost


def test_a_killed_node_costs_no_point_and_none_is_there_twice(cluster: Any, own_lock: Path, tmp_path: Path) -> None:
    points = [point(m, sparsity) for m in range(1, 16) for sparsity in (0.5, 0.6, 0.75, 0.9)]
    out, measured = tmp_path / "out", set[str]()

    def kill_a_busy_one() -> None:
        """The node of the block that was written last is idle now; the others are not."""
        frame = read_table(out)
        if len(cluster.a100s) == 3 and len(frame) >= 16:
            last = frame["device_uuid_hash"][frame["block"].idxmax()]
            measured.update(frame["device_uuid_hash"])
            others = [node for node in cluster.a100s if cache_hash(node) != last]
            busy = min(others, key=lambda node: cache_hash(node) not in measured)  # one that has rows, if it can be
            cluster.a100s.remove(busy)
            cluster.remove_node(busy, allow_graceful=False)

    summary, lost = measure(out, points, saved=kill_a_busy_one)
    assert len(lost) == 1 and list(summary.statuses.values()) == ["ok"] * 60
    frame = read_table(out)
    assert len(frame) == 60 and set(frame["point_id"]) == {each.id for each in points}
    environments = read_environments(out).set_index("env_id")
    assert len(environments) >= 2 and set(frame["env_id"]) == set(environments.index)
    assert measured and measured <= set(frame["device_uuid_hash"])  # the lost one's rows, too
    assert (environments["device_uuid_hash"][frame["env_id"]].to_numpy() == frame["device_uuid_hash"]).all()
    assert frame["run_id"].nunique() == 1
    assert frame.groupby("block")["env_id"].nunique().eq(1).all()  # the points of a block took turns on one node

    machine = load_function(f"{TASKS}:Machine")()
    run_sweep(tmp_path / "here", lambda table: points[:4], machine=machine, settings=QUICK)
    here, there = (next(folder.glob("part-*.parquet")) for folder in (tmp_path / "here", out))
    assert parquet.read_schema(here).equals(parquet.read_schema(there), check_metadata=True)
    assert parquet.read_schema(here).serialize() == parquet.read_schema(there).serialize()

    assert measure(out, points)[0].skipped == 60


def cache_hash(node: Any) -> str:
    """What the rows of a node say of it."""
    return load_function(f"{TASKS}:hash_of")(node._ray_params.env_vars["XDG_CACHE_HOME"])


def test_a_point_that_takes_nodes_down_gets_a_row_with_the_reason(
    cluster: Any, own_lock: Path, tmp_path: Path
) -> None:
    deadly = point(1, 0.75, KILLS)
    points = [point(1), deadly, point(1, 0.9), point(2)]
    summary, _ = measure(tmp_path, points)
    assert summary.statuses == {each.id: "error" if each == deadly else "ok" for each in points}
    row = read_table(tmp_path).set_index("point_id").loc[deadly.id]
    assert "may take nodes down" in row["error"] and "its worker process has died" in row["error"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [LATBENCH, "sweep", "--on", "ray", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_a_gpu_that_no_node_has_is_said_at_once(cluster: Any) -> None:
    ended = run("--gpu", "h100")
    assert ended.returncode == 3
    assert ended.stderr.startswith(
        "latbench: --gpu h100 requested, but no node of the Ray cluster has it: they have A100"
    )


def test_ctrl_c_leaves_nothing_running_on_nodes_and_the_same_sweep_goes_on(
    cluster: Any, own_lock: Path, tmp_path: Path, tiny: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("--cpu", "--workload", tiny, "--backends", "numba", "--patterns", "vector:8", "-o", out)
    command = [LATBENCH, "sweep", "--on", "ray", *arguments, "--sparsities", "0.5,0.6,0.75,0.9"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        until(lambda: one.poll() is not None or bool(list(out.glob("part-*.parquet"))))
        one.send_signal(signal.SIGINT)
        stdout, err = one.communicate()
    assert one.returncode == 4 and stdout == "", err
    said = [line for line in err.splitlines() if line.startswith("latbench: ")]
    assert len(said) == 1 and "the same command goes on from there" in said[0] and "Traceback" not in err
    until(lambda: not working())
    before = len(read_table(out))
    ended = run(*arguments, "--sparsities", "0.5", "--json")
    assert ended.returncode == 0, ended.stderr
    assert len(read_table(out)) >= before
    assert not working()


def working() -> list[psutil.Process]:
    """What measures somewhere below this process: the nodes' processes are."""
    every = psutil.Process(os.getpid()).children(recursive=True)
    return [each for each in every if each.is_running() and "latbench.runners.worker" in " ".join(each.cmdline())]
