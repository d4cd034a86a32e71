"""Emit max pooling: first over rows, into a line that waits in the first-level cache, then along that line."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import Word
from sparse_kernels.cpu.codegen.vector_emitter import Emitter


class PoolForm(NamedTuple):
    """A window along a line. lanes: of a vector. taps: elements of the window. stride: of windows, 1 or 2."""

    lanes: int
    taps: int
    stride: int


class PooledRows(NamedTuple):
    """Rows under each other, of which the largest is taken.

    address: of the first. stride: elements to the next. count: rows, at least 1. length: elements of each.
    """

    address: Word
    stride: Word
    count: Word
    length: Word


class PoolLine(NamedTuple):
    """Room for the largest of rows.

    address: where the first element goes. begin: address of the first window. What lies between, and behind the
    elements as far as windows reach, is minus infinity.
    """

    address: Word
    begin: Word


@vector_code(PoolForm)
def pool_rows(
    builder: ir.IRBuilder, form: PoolForm, rows: PooledRows, line: PoolLine, target: ir.Value, count: ir.Value
) -> None:
    """target[i] = the largest of all rows in window i, for i < count; NaN if one is in it.

    Of the line two vectors more are read.
    """
    emit = Emitter(builder, form.lanes, False)
    source, waiting = emit.pointer(rows.address), emit.pointer(line.address)

    def over_rows(first: ir.Value, rest: ir.Value | None) -> None:
        mask = None if rest is None else emit.mask(rest)

        def load(row: ir.Value) -> ir.Value:
            at = builder.gep(source, [builder.add(builder.mul(row, rows.stride), first)])
            return emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask)

        def step(row: ir.Value, largest: list[ir.Value]) -> list[ir.Value]:
            return [emit.larger(largest[0], load(row))]

        (largest,) = emit.loop(rows.count, [load(emit.integer(0))], step, start=emit.integer(1))
        place = builder.gep(waiting, [first])
        if mask is None:
            emit.store(largest, place, 0)
        else:
            emit.store_masked(largest, place, 0, mask)

    emit.in_tiles(rows.length, over_rows)
    begin, results = emit.pointer(line.begin), emit.pointer(target)

    def along_line(first: ir.Value, rest: ir.Value | None) -> None:
        largest = None
        for tap in range(form.taps):
            at = builder.gep(begin, [builder.add(builder.mul(first, emit.integer(form.stride)), emit.integer(tap))])
            here = emit.load(at, 0) if form.stride == 1 else emit.every_other(emit.load(at, 0), emit.load(at, 1))
            largest = here if largest is None else emit.larger(largest, here)
        place = builder.gep(results, [first])
        if rest is None:
            emit.store(largest, place, 0)
        else:
            emit.store_masked(largest, place, 0, emit.mask(rest))

    emit.in_tiles(count, along_line)
