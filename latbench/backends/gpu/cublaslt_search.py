"""Dense products by cuBLASLt: the fastest of the algorithms that its heuristic names, found by trying them.

torch runs the heuristic's first. The library is the one that torch has loaded, called through ctypes. cuBLASLt's
matrices lie column by column. One that lies row by row is its transpose there, so y = left @ right is computed as
y^T = right^T @ left^T. Constants and structures are those of cublasLt.h and library_types.h, versions 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from latbench.backends.installed_engines import Unsupported

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
WORKSPACE_BYTES = 32 * 2**20  # what cuBLAS itself takes on Hopper
MOST_ALGORITHMS = 20  # the first are the likeliest, and each takes a few launches

_CUDA_TYPE = {"float16": 2, "bfloat16": 14}
_CUDA_R_32F, _COMPUTE_32F = 0, 68
_TRANSA, _TRANSB = 3, 4  # CUBLASLT_MATMUL_DESC_*
_OP_N, _OP_T = 0, 1
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_NOT_SUPPORTED = 15


class Algorithm(ctypes.Structure):
    """A cublasLtMatmulHeuristicResult_t: an algorithm, and the workspace that it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Stored:
    """A matrix of `rows` x `columns` that lies row by row; `transposed` if the product takes its transpose."""

    rows: int
    columns: int
    transposed: bool = False


class LtProduct:
    """Products left @ right of matrices of fixed sizes, float16 or bfloat16, with sums in float32.

    It knows no addresses, so copies of the operands share it.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p, dtype: str, left: Stored, right: Stored) -> None:
        self._library, self._handle = library, handle
        self._descriptor = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._descriptor), _COMPUTE_32F, _CUDA_R_32F))
        for attribute, stored in ((_TRANSA, right), (_TRANSB, left)):
            operation = ctypes.c_int32(_OP_T if stored.transposed else _OP_N)
            size = ctypes.c_size_t(ctypes.sizeof(operation))
            _check(library.cublasLtMatmulDescSetAttribute(self._descriptor, attribute, ctypes.byref(operation), size))
        rows = left.columns if left.transposed else left.rows
        columns = right.rows if right.transposed else right.columns
        self._right, self._left, self._out = (
            self._layout(dtype, stored) for stored in (right, left, Stored(rows, columns))
        )

    def _layout(self, dtype: str, stored: Stored) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(stored.columns), ctypes.c_uint64(stored.rows), ctypes.c_int64(stored.columns)
        _check(self._library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _CUDA_TYPE[dtype], *sizes))
        return layout

    def list_algorithms(self, most: int = MOST_ALGORITHMS) -> list[Algorithm]:
        """List the algorithms that the heuristic names, its favourite first; none where it has none."""
        preference, workspace = ctypes.c_void_p(), ctypes.c_uint64(WORKSPACE_BYTES)
        found, count = (Algorithm * most)(), ctypes.c_int()
        library = self._library
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            _check(
                library.cublasLtMatmulPreferenceSetAttribute(
                    preference, _MAX_WORKSPACE, ctypes.byref(workspace), ctypes.c_size_t(ctypes.sizeof(workspace))
                )
            )
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._descriptor, self._right, self._left, self._out, self._out, preference, most,
                found, ctypes.byref(count),
            )  # fmt: skip
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        if status == _NOT_SUPPORTED:
            return []
        _check(status)
        return [each for each in found[: count.value] if each.state == 0]

    def multiply(self, addresses: tuple[int, int, int], algorithm: Algorithm, workspace: int, stream: int) -> None:
        """Queue left @ right.

        Parameters
        ----------
        addresses
            Those of left, right and the result.
        algorithm
            One of `list_algorithms`.
        workspace
            Address of WORKSPACE_BYTES bytes that no other work uses at the same time.
        stream
            Address of the CUDA stream.
        """
        left, right, out = map(ctypes.c_void_p, addresses)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        status = self._library.cublasLtMatmul(
            self._handle, self._descriptor, ctypes.byref(one), right, self._right, left, self._left,
            ctypes.byref(zero), out, self._out, out, self._out, ctypes.byref(algorithm, Algorithm.algorithm.offset),
            ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
        )  # fmt: skip
        _check(status)

    def close(self) -> None:
        """Destroy the descriptors."""
        for layout in (self._right, self._left, self._out):
            self._library.cublasLtMatrixLayoutDestroy(layout)
        self._library.cublasLtMatmulDescDestroy(self._descriptor)


@functools.cache
def open_cublaslt() -> tuple[Any, ctypes.c_void_p]:
    """Return the cuBLASLt that torch has loaded, and a handle. Raises Unsupported where there is none."""
    for name in SONAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        handle = ctypes.c_void_p()
        _check(library.cublasLtCreate(ctypes.byref(handle)))
        return library, handle
    raise Unsupported(f"torch has loaded no cuBLASLt that can be called: neither {' nor '.join(SONAMES)}")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
