"""The GPU architectures that kernels are compiled for, and the properties of each that kernels depend on.

Sources for shared memory: CUDA C++ Programming Guide, "Compute Capabilities", and NVIDIA CCCL,
cuda/__device/arch_traits.h. Source for the NVRTC versions: CUDA Features Archive, "CUDA Compiler". 12.9 added sm_103
and sm_121; 13.0 dropped sm_70 and renamed sm_101, Jetson Thor, to sm_110.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

OLDEST_NVRTC: Mapping[int, tuple[int, int]] = MappingProxyType({13: (13, 0), 12: (12, 8)})
"""For each CUDA major version, newest first, the oldest NVRTC that knows every instruction of the kernels."""

RESERVED_BYTES = 1024
"""Shared memory that the system keeps of every block, from sm_80 on."""


class GpuArchitecture(NamedTuple):
    """One architecture.

    capability: compute capability of its GPUs.
    multiprocessors: of its usual GPU; a launch should keep all of them busy.
    shared_bytes: shared memory of a multiprocessor.
    nvrtc: for each CUDA major version, the oldest NVRTC that compiles the kernels for it.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    nvrtc: Mapping[int, tuple[int, int]] = OLDEST_NVRTC

    @property
    def block_shared_bytes(self) -> int:
        """Shared memory that one block may use."""
        return self.shared_bytes - (RESERVED_BYTES if self.capability >= (8, 0) else 0)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether GPUs of a compute capability run its cubins.

        GPUs of the same major version do, from the minor version on; cubins of sm_90a run on 9.0 alone (CUDA C++
        Programming Guide, "Binary Compatibility").
        """
        if self.capability == (9, 0):
            return capability == (9, 0)
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]


KIB = 1024
_FROM_12_9 = {13: (13, 0), 12: (12, 9)}

TARGETS = {
    "sm_70": GpuArchitecture((7, 0), 80, 96 * KIB, {12: (12, 8)}),  # V100
    "sm_75": GpuArchitecture((7, 5), 40, 64 * KIB),  # T4
    "sm_80": GpuArchitecture((8, 0), 108, 164 * KIB),  # A100
    "sm_86": GpuArchitecture((8, 6), 82, 100 * KIB),  # RTX 3090; A10 has 72
    "sm_89": GpuArchitecture((8, 9), 128, 100 * KIB),  # RTX 4090; L40 has 142
    "sm_90a": GpuArchitecture((9, 0), 132, 228 * KIB),  # H100 SXM and H200; H100 PCIe has 114
    "sm_100": GpuArchitecture((10, 0), 148, 228 * KIB),  # B200
    "sm_103": GpuArchitecture((10, 3), 148, 228 * KIB, _FROM_12_9),  # B300: taken from B200; the whole chip has 160
    "sm_110": GpuArchitecture((11, 0), 20, 228 * KIB, {13: (13, 0)}),  # Jetson AGX Thor
    "sm_120": GpuArchitecture((12, 0), 170, 100 * KIB),  # RTX 5090; RTX PRO 6000 has 188
    "sm_121": GpuArchitecture((12, 1), 48, 100 * KIB, _FROM_12_9),  # GB10
}
"""From the oldest to the newest."""

ARCHITECTURES = tuple(TARGETS)
