"""Single rows: weights whose rows share no columns (unstructured, N:M). Tokens or image positions along the vector.

What bounds it: a row has no companion, so each multiply-add loads its element of x. That keeps up, two a cycle, as
long as x lies in the first-level cache, in whole cache lines, and little else is loaded:

- The columns come in stages whose x fits the first-level cache. All rows pass over one stage before the next; their
  sums wait in y meanwhile, and are added behind the loop over columns, which starts without them.
- x and y are packed: the vectors of a tile of positions lie side by side, column after column (row after row). Where
  positions are contiguous in x that is done stage by stage (a kernel that `gathers`), else before (`transpose_tiles`,
  `token_blocks`, `small_batch`).
- A weight is spread over the lanes once for a tile of up to 4 vectors; four weights take one load, their places
  another.
- Weights, places of columns and what separates the rows are one stream, read from front to back by one pointer.
- In a stage the rows of a bundle come in the order of their lengths, so that the ends of the loops are predicted.

Registers: vectors x sets of sums (4 x 2, 3 x 3, 2 x 4, 1 x 4), four weights and their source: 14 at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.quantize import locate_worth
from sparse_kernels.cpu.codegen.register_tiles import copy_columns, copy_rows, finish_rows
from sparse_kernels.cpu.codegen.tile_operands import (
    FramedOutput,
    PackedOutput,
    QuadOutput,
    StreamEpilogue,
    VectorSources,
    WeightStream,
)
from sparse_kernels.cpu.codegen.vector_emitter import IDENTITY, PARTIAL
from sparse_kernels.cpu.codegen.weight_stream import FOUR, FOUR_WORDS, multiply_stream
from sparse_kernels.cpu.kernels.product_settings import ProductSettings
from sparse_kernels.cpu.launch.kernel_calls import ScratchProductCall
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import PANEL_COST, Groups
from sparse_kernels.cpu.layouts.quads import QuadArrays, QuadLayout
from sparse_kernels.cpu.layouts.vector_grid import CACHED, VectorGrid
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, copy_into_one_piece, give_back
from sparse_kernels.cpu.runtime.work_split import find_part_begin
from sparse_kernels.formats.int8 import QUAD

# Rows that are sorted by length together and computed by one thread.
BUNDLE = 32

# Elements of x that stay in the first-level cache while rows pass over them: 30 KB.
CLOSE = 7_500

# Columns of a row in a stage from which on stages save more than they cost: measured on AVX-512.
WORTHWHILE = 12

# Most elements of x in a stage: a place has 16 bits.
FARTHEST = 2**16


class SingleRowArrays(NamedTuple):
    """The arrays of `SingleRows`, as kernels take them."""

    stream: NDArray[np.int32]
    table: NDArray[np.int64]
    work: NDArray[np.int64]
    bounds: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SingleRows:
    """Rows one by one, as the kernel reads them.

    stride  elements of packed x from one column to the next, of packed y from one row to the next
    m       rows
    stream  int32. Stage by stage, row by row: count, row, then the row's `count` columns of that stage, four weights
            and their four places as long as there are four, then weight and place one by one. Weights are the bits of
            float32; a place says where in the packed x of its stage a column lies, in elements, and takes 16 bits:
            four of them two words, one alone the lower half of one.
    table   int64 (stages, bundles): where in the stream the rows of a bundle begin
    work    int64 (bundles + 1): the cost of all bundles before each one, in columns
    bounds  int64 (stages + 1): the first column of each stage, and the end
    """

    stride: int
    m: int
    stream: NDArray[np.int32]
    table: NDArray[np.int64]
    work: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def arrays(self) -> SingleRowArrays:
        """The arrays as kernels take them."""
        return SingleRowArrays(self.stream, self.table, self.work, self.bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def copy(self) -> SingleRows:
        """Return the same rows in memory of their own, in one piece, as `Panels.copy` does it."""
        work, table, bounds, stream = copy_into_one_piece(self.work, self.table, self.bounds, self.stream)
        return replace(self, stream=stream, table=table, work=work, bounds=bounds)


def build_single_rows(groups: Groups, k: int, stride: int, together: int | None = None) -> SingleRows:
    """Return groups of height 1 with columns below k as single rows, for packed x of columns `stride` elements apart.

    There are as many stages as make the x of each one small enough, or as 16 bits of a place need.
    They are fewer where too few columns of a row would be left in a stage to outweigh fetching and storing the sums.
    together: of how many positions x is to be so small, a stride unless given.
    """
    rows = groups.indptr.size - 1
    close = min(-(-k * (together or stride) // CLOSE), groups.columns.size // (WORTHWHILE * rows))
    stages = max(close, -(-k * stride // (FARTHEST - stride)))
    bounds = k * np.arange(stages + 1) // stages
    row = np.repeat(np.arange(rows), np.diff(groups.indptr))
    stage = np.searchsorted(bounds, groups.columns, side="right") - 1
    counts = np.bincount(stage * rows + row, minlength=stages * rows).reshape(stages, rows)
    bundle = np.arange(rows) // BUNDLE
    order = np.stack([np.lexsort((lengths, bundle)) for lengths in counts])
    rank = np.argsort(order, axis=1)
    elements = np.argsort(stage * rows + rank[stage, row], kind="stable")
    ordered = np.take_along_axis(counts, order, axis=1).ravel()
    heads, weights, places = _words(ordered)
    stream = np.zeros(_sizes(ordered).sum(), np.int32)
    stream[heads] = ordered
    stream[heads + 1] = groups.row_ids[order].ravel()
    stream[weights] = groups.values.ravel()[elements].view(np.int32)
    stream.view(np.uint16)[places] = ((groups.columns - bounds[stage]) * stride)[elements]
    work = np.zeros(bundle[-1] + 2, np.int64)
    np.cumsum(np.bincount(bundle, counts.sum(axis=0) + stages * PANEL_COST), out=work[1:])
    return SingleRows(stride, rows, stream, heads.reshape(stages, rows)[:, ::BUNDLE].copy(), work, bounds)


def _sizes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Words of rows with these counts."""
    return 2 + counts // FOUR * FOUR_WORDS + counts % FOUR * 2


