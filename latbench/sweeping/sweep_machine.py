"""The machine that a sweep measures on: a CPU here, a GPU in `latbench.sweeping.gpu_machine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from latbench.backends.cpu import cpu_reference, prepare_point
from latbench.backends.cpu.cpu_versions import CpuVersions
from latbench.base.cgroups import read_available_bytes
from latbench.machines.ceilings import CachedCeilings, Ceilings
from latbench.machines.devices import describe_cpu_environment, name_cpu, read_cpu_times, read_telemetry
from latbench.machines.processors import check_threads
from latbench.runners.worker_process import Worker
from latbench.sweeping.roofline_pace import CpuPace, SweepRoofline
from latbench.sweeping.settings import SecondsLeft
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

if TYPE_CHECKING:
    import pandas as pd

PREPARE = "latbench.backends.cpu.prepare_point:prepare_point"  # the task that prepares a point

PREPARE_SECONDS = 300.0  # compiling and tuning takes seconds; longer is a hang
BURST_SECONDS = 120.0  # time limit of a burst
CEILINGS_SECONDS = 120.0  # measuring a CPU's ceilings takes some seconds, mostly for compiling


class SweepMachine(Protocol):
    """A machine that a sweep measures on."""

    @property
    def device(self) -> str:
        """The device's name in tables."""

    @property
    def task(self) -> str:
        """The "module:function" that prepares a point in a worker."""

    @property
    def start_seconds(self) -> float:
        """Additional time limit for a process that has just started."""

    @property
    def prepare_seconds(self) -> float:
        """Time limit for the preparation of a point; longer counts as a hang."""

    @property
    def burst_seconds(self) -> float:
        """Time limit for a burst; longer counts as a hang."""

    @property
    def timer(self) -> str:
        """The timer of points that name none."""

    @property
    def disturbed_status(self) -> str:
        """The status of a point that was disturbed in every try: noisy or throttled."""

    @property
    def threads_of_processes(self) -> Executor | None:
        """Threads in which the processes of a block prepare points in parallel; None: one after the other.

        The threads outlive the processes, because Linux ends a worker with the thread that started it.
        """

    @property
    def host_task(self) -> str | None:
        """The "module:function" for the part of the preparation that leaves the device alone; None: no such part.

        Processes do it in parallel. The rest (`task`) takes turns, because it also finds out how long the point
        takes.
        """

    def environment(self) -> dict[str, Any]:
        """Return the environment: texts and numbers by name, with env_id."""

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """Return the column backend_version: of the engine, its libraries and our kernels.

        `families` are our kernel families that were tried until one ran the point; None: all possible ones.
        """

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return for each row of a table whether it timed the present versions."""

    def process(self, backend: str) -> str:
        """Return the name of the process that runs a backend; several backends may share one."""

    def worker(self, process: str) -> Worker:
        """Return a process of that name, not yet started."""

    def watch(self) -> Callable[[], dict[str, Any]]:
        """Start to watch the whole machine; the returned function gives the telemetry columns since then."""

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """Return the telemetry columns of one row from the states of its bursts."""

    def pace(self, seconds_left: SecondsLeft) -> SweepRoofline[Any] | None:
        """Return the device's ceilings and reference work; None where neither is wanted.

        `seconds_left` bounds every request to its worker. Raises TaskFailed or WorkerDied where it cannot be
        measured.
        """

    def available_bytes(self) -> float:
        """Return the memory that the points of one block may take together."""

    def needed_bytes(self, point: Point) -> float:
        """Return about how much memory a point takes."""


class CpuMachine:
    """This machine's CPU, with `threads` threads for each engine. Raises UsageError for too many."""

    timer = "perf_counter"
    disturbed_status = "noisy"
    threads_of_processes = None  # one at a time, because tuning times kernels that use all cores
    host_task = None
    start_seconds = 0.0  # included in prepare_seconds
    burst_seconds = BURST_SECONDS

    def __init__(self, threads: int) -> None:
        check_threads(threads, f"{threads} threads")
        self.threads = threads
        self.device = name_cpu()
        self.versions = CpuVersions.find()

    @property
    def task(self) -> str:
        """See SweepMachine."""
        return PREPARE

    @property
    def prepare_seconds(self) -> float:
        """See SweepMachine."""
        return PREPARE_SECONDS

    def environment(self) -> dict[str, Any]:
        """See SweepMachine."""
        return describe_cpu_environment(self.threads)

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """See SweepMachine."""
        return self.versions.describe(point.backend, families or ())

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See SweepMachine."""
        return self.versions.current(table)

    def process(self, backend: str) -> str:
        """Return one process per backend, because spinning threads of one would slow the next."""
        return backend

    def worker(self, process: str) -> Worker:
        """See SweepMachine."""
        return Worker(threads=self.threads, name=process)

    def watch(self) -> Callable[[], dict[str, Any]]:
        """See SweepMachine."""
        before = read_cpu_times()
        return lambda: read_telemetry(before)

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """Return nothing: a CPU is only watched as a whole."""
        return {}

    def pace(self, seconds_left: SecondsLeft) -> CpuPace:
        """Return the CPU's reference work and its ceilings, which are measured unless they are cached."""
        worker = Worker(threads=self.threads, name="reference")
        worker.seconds_left = seconds_left

        def find() -> Ceilings:
            found: Ceilings = worker.call(
                "latbench.backends.cpu.cpu_reference:measure_ceilings", self.threads, timeout=CEILINGS_SECONDS
            )
            return found

        try:
            return CpuPace(worker, CachedCeilings(self.device, self.threads, cpu_reference.WORK, find), self.threads)
        except BaseException:
            worker.close()
            raise

    def available_bytes(self) -> float:
        """See SweepMachine."""
        machine, granted = psutil.virtual_memory().available, read_available_bytes()
        return float(machine if granted is None else min(machine, granted)) / 4

    def needed_bytes(self, point: Point) -> float:
        """See SweepMachine."""
        return estimate_cpu_bytes(point)


def estimate_cpu_bytes(point: Point) -> float:
    """Return about how many bytes a point takes.

    That is its weight, and copies of it until they exceed the caches or reach the limit. An engine may hold each copy
    twice: as given and as multiplied. A convolution's copies include its images, which each thread may lay out.
    """
    shape = point.shape
    weight, activations = 4 * shape.m * shape.k, 4 * shape.n * (shape.m + shape.k)
    packed = weight * min(1.0, 2 * (1 - point.sparsity))  # kept weights are stored with their positions
    if isinstance(shape, Conv2dShape):
        packed += 4 * shape.batch * shape.c_in * shape.h * shape.w * point.threads
    copies = min(prepare_point.count_cold_bytes() + packed, prepare_point.MOST_COPIES * packed)
    return 3 * weight + 2 * copies + 2 * activations
