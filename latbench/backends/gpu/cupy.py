"""The project's CUDA kernels through CuPy: every pattern, feature-major; convolutions with the batch last."""

from __future__ import annotations

import cupy

from latbench.backends.gpu.cublas import convert_to_float64, copy_to_device, widen
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.prepare_gpu_point import GpuEngine, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.gpu_drivers import open_cupy_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.cuda import cuda_plan as plans
from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.shapes import Conv2dShape


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the layer as a CUDA plan.

    Raises Unsupported, with the reasons of the kernels, where none of them runs it on this GPU.
    """
    if point.kernel != "auto":
        raise Unsupported(f"the CUDA kernels choose among themselves: the kernel is auto, not {point.kernel}")
    driver = open_cupy_driver()
    try:
        plan = _plan(point, layer)
    except NotSupported as error:
        raise Unsupported(str(error)) from error
    number = count_gpu_copies(point, layer, plan.nbytes, driver)
    convolution = isinstance(point.shape, Conv2dShape)
    x = copy_to_device(layer.x.transpose(1, 2, 3, 0) if convolution else layer.x, point.dtype)
    calls = [_call(point, each, x.copy()) for each in [plan, *(plan.copy() for _ in range(number - 1))]]

    def result(y: cupy.ndarray) -> cupy.ndarray:
        wide = widen(y, point.dtype)
        return wide.transpose(3, 0, 1, 2) if convolution else wide

    return GpuEngine(plan.kernel, plan.nbytes, calls, driver, convert_to_float64, result, families=plan.families)


def _plan(point: Point, layer: GpuLayer) -> plans.CudaPlan:
    shape = point.shape
    if isinstance(shape, Conv2dShape):
        return plans.prepare_conv2d(layer.packed, shape, point.layout, point.dtype)
    return plans.prepare_cuda_linear(layer.packed, point.layout, shape.n, point.dtype)


def _call(point: Point, plan: plans.CudaPlan, x: cupy.ndarray) -> Call:
    shape = point.shape
    if isinstance(shape, Conv2dShape):
        out = cupy.empty((shape.c_out, shape.out_h, shape.out_w, shape.batch), x.dtype)
    else:
        out = cupy.empty((shape.m, shape.n), x.dtype)
    return lambda: plan(x, out=out)
