"""numba.cuda: the kernels of sparse_kernels.numba_cuda, without tensor cores. They run on the default stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from latbench.backends.gpu.cublas import convert_to_float64
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.prepare_gpu_point import GpuEngine, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.gpu_drivers import open_cupy_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.numba_cuda import numba_cuda_plan as plans
from sparse_kernels.numba_cuda.library import cuda
from sparse_kernels.shapes import Conv2dShape


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the layer as a numba.cuda plan of any pattern. Raises Unsupported for bfloat16."""
    if point.dtype not in plans.DTYPES:
        raise Unsupported(f"numba_cuda has no {point.dtype} kernels: known are {', '.join(plans.DTYPES)}")
    driver = open_cupy_driver(capturable=False)
    shape = point.shape
    if isinstance(shape, Conv2dShape):
        plan: Any = plans.prepare_conv2d(layer.packed, shape, point.layout, point.dtype)
    else:
        plan = plans.prepare_numba_cuda_linear(layer.packed, point.layout, shape.n, point.dtype)
    number = count_gpu_copies(point, layer, plan.nbytes, driver)
    turned = point.layout == "token_major"
    x = np.ascontiguousarray(layer.x.T if turned else layer.x, point.dtype)
    calls = [_call(point, each, x) for each in [plan, *(plan.copy() for _ in range(number - 1))]]
    return GpuEngine(
        plan.kernel,
        plan.nbytes,
        calls,
        driver,
        convert_to_float64,
        lambda y: convert_to_float64(y.T if turned else y),
    )


def _call(point: Point, plan: Any, x_host: np.ndarray) -> Call:
    import cupy

    shape = point.shape
    # Arrays of Numba itself: of another library's it would wait for the stream at every call.
    x = cuda.to_device(x_host)
    if isinstance(shape, Conv2dShape):
        size: tuple[int, ...] = (shape.batch, shape.c_out, shape.out_h, shape.out_w)
    else:
        size = (shape.n, shape.m) if point.layout == "token_major" else (shape.m, shape.n)
    out = cuda.device_array(size, x_host.dtype)
    seen = cupy.asarray(out)

    def call() -> cupy.ndarray:
        plan(x, out=out)
        return seen

    return call
