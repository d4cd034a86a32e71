"""Products of float32 by the matrix unit (`tile_registers`): thirds of x, products of tiles, results.

A product of float32 takes six of bfloat16 (`bf16_split`). The unit multiplies 16 times as much bfloat16 as the vector
unit multiplies float32, so it is 2.7 times as fast. In practice it is twice as fast: the clock falls by a quarter
unless all numbers are 0 (Granite Rapids). Sums are float32, rounded as always; numbers below 2**-126 count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.bf16_split import HALF, UPPER
from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import (
    Epilogue,
    GatherBuffers,
    MatrixSums,
    MatrixWeights,
    NextTile,
    PositionOutput,
    PositionSums,
    RowEpilogue,
    SplitInput,
    TokenRows,
    WaitingSums,
)
from sparse_kernels.cpu.codegen.tile_registers import ROW_BYTES, ROWS, TILE_BYTES, select_tile_registers
from sparse_kernels.cpu.codegen.vector_emitter import I16, I32, I64, Emitter
from sparse_kernels.cpu.runtime.numba_internals import cgutils

# ------------------------------------------------------------------------------------------------ thirds of x

# A block of x lies as bfloat16 (features, 3, 32): high, middle and low of 32 tokens. In each 16 bytes, four tokens of
# the first half come before four of the second. So packing two vectors is one step, and so is unpacking two rows.
TOKENS, FEATURE_BYTES = 32, 3 * ROW_BYTES


class Splitter:
    """Thirds of vectors of 16 tokens, written as above."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.wide, self.narrow = ir.VectorType(I32, ROWS), ir.VectorType(I16, 2 * ROWS)

    def constant(self, value: int) -> ir.Constant:
        """Return a vector of one int32."""
        return ir.Constant(self.wide, [value] * ROWS)

    def thirds(self, x: ir.Value) -> list[ir.Value]:
        """High, middle and low of float32, as int32 whose lower halves are bfloat16 and whose upper ones are 0."""
        emit, builder = self.emit, self.emit.builder
        out, shift = [], self.constant(16)
        for _ in range(2):
            rounded = builder.add(builder.bitcast(x, self.wide), self.constant(HALF))
            out.append(builder.lshr(rounded, shift))
            x = builder.fsub(x, builder.bitcast(builder.and_(rounded, self.constant(UPPER)), emit.vector))
        return [*out, builder.lshr(builder.bitcast(x, self.wide), shift)]

    def write(self, first: ir.Value, second: ir.Value, places: Sequence[ir.Value], order: Sequence[int]) -> None:
        """Write the thirds of two vectors, 32 words each, to three pointers to floats; order: of the words."""
        emit, builder = self.emit, self.emit.builder
        words = ir.Constant(ir.VectorType(I32, 2 * ROWS), [2 * word for word in order])
        for a, b, place in zip(self.thirds(first), self.thirds(second), places, strict=True):
            halves = [builder.bitcast(each, self.narrow) for each in (a, b)]
            packed = builder.shuffle_vector(*halves, words)
            emit.store(builder.bitcast(packed, emit.vector), place, 0)

    def write_feature(self, first: ir.Value, second: ir.Value, at: ir.Value) -> None:
        """Write the thirds of one feature of 32 tokens to a pointer to floats, as above."""
        places = [self.emit.builder.gep(at, [self.emit.integer(third * ROWS)]) for third in range(3)]
        order = [half * ROWS + 4 * q + j for q in range(4) for half in (0, 1) for j in range(4)]
        self.write(first, second, places, order)


