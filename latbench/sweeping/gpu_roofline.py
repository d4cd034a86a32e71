"""The roofline of a sweep on a GPU: which units a kernel may use, and whose ceilings they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from latbench.base.engine_registry import GPU_ENGINES
from latbench.machines import devices
from latbench.machines.ceilings import Kept
from latbench.sweeping.roofline_pace import Pace
from latbench.timing import gpu_ceiling_kernels as ceiling_kernels
from latbench.timing import gpu_ceilings as ceilings
from latbench.timing.gpu_ceilings import ORDINARY, GpuCeilings
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

# What changes the ceilings of one and the same GPU. Nobody tells whether its clocks are locked: where they were when
# the ceilings were measured, what is too fast for them has them measured again (`Roofline.doubt`).
SETTINGS = (
    "gpu_max_clock_hertz", "gpu_max_memory_clock_hertz", "gpu_application_clock_hertz",
    "gpu_application_memory_clock_hertz", "gpu_power_limit_milliwatts", "gpu_ecc",
)  # fmt: skip

_METHOD = 2  # counts changes of how ceilings are found


class GpuPace(Pace[GpuCeilings]):
    """The ceilings of the GPU that a sweep measures on, and how fast it is just now."""

    module = "latbench.backends.gpu.gpu_reference"

    def seconds(self, point: Point, kernel: str, flop: float, size: float) -> float:
        """See Roofline. What a kernel writes does not count (see `latbench.timing.gpu_ceilings`)."""
        shape = point.shape
        counted = 0.0 if fewer_products(point) else flop
        return self.ceilings.roofline_seconds(counted, size - 2 * shape.m * shape.n, units(point, kernel))


def units(point: Point, kernel: str) -> str:
    """The units that bound a kernel: the point's element type on tensor cores, unless it is known to use none."""
    engine = GPU_ENGINES.get(point.backend)
    ordinary = engine is not None and (not engine.tensor_cores or kernel.startswith("cuda.csr."))
    return ORDINARY if ordinary else point.dtype


def fewer_products(point: Point) -> bool:
    """Whether a library may do with fewer products than the weights say, as Winograd's convolutions do."""
    shape = point.shape
    return point.backend == "torch_gpu" and isinstance(shape, Conv2dShape) and shape.kh * shape.kw > 1


def kept(environment: Mapping[str, Any], measure: Callable[[], GpuCeilings]) -> Kept[GpuCeilings]:
    """The ceilings of the GPU that an `nvml.environment` is of, as it is set now; `measure` finds them."""
    unit = str(environment["device_uuid_hash"])
    return Kept(
        f"{environment['device']}-{unit}", 1, work(), measure, GpuCeilings,
        {"gpu": unit, **{name: environment.get(name) for name in SETTINGS}},
    )  # fmt: skip


def work() -> str:
    """What the ceilings are measured with."""
    source = hashlib.sha256(ceiling_kernels.SOURCE.read_bytes()).hexdigest()[:8]
    sizes = f"{ceilings.PRODUCT_SIZE} {ceilings.PACE_SIZE}, reads {ceilings.PACE_BYTES}"
    return f"products {sizes}, torch {devices.version('torch')}, kernels {source}, {_METHOD}"
