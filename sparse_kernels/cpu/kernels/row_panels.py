"""Rows of outputs, positions along the vector: y[row, position] += w[row, c] * x[offset of c + position].

It serves every weight and every x that is contiguous along positions (tokens of a feature-major x, blocks of tokens,
pixels of an image): `VectorGrid` says where in x and in y each vector of positions lies. Rows that share no columns have
a kernel of their own (`single`).

Order of the loops: blocks of positions whose x fits the second-level cache, then panels of rows, then tiles of
positions, so that a panel's weights stay in the first-level cache over a block. Threads share (block, panel) pairs by
cost.

Where x is large, a thread that works on one block fetches the x of its next, a little with each tile: that lies in
as many places as there are columns, which the hardware does not foresee. Waiting for it took half of the time of
convolutions of 16 images with one tap and many channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.register_tiles import fetch, row_tile
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.layouts.vector_grid import CACHED, LARGE, TILE, VectorGrid
from sparse_kernels.cpu.runtime.work_split import share

NOTHING = np.empty(0, np.int64)


def tile(height: int, target: CpuTarget) -> tuple[int, int]:
    """(rows, vectors) of the best register tile for groups of `height` rows, at least 2.

    As many sums as the registers hold (half of them), more rows before more vectors: a row costs a broadcast, a
    vector a load of x. Rows that fill a group up are wasted, so they count.
    """
    sums = target.registers // 2

    def cost(rows: int) -> float:
        filled = -(-height // rows) * rows / height
        return filled * (1 + 1 / rows)

    rows = min((rows for rows in (8, 4, 2) if rows <= sums), key=cost)
    return rows, min(sums // rows, 4)


def even(tile: tuple[int, int], together: int, target: CpuTarget) -> int:
    """How wide a tile of as many rows is best for `together` vectors; what it leaves over is computed one by one.

    The tile and what it reads must fit the registers. It is as wide as `tile` unless another leaves fewer. Where a
    pass over a column costs more than its multiply-adds, the fewest passes count first: 8 x 3 sums over 64 vectors
    took 7% less time than 8 x 2 on Sapphire Rapids.
    """
    rows, vectors = tile
    fitting = [width for width in range(2, TILE + 1) if (rows + 1) * width + 1 <= target.registers]

    def cost(width: int) -> tuple[int, int, bool, int]:
        left = together % width
        tiles = together // width + left
        return tiles if target.shared else left, left, width != vectors, -width

    return min(fitting, key=cost, default=vectors)


def own_blocks(panels: Panels, vectors: int, total: int, columns: int, threads: int) -> bool:
    """Whether each thread gets blocks of its own of `total` vectors in tiles of `vectors`; else they share panels.

    It does where they come out even, so that it reads the x that it has laid out itself; a line that another core has
    just written takes longer than one from memory near by. Threads that share panels each read all of x. Where that
    has far more rows than y, it costs more than a quarter of uneven blocks: those of 7 tiles take 1.1 to 1.2 times
    the speed then, and 0.75 to 0.95 times otherwise.
    """
    tiles = -(-total // vectors)
    if tiles % threads == 0 or tiles >= 4 * threads:
        return True
    return columns >= 2 * panels.row_ids.size and 4 * -(-tiles // threads) * threads <= 5 * tiles


def blocks(total: int, vectors: int, cached: int, threads: int, own: bool) -> int:
    """How many blocks of whole tiles there are, in even shares: at most `cached` vectors, whose x fits the cache."""
    tiles, limit = -(-total // vectors), max(1, cached // vectors)
    return threads * -(-tiles // (threads * limit)) if own else -(-tiles // limit)


def shares(total: int, vectors: int, threads: int) -> NDArray[np.int64]:
    """The first vector of each thread that has blocks of its own, and the end."""
    tiles = -(-total // vectors)
    return np.minimum(tiles * np.arange(threads + 1) // threads * vectors, total)


def prepared(
    panels: Panels,
    vectors: int,
    fused: bool,
    at: VectorGrid,
    columns: int,
    threads: int,
    fetched: Callable[[], NDArray[np.int64]],
    apart: int = 0,
    numbers: int = FLOATS,
) -> Product:
    """The product at these vectors of positions, by tiles of up to `vectors` vectors.

    columns: how many vectors of x a vector of positions may read. fetched: gives (int64) how far behind each vector
    of positions the vectors of x lie that no vector before it has read; asked only where x is large. apart: where
    each thread has blocks of its own and an x of its own, elements from one x to the next. numbers: what tiles
    multiply, weights and x.
    """
    total = at.x_starts.size
    own = own_blocks(panels, vectors, total, columns, threads)
    count = blocks(total, vectors, CACHED // (columns * at.lanes), threads, own)
    return kernel(panels.width, vectors, at.lanes, fused, at.keep is not None, numbers).bound(
        "x_at y_at bias_at activation added_at", weights=panels.arrays, x_scale=at.x_stride, x_starts=at.x_starts,
        y_stride=at.y_stride, y_starts=at.y_starts, keep=at.y_starts if at.keep is None else at.keep, blocks=count,
        parts=threads, fetched=fetched() if columns * total * at.lanes >= LARGE else NOTHING, apart=apart,
    )  # fmt: skip


@cache
def kernel(rows: int, vectors: int, lanes: int, fused: bool, framed: bool, numbers: int = FLOATS) -> ParallelKernel:
    """The compiled loop over blocks, panels and tiles for one tile size and such numbers.

    Called with (panels.arrays, x, elements of x a column step is, starts of vectors in x, y, elements of y a row step
    is, starts of vectors in y, lanes of them to keep, what is added to y, bias (m), activation code, blocks, parts,
    what is `fetched`, elements from the x of a part to that of the next). x, y, bias and what is added: addresses,
    the last one 0 for nothing. Starts, lanes to keep, what is fetched: int64. Lanes to keep and what is added are
    looked at if `framed`. Vectors that do not fill a tile are computed one by one.
    """
    fuse, frames, idle = int(fused), int(framed), 0

    @in_parts
    def multiply(  # type: ignore[no-untyped-def]
        part, weights, x_at, x_scale, x_starts, y_at, y_stride, y_starts, keep, added_at, bias_at, activation,
        blocks, parts, fetched, apart,
    ):  # fmt: skip
        table, values, columns, work, row_ids = weights
        panels = table.shape[0]
        total = x_starts.size
        tiles = (total + vectors - 1) // vectors
        values_at, columns_at, ids_at = values.ctypes.data, columns.ctypes.data, row_ids.ctypes.data
        x_starts_at, y_starts_at, keep_at = x_starts.ctypes.data, y_starts.ctypes.data, keep.ctypes.data
        x_here = x_at + part * apart * 4
        begin, end = share(work, blocks, part, parts), share(work, blocks, part + 1, parts)
        column, ahead = 0, 0
        for item in range(begin, end):
            panel, block = item % panels, item // panels
            v = tiles * block // blocks * vectors
            stop = min(tiles * (block + 1) // blocks * vectors, total)
            # Of the next block, as many vectors of x for each tile of this one as are all fetched in time.
            behind = min(tiles * (block + 2) // blocks * vectors, total) if (block + 1) * panels < end else stop
            steps = panels * max(stop - v, 1)
            each = ((behind - stop) * fetched.size * vectors + steps - 1) // steps
            if panel == 0 or item == begin:
                column, ahead = 0, stop
            while v < stop:
                width = vectors if v + vectors <= stop else 1
                for _ in range(each):
                    if column < fetched.size:
                        fetch(x_here + (x_starts[ahead] + fetched[column]) * 4)
                        ahead += 1
                        if ahead == behind:
                            column, ahead = column + 1, stop
                row_tile(
                    rows,
                    vectors,
                    lanes,
                    fuse,
                    frames,
                    idle,
                    numbers,
                    width,
                    values_at + table[panel, 0] * 4,
                    columns_at + table[panel, 1] * 4,
                    table[panel, 2],
                    x_here,
                    x_scale,
                    x_starts_at + v * 8,
                    y_at,
                    y_stride,
                    y_starts_at + v * 8,
                    keep_at + v * 8,
                    added_at,
                    ids_at + panel * rows * 4,
                    bias_at,
                    activation,
                    idle,
                    idle,
                    idle,
                )
                v += width

    return multiply