def _words(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where in a stream the rows with these counts have their heads (rows), weights and places (columns).

    Heads and weights in words, places in halves of words.
    """
    sizes = _sizes(counts)
    heads = np.cumsum(sizes) - sizes
    first = np.repeat(heads + 2, counts)
    c = np.arange(first.size) - np.repeat(np.cumsum(counts) - counts, counts)
    fours = np.repeat(counts // FOUR, counts)
    in_four, alone = c < fours * FOUR, c - fours * FOUR
    four = first + c // FOUR * FOUR_WORDS
    one = first + fours * FOUR_WORDS + 2 * alone
    weights = np.where(in_four, four + c % FOUR, one)
    return heads, weights, np.where(in_four, 2 * (four + FOUR) + c % FOUR, 2 * (one + 1))


class StreamLayer(NamedTuple):
    """What a product of single rows knows before it is called.

    weights: arrays of the rows. m: rows. x_starts, y_starts: int64 (vectors), where each vector of positions starts.
    offsets: int32 (k), how far behind the start of a vector each column of x lies. y_stride: elements from one row of
    y to the next. keep: int64 (vectors), a bit for each lane that is a position, if y lies in frames. elements: of
    scratch memory for each part. quads: what sums of quads are worth. left: how quads are left. parts: threads.
    """

    weights: SingleRowArrays
    m: int
    x_starts: NDArray[np.int64]
    offsets: NDArray[np.int32]
    y_stride: int
    y_starts: NDArray[np.int64]
    keep: NDArray[np.int64]
    elements: int
    quads: QuadArrays
    left: QuadLayout
    parts: int


def bind_product(
    rows: SingleRows, grid: VectorGrid, offsets: NDArray[np.int32] | None, settings: ProductSettings
) -> Product:
    """Return the product at these vectors of positions.

    offsets: how far behind the start of a vector in x each column lies; None: x and y are packed
    (`vector_grid.build_tiled_grid`).
    """
    gathers, framed, threads = offsets is not None, grid.keep is not None, settings.threads
    vectors = rows.stride // grid.lanes
    form = RowForm(vectors, grid.lanes, settings.fused, gathers, framed, settings.numbers, settings.leaves)
    kernel = build_kernel(form)
    # Each thread packs its y, and the x of a stage.
    elements = (min(_bundles_at_a_time(rows.stride) * BUNDLE, rows.m) + int(np.diff(rows.bounds).max())) * rows.stride
    elements = elements if gathers else 0
    layer = StreamLayer(
        weights=rows.arrays, m=rows.m, x_starts=grid.x_starts,
        offsets=np.empty(1, np.int32) if offsets is None else offsets, y_stride=grid.y_stride,
        y_starts=grid.y_starts, keep=grid.y_starts if grid.keep is None else grid.keep, elements=elements,
        quads=settings.quads, left=settings.left, parts=threads,
    )  # fmt: skip
    bound = kernel.bind(ScratchProductCall, layer)

    def product(x: int, y: int, bias: int, activation: int, added: int, quads_at: int) -> bool:
        scratch = borrow(threads * elements)
        bound(x, y, bias, activation, added, quads_at, scratch.address)
        give_back(scratch)
        return True

    return product


def _bundles_at_a_time(stride: int) -> int:
    """Return how many bundles keep their y in the second-level cache."""
    return max(1, CACHED // (BUNDLE * stride))


@inline
def locate_output(call: ScratchProductCall, layer: StreamLayer, v: int, row: int) -> FramedOutput:
    """Return where the vectors of positions from `v` on of the rows from `row` on are written, in frames."""
    below, left = row * layer.y_stride * 4, layer.left
    quads_at = call.quads_at + row // QUAD * layer.y_stride * 4
    quads = QuadOutput(quads_at, left.starts.ctypes.data + v * 8, left.reading.ctypes.data, left.padding)
    added_at = call.added_at + below if call.added_at else 0
    starts_at, keep_at = layer.y_starts.ctypes.data + v * 8, layer.keep.ctypes.data + v * 8
    return FramedOutput(call.y_at + below, layer.y_stride, starts_at, keep_at, added_at, quads)


class RowForm(NamedTuple):
    """A kernel of single rows.

    vectors: the most of a tile. lanes: of a vector. fused: multiply-adds are fused. gathers: x and y are packed in
    scratch memory. framed: y lies in frames, or something is added to it. numbers: what is multiplied. leaves: what
    is left, as `RowTileForm` says.
    """

    vectors: int
    lanes: int
    fused: bool
    gathers: bool
    framed: bool
    numbers: int
    leaves: int


@cache
def build_kernel(form: RowForm) -> ParallelKernel:
    """Return the loop over tiles of up to `vectors` vectors (`vector_grid.split_tiles`), runs of bundles, and stages.

    It is called with `ScratchProductCall` and `StreamLayer`. A kernel that gathers finds column c of a vector of x at
    its start plus offsets[c], and packs x and y in scratch memory. One that does not gather takes them packed, and
    reads neither offsets nor scratch memory. One that gathers looks at `keep` and `added_at` if `framed`.
    """
    vectors, lanes, fused, gathers, framed, numbers, leaves = form
    stream_form, copy_form = (vectors, lanes, int(fused), 0, numbers), (vectors, lanes, int(fused), leaves)
    stride, most = vectors * lanes, _bundles_at_a_time(vectors * lanes)

    @build_parallel_kernel
    def multiply(part: int, call: ScratchProductCall, layer: StreamLayer) -> None:
        stream, table, work, bounds = layer.weights
        x_starts, y_starts, offsets = layer.x_starts, layer.y_starts, layer.offsets
        stages, bundles = table.shape
        total = x_starts.size
        worth = locate_worth(layer.quads, 0, 0)
        tiles = (total + vectors - 1) // vectors
        begin = find_part_begin(work, tiles, part, layer.parts)
        end = find_part_begin(work, tiles, part + 1, layer.parts)
        while begin < end:
            # As many bundles of this part as lie in one tile and keep their y in the second-level cache.
            tile = begin // bundles
            first = begin - tile * bundles
            stop = min(bundles, end - tile * bundles, first + most)
            begin = tile * bundles + stop
            row, end_row = first * BUNDLE, min(stop * BUNDLE, layer.m)
            v, end_v = total * tile // tiles, total * (tile + 1) // tiles
            if gathers:
                # The address counts from row 0 of the packed y, which is not stored if `row` is not 0.
                y_at = call.scratch_at + (part * layer.elements - row * stride) * 4
                x_at = y_at + (row + min(most * BUNDLE, layer.m)) * stride * 4
            else:
                y_at, x_at = call.y_at + y_starts[v] * 4, call.x_at + x_starts[v] * 4
            for stage in range(stages):
                column = bounds[stage]
                if gathers:
                    source = VectorSources(
                        call.x_at, x_starts.ctypes.data + v * 8, offsets.ctypes.data + column * 4,
                        bounds[stage + 1] - column,
                    )  # fmt: skip
                    copy_columns(copy_form, end_v - v, source, x_at)
                    column = 0
                last = IDENTITY if framed else call.activation
                finish = StreamEpilogue(min(stage, 1), call.bias_at, PARTIAL if stage < stages - 1 else last, worth)
                rows = WeightStream(stream.ctypes.data + table[stage, first] * 4, end_row - row)
                multiply_stream(stream_form, end_v - v, rows, x_at + column * stride * 4, y_at, finish)
            packed_at = y_at + row * stride * 4
            if framed:
                y = locate_output(call, layer, v, row)
                finish_rows(copy_form, end_v - v, packed_at, end_row - row, y, call.activation)
            elif gathers:
                target_at = call.y_at + row * layer.y_stride * 4
                target = PackedOutput(target_at, layer.y_stride, y_starts.ctypes.data + v * 8)
                copy_rows(copy_form, end_v - v, packed_at, end_row - row, target)

    return multiply
