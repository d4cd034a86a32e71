"""Single rows: weights whose rows share no columns (unstructured, N:M). Tokens or image positions along the vector.

What bounds it: a row has no companion, so each multiply-add loads its element of x. That keeps up, two a cycle, as
long as x lies in the first-level cache, in whole cache lines, and little else is loaded:

- The columns come in stages whose x fits the first-level cache. All rows pass over one stage before the next; their
  sums wait in y meanwhile, and are added behind the loop over columns, which starts without them.
- x and y are packed: the vectors of a tile of positions lie side by side, column after column (row after row). Where
  positions are contiguous in x that is done stage by stage (a kernel that `gathers`), else before (`transpose`,
  `blocks`, `few`).
- A weight is spread over the lanes once for a tile of up to 4 vectors; four weights take one load, their places
  another.
- Weights, places of columns and what separates the rows are one stream, read from front to back by one pointer.
- In a stage the rows of a bundle come in the order of their lengths, so that the ends of the loops are predicted.

Registers: vectors x sets of sums (4 x 2, 3 x 3, 2 x 4, 1 x 4), four weights and their source: 14 at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.register_tiles import AHEAD, ENOUGH, copy_columns, copy_rows, finish_rows
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, IDENTITY, PARTIAL, Emitter, with_literals
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import PANEL_COST, Groups
from sparse_kernels.cpu.layouts.vector_grid import CACHED, VectorGrid
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, give_back, in_one_piece
from sparse_kernels.cpu.runtime.work_split import share

# Columns that are worked on together, the floats in 128 bits; words that they take with their places.
FOUR = 4
FOUR_WORDS = FOUR + FOUR // 2

# Rows that are sorted by length together, and that one thread computes.
BUNDLE = 32

# Elements of x that stay in the first-level cache while rows pass over them: 30 KB.
CLOSE = 7_500

# Columns of a row in a stage below which stages cost more than they save: measured on AVX-512.
WORTHWHILE = 12

# Elements of x in a stage at most: as far as the 16 bits of a place reach.
FARTHEST = 2**16


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
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """(stream, table, work, bounds), as the kernels take them."""
        return self.stream, self.table, self.work, self.bounds

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def copy(self) -> SingleRows:
        """The same rows in memory of their own, in one piece, as `Panels.copy` does it."""
        work, table, bounds, stream = in_one_piece(self.work, self.table, self.bounds, self.stream)
        return replace(self, stream=stream, table=table, work=work, bounds=bounds)


def single_rows(groups: Groups, k: int, stride: int, together: int | None = None) -> SingleRows:
    """The rows of groups of height 1 with columns below k, for packed x whose columns are `stride` elements apart.

    In as many stages as make the x of each one small enough, unless too few columns of a row are left in a stage to
    outweigh fetching and storing the sums; at least in as many as places can tell. together: of how many positions x
    is to be so small, a stride unless given.
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
    """Where in a stream the rows with these counts have their heads (rows), weights and places (columns).

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


@with_literals
def pass_over(
    typing_context: Any,
    vectors: Any,
    lanes: Any,
    fused: Any,
    halvings: Any,
    width: Any,
    stream: Any,
    rows: Any,
    x: Any,
    y: Any,
    bias: Any,
    start: Any,
    activation: Any,
) -> Any:
    """y[row, v] = activation(start + sum over c of weights[c] * x[places[c], v] + bias[row]) for rows of a stream.

    width: how many vectors there are, 1 to `vectors`. stream: where the first of the `rows` rows begins. x, y: packed
    columns and rows of `vectors` vectors. start: 1 continues the sums found in y, 0 starts at zero. halvings: how
    often vectors were halved since the places were worked out.

    The stream is fetched ahead: from memory 128 tokens have 1.2 to 1.3 times the speed, deep convolutions of single
    images 1.15 to 1.2 times, and nothing loses more than 2% where it is near (512 to 3072 columns, 75% and 90%
    sparsity, Zen 5).
    """
    signature = types.void(*(vectors, lanes, fused, halvings), *([types.intp] * 8))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        most, n_lanes, fuse, halved = (int(literal.literal_value) for literal in signature.args[:4])
        width, stream, rows, x, y, bias, start, activation = args[4:]
        emit = Emitter(builder, n_lanes, bool(fuse))
        x_pointer, y_pointer, bias_pointer = emit.pointer(x), emit.pointer(y), emit.pointer(bias)

        def pass_with(vectors: int) -> None:
            # Columns take turns with sets of sums: a sum that is being added to cannot be added to again.
            sets = min(FOUR, -(-ENOUGH // vectors))

            def add(sums: list[ir.Value], turn: int, weight: ir.Value, place: ir.Value) -> None:
                at = builder.gep(x_pointer, [builder.lshr(place, emit.integer(halved)) if halved else place])
                for v in range(vectors):
                    index = turn % sets * vectors + v
                    sums[index] = emit.multiply_add(weight, emit.load(at, v), sums[index])

            def row(at: ir.Value) -> ir.Value:
                count, number = emit.load_pair(at)
                columns = builder.gep(at, [emit.integer(2)])
                output = builder.gep(y_pointer, [builder.mul(number, emit.integer(most * n_lanes))])

                def two_fours(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    # Once in 48 bytes, not with each four: where the stream is near, that takes 5% longer.
                    emit.will_load(builder.gep(columns, [builder.add(word, emit.integer(AHEAD))]))
                    return four(builder.add(word, emit.integer(FOUR_WORDS)), four(word, sums))

                def four(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    sums, here = list(sums), builder.gep(columns, [word])
                    places = emit.load_four_shorts(builder.gep(here, [emit.integer(FOUR)]))
                    for turn, (weight, place) in enumerate(zip(emit.splat_four(here), places, strict=True)):
                        add(sums, turn, weight, place)
                    return sums

                def one(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    sums, here = list(sums), builder.gep(columns, [word])
                    weight, place = emit.splat(builder.load(here)), builder.gep(here, [emit.integer(1)])
                    place = builder.load(builder.bitcast(place, I32.as_pointer()))
                    add(sums, 0, weight, builder.zext(place, I64))
                    return sums

                fours, ones = builder.lshr(count, emit.integer(2)), builder.and_(count, emit.integer(FOUR - 1))
                whole = builder.mul(fours, emit.integer(FOUR_WORDS))
                words = builder.add(whole, builder.mul(ones, emit.integer(2)))
                eights = builder.mul(builder.lshr(count, emit.integer(3)), emit.integer(2 * FOUR_WORDS))
                sums = emit.loop(eights, emit.zeros(sets * vectors), two_fours, stride=2 * FOUR_WORDS)
                sums = emit.loop(whole, sums, four, start=eights, stride=FOUR_WORDS)
                sums = emit.loop(words, sums, one, start=whole, stride=2)
                for _ in range(sets - 1):
                    pairs = zip(sums[:vectors], sums[-vectors:], strict=True)
                    sums = [builder.fadd(a, b) for a, b in pairs] + sums[vectors:-vectors]
                sums = emit.continued(start, sums, lambda: [emit.load(output, v) for v in range(vectors)])

                def biases() -> list[ir.Value]:
                    return [emit.splat(builder.load(builder.gep(bias_pointer, [number])))] * vectors

                def store(sums: list[ir.Value]) -> None:
                    for v, total in enumerate(sums):
                        emit.store(total, output, v)

                emit.finish(activation, sums, biases, store)
                return builder.gep(columns, [words])

            emit.walk(emit.pointer(stream), rows, row)

        emit.choose(width, {n: partial(pass_with, n) for n in range(1, most + 1)})
        return context.get_dummy_value()

    return signature, generate


def prepared(
    rows: SingleRows, fused: bool, at: VectorGrid, offsets: NDArray[np.int32] | None, threads: int
) -> Product:
    """The product at these vectors of positions. Column c is offsets[c] behind the start of a vector in x.

    offsets None: x and y are packed (`vectors.in_tiles`).
    """
    gathers = offsets is not None
    multiply = kernel(rows.stride // at.lanes, at.lanes, fused, gathers, at.keep is not None)
    # Each thread packs its y, and the x of a stage.
    elements = (min(_bundles_at_a_time(rows.stride) * BUNDLE, rows.m) + int(np.diff(rows.bounds).max())) * rows.stride
    elements = elements if gathers else 0
    bound = multiply.bound(
        "x_at y_at bias_at activation added_at scratch_at", rows=rows.arrays, m=rows.m, x_starts=at.x_starts,
        offsets=np.empty(1, np.int32) if offsets is None else offsets, y_stride=at.y_stride, y_starts=at.y_starts,
        keep=at.y_starts if at.keep is None else at.keep, elements=elements, parts=threads,
    )  # fmt: skip

    def product(x: int, y: int, bias: int, activation: int, added: int) -> bool:
        scratch = borrow(threads * elements)
        bound(x, y, bias, activation, added, scratch.at)
        give_back(scratch)
        return True

    return product


def _bundles_at_a_time(stride: int) -> int:
    """How many bundles keep their y in the second-level cache."""
    return max(1, CACHED // (BUNDLE * stride))


@cache
def kernel(vectors: int, lanes: int, fused: bool, gathers: bool, framed: bool) -> ParallelKernel:
    """The compiled loop over tiles of up to `vectors` vectors (`vectors.tiles`), runs of bundles, and stages.

    Called with (rows.arrays, m, x, starts of vectors in x, offsets in x, y, elements of y a row step is, starts of
    vectors in y, lanes of them to keep, what is added to y, bias (m), activation code, scratch, its elements for each
    part, parts). x, y, bias, scratch and what is added: addresses, of which 0 adds nothing. Starts, lanes to keep:
    int64. A kernel that gathers finds column c of a vector of x at its start plus offsets[c] (int32), and packs x and
    y in scratch. One that does not gather takes them packed, and reads neither offsets nor scratch. Lanes to keep and
    what is added are looked at if `framed`, by one that gathers.
    """
    fuse, nothing = int(fused), 0
    unfinished, unchanged = PARTIAL, IDENTITY
    bundle = BUNDLE
    stride = vectors * lanes
    most = _bundles_at_a_time(stride)

    @in_parts
    def multiply(  # type: ignore[no-untyped-def]
        part, rows, m, x_at, x_starts, offsets, y_at, y_stride, y_starts, keep, added_at, bias_at, activation,
        scratch_at, elements, parts,
    ):  # fmt: skip
        stream, table, work, bounds = rows
        stages, bundles = table.shape
        total = x_starts.size
        tiles = (total + vectors - 1) // vectors
        stream_at = stream.ctypes.data
        x_starts_at, offsets_at = x_starts.ctypes.data, offsets.ctypes.data
        begin, end = share(work, tiles, part, parts), share(work, tiles, part + 1, parts)
        while begin < end:
            # As many bundles of this part as lie in one tile, and as keep their y in the second-level cache.
            tile = begin // bundles
            first = begin - tile * bundles
            stop = min(bundles, end - tile * bundles, first + most)
            begin = tile * bundles + stop
            row, end_row = first * bundle, min(stop * bundle, m)
            v, end_v = total * tile // tiles, total * (tile + 1) // tiles
            if gathers:
                # Row r of the packed y is behind row 0, which is not there if `row` is not 0.
                y_here = scratch_at + (part * elements - row * stride) * 4
                x_here = y_here + (row + min(most * bundle, m)) * stride * 4
            else:
                y_here, x_here = y_at + y_starts[v] * 4, x_at + x_starts[v] * 4
            for stage in range(stages):
                column = bounds[stage]
                if gathers:
                    copy_columns(
                        vectors,
                        lanes,
                        end_v - v,
                        x_at,
                        x_starts_at + v * 8,
                        offsets_at + column * 4,
                        bounds[stage + 1] - column,
                        x_here,
                    )
                    column = 0
                pass_over(
                    vectors,
                    lanes,
                    fuse,
                    nothing,
                    end_v - v,
                    stream_at + table[stage, first] * 4,
                    end_row - row,
                    x_here + column * stride * 4,
                    y_here,
                    bias_at,
                    min(stage, 1),
                    unfinished if stage < stages - 1 else unchanged if framed else activation,
                )
            if framed:
                finish_rows(
                    vectors,
                    lanes,
                    fuse,
                    end_v - v,
                    y_here + row * stride * 4,
                    end_row - row,
                    y_at + row * y_stride * 4,
                    y_stride,
                    y_starts.ctypes.data + v * 8,
                    keep.ctypes.data + v * 8,
                    added_at + row * y_stride * 4 if added_at else 0,
                    activation,
                )
            elif gathers:
                copy_rows(
                    vectors,
                    lanes,
                    end_v - v,
                    y_here + row * stride * 4,
                    end_row - row,
                    y_at + row * y_stride * 4,
                    y_stride,
                    y_starts.ctypes.data + v * 8,
                )

    return multiply
