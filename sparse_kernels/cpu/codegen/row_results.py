"""What becomes of sums of rows at vectors of positions: what they are worth, bias, activation, floats or quads."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.tile_operands import FramedOutput, Matrix, QuadWorth, RowEpilogue
from sparse_kernels.cpu.codegen.vector_emitter import F32, I32, I64, Emitter
from sparse_kernels.formats.int8 import QUAD

# What a tile of positions leaves: its sums, the bytes of four rows together, or both.
LEAVES_SUMS, LEAVES_QUADS, LEAVES_BOTH = 0, 1, 2


class RowResults(NamedTuple):
    """How results of rows are left.

    framed: y lies in frames, or something is added to it. leaves: what is written. of_quads: sums are of quads, whose
    worth is not known yet, and no token has a step of its own.
    """

    framed: int
    leaves: int
    of_quads: int = 0


def convert_row_sums(
    emit: Emitter,
    sums: list[ir.Value],
    n_vectors: int,
    worth: QuadWorth,
    biases: list[ir.Value] | None = None,
) -> list[ir.Value]:
    """Return what sums of quads are worth, by vectors of positions for one row after the other.

    biases: are added, and tokens have no steps of their own; None adds nothing.
    """
    builder, n_rows = emit.builder, len(sums) // n_vectors
    places = [emit.pointer(address) for address in (worth.offsets, worth.scales)]
    offsets, scales = (
        [emit.splat(builder.load(builder.gep(at, [emit.integer(r)]))) for r in range(n_rows)] for at in places
    )
    valued = [
        emit.worth(total, offsets[i // n_vectors], scales[i // n_vectors], None if biases is None else biases[i])
        for i, total in enumerate(sums)
    ]
    if biases is not None:
        return valued

    def by_token() -> list[ir.Value]:
        at = emit.pointer(worth.token_scales)
        factors = [emit.load(at, v) for v in range(n_vectors)]
        return [builder.fmul(total, factors[i % n_vectors]) for i, total in enumerate(valued)]

    return emit.either(worth.token_scales, by_token, lambda: valued)


def finish_row_sums(
    emit: Emitter,
    form: RowResults,
    sums: list[ir.Value],
    n_vectors: int,
    ids: list[ir.Value],
    y: FramedOutput,
    finish: RowEpilogue,
) -> None:
    """Finish sums, vectors of one row after the other, and store them; ids: the row of y of each, or less than 0."""
    builder, n_rows, frames = emit.builder, len(ids), form.framed
    starts = emit.load_integers(y.starts, n_vectors, I64)
    written = [builder.icmp_signed(">=", row, emit.integer(0)) for row in ids]
    # For a row that is not written, the bias of row 0 is read.
    known = [builder.select(exists, row, emit.integer(0)) for exists, row in zip(written, ids, strict=True)]
    bias_pointer = emit.pointer(finish.bias)

    def positions(r: int, array: ir.Value) -> list[ir.Value]:
        row = builder.mul(known[r], y.stride)
        return [emit.pointer(array, builder.add(row, start)) for start in starts]

    def biases() -> list[ir.Value]:
        each = [emit.splat(builder.load(builder.gep(bias_pointer, [row]))) for row in known]
        return [each[r] for r in range(n_rows) for _ in range(n_vectors)]

    if form.of_quads:
        sums = convert_row_sums(emit, sums, n_vectors, finish.worth, biases())
    if frames:
        sums = emit.continued(
            y.added, sums, lambda: [emit.load(at, 0) for r in range(n_rows) for at in positions(r, y.added)]
        )

    def store(sums: list[ir.Value]) -> None:
        bits = emit.load_integers(y.keep, n_vectors, I64) if frames else []
        if form.leaves != LEAVES_SUMS:
            leave = QuadStore(emit, y, n_vectors, bits)
            for r in range(0, n_rows, QUAD):
                with builder.if_then(written[r]):
                    leave.store(builder.ashr(known[r], emit.integer(2)), sums[r * n_vectors :])
        for r, exists in enumerate(written) if form.leaves != LEAVES_QUADS else ():
            with builder.if_then(exists):
                for v, at in enumerate(positions(r, y.address)):
                    total = sums[r * n_vectors + v]
                    emit.store(emit.kept(total, bits[v]) if frames else total, at, 0)

    emit.finish(finish.activation, sums, None if form.of_quads else biases, store)


# Rows that `finish_waiting_rows` finishes together: those of a quad.
TOGETHER = QUAD


@vector_code(RowResults)
def finish_waiting_rows(
    builder: ir.IRBuilder,
    form: RowResults,
    sums: Matrix,
    rows: ir.Value,
    width: ir.Value,
    y: FramedOutput,
    finish: RowEpilogue,
) -> None:
    """Finish sums of quads that wait in rows, of one or two vectors of 16 positions, as `row_tile` does.

    sums: int32. rows: how many, in fours. width: vectors, 1 or 2.
    """
    emit = Emitter(builder, 16, True)

    def of_width(n_vectors: int) -> None:
        def four(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = [emit.pointer(sums.address, builder.mul(builder.add(first, emit.integer(r)), sums.stride))
                  for r in range(TOGETHER)]  # fmt: skip
            behind = builder.mul(first, emit.integer(4))
            offsets, scales, token_scales = finish.worth
            worth = QuadWorth(builder.add(offsets, behind), builder.add(scales, behind), token_scales)
            loaded = [emit.load(row, v) for row in at for v in range(n_vectors)]
            ids = emit.load_integers(builder.add(finish.row_ids, behind), TOGETHER, I32)
            finish_row_sums(emit, form, loaded, n_vectors, ids, y, finish._replace(worth=worth))
            return []

        emit.loop(rows, [], four, stride=TOGETHER)

    emit.choose(width, {n: partial(of_width, n) for n in (1, 2)})


class QuadStore:
    """Stores results of four rows at `n_vectors` vectors of positions as quads."""

    def __init__(self, emit: Emitter, y: FramedOutput, n_vectors: int, keep: list[ir.Value]) -> None:
        builder, reading = emit.builder, emit.pointer(y.quads.reading)
        self._emit, self._y, self._keep = emit, y, keep
        self._starts = emit.load_integers(y.quads.starts, n_vectors, I64)
        self._step = [emit.splat(builder.load(builder.gep(reading, [emit.integer(i)]))) for i in range(2)]
        self._padding = emit.splat(builder.bitcast(builder.trunc(y.quads.padding, I32), F32))

    def store(self, row: ir.Value, sums: list[ir.Value]) -> None:
        """Store row `row` of quads; sums: of its four rows, vectors of one row after the other."""
        emit, size = self._emit, len(self._starts)
        below = emit.builder.mul(row, self._y.stride)
        for v, start in enumerate(self._starts):
            quads = emit.join_quads([sums[i * size + v] for i in range(QUAD)], *self._step)
            at = emit.pointer(self._y.quads.address, emit.builder.add(below, start))
            emit.store(emit.kept(quads, self._keep[v], self._padding), at, 0)
