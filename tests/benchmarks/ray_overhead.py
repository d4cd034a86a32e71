"""What a sweep on Ray costs beside the measuring itself: the same sixty made-up points here and on one node of a Ray
cluster on this machine, a few times in turns.

    python tests/benchmarks/ray_overhead.py
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from latbench.runners.ray_nodes import ADDRESS_VARIABLE, RayNodes
from latbench.runners.worker import load_function
from latbench.sweeping.cluster import ClusterSite
from latbench.sweeping.settings import SweepSettings
from latbench.sweeping.sweep import run_sweep, run_sweep_on_cluster
from latbench.workloads.points import Point
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

MACHINE = f"{Path(__file__).resolve().parents[1] / 'latbench' / 'fakes' / 'node_tasks.py'}:Machine"
QUICK = SweepSettings(max_seconds=0.2, round_seconds=0.02, block_points=4)
ROUNDS = 3


def points(device: str) -> list[Point]:
    shapes = [LinearShape(m, 8, 4) for m in range(1, 16)]
    return [
        Point(device, "cupy", "auto", shape, VectorWise(8), sparsity, 1)
        for shape in shapes
        for sparsity in (0.5, 0.6, 0.75, 0.9)
    ]


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    here, there, starts = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        cluster = Cluster(True, head_node_args={"num_cpus": 0, **small})
        try:
            os.environ[ADDRESS_VARIABLE] = cluster.address
            cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:A100": 1}, **small)
            machine = load_function(MACHINE)()
            wanted = points(machine.device)
            for number in range(ROUNDS):
                began = time.perf_counter()
                run_sweep(Path(folder, f"here{number}"), lambda table: wanted, machine=machine, settings=QUICK)
                here.append(time.perf_counter() - began)
                began = time.perf_counter()
                with RayNodes("a100") as taken:
                    taken.ask("latbench.sweeping.cluster:hash_sources")
                    starts.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    where = ClusterSite(taken, machine.device, (MACHINE,), 0, QUICK)
                    run_sweep_on_cluster(
                        Path(folder, f"there{number}"), lambda table: wanted, elsewhere=where, settings=QUICK
                    )
                    there.append(time.perf_counter() - began)
        finally:
            cluster.shutdown()
    each = (median(there) - median(here)) / len(wanted)
    sys.stdout.write(
        f"here {median(here):.2f} s, on a node {median(there):.2f} s: {each * 1e3:.1f} ms a point; "
        f"and {median(starts):.1f} s to reach and ask the cluster\n"
    )


if __name__ == "__main__":
    main()
