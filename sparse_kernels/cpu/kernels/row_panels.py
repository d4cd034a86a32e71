"""Rows of outputs, positions along the vector: y[row, position] += w[row, c] * x[offset of c + position].

It serves every weight and every x that is contiguous along positions (tokens of a feature-major x, blocks of tokens,
pixels of an image): `VectorGrid` says where in x and in y each vector of positions lies. Rows that share no columns
have a kernel of their own (`unstructured_rows`).

Order of the loops: blocks of positions whose x fits the second-level cache, then panels of rows, then tiles of
positions. So a panel's weights stay in the first-level cache over a block. Threads share (block, panel) pairs by
cost.

Where x is large, a thread that works on one block fetches the x of its next, a little with each tile: that lies in
as many places as there are columns, which the hardware does not foresee. Waiting for it took half of the time of
convolutions of 16 images with one tap and many channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.quantize import locate_worth
from sparse_kernels.cpu.codegen.register_tiles import RowTileForm, fetch, row_tile
from sparse_kernels.cpu.codegen.row_results import LEAVES_SUMS
from sparse_kernels.cpu.codegen.tile_operands import (
    FramedOutput,
    LineWalk,
    QuadOutput,
    RowEpilogue,
    TileWeights,
    VectorInput,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.kernels.product_settings import ProductSettings
from sparse_kernels.cpu.launch.kernel_calls import ProductCall
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import PanelArrays, Panels
from sparse_kernels.cpu.layouts.quads import QuadArrays, QuadLayout
from sparse_kernels.cpu.layouts.vector_grid import CACHED, LARGE, TILE, VectorGrid
from sparse_kernels.cpu.runtime.work_split import find_part_begin

NOTHING = np.empty(0, np.int64)


def choose_tile(height: int, target: CpuTarget) -> tuple[int, int]:
    """Return (rows, vectors) of the best register tile for groups of `height` rows, at least 2.

    As many sums as the registers hold (half of them), more rows before more vectors: a row costs a broadcast, a
    vector a load of x. Rows that fill a group up are wasted, so they count.
    """
    sums = target.registers // 2

    def cost(rows: int) -> float:
        filled = -(-height // rows) * rows / height
        return filled * (1 + 1 / rows)

    rows = min((rows for rows in (8, 4, 2) if rows <= sums), key=cost)
    return rows, min(sums // rows, 4)


def choose_width(tile: tuple[int, int], together: int, target: CpuTarget) -> int:
    """Return how many vectors wide a tile of as many rows is best for `together` vectors.

    What it leaves over is computed one by one.

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


