"""A machine for nodes of tests: its points always take the same time, and may take down what measures them."""

import contextlib
import errno
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from latbench.base.environments import hash_environment
from latbench.errors import EnvironmentUnusable
from latbench.runners.worker_process import Worker
from latbench.sweeping.sweep_machine import CpuMachine
from latbench.timing.sampling import Burst
from latbench.workloads.points import Point

FINE, KILLS = range(2)


def hash_of(cache_folder: str) -> str:
    return hashlib.sha256(cache_folder.encode()).hexdigest()[:12]


class Machine(CpuMachine):
    """Its device is made up; its environment tells nodes apart by Slurm's names, or by their cache folders."""

    task = f"{__file__}:prepare"
    timer = "made_up"

    def __init__(self, device: str = "nvidia-a100-sxm4-80gb") -> None:
        super().__init__(threads=1)
        self.device = device

    def environment(self) -> dict[str, Any]:
        node = os.environ.get("SLURMD_NODENAME") or os.environ["XDG_CACHE_HOME"]
        row = {"device": self.device, "device_uuid_hash": hash_of(node), "threads": 1}
        return {"env_id": hash_environment(row), **row}

    def pace(self, seconds_left: Any) -> None:  # type: ignore[override]
        """No reference kernels: finding ceilings takes seconds."""

    def version(self, point: Point, families: Any = None) -> str:
        return "1"

    def worker(self, process: str) -> Worker:
        """It is told who measures, for points that kill it."""
        return Worker(threads=1, name=process, environment={"MEASURED_BY": str(os.getpid())})


class Timer:
    """Always the same sample, never disturbed: five bursts tell its median."""

    inner_loops = 1

    def __init__(self) -> None:
        self.facts = {"kernel_used": "made up", "nnz": 1, "sparsity_actual": 0.5, "flop_nnz": 2000, "bytes_min": 10}

    def burst(self, seconds: float) -> Burst:
        time.sleep(seconds)
        return Burst([1e-3] * 4)


def prepare(point: Point) -> Timer:
    if point.seed == KILLS:
        os.kill(int(os.environ["MEASURED_BY"]), signal.SIGKILL)
    return Timer()


def tool(factor: int) -> Any:
    return lambda number: factor * number


def tool_of_a_full_disk(folder: str, nodes: int) -> Any:
    """Of the first so many nodes that ask, with what is in `folder` to count them, the disk is full."""
    for number in range(nodes):
        with contextlib.suppress(FileExistsError):
            Path(folder, str(number)).touch(exist_ok=False)
            return _write
    return tool(3)


def _write(number: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse() -> None:
    raise EnvironmentUnusable("--gpu a100 requested, but no NVIDIA driver")


def fatal() -> Any:
    return lambda number: os.kill(os.getpid(), signal.SIGKILL)
