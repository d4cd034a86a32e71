"""A GPU that is not there: a device that does its work in its own time, and an NVML that says what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from latbench.backends.installed_engines import Unsupported
from latbench.machines.nvml import GpuState, summarise_gpu_states
from latbench.runners.worker_process import Worker
from latbench.timing.sampling import Burst
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult


class FakeDevice:
    """A driver, a clock and a queue. Queueing takes the host time; running what is queued takes the device time.

    The device starts on an operation when it has done the one before and the host has queued it: events that the
    host is late for include its latency, as real ones do. A kernel does what its effect does.
    """

    def __init__(self, *, launch: float = 0.0, flush: float = 50e-6, tick: float = 0.0) -> None:
        self.host = self.device = 0.0
        self.launch, self.flush_seconds, self.tick = launch, flush, tick
        self.l2_bytes = 2**26
        self.flushes = self.captures = 0
        self.ran: list[str] = []
        self.capturing: list[tuple[str, float, Callable[[], object]]] | None = None

    def clock(self) -> float:
        return self.host

    def kernel(
        self,
        seconds: float | Callable[[], float],
        name: str = "work",
        effect: Callable[[], object] = lambda: None,
    ) -> Callable[[], None]:
        def call() -> None:
            took = seconds() if callable(seconds) else seconds
            if self.capturing is not None:
                self.capturing.append((name, took, effect))
            else:
                self._queue(name, took)
                effect()

        return call

    def _queue(self, name: str, seconds: float) -> None:
        self.host += self.launch
        self.device = max(self.device, self.host) + seconds
        self.ran.append(name)

    def flush(self) -> None:
        self.flushes += 1
        self._queue("flush", self.flush_seconds)

    def mark(self) -> float:
        self.host += self.launch
        self.device = max(self.device, self.host)
        return self.device

    def seconds(self, start: float, end: float) -> float:
        elapsed = end - start
        return elapsed if not self.tick else round(elapsed / self.tick) * self.tick

    def capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        self.captures += 1
        self.capturing = []
        try:
            work()
            nodes = self.capturing
        finally:
            self.capturing = None

        def replay() -> None:
            self.host += self.launch
            self.device = max(self.device, self.host) + sum(seconds for _, seconds, _ in nodes)
            self.ran += [name for name, _, _ in nodes]
            for _, _, effect in nodes:
                effect()

        return replay

    def spoil(self, result: np.ndarray) -> None:
        result.fill(np.nan)

    def wait(self) -> None:
        self.host = max(self.host, self.device)


class NVMLError(Exception):
    """What the real one raises; it has a subclass for each reason."""


class NVMLError_LibraryNotFound(NVMLError):
    pass


class FakeNvml:
    """The functions of pynvml that the project calls, for devices given as dictionaries; a missing answer raises.

    Without a `driver` what raises first is `refusal`.
    """

    NVMLError = NVMLError

    def __init__(self, *devices: dict[str, Any], driver: bool = True) -> None:
        self.devices, self.driver, self.open = devices, driver, 0
        self.refusal = NVMLError_LibraryNotFound("NVML Shared Library Not Found")

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.refusal
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        every = [*self.devices, *(part for device in self.devices for part in device.get("slices", ()))]
        return next(device for device in every if device["uuid"] == uuid)

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return self._answer(handle, "name")

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:
        return self._answer(handle, "uuid")

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        divided = int("slices" in handle)
        return [divided, divided]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(handle["slices"]):
            raise NVMLError("Not Found")
        return handle["slices"][index]

    def nvmlDeviceGetGpuInstanceId(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "instances")[0]

    def nvmlDeviceGetComputeInstanceId(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "instances")[1]

    def nvmlDeviceGetClockInfo(self, handle: dict[str, Any], kind: int) -> int:
        return self._answer(handle, {1: "sm_megahertz", 2: "memory_megahertz"}[kind])

    def nvmlDeviceGetMaxClockInfo(self, handle: dict[str, Any], kind: int) -> int:
        return self._answer(handle, {1: "max_sm_megahertz", 2: "max_memory_megahertz"}[kind])

    def nvmlDeviceGetApplicationsClock(self, handle: dict[str, Any], kind: int) -> int:
        return self._answer(handle, {0: "application_megahertz", 2: "application_memory_megahertz"}[kind])

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "milliwatts")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "limit_milliwatts")

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> int:
        assert sensor == 0
        return self._answer(handle, "celsius")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:
        total, free = self._answer(handle, "memory")
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> tuple[int, int]:
        return self._answer(handle, "capability")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: dict[str, Any]) -> int:
        return self._answer(handle, "reasons")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def _answer(self, handle: dict[str, Any], name: str) -> Any:
        if name not in handle:
            raise NVMLError("Not Supported")
        return handle[name]


H200 = {
    "name": "NVIDIA H200", "uuid": "GPU-3f2a1b2c-0000", "sm_megahertz": 1980, "memory_megahertz": 3201,
    "max_sm_megahertz": 1980, "max_memory_megahertz": 3201, "milliwatts": 412_500, "limit_milliwatts": 700_000,
    "celsius": 51, "memory": (150_000_000_000, 149_000_000_000), "capability": (9, 0), "reasons": 0x4,
}  # fmt: skip


WORK = {"flop_nnz": 2_000_000, "bytes_min": 100_000}


class Ready:
    """A point that is timed by the device itself: 20 us, or whatever its seed makes of it."""

    def __init__(self, seconds: float, reasons: frozenset[str], stuck: bool) -> None:
        self.inner_loops = 10
        self.facts = {"kernel_used": "fake", "timer": "cuda_graph", "nnz": 1, **WORK}
        self._seconds, self._reasons, self._stuck = seconds, reasons, stuck

    def burst(self, seconds: float) -> Burst:
        time.sleep(60 if self._stuck else seconds)
        hot = "hw_thermal_slowdown" in self._reasons
        state = GpuState(clock_hertz=1.5e9, power_watts=600.0, temperature_celsius=60.0, reasons=self._reasons)
        return Burst([self._seconds] * 10, preempted=hot, states=(state,))


FINE, HOT, REFUSED, WRONG, LATE, STUCK, CRASHES, DIES, HANGS = range(9)


def draw(point: Point) -> None:
    """Do what a worker does in place of `prepare_gpu_point.pack_gpu_point`: nothing that takes time."""


def prepare(point: Point) -> Ready:
    """Do what a worker does in place of `prepare_gpu_point.prepare_gpu_point`; the seed says how it goes."""
    if point.seed == REFUSED:
        raise Unsupported("no such kernel here")
    if point.seed == WRONG:
        raise WrongResult("3 of 7 results are wrong")
    if point.seed == DIES:
        os._exit(3)
    if point.seed == HANGS:
        time.sleep(600)
    if point.seed == CRASHES:
        raise RuntimeError("it is broken")
    if point.seed == LATE:
        time.sleep(0.4)
    reasons = frozenset({"hw_thermal_slowdown" if point.seed == HOT else "sw_power_cap"})
    speedup = 1 / (1 - point.sparsity)
    slower = 1.0 if point.backend in ("cupy", "torch_gpu") else 2.0
    return Ready(1e-4 / speedup * slower, reasons, stuck=point.seed == STUCK)


def build_product() -> Any:
    """A reference kernel that hangs."""
    time.sleep(600)


build_sum = build_product


PACKAGES = {"torch_gpu": "2.11.0", "cupy": "14.2.0", "torch_sparse": "2.11.0"}


class FakeMachine:
    """A GPU whose workers do what this file says; `versions`, by backend, and the device are the test's to change.

    Each backend has a process of its own, and they get their points ready side by side, as on a GPU.
    """

    task = f"{__file__}:prepare"
    host_task: str | None = f"{__file__}:draw"
    timer = "cuda_event"
    disturbed_status = "throttled"
    start_seconds = prepare_seconds = burst_seconds = 20.0
    device = "nvidia-h200"

    def __init__(self) -> None:
        self.versions = dict(PACKAGES)
        self.refusals: dict[str, str] = {}
        self.threads_of_processes = ThreadPoolExecutor(4)
        self.workers: list[Worker] = []

    def environment(self) -> dict[str, Any]:
        return {"env_id": "e" * 16, "device": self.device, "device_uuid_hash": "0" * 12, "driver": "580"}

    def version(self, point: Point, families: Any = None) -> str | None:
        return self.versions[point.backend]

    def current(self, table: Any) -> np.ndarray:
        return (table["backend_version"] == table["backend"].map(self.versions)).to_numpy()

    def process(self, backend: str) -> str:
        return backend

    def worker(self, process: str) -> Worker:
        self.workers.append(Worker(threads=1, name=process))
        return self.workers[-1]

    def start(self, backends: Any) -> dict[str, str]:
        return {name: reason for name, reason in self.refusals.items() if name in backends}

    def close(self) -> None:
        self.threads_of_processes.shutdown()

    def watch(self) -> Callable[[], dict[str, Any]]:
        return lambda: {"load": 0.5}

    def pace(self, seconds_left: Any) -> Any:
        """None but where a test is about it."""
        return None

    def columns(self, states: Any) -> dict[str, Any]:
        return summarise_gpu_states(states)

    def available_bytes(self) -> float:
        return 1e9

    def needed_bytes(self, point: Point) -> float:
        return 1.0


def no_point_works(point: Point) -> Ready:
    """Of a machine on which nothing works."""
    raise RuntimeError("an illegal memory access was encountered")