def gives_own_blocks(panels: Panels, vectors: int, total: int, columns: int, threads: int) -> bool:
    """Return whether each thread gets blocks of its own of `total` vectors in tiles of `vectors`; else they share
    panels.

    It does where they come out even, so that it reads the x that it has laid out itself. A line that another core has
    just written takes longer than one from memory. Threads that share panels each read all of x. Where that has far
    more rows than y, it costs more than a quarter of uneven blocks: those of 7 tiles take 1.1 to 1.2 times the speed
    then, and 0.75 to 0.95 times otherwise.
    """
    tiles = -(-total // vectors)
    if tiles % threads == 0 or tiles >= 4 * threads:
        return True
    return columns >= 2 * panels.row_ids.size and 4 * -(-tiles // threads) * threads <= 5 * tiles


def count_blocks(total: int, vectors: int, cached: int, threads: int, own: bool) -> int:
    """Return how many blocks of whole tiles there are, in even shares: at most `cached` vectors, whose x fits the
    cache."""
    tiles, limit = -(-total // vectors), max(1, cached // vectors)
    return threads * -(-tiles // (threads * limit)) if own else -(-tiles // limit)


def split_vectors(total: int, vectors: int, threads: int) -> NDArray[np.int64]:
    """Return the first vector of each thread that has blocks of its own, and the end."""
    tiles = -(-total // vectors)
    return np.minimum(tiles * np.arange(threads + 1) // threads * vectors, total)


class ProductLayer(NamedTuple):
    """What a product by row panels knows before it is called.

    weights: arrays of the panels. x_stride, y_stride: elements from one column of x, from one row of y to the next.
    x_starts, y_starts: int64 (vectors), where each vector of positions starts. keep: int64 (vectors), a bit for each
    lane that is a position, if y lies in frames. blocks: of positions. prefetched: int64, how far behind the start of
    a vector the vectors of x lie that tiles fetch for the next block. part_stride: elements from the x of one part to
    that of the next. quads: what sums of quads are worth. left: how quads are left. parts: threads.
    """

    weights: PanelArrays
    x_stride: int
    x_starts: NDArray[np.int64]
    y_stride: int
    y_starts: NDArray[np.int64]
    keep: NDArray[np.int64]
    blocks: int
    prefetched: NDArray[np.int64]
    part_stride: int
    quads: QuadArrays
    left: QuadLayout
    parts: int


class PanelReading(NamedTuple):
    """How panels read x.

    vectors: of the largest tile. columns: vectors of x that one vector of positions may read. part_stride: where each
    thread has blocks of its own and an x of its own, elements from one x to the next.
    """

    vectors: int
    columns: int
    part_stride: int = 0


def bind_product(
    panels: Panels,
    grid: VectorGrid,
    reading: PanelReading,
    settings: ProductSettings,
    find_prefetched: Callable[[], NDArray[np.int64]],
) -> Product:
    """Return the product at these vectors of positions.

    find_prefetched: called only if x is large. It returns int64: how far behind each vector of positions the vectors
    of x lie that no vector before has read.
    """
    vectors, columns, threads, total = reading.vectors, reading.columns, settings.threads, grid.x_starts.size
    own = gives_own_blocks(panels, vectors, total, columns, threads)
    kernel = build_kernel(
        panels.width, vectors, grid.lanes, settings.fused, grid.keep is not None, settings.numbers, settings.leaves
    )
    large = columns * total * grid.lanes >= LARGE
    layer = ProductLayer(
        weights=panels.arrays, x_stride=grid.x_stride, x_starts=grid.x_starts, y_stride=grid.y_stride,
        y_starts=grid.y_starts, keep=grid.y_starts if grid.keep is None else grid.keep,
        blocks=count_blocks(total, vectors, CACHED // (columns * grid.lanes), threads, own),
        prefetched=find_prefetched() if large else NOTHING, part_stride=reading.part_stride,
        quads=settings.quads, left=settings.left, parts=threads,
    )  # fmt: skip
    return kernel.bind(ProductCall, layer)


@cache
def build_kernel(
    rows: int, vectors: int, lanes: int, fused: bool, framed: bool, numbers: int = FLOATS, leaves: int = LEAVES_SUMS
) -> ParallelKernel:
    """Return the loop over blocks, panels and tiles for one tile size and such numbers.

    It is called with `ProductCall` and `ProductLayer`. It looks at `keep` and `added_at` only if `framed`. Vectors
    that do not fill a tile are computed one by one.
    """
    form = tuple(RowTileForm(rows, vectors, lanes, int(fused), int(framed), 0, numbers, leaves))

    @build_parallel_kernel
    def multiply(part: int, call: ProductCall, layer: ProductLayer) -> None:
        table, values, columns, work, row_ids = layer.weights
        x_starts, y_starts, keep, prefetched = layer.x_starts, layer.y_starts, layer.keep, layer.prefetched
        panels, total, blocks, left = table.shape[0], x_starts.size, layer.blocks, layer.left
        tiles = (total + vectors - 1) // vectors
        values_at, columns_at, ids_at = values.ctypes.data, columns.ctypes.data, row_ids.ctypes.data
        x_starts_at, y_starts_at, keep_at = x_starts.ctypes.data, y_starts.ctypes.data, keep.ctypes.data
        x_at = call.x_at + part * layer.part_stride * 4
        begin = find_part_begin(work, blocks, part, layer.parts)
        end = find_part_begin(work, blocks, part + 1, layer.parts)
        column, ahead = 0, 0
        for item in range(begin, end):
            panel, block = item % panels, item // panels
            v = tiles * block // blocks * vectors
            stop = min(tiles * (block + 1) // blocks * vectors, total)
            # For each tile of this block, fetch so many vectors of x of the next block that all of them arrive in
            # time.
            behind = min(tiles * (block + 2) // blocks * vectors, total) if (block + 1) * panels < end else stop
            steps = panels * max(stop - v, 1)
            each = ((behind - stop) * prefetched.size * vectors + steps - 1) // steps
            if panel == 0 or item == begin:
                column, ahead = 0, stop
            weights = TileWeights(values_at + table[panel, 0] * 4, columns_at + table[panel, 1] * 4, table[panel, 2])
            worth = locate_worth(layer.quads, panel * rows, 0)
            finish = RowEpilogue(ids_at + panel * rows * 4, call.bias_at, call.activation, worth)
            while v < stop:
                width = vectors if v + vectors <= stop else 1
                for _ in range(each):
                    if column < prefetched.size:
                        fetch(x_at + (x_starts[ahead] + prefetched[column]) * 4)
                        ahead += 1
                        if ahead == behind:
                            column, ahead = column + 1, stop
                x = VectorInput(x_at, layer.x_stride, x_starts_at + v * 8, width)
                quads_start = left.starts.ctypes.data + v * 8
                quads = QuadOutput(call.quads_at, quads_start, left.reading.ctypes.data, left.padding)
                y = FramedOutput(
                    call.y_at, layer.y_stride, y_starts_at + v * 8, keep_at + v * 8, call.added_at, quads
                )
                row_tile(form, weights, x, y, finish, LineWalk(0, 0, 0))
                v += width

    return multiply
