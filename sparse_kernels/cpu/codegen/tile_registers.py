"""The matrix unit of Intel's server processors since 2023 (AMX): its tiles, emitted, and emulated elsewhere.

There are eight tiles of 16 rows of 64 bytes. A multiplication takes 16 cycles. It is one of bfloat16 (TDPBF16PS):

    c[i, j] += sum over p of a[i, p, 0] * b[p, j, 0] + a[i, p, 1] * b[p, j, 1]      c float32 (16, 16)
                                                                                  a, b bfloat16 (16, 16, 2)

or one of bytes, of a with a sign, of b from 0 to 255 (TDPBSUD), with twice as many products:

    c[i, j] += sum over p, q of a[i, p, q] * b[p, j, q]      c int32 (16, 16), a int8, b uint8 (16, 16, 4)

The tiles of a thread have to be configured before they are used, and a process has to ask the kernel for them. From
then on a signal's alternative stack must be large enough to hold them, in all of the process.

Emulated tiles do the same with vectors and memory, slowly, on any processor: for tests of everything around them.
Floats are summed in another order there, and numbers below 2**-126 count.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from llvmlite import binding, ir

from sparse_kernels.cpu.codegen.bf16_split import UPPER
from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, QUADS_BY_BYTE, Emitter
from sparse_kernels.cpu.runtime.numba_internals import cgutils, read_compile_target

# Rows of a tile, its bytes, and those of a row.
ROWS, TILE_BYTES, ROW_BYTES = 16, 1024, 64

# Bytes that `configure_tiles` keeps: 64 of LDTILECFG, and a cache line more, so that threads do not share one.
SAVED_BYTES = 128

# The system call of Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

# Palette 1 (16 rows of 64 bytes in every tile), in the layout that LDTILECFG reads. Bytes 16 to 31 hold the bytes of
# a row as int16. Bytes 48 to 55 hold the numbers of rows.
_CONFIGURATION = bytes([1] + [0] * 15 + [ROW_BYTES, 0] * 8 + [0] * 16 + [ROWS] * 8 + [0] * 8)

I8 = ir.IntType(8)


@cache
def is_available() -> bool:
    """Return whether code of this process may use the tiles; asks the operating system for them, once a process."""
    triple, _, has = read_compile_target()
    if not (
        {"amx-tile", "amx-bf16", "amx-int8", "avx512bw"} <= has
        and "linux" in triple
        and platform.machine() == "x86_64"
    ):
        return False
    status: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    return status == 0


def count_row_tiles(height: int) -> int | None:
    """Return the tiles of rows in a panel of groups of `height` rows; None where they would be filled up by over a
    quarter."""
    for tiles in (2, 1):
        rows = tiles * ROWS
        if 0 < -(-height // rows) * rows * 4 <= height * 5:
            return tiles
    return None


class AmxTileRegisters:
    """Eight tile registers: what the processor has, in assembly. A stride is in bytes, from one row to the next."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        # LLVM does not initialize its assembly parser by itself.
        binding.initialize_native_asmparser()

    def zero(self, tile: int) -> None:
        """Set tile = 0."""
        self._assembly(f"tilezero %tmm{tile}", [])

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Read a tile from an integer address."""
        self._assembly(f"tileloadd ($0,$1,1), %tmm{tile}", [address, stride])

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Write a tile to an integer address."""
        self._assembly(f"tilestored %tmm{tile}, ($0,$1,1)", [address, stride])

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add: c += a b, of bfloat16, as above."""
        self._assembly(f"tdpbf16ps %tmm{b}, %tmm{a}, %tmm{c}", [])

    def multiply_bytes(self, c: int, a: int, b: int) -> None:
        """Add: c += a b, of bytes, as above."""
        self._assembly(f"tdpbsud %tmm{b}, %tmm{a}, %tmm{c}", [])

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
        """Set tile = 0."""
        for row in range(ROWS):
            self.emit.store(self.emit.zeros(1)[0], self._row(tile, row), 0)

    def load(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Read a tile from an integer address."""
        for row in range(ROWS):
            self.emit.store(self.emit.load(self._far(address, stride, row), 0), self._row(tile, row), 0)

    def store(self, tile: int, address: ir.Value, stride: ir.Value) -> None:
        """Write a tile to an integer address."""
        for row in range(ROWS):
            self.emit.store(self.emit.load(self._row(tile, row), 0), self._far(address, stride, row), 0)

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add: c += a b, of bfloat16."""
        emit, builder = self.emit, self.emit.builder
        wide = ir.VectorType(I32, emit.lanes)
        shift, upper = ir.Constant(wide, [16] * emit.lanes), ir.Constant(wide, [UPPER] * emit.lanes)

        def both(pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
            first, second = builder.shl(pairs, shift), builder.and_(pairs, upper)
            return builder.bitcast(first, emit.vector), builder.bitcast(second, emit.vector)

        def add(pair: ir.Value, others: ir.Value, total: ir.Value) -> ir.Value:
            for factor, other in zip(both(pair), both(builder.bitcast(others, wide)), strict=True):
                total = builder.fadd(total, builder.fmul(factor, other))
            return total

        self._add_products(c, a, b, add)

    def multiply_bytes(self, c: int, a: int, b: int) -> None:
        """Add: c += a b, of bytes."""
        self._add_products(
            c, a, b, lambda quad, others, total: self.emit.multiply_quads(others, quad, total, QUADS_BY_BYTE)
        )

    def _add_products(self, c: int, a: int, b: int, add: Callable[[ir.Value, ir.Value, ir.Value], ir.Value]) -> None:
        """Add to each row of c, for each 32 bits of a row of a, their products with a row of b."""
        emit, builder = self.emit, self.emit.builder

        def row(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            behind = builder.mul(i, emit.integer(ROW_BYTES))
            there = emit.pointer(builder.add(self.places[c], behind))
            factors = emit.pointer(builder.add(self.places[a], behind), kind=I32)
            total = emit.load(there, 0)
            for p in range(ROWS):
                several = emit.splat(builder.load(builder.gep(factors, [emit.integer(p)])))
                total = add(several, emit.load(self._row(b, p), 0), total)
            emit.store(total, there, 0)
            return []

        emit.loop(emit.integer(ROWS), [], row)

    def begin(self, saved: ir.Value) -> None:
        """Do nothing: vectors need no configuration."""

    def end(self, saved: ir.Value) -> None:
        """Do nothing: vectors need no configuration."""

    def _row(self, tile: int, row: int) -> ir.Value:
        return self.emit.pointer(self.emit.builder.add(self.places[tile], self.emit.integer(row * ROW_BYTES)))

    def _far(self, address: ir.Value, stride: ir.Value, row: int) -> ir.Value:
        builder = self.emit.builder
        return self.emit.pointer(builder.add(address, builder.mul(stride, self.emit.integer(row))))


def select_tile_registers(emit: Emitter, emulated: int) -> AmxTileRegisters:
    """Return the tile registers of the processor, or emulated ones."""
    return EmulatedTileRegisters(emit) if emulated else AmxTileRegisters(emit)


class UnitForm(NamedTuple):
    """Which matrix unit runs. emulated: by vectors and memory."""

    emulated: int


@vector_code(UnitForm)
def configure_tiles(builder: ir.IRBuilder, form: UnitForm, saved: ir.Value) -> None:
    """Configure the tiles of this thread; saved: address of 64 bytes for `restore_tiles`."""
    select_tile_registers(Emitter(builder, ROWS, True), form.emulated).begin(saved)


@vector_code(UnitForm)
def restore_tiles(builder: ir.IRBuilder, form: UnitForm, saved: ir.Value) -> None:
    """Configure the tiles as they were before `configure_tiles`."""
    select_tile_registers(Emitter(builder, ROWS, True), form.emulated).end(saved)
