"""Softmax of several rows at once: one row alone would wait for its own sums and maxima."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import TokenRows
from sparse_kernels.cpu.codegen.vector_emitter import I32, Emitter
from sparse_kernels.formats.int8 import STEPS

ROUNDING = 1.5 * 2.0**23
"""Added to a float from -2**22 to 2**22, this leaves the nearest whole number in its lowest bits."""

LOG2_E = 1.4426950408889634

POWER_OF_TWO = (0.05459282809513824, 0.24221838035275794, 0.6933686887483973, 1.0)
"""Coefficients of 2**r for |r| <= 0.5, from the highest power down, by least squares of the relative error.

It is below 1.2e-4, which is 3% of one step of 255."""

LEAST_POWER = -20.0
"""2**LEAST_POWER is far below half a step of 255."""

SOFTMAX_ROWS = 4
"""Rows at once: as many as keep a vector unit busy, and fit 16 registers."""

BYTE = ir.IntType(8)


class SoftmaxForm(NamedTuple):
    """Softmax of rows.

    rows: at once. lanes: of a vector. fused: multiply-adds are fused. in_bytes: leave bytes.
    """

    rows: int
    lanes: int
    fused: int
    in_bytes: int


@vector_code(SoftmaxForm)
def softmax(
    builder: ir.IRBuilder, form: SoftmaxForm, scores: TokenRows, count: ir.Value, scale: ir.Value, worth: ir.Value
) -> None:
    """row[i] = exp(scale * row[i] - most) over their sum, for i < count, in place; 0 up to the next whole vector.

    most: the largest scaled value. Rows beyond the last one of `scores` are that one again.

    Bytes are round(255 * exp(scale * row[i] - most)), at the beginning of their row. worth: address of what a step of
    each row is worth, float32: 1 / the sum of its bytes, so that probabilities sum to 1; NaN where a value is.
    """
    emit, n_rows = Emitter(builder, form.lanes, bool(form.fused)), form.rows
    rows = [emit.row(scores.address, r, scores.left, scores.stride) for r in range(n_rows)]
    bytes_of_rows = [builder.bitcast(row, BYTE.as_pointer()) for row in rows]
    factor, rounding, minus_infinity = emit.splat(scale), emit.constant(ROUNDING), emit.constant(-math.inf)
    if form.in_bytes:
        factor = builder.fmul(factor, emit.constant(LOG2_E))
    whole = builder.and_(count, emit.integer(-form.lanes))
    rest = builder.sub(count, whole)

    def in_vectors(start: list[ir.Value], step: Callable[..., list[ir.Value]]) -> list[ir.Value]:
        """Return `start` after step(first, carried) for whole vectors, then after step(first, carried, mask)."""
        carried = emit.loop(whole, start, step, stride=form.lanes)
        return emit.either(rest, lambda: step(whole, carried, emit.mask(rest)), lambda: carried)

    def load_scaled(first: ir.Value, mask: ir.Value | None) -> list[ir.Value]:
        scaled = [builder.fmul(emit.load(builder.gep(row, [first]), 0), factor) for row in rows]
        return scaled if mask is None else [builder.select(mask, value, minus_infinity) for value in scaled]

    def larger(first: ir.Value, most: list[ir.Value], mask: ir.Value | None = None) -> list[ir.Value]:
        return [emit.maximum(a, b) for a, b in zip(most, load_scaled(first, mask), strict=True)]

    most = [emit.over_lanes(each, emit.maximum) for each in in_vectors([minus_infinity] * n_rows, larger)]

    least, steps = emit.constant(LEAST_POWER), emit.constant(float(STEPS))

    def raised(first: ir.Value, total: list[ir.Value], mask: ir.Value | None = None) -> list[ir.Value]:
        below = [builder.fsub(a, b) for a, b in zip(load_scaled(first, mask), most, strict=True)]
        if form.in_bytes:
            below = [builder.select(builder.fcmp_ordered("<", each, least), least, each) for each in below]
            shifted = [emit.multiply_add(_raise_two(emit, each), steps, rounding) for each in below]
            for at, each in zip(bytes_of_rows, shifted, strict=True):  # where floats lay that have been read
                narrow = builder.trunc(
                    builder.bitcast(each, ir.VectorType(I32, form.lanes)), ir.VectorType(BYTE, form.lanes)
                )
                place = builder.bitcast(builder.gep(at, [first]), narrow.type.as_pointer())
                builder.store(narrow, place, align=1)
            # Zero times what is no number keeps it in the total: `_raise_two` would lose it.
            total = [emit.multiply_add(each, emit.constant(0.0), a) for each, a in zip(below, total, strict=True)]
            values = [builder.fsub(each, rounding) for each in shifted]
        else:
            values = [emit.exp(each) for each in below]
            for row, value in zip(rows, values, strict=True):
                emit.store(value, builder.gep(row, [first]), 0)
        return [builder.fadd(a, b) for a, b in zip(total, values, strict=True)]

    totals = [emit.over_lanes(each, builder.fadd) for each in in_vectors(emit.zeros(n_rows), raised)]
    inverses = [builder.fdiv(emit.constant(1.0), total) for total in totals]
    if form.in_bytes:
        for r, inverse in enumerate(inverses):
            one = builder.extract_element(inverse, ir.Constant(I32, 0))
            builder.store(one, emit.row(worth, r, scores.left, emit.integer(1)))
        return

    def divided(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        places = [builder.gep(row, [first]) for row in rows]
        values = [emit.load(at, 0) for at in places]
        for at, value, inverse in zip(places, values, inverses, strict=True):
            emit.store(builder.fmul(value, inverse), at, 0)
        return []

    emit.loop(count, [], divided, stride=form.lanes)


def _raise_two(emit: Emitter, x: ir.Value) -> ir.Value:
    """Return 2**x for LEAST_POWER <= x <= 0, within 1.2e-4 of it; anything for NaN."""
    builder, wide = emit.builder, ir.VectorType(I32, emit.lanes)
    shifted = builder.fadd(x, emit.constant(ROUNDING))
    r = builder.fsub(x, builder.fsub(shifted, emit.constant(ROUNDING)))
    power = emit.constant(POWER_OF_TWO[0])
    for coefficient in POWER_OF_TWO[1:]:
        power = emit.multiply_add(power, r, emit.constant(coefficient))
    # The whole number lies in the lowest bits of `shifted`: it is added to the exponent.
    exponent = builder.shl(builder.bitcast(shifted, wide), ir.Constant(wide, [23] * emit.lanes))
    return builder.bitcast(builder.add(builder.bitcast(power, wide), exponent), emit.vector)
