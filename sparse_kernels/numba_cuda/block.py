"""Block-wise: a row of blocks is a group of rows that keeps its columns in runs.

The kept columns of all blocks in a row are one long list. Entry t of it is column t % cols of block t // cols.
Cut into stages, that list is the same work as in `vector`, whatever the size of the blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparse_kernels.formats import BlockWeight
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


def choose_tile(packed: BlockWeight, n: int) -> ThreadBlockTile:
    """Return the tile for rows of a block, which share their columns."""
    return fit_tile(packed.pattern.rows, n)


def count_row_tiles(packed: BlockWeight, tile: ThreadBlockTile) -> int:
    """Return the tiles on top of each other in y; none crosses from one row of blocks to the next."""
    return (packed.indptr.size - 1) * -(-packed.pattern.rows // tile.height)


def build_arguments(packed: BlockWeight, dtype: DTypeLike) -> tuple[np.ndarray | int, ...]:
    """Return (indptr, indices, values (blocks * cols, rows), cols, k): a column of a block lies in one piece."""
    _, rows, cols = packed.values.shape
    values = np.ascontiguousarray(packed.values.swapaxes(1, 2), dtype).reshape(-1, rows)
    return packed.indptr, packed.indices, values, cols, packed.shape[1]


@cache
def build_kernel(layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
    """Return multiply(weights, source, n, bias, activation, y); weights: (indptr, indices, values, cols, k)."""
    place, read, write = layout.place, layout.read, layout.write
    lanes, warps, rows, columns = tile.lanes, tile.warps, tile.rows, tile.columns
    depth, height, width = tile.depth, tile.height, tile.width

    @cuda.jit
    def multiply(weights, source, n, bias, activation, y):  # type: ignore[no-untyped-def]
        indptr, indices, values, cols, k = weights
        block_rows = values.shape[1]
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        tiles_across = (n + width - 1) // width
        tiles_of_group = (block_rows + height - 1) // height
        row_tile = cuda.blockIdx.x // tiles_across
        group = row_tile // tiles_of_group
        first = row_tile % tiles_of_group * height  # row in the block
        left = cuda.blockIdx.x % tiles_across * width + lane  # the first column of this thread

        staged_x = cuda.shared.array((depth, width), float32)
        staged_weights = cuda.shared.array((depth, height), float32)
        sums = cuda.local.array((rows, columns), float32)
        for r in range(rows):
            for c in range(columns):
                sums[r, c] = float32(0)

        end = indptr[group + 1] * cols
        for start in range(indptr[group] * cols, end, depth):
            count = min(depth, end - start)
            stage_weights(staged_weights, values, start, count, first, warp * lanes + lane, warps * lanes)
            for c in range(columns):
                at = place(source, y, min(left + c * lanes, n - 1))
                for t in range(warp, count, warps):
                    feature = indices[(start + t) // cols] * cols + (start + t) % cols
                    # The last block may reach beyond the matrix: its weights are 0 there, and x does not exist.
                    staged_x[t, lane + c * lanes] = read(source, feature, at) if feature < k else float32(0)
            cuda.syncthreads()
            add_products(sums, staged_weights, staged_x, count, warp * rows, lane, lanes)
            cuda.syncthreads()

        store_sums(staged_x, sums, warp * rows, lane, lanes)
        for c in range(columns):
            column = left + c * lanes
            if column < n:
                at = place(source, y, column)
                for r in range(rows):
                    inside = first + warp * rows + r
                    row = group * block_rows + inside
                    if inside < block_rows and row < bias.shape[0]:
                        total = staged_x[warp * rows + r, lane + c * lanes]
                        write(y, row, at, activated(total + bias[row], activation))

    return multiply
