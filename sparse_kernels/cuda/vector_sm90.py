"""Vector-wise, Shfl-BW and block-wise products on Hopper, with groups of 64 or 128 rows: vector_sm90.cu.

Each group's kept columns are cut into stages of 64; the last stage is filled up with columns -1, for which the kernel
reads zeros.
weights  uint16 (stages, V, 64): the bits of the group's weights, in the swizzled order of shared memory
columns  int32 (stages, 64): the row of x that each stored column meets, or -1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import sm90
from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.cuda.vector_tiles import RowVectors, convert_to_bits, convert_to_vectors
from sparse_kernels.formats import Packed

HEIGHTS = (64, 128)
WIDTHS = (256, 128)


def build_hopper_kernel(v: int, width: int) -> sm90.HopperKernel:
    """Return the kernel for groups of v rows with tiles of `width` columns."""
    return sm90.HopperKernel(
        source="vector_sm90.cu",
        function="vector_sm90",
        defines={"V": v, "BN": width},
        rows=v,
        width=width,
        x_rows=sm90.STAGE_COLUMNS,
        weight_bytes=v * sm90.STAGE_COLUMNS * 2,
        products=v * width * sm90.STAGE_COLUMNS,
        instruction="HGMMA",
    )


KERNELS = [build_hopper_kernel(v, width) for v in HEIGHTS for width in WIDTHS]
VARIANTS = list(sm90.list_kernel_variants(KERNELS))


def build_program(
    packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None
) -> sm90.HopperProgram:
    """Return the weight packed for Hopper; n does not matter.

    Raises NotSupported for other formats, heights and machines.
    """
    sm90.check_target(dtype, architecture)
    vectors = convert_to_vectors(packed)
    if vectors.v not in HEIGHTS:
        raise NotSupported(f"this kernel is for groups of 64 or 128 rows, and {packed.pattern} has {vectors.v}")
    counts = -(-np.diff(vectors.indptr) // sm90.STAGE_COLUMNS)
    weights, columns = pack(vectors, counts, dtype)
    kernels = tuple(build_hopper_kernel(vectors.v, width) for width in WIDTHS)
    count = multiprocessors or TARGETS[architecture].multiprocessors
    return sm90.HopperProgram(kernels, dtype, (weights, columns), counts, vectors.row_ids, count)


def pack(vectors: RowVectors, counts: NDArray[np.int64], dtype: str) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Return `weights` and `columns` of the module's docstring; counts (groups): the stages of each group."""
    numbers = np.diff(vectors.indptr)
    starts = (np.cumsum(counts) - counts) * sm90.STAGE_COLUMNS
    places = np.arange(vectors.columns.size) + np.repeat(starts - vectors.indptr[:-1], numbers)
    stages = int(counts.sum())
    columns = np.full(stages * sm90.STAGE_COLUMNS, -1, np.int32)
    columns[places] = vectors.columns
    by_column = np.zeros((stages * sm90.STAGE_COLUMNS, vectors.v), np.uint16)
    by_column[places] = convert_to_bits(vectors.values, dtype)
    lines = by_column.reshape(stages, sm90.STAGE_COLUMNS, vectors.v).swapaxes(1, 2)
    return sm90.swizzle(np.ascontiguousarray(lines)), columns.reshape(stages, sm90.STAGE_COLUMNS)
