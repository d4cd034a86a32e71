"""torch on a GPU, dense: the baseline. Linear layers by cuBLAS or cuBLASLt, convolutions by cuDNN.

Every kernel is measured in both orders of the operands, because the speed of the libraries depends on it:
`token_major` is y (n, m) = x (n, k) @ w^T, `feature_major` y (m, n) = w @ x (k, n); convolutions: `nchw` or `nhwc`.
Sums are float32, except that torch lets cuBLAS split them by default (see SPLIT_SUMS), as every user gets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.prepare_gpu_point import SPLIT_SUMS, GpuEngine, check_format, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.gpu_drivers import open_torch_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

LIBRARIES = ("cublas", "cublaslt")


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the dense layer in torch. Raises Unsupported for any other pattern."""
    torch.backends.cudnn.benchmark = True
    convolution = isinstance(point.shape, Conv2dShape)
    check_format(point, format="dense", layouts=("nchw", "nhwc") if convolution else ("token_major", "feature_major"))
    build, known = (_convolution, ("cudnn",)) if convolution else (_linear, LIBRARIES)
    if point.kernel not in known:
        raise Unsupported(f"torch has no dense {point.shape.op} kernel {point.kernel}: known are {', '.join(known)}")
    driver = open_torch_driver()
    weight, x = _operands(point, layer)
    number = count_gpu_copies(point, layer, 2 * layer.weight.size, driver)
    calls = [build(point, weight.clone(), x.clone()) for _ in range(number)]
    kernel = f"torch.{point.kernel}.{point.layout}"
    return GpuEngine(kernel, 2 * layer.weight.size, calls, driver, convert_to_float64, _result(point), SPLIT_SUMS)


def convert_to_float64(array: np.ndarray) -> torch.Tensor:
    """Return a host array on the device as float64."""
    return torch.from_numpy(array).cuda().double()


def copy_to_device(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a float32 host array on the device in the element type. It makes the driver's stream the current one."""
    open_torch_driver()
    return torch.from_numpy(np.ascontiguousarray(array)).cuda().to(getattr(torch, dtype))


def build_activations(point: Point, layer: GpuLayer) -> torch.Tensor:
    """Return x of a linear layer in the point's layout: (k, n), or (n, k) for token_major."""
    return copy_to_device(layer.x.T if point.layout == "token_major" else layer.x, point.dtype)


def _result(point: Point) -> Callable[[Any], torch.Tensor]:
    turned = point.layout == "token_major"
    return lambda y: (y.T if turned else y).double()


def _operands(point: Point, layer: GpuLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and x in the order of memory that the layout asks for; a clone keeps it."""
    shape = point.shape
    if not isinstance(shape, Conv2dShape):
        return copy_to_device(layer.weight, point.dtype), build_activations(point, layer)
    memory = torch.channels_last if point.layout == "nhwc" else torch.contiguous_format
    filters = layer.weight.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).transpose(0, 3, 1, 2)
    weight, x = copy_to_device(filters, point.dtype), copy_to_device(layer.x, point.dtype)
    return weight.contiguous(memory_format=memory), x.contiguous(memory_format=memory)


def _linear(point: Point, weight: torch.Tensor, x: torch.Tensor) -> Call:
    left, right = (x, weight.T) if point.layout == "token_major" else (weight, x)
    out = torch.empty((left.shape[0], right.shape[1]), dtype=x.dtype, device="cuda")

    def call() -> torch.Tensor:
        with _library(point.kernel):
            return torch.mm(left, right, out=out)

    return call


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    """Ask torch for this library of matrix products while the context is open: other points may need another."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _convolution(point: Point, weight: torch.Tensor, x: torch.Tensor) -> Call:
    shape = point.shape
    assert isinstance(shape, Conv2dShape)
    return lambda: F.conv2d(x, weight, None, shape.stride, shape.padding, shape.dilation)