def emit_blocks(emit: Emitter, length: ir.Value, block: Callable[[ir.Value], None]) -> None:
    """Emit block(first) for vectors of 16 that cover 0 .. length - 1, length >= 16: the last overlaps the one
    before."""
    builder = emit.builder
    last = builder.sub(length, emit.integer(ROWS))

    def step(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        block(builder.select(builder.icmp_signed("<", last, i), last, i))
        return []

    emit.loop(length, [], step, stride=ROWS)


@vector_code()
def split_tokens(
    builder: ir.IRBuilder, source: ir.Value, stride: ir.Value, tokens: ir.Value, features: ir.Value, target: ir.Value
) -> None:
    """Split token-major float32 x (tokens, features) into thirds, up to 32 rows (>= 1) `stride` elements apart.

    Tokens beyond are the last one again. features: at least 16. target: see above. What has no thirds (infinity, NaN,
    the largest numbers) becomes thirds of which at least one is infinity or NaN.
    """
    emit = Emitter(builder, ROWS, True)
    split = Splitter(emit)
    rows = [emit.row(source, t, tokens, stride) for t in range(TOKENS)]

    def block(first: ir.Value) -> None:
        begin = builder.add(target, builder.mul(first, emit.integer(FEATURE_BYTES)))
        places = [emit.pointer(builder.add(begin, emit.integer(f * FEATURE_BYTES))) for f in range(ROWS)]
        for half in range(2):
            read = [builder.gep(row, [first]) for row in rows[half * ROWS : half * ROWS + ROWS]]
            for column, place in zip(emit.transpose_at(read), places, strict=True):
                if half:
                    split.write_feature(emit.load(place, 0), column, place)
                else:  # waits in the place that is overwritten later
                    emit.store(column, place, 0)

    emit_blocks(emit, features, block)


@vector_code()
def split_features(
    builder: ir.IRBuilder, source: ir.Value, stride: ir.Value, tokens: ir.Value, features: ir.Value, target: ir.Value
) -> None:
    """Split feature-major x (features, tokens) as `split_tokens` does: rows `stride` apart; tokens beyond are 0."""
    emit = Emitter(builder, ROWS, True)
    split = Splitter(emit)
    masks = [emit.mask(tokens), emit.mask(builder.sub(tokens, emit.integer(ROWS)))]

    def feature(f: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = emit.pointer(source, builder.mul(f, stride))
        first, second = (emit.load_masked(at, half, masks[half]) for half in range(2))
        there = emit.pointer(builder.add(target, builder.mul(f, emit.integer(FEATURE_BYTES))))
        split.write_feature(first, second, there)
        return []

    emit.loop(features, [], feature)


@vector_code()
def split_run(
    builder: ir.IRBuilder, source: ir.Value, vectors: ir.Value, left: ir.Value, target: ir.Value, distance: ir.Value
) -> None:
    """Split float32 into thirds in their order: high at `target`, middle and low each `distance` bytes further.

    As many times 32 as `vectors` says; beyond `left` (>= 0) elements nothing is read, and zeros are written.
    """
    emit = Emitter(builder, ROWS, True)
    split = Splitter(emit)
    begin = emit.pointer(source)
    thirds = [builder.add(target, builder.mul(distance, emit.integer(third))) for third in range(3)]

    def run(i: ir.Value, masked: bool) -> list[ir.Value]:
        first = builder.mul(i, emit.integer(TOKENS))
        at, halves = builder.gep(begin, [first]), []
        for half in range(2):
            if masked:
                mask = emit.mask(builder.sub(left, builder.add(first, emit.integer(half * ROWS))))
                halves.append(emit.load_masked(at, half, mask))
            else:
                halves.append(emit.load(at, half))
        behind = builder.mul(i, emit.integer(ROW_BYTES))
        places = [emit.pointer(builder.add(third, behind)) for third in thirds]
        split.write(halves[0], halves[1], places, range(TOKENS))
        return []

    full = builder.sdiv(left, emit.integer(TOKENS))
    full = builder.select(builder.icmp_signed("<", full, vectors), full, vectors)
    emit.loop(full, [], lambda i, _: run(i, masked=False))
    emit.loop(vectors, [], lambda i, _: run(i, masked=True), start=full)


# ------------------------------------------------------------------------------------------------ products

# Products of thirds (of w, of x). In this order each tile that is loaded serves as long as it can, and small products
# come first.
PRODUCTS = ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0))
# Products of a narrow step: (pairs of w, pairs of x).
NARROW_PRODUCTS = ((2, 1), (1, 0), (0, 0))
# Pairs of x: the thirds gathered of the even and of the odd one of two columns. In a narrow step both are of the same
# column.
PAIRS, NARROW_PAIRS = ((0, 0), (1, 1), (2, 2)), ((0, 1), (2, 0), (0, 0))

