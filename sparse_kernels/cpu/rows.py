"""Rows of outputs, positions along the vector: y[row, position] += w[row, c] * x[offset of c + position].

It serves every weight and every x that is contiguous along positions (tokens of a feature-major x, blocks of tokens,
pixels of an image): the caller says where in x and in y each vector of positions starts, and how many elements one
step of a column is.

Order of the loops: blocks of positions whose x fits the second-level cache, then panels of rows, then tiles of
positions, so that a panel's weights stay in the first-level cache over a block. A row without companions uses what it
loads of x only once: its panels come in stages of columns, and all rows pass over one stage, whose x fits the
first-level cache, before the next; sums wait in y meanwhile. Threads share (block, panel) pairs by cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import PARTIAL, row_tile
from sparse_kernels.cpu.split import share
from sparse_kernels.cpu.target import VERSION, Target


def tile(height: int, target: Target) -> tuple[int, int]:
    """(rows, vectors) of the best register tile for groups of `height` rows.

    As many sums as the registers hold (half of them), more rows before more vectors: a row costs a broadcast, a
    vector a load of x. Rows that fill a group up are wasted, so they count.
    """
    sums = target.registers // 2

    def cost(rows: int) -> float:
        filled = -(-height // rows) * rows / height
        return filled * (1 + 1 / rows)

    rows = min((rows for rows in (8, 4, 2, 1) if rows <= sums), key=cost)
    return rows, min(sums // rows, 4)


def block(total: int, vectors: int, cached: int, threads: int) -> int:
    """Vectors of a block, in whole tiles: at most `cached` of them, whose x fits the second-level cache.

    Each thread gets blocks of its own where they come out even, so that it reads the x that it has laid out itself;
    a line that another core has just written takes longer than one from memory near by. Else threads share panels.
    """
    tiles = -(-total // vectors)
    limit = max(1, cached // vectors)
    own = -(-tiles // threads) if tiles % threads == 0 or tiles >= 4 * threads else tiles
    return -(-own // -(-own // limit)) * vectors


@cache
def kernel(rows: int, vectors: int, lanes: int, fused: bool) -> Callable[..., None]:
    """The compiled loop over blocks, stages, panels and tiles for one tile size.

    Called with (panels.arrays, x, elements of x a column step is, starts of vectors in x, y, elements of y a row step
    is, starts of vectors in y, bias (m), activation code, vectors in a block: whole tiles, parts). Starts: int64.
    Vectors that do not fill a tile are computed one by one.
    """
    version = VERSION
    fuse = int(fused)
    partial = PARTIAL

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def multiply(weights, x, x_scale, x_starts, y, y_stride, y_starts, bias, activation, block, parts):  # type: ignore[no-untyped-def]  # fmt: skip
        table, values, columns, work, row_ids = weights
        stages, panels, _ = table.shape
        total = x_starts.size
        blocks = (total + block - 1) // block
        values_at, columns_at, ids_at = values.ctypes.data, columns.ctypes.data, row_ids.ctypes.data
        x_at, y_at, bias_at = x.ctypes.data, y.ctypes.data, bias.ctypes.data
        x_starts_at, y_starts_at = x_starts.ctypes.data, y_starts.ctypes.data
        for part in prange(parts):
            begin, end = share(work, blocks, part, parts), share(work, blocks, part + 1, parts)
            while begin < end:
                # The panels of this part that lie in one block.
                of_block = begin // panels
                first = begin - of_block * panels
                stop = min(panels, end - of_block * panels)
                begin = of_block * panels + stop
                vectors_end = min((of_block + 1) * block, total)
                for stage in range(stages):
                    start = min(stage, 1)
                    code = activation if stage == stages - 1 else partial
                    for panel in range(first, stop):
                        values_here = values_at + table[stage, panel, 0] * 4
                        columns_here = columns_at + table[stage, panel, 1] * 4
                        count = table[stage, panel, 2]
                        ids_here = ids_at + panel * rows * 4
                        v = of_block * block
                        while v + vectors <= vectors_end:
                            row_tile(
                                rows,
                                vectors,
                                lanes,
                                fuse,
                                version,
                                values_here,
                                columns_here,
                                count,
                                x_at,
                                x_scale,
                                x_starts_at + v * 8,
                                y_at,
                                y_stride,
                                y_starts_at + v * 8,
                                ids_here,
                                bias_at,
                                start,
                                code,
                            )
                            v += vectors
                        while v < vectors_end:
                            row_tile(
                                rows,
                                1,
                                lanes,
                                fuse,
                                version,
                                values_here,
                                columns_here,
                                count,
                                x_at,
                                x_scale,
                                x_starts_at + v * 8,
                                y_at,
                                y_stride,
                                y_starts_at + v * 8,
                                ids_here,
                                bias_at,
                                start,
                                code,
                            )
                            v += 1

    return multiply
