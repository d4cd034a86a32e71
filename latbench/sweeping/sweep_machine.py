"""What a sweep measures on: a CPU here, a GPU in `latbench.sweeping.gpu_machine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from latbench import backends
from latbench.backends import reference
from latbench.base import cgroups
from latbench.machines import devices
from latbench.machines.ceilings import Ceilings, Kept
from latbench.runners.worker_process import Worker
from latbench.sweeping.roofline_pace import CpuPace, Roofline
from latbench.sweeping.settings import SecondsLeft
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

if TYPE_CHECKING:
    import pandas as pd

PREPARE = "latbench.backends:prepare"  # what a worker is asked to do with a point

PREPARE_SECONDS = 300.0  # compiling and tuning a kernel takes seconds; this is a hang
BURST_SECONDS = 120.0  # for one of Settings.round_seconds
CEILINGS_SECONDS = 120.0  # to find a CPU's: they take some seconds, most of them compiling


class SweepMachine(Protocol):
    """What a sweep measures on; `CpuMachine` here, a GPU in `latbench.sweeping.gpu_machine`."""

    @property
    def device(self) -> str:
        """Its name in tables."""

    @property
    def task(self) -> str:
        """The "module:function" that a worker is asked to make a point ready with."""

    @property
    def start_seconds(self) -> float:
        """How much longer it may take in a process that has just started."""

    @property
    def prepare_seconds(self) -> float:
        """How long that may take before it counts as a hang."""

    @property
    def burst_seconds(self) -> float:
        """How long a burst may take before it counts as a hang."""

    @property
    def timer(self) -> str:
        """What a point that gives no timer of its own is timed by."""

    @property
    def disturbed_status(self) -> str:
        """The status of a point that was disturbed whenever it was sampled: noisy or throttled."""

    @property
    def threads_of_processes(self) -> Executor | None:
        """Threads in which the processes of a block get their points ready side by side; None: one after the other.

        The threads outlive the processes: Linux ends a worker with the thread that started it.
        """

    @property
    def host_task(self) -> str | None:
        """The "module:function" that does the part of getting a point ready that leaves the device alone. Processes
        do it side by side; the rest (`task`) takes turns, because it also finds out how long the point takes.
        """

    def environment(self) -> dict[str, Any]:
        """What is told of its environment: texts and numbers by name, env_id among them."""

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """What stands in the column backend_version: of the engine, its libraries and our kernels. `families` are our
        kernel families that were tried until one ran the point; None: all that may be.
        """

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Of each row of a table, whether it timed the versions that are here now."""

    def process(self, backend: str) -> str:
        """The name of the process that runs a backend; several may share one."""

    def worker(self, process: str) -> Worker:
        """A process of that name, not yet started."""

    def watch(self) -> Callable[[], dict[str, Any]]:
        """Begins to watch the whole machine; call the result for the telemetry columns of the time since."""

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """The telemetry columns of one row, from what its bursts reported."""

    def pace(self, seconds_left: SecondsLeft) -> Roofline[Any] | None:
        """What it can do at most, and the fixed work that is timed every few bursts, unless the device tells itself
        when it is slow; None where neither is wanted. `seconds_left` bounds every request to its worker. Raises
        TaskFailed or WorkerDied where it cannot be measured.
        """

    def available_bytes(self) -> float:
        """The memory that points of one block may take together."""

    def needed_bytes(self, point: Point) -> float:
        """About what one of them takes."""


class CpuMachine:
    """This machine's CPU, with `threads` threads for each engine."""

    timer = "perf_counter"
    disturbed_status = "noisy"
    threads_of_processes = None  # kernels are tuned by timing them, and each has all cores
    host_task = None
    start_seconds = 0.0  # prepare_seconds has room for it
    burst_seconds = BURST_SECONDS

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.device = devices.cpu_device()

    @property
    def task(self) -> str:
        """See Machine."""
        return PREPARE

    @property
    def prepare_seconds(self) -> float:
        """See Machine."""
        return PREPARE_SECONDS

    def environment(self) -> dict[str, Any]:
        """See Machine."""
        return devices.environment(self.threads)

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """See Machine."""
        return backends.version(point.backend)

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See Machine: a row of a CPU holds whatever its version."""
        return np.ones(len(table), bool)

    def process(self, backend: str) -> str:
        """One a backend: spinning threads of one would slow the next."""
        return backend

    def worker(self, process: str) -> Worker:
        """See Machine."""
        return Worker(threads=self.threads, name=process)

    def watch(self) -> Callable[[], dict[str, Any]]:
        """See Machine."""
        before = devices.cpu_times()
        return lambda: devices.telemetry(before)

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """Nothing: a CPU is only watched as a whole."""
        return {}

    def pace(self, seconds_left: SecondsLeft) -> CpuPace:
        """A product, a sum over memory, what cores hand on; and the CPU's ceilings, measured when there are none."""
        worker = Worker(threads=self.threads, name="reference")
        worker.seconds_left = seconds_left

        def find() -> Ceilings:
            found: Ceilings = worker.call("latbench.backends.reference:find", self.threads, timeout=CEILINGS_SECONDS)
            return found

        try:
            return CpuPace(worker, Kept(self.device, self.threads, reference.WORK, find), self.threads)
        except BaseException:
            worker.close()
            raise

    def available_bytes(self) -> float:
        """See Machine."""
        machine, granted = psutil.virtual_memory().available, cgroups.available_bytes()
        return float(machine if granted is None else min(machine, granted)) / 4

    def needed_bytes(self, point: Point) -> float:
        """See Machine."""
        return estimate_cpu_bytes(point)


def estimate_cpu_bytes(point: Point) -> float:
    """About what a point takes: its weight, and copies of it until they pass the caches or are as many as there may
    be; an engine may hold each of them twice, as it was given and as it is multiplied. A convolution's go with its
    images, which each thread may lay out.
    """
    shape = point.shape
    weight, activations = 4 * shape.m * shape.k, 4 * shape.n * (shape.m + shape.k)
    packed = weight * min(1.0, 2 * (1 - point.sparsity))  # what is kept brings its place along
    if isinstance(shape, Conv2dShape):
        packed += 4 * shape.batch * shape.c_in * shape.h * shape.w * point.threads
    copies = min(backends.cold_bytes() + packed, backends.MOST_COPIES * packed)
    return 3 * weight + 2 * copies + 2 * activations
