"""Read rows of float32 as bytes: x ~ scale * (q - zero), q from 0 to 255 (`formats.int8`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import QuadWorth, Word
from sparse_kernels.cpu.codegen.vector_emitter import I32, Emitter
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.formats.int8 import LARGEST, LEAST_STEP, MIDDLE

BYTE = ir.IntType(8)


@inline
def locate_worth(quads: Any, row: int, steps_at: int) -> QuadWorth:
    """Return what sums are worth from this row of the panels on; quads: `QuadArrays`; steps_at: of tokens, or 0."""
    return QuadWorth(quads.offsets.ctypes.data + row * 4, quads.scales.ctypes.data + row * 4, steps_at)


class QuantizeForm(NamedTuple):
    """How a row is read.

    lanes: of a vector. fused: multiply-adds are fused. own: by the row's own largest absolute value.
    """

    lanes: int
    fused: int
    own: int


@vector_code(QuantizeForm)
def quantize_row(
    builder: ir.IRBuilder,
    form: QuantizeForm,
    source: ir.Value,
    target: ir.Value,
    count: ir.Value,
    reading: ir.Value,
    step: ir.Value,
) -> None:
    """target[c] = min(max(round(source[c] / scale) + zero, 0), 255) for c < count; up to a vector more is written.

    reading: address of float32 (2), 1 / scale and zero. step: where a row read by its own largest value leaves its
    scale. NaN becomes 0; a row read by its own value that holds NaN or infinity gets that as its scale.
    """
    emit = Emitter(builder, form.lanes, bool(form.fused))
    at, bytes_at = emit.pointer(source), emit.pointer(target, kind=BYTE)
    if form.own:
        inverse, zero = _find_own_step(emit, at, count, emit.pointer(step)), emit.constant(MIDDLE)
    else:
        known = emit.pointer(reading)
        inverse, zero = (emit.splat(builder.load(builder.gep(known, [emit.integer(i)]))) for i in range(2))

    def tile(first: ir.Value, rest: ir.Value | None) -> None:
        here = builder.gep(at, [first])
        x = emit.load(here, 0) if rest is None else emit.load_masked(here, 0, emit.mask(rest))
        narrow = emit.to_bytes(emit.multiply_add(x, inverse, zero))
        place = builder.bitcast(builder.gep(bytes_at, [first]), narrow.type.as_pointer())
        builder.store(narrow, place, align=1)

    emit.in_tiles(count, tile)


def _find_own_step(emit: Emitter, at: ir.Value, count: ir.Value, step: ir.Value) -> ir.Value:
    """Store the step of a row whose largest absolute value is 127 of them; return 1 / step in all lanes."""
    builder = emit.builder
    whole = builder.and_(count, emit.integer(-emit.lanes))

    def vector(first: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        return [emit.larger(found[0], emit.absolute(emit.load(builder.gep(at, [first]), 0)))]

    (most,) = emit.loop(whole, emit.zeros(1), vector, stride=emit.lanes)
    rest = emit.load_masked(builder.gep(at, [whole]), 0, emit.mask(builder.sub(count, whole)))
    most = emit.over_lanes(emit.larger(most, emit.absolute(rest)), emit.larger)
    found = builder.fmul(most, emit.constant(1 / LARGEST))
    least = emit.constant(LEAST_STEP)
    found = builder.select(builder.fcmp_ordered("<", found, least), least, found)
    builder.store(builder.extract_element(found, ir.Constant(I32, 0)), step)
    return builder.fdiv(emit.constant(1.0), found)


class ChannelRun(NamedTuple):
    """Positions of up to four channels that lie beside each other.

    address: of the first position in the first channel. channel: elements from one channel to the next. left:
    channels (>= 1); beyond the last one, that is read again.
    """

    address: Word
    channel: Word
    left: Word


@vector_code(QuantizeForm)
def quantize_channels(
    builder: ir.IRBuilder,
    form: QuantizeForm,
    source: ChannelRun,
    target: ir.Value,
    count: ir.Value,
    reading: ir.Value,
) -> None:
    """target[p] = the bytes of four channels at position p, one quad each, for p < count.

    reading: address of float32 (2), 1 / scale and zero. NaN becomes 0.
    """
    emit = Emitter(builder, form.lanes, bool(form.fused))
    planes = [emit.row(source.address, c, source.left, source.channel) for c in range(4)]
    known = emit.pointer(reading)
    inverse, zero = (emit.splat(builder.load(builder.gep(known, [emit.integer(i)]))) for i in range(2))
    quads_at = emit.pointer(target)

    def tile(first: ir.Value, rest: ir.Value | None) -> None:
        mask = None if rest is None else emit.mask(rest)
        here = [builder.gep(plane, [first]) for plane in planes]
        loaded = [emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask) for at in here]
        quads, place = emit.join_quads(loaded, inverse, zero), builder.gep(quads_at, [first])
        if mask is None:
            emit.store(quads, place, 0)
        else:
            emit.store_masked(quads, place, 0, mask)

    emit.in_tiles(count, tile)
