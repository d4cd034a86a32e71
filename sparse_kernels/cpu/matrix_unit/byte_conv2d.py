"""Convolutions in eight bits by the matrix unit (`byte_tiles`): two vectors of 16 positions along its columns.

Images lie as quads of channels, so a quad of 16 positions is a row of a tile as it lies: it is only gathered. Each
tile's sums are finished at once, as those of `row_panels` are. Threads share positions where they come out even, else
panels. Order of the loops: blocks of positions whose x fits the second-level cache, panels, tiles of positions.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.quantize import locate_worth
from sparse_kernels.cpu.codegen.row_results import finish_waiting_rows
from sparse_kernels.cpu.codegen.tile_operands import (
    FramedOutput,
    GatherBuffers,
    Matrix,
    MatrixSums,
    NextQuads,
    QuadInput,
    QuadOutput,
    RowEpilogue,
    TileWeights,
)
from sparse_kernels.cpu.codegen.tile_registers import ROWS
from sparse_kernels.cpu.kernels.product_settings import ProductSettings
from sparse_kernels.cpu.kernels.row_panels import PanelReading, split_vectors
from sparse_kernels.cpu.launch.kernel_calls import ScratchProductCall
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.quads import QuadArrays, QuadLayout
from sparse_kernels.cpu.layouts.vector_grid import CACHED, VectorGrid
from sparse_kernels.cpu.matrix_unit.byte_panels import ByteArrays, BytePanels
from sparse_kernels.cpu.matrix_unit.byte_tiles import (
    GATHERED_BYTES,
    HALVES,
    TOKENS,
    byte_tile,
    gather_quads,
)
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, give_back

# Bytes that a thread needs: the tiles' configuration, gathered quads, sums of 32 rows.
SUMS_BYTES = 2 * ROWS * TOKENS * 4
THREAD_BYTES = tile_registers.SAVED_BYTES + 2 * GATHERED_BYTES + SUMS_BYTES


class BytePositions(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels. row_ids: of the panels. x_starts, y_starts: int64 (vectors), where each vector of
    positions starts. y_stride: elements from one row of y to the next. keep: int64 (vectors), a bit for each lane
    that is a position, if y lies in frames. quads: what sums of quads are worth. left: how quads are left. shares:
    int64 (parts, 4), vectors and panels of each part, from one to before another. block: vectors of a block.
    part_stride: elements from the x of one part to that of the next. parts: threads.
    """

    weights: ByteArrays
    row_ids: NDArray[np.int32]
    x_starts: NDArray[np.int64]
    y_stride: int
    y_starts: NDArray[np.int64]
    keep: NDArray[np.int64]
    quads: QuadArrays
    left: QuadLayout
    shares: NDArray[np.int64]
    block: int
    part_stride: int
    parts: int


