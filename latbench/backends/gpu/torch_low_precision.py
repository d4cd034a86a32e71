"""torch's dense products in eight and four bits, token-major: y (n, m) = x (n, k) @ w^T.

`fp8` has one scale for the weight and one for x, `fp8_rows` one for each output feature and token, as servers use it.
Both add fast, as servers do (`use_fast_accum`). `int8` leaves the sums in int32: scaling them is left to the next
kernel. With 16 tokens or fewer torch multiplies int8 only as w @ x^T. `int4` has weights of four bits with steps for
groups, and x in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.low_precision_layers import GROUP, EightBits, FourBits
from latbench.backends.gpu.prepare_gpu_point import GpuEngine, check_format, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import BFLOAT16, FP8, INT4, INT8, INT32
from latbench.timing.gpu_drivers import open_torch_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point

FEW_ROWS = 16  # torch._int_mm wants more rows than this
INNER_TILES = 8  # of 16 columns, that int4 weights are packed in: the widest loads
Scales = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Build:
    """What builds a call on operands of its own.

    Attributes
    ----------
    build : callable
        Builds the call.
    weight_bytes : int
        Bytes of the weight with its scales.
    scales : tuple of ndarray or None
        Scales that the kernel applies, of the rows (m,) and columns (n,) of the product; None if it applies none.
    turned : bool
        Whether it returns y (n, m) in place of (m, n).
    """

    build: Callable[[], Call]
    weight_bytes: int
    scales: Scales | None = None
    turned: bool = True


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the dense linear layer. Raises Unsupported where torch refuses the shape or the GPU."""
    types, build = _KERNELS[point.kernel]
    check_format(point, format="dense", layouts=("token_major",))
    if (point.dtype_w, point.dtype_a, point.dtype) != types:
        wanted = " x ".join(types[:2])
        raise Unsupported(f"torch's {point.kernel} multiplies {wanted} to {types[2]}")
    driver = open_torch_driver()
    try:
        found = build(point, layer)
        found.build()()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise Unsupported(f"torch {point.kernel}: {error}") from error
    calls = [found.build() for _ in range(count_gpu_copies(point, layer, found.weight_bytes, driver))]
    turned = found.turned
    return GpuEngine(
        f"torch.{point.kernel}.{point.layout}", found.weight_bytes, calls, driver, to_float64,
        lambda y: (y.T if turned else y).double(), scales=found.scales,
    )  # fmt: skip


def place(array: np.ndarray) -> torch.Tensor:
    """Return a copy of a host array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_float64(array: np.ndarray) -> torch.Tensor:
    """Return a host array on the device as float64."""
    return place(array).double()


def place_bytes(layer: GpuLayer, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight (m, k) and x (n, k) of a layer in eight bits on the device."""
    kind = torch.int8 if dtype == INT8 else torch.float8_e4m3fn
    return place(layer.weight).to(kind), place(layer.x.T).to(kind)


def _fp8(point: Point, layer: GpuLayer) -> Build:
    assert isinstance(layer.quantised, EightBits)
    weight, x = place_bytes(layer, FP8)
    weight_scales, x_scales = layer.quantised.weight_scales, layer.quantised.x_scales
    if point.kernel == "fp8":
        weight_scales, x_scales = (np.full_like(each, each[0]) for each in (weight_scales, x_scales))
        scale_w, scale_x = place(weight_scales[:1]).reshape(()), place(x_scales[:1]).reshape(())
    else:
        scale_w, scale_x = place(weight_scales[None, :]), place(x_scales[:, None])

    def build() -> Call:
        own_w, own_x = weight.clone(), x.clone()
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        return lambda: torch._scaled_mm(
            own_x, own_w.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )

    return Build(build, weight.numel() + 4 * scale_w.numel(), (weight_scales, x_scales))


def _int8(point: Point, layer: GpuLayer) -> Build:
    weight, x = place_bytes(layer, INT8)
    turned = x.shape[0] > FEW_ROWS

    def build() -> Call:
        own_w, own_x = weight.clone(), x.clone()
        left, right = (own_x, own_w.t()) if turned else (own_w, own_x.t())
        out = torch.empty(left.shape[0], right.shape[1], dtype=torch.int32, device=x.device)
        return lambda: torch._int_mm(left, right, out=out)

    return Build(build, weight.numel(), turned=turned)


def _int4(point: Point, layer: GpuLayer) -> Build:
    four = layer.quantised
    assert isinstance(four, FourBits)
    if point.shape.k % (16 * INNER_TILES) or point.shape.m % 8:
        raise Unsupported(f"torch packs int4 weights in tiles of 8 x {16 * INNER_TILES}, not {point.shape}")
    # Two codes a byte, the even column in the upper half.
    halves = place(four.codes[:, ::2] << 4 | four.codes[:, 1::2])
    packed = torch._convert_weight_to_int4pack(halves, INNER_TILES)
    steps = place(np.stack([four.steps.T, four.zeros.T], axis=2)).to(torch.bfloat16)  # (k / GROUP, m, 2)
    x = place(layer.x.T).to(torch.bfloat16)

    def build() -> Call:
        own_w, own_x, own_steps = packed.clone(), x.clone(), steps.clone()
        return lambda: torch._weight_int4pack_mm(own_x, own_w, GROUP, own_steps)

    return Build(build, halves.numel() + 2 * steps.numel())


_KERNELS: dict[str, tuple[tuple[str, str, str], Callable[[Point, GpuLayer], Build]]] = {
    "fp8": ((FP8, FP8, BFLOAT16), _fp8),
    "fp8_rows": ((FP8, FP8, BFLOAT16), _fp8),
    "int8": ((INT8, INT8, INT32), _int8),
    "int4": ((INT4, BFLOAT16, BFLOAT16), _int4),
}
KERNELS = tuple(_KERNELS)
"""The kernels, by their names in tables."""
