"""N:M: every row keeps its own columns, but always N of the M in a group, which is what makes sharing possible.

A block stages whole groups of columns of x, kept or not, and each thread picks from them by the offsets of its row.
Staging costs the same as in the dense product, the products are N / M of it. Rows have nothing else in common, so a
warp has one, and its weights come from global memory: no other warp needs them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparse_kernels.formats import NMWeight
from sparse_kernels.numba_cuda.layouts import ActivationLayout
from sparse_kernels.numba_cuda.library import cuda, float32, int32
from sparse_kernels.numba_cuda.tile import WARP, ThreadBlockTile, activated, fit_columns

WARPS = 8  # rows that use a staged tile of x: with 16, a block would need all the registers of its multiprocessor
LEAST_DEPTH = 64  # columns of w in a stage at least
SHARED = 12_288  # float32 elements of shared memory that every GPU gives a block: 48 KB


def choose_tile(packed: NMWeight, n: int) -> ThreadBlockTile:
    """Return the tile: as many whole groups in a stage as make LEAST_DEPTH columns, or one larger group."""
    of = packed.pattern.of
    depth = max(1, LEAST_DEPTH // of) * of
    columns = min(fit_columns(n), SHARED // (depth * WARP))
    return ThreadBlockTile(WARP, min(WARPS, packed.shape[0]), 1, columns, depth)


def count_row_tiles(packed: NMWeight, tile: ThreadBlockTile) -> int:
    """Return the tiles on top of each other in y."""
    return -(-packed.shape[0] // tile.height)


def build_arguments(packed: NMWeight, dtype: DTypeLike) -> tuple[np.ndarray | int, ...]:
    """Return (values, offsets (m, groups, keep), of, k) as the format has them."""
    return packed.values.astype(dtype), packed.offsets, packed.pattern.of, packed.shape[1]


@cache
def build_kernel(layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
    """Return multiply(weights, source, n, bias, activation, y); tile.depth is a multiple of `of`.

    weights: (values, offsets, of, k).
    """
    if tile.rows != 1:
        raise ValueError(f"a warp of this kernel has one row, and {tile} asks for more")
    place, read, write = layout.place, layout.read, layout.write
    lanes, warps, columns, depth, width = tile.lanes, tile.warps, tile.columns, tile.depth, tile.width

    @cuda.jit
    def multiply(weights, source, n, bias, activation, y):  # type: ignore[no-untyped-def]
        values, offsets, of, k = weights
        m, groups, keep = values.shape
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        tiles_across = (n + width - 1) // width
        row = cuda.blockIdx.x // tiles_across * warps + warp
        left = cuda.blockIdx.x % tiles_across * width + lane  # the first column of this thread

        staged_x = cuda.shared.array((depth, width), float32)
        sums = cuda.local.array(columns, float32)
        for c in range(columns):
            sums[c] = float32(0)

        groups_staged = depth // of
        for first_group in range(0, groups, groups_staged):
            start = first_group * of
            for c in range(columns):
                at = place(source, y, min(left + c * lanes, n - 1))
                for t in range(warp, min(depth, k - start), warps):
                    staged_x[t, lane + c * lanes] = read(source, start + t, at)
            cuda.syncthreads()
            if row < m:
                for group in range(first_group, min(first_group + groups_staged, groups)):
                    for slot in range(keep):
                        weight = float32(values[row, group, slot])
                        t = group * of - start + int32(offsets[row, group, slot])
                        for c in range(columns):
                            sums[c] += weight * staged_x[t, lane + c * lanes]
            cuda.syncthreads()

        for c in range(columns):
            column = left + c * lanes
            if row < m and column < n:
                at = place(source, y, column)
                write(y, row, at, activated(sums[c] + bias[row], activation))

    return multiply
