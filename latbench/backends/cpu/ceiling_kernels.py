"""Numba loops that keep the arithmetic units, or the loads, of every thread as busy as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.intrinsics import with_literals
from sparse_kernels.cpu.codegen.vector_emitter import (
    FLOATS,
    PAIRS_BY_UNIT,
    QUADS,
    QUADS_BY_SIGNED,
    QUADS_BY_UNIT,
    Emitter,
)
from sparse_kernels.cpu.matrix_unit import byte_tiles, third_tiles
from sparse_kernels.formats.int8 import QUAD

SUMS = 12  # registers that are added to in turn: beyond latency x units, and fewer than any target has
STEPS = 1_000_000  # of a chain: some milliseconds, beside which waking threads up does not count
LEAST_READ = 2**23  # floats that a thread reads at least: what is smaller is read again
PRODUCTS_PER_FLOAT = len(third_tiles.PRODUCTS)  # products of bfloat16 that make one of float32


@with_literals
def _chains(typing_context: Any, lanes: Any, fused: Any, numbers: Any, steps: Any, factor: Any) -> Any:
    """Return the sum of SUMS chains of `steps` multiply-adds s = s * factor + factor.

    They are of floats, of pairs of bfloat16, or of quads of bytes.
    """
    signature = types.float32(lanes, fused, numbers, types.intp, types.float32)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        lanes, fused, kind = (int(literal.literal_value) for literal in signature.args[:3])
        emit = Emitter(builder, lanes, bool(fused))
        factors = emit.splat(args[4])

        def step(_: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            if kind == FLOATS:
                return [emit.multiply_add(total, factors, factors) for total in sums]
            if kind in QUADS:
                # Where products are added by an instruction of their own, they must not be the same in each step.
                by_unit = kind in (QUADS_BY_SIGNED, QUADS_BY_UNIT)
                return [emit.multiply_quads(factors if by_unit else total, factors, total, kind) for total in sums]
            return [emit.multiply_pairs(factors, factors, total, kind) for total in sums]

        return _together(emit, emit.loop(args[3], emit.zeros(SUMS), step))

    return signature, generate


@with_literals
def _added(typing_context: Any, lanes: Any, fused: Any, address: Any, steps: Any) -> Any:
    """Return the sum of `steps` times SUMS vectors at an address."""
    signature = types.float32(lanes, fused, types.intp, types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        lanes, fused = (int(literal.literal_value) for literal in signature.args[:2])
        emit = Emitter(builder, lanes, bool(fused))
        start = emit.pointer(args[2])

        def step(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            at = builder.gep(start, [builder.mul(i, emit.integer(SUMS * emit.lanes))])
            return [builder.fadd(total, emit.load(at, v)) for v, total in enumerate(sums)]

        return _together(emit, emit.loop(args[3], emit.zeros(SUMS), step))

    return signature, generate


@with_literals
def _tiles(typing_context: Any, of_bytes: Any, saved: Any, steps: Any) -> Any:
    """Multiply `steps` times four tiles of zeros; `saved` is as `tile_registers.configure_tiles` takes it."""
    signature = types.void(of_bytes, types.intp, types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        of_bytes, (_, saved, steps) = signature.args[0].literal_value, args
        emit = Emitter(builder, _LANES, True)
        tiles = tile_registers.AmxTileRegisters(emit)
        multiply = tiles.multiply_bytes if of_bytes else tiles.multiply
        tiles.begin(saved)
        for tile in range(8):
            tiles.zero(tile)

        def step(_: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for total in range(4):
                multiply(total, 4 + total // 2, 6 + total % 2)
            return sums

        emit.loop(steps, [], step)
        tiles.end(saved)
        return context.get_dummy_value()

    return signature, generate


def _together(emit: Emitter, sums: list[ir.Value]) -> ir.Value:
    """Return one lane of the sum of vectors, which is enough to keep all of them in the code."""
    whole = sums[0]
    for total in sums[1:]:
        whole = emit.builder.fadd(whole, total)
    return emit.builder.extract_element(whole, emit.integer(0))


_TARGET = find_cpu_target()
_LANES, _FUSED, _NUMBERS = _TARGET.lanes, int(_TARGET.fused), _TARGET.quads


@njit(parallel=True, nogil=True)
def _multiply_adds(results: NDArray[np.float32], steps: int, factor: float) -> None:
    for i in prange(len(results)):
        results[i] = _chains(_LANES, _FUSED, FLOATS, steps, factor)


@njit(parallel=True, nogil=True)
def _multiply_pairs(results: NDArray[np.float32], steps: int, factor: float) -> None:
    for i in prange(len(results)):
        results[i] = _chains(_LANES, _FUSED, PAIRS_BY_UNIT, steps, factor)


@njit(parallel=True, nogil=True)
def _multiply_quads(results: NDArray[np.float32], steps: int, factor: float) -> None:
    for i in prange(len(results)):
        results[i] = _chains(_LANES, _FUSED, _NUMBERS, steps, factor)


@njit(parallel=True, nogil=True)
def _reads(results: NDArray[np.float32], x: NDArray[np.float32], each: int, times: int) -> None:
    for i in prange(len(results)):
        for _ in range(times):
            results[i] += _added(_LANES, _FUSED, x.ctypes.data + 4 * each * i, each // (SUMS * _LANES))


@njit(parallel=True, nogil=True)
def _matrix_products(saved: NDArray[np.uint8], steps: int) -> None:
    for i in prange(len(saved)):
        _tiles(0, saved.ctypes.data + 64 * i, steps)


@njit(parallel=True, nogil=True)
def _matrix_bytes(saved: NDArray[np.uint8], steps: int) -> None:
    for i in prange(len(saved)):
        _tiles(1, saved.ctypes.data + 64 * i, steps)


def run_matrix_products(threads: int) -> int:
    """Keep the matrix units of `threads` threads busy, and return the number of bfloat16 operations.

    The factors are zeros, which may allow a higher clock than numbers do.
    """
    _matrix_products(np.zeros((threads, 64), np.uint8), STEPS)
    return 4 * 2 * tile_registers.ROWS * tile_registers.ROWS * third_tiles.STEP * STEPS * threads


def run_matrix_bytes(threads: int) -> int:
    """Do the same with bytes, which are twice as many operations."""
    _matrix_bytes(np.zeros((threads, 64), np.uint8), STEPS)
    return 4 * 2 * tile_registers.ROWS * tile_registers.ROWS * byte_tiles.STEP * QUAD * STEPS * threads


def run_multiply_adds(threads: int) -> int:
    """Keep the vector units of `threads` threads busy with chains in registers, and return the number of operations.

    Each lane does a multiplication and an addition.
    """
    _multiply_adds(np.zeros(threads, np.float32), STEPS, 0.5)
    return 2 * SUMS * _LANES * STEPS * threads


def run_multiply_pairs(threads: int) -> int:
    """Do the same with pairs of bfloat16, which are twice as many operations, on a processor that has them."""
    _multiply_pairs(np.zeros(threads, np.float32), STEPS, 0.5)
    return 2 * 2 * SUMS * _LANES * STEPS * threads


def run_multiply_quads(threads: int) -> int:
    """Do the same with quads of bytes, by the unit that the processor multiplies them with."""
    _multiply_quads(np.zeros(threads, np.float32), STEPS, 0.5)
    return 2 * QUAD * SUMS * _LANES * STEPS * threads


def run_reads(x: NDArray[np.float32], threads: int) -> int:
    """Read float32 `x`, each of `threads` threads its own part, at least LEAST_READ floats; return the bytes read."""
    results = np.zeros(threads, np.float32)
    unit = SUMS * _LANES
    each = len(x) // threads // unit * unit
    times = max(1, LEAST_READ // each)
    _reads(results, x, each, times)
    return 4 * each * threads * times
