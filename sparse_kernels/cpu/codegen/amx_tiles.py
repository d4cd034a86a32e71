"""The matrix unit of Intel's server processors since 2023 (AMX): what its tiles do, emitted, and emulated elsewhere.

There are eight tiles of 16 rows of 64 bytes. A multiplication of bfloat16 (TDPBF16PS) takes 16 cycles:

    c[i, j] += sum over p of a[i, p, 0] * b[p, j, 0] + a[i, p, 1] * b[p, j, 1]      c float32 (16, 16)
                                                                                  a, b bfloat16 (16, 16, 2)

which is 16 times what the vector unit multiplies and adds in float32, and so 2.7 times as fast even where a product
of float32 takes six of bfloat16 (`thirds`); in practice twice, as the clock falls by a quarter where the numbers are
not all 0 (Granite Rapids). Sums are float32, rounded as always; numbers below 2**-126 count as 0.

The tiles of a thread have to be configured before they are used, and a process has to ask the kernel for them. From
then on a signal's alternative stack must be large enough to hold them, in all of the process.

Emulated tiles do the same with vectors and memory, slowly, on any processor, but for the order of sums and what is
below 2**-126: for tests of everything around them.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from llvmlite import binding, ir
from numba import types

from sparse_kernels.cpu.codegen.bf16_split import HALF, UPPER
from sparse_kernels.cpu.codegen.vector_emitter import I16, I32, I64, Emitter, with_literals
from sparse_kernels.cpu.runtime.numba_internals import cgutils, read_compile_target

# Rows of a tile, its bytes, and those of a row.
ROWS, TILE_BYTES, ROW_BYTES = 16, 1024, 64

# What `begin` keeps: LDTILECFG's 64 bytes, and a cache line more, so that threads do not share one.
SAVED_BYTES = 128

# Of Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

# Palette 1 (16 rows of 64 bytes in every tile), in the layout that LDTILECFG reads: bytes 16 to 31 are the bytes of a
# row as int16, bytes 48 to 55 the numbers of rows.
_CONFIGURATION = bytes([1] + [0] * 15 + [ROW_BYTES, 0] * 8 + [0] * 16 + [ROWS] * 8 + [0] * 8)

I8 = ir.IntType(8)


@cache
def available() -> bool:
    """Whether code for the target of this process may use the tiles: asks the kernel for them, once a process."""
    triple, _, has = read_compile_target()
    if not ({"amx-tile", "amx-bf16", "avx512bw"} <= has and "linux" in triple and platform.machine() == "x86_64"):
        return False
    status: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    return status == 0


class AmxTileRegisters:
    """Eight tile registers: what the processor has, in assembly. A stride is in bytes, from one row to the next."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        # What reads assembly is not there from the beginning.
        binding.initialize_native_asmparser()

    def zero(self, tile: int) -> None:
        """tile = 0."""
        self._assembly(f"tilezero %tmm{tile}", [])

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Read a tile from an integer address."""
        self._assembly(f"tileloadd ($0,$1,1), %tmm{tile}", [address, stride])

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Write a tile to an integer address."""
        self._assembly(f"tilestored %tmm{tile}, ($0,$1,1)", [address, stride])

    def multiply(self, c: int, a: int, b: int) -> None:
        """c += a b, as above."""
        self._assembly(f"tdpbf16ps %tmm{b}, %tmm{a}, %tmm{c}", [])

    def begin(self, saved: ir.Value) -> None:
        """Configure the tiles of this thread; what they were is kept in 64 bytes at an integer address."""
        module = self.emit.builder.module
        name = "sparse_kernels_tile_configuration"
        kind = ir.ArrayType(I8, len(_CONFIGURATION))
        place = module.globals.get(name)
        if place is None:
            place = ir.GlobalVariable(module, kind, name)
            place.initializer = ir.Constant(kind, bytearray(_CONFIGURATION))
            place.global_constant, place.linkage = True, "internal"
        self._assembly("sttilecfg ($0)", [saved])
        self._assembly("ldtilecfg ($0)", [self.emit.builder.ptrtoint(place, I64)])

    def end(self, saved: ir.Value) -> None:
        """Configure the tiles as they were: other libraries may count on it, and unused tiles cost nothing."""
        self._assembly("ldtilecfg ($0)", [saved])

    def _assembly(self, text: str, operands: list[ir.Value]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(operands))
        constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
        self.emit.builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), operands)


