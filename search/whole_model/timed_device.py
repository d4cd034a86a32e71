"""The device on which whole models are timed: this machine's CPU, or one of its GPUs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from latbench.backends import installed_engines
from latbench.base.engine_registry import CPU_ENGINES, list_standard
from latbench.machines.devices import (
    CpuTimes,
    describe_cpu_environment,
    find_version,
    hash_machine,
    name_cpu,
    read_telemetry,
)
from latbench.machines.gpu_discovery import build_gpu_variables, find_gpu
from latbench.machines.gpu_names import Gpu
from latbench.machines.nvml import describe_gpu_environment, find_first_gpu, hash_uuid
from latbench.machines.processors import count_cores
from latbench.runners.device_lock import lock_device
from latbench.runners.worker_process import build_thread_variables
from search.deployment import Deployment
from search.progress import Progress
from search.whole_model.end_to_end import ModelTimer
from sparse_kernels.cpu.runtime import kernel_cache

GPU_BUILD_SECONDS = 3600.0
"""Time limit for building one engine on a GPU: torch.compile tries dozens of kernels for each layer."""

_GPU_FACTS = ("driver", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x")
"""Facts of a GPU's environment that the time of a whole model depends on."""


@dataclass(frozen=True)
class TimedDevice:
    """A CPU or a GPU of this machine.

    Attributes
    ----------
    name
        Its name in tables.
    identity
        Hash that tells it from others of its name; None where it has none.
    gpu
        The GPU; None for the CPU.
    """

    name: str
    identity: str | None
    gpu: Gpu | None = None

    def lock(self, progress: Progress) -> AbstractContextManager[None]:
        """Lock the device exclusively; report to `progress` who holds it. Raise what `lock_device` raises."""

        def waiting(holder: str) -> None:
            progress(f"waiting: {holder}", None, None)

        return lock_device(self.name, self.identity, waiting=waiting)

    def describe_environment(self, threads: int) -> dict[str, Any]:
        """Return the device and its software as a table's environment has them."""
        return describe_cpu_environment(threads) if self.gpu is None else describe_gpu_environment(self.gpu)

    def read_state(self, before: CpuTimes | None) -> dict[str, Any]:
        """Return the columns of the machine's state since `before`. The clock of a host says nothing about a GPU."""
        state: dict[str, Any] = dict(read_telemetry(before))
        return state if self.gpu is None else {**state, "clock_hertz": None}

    def describe_versions(self) -> dict[str, str | None]:
        """Return the versions of what runs whole models, by name."""
        if self.gpu is None:
            versions = {name: installed_engines.find_engine_version(name) for name in list_standard(CPU_ENGINES)}
            return {"kernels": str(kernel_cache.VERSION), **versions}
        facts = describe_gpu_environment(self.gpu)
        known = {name: facts[name] for name in _GPU_FACTS}
        kernels = _fingerprint_kernels(facts["compute_capability"])
        return {**known, "torch-tensorrt": find_version("torch-tensorrt"), "kernels": kernels}

    def build_timer(self, threads: int) -> ModelTimer:
        """Return a timer of whole models on this device. Raises as `ModelTimer` does."""
        if self.gpu is None:
            return ModelTimer(threads)
        # Compilers use every core. They also time candidates on the GPU, so nothing else may run there meanwhile.
        environment = {**build_thread_variables(count_cores()), **build_gpu_variables(self.gpu)}
        return ModelTimer(threads, environment, together=1, build_seconds=GPU_BUILD_SECONDS)


def find_timed_device(deployment: Deployment) -> TimedDevice:
    """Return the device on which a deployment runs.

    Raises EnvironmentUnusable where this machine has no such GPU, UsageError for an unknown name.
    """
    if not deployment.on_gpu:
        return find_cpu()
    gpu = find_gpu(deployment.gpu, otherwise="") if deployment.gpu else find_first_gpu()
    return TimedDevice(gpu.device, hash_uuid(gpu), gpu)


def build_model_timer(deployment: Deployment) -> ModelTimer:
    """Return a timer of whole models on the device of a deployment.

    Raises as `find_timed_device` and `ModelTimer` do.
    """
    return find_timed_device(deployment).build_timer(deployment.threads)


def find_cpu() -> TimedDevice:
    """Return this machine's CPU."""
    return TimedDevice(name_cpu(), hash_machine())


@functools.cache
def _fingerprint_kernels(compute_capability: str | None) -> str:
    """Return the fingerprints of our CUDA kernels for such a GPU; empty where none is compiled for it."""
    from latbench.sweeping.gpu_machine import find_architecture
    from sparse_kernels.cuda.family_fingerprint import fingerprint_family
    from sparse_kernels.cuda.variants import FAMILIES

    architecture = find_architecture(compute_capability)
    if architecture is None:
        return ""
    return " ".join(fingerprint_family(family, architecture) for family in FAMILIES)
