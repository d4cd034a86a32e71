"""The roofline of a sweep on a GPU: which units a kernel may use, and their ceilings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from latbench.base.engine_registry import ELEMENT_BYTES, GPU_ENGINES
from latbench.machines.ceilings import CachedCeilings
from latbench.machines.devices import find_version
from latbench.sweeping.roofline_pace import ReferencePace
from latbench.timing import gpu_ceilings
from latbench.timing.gpu_ceiling_kernels import SOURCE
from latbench.timing.gpu_ceilings import ORDINARY, GpuCeilings
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

# Settings that change the ceilings of a GPU. Locked clocks cannot be detected. If they were locked when the ceilings
# were measured, a time that beats the ceilings has them measured again (`SweepRoofline.doubt`).
CEILING_SETTINGS = (
    "gpu_max_clock_hertz", "gpu_max_memory_clock_hertz", "gpu_application_clock_hertz",
    "gpu_application_memory_clock_hertz", "gpu_power_limit_milliwatts", "gpu_ecc",
)  # fmt: skip

_METHOD = 3  # version of the method; change it to invalidate cached ceilings


class GpuPace(ReferencePace[GpuCeilings]):
    """The ceilings of the GPU that a sweep measures on, and its present pace."""

    module = "latbench.backends.gpu.gpu_reference"

    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """See SweepRoofline. Writes of a kernel do not count (see `latbench.timing.gpu_ceilings`)."""
        shape = point.shape
        counted = 0.0 if may_skip_products(point) else flop
        written = ELEMENT_BYTES[point.dtype] * shape.m * shape.n
        return self.ceilings.roofline_seconds(counted, size - written, choose_units(point, kernel))


def choose_units(point: Point, kernel: str) -> str:
    """Return the units that bound a kernel: the type of its products on tensor cores, or ORDINARY if it uses none."""
    return point.dtype_a if GPU_ENGINES[point.backend].runs_on_tensor_cores(kernel) else ORDINARY


def may_skip_products(point: Point) -> bool:
    """Return whether a library may use fewer products than the weights imply, as Winograd's convolutions do."""
    shape = point.shape
    skips = GPU_ENGINES[point.backend].skips_products
    return skips and isinstance(shape, Conv2dShape) and shape.kh * shape.kw > 1


def build_cached_gpu_ceilings(
    environment: Mapping[str, Any], measure: Callable[[], GpuCeilings]
) -> CachedCeilings[GpuCeilings]:
    """Return the cached ceilings of the GPU of an environment at its present settings; `measure` finds them."""
    unit = str(environment["device_uuid_hash"])
    return CachedCeilings(
        f"{environment['device']}-{unit}", 1, describe_work(), measure, GpuCeilings,
        {"gpu": unit, **{name: environment.get(name) for name in CEILING_SETTINGS}},
    )  # fmt: skip


def describe_work() -> str:
    """Return a description of the work that measures the ceilings."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
    sizes = f"{gpu_ceilings.PRODUCT_SIZE} {gpu_ceilings.PACE_SIZE}, reads {gpu_ceilings.PACE_BYTES}"
    return f"products {sizes}, torch {find_version('torch')}, kernels {source}, {_METHOD}"