class EmulatedTileRegisters(AmxTileRegisters):
    """The same with vectors of 16 float32 and memory of this call."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        builder = emit.builder
        kind = ir.ArrayType(I8, TILE_BYTES)
        self.places = [builder.ptrtoint(cgutils.alloca_once(builder, kind), I64) for _ in range(8)]

    def zero(self, tile: int) -> None:
        """As of `AmxTileRegisters`."""
        for row in range(ROWS):
            self.emit.store(self.emit.zeros(1)[0], self._row(tile, row), 0)

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """As of `AmxTileRegisters`."""
        for row in range(ROWS):
            self.emit.store(self.emit.load(self._far(address, stride, row), 0), self._row(tile, row), 0)

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """As of `AmxTileRegisters`."""
        for row in range(ROWS):
            self.emit.store(self.emit.load(self._row(tile, row), 0), self._far(address, stride, row), 0)

    def multiply(self, c: int, a: int, b: int) -> None:
        """As of `AmxTileRegisters`."""
        emit, builder = self.emit, self.emit.builder
        wide = ir.VectorType(I32, emit.lanes)
        shift, upper = ir.Constant(wide, [16] * emit.lanes), ir.Constant(wide, [UPPER] * emit.lanes)

        def both(pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
            first, second = builder.shl(pairs, shift), builder.and_(pairs, upper)
            return builder.bitcast(first, emit.vector), builder.bitcast(second, emit.vector)

        def row(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            behind = builder.mul(i, emit.integer(ROW_BYTES))
            there = emit.pointer(builder.add(self.places[c], behind))
            factors = emit.pointer(builder.add(self.places[a], behind), kind=I32)
            total = emit.load(there, 0)
            for p in range(ROWS):
                pair = emit.splat(builder.load(builder.gep(factors, [emit.integer(p)])))
                others = builder.bitcast(emit.load(self._row(b, p), 0), wide)
                for factor, other in zip(both(pair), both(others), strict=True):
                    total = builder.fadd(total, builder.fmul(factor, other))
            emit.store(total, there, 0)
            return []

        emit.loop(emit.integer(ROWS), [], row)

    def begin(self, saved: ir.Value) -> None:
        """Nothing to do."""

    def end(self, saved: ir.Value) -> None:
        """Nothing to do."""

    def _row(self, tile: int, row: int) -> ir.Value:
        return self.emit.pointer(self.emit.builder.add(self.places[tile], self.emit.integer(row * ROW_BYTES)))

    def _far(self, address: ir.Value, stride: ir.Value, row: int) -> ir.Value:
        builder = self.emit.builder
        return self.emit.pointer(builder.add(address, builder.mul(stride, self.emit.integer(row))))


def tiles(emit: Emitter, emulated: int) -> AmxTileRegisters:
    """The tiles of the processor, or emulated ones."""
    return EmulatedTileRegisters(emit) if emulated else AmxTileRegisters(emit)


@with_literals
def begin(typing_context: Any, emulated: Any, saved: Any) -> Any:
    """Configure the tiles of this thread; saved: address of 64 bytes for `end`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        tiles(Emitter(builder, ROWS, True), int(signature.args[0].literal_value)).begin(args[1])
        return context.get_dummy_value()

    return types.void(emulated, types.intp), generate


