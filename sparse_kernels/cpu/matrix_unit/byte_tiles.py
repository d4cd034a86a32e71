"""Products of bytes by the matrix unit (`tile_registers`): weights times gathered quads of x, and results.

The unit multiplies 8 times as many bytes as the vector unit. So gathering quads, and what sums are worth, count more
than the products: a step of 16 quads takes 64 cycles, and its gathering 32 loads and stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import (
    Epilogue,
    GatherBuffers,
    MatrixSums,
    NextQuads,
    QuadInput,
    TileWeights,
    TokenRows,
    WaitingSums,
)
from sparse_kernels.cpu.codegen.tile_registers import ROW_BYTES, ROWS, TILE_BYTES, select_tile_registers
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, Emitter

# Quads of a step; vectors of 16 tokens or positions that a tile multiplies, and tokens of both.
STEP, HALVES = 16, 2
TOKENS = HALVES * ROWS

# Bytes of the gathered quads of a step.
GATHERED_BYTES = HALVES * TILE_BYTES


class QuadGatherer:
    """Quads of x of one step, copied together: 16 rows of 64 bytes for each half of the tokens."""

    def __init__(self, emit: Emitter, columns: ir.Value, halves: Sequence[ir.Value], target: ir.Value) -> None:
        """columns: address of 16 int32, where quads begin, in 32 bits; halves: addresses of x."""
        self.emit, self.halves, self.target = emit, halves, target
        self.columns = emit.pointer(columns, kind=I32)

    def quad(self, number: int) -> None:
        """Copy one quad of all tokens."""
        emit, builder = self.emit, self.emit.builder
        place = builder.gep(self.columns, [emit.integer(number)])
        offset = builder.shl(builder.sext(builder.load(place), I64), emit.integer(2))
        for half, x in enumerate(self.halves):
            row = emit.load(emit.pointer(builder.add(x, offset)), 0)
            there = builder.add(self.target, emit.integer(half * TILE_BYTES + number * ROW_BYTES))
            emit.store(row, emit.pointer(there), 0)


@vector_code()
def gather_quads(
    builder: ir.IRBuilder, columns: ir.Value, first: ir.Value, second: ir.Value, target: ir.Value
) -> None:
    """Gather what the first `byte_tile` has to find gathered when it begins."""
    gatherer = QuadGatherer(Emitter(builder, ROWS, True), columns, (first, second), target)
    for number in range(STEP):
        gatherer.quad(number)


class MatrixByteForm(NamedTuple):
    """A tile of the matrix unit.

    emulated: by vectors and memory. row_tiles: 1 or 2, of 16 rows each. gathers: quads of x are gathered; else all of
    them are multiplied, in their order, and lie `TOKENS` quads of 32 bits apart.
    """

    emulated: int
    row_tiles: int
    gathers: int


@vector_code(MatrixByteForm)
def byte_tile(
    builder: ir.IRBuilder,
    form: MatrixByteForm,
    weights: TileWeights,
    x: QuadInput,
    following: NextQuads,
    gathered: GatherBuffers,
    y: MatrixSums,
) -> None:
    """y[r, t] = sum over c of w[r, c] * x[columns[c], t], 16 or 32 rows and tokens, as whole numbers of 32 bits.

    values: int8 (count, row_tiles, 16 rows, 16 quads, 4), `count` steps, at least one. columns: int32 (count, 16),
    see `QuadGatherer`.

    Quads are gathered while the step before multiplies: `following` says what the tile after this one begins with.
    What this tile begins with lies in the buffer that `gathered` names. If the steps are odd, the next tile begins
    with the other buffer. Two steps ahead is no faster.
    """
    n_rows = form.row_tiles
    emit = Emitter(builder, ROWS, True)
    tile = select_tile_registers(emit, form.emulated)
    sums, of_w, of_x = range(4), (4, 5), (6, 7)
    row_stride, x_stride = emit.integer(ROW_BYTES), emit.integer(TOKENS * 4)
    both = builder.icmp_signed("==", y.halves, emit.integer(HALVES))

    def further(address: ir.Value, size: int) -> ir.Value:
        return builder.add(address, emit.integer(size))

    def buffer(step: ir.Value) -> ir.Value:
        odd = builder.and_(builder.add(step, gathered.phase), emit.integer(1))
        return builder.add(gathered.address, builder.mul(odd, emit.integer(GATHERED_BYTES)))

    def start_gathering(step: ir.Value) -> QuadGatherer:
        """Gather what the step after this one multiplies."""
        behind = builder.add(step, emit.integer(1))
        is_last = builder.icmp_signed("==", behind, weights.count)
        columns = builder.add(weights.columns, builder.mul(behind, emit.integer(STEP * 4)))
        halves = [
            builder.select(is_last, then, now)
            for then, now in ((following.first, x.first), (following.second, x.second))
        ]
        return QuadGatherer(emit, builder.select(is_last, following.columns, columns), halves, buffer(behind))

    def step(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        here = builder.add(weights.values, builder.mul(number, emit.integer(n_rows * TILE_BYTES)))
        gatherer = start_gathering(number) if form.gathers else None
        passed = builder.mul(number, emit.integer(STEP * TOKENS * 4))
        for r in range(n_rows):
            tile.load(of_w[r], further(here, r * TILE_BYTES), row_stride)

        def of_half(half: int) -> None:
            if form.gathers:
                tile.load(of_x[half], further(buffer(number), half * TILE_BYTES), row_stride)
            else:
                tile.load(of_x[half], builder.add((x.first, x.second)[half], passed), x_stride)
            for r in range(n_rows):
                tile.multiply_bytes(sums[2 * r + half], of_w[r], of_x[half])

        for half in range(HALVES):
            if half == 0:
                of_half(half)
            else:
                with builder.if_then(both, likely=True):
                    of_half(half)
            if gatherer is not None:
                for quad in range(half, STEP, HALVES):
                    gatherer.quad(quad)
        return []

    for each in [2 * r + half for r in range(n_rows) for half in range(HALVES)]:
        tile.zero(sums[each])
    emit.loop(weights.count, [], step)
    for r in range(n_rows):
        for half in range(HALVES):
            at = further(y.address, r * ROWS * TOKENS * 4 + half * ROW_BYTES)
            tile.store(sums[2 * r + half], at, emit.integer(TOKENS * 4))


# Tokens that are finished together: as many rows of y are written at once. With 16, and so many pages, it takes a
# tenth longer where y does not stay in the second-level cache.
FINISHED = 8


class FinishBytesForm(NamedTuple):
    """How sums of tokens are finished. own_steps: each token has a step of its own."""

    own_steps: int


@vector_code(FinishBytesForm)
def finish_byte_tokens(
    builder: ir.IRBuilder, form: FinishBytesForm, sums: WaitingSums, y: TokenRows, finish: Epilogue
) -> None:
    """y[t, f] = activation(worth of sums[positions[f], t] + bias[f]) for up to FINISHED tokens (>= 1).

    sums: int32, rows of 32 tokens, of which the first are meant. positions: in whole vectors, count: those that
    are meant.
    """
    emit = Emitter(builder, ROWS, True)
    every_position, every_bias = emit.pointer(sums.positions, kind=I32), emit.pointer(finish.bias)
    offsets, scales = emit.pointer(finish.worth.offsets), emit.pointer(finish.worth.scales)
    targets = [emit.row(y.address, t, y.left, y.stride) for t in range(FINISHED)]
    factors = []
    if form.own_steps:
        steps = emit.pointer(finish.worth.token_scales)
        factors = [emit.splat(builder.load(builder.gep(steps, [emit.integer(t)]))) for t in range(FINISHED)]

    def tile(first: ir.Value, rest: ir.Value | None) -> None:
        mask = None if rest is None else emit.mask(rest)

        def read(array: ir.Value) -> ir.Value:
            at = builder.gep(array, [first])
            return emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask)

        rows = []
        for f in range(ROWS):
            position = builder.load(builder.gep(every_position, [builder.add(first, emit.integer(f))]))
            behind = builder.mul(builder.zext(position, I64), emit.integer(TOKENS * 4))
            rows.append(emit.pointer(builder.add(sums.address, behind)))
        offset, scale, bias = read(offsets), read(scales), read(every_bias)
        columns = [column for begin in range(0, FINISHED, 4) for column in emit.four_columns(rows, begin)]
        done = [emit.worth(total, offset, scale) for total in columns]
        if form.own_steps:
            done = [builder.fmul(total, factor) for total, factor in zip(done, factors, strict=True)]

        def store(finished: list[ir.Value]) -> None:
            # From the last to the first: rows beyond the end are written to the last one, and then overwritten.
            for t in reversed(range(FINISHED)):
                at = builder.gep(targets[t], [first])
                if mask is None:
                    emit.store(finished[t], at, 0)
                else:
                    emit.store_masked(finished[t], at, 0, mask)

        emit.finish(finish.activation, done, lambda: [bias] * FINISHED, store)

    emit.in_tiles(sums.count, tile)
