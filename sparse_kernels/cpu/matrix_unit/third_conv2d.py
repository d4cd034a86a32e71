"""Convolutions by the matrix unit (`third_tiles`): vectors of 32 positions along its columns; threads share
positions.

A thread takes a block of positions at a time: part of an image, or a few whole ones. It splits what they read of x
into thirds, plane by plane (a plane is a channel, or one phase of it: `images`), which then stay in the second-level
cache, passes the panels over them, and finishes each tile's sums into y. A tap reads x at any distance from a
position, so thirds lie as x does: all high ones, then all middle ones, then all low ones, each (planes, segments),
where a segment is what the block has of an image.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.tile_operands import (
    WORTH_OF_FLOATS,
    GatherBuffers,
    MatrixSums,
    MatrixWeights,
    NextTile,
    PositionOutput,
    PositionSums,
    RowEpilogue,
    SplitInput,
)
from sparse_kernels.cpu.codegen.tile_registers import ROWS, TILE_BYTES
from sparse_kernels.cpu.launch.kernel_calls import ScratchProductCall
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.vector_grid import VectorGrid
from sparse_kernels.cpu.matrix_unit import third_tiles
from sparse_kernels.cpu.matrix_unit.third_linear import AmxArrays, MatrixPanels
from sparse_kernels.cpu.matrix_unit.third_tiles import GATHERED_BYTES, TOKENS
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, give_back

# Positions of a vector.
LANES = TOKENS

# Bytes of split x of a block: they stay in the second-level cache while weights pass by.
CACHED_BYTES = 1_000_000

# Bytes that a thread needs beside split x: the tiles' configuration, gathered columns, an unread tile, sums of 32
# rows.
FIXED_BYTES = tile_registers.SAVED_BYTES + 2 * GATHERED_BYTES + TILE_BYTES + 4 * TILE_BYTES


@dataclass(frozen=True, eq=False)
class Blocks:
    """How the positions of a batch are cut into blocks, and where what a block reads lies in split x.

    offsets: int32 (k,), where each column lies, from where its position does. per_image: vectors of an image. size:
    vectors of a block, at most `per_image`; or if that is all of them, images: of a block. planes: of x, plane_size
    elements apart. before: where a tap reads first, from a position. reach: how far taps of a plane lie apart.
    segment, plane: elements of split x that one of them takes.
    """

    offsets: NDArray[np.int32]
    per_image: int
    size: int
    images: int
    planes: int
    plane_size: int
    before: int
    reach: int
    segment: int
    plane: int

    @property
    def third_bytes(self) -> int:
        """From one third of x to the next."""
        return self.planes * self.plane * 2

    @property
    def thread_bytes(self) -> int:
        """What a thread needs: whole cache lines."""
        return FIXED_BYTES + 3 * self.third_bytes


def cut_blocks(
    x_starts: NDArray[np.int64], images: int, plane_of: NDArray[np.int64], tap: NDArray[np.int64], plane_size: int
) -> Blocks:
    """Cut the vectors of `images` images, which start there in x, into blocks.

    plane_of, tap: (k,), the plane of each column, and where it lies in the plane.
    """
    per_image = x_starts.size // images
    starts, planes = x_starts[:per_image] - x_starts[0], int(plane_of.max()) + 1
    before = int(tap.min())
    reach = int(tap.max()) - before

    def segment(size: int) -> int:
        """Elements that so many vectors read, the most of any."""
        return _whole_vectors(int((starts[size - 1 :] - starts[: per_image - size + 1]).max()) + LANES + reach)

    def bytes_of(size: int) -> int:
        return 3 * 2 * planes * segment(size)

    fitting = bisect_right(range(1, per_image + 1), CACHED_BYTES, key=bytes_of)
    size = -(-per_image // -(-per_image // max(1, fitting)))  # in even blocks
    together = max(1, min(images, CACHED_BYTES // bytes_of(size))) if size == per_image else 1
    # An odd number of cache lines from plane to plane puts the planes of a position into different sets of a cache.
    plane = together * segment(size) | LANES
    offsets = plane_of * plane + (tap - before)
    return Blocks(
        offsets.astype(np.int32), per_image, size, together, planes, plane_size, before, reach, segment(size), plane
    )


def _whole_vectors(elements: int) -> int:
    return -(-elements // LANES) * LANES


class BlockCut(NamedTuple):
    """The numbers of `Blocks`, as the kernel takes them."""

    per_image: int
    size: int
    images: int
    planes: int
    plane_size: int
    before: int
    reach: int
    segment: int
    plane: int
    thread_bytes: int


class PositionLayer(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels. row_ids: of the panels. x_size: elements of x. x_starts, y_starts: int64 (vectors),
    where each vector of positions starts. y_stride: elements from one row of y to the next. keep: int64 (vectors), a
    bit for each lane that is a position, if y lies in frames. cut: into blocks. parts: threads.
    """

    weights: AmxArrays
    row_ids: NDArray[np.int32]
    x_size: int
    x_starts: NDArray[np.int64]
    y_stride: int
    y_starts: NDArray[np.int64]
    keep: NDArray[np.int64]
    cut: BlockCut
    parts: int


