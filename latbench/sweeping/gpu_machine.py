"""A GPU as the machine of a sweep: its name, its processes, its memory."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latbench.backends.gpu.gpu_installation import find_installed
from latbench.backends.gpu.gpu_probe import Probed
from latbench.backends.gpu.gpu_versions import DRIVER, Versions
from latbench.backends.gpu.prepare_gpu_point import MOST_COPIES
from latbench.base.engine_registry import GPU_ENGINES
from latbench.base.environments import hash_environment
from latbench.machines.cuda_libraries import find_library_versions
from latbench.machines.devices import read_cpu_times, read_telemetry
from latbench.machines.gpu_discovery import build_gpu_variables
from latbench.machines.gpu_names import Gpu
from latbench.machines.nvml import describe_gpu_environment, open_observer, summarise_gpu_states
from latbench.machines.processors import count_cores
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from latbench.sweeping.gpu_points import build_probe_points
from latbench.sweeping.gpu_roofline import GpuPace, build_cached_gpu_ceilings
from latbench.sweeping.settings import SecondsLeft, SweepSettings
from latbench.timing.gpu_ceilings import GpuCeilings
from latbench.timing.gpu_events import ROTATED_TIMES_L2
from latbench.workloads.points import Point
from sparse_kernels.cuda import family_fingerprint as fingerprint
from sparse_kernels.cuda.machine import list_architectures
from sparse_kernels.cuda.variants import FAMILIES
from sparse_kernels.registry import NoDevice

if TYPE_CHECKING:
    import pandas as pd

GPU_SETTINGS = SweepSettings(rel_error=0.005, max_seconds=0.2, round_seconds=0.02)
"""Settings of a GPU, whose times vary less than a percent when it is alone; a burst is a few batches."""

_BESIDE = ("ceilings", "reference")  # processes that time no point
BUSY_SECONDS = 30.0  # longest wait until such a process has started
MOST_PROCESSES = 8  # at the same time: those of GPU_ENGINES, and these

_LARGEST_L2 = 128 * 2**20  # B200's; only for the estimate of memory
_MEMORY_SHARE = 0.5  # of the free memory; the rest is for the float64 check and the libraries


class GpuMachine:
    """One GPU of this machine. `close` it when nothing measures there any more."""

    task = "latbench.backends.gpu.prepare_gpu_point:prepare_gpu_point"
    host_task = "latbench.backends.gpu.prepare_gpu_point:pack_gpu_point"
    timer = "cuda_event"
    disturbed_status = "throttled"
    start_seconds = 30.0  # importing torch or CuPy from a cold disk, and starting CUDA
    prepare_seconds = 40.0  # compiling a kernel takes a second, the search for Triton's parameters twelve
    burst_seconds = 15.0  # a burst takes milliseconds

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.device = gpu, gpu.device
        self._started: dict[str, Worker] = {}  # not used yet
        self._loading: dict[str, Future[None]] = {}  # their present work
        self._threads: ThreadPoolExecutor | None = None
        self._loaded: dict[str, dict[str, str | None]] = {}  # libraries, by process
        self._architecture: str | None = None

    @property
    def threads_of_processes(self) -> ThreadPoolExecutor:
        """See SweepMachine."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_PROCESSES, "latbench-gpu")
        return self._threads

    def start(self, backends: Iterable[str]) -> dict[str, str]:
        """Start the processes of these backends, of the ceilings and of the reference, and test each backend.

        All start at the same time, and each backend prepares a small point. A process takes five to ten seconds to
        import its libraries and to start CUDA.

        Returns
        -------
        dict
            Why a backend cannot be used, in a sentence, by backend; without those that can.
        """
        refusals: dict[str, str] = {}
        names: dict[str, list[str]] = {}
        for backend in backends:
            names.setdefault(self.process(backend), []).append(backend)
        self._started = {process: self.worker(process) for process in (*_BESIDE, *names)}
        threads = self.threads_of_processes
        self._loading = {process: threads.submit(self._load, self._started[process]) for process in _BESIDE}
        # Rows of our kernels need fingerprints, which take seconds; they are computed while the processes start.
        threads.submit(self._fingerprint)
        for process, found in zip(names, threads.map(self._probe, names, names.values()), strict=True):
            if isinstance(found, str):
                refusals |= dict.fromkeys(names[process], found)
            else:
                refusals |= found.refusals
                self._loaded[process] = found.libraries
                self._architecture = found.architecture or self._architecture
            if all(name in refusals for name in names[process]):
                self._started.pop(process).close()  # frees its memory on the GPU
        self.__dict__.pop("versions", None)  # the processes have loaded libraries since
        return refusals

    def _fingerprint(self) -> None:
        if (architecture := find_architecture(describe_gpu_environment(self.gpu)["compute_capability"])) is not None:
            for family in FAMILIES:
                fingerprint.fingerprint_family(family, architecture)

    def _load(self, worker: Worker) -> None:
        seconds = self.start_seconds + self.prepare_seconds
        with contextlib.suppress(TaskFailed, WorkerDied):  # its first request fails again, with the reason
            worker.call("latbench.backends.gpu.gpu_probe:load_modules", [GpuPace.module], timeout=seconds)

    def _probe(self, process: str, backends: Sequence[str]) -> Probed | str:
        seconds = self.start_seconds + self.prepare_seconds
        try:
            found: Probed = self._started[process].call(
                "latbench.backends.gpu.gpu_probe:probe_engines",
                build_probe_points(self.device, backends),
                timeout=seconds,
            )
        except (TaskFailed, WorkerDied) as error:
            return str(error)
        return found

    def close(self) -> None:
        """End the processes that were started and never used."""
        for worker in self._started.values():
            worker.kill()  # another thread may wait for its answer
        wait(self._loading.values())
        self._loading.clear()
        while self._started:
            self._started.popitem()[1].close()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def environment(self) -> dict[str, Any]:
        """See SweepMachine.

        It includes the versions of the libraries that the processes have loaded; all of them, where torch and CuPy
        differ.
        """
        row = {**describe_gpu_environment(self.gpu), **find_library_versions()}
        for name in find_library_versions():
            every = {loaded[name]: None for loaded in self._loaded.values() if loaded.get(name) is not None}
            row[name] = " and ".join(map(str, every)) or row[name]
        del row["env_id"]
        return {"env_id": hash_environment(row), **row}

    @functools.cached_property
    def versions(self) -> Versions:
        """The versions that the times of a row depend on; after `start` as the processes have loaded them."""
        facts = describe_gpu_environment(self.gpu)
        architecture = self._architecture or find_architecture(facts["compute_capability"])
        known = {**find_library_versions(), DRIVER: facts["driver"]}
        return Versions(find_installed(), known, dict(self._loaded), architecture)

    def version(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """See SweepMachine."""
        return self.versions.text(point, families)

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See SweepMachine."""
        return self.versions.current(table)

    def process(self, backend: str) -> str:
        """Return the process of a backend. Libraries share one, which saves loading; our own backends may crash
        alone.
        """
        return GPU_ENGINES[backend].process

    def worker(self, process: str) -> Worker:
        """Return a process that sees only this GPU: the one that `start` began, or a new one."""
        if process in self._started:
            worker = self._started.pop(process)
            if (loading := self._loading.pop(process, None)) is not None and wait([loading], BUSY_SECONDS).not_done:
                worker.kill()  # it hangs: its next request starts another process
                wait([loading])
            return worker
        return Worker(threads=count_cores(), name=process, environment=build_gpu_variables(self.gpu))

    def watch(self) -> Callable[[], dict[str, Any]]:
        """Watch the host's load and stolen time; the GPU's state comes with each burst."""
        before = read_cpu_times()

        def since() -> dict[str, Any]:
            return {**read_telemetry(before), "clock_hertz": None}

        return since

    def columns(self, states: Sequence[Any]) -> dict[str, Any]:
        """See SweepMachine."""
        return summarise_gpu_states(states)

    def pace(self, seconds_left: SecondsLeft) -> GpuPace:
        """Return the GPU's reference work (a dense product, reads of memory) and its ceilings.

        The ceilings are measured unless they are cached. Clocks and event reasons come with every burst.
        """

        def find() -> GpuCeilings:
            with self.worker("ceilings") as worker:  # its memory is free again at once
                worker.seconds_left = seconds_left
                seconds = self.start_seconds + self.prepare_seconds
                found: GpuCeilings = worker.call(
                    "latbench.backends.gpu.gpu_reference:measure_ceilings", timeout=seconds
                )
            return found

        reference = self.worker("reference")
        reference.seconds_left = seconds_left
        try:
            return GpuPace(reference, build_cached_gpu_ceilings(self.environment(), find))
        except BaseException:
            reference.close()
            raise

    def available_bytes(self) -> float:
        """Return half of the GPU's free memory."""
        with open_observer(self.gpu.uuid) as observer:
            return _MEMORY_SHARE * observer.free_bytes()

    def needed_bytes(self, point: Point) -> float:
        """Return the memory of the copies to rotate: at least two, and for small layers as many as allowed."""
        shape = point.shape
        weight = 2 * shape.m * shape.k * (1 - point.sparsity)
        each = weight + 2 * shape.n * (shape.m + shape.k)
        return float(min(MOST_COPIES[point.launch_mode] * each, 2 * each + ROTATED_TIMES_L2 * _LARGEST_L2))


def find_architecture(compute_capability: str | None) -> str | None:
    """Return the architecture that our kernels are compiled for on a GPU ("9.0"); None if there is none or it is
    unknown.
    """
    if compute_capability is None:
        return None
    major, minor = compute_capability.split(".")
    try:
        return list_architectures((int(major), int(minor)))[0]
    except NoDevice:
        return None


def add_repository_to_path() -> None:
    """Let workers import from the same repository as this process, even if nothing is installed."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
