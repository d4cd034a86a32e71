"""Rows of outputs, positions along the vector: y[row, position] += w[row, c] * x[offset of c + position].

It serves every weight and every x that is contiguous along positions (tokens of a feature-major x, tokens of a
transposed block, pixels of an image): the caller says where in x and in y each vector of positions starts, and how
many elements one step of a column is. Order of the loops: blocks of positions whose x fits the second-level cache,
then panels of rows, then tiles of positions, so that a panel's weights stay in the first-level cache over a block.
Threads share (block, panel) pairs by cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import row_tile
from sparse_kernels.cpu.split import share
from sparse_kernels.cpu.target import VERSION, Target


def tile(height: int, target: Target) -> tuple[int, int]:
    """(rows, vectors) of the best register tile for groups of `height` rows.

    As many sums as the registers hold (half of them), more rows before more vectors: a row costs a broadcast that the
    multiply-add reads for nothing, a vector a load. Rows that fill a group up are wasted, so they count.
    """
    sums = target.registers // 2

    def cost(rows: int) -> float:
        filled = -(-height // rows) * rows / height
        return filled * (1 + 1 / rows)

    rows = min((rows for rows in (8, 4, 2, 1) if rows <= sums), key=cost)
    return rows, min(sums // rows, 4)


@cache
def kernel(rows: int, vectors: int, lanes: int, fused: bool) -> Callable[..., None]:
    """The compiled loop over blocks, panels and tiles for one tile size.

    Called with (panels.arrays, x, elements of x a column step is, starts of vectors in x, y, elements of y a row step
    is, starts of vectors in y, bias (m), activation code, tiles in a block, parts). Starts: int64, whole tiles.
    """
    version = VERSION
    fuse = int(fused)

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def multiply(weights, x, x_scale, x_starts, y, y_stride, y_starts, bias, activation, block, parts):  # type: ignore[no-untyped-def]  # fmt: skip
        table, values, columns, work, row_ids = weights
        panels = table.shape[0]
        tiles = x_starts.size // vectors
        blocks = (tiles + block - 1) // block
        values_at, columns_at, ids_at, bias_at = (
            values.ctypes.data,
            columns.ctypes.data,
            row_ids.ctypes.data,
            bias.ctypes.data,
        )
        x_at, y_at, x_starts_at, y_starts_at = (
            x.ctypes.data,
            y.ctypes.data,
            x_starts.ctypes.data,
            y_starts.ctypes.data,
        )
        for part in prange(parts):
            for item in range(share(work, blocks, part, parts), share(work, blocks, part + 1, parts)):
                panel = item % panels
                first = item // panels * block
                for t in range(first, min(first + block, tiles)):
                    row_tile(
                        rows,
                        vectors,
                        lanes,
                        fuse,
                        version,
                        values_at + table[panel, 0] * 4,
                        columns_at + table[panel, 1] * 4,
                        table[panel, 2],
                        x_at,
                        x_scale,
                        x_starts_at + t * vectors * 8,
                        y_at,
                        y_stride,
                        y_starts_at + t * vectors * 8,
                        ids_at + panel * rows * 4,
                        bias_at,
                        0,
                        activation,
                    )

    return multiply
