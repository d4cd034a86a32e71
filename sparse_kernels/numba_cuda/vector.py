"""Vector-wise and Shfl-BW: the dense product again, but each group of V rows has a list of the columns it keeps.

Two indirections are all that sparsity costs here. Rows of x are gathered by the list while they are staged: a row is
read in one piece whichever it is. And a result goes to the row that `row_ids` says, so the permutation of Shfl-BW
costs nothing: a row of y is written in one piece wherever it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparse_kernels.formats import VectorWeight
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


def choose_tile(packed: VectorWeight, n: int) -> ThreadBlockTile:
    """Return the tile for rows of a group, which share their columns."""
    return fit_tile(packed.pattern.v, n)


def count_row_tiles(packed: VectorWeight, tile: ThreadBlockTile) -> int:
    """Return the tiles on top of each other in y: several for a tall group, one for any other."""
    return (packed.indptr.size - 1) * -(-packed.pattern.v // tile.height)


def build_arguments(packed: VectorWeight, dtype: DTypeLike) -> tuple[np.ndarray | int, ...]:
    """Return (indptr, indices, values (vectors, V), row_ids) as the format has them."""
    return packed.indptr, packed.indices, packed.values.astype(dtype), packed.row_ids


@cache
def build_kernel(layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
    """Return multiply(weights, source, n, bias, activation, y); weights: (indptr, indices, values, row_ids)."""
    place, read, write = layout.place, layout.read, layout.write
    lanes, warps, rows, columns = tile.lanes, tile.warps, tile.rows, tile.columns
    depth, height, width = tile.depth, tile.height, tile.width

    @cuda.jit
    def multiply(weights, source, n, bias, activation, y):  # type: ignore[no-untyped-def]
        indptr, indices, values, row_ids = weights
        v = values.shape[1]
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        tiles_across = (n + width - 1) // width
        tiles_of_group = (v + height - 1) // height
        row_tile = cuda.blockIdx.x // tiles_across
        group = row_tile // tiles_of_group
        first = row_tile % tiles_of_group * height  # row in the group
        left = cuda.blockIdx.x % tiles_across * width + lane  # the first column of this thread

        staged_x = cuda.shared.array((depth, width), float32)
        staged_weights = cuda.shared.array((depth, height), float32)
        sums = cuda.local.array((rows, columns), float32)
        for r in range(rows):
            for c in range(columns):
                sums[r, c] = float32(0)

        # Groups differ in length, so their blocks differ in time: the GPU starts the next block as one ends.
        end = indptr[group + 1]
        for start in range(indptr[group], end, depth):
            count = min(depth, end - start)
            stage_weights(staged_weights, values, start, count, first, warp * lanes + lane, warps * lanes)
            for c in range(columns):
                at = place(source, y, min(left + c * lanes, n - 1))
                for t in range(warp, count, warps):
                    staged_x[t, lane + c * lanes] = read(source, indices[start + t], at)
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
                    row = row_ids[group * v + inside] if inside < v else -1
                    if row >= 0:  # -1 also fills up the last group
                        total = staged_x[warp * rows + r, lane + c * lanes]
                        write(y, row, at, activated(total + bias[row], activation))

    return multiply