@with_literals
def end(typing_context: Any, emulated: Any, saved: Any) -> Any:
    """Configure the tiles as they were before `begin`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        tiles(Emitter(builder, ROWS, True), int(signature.args[0].literal_value)).end(args[1])
        return context.get_dummy_value()

    return types.void(emulated, types.intp), generate


# ------------------------------------------------------------------------------------------------ thirds of x

# A block of x lies as bfloat16 (features, 3, 32): high, middle and low of 32 tokens. In each 16 bytes four tokens of
# the first half are followed by four of the second: so packing two vectors and unpacking two rows are one step each.
TOKENS, FEATURE_BYTES = 32, 3 * ROW_BYTES


class Splitter:
    """Thirds of vectors of 16 tokens, written as above."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.wide, self.narrow = ir.VectorType(I32, ROWS), ir.VectorType(I16, 2 * ROWS)

    def constant(self, value: int) -> ir.Constant:
        """A vector of one int32."""
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
        """The thirds of two vectors, 32 words each, to three pointers to floats; order: which of 32 goes where."""
        emit, builder = self.emit, self.emit.builder
        words = ir.Constant(ir.VectorType(I32, 2 * ROWS), [2 * word for word in order])
        for a, b, place in zip(self.thirds(first), self.thirds(second), places, strict=True):
            halves = [builder.bitcast(each, self.narrow) for each in (a, b)]
            packed = builder.shuffle_vector(*halves, words)
            emit.store(builder.bitcast(packed, emit.vector), place, 0)

    def write_feature(self, first: ir.Value, second: ir.Value, at: ir.Value) -> None:
        """The thirds of one feature of 32 tokens, to a pointer to floats, as above."""
        places = [self.emit.builder.gep(at, [self.emit.integer(third * ROWS)]) for third in range(3)]
        order = [half * ROWS + 4 * q + j for q in range(4) for half in (0, 1) for j in range(4)]
        self.write(first, second, places, order)


def in_vectors(emit: Emitter, length: ir.Value, block: Callable[[ir.Value], None]) -> None:
    """block(first) for vectors of 16 that cover 0 .. length - 1, length >= 16: the last overlaps that before it."""
    builder = emit.builder
    last = builder.sub(length, emit.integer(ROWS))

    def step(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        block(builder.select(builder.icmp_signed("<", last, i), last, i))
        return []

    emit.loop(length, [], step, stride=ROWS)


@with_literals
def split_tokens(typing_context: Any, source: Any, stride: Any, tokens: Any, features: Any, target: Any) -> Any:
    """Thirds of token-major float32 x (tokens, features), rows `stride` elements apart, of up to 32 of them (>= 1).

    Tokens beyond are the last one again. features: at least 16. target: see above. What has no thirds (infinity, NaN,
    the largest numbers) becomes thirds of which at least one is infinity or NaN.
    """
    signature = types.void(*([types.intp] * 5))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, stride, tokens, features, target = args
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
                    else:  # waits where it will be overwritten
                        emit.store(column, place, 0)

        in_vectors(emit, features, block)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def split_features(typing_context: Any, source: Any, stride: Any, tokens: Any, features: Any, target: Any) -> Any:
    """As `split_tokens`, of feature-major x (features, tokens): rows `stride` apart; tokens beyond are 0."""
    signature = types.void(*([types.intp] * 5))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, stride, tokens, features, target = args
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
        return context.get_dummy_value()

    return signature, generate


@with_literals
def split_run(typing_context: Any, source: Any, vectors: Any, left: Any, target: Any, distance: Any) -> Any:
    """Thirds of float32 in their order: high at `target`, middle and low each `distance` bytes further.

    As many times 32 as `vectors` says; beyond `left` (>= 0) elements nothing is read, and zeros are written.
    """
    signature = types.void(*([types.intp] * 5))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, vectors, left, target, distance = args
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
        return context.get_dummy_value()

    return signature, generate


# ------------------------------------------------------------------------------------------------ products

# Products of thirds (of w, of x), so that each tile that is loaded serves as long as it can, and small ones first.
PRODUCTS = ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0))
# Of a narrow step, of (pairs of w, pairs of x).
NARROW_PRODUCTS = ((2, 1), (1, 0), (0, 0))
# Pairs of x: what is gathered of the even and of the odd one of two columns; in a narrow step of a column and itself.
PAIRS, NARROW_PAIRS = ((0, 0), (1, 1), (2, 2)), ((0, 1), (2, 0), (0, 0))

# Columns of a step and of a narrow one; bytes that gathered columns of a step take.
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