def bind_product(
    panels: MatrixPanels, cut: Blocks, grid: VectorGrid, x_size: int, threads: int, emulated: bool = False
) -> Product:
    """Return the product at these vectors of LANES positions; it is False if not all sums were finite.

    x_size: elements of x.
    """
    parts, framed = min(threads, grid.x_starts.size), grid.keep is not None
    numbers = BlockCut(
        cut.per_image, cut.size, cut.images, cut.planes, cut.plane_size, cut.before, cut.reach, cut.segment,
        cut.plane, cut.thread_bytes,
    )  # fmt: skip
    layer = PositionLayer(
        weights=panels.arrays, row_ids=panels.row_ids, x_size=x_size, x_starts=grid.x_starts, y_stride=grid.y_stride,
        y_starts=grid.y_starts, keep=grid.y_starts if grid.keep is None else grid.keep, cut=numbers, parts=parts,
    )  # fmt: skip
    bound = build_kernel(panels.row_tiles, framed, emulated).bind(ScratchProductCall, layer)

    def product(x: int, y: int, bias: int, activation: int, added: int, quads_at: int) -> bool:
        scratch = borrow(parts * cut.thread_bytes // 4)
        finite = bound(x, y, bias, activation, added, quads_at, scratch.address)
        give_back(scratch)
        return finite

    return product


@inline
def split_images(
    x_at: int, layer: PositionLayer, vectors: tuple[int, int], thirds_at: int, sources: NDArray[np.int64]
) -> None:
    """Split what a block of vectors reads of x, image by image; sources: address that each vector reads from then."""
    first, stop = vectors
    x_starts, cut = layer.x_starts, layer.cut
    begin, number = first, 0
    while begin < stop:
        behind = min((begin // cut.per_image + 1) * cut.per_image, stop)
        start = x_starts[begin] + cut.before
        runs = (x_starts[behind - 1] + TOKENS + cut.reach - x_starts[begin] + TOKENS - 1) // TOKENS
        for p in range(cut.planes):
            source = start + p * cut.plane_size
            target_at = thirds_at + (p * cut.plane + number * cut.segment) * 2
            third_tiles.split_run(
                x_at + source * 4, runs, layer.x_size - source, target_at, cut.planes * cut.plane * 2
            )
        for v in range(begin, behind):
            sources[v - first] = thirds_at + (number * cut.segment + x_starts[v] - x_starts[begin]) * 2
        begin = behind
        number += 1


class PartBuffers(NamedTuple):
    """Scratch memory of a part: addresses of gathered columns, of sums, and of the flag for sums that are not
    finite."""

    gathered_at: int
    sums_at: int
    flag_at: int


@inline
def multiply_positions(
    form: Any,
    call: ScratchProductCall,
    layer: PositionLayer,
    vectors: tuple[int, int],
    sources: NDArray[np.int64],
    buffers: PartBuffers,
) -> None:
    """Multiply a block of vectors, split at `sources`, by all panels, and finish the sums of each tile into y."""
    row_tiles, framed, emulated = form
    values, columns, table = layer.weights
    y_starts, keep = layer.y_starts, layer.keep
    values_at, columns_at, ids_at = values.ctypes.data, columns.ctypes.data, layer.row_ids.ctypes.data
    panels, rows, distance = table.shape[0], row_tiles * ROWS, layer.cut.planes * layer.cut.plane * 2
    first, stop = vectors
    phase = 0
    third_tiles.gather(columns_at + table[0, 1] * 4, table[0, 2] == 0, sources[0], distance, buffers.gathered_at)
    for panel in range(panels):
        all_steps = table[panel, 3]
        weights = MatrixWeights(
            values_at + table[panel, 0], columns_at + table[panel, 1] * 4, table[panel, 2], all_steps
        )
        finish = RowEpilogue(ids_at + panel * rows * 4, call.bias_at, call.activation, WORTH_OF_FLOATS)
        for v in range(first, stop):
            # The next tile: the next vector, or the first one with the next panel.
            next_v, then = v + 1 - first, panel
            if v + 1 == stop:
                next_v, then = 0, min(panel + 1, panels - 1)
            following = NextTile(
                values_at + table[then, 0], columns_at + table[then, 1] * 4, table[then, 2] == 0, sources[next_v]
            )
            x, gathered = SplitInput(sources[v - first], distance), GatherBuffers(buffers.gathered_at, phase)
            third_tiles.matrix_tile(
                (emulated, row_tiles), weights, x, following, gathered, MatrixSums(buffers.sums_at, 2)
            )
            phase += all_steps
            start = y_starts[v] * 4
            added_at = call.added_at + start if call.added_at else 0
            y = PositionOutput(call.y_at + start, layer.y_stride, keep[v], added_at)
            third_tiles.finish_positions((framed,), PositionSums(buffers.sums_at, rows), y, finish, buffers.flag_at)


@cache
def build_kernel(row_tiles: int, framed: bool, emulated: bool = False) -> ParallelKernel:
    """Return the loops for panels of so many tiles.

    It is called with `ScratchProductCall` and `PositionLayer`, and returns whether all sums were finite.
    """
    if not (emulated or tile_registers.is_available()):
        raise RuntimeError("this process has no matrix unit: use the vector unit, or emulate the matrix unit")
    form, unit_form = (row_tiles, int(framed), int(emulated)), (int(emulated),)

    @partial(build_parallel_kernel, makes_arrays=True)
    def multiply(part: int, call: ScratchProductCall, layer: PositionLayer) -> int:
        cut, total = layer.cut, layer.x_starts.size
        flags = np.zeros(1, np.int32)
        sources = np.empty(cut.images * cut.per_image, np.int64)
        saved_at = call.scratch_at + part * cut.thread_bytes
        gathered_at = saved_at + tile_registers.SAVED_BYTES
        sums_at = gathered_at + 2 * GATHERED_BYTES + TILE_BYTES
        thirds_at = sums_at + 4 * TILE_BYTES
        buffers = PartBuffers(gathered_at, sums_at, flags.ctypes.data)
        first, end = total * part // layer.parts, total * (part + 1) // layer.parts
        tile_registers.configure_tiles(unit_form, saved_at)
        while first < end:
            # Whole images, or as many as the thread has left. An image that is cut is taken in even blocks.
            stop = min((first // cut.per_image + cut.images) * cut.per_image, end)
            count = 1 if cut.images > 1 else (stop - first + cut.size - 1) // cut.size
            stop = first + (stop - first + count - 1) // count
            split_images(call.x_at, layer, (first, stop), thirds_at, sources)
            multiply_positions(form, call, layer, (first, stop), sources, buffers)
            first = stop
        tile_registers.restore_tiles(unit_form, saved_at)
        not_finite: int = flags[0]
        return not_finite

    return multiply
