"""Emit layer norm of a row: three passes over it, of which the last two find it in the first-level cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import Word
from sparse_kernels.cpu.codegen.vector_emitter import Emitter
from sparse_kernels.cpu.runtime.numba_internals import cgutils

SETS = 4
"""Sums that take turns, as many as keep an adder busy."""


class NormForm(NamedTuple):
    """Vectors of a norm. lanes: of a vector. fused: multiply-adds are fused. adds: 1 if something is added before."""

    lanes: int
    fused: int
    adds: int


class NormRow(NamedTuple):
    """A row that is normalised.

    source: address of its elements. added: address of what is added to them; looked at only by a form that adds.
    target: address of the result. count: elements.
    """

    source: Word
    added: Word
    target: Word
    count: Word


class NormWeights(NamedTuple):
    """What a normalised row becomes. gain, shift: addresses of a factor and a summand for each element."""

    gain: Word
    shift: Word


@vector_code(NormForm)
def normalize_row(
    builder: ir.IRBuilder, form: NormForm, row: NormRow, weights: NormWeights, epsilon: ir.Value
) -> None:
    """target[i] = (x[i] - mean) / sqrt(variance + epsilon) * gain[i] + shift[i], x the row and what is added."""
    emit = Emitter(builder, form.lanes, bool(form.fused))
    source, added, target = (emit.pointer(at) for at in (row.source, row.added, row.target))
    gain, shift = emit.pointer(weights.gain), emit.pointer(weights.shift)
    elements = emit.splat(builder.sitofp(row.count, emit.vector.element))

    def joined(first: ir.Value, mask: ir.Value | None) -> ir.Value:
        x = _load(emit, source, first, mask)
        if form.adds:
            x = builder.fadd(x, _load(emit, added, first, mask))
        _store(emit, x, target, first, mask)  # where the other passes find it
        return x

    def squared(first: ir.Value, mask: ir.Value | None) -> ir.Value:
        x = builder.fsub(_load(emit, target, first, mask), mean)
        x = x if mask is None else builder.select(mask, x, ir.Constant(emit.vector, None))
        return builder.fmul(x, x)

    def finished(first: ir.Value, rest: ir.Value | None) -> None:
        mask = None if rest is None else emit.mask(rest)
        x = builder.fmul(builder.fsub(_load(emit, target, first, mask), mean), inverse)
        y = emit.multiply_add(x, _load(emit, gain, first, mask), _load(emit, shift, first, mask))
        _store(emit, y, target, first, mask)

    mean = builder.fdiv(_sum_up(emit, row.count, joined), elements)
    variance = builder.fdiv(_sum_up(emit, row.count, squared), elements)
    kind = ir.FunctionType(emit.vector, [emit.vector])
    root = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{emit.lanes}f32")
    spread = builder.call(root, [builder.fadd(variance, emit.splat(epsilon))])
    inverse = builder.fdiv(emit.constant(1.0), spread)
    emit.in_tiles(row.count, finished)


def _sum_up(emit: Emitter, count: ir.Value, term: Callable[[ir.Value, ir.Value | None], ir.Value]) -> ir.Value:
    """Return the sum of term(first, mask) over all vectors of a row, in all lanes; a mask names those of the last."""
    builder, n = emit.builder, emit.lanes
    whole, together = builder.and_(count, emit.integer(-n)), builder.and_(count, emit.integer(-n * SETS))

    def several(first: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        places = [builder.add(first, emit.integer(i * n)) for i in range(SETS)]
        return [builder.fadd(total, term(place, None)) for total, place in zip(sums, places, strict=True)]

    def one(first: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        return [builder.fadd(sums[0], term(first, None))]

    def rest(first: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        return [builder.fadd(sums[0], term(first, emit.mask(builder.sub(count, first))))]

    first, *others = emit.loop(together, emit.zeros(SETS), several, stride=n * SETS)
    for other in others:
        first = builder.fadd(first, other)
    (total,) = emit.loop(whole, [first], one, start=together, stride=n)
    (total,) = emit.loop(count, [total], rest, start=whole, stride=n)
    return emit.over_lanes(total, builder.fadd)


def _load(emit: Emitter, at: ir.Value, first: ir.Value, mask: ir.Value | None) -> ir.Value:
    place = emit.builder.gep(at, [first])
    return emit.load(place, 0) if mask is None else emit.load_masked(place, 0, mask)


def _store(emit: Emitter, x: ir.Value, at: ir.Value, first: ir.Value, mask: ir.Value | None) -> None:
    place = emit.builder.gep(at, [first])
    if mask is None:
        emit.store(x, place, 0)
    else:
        emit.store_masked(x, place, 0, mask)