def gives_own_vectors(panels: BytePanels, vectors: int, threads: int) -> bool:
    """Return whether each thread gets vectors of its own: pairs of them come out even, or nearly. Else threads share
    panels."""
    pairs = -(-vectors // HALVES)
    return pairs % threads == 0 or pairs >= 4 * threads or len(panels.table) < threads


def split_work(panels: BytePanels, vectors: int, threads: int) -> NDArray[np.int64]:
    """Return (parts, 4): the vectors and the panels of each thread, from one to before another; panels by their
    steps."""
    count = len(panels.table)
    if gives_own_vectors(panels, vectors, threads):
        cuts = split_vectors(vectors, HALVES, threads)
        return np.stack([cuts[:-1], cuts[1:], np.zeros_like(cuts[1:]), np.full_like(cuts[1:], count)], axis=1)
    done = np.concatenate([[0], np.cumsum(panels.table[:, 2] + 1)])
    cuts = np.searchsorted(done, done[-1] * np.arange(threads + 1) / threads)
    return np.stack([np.zeros_like(cuts[1:]), np.full_like(cuts[1:], vectors), cuts[:-1], cuts[1:]], axis=1)


def bind_product(
    panels: BytePanels, grid: VectorGrid, reading: PanelReading, settings: ProductSettings, emulated: bool = False
) -> Product:
    """Return the product at these vectors of 16 positions."""
    shares = split_work(panels, grid.x_starts.size, settings.threads)
    framed = grid.keep is not None
    layer = BytePositions(
        weights=panels.arrays, row_ids=panels.row_ids, x_starts=grid.x_starts, y_stride=grid.y_stride,
        y_starts=grid.y_starts, keep=grid.y_starts if grid.keep is None else grid.keep, quads=settings.quads,
        left=settings.left, shares=shares, block=max(1, CACHED // (reading.columns * ROWS * HALVES)) * HALVES,
        part_stride=reading.part_stride,
        parts=len(shares),
    )  # fmt: skip
    kernel = build_kernel(panels.row_tiles, framed, settings.leaves, emulated)
    bound = kernel.bind(ScratchProductCall, layer)

    def product(x: int, y: int, bias: int, activation: int, added: int, quads_at: int) -> bool:
        scratch = borrow(len(shares) * THREAD_BYTES // 4)
        done = bound(x, y, bias, activation, added, quads_at, scratch.address)
        give_back(scratch)
        return done

    return product


class PartWork(NamedTuple):
    """Tiles of a part: vectors of a block and panels, from one to before another; its x and its scratch memory."""

    first: int
    stop: int
    begin: int
    end: int
    x_at: int
    gathered_at: int


@inline
def finish_tile(
    form: Any, call: ScratchProductCall, layer: BytePositions, panel: int, vectors: tuple[int, int], sums_at: int
) -> None:
    """Finish the sums of a panel at one or two vectors, from one to before another."""
    row_tiles, framed, leaves, _ = form
    rows, left, (v, stop) = row_tiles * ROWS, layer.left, vectors
    worth = locate_worth(layer.quads, panel * rows, 0)
    finish = RowEpilogue(layer.row_ids.ctypes.data + panel * rows * 4, call.bias_at, call.activation, worth)
    quads = QuadOutput(call.quads_at, left.starts.ctypes.data + v * 8, left.reading.ctypes.data, left.padding)
    y = FramedOutput(
        call.y_at, layer.y_stride, layer.y_starts.ctypes.data + v * 8, layer.keep.ctypes.data + v * 8,
        call.added_at, quads,
    )  # fmt: skip
    finish_waiting_rows((framed, leaves, 1), Matrix(sums_at, TOKENS), rows, min(HALVES, stop - v), y, finish)


@inline
def multiply_positions(form: Any, call: ScratchProductCall, layer: BytePositions, work: PartWork) -> None:
    """Multiply a block of vectors by panels, and finish the sums of each tile into y."""
    row_tiles, _, _, emulated = form
    tile_form = (emulated, row_tiles, 1)
    values, columns, table = layer.weights
    x_starts, values_at, columns_at = layer.x_starts, values.ctypes.data, columns.ctypes.data
    first, stop, begin, end, x_at, gathered_at = work
    sums_at, last = gathered_at + 2 * GATHERED_BYTES, stop - 1
    first_at, second_at = x_at + x_starts[first] * 4, x_at + x_starts[min(first + 1, last)] * 4
    phase = 0
    gather_quads(columns_at + table[begin, 1] * 4, first_at, second_at, gathered_at)
    for panel in range(begin, end):
        steps = table[panel, 2]
        weights = TileWeights(values_at + table[panel, 0], columns_at + table[panel, 1] * 4, steps)
        for v in range(first, stop, HALVES):
            x = QuadInput(first_at, second_at)
            # The next tile: the next vectors, or the first ones with the next panel.
            next_v, then = v + HALVES, panel
            if next_v >= stop:
                next_v, then = first, min(panel + 1, end - 1)
            first_at, second_at = x_at + x_starts[next_v] * 4, x_at + x_starts[min(next_v + 1, last)] * 4
            following = NextQuads(columns_at + table[then, 1] * 4, first_at, second_at)
            buffers, sums = GatherBuffers(gathered_at, phase), MatrixSums(sums_at, min(HALVES, stop - v))
            byte_tile(tile_form, weights, x, following, buffers, sums)
            phase += steps
            finish_tile(form, call, layer, panel, (v, stop), sums_at)


@cache
def build_kernel(row_tiles: int, framed: bool, leaves: int, emulated: bool = False) -> ParallelKernel:
    """Return the loops for panels of so many tiles. It is called with `ScratchProductCall` and `BytePositions`."""
    if not (emulated or tile_registers.is_available()):
        raise RuntimeError("this process has no matrix unit: use the vector unit, or emulate the matrix unit")
    form, unit_form = (row_tiles, int(framed), leaves, int(emulated)), (int(emulated),)

    @build_parallel_kernel
    def multiply(part: int, call: ScratchProductCall, layer: BytePositions) -> None:
        saved_at, x_at = call.scratch_at + part * THREAD_BYTES, call.x_at + part * layer.part_stride * 4
        first, end = layer.shares[part, 0], layer.shares[part, 1]
        begin, behind = layer.shares[part, 2], layer.shares[part, 3]
        if begin < behind:
            tile_registers.configure_tiles(unit_form, saved_at)
            while first < end:
                stop = min(first + layer.block, end)
                work = PartWork(first, stop, begin, behind, x_at, saved_at + tile_registers.SAVED_BYTES)
                multiply_positions(form, call, layer, work)
                first = stop
            tile_registers.restore_tiles(unit_form, saved_at)

    return multiply
