"""Dense products by cuBLAS through CuPy: a second baseline, in both orders of the operands.

`feature_major` is y (m, n) = w @ x (k, n), `token_major` y (n, m) = x (n, k) @ w^T. CuPy sums float16 in float32,
except that cuBLAS may split those sums.
"""

from __future__ import annotations

import cupy
import numpy as np

from latbench.backends.gpu.gpu_layers import GpuLayer, convert_to_bits
from latbench.backends.gpu.prepare_gpu_point import SPLIT_SUMS, GpuEngine, check_format, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.gpu_drivers import open_cupy_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the dense linear layer in CuPy. Raises Unsupported for any other pattern or element type."""
    check_format(point, format="dense", layouts=("token_major", "feature_major"))
    if point.dtype != "float16":
        raise Unsupported(f"CuPy's products are taken in float16 here, not {point.dtype}")
    driver = open_cupy_driver()
    weight_bytes = 2 * layer.weight.size
    turned = point.layout == "token_major"
    weight, x = (
        copy_to_device(layer.weight, point.dtype),
        copy_to_device(layer.x.T if turned else layer.x, point.dtype),
    )
    number = count_gpu_copies(point, layer, weight_bytes, driver)
    calls = [_call(weight.copy(), x.copy(), turned) for _ in range(number)]
    return GpuEngine(
        f"cupy.matmul.{point.layout}", weight_bytes, calls, driver, convert_to_float64,
        lambda y: convert_to_float64(y.T if turned else y), SPLIT_SUMS,
    )  # fmt: skip


def convert_to_float64(array: np.ndarray | cupy.ndarray) -> cupy.ndarray:
    """Return an array on the device as float64."""
    return cupy.asarray(array).astype(cupy.float64)


def copy_to_device(array: np.ndarray, dtype: str) -> cupy.ndarray:
    """Return a float32 host array on the device as float16, or as the bits of bfloat16."""
    return cupy.asarray(np.ascontiguousarray(convert_to_bits(array, dtype)))


def widen(array: cupy.ndarray, dtype: str) -> cupy.ndarray:
    """Return an array of `copy_to_device` as float64."""
    if dtype == "bfloat16":
        array = (array.astype(cupy.uint32) << 16).view(cupy.float32)
    return array.astype(cupy.float64)


def _call(weight: cupy.ndarray, x: cupy.ndarray, turned: bool) -> Call:
    left, right = (x, weight.T) if turned else (weight, x)
    out = cupy.empty((left.shape[0], right.shape[1]), cupy.float16)
    return lambda: cupy.matmul(left, right, out=out)
