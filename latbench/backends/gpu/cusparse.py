"""cuSPARSE in float16 or bfloat16 with float32 sums: SpMM on CSR and on BSR, through the library's own interface.

CuPy's sparse matrices are float32 and wider only, but its bindings take any type. BSR is not among them, so ctypes
makes that descriptor. x (k, n) and y (m, n) are row-major; the algorithm is the one for that order.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import cupy
import numpy as np

from latbench.backends.gpu.cublas import convert_to_float64, copy_to_device, widen
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.prepare_gpu_point import GpuEngine, check_format, count_gpu_copies
from latbench.backends.installed_engines import Unsupported
from latbench.timing.gpu_drivers import open_cupy_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.formats import BlockWeight, CSRWeight
from sparse_kernels.shapes import Conv2dShape

# cusparse.h and library_types.h
_CUDA_TYPE = {"float16": 2, "bfloat16": 14}
_CUDA_R_32F = 0
_INDEX_32I = 2
_BASE_ZERO = 0
_ROW_MAJOR = 2
_NOT_TRANSPOSED = 0
_ALGORITHM = {"csr": 6, "bsr": 14}  # CUSPARSE_SPMM_CSR_ALG2, for row-major operands; CUSPARSE_SPMM_BSR_ALG1
_REFUSALS = (3, 4, 8, 10)  # invalid value, architecture mismatch, matrix type not supported, not supported
_SONAMES = ("libcusparse.so.12", "libcusparse.so.11")


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the sparse linear layer in cuSPARSE. Raises Unsupported where it has no format for the pattern."""
    if isinstance(point.shape, Conv2dShape):
        raise Unsupported("cuSPARSE has no convolutions")
    formats = {"csr": "unstructured", "bsr": "block"}
    if point.kernel not in formats:
        raise Unsupported(f"cuSPARSE is asked for csr or bsr here, not {point.kernel}")
    check_format(point, format=formats[point.kernel], layouts=("feature_major",))
    driver = open_cupy_driver()
    packed = layer.packed
    weight_bytes = 2 * packed.values.size + 4 * (packed.indices.size + packed.indptr.size)  # type: ignore[union-attr]
    x, arrays = copy_to_device(layer.x, point.dtype), _arrays(packed, point.dtype)
    number = count_gpu_copies(point, layer, weight_bytes, driver)
    calls = [_call(point, packed, tuple(array.copy() for array in arrays), x.copy()) for _ in range(number)]
    return GpuEngine(
        f"cusparse.{point.kernel}", weight_bytes, calls, driver, convert_to_float64, lambda y: widen(y, point.dtype)
    )


Arrays = tuple[cupy.ndarray, ...]


def _arrays(packed: Any, dtype: str) -> Arrays:
    """Return the row offsets, column indices and values of a weight."""
    return (
        cupy.asarray(packed.indptr.astype(np.int32)),
        cupy.asarray(packed.indices),
        copy_to_device(packed.values, dtype),
    )


def _call(point: Point, packed: Any, arrays: Arrays, x: cupy.ndarray) -> Call:
    from cupy.cuda.device import get_cusparse_handle
    from cupy_backends.cuda.libs import cusparse

    shape, cuda_type, algorithm = point.shape, _CUDA_TYPE[point.dtype], _ALGORITHM[point.kernel]
    y = cupy.zeros((shape.m, shape.n), x.dtype)
    weight = _descriptor(packed, arrays, point.dtype)
    dense = [cusparse.createDnMat(*a.shape, a.shape[1], a.data.ptr, cuda_type, _ROW_MAJOR) for a in (x, y)]
    one, zero = np.array(1, np.float32), np.array(0, np.float32)
    arguments = (
        get_cusparse_handle(), _NOT_TRANSPOSED, _NOT_TRANSPOSED, one.ctypes.data, weight, dense[0], zero.ctypes.data,
        dense[1], _CUDA_R_32F, algorithm,
    )  # fmt: skip
    try:
        scratch = cupy.empty(max(1, cusparse.spMM_bufferSize(*arguments)), cupy.int8)
        cusparse.spMM(*arguments, scratch.data.ptr)
    except cusparse.CuSparseError as error:
        if error.status not in _REFUSALS:  # it may work at another time
            raise
        raise Unsupported(f"cuSPARSE refuses {point.kernel} for {point.pattern} on this device: {error}") from error

    def call() -> cupy.ndarray:
        _ = arrays, one, zero, x  # what the descriptors point to
        cusparse.spMM(*arguments, scratch.data.ptr)
        return y

    return call


def _descriptor(packed: Any, arrays: Arrays, dtype: str) -> int:
    """Make cuSPARSE's description of a weight that lies in `arrays`."""
    from cupy_backends.cuda.libs import cusparse

    pointers = [array.data.ptr for array in arrays]
    types = (_INDEX_32I, _INDEX_32I, _BASE_ZERO, _CUDA_TYPE[dtype])
    if isinstance(packed, CSRWeight):
        return int(cusparse.createCsr(*packed.shape, packed.nnz, *pointers, *types))
    assert isinstance(packed, BlockWeight)
    blocks, rows, columns = packed.values.shape
    m, k = packed.shape
    if m % rows or k % columns:
        raise Unsupported(f"cuSPARSE's BSR needs whole blocks, and {packed.pattern} does not divide {m}x{k}")
    descriptor = ctypes.c_void_p()
    status = _library().cusparseCreateBsr(
        ctypes.byref(descriptor),
        *(ctypes.c_int64(size) for size in (m // rows, k // columns, blocks, rows, columns)),
        *(ctypes.c_void_p(pointer) for pointer in pointers),
        *types,
        _ROW_MAJOR,
    )
    if status or descriptor.value is None:
        raise Unsupported(f"cuSPARSE makes no BSR matrix of {packed.pattern}: status {status}")
    return descriptor.value


@functools.cache
def _library() -> Any:
    """Return the cuSPARSE that CuPy has loaded. Raises Unsupported where it is too old for BSR."""
    for name in _SONAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "cusparseCreateBsr"):
            return library
    raise Unsupported("this cuSPARSE has no generic BSR matrices (they came with CUDA 12.1)")
