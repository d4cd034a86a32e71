"""Permuted rows (Shfl-BW) to their places: sums that wait in the order of the panels become rows of y.

Bias and activation come here, where outputs are in their own order again and a bias is loaded as a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, Emitter, with_literals


@with_literals
def put_rows(
    typing_context: Any,
    together: Any,
    lanes: Any,
    fused: Any,
    sums: Any,
    places: Any,
    count: Any,
    tokens: Any,
    y: Any,
    y_stride: Any,
    bias: Any,
    activation: Any,
) -> Any:
    """y[t, i] = activation(sums[places[i], t] + bias[i]) for i < count, t < together, as far as there are `tokens`.

    together: 1, or 4 as `token_tile` leaves FOURS; sums: (places, together); places: uint32; tokens: at least 1. A
    vector of one token is loaded one by one and stored at once, half the time of a loop that stores each. To read 16
    bytes of a place takes a third of that for each token.
    """
    signature = types.void(together, lanes, fused, *([types.intp] * 8))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        side, n, fuse = (int(literal.literal_value) for literal in signature.args[:3])
        sums, places, count, tokens, y, y_stride, bias, activation = args[3:]
        emit = Emitter(builder, n, bool(fuse))
        read, biases = emit.pointer(sums), emit.pointer(bias)
        targets = [emit.row(y, t, tokens, y_stride) for t in range(side)]

        def tile(first: ir.Value, rest: ir.Value | None) -> None:
            found = [builder.gep(read, [builder.mul(at, I64(side))]) for at in _places(emit, places, first, rest)]
            columns = emit.four_columns(found) if side == 4 else [_picked(emit, found)]
            _finish_put(emit, columns, targets, biases, first, rest, activation)

        emit.in_tiles(count, tile)
        return context.get_dummy_value()

    return signature, generate


def _picked(emit: Emitter, elements: list[ir.Value]) -> ir.Value:
    """A vector of what lies at these pointers."""
    picked = ir.Constant(emit.vector, ir.Undefined)
    for i, at in enumerate(elements):
        picked = emit.builder.insert_element(picked, emit.builder.load(at), I32(i))
    return picked


def _places(emit: Emitter, places: ir.Value, first: ir.Value, rest: ir.Value | None) -> list[ir.Value]:
    """The places of a vector of rows from `first` on; of those beyond the `rest`, the last one's again."""
    builder, found = emit.builder, []
    for i in range(emit.lanes):
        number: ir.Value = I64(i)
        if rest is not None:
            last = builder.sub(rest, I64(1))
            number = builder.select(builder.icmp_signed("<", last, number), last, number)
        at = emit.pointer(places, builder.add(first, number), kind=I32)
        found.append(builder.zext(builder.load(at), I64))
    return found


def _finish_put(
    emit: Emitter,
    sums: list[ir.Value],
    rows: list[ir.Value],
    bias: ir.Value,
    first: ir.Value,
    rest: ir.Value | None,
    activation: ir.Value,
) -> None:
    """Finish a vector of sums of each row of y, from element `first` on, all of it or the `rest`."""
    builder = emit.builder
    mask = None if rest is None else emit.mask(rest)

    def biases() -> list[ir.Value]:
        at = builder.gep(bias, [first])
        return [emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask)] * len(sums)

    def store(sums: list[ir.Value]) -> None:
        # From the last to the first: tokens beyond are written to the last one, and then overwritten.
        for row, total in reversed(list(zip(rows, sums, strict=True))):
            place = builder.gep(row, [first])
            if mask is None:
                emit.store(total, place, 0)
            else:
                emit.store_masked(total, place, 0, mask)

    emit.finish(activation, sums, biases, store)