# Columns of a step and of a narrow step; bytes of the gathered columns of a step.
STEP, NARROW_STEP = 32, 16
GATHERED_BYTES = 3 * 2 * TILE_BYTES


class Gatherer:
    """Columns of x of one step, copied together and paired as the unit wants them."""

    def __init__(
        self,
        emit: Emitter,
        columns: ir.Value,
        narrow: ir.Value,
        x: ir.Value,
        distance: ir.Value,
        target: ir.Value,
    ) -> None:
        """columns: address of 32 int32, where columns begin, in bfloat16; narrow: an int64, not 0 if they are a
        narrow step's, each twice; distance: bytes from one third of a column to the next."""
        self.emit = emit
        builder = emit.builder
        self.columns, self.x, self.target = emit.pointer(columns, kind=I32), x, target
        is_narrow = builder.icmp_signed("!=", narrow, emit.integer(0))

        def offset(wide: int, narrow: int) -> ir.Value:
            chosen = builder.select(is_narrow, emit.integer(narrow), emit.integer(wide))
            return builder.mul(chosen, distance)

        self.offsets = [
            [offset(*thirds) for thirds in zip(wide, narrow, strict=True)]
            for wide, narrow in zip(PAIRS, NARROW_PAIRS, strict=True)
        ]
        self.words = ir.VectorType(I16, 2 * ROWS)
        self.orders = [
            [row * 2 * ROWS + 8 * q + 4 * half + j for q in range(4) for j in range(4) for row in (0, 1)]
            for half in range(2)
        ]

    def pair(self, number: ir.Value) -> None:
        """Columns 2 * number and the next one, of 32 tokens."""
        emit, builder = self.emit, self.emit.builder
        first, begins = builder.shl(number, emit.integer(1)), []
        for column in (first, builder.add(first, emit.integer(1))):
            offset = builder.sext(builder.load(builder.gep(self.columns, [column])), I64)
            begins.append(builder.add(self.x, builder.shl(offset, emit.integer(1))))
        for which, offsets in enumerate(self.offsets):
            rows = [
                builder.bitcast(emit.load(emit.pointer(builder.add(begin, offset)), 0), self.words)
                for begin, offset in zip(begins, offsets, strict=True)
            ]
            for half in range(2):
                order = ir.Constant(ir.VectorType(I32, 2 * ROWS), self.orders[half])
                both = builder.bitcast(builder.shuffle_vector(*rows, order), emit.vector)
                tile = builder.add(self.target, emit.integer((which * 2 + half) * TILE_BYTES))
                place = builder.add(tile, builder.mul(number, emit.integer(ROW_BYTES)))
                emit.store(both, emit.pointer(place), 0)


