"""The dense product, as every book on CUDA has it: tiles of w and x staged in shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparse_kernels.formats import DenseWeight
from sparse_kernels.numba_cuda.layouts import ActivationLayout
from sparse_kernels.numba_cuda.library import cuda, float32
from sparse_kernels.numba_cuda.tile import (
    ThreadBlockTile,
    activated,
    add_products,
    fit_tile,
    stage_weights,
    store_sums,
)


def choose_tile(packed: DenseWeight, n: int) -> ThreadBlockTile:
    """Return the tile for rows that share all columns."""
    return fit_tile(packed.shape[0], n)


def count_row_tiles(packed: DenseWeight, tile: ThreadBlockTile) -> int:
    """Return the tiles on top of each other in y."""
    return -(-packed.shape[0] // tile.height)


def build_arguments(packed: DenseWeight, dtype: DTypeLike) -> tuple[np.ndarray | int, ...]:
    """Return (weights (k, m),): a column of w lies in one piece, as `stage_weights` wants it."""
    return (np.ascontiguousarray(packed.values.T, dtype),)


@cache
def build_kernel(layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
    """Return multiply(weights, source, n, bias, activation, y); weights: ((k, m),)."""
    place, read, write = layout.place, layout.read, layout.write
    lanes, warps, rows, columns = tile.lanes, tile.warps, tile.rows, tile.columns
    depth, height, width = tile.depth, tile.height, tile.width

    @cuda.jit
    def multiply(weights, source, n, bias, activation, y):  # type: ignore[no-untyped-def]
        k, m = weights[0].shape
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        tiles_across = (n + width - 1) // width
        first = cuda.blockIdx.x // tiles_across * height
        left = cuda.blockIdx.x % tiles_across * width + lane  # the first column of this thread

        staged_x = cuda.shared.array((depth, width), float32)
        staged_weights = cuda.shared.array((depth, height), float32)
        sums = cuda.local.array((rows, columns), float32)
        for r in range(rows):
            for c in range(columns):
                sums[r, c] = float32(0)

        for start in range(0, k, depth):
            count = min(depth, k - start)
            stage_weights(staged_weights, weights[0], start, count, first, warp * lanes + lane, warps * lanes)
            for c in range(columns):
                # Beyond the last column a thread reads what the last one reads: all must reach the barriers.
                at = place(source, y, min(left + c * lanes, n - 1))
                for t in range(warp, count, warps):
                    staged_x[t, lane + c * lanes] = read(source, start + t, at)
            cuda.syncthreads()  # all data must be there before the products
            add_products(sums, staged_weights, staged_x, count, warp * rows, lane, lanes)
            cuda.syncthreads()  # all reads must end before the next copies

        store_sums(staged_x, sums, warp * rows, lane, lanes)
        for c in range(columns):
            column = left + c * lanes
            if column < n:
                at = place(source, y, column)
                for r in range(rows):
                    row = first + warp * rows + r
                    if row < m:
                        total = staged_x[warp * rows + r, lane + c * lanes]
                        write(y, row, at, activated(total + bias[row], activation))

    return multiply
