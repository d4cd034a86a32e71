"""`python -m latbench.cli.gpu_session` on a GPU that is not there: a visit can be rehearsed from its first command to
its last, and so can what becomes of its table.

python fake_session.py [--points N] ARGUMENTS OF THE SESSION
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
import gpu_fakes

from latbench.sweeping.settings import SweepSettings

ROOT = Path(__file__).parents[3]
POINTS = "--points"  # how many points the standard sweep has


def prepare(point):
    """What a worker does: made-up times of a point, with the work that such a point is."""
    ready = gpu_fakes.prepare(point)
    m, k, n = point.shape.m, point.shape.k, point.shape.n
    nnz = round((1 - point.sparsity) * m * k)
    ready.facts |= {
        "kernel_used": f"fake.{point.kernel}", "nnz": nnz, "sparsity_actual": 1 - nnz / (m * k),
        "flop_dense": 2 * m * k * n, "flop_nnz": 2 * nnz * n, "bytes_min": 2 * (nnz + m * n), "max_rel_err": 0.0,
        "weight_copies": 2, "flags": "",
    }  # fmt: skip
    return ready


def main(arguments: list[str]) -> int:
    sys.modules["pynvml"] = gpu_fakes.FakeNvml(gpu_fakes.H200)
    sys.path.insert(0, str(ROOT))
    from latbench.base.environments import hash_environment
    from latbench.cli import gpu_session
    from latbench.machines.nvml import describe_gpu_environment
    from latbench.sweeping import gpu_points

    if arguments[:1] == [POINTS]:
        gpu_points.MOST_POINTS, arguments = int(arguments[1]), arguments[2:]

    class Machine(gpu_fakes.FakeMachine):
        """An H200 on which every backend is installed."""

        task = f"{__file__}:prepare"

        def __init__(self, gpu):
            super().__init__()
            self.gpu = gpu
            self.versions = dict.fromkeys(gpu_points.GPU_ENGINES, "1")

        def environment(self):
            row = {**describe_gpu_environment(self.gpu), "cublas": "13.1.0.3", "triton": "3.6.0"}
            del row["env_id"]
            return {"env_id": hash_environment(row), **row}

        def process(self, backend):
            return gpu_points.GPU_ENGINES[backend].process

    gpu_session.GpuMachine = Machine
    gpu_session.explain_missing, gpu_session.explain_driver_refusals = (lambda gpu: {}), (lambda gpu, backends: {})
    gpu_session.find_installed = lambda: dict.fromkeys(gpu_points.GPU_ENGINES, "1")
    quick = SweepSettings(rel_error=0.1, max_seconds=0.02, round_seconds=0.001)
    measure = gpu_session.measure_visit
    gpu_session.measure_visit = lambda visit: measure(replace(visit, settings=quick))
    return gpu_session.run_visit(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
