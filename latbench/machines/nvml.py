"""State of an NVIDIA GPU during a measurement, and its environment, through NVML.

`gpu_discovery` finds GPUs; everything here needs a driver. NVML is imported late, so that a machine without it can
import this. A value that the device does not report is None; virtual GPUs hide many.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from latbench.base.environments import hash_environment
from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import describe_cpu_environment, find_version
from latbench.machines.gpu_discovery import list_gpus
from latbench.machines.gpu_names import Gpu
from latbench.machines.processors import count_cores

# nvml.h, "clocks event reasons": why the clocks are not higher.
_REASONS = {
    0x1: "gpu_idle", 0x2: "applications_clocks_setting", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}  # fmt: skip

# The power cap is not included: the device runs at its power limit, as it would in production.
THROTTLING = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})

_GRAPHICS, _SM, _MEMORY = 0, 1, 2  # nvmlClockType_t
_CORE_TEMPERATURE = 0  # nvmlTemperatureSensors_t

_PACKAGES = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numba", "numba-cuda", "nvidia-ml-py")


@dataclass(frozen=True)
class GpuState:
    """What the driver reports at one moment."""

    clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    reasons: frozenset[str] = frozenset()

    @property
    def throttled(self) -> bool:
        """Whether heat or the power supply slows the device down."""
        return not THROTTLING.isdisjoint(self.reasons)


def summarise_gpu_states(states: Iterable[GpuState]) -> dict[str, Any]:
    """Return the telemetry columns of a row from the states during its sampling.

    Medians, the highest temperature, and all event reasons joined by plus signs ("" for none).
    """
    seen = list(states)
    if not seen:
        return dict.fromkeys(("clock_hertz", "power_watts", "temperature_celsius", "event_reasons"))
    temperatures = [state.temperature_celsius for state in seen if state.temperature_celsius is not None]
    return {
        "clock_hertz": _median(state.clock_hertz for state in seen),
        "power_watts": _median(state.power_watts for state in seen),
        "temperature_celsius": max(temperatures, default=None),
        "event_reasons": "+".join(sorted(set().union(*(state.reasons for state in seen)) - {"gpu_idle"})),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def parse_event_reasons(bits: int) -> frozenset[str]:
    """Return the names of the event reasons in NVML's bit mask."""
    return frozenset(name for bit, name in _REASONS.items() if bits & bit)


class GpuObserver:
    """Reads the state of one device; NVML stays open until `close`."""

    def __init__(self, uuid: str) -> None:
        self._nvml = _nvml()
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def __call__(self) -> GpuState:
        """Return the present state."""
        handle = self._handle
        # The reasons were called throttle reasons before driver 535.
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuState(
            clock_hertz=_scaled(self._ask("nvmlDeviceGetClockInfo", handle, _SM), 1e6),
            memory_clock_hertz=_scaled(self._ask("nvmlDeviceGetClockInfo", handle, _MEMORY), 1e6),
            power_watts=_scaled(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            temperature_celsius=_scaled(self._ask("nvmlDeviceGetTemperature", handle, _CORE_TEMPERATURE), 1.0),
            reasons=parse_event_reasons(bits or 0),
        )

    def facts(self) -> dict[str, Any]:
        """Return what does not change during this process: limits, sizes, versions of driver and CUDA."""
        handle = self._handle
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        ecc = self._ask("nvmlDeviceGetEccMode", handle)
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return {
            "driver": self._ask("nvmlSystemGetDriverVersion"),
            "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "gpu_memory_bytes": None if memory is None else int(memory.total),
            "gpu_max_clock_hertz": _whole(self._ask("nvmlDeviceGetMaxClockInfo", handle, _SM), 1_000_000),
            "gpu_max_memory_clock_hertz": _whole(self._ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY), 1_000_000),
            # Set by `nvidia-smi --applications-clocks`. NVML does not report locked clocks (--lock-gpu-clocks).
            "gpu_application_clock_hertz": _whole(
                self._ask("nvmlDeviceGetApplicationsClock", handle, _GRAPHICS), 1_000_000
            ),
            "gpu_application_memory_clock_hertz": _whole(
                self._ask("nvmlDeviceGetApplicationsClock", handle, _MEMORY), 1_000_000
            ),
            "gpu_power_limit_milliwatts": _whole(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1),
            "gpu_ecc": None if ecc is None else int(ecc[0]),
        }

    def setting(self) -> dict[str, Any]:
        """Return what an administrator may change, and who shares the device.

        Persistence mode, the default power limit, and the number of processes that compute on the device.
        """
        handle = self._handle
        persistence = self._ask("nvmlDeviceGetPersistenceMode", handle)
        others = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return {
            "persistence": None if persistence is None else bool(persistence),
            "usual_power_limit_milliwatts": _whole(self._ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1),
            "processes": None if others is None else len(others),
        }

    def free_bytes(self) -> float:
        """Return the free device memory in bytes; infinite where the driver hides it."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", self._handle)
        return float("inf") if memory is None else float(memory.free)

    def close(self) -> None:
        """Close NVML."""
        self._nvml.nvmlShutdown()

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return the result of an NVML function; None where this version or device lacks it."""
        if not hasattr(self._nvml, function):
            return None
        with contextlib.suppress(self._nvml.NVMLError):
            return getattr(self._nvml, function)(*arguments)
        return None


@contextlib.contextmanager
def open_observer(uuid: str) -> Iterator[GpuObserver]:
    """Open an observer of the GPU with this UUID for the length of the context."""
    observer = GpuObserver(uuid)
    try:
        yield observer
    finally:
        observer.close()


def find_first_gpu() -> Gpu:
    """Return the first GPU that this process may use. Raises EnvironmentUnusable where there is none."""
    found, reason = list_gpus()
    if not found:
        raise EnvironmentUnusable(reason)
    return found[0]


def describe_gpu_environment(gpu: Gpu) -> dict[str, Any]:
    """Return the environment on `gpu`: the device, its driver, the libraries, its host."""
    host = describe_cpu_environment(count_cores())
    row = {name: value for name, value in host.items() if name not in ("env_id", "threads")}
    with open_observer(gpu.uuid) as observer:
        facts = observer.facts()
    row |= {
        "device": gpu.device,
        "device_uuid_hash": hash_uuid(gpu),
        "host": host["device"],
        **facts,
        **{package: find_version(package) for package in _PACKAGES},
    }
    return {"env_id": hash_environment(row), **row}


def hash_uuid(gpu: Gpu) -> str:
    """Return a hash that tells this GPU from others of its kind without identifying it."""
    return hashlib.sha256(f"latbench {gpu.uuid}".encode()).hexdigest()[:12]


def _nvml() -> Any:
    import pynvml

    return pynvml


def _scaled(value: Any, unit: float) -> float | None:
    return None if value is None else float(value) * unit


def _whole(value: Any, unit: int) -> int | None:
    return None if value is None else int(value) * unit