@vector_code()
def gather(
    builder: ir.IRBuilder, columns: ir.Value, narrow: ir.Value, x: ir.Value, distance: ir.Value, target: ir.Value
) -> None:
    """Gather what `matrix_tile` has to find gathered when it begins."""
    emit = Emitter(builder, ROWS, True)
    gatherer = Gatherer(emit, columns, narrow, x, distance, target)

    def pair(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        gatherer.pair(number)
        return []

    emit.loop(emit.integer(ROWS), [], pair)


class MatrixTileForm(NamedTuple):
    """A tile of the matrix unit.

    emulated: by vectors and memory. row_tiles: 1 or 2, of 16 rows each.
    """

    emulated: int
    row_tiles: int


@vector_code(MatrixTileForm)
def matrix_tile(
    builder: ir.IRBuilder,
    form: MatrixTileForm,
    weights: MatrixWeights,
    x: SplitInput,
    following: NextTile,
    gathered: GatherBuffers,
    y: MatrixSums,
) -> None:
    """y[r, t] = sum over c of w[r, c] * x[columns[c], t], 16 or 32 rows and tokens.

    values: thirds of w, a tile of 16 rows and 32 columns each, (steps, 3, row_tiles, 16, 32). If all_steps is one
    more, a narrow step of 16 columns follows, (3, row_tiles, 16, 16, 2): the pairs (high, high), (middle, middle),
    (high, low). columns: int32 (all_steps, 32), see `Gatherer`.

    Columns are gathered while the step before multiplies: `following` says what the tile after this one begins with.
    What this tile begins with lies in the buffer that `gathered` names. If all_steps is odd, the next tile begins
    with the other buffer.

    A narrow step pairs thirds of one column instead of two columns: so few columns need few zeros to fill a step up.
    """
    n_rows = form.row_tiles
    emit = Emitter(builder, ROWS, True)
    tile = select_tile_registers(emit, form.emulated)
    sums, of_w, of_x = range(4), (4, 5), (6, 7)
    row_stride = emit.integer(ROW_BYTES)
    both = builder.icmp_signed("==", y.halves, emit.integer(2))
    step_bytes, unused = 3 * n_rows * TILE_BYTES, emit.integer(2 * GATHERED_BYTES)

    def further(address: ir.Value, size: int) -> ir.Value:
        return builder.add(address, emit.integer(size))

    def buffer(step: ir.Value) -> ir.Value:
        odd = builder.and_(builder.add(step, gathered.phase), emit.integer(1))
        return builder.add(gathered.address, builder.mul(odd, emit.integer(GATHERED_BYTES)))

    def multiply(step: ir.Value, products: Sequence[tuple[int, int]]) -> None:
        here = builder.add(weights.values, builder.mul(step, emit.integer(step_bytes)))
        source, behind = buffer(step), builder.add(step, emit.integer(1))
        is_last = builder.icmp_signed("==", behind, weights.all_steps)
        ahead = builder.select(is_last, following.values, further(here, step_bytes))
        columns_behind = builder.add(weights.columns, builder.mul(behind, emit.integer(STEP * 4)))
        is_narrow = builder.zext(builder.icmp_signed("==", behind, weights.steps), I64)
        gatherer = Gatherer(
            emit,
            builder.select(is_last, following.columns, columns_behind),
            builder.select(is_last, following.narrow, is_narrow),
            builder.select(is_last, following.x, x.address),
            x.distance,
            buffer(behind),
        )
        loaded: tuple[int | None, int | None] = (None, None)
        for turn, (w, third) in enumerate(products):
            if w != loaded[0]:
                for r in range(n_rows):
                    tile.load(of_w[r], further(here, (w * n_rows + r) * TILE_BYTES), row_stride)

            def of_half(half: int, new: bool = third != loaded[1], third: int = third) -> None:
                if new:
                    tile.load(of_x[half], further(source, (third * 2 + half) * TILE_BYTES), row_stride)
                for r in range(n_rows):
                    tile.multiply(sums[2 * r + half], of_w[r], of_x[half])

            of_half(0)
            with builder.if_then(both, likely=True):
                of_half(1)
            loaded = w, third
            share = step_bytes // len(products)
            for line in range(turn * share, (turn + 1) * share, ROW_BYTES):
                emit.will_load(emit.pointer(further(ahead, line)), close=True)
            for number in range(turn, ROWS, len(products)):
                gatherer.pair(emit.integer(number))
        # This tile is never read. A store that comes over half a microsecond after the last one takes a quarter of a
        # microsecond longer (measured on Granite Rapids). With one store a step, the stores of the sums are never
        # that late.
        tile.store(of_w[0], builder.add(gathered.address, unused), row_stride)

    def step(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        multiply(number, PRODUCTS)
        return []

    for each in sums[: 2 * n_rows]:
        tile.zero(each)
    emit.loop(weights.steps, [], step)
    with builder.if_then(builder.icmp_signed("<", weights.steps, weights.all_steps)):
        multiply(weights.steps, NARROW_PRODUCTS)
    for r in range(n_rows):
        for half in range(2):
            at = further(y.address, r * ROWS * TOKENS * 4 + half * ROW_BYTES)
            tile.store(sums[2 * r + half], at, emit.integer(TOKENS * 4))


# ------------------------------------------------------------------------------------------------ results


class Finite:
    """Whether all sums were finite. If one was not, thirds may have caused it: y is to be computed by vectors."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.place = cgutils.alloca_once(emit.builder, emit.vector)
        emit.builder.store(emit.zeros(1)[0], self.place)

    def check(self, sums: Sequence[ir.Value]) -> None:
        """Remember whether all of these are finite: 0 times infinity or NaN is NaN, and stays it."""
        known = self.emit.builder.load(self.place)
        for total in sums:
            known = self.emit.multiply_add(total, self.emit.zeros(1)[0], known)
        self.emit.builder.store(known, self.place)

    def report(self, flag: ir.Value) -> None:
        """Write 1 to the int32 at an integer address if a sum was not finite."""
        builder = self.emit.builder
        known = builder.load(self.place)
        lanes = builder.bitcast(builder.fcmp_unordered("uno", known, known), I16)
        with builder.if_then(builder.icmp_unsigned("!=", lanes, ir.Constant(I16, 0)), likely=False):
            builder.store(ir.Constant(I32, 1), self.emit.pointer(flag, kind=I32))


def list_activations(emit: Emitter) -> list[Callable[[ir.Value], ir.Value] | None]:
    """Return the activations in the order of their codes; None for the identity."""
    return [None, emit.relu, emit.gelu]


@vector_code()
def finish_tokens(builder: ir.IRBuilder, sums: WaitingSums, y: TokenRows, finish: Epilogue, flag: ir.Value) -> None:
    """y[t, f] = activation(sums[positions[f], t] + bias[f]) for up to 16 tokens (>= 1).

    sums: float32, rows of 32 tokens, of which the first 16 are meant; count: features, at least 16. flag: address of
    an int32, set to 1 if any sum is not finite.
    """
    emit = Emitter(builder, ROWS, True)
    finite = Finite(emit)
    every_position, every_bias = emit.pointer(sums.positions, kind=I32), emit.pointer(finish.bias)
    targets = [emit.row(y.address, t, y.left, y.stride) for t in range(ROWS)]

    def block(first: ir.Value) -> None:
        rows = []
        for f in range(ROWS):
            position = builder.load(builder.gep(every_position, [builder.add(first, emit.integer(f))]))
            behind = builder.mul(builder.zext(position, I64), emit.integer(TOKENS * 4))
            rows.append(emit.pointer(builder.add(sums.address, behind)))
        found = emit.transpose_at(rows)
        finite.check(found)
        added = emit.load(builder.gep(every_bias, [first]), 0)
        done = [builder.fadd(total, added) for total in found]

        def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
            # From the last to the first: rows beyond the end are written to the last one, and then overwritten.
            for t in reversed(range(ROWS)):
                value = done[t] if function is None else function(done[t])
                emit.store(value, builder.gep(targets[t], [first]), 0)

        emit.choose(finish.activation, {code: partial(store, it) for code, it in enumerate(list_activations(emit))})

    emit_blocks(emit, sums.count, block)
    finite.report(flag)


@vector_code()
def finish_features(builder: ir.IRBuilder, sums: WaitingSums, y: TokenRows, finish: Epilogue, flag: ir.Value) -> None:
    """y[f, t] = activation(sums[positions[f], t] + bias[f]) for up to 32 tokens; else as `finish_tokens`.

    y.stride: from one feature to the next.
    """
    emit = Emitter(builder, ROWS, True)
    finite = Finite(emit)
    every_position, every_bias = emit.pointer(sums.positions, kind=I32), emit.pointer(finish.bias)
    masks = [emit.mask(y.left), emit.mask(builder.sub(y.left, emit.integer(ROWS)))]

    def feature(f: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        position = builder.zext(builder.load(builder.gep(every_position, [f])), I64)
        at = emit.pointer(builder.add(sums.address, builder.mul(position, emit.integer(TOKENS * 4))))
        added = emit.splat(builder.load(builder.gep(every_bias, [f])))
        there = emit.pointer(y.address, builder.mul(f, y.stride))
        found = [emit.load_masked(at, half, masks[half]) for half in range(2)]
        finite.check(found)

        def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
            for half, total in enumerate(found):
                value = builder.fadd(total, added)
                emit.store_masked(value if function is None else function(value), there, half, masks[half])

        emit.choose(finish.activation, {code: partial(store, it) for code, it in enumerate(list_activations(emit))})
        return []

    emit.loop(sums.count, [], feature)
    finite.report(flag)


class PositionForm(NamedTuple):
    """How positions are finished. framed: they lie in frames of zeros, or something is added to them."""

    framed: int


@vector_code(PositionForm)
def finish_positions(
    builder: ir.IRBuilder,
    form: PositionForm,
    sums: PositionSums,
    y: PositionOutput,
    finish: RowEpilogue,
    flag: ir.Value,
) -> None:
    """y[row_ids[r], p] = activation(sums[r, p] + bias[row_ids[r]]) for 32 positions of each row.

    sums: float32 (rows, 32), what `matrix_tile` made of x that was not interleaved: in each 16 bytes four positions
    of the first half, or as far behind of the second.

    Framed: zero is written to positions whose bits in keep are not set. Halves of 16 without any set bit are not
    touched: they may lie in another channel, or behind the array. Else keep and added are not looked at. flag: as of
    `finish_tokens`.
    """
    frames = form.framed
    emit = Emitter(builder, ROWS, True)
    finite = Finite(emit)
    ids, every_bias = emit.pointer(finish.row_ids, kind=I32), emit.pointer(finish.bias)
    # Take 128 bits from each half in turn.
    orders = [[half * ROWS + 4 * q + j for q in quarters for half in (0, 1) for j in range(4)]
              for quarters in ((0, 1), (2, 3))]  # fmt: skip
    shifted = [builder.lshr(y.keep, emit.integer(half * ROWS)) for half in (0, 1)]
    bits = [builder.and_(each, emit.integer(2**ROWS - 1)) for each in shifted]

    def row(r: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        number = builder.sext(builder.load(builder.gep(ids, [r])), I64)
        with builder.if_then(builder.icmp_signed(">=", number, emit.integer(0)), likely=True):
            at = emit.pointer(sums.address, builder.mul(r, emit.integer(TOKENS)))
            mixed = [emit.load(at, half) for half in range(2)]
            bias_here = emit.splat(builder.load(builder.gep(every_bias, [number])))
            begin = builder.mul(number, y.stride)

            def vector(half: int) -> None:
                order = ir.Constant(ir.VectorType(I32, ROWS), orders[half])
                total = builder.shuffle_vector(*mixed, order)
                finite.check([total])
                if frames:
                    [total] = emit.continued(
                        y.added, [total], lambda: [emit.load(emit.pointer(y.added, begin), half)]
                    )
                total = builder.fadd(total, bias_here)
                there = emit.pointer(y.address, begin)

                def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
                    value = total if function is None else function(total)
                    emit.store(emit.kept(value, bits[half]) if frames else value, there, half)

                emit.choose(
                    finish.activation, {code: partial(store, it) for code, it in enumerate(list_activations(emit))}
                )

            for half in range(2):
                if frames:
                    with builder.if_then(builder.icmp_unsigned("!=", bits[half], emit.integer(0)), likely=True):
                        vector(half)
                else:
                    vector(half)
        return []

    emit.loop(sums.rows, [], row)
    finite.report(flag)
