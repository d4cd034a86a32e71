"""A GPU as what `latbench.sweep` measures on: its name, its processes, its memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from latbench import devices
from latbench.backends.on_gpu import BACKENDS, MOST_COPIES, UUID
from latbench.gpu import nvml, roofline
from latbench.gpu.ceilings import GpuCeilings
from latbench.gpu.names import Gpu
from latbench.gpu.roofline import GpuPace
from latbench.gpu.timing import ROTATED_TIMES_L2
from latbench.plan import Point
from latbench.runners.local import Worker, WorkerDied
from latbench.sweep import Settings

SETTINGS = Settings(rel_error=0.005, max_seconds=0.2, round_seconds=0.02)
"""A GPU alone repeats itself within a percent; a burst is a few batches."""

_LARGEST_L2 = 128 * 2**20  # B200's; only for the estimate of memory
_MEMORY_SHARE = 0.5  # of what is free: the rest is the oracle's, in float64, and the libraries'


class GpuMachine:
    """One GPU of this machine."""

    task = "latbench.backends.on_gpu:prepare"
    timer = "cuda_event"
    disturbed_status = "throttled"
    start_seconds = 30.0  # importing torch or CuPy from a cold disk, and starting CUDA
    prepare_seconds = 40.0  # compiling a kernel takes a second, the search for Triton's parameters twelve
    burst_seconds = 15.0  # a burst takes milliseconds

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.device = gpu, gpu.device
        self._started: dict[str, Worker] = {}  # that nobody has asked for yet

    def start(self, backends: Iterable[str]) -> None:
        """Start the processes of these backends and of the ceilings at the same time: each takes five to ten seconds
        to import what it needs and to start CUDA, one after the other the better part of a minute.
        """
        modules = {"ceilings": [GpuPace.module], "reference": [GpuPace.module]}
        for backend in backends:
            modules.setdefault(self.process(backend), []).append(BACKENDS[backend].module)
        for process, needed in modules.items():
            worker = self.worker(process)
            with contextlib.suppress(WorkerDied):  # whoever needs it hears of it
                worker.begin("latbench.backends.on_gpu:load", needed)
            self._started[process] = worker

    def close(self) -> None:
        """End what was started and not asked for."""
        while self._started:
            self._started.popitem()[1].close()

    def environment(self) -> dict[str, Any]:
        """See Machine."""
        return nvml.environment(self.gpu)

    def version(self, backend: str) -> str | None:
        """What stands in the column backend_version: of our kernels it changes with their sources."""
        return BACKENDS[backend].version()

    def process(self, backend: str) -> str:
        """Libraries share a process, which saves loading them; each of our own backends may crash alone."""
        return BACKENDS[backend].process

    def worker(self, process: str) -> Worker:
        """A process that sees this GPU and no other: the one of that name that `start` began, or a new one."""
        if process in self._started:
            return self._started.pop(process)
        environment = {"CUDA_VISIBLE_DEVICES": self.gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", UUID: self.gpu.uuid}
        return Worker(threads=devices.cores(), name=process, environment=environment)

    def watch(self) -> Callable[[], dict[str, Any]]:
        """The host's load and stolen time; the GPU's state comes with each burst."""
        before = devices.cpu_times()

        def since() -> dict[str, Any]:
            return {**devices.telemetry(before), "clock_hertz": None}

        return since

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """See Machine."""
        return nvml.columns(states)

    def pace(self) -> GpuPace:
        """A dense product and reads of memory; the ceilings of the GPU, which are measured when there are none.

        Beside them clocks and event reasons come with every burst.
        """

        def find() -> GpuCeilings:
            with self.worker("ceilings") as worker:  # whose memory is others' again at once
                seconds = self.start_seconds + self.prepare_seconds
                found: GpuCeilings = worker.call("latbench.backends.gpu_reference:find", timeout=seconds)
            return found

        return GpuPace(self.worker("reference"), roofline.kept(self.environment(), find))

    def available_bytes(self) -> float:
        """Half of what is free on the GPU."""
        with nvml.observing(self.gpu.uuid) as observer:
            return _MEMORY_SHARE * observer.free_bytes()

    def needed_bytes(self, point: Point) -> float:
        """Copies enough to be rotated: two at least, and of small layers as many as there may be."""
        shape = point.shape
        weight = 2 * shape.m * shape.k * (1 - point.sparsity)
        each = weight + 2 * shape.n * (shape.m + shape.k)
        return float(min(MOST_COPIES[point.launch_mode] * each, 2 * each + ROTATED_TIMES_L2 * _LARGEST_L2))


def installed() -> dict[str, str]:
    """The backends whose packages are installed here, with their versions."""
    versions = {name: backend.version() for name, backend in BACKENDS.items()}
    return {name: version for name, version in versions.items() if version is not None}


def repository_on_path() -> None:
    """Let workers import from where this process does, though nothing is installed."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
