"""Keys and values of attention as bytes: what stands around the products of quads.

Keys are read less their mean, which changes no probability: all scores of a query move alike. Values are read less
their mean, which is added to the result: probabilities sum to 1. Both are then whole numbers of a smaller step
(Zhang et al. 2024, "SageAttention", section 4.2, for keys).
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import Matrix, TokenRows, Word
from sparse_kernels.cpu.codegen.vector_emitter import I32, Emitter
from sparse_kernels.formats.int8 import LARGEST, LEAST_STEP, MIDDLE, QUAD


class AverageForm(NamedTuple):
    """Rows of float32. lanes: of a vector. fused: multiply-adds are fused."""

    lanes: int
    fused: int


@vector_code(AverageForm)
def average_rows(
    builder: ir.IRBuilder, form: AverageForm, source: Matrix, rows: ir.Value, count: ir.Value, target: ir.Value
) -> None:
    """target[c] = the mean of source[r, c] over `rows` (>= 1) rows, for c < count."""
    emit = Emitter(builder, form.lanes, bool(form.fused))
    share = emit.splat(builder.fdiv(ir.Constant(ir.FloatType(), 1.0), builder.sitofp(rows, ir.FloatType())))
    first_row, averages = emit.pointer(source.address), emit.pointer(target)

    def tile(first: ir.Value, rest: ir.Value | None) -> None:
        mask = None if rest is None else emit.mask(rest)

        def add(r: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
            at = builder.gep(first_row, [builder.add(builder.mul(r, source.stride), first)])
            return [builder.fadd(total[0], emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask))]

        mean = builder.fmul(emit.loop(rows, emit.zeros(1), add)[0], share)
        place = builder.gep(averages, [first])
        if mask is None:
            emit.store(mean, place, 0)
        else:
            emit.store_masked(mean, place, 0, mask)

    emit.in_tiles(count, tile)


class ReadForm(NamedTuple):
    """Rows of float32 that are read as bytes, several at once. lanes: of a vector. fused: multiply-adds are fused."""

    rows: int
    lanes: int
    fused: int


class ByteRows(NamedTuple):
    """Where rows are left as bytes.

    address: of the first row. stride: bytes from one row to the next. steps: address of float32, what a step of each
    row is worth. means: address of what is taken from each row before; 0 takes nothing.
    """

    address: Word
    stride: Word
    steps: Word
    means: Word


@vector_code(ReadForm)
def read_rows(builder: ir.IRBuilder, form: ReadForm, source: TokenRows, target: ByteRows, count: ir.Value) -> None:
    """target[r, c] = round(source[r, c] / steps[r]) + 128 for c < count; 128 follows up to the next whole vector.

    steps[r] is the largest absolute value of the row over 127. The last row of the source is read again for those
    beyond it. A row that holds NaN or infinity gets that as its step.
    """
    emit = Emitter(builder, form.lanes, bool(form.fused))
    rows = [emit.row(source.address, r, source.left, source.stride) for r in range(form.rows)]
    bytes_at = emit.pointer(target.address, kind=ir.IntType(8))
    targets = [builder.gep(bytes_at, [builder.mul(target.stride, emit.integer(r))]) for r in range(form.rows)]
    whole = builder.and_(count, emit.integer(-form.lanes))
    rest = builder.sub(count, whole)

    def load(first: ir.Value, mask: ir.Value | None) -> list[ir.Value]:
        def read(at: ir.Value) -> ir.Value:
            return emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask)

        values = [read(builder.gep(row, [first])) for row in rows]

        def centred() -> list[ir.Value]:
            mean = read(builder.gep(emit.pointer(target.means), [first]))
            return [builder.fsub(value, mean) for value in values]

        return emit.either(target.means, centred, lambda: values)

    def larger(first: ir.Value, most: list[ir.Value], mask: ir.Value | None = None) -> list[ir.Value]:
        return [emit.larger(a, emit.absolute(b)) for a, b in zip(most, load(first, mask), strict=True)]

    most = emit.loop(whole, emit.zeros(form.rows), larger, stride=form.lanes)
    most = emit.either(rest, lambda: larger(whole, most, emit.mask(rest)), lambda: most)
    inverses = []
    for r, each in enumerate(most):
        step = _find_step(emit, emit.over_lanes(each, emit.larger))
        at = builder.gep(emit.pointer(target.steps), [emit.integer(r)])
        builder.store(builder.extract_element(step, ir.Constant(I32, 0)), at)
        inverses.append(builder.fdiv(emit.constant(1.0), step))

    def tile(first: ir.Value, left: ir.Value | None) -> None:
        values = load(first, None if left is None else emit.mask(left))
        for at, value, inverse in zip(targets, values, inverses, strict=True):
            narrow = emit.to_bytes(emit.multiply_add(value, inverse, emit.constant(float(MIDDLE))))
            place = builder.bitcast(builder.gep(at, [first]), narrow.type.as_pointer())
            builder.store(narrow, place, align=1)

    emit.in_tiles(count, tile)


class PanelForm(NamedTuple):
    """A panel of quads, `vectors` vectors wide.

    lanes: of a vector. vectors: of the panel. fused: multiply-adds are fused. numbers: how quads are multiplied.
    """

    lanes: int
    vectors: int
    fused: int
    numbers: int


@vector_code(PanelForm)
def sign_key_panel(
    builder: ir.IRBuilder, form: PanelForm, panel: ir.Value, count: ir.Value, offsets: ir.Value
) -> None:
    """Turn `count` rows of quads from 0 to 255 into whole numbers with a sign, in place: less 128 each.

    offsets: what sums of queries with these keys, whose zero is 128, are too large by, as int32 with a minus.
    """
    emit = Emitter(builder, form.lanes, bool(form.fused))
    quads_at, offsets_at = emit.pointer(panel), emit.pointer(offsets)
    middle = emit.splat(ir.Constant(I32, _repeat(MIDDLE)))

    def row(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = builder.gep(quads_at, [builder.mul(c, emit.integer(form.vectors * form.lanes))])
        signed = [_flip(emit, emit.load(at, v)) for v in range(form.vectors)]
        for v, quads in enumerate(signed):
            emit.store(quads, at, v)
        return [
            emit.multiply_quads(middle, quads, total, form.numbers) for quads, total in zip(signed, sums, strict=True)
        ]

    for v, total in enumerate(emit.loop(count, emit.zeros(form.vectors), row)):
        whole = builder.bitcast(total, ir.VectorType(I32, form.lanes))
        emit.store(builder.bitcast(builder.neg(whole), emit.vector), offsets_at, v)


class ValueSteps(NamedTuple):
    """How values are read. means: address of what is taken from them, by outputs. steps: address of their steps."""

    means: Word
    steps: Word


@vector_code(PanelForm)
def lay_out_value_panel(
    builder: ir.IRBuilder,
    form: PanelForm,
    source: Matrix,
    keys: ir.Value,
    left: ir.Value,
    target: ir.Value,
    reading: ValueSteps,
) -> None:
    """target[q, v] = the bytes of outputs v of keys 4q to 4q + 3, less their mean, in steps of each output.

    keys: rows of the source. left: outputs from the first one on; beyond them zeros are read. The last key is read
    again up to a whole quad: its probabilities there are 0. Leaves the steps.
    """
    emit = Emitter(builder, form.lanes, bool(form.fused))
    rows_at, target_at = emit.pointer(source.address), emit.pointer(target)
    masks = [emit.mask(builder.sub(left, emit.integer(v * form.lanes))) for v in range(form.vectors)]
    means = [emit.load_masked(emit.pointer(reading.means), v, mask) for v, mask in enumerate(masks)]

    def load(key: ir.Value) -> list[ir.Value]:
        at = builder.gep(rows_at, [builder.mul(key, source.stride)])
        return [builder.fsub(emit.load_masked(at, v, masks[v]), means[v]) for v in range(form.vectors)]

    def larger(key: ir.Value, most: list[ir.Value]) -> list[ir.Value]:
        return [emit.larger(a, emit.absolute(b)) for a, b in zip(most, load(key), strict=True)]

    inverses = []
    for v, most in enumerate(emit.loop(keys, emit.zeros(form.vectors), larger)):
        step = _find_step(emit, most)
        emit.store(step, emit.pointer(reading.steps), v)
        inverses.append(builder.fdiv(emit.constant(1.0), step))
    last = builder.sub(keys, emit.integer(1))

    def quad(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        loaded = []
        for i in range(QUAD):
            key = builder.add(first, emit.integer(i))
            loaded.append(load(builder.select(builder.icmp_signed("<", last, key), last, key)))
        at = builder.gep(target_at, [builder.mul(first, emit.integer(form.vectors * form.lanes // QUAD))])
        for v, inverse in enumerate(inverses):
            joined = emit.join_quads([row[v] for row in loaded], inverse, emit.constant(float(MIDDLE)))
            emit.store(_flip(emit, joined), at, v)
        return []

    emit.loop(keys, [], quad, stride=QUAD)


def _find_step(emit: Emitter, most: ir.Value) -> ir.Value:
    """Return the step of which the largest absolute value is 127; NaN or infinity for such a value."""
    step, least = emit.builder.fmul(most, emit.constant(1 / LARGEST)), emit.constant(LEAST_STEP)
    return emit.builder.select(emit.builder.fcmp_ordered("<", step, least), least, step)


def _flip(emit: Emitter, quads: ir.Value) -> ir.Value:
    """Return bytes from 0 to 255 less 128, as bytes with a sign."""
    builder, wide = emit.builder, ir.VectorType(I32, emit.lanes)
    middle = ir.Constant(wide, [_repeat(MIDDLE)] * emit.lanes)
    return builder.bitcast(builder.xor(builder.bitcast(quads, wide), middle), emit.vector)


def _repeat(byte: int) -> int:
    """Return the 32 bits that hold a byte four times."""
    return byte * 0x01010101
