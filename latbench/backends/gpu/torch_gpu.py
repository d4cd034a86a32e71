"""torch on a GPU, dense: the baseline. Linear layers by cuBLAS or cuBLASLt, convolutions by cuDNN.

Every kernel is measured in both orders of the activations, because the speed of the libraries depends on it:
`token_major` is y (n, m) = x (n, k) @ w^T, `feature_major` y (m, n) = w @ x (k, n); convolutions: `nchw` or `nhwc`.
The weight lies as (m, k), for the kernels `cublas_turned` and `cublaslt_turned` as (k, m): these are all four orders
of operands. `cublaslt_search` tries what cuBLASLt's heuristic names, for both orders of the weight.
Sums are float32, except that torch lets cuBLAS split them by default (see SPLIT_SUMS), as every user gets it.
`torch_low_precision` has the dense products in eight and four bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from latbench.backends.gpu import torch_low_precision
from latbench.backends.gpu.cublaslt_search import WORKSPACE_BYTES, Algorithm, LtProduct, Stored, open_cublaslt
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.prepare_gpu_point import SPLIT_SUMS, GpuEngine, check_format, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.fastest_candidate import find_fastest, time_briefly
from latbench.timing.gpu_drivers import open_torch_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape

LIBRARIES = ("cublas", "cublaslt")
TURNED = "_turned"  # the weight lies as (k, m)
SEARCH = "cublaslt_search"
SEARCH_SECONDS = 3.0
Build = Callable[[Point, torch.Tensor, torch.Tensor], Call]
"""Builds a call on a weight and x of its own."""

LINEAR_KERNELS = (*LIBRARIES, *(name + TURNED for name in LIBRARIES), SEARCH)


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the dense layer in torch. Raises Unsupported for any other pattern."""
    torch.backends.cudnn.benchmark = True
    convolution = isinstance(point.shape, Conv2dShape)
    if point.kernel in torch_low_precision.KERNELS and not convolution:
        return torch_low_precision.prepare(point, layer)
    check_format(point, format="dense", layouts=("nchw", "nhwc") if convolution else ("token_major", "feature_major"))
    build: Build = _convolution if convolution else _linear
    known = ("cudnn",) if convolution else LINEAR_KERNELS
    if point.kernel not in known:
        names = ", ".join((*known, *(() if convolution else torch_low_precision.KERNELS)))
        raise Unsupported(f"torch has no dense {point.shape.op} kernel {point.kernel}: known are {names}")
    if {point.dtype_w, point.dtype_a} != {point.dtype} or point.dtype not in ("float16", "bfloat16"):
        raise Unsupported(f"{point.kernel} multiplies float16 or bfloat16, not {point.dtype_w}")
    driver = open_torch_driver()
    weight, x = _operands(point, layer)
    if point.kernel == SEARCH:
        build = _search(point, weight, x)
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
        stored = layer.weight.T if point.kernel.endswith(TURNED) else layer.weight
        return copy_to_device(stored, point.dtype), build_activations(point, layer)
    memory = torch.channels_last if point.layout == "nhwc" else torch.contiguous_format
    filters = layer.weight.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).transpose(0, 3, 1, 2)
    weight, x = copy_to_device(filters, point.dtype), copy_to_device(layer.x, point.dtype)
    return weight.contiguous(memory_format=memory), x.contiguous(memory_format=memory)


def _linear(point: Point, weight: torch.Tensor, x: torch.Tensor) -> Call:
    weight = weight.T if point.kernel.endswith(TURNED) else weight
    left, right = (x, weight.T) if point.layout == "token_major" else (weight, x)
    out = torch.empty((left.shape[0], right.shape[1]), dtype=x.dtype, device="cuda")

    def call() -> torch.Tensor:
        with _library(point.kernel.removesuffix(TURNED)):
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


def _search(point: Point, weight: torch.Tensor, x: torch.Tensor) -> Build:
    """Return what builds calls of cuBLASLt's fastest algorithm. Raises Unsupported where it has none."""
    library, handle = open_cublaslt()
    driver = open_torch_driver()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
    candidates = [
        (turned, product, algorithm)
        for turned in (False, True)
        for product in [LtProduct(library, handle, point.dtype, *_stored(point, turned))]
        for algorithm in product.list_algorithms()
    ]
    if not candidates:
        raise Unsupported(f"cuBLASLt's heuristic has no algorithm for {point.dtype} on {point.shape}")

    def build(candidate: tuple[bool, LtProduct, Algorithm], weight: torch.Tensor, x: torch.Tensor) -> Call:
        turned, product, algorithm = candidate
        weight = weight.T.contiguous() if turned else weight
        token_major = point.layout == "token_major"
        left, right = (x, weight) if token_major else (weight, x)
        size = (point.shape.n, point.shape.m) if token_major else (point.shape.m, point.shape.n)
        out = torch.empty(size, dtype=x.dtype, device=x.device)

        def call() -> torch.Tensor:
            addresses = left.data_ptr(), right.data_ptr(), out.data_ptr()
            stream = torch.cuda.current_stream().cuda_stream  # while a graph is captured, its own
            product.multiply(addresses, algorithm, workspace.data_ptr(), stream)
            return out

        return call

    best = find_fastest(candidates, lambda each: time_briefly(build(each, weight, x), driver), limit=SEARCH_SECONDS)
    return lambda point, weight, x: build(best, weight, x)


def _stored(point: Point, turned: bool) -> tuple[Stored, Stored]:
    """Return the left and the right operand of the product that gives y in the point's layout, row by row."""
    m, k, n = point.shape.m, point.shape.k, point.shape.n
    if point.layout == "feature_major":
        return Stored(k, m, transposed=True) if turned else Stored(m, k), Stored(k, n)
    return Stored(n, k), Stored(k, m) if turned else Stored(m, k, transposed=True)


def _convolution(point: Point, weight: torch.Tensor, x: torch.Tensor) -> Call:
    shape = point.shape
    assert isinstance(shape, Conv2dShape)
    return lambda: F.conv2d(x, weight, None, shape.stride, shape.padding, shape.dilation)
