"""Unstructured: every row keeps what it likes, and there is nothing for a block to share.

So nothing is staged and no thread waits for another: a warp takes one row and `lanes` columns. Its threads read the
same weight and index, which the cache serves once, and neighbouring elements of one row of x, in one piece. What
limits it is that each product needs three loads of its own, where the kernels with groups need little more than one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparse_kernels.formats import CSRWeight
from sparse_kernels.numba_cuda.layouts import ActivationLayout
from sparse_kernels.numba_cuda.library import cuda, float32
from sparse_kernels.numba_cuda.tile import WARP, ThreadBlockTile, activated

WARPS = 4  # a block ends when its longest row does: few rows in a block leave few warps idle


def choose_tile(packed: CSRWeight, n: int) -> ThreadBlockTile:
    """Return the tile: a row a warp, without stages."""
    return ThreadBlockTile(WARP, min(WARPS, packed.shape[0]), 1, 1, 0)


def count_row_tiles(packed: CSRWeight, tile: ThreadBlockTile) -> int:
    """Return the tiles on top of each other in y."""
    return -(-packed.shape[0] // tile.height)


def build_arguments(packed: CSRWeight, dtype: DTypeLike) -> tuple[np.ndarray | int, ...]:
    """Return (indptr, indices, values) as the format has them."""
    return packed.indptr, packed.indices, packed.values.astype(dtype)


@cache
def build_kernel(layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
    """Return multiply(weights, source, n, bias, activation, y); a thread has one sum.

    weights: (indptr, indices, values).
    """
    if (tile.rows, tile.columns) != (1, 1):
        raise ValueError(f"a thread of this kernel has one sum, and {tile} asks for more")
    place, read, write = layout.place, layout.read, layout.write
    lanes, warps = tile.lanes, tile.warps

    @cuda.jit
    def multiply(weights, source, n, bias, activation, y):  # type: ignore[no-untyped-def]
        indptr, indices, values = weights
        tiles_across = (n + lanes - 1) // lanes
        row = cuda.blockIdx.x // tiles_across * warps + cuda.threadIdx.y
        column = cuda.blockIdx.x % tiles_across * lanes + cuda.threadIdx.x
        if row >= bias.shape[0] or column >= n:
            return  # no barriers here, so a thread may leave
        at = place(source, y, column)
        total = float32(0)
        for element in range(indptr[row], indptr[row + 1]):
            total += float32(values[element]) * read(source, indices[element], at)
        write(y, row, at, activated(total + bias[row], activation))

    return multiply
