"""Scatter permuted rows (Shfl-BW): sums that wait in the order of the panels become rows of y.

Bias and activation come here, where outputs are in their own order again and a bias is loaded as a vector.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import Epilogue, TokenRows, WaitingSums
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, Emitter


class ScatterForm(NamedTuple):
    """How waiting sums become rows.

    together: tokens that wait side by side, 1, or 4 as `token_tile` leaves FOURS. lanes: of a vector. fused:
    multiply-adds are fused.
    """

    together: int
    lanes: int
    fused: int


@vector_code(ScatterForm)
def scatter_rows(builder: ir.IRBuilder, form: ScatterForm, sums: WaitingSums, y: TokenRows, finish: Epilogue) -> None:
    """y[t, i] = activation(sums[positions[i], t] + bias[i]) for i < count, t < together, as far as tokens are left.

    sums: (positions, together). A vector of one token is loaded one by one and stored at once, half the time of a
    loop that stores each. To read 16 bytes of a position takes a third of that for each token.
    """
    side = form.together
    emit = Emitter(builder, form.lanes, bool(form.fused))
    read, biases = emit.pointer(sums.address), emit.pointer(finish.bias)
    targets = [emit.row(y.address, t, y.left, y.stride) for t in range(side)]

    def tile(first: ir.Value, rest: ir.Value | None) -> None:
        found = [
            builder.gep(read, [builder.mul(at, I64(side))])
            for at in _load_positions(emit, sums.positions, first, rest)
        ]
        columns = emit.four_columns(found) if side == 4 else [_gather(emit, found)]
        mask = None if rest is None else emit.mask(rest)

        def load_biases() -> list[ir.Value]:
            at = builder.gep(biases, [first])
            return [emit.load(at, 0) if mask is None else emit.load_masked(at, 0, mask)] * len(columns)

        def store(totals: list[ir.Value]) -> None:
            # From the last to the first: tokens beyond the end are written to the last one, and then overwritten.
            for row, total in reversed(list(zip(targets, totals, strict=True))):
                place = builder.gep(row, [first])
                if mask is None:
                    emit.store(total, place, 0)
                else:
                    emit.store_masked(total, place, 0, mask)

        emit.finish(finish.activation, columns, load_biases, store)

    emit.in_tiles(sums.count, tile)


def _gather(emit: Emitter, elements: list[ir.Value]) -> ir.Value:
    """Return a vector of the floats at these pointers."""
    picked = ir.Constant(emit.vector, ir.Undefined)
    for i, at in enumerate(elements):
        picked = emit.builder.insert_element(picked, emit.builder.load(at), I32(i))
    return picked


def _load_positions(emit: Emitter, positions: ir.Value, first: ir.Value, rest: ir.Value | None) -> list[ir.Value]:
    """Load the positions of a vector of rows from `first` on; those beyond the `rest` repeat the last one."""
    builder, found = emit.builder, []
    for i in range(emit.lanes):
        number: ir.Value = I64(i)
        if rest is not None:
            last = builder.sub(rest, I64(1))
            number = builder.select(builder.icmp_signed("<", last, number), last, number)
        at = emit.pointer(positions, builder.add(first, number), kind=I32)
        found.append(builder.zext(builder.load(at), I64))
    return found