@with_literals
def gather(typing_context: Any, columns: Any, narrow: Any, x: Any, distance: Any, target: Any) -> Any:
    """What `matrix_tile` has to find gathered when it begins."""
    signature = types.void(*([types.intp] * 5))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        emit = Emitter(builder, ROWS, True)
        gatherer = Gatherer(emit, *args)

        def pair(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            gatherer.pair(number)
            return []

        emit.loop(emit.integer(ROWS), [], pair)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def matrix_tile(
    typing_context: Any,
    emulated: Any,
    row_tiles: Any,
    halves: Any,
    values: Any,
    columns: Any,
    steps: Any,
    all_steps: Any,
    x: Any,
    distance: Any,
    next_values: Any,
    next_columns: Any,
    next_narrow: Any,
    next_x: Any,
    gathered: Any,
    phase: Any,
    y: Any,
) -> Any:
    """y[r, t] = sum over c of w[r, c] * x[columns[c], t], 16 or 32 rows (row_tiles) and tokens (halves: 1 or 2).

    values: thirds of w, a tile of 16 rows and 32 columns each, (steps, 3, row_tiles, 16, 32), then, if all_steps is
    one more, (3, row_tiles, 16, 16, 2) for a narrow step of 16 columns: the pairs (high, high), (middle, middle),
    (high, low). columns: int32 (all_steps, 32), see `Gatherer`. x: thirds, `distance` bytes apart. y: float32, 32 a
    row.

    Columns are gathered while the step before multiplies: `next_*` says what the tile after this one begins with.
    gathered: room for GATHERED_BYTES twice and a tile, with what this one begins with in the half that the lowest bit
    of phase names; behind it, the other half holds the next, if all_steps is odd.

    A narrow step pairs thirds of one column instead of two columns: so few columns need few zeros to fill a step up.
    """
    signature = types.void(emulated, row_tiles, *([types.intp] * 14))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        emulate, n_rows = (int(literal.literal_value) for literal in signature.args[:2])
        halves, values, columns, steps, all_steps, x, distance, *then, gathered, phase, y = args[2:]
        next_values, next_columns, next_narrow, next_x = then
        emit = Emitter(builder, ROWS, True)
        tile = tiles(emit, emulate)
        sums, of_w, of_x = range(4), (4, 5), (6, 7)
        row_stride = emit.integer(ROW_BYTES)
        both = builder.icmp_signed("==", halves, emit.integer(2))
        step_bytes, unused = 3 * n_rows * TILE_BYTES, emit.integer(2 * GATHERED_BYTES)

        def further(address: ir.Value, size: int) -> ir.Value:
            return builder.add(address, emit.integer(size))

        def buffer(step: ir.Value) -> ir.Value:
            odd = builder.and_(builder.add(step, phase), emit.integer(1))
            return builder.add(gathered, builder.mul(odd, emit.integer(GATHERED_BYTES)))

        def multiply(step: ir.Value, products: Sequence[tuple[int, int]]) -> None:
            weights = builder.add(values, builder.mul(step, emit.integer(step_bytes)))
            source, behind = buffer(step), builder.add(step, emit.integer(1))
            is_last = builder.icmp_signed("==", behind, all_steps)
            ahead = builder.select(is_last, next_values, further(weights, step_bytes))
            columns_behind = builder.add(columns, builder.mul(behind, emit.integer(STEP * 4)))
            is_narrow = builder.zext(builder.icmp_signed("==", behind, steps), I64)
            gatherer = Gatherer(
                emit,
                builder.select(is_last, next_columns, columns_behind),
                builder.select(is_last, next_narrow, is_narrow),
                builder.select(is_last, next_x, x),
                distance,
                buffer(behind),
            )
            here: tuple[int | None, int | None] = (None, None)
            for turn, (w, third) in enumerate(products):
                if w != here[0]:
                    for r in range(n_rows):
                        tile.load(of_w[r], further(weights, (w * n_rows + r) * TILE_BYTES), row_stride)

                def of_half(half: int, new: bool = third != here[1], third: int = third) -> None:
                    if new:
                        tile.load(of_x[half], further(source, (third * 2 + half) * TILE_BYTES), row_stride)
                    for r in range(n_rows):
                        tile.multiply(sums[2 * r + half], of_w[r], of_x[half])

                of_half(0)
                with builder.if_then(both, likely=True):
                    of_half(1)
                here = w, third
                share = step_bytes // len(products)
                for line in range(turn * share, (turn + 1) * share, ROW_BYTES):
                    emit.will_load(emit.pointer(further(ahead, line)), close=True)
                for number in range(turn, ROWS, len(products)):
                    gatherer.pair(emit.integer(number))
            # Nobody reads this. A store of a tile that comes over half a microsecond after the last one takes a
            # quarter of one longer (measured on Granite Rapids); with one a step, those of the sums never do.
            tile.store(of_w[0], builder.add(gathered, unused), row_stride)

        def step(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            multiply(number, PRODUCTS)
            return []

        for each in sums[: 2 * n_rows]:
            tile.zero(each)
        emit.loop(steps, [], step)
        with builder.if_then(builder.icmp_signed("<", steps, all_steps)):
            multiply(steps, NARROW_PRODUCTS)
        for r in range(n_rows):
            for half in range(2):
                at = further(y, r * ROWS * TOKENS * 4 + half * ROW_BYTES)
                tile.store(sums[2 * r + half], at, emit.integer(TOKENS * 4))
        return context.get_dummy_value()

    return signature, generate


# ------------------------------------------------------------------------------------------------ results


class Finite:
    """Whether all sums were finite. If one was not, thirds may have made it so: y is to be computed by vectors."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.place = cgutils.alloca_once(emit.builder, emit.vector)
        emit.builder.store(emit.zeros(1)[0], self.place)

    def look_at(self, sums: Sequence[ir.Value]) -> None:
        """0 times infinity or NaN is NaN, and stays it."""
        known = self.emit.builder.load(self.place)
        for total in sums:
            known = self.emit.multiply_add(total, self.emit.zeros(1)[0], known)
        self.emit.builder.store(known, self.place)

    def tell(self, flag: ir.Value) -> None:
        """Write 1 to the int32 at an integer address if a sum was not finite."""
        builder = self.emit.builder
        known = builder.load(self.place)
        lanes = builder.bitcast(builder.fcmp_unordered("uno", known, known), I16)
        with builder.if_then(builder.icmp_unsigned("!=", lanes, ir.Constant(I16, 0)), likely=False):
            builder.store(ir.Constant(I32, 1), self.emit.pointer(flag, kind=I32))


def functions(emit: Emitter) -> list[Callable[[ir.Value], ir.Value] | None]:
    """The activations, by their codes."""
    return [None, emit.relu, emit.gelu]


@with_literals
def finish_tokens(
    typing_context: Any,
    source: Any,
    places: Any,
    bias: Any,
    activation: Any,
    tokens: Any,
    features: Any,
    target: Any,
    stride: Any,
    flag: Any,
) -> Any:
    """target[t, f] = activation(source[places[f], t] + bias[f]) for up to 16 tokens (>= 1), rows `stride` apart.

    source: float32, rows of 32 tokens, of which the first 16 are meant; places: uint32 (features); bias: float32
    (features), at least 16. flag: address of an int32, set to 1 if anything in the source is not finite.
    """
    signature = types.void(*([types.intp] * 9))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, places, bias, activation, tokens, features, target, stride, flag = args
        emit = Emitter(builder, ROWS, True)
        finite = Finite(emit)
        every_place, every_bias = emit.pointer(places, kind=I32), emit.pointer(bias)
        targets = [emit.row(target, t, tokens, stride) for t in range(ROWS)]

        def block(first: ir.Value) -> None:
            rows = []
            for f in range(ROWS):
                place = builder.load(builder.gep(every_place, [builder.add(first, emit.integer(f))]))
                behind = builder.mul(builder.zext(place, I64), emit.integer(TOKENS * 4))
                rows.append(emit.pointer(builder.add(source, behind)))
            sums = emit.transpose_at(rows)
            finite.look_at(sums)
            added = emit.load(builder.gep(every_bias, [first]), 0)
            done = [builder.fadd(total, added) for total in sums]

            def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
                # From the last to the first: those beyond are written to the last one, and then overwritten.
                for t in reversed(range(ROWS)):
                    value = done[t] if function is None else function(done[t])
                    emit.store(value, builder.gep(targets[t], [first]), 0)

            emit.choose(activation, {code: partial(store, it) for code, it in enumerate(functions(emit))})

        in_vectors(emit, features, block)
        finite.tell(flag)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def finish_features(
    typing_context: Any,
    source: Any,
    places: Any,
    bias: Any,
    activation: Any,
    tokens: Any,
    features: Any,
    target: Any,
    stride: Any,
    flag: Any,
) -> Any:
    """target[f, t] = activation(source[places[f], t] + bias[f]) for up to 32 tokens; else as `finish_tokens`."""
    signature = types.void(*([types.intp] * 9))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, places, bias, activation, tokens, features, target, stride, flag = args
        emit = Emitter(builder, ROWS, True)
        finite = Finite(emit)
        every_place, every_bias = emit.pointer(places, kind=I32), emit.pointer(bias)
        masks = [emit.mask(tokens), emit.mask(builder.sub(tokens, emit.integer(ROWS)))]

        def feature(f: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            place = builder.zext(builder.load(builder.gep(every_place, [f])), I64)
            at = emit.pointer(builder.add(source, builder.mul(place, emit.integer(TOKENS * 4))))
            added = emit.splat(builder.load(builder.gep(every_bias, [f])))
            there = emit.pointer(target, builder.mul(f, stride))
            sums = [emit.load_masked(at, half, masks[half]) for half in range(2)]
            finite.look_at(sums)

            def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
                for half, total in enumerate(sums):
                    value = builder.fadd(total, added)
                    emit.store_masked(value if function is None else function(value), there, half, masks[half])

            emit.choose(activation, {code: partial(store, it) for code, it in enumerate(functions(emit))})
            return []

        emit.loop(features, [], feature)
        finite.tell(flag)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def finish_positions(
    typing_context: Any,
    framed: Any,
    source: Any,
    rows: Any,
    row_ids: Any,
    bias: Any,
    activation: Any,
    keep: Any,
    added: Any,
    target: Any,
    stride: Any,
    flag: Any,
) -> Any:
    """target[row_ids[r] * stride + p] = activation(source[r, p] + bias[row_ids[r]]) for 32 positions of `rows` rows.

    source: float32 (rows, 32), what `matrix_tile` made of x that was not interleaved: in each 16 bytes four positions
    of the first half, or as far behind of the second. row_ids: int32 (rows), a negative one is not written.

    framed = 1: `added`, an address like target, is added (unless it is 0), and zero is written to positions whose
    bits in keep are not set; 16 of them of which none is set are not touched, as they may lie in another channel, or
    behind the array. framed = 0: both are not looked at. flag: as of `finish_tokens`.
    """
    signature = types.void(framed, *([types.intp] * 10))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        frames = int(signature.args[0].literal_value)
        source, rows, row_ids, bias, activation, keep, added, target, stride, flag = args[1:]
        emit = Emitter(builder, ROWS, True)
        finite = Finite(emit)
        ids, every_bias = emit.pointer(row_ids, kind=I32), emit.pointer(bias)
        # 128 bits of both halves in turns.
        orders = [[half * ROWS + 4 * q + j for q in quarters for half in (0, 1) for j in range(4)]
                  for quarters in ((0, 1), (2, 3))]  # fmt: skip
        shifted = [builder.lshr(keep, emit.integer(half * ROWS)) for half in (0, 1)]
        bits = [builder.and_(each, emit.integer(2**ROWS - 1)) for each in shifted]

        def row(r: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            number = builder.sext(builder.load(builder.gep(ids, [r])), I64)
            with builder.if_then(builder.icmp_signed(">=", number, emit.integer(0)), likely=True):
                at = emit.pointer(source, builder.mul(r, emit.integer(TOKENS)))
                mixed = [emit.load(at, half) for half in range(2)]
                bias_here = emit.splat(builder.load(builder.gep(every_bias, [number])))
                begin = builder.mul(number, stride)

                def vector(half: int) -> None:
                    order = ir.Constant(ir.VectorType(I32, ROWS), orders[half])
                    total = builder.shuffle_vector(*mixed, order)
                    finite.look_at([total])
                    if frames:
                        [total] = emit.continued(
                            added, [total], lambda: [emit.load(emit.pointer(added, begin), half)]
                        )
                    total = builder.fadd(total, bias_here)
                    there = emit.pointer(target, begin)

                    def store(function: Callable[[ir.Value], ir.Value] | None) -> None:
                        value = total if function is None else function(total)
                        emit.store(emit.kept(value, bits[half]) if frames else value, there, half)

                    emit.choose(activation, {code: partial(store, it) for code, it in enumerate(functions(emit))})

                for half in range(2):
                    if frames:
                        with builder.if_then(builder.icmp_unsigned("!=", bits[half], emit.integer(0)), likely=True):
                            vector(half)
                    else:
                        vector(half)
            return []

        emit.loop(rows, [], row)
        finite.tell(flag)
        return context.get_dummy_value()

    return signature, generate
