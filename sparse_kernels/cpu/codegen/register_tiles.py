"""The innermost loops, emitted as LLVM vector code: register tiles of multiply-adds, and copies, float32.

Why emitted: the sums of a tile must stay in vector registers over the whole loop. The tile must be as large as the
registers allow, or each multiply-add waits for a load. A compiler does neither for loops over sparse columns.

Two tiles cover every pattern whose rows share columns (w: packed weights, c: kept column, c < count):

    token_tile   y[t, v] += x[t, column[c]] * w[c, v]        `tokens` rows of x   x  `vectors` vectors of outputs
    row_tile     y[r, p] += w[c, r] * x[offset[c] + p]       `rows` rows of y     x  `vectors` vectors of positions

token_tile reads x token-major; the rows of a group that share their columns lie along the vector. row_tile reads x
feature-major, or any other way in which an element offset stands for a column (a tap of a convolution). Tokens or
image positions lie along the vector, so groups of a few rows are enough. Rows that share no columns: see
`weight_stream`.

Registers: a tile holds tokens*vectors (rows*vectors) sums, the `vectors` vectors loaded for a column, and one
broadcast. With 32 registers (AVX-512, NEON) that is 8 x 2 sums; with 16 (AVX2, SSE) 4 x 2. It needs at least
latency x multiply-adds a cycle = 8 sums to keep the unit busy. Addresses count too: a pointer for each token, so more
than 8 tokens spill general registers and halve the speed.

The tile sizes are integer literals: they come as free variables of the kernel that calls the tile.

Weights of token_tile may be bfloat16, a shift away from float32, or whole numbers in eight bits: with few tokens a
layer does little but read them.
row_tile broadcasts each weight, which would then take a shift as well: it would gain nothing. But where x may be
bfloat16 too, and the processor multiplies pairs of them, it takes two columns at a time: each element of x lies there
twice, in both halves of 32 bits, so that any two columns make pairs by one blend.

The sums are finished in registers: bias added, then the activation. NaN and infinity go through as in dense code:
no flag here allows the compiler to assume their absence. Addresses are integers, sizes and strides count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from sparse_kernels.cpu.codegen.intrinsics import vector_code, with_literals
from sparse_kernels.cpu.codegen.row_results import (
    LEAVES_QUADS,
    LEAVES_SUMS,
    QuadStore,
    RowResults,
    convert_row_sums,
    finish_row_sums,
)
from sparse_kernels.cpu.codegen.tile_operands import (
    Epilogue,
    FramedOutput,
    LineWalk,
    Matrix,
    PackedOutput,
    QuadWorth,
    RowEpilogue,
    TileWeights,
    TokenRows,
    TokenSums,
    VectorInput,
    VectorSources,
    WeightFetch,
)
from sparse_kernels.cpu.codegen.vector_emitter import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    PAIRS,
    PAIRS_BY_UNIT,
    QUADS,
    Emitter,
)
from sparse_kernels.formats.int8 import QUAD

# Sums that keep two multiply-add units busy, each with a latency of 4 cycles.
ENOUGH = 8

# How far ahead weights are fetched, in floats: 6 KB. In a model they come from beyond the second-level cache, because
# each was last read a whole network ago. The hardware alone stays too close behind, and stops at the end of each
# page. At 4 KB, just a page ahead, 4 to 8 tokens and attention take 5% to 20% longer on AMD. Its first-level cache
# confuses such addresses.
AHEAD = 1536

# How far ahead each row is fetched where rows are laid out beside each other. The hardware follows as many rows as
# there are lanes badly. Fetching saves 2% to 5% of a layer with 2,048 tokens at 90% sparsity (AMD).
ROW_AHEAD = 128

# How token_tile leaves its sums: finished in their rows (bias and activation), as sums in rows, or as sums in fours
# of tokens.
FINISHED, ROWS, FOURS = 0, 1, 2

# Binary digits of a pace, which is a fraction.
PACE_BITS = 32


@vector_code()
def copy_float(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    """Copy one float32 from an address to another."""
    emit = Emitter(builder, 1, False)
    builder.store(builder.load(emit.pointer(source)), emit.pointer(target))


class TokenTileForm(NamedTuple):
    """A register tile of tokens and outputs.

    tokens, vectors: sums, one vector of outputs each. lanes: of a vector. fused: multiply-adds are fused. size: bytes
    of a weight, 4 for float32, 2 for bfloat16, 1 for whole numbers with a scale for each output. ahead: how many
    floats ahead weights are fetched, 0 leaves that to the hardware. close: fetch them to the first-level cache.
    order: how the sums are left: FINISHED, ROWS or FOURS. fetch_elsewhere: with each column fetch a line that is not
    of its weights. once: where `cold` is 1 fetch weights ahead and nothing else, where it is 0 only lines elsewhere;
    else fetch both always. side_by_side: the tokens of x lie side by side, (columns, tokens), and their stride is not
    looked at. numbers: what is multiplied.
    """

    tokens: int
    vectors: int
    lanes: int
    fused: int
    size: int
    ahead: int
    close: int
    order: int
    fetch_elsewhere: int
    once: int
    side_by_side: int
    numbers: int = FLOATS


@vector_code(TokenTileForm)
def token_tile(
    builder: ir.IRBuilder,
    form: TokenTileForm,
    weights: TileWeights,
    x: TokenRows,
    y: TokenSums,
    finish: Epilogue,
    fetch: WeightFetch,
) -> None:
    """y[t, v] = activation(sum over c of x[t, columns[c]] * values[c, v] + bias[v]).

    values: (count, vectors*lanes), float32, bits of bfloat16, or int8. With quads a column is four columns of bytes,
    in the place of a float32, and nothing may be present.

    ROWS and FOURS leave sums as they are, all outputs of the tile, without bias and activation. FOURS: four tokens of
    an output lie side by side, y[t // 4, position, t % 4], also for tokens that are not left.
    `Panels.positions_in_fours` gives the order of the outputs of a vector.
    """
    n_lanes, n_vectors, n_tokens = form.lanes, form.vectors, form.tokens
    emit = Emitter(builder, n_lanes, bool(form.fused))
    width = n_vectors * n_lanes
    last = builder.sub(x.left, emit.integer(1))
    x_rows, y_rows = [], []
    for t in range(n_tokens):
        beyond = builder.icmp_signed("<", last, emit.integer(t))
        row = builder.select(beyond, last, emit.integer(t))
        x_rows.append(emit.pointer(x.address, emit.integer(t) if form.side_by_side else builder.mul(row, x.stride)))
        y_rows.append(emit.pointer(y.address, builder.mul(row, y.stride)))
    masks = [emit.mask(builder.sub(y.lanes_left, emit.integer(v * n_lanes))) for v in range(n_vectors)]
    outputs = [(row, v) for row in y_rows for v in range(n_vectors)]
    kind, load = {4: (F32, emit.load), 2: (I16, emit.load_bfloat16), 1: (I8, emit.load_bytes)}[form.size]
    values_pointer, columns_pointer = emit.pointer(weights.values, kind=kind), emit.pointer(weights.columns, kind=I32)
    per_float = 4 // form.size

    def column(ahead: bool, others: bool, c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        index = builder.sext(builder.load(builder.gep(columns_pointer, [c])), I64)
        if form.side_by_side:
            index = builder.mul(index, emit.integer(n_tokens))
        at = builder.gep(values_pointer, [builder.mul(c, emit.integer(width))])
        for v in range(0, n_vectors, per_float) if form.ahead and ahead else ():
            further = builder.gep(at, [emit.integer(form.ahead * per_float + v * n_lanes)])
            emit.will_load(further, close=bool(form.close))
        if form.fetch_elsewhere and others:
            emit.will_load(emit.pointer(builder.add(builder.ptrtoint(at, I64), fetch.elsewhere)))
        loaded = [load(at, v) for v in range(n_vectors)]
        factors = [emit.splat(builder.load(builder.gep(row, [index]))) for row in x_rows]
        pairs = [(factor, weight) for factor in factors for weight in loaded]
        if form.numbers in QUADS:
            return [emit.multiply_quads(f, w, s, form.numbers) for (f, w), s in zip(pairs, sums, strict=True)]
        return [emit.multiply_add(f, w, s) for (f, w), s in zip(pairs, sums, strict=True)]

    def columns_with(ahead: bool, others: bool) -> list[ir.Value]:
        return emit.loop(weights.count, emit.zeros(len(outputs)), partial(column, ahead, others))

    if form.once:
        sums = emit.either(fetch.cold, lambda: columns_with(True, False), lambda: columns_with(False, True))
    else:
        sums = columns_with(True, True)
    if form.numbers in QUADS:
        sums = _convert_token_sums(emit, sums, n_vectors, x, finish.worth)
    elif form.size == 1:
        scales = [emit.load(emit.pointer(finish.worth.scales), v) for v in range(n_vectors)]
        sums = [builder.fmul(total, scales[i % n_vectors]) for i, total in enumerate(sums)]
    if form.order == FOURS:
        fours = [
            (four, v, emit.pointer(y.address, builder.mul(y.stride, emit.integer(four))))
            for four in range(0, n_tokens, 4)
            for v in range(n_vectors)
        ]

        def load_fours() -> list[ir.Value]:
            loaded = {
                (four, v): emit.transpose_inside(*(emit.load(at, 4 * v + j) for j in range(4)))
                for four, v, at in fours
            }
            return [loaded[t // 4 * 4, v][t % 4] for t in range(n_tokens) for v in range(n_vectors)]

        sums = emit.continued(y.add_present, sums, load_fours)
        for four, v, at in fours:
            rows = sums[four * n_vectors + v : (four + 4) * n_vectors : n_vectors]
            for j, joined in enumerate(emit.transpose_inside(*rows)):
                emit.store(joined, at, 4 * v + j)
        return

    sums = emit.continued(y.add_present, sums, lambda: [emit.load_masked(row, v, masks[v]) for row, v in outputs])

    def store(sums: list[ir.Value]) -> None:
        for (row, v), total in zip(outputs, sums, strict=True):
            emit.store_masked(total, row, v, masks[v])

    if form.order == ROWS:
        store(sums)
        return
    bias_pointer = emit.pointer(finish.bias)
    biases = [emit.load_masked(bias_pointer, v, masks[v]) for v in range(n_vectors)]
    emit.finish(finish.activation, sums, lambda: [biases[v] for _, v in outputs], store)


def _convert_token_sums(
    emit: Emitter, sums: list[ir.Value], n_vectors: int, x: TokenRows, worth: QuadWorth
) -> list[ir.Value]:
    """Return what sums of quads are worth, by vectors of outputs for one token after the other."""
    builder, n_tokens = emit.builder, len(sums) // n_vectors
    offsets, scales = emit.pointer(worth.offsets), emit.pointer(worth.scales)
    by_vector = [(emit.load(offsets, v), emit.load(scales, v)) for v in range(n_vectors)]
    valued = [emit.worth(total, *by_vector[i % n_vectors]) for i, total in enumerate(sums)]

    def by_token() -> list[ir.Value]:
        factors = [
            emit.splat(builder.load(emit.row(worth.token_scales, t, x.left, emit.integer(1))))
            for t in range(n_tokens)
        ]
        return [builder.fmul(total, factors[i // n_vectors]) for i, total in enumerate(valued)]

    return emit.either(worth.token_scales, by_token, lambda: valued)


@vector_code()
def fetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Fetch the cache line at an address, which may be any, to the second-level cache."""
    emit = Emitter(builder, 1, False)
    emit.will_load(emit.pointer(address))


class RowTileForm(NamedTuple):
    """A register tile of rows and positions.

    rows, vectors: sums, one vector of positions each. lanes: of a vector. fused: multiply-adds are fused. framed: y
    lies in frames, or something is added to it. fetch_lines: fetch the lines of a `LineWalk` meanwhile. numbers: what
    is multiplied, FLOATS or pairs of bfloat16. leaves: what is written; quads only if framed, and if rows come in
    fours, each of a quad of y.
    """

    rows: int
    vectors: int
    lanes: int
    fused: int
    framed: int
    fetch_lines: int
    numbers: int
    leaves: int = LEAVES_SUMS


@vector_code(RowTileForm)
def row_tile(
    builder: ir.IRBuilder,
    form: RowTileForm,
    weights: TileWeights,
    x: VectorInput,
    y: FramedOutput,
    finish: RowEpilogue,
    walk: LineWalk,
) -> None:
    """y[row_ids[r], y.starts[v] + i] = activation(sum over c of values[c, r] * x[...] + bias[row_ids[r]]).

    The element of x is x.starts[v] + offsets[c] * x.scale + i, for lane i of vector v. x.width: how many vectors
    there are, `vectors` of the form or 1. values: float32 (count, rows).

    With pairs of bfloat16 two columns are multiplied at once. Then x holds each element as bfloat16 twice
    (`Emitter.doubled`), and the pace is by pairs. Values hold two columns' weights in each 32 bits, the last column's
    alone if count is odd (`Panels.paired`).

    With quads a column is four columns of bytes, in the place of a float32. What sums are worth hangs on the row, and
    on the token: a lane of a vector.
    """
    n_rows, n_lanes, kind = form.rows, form.lanes, form.numbers
    emit = Emitter(builder, n_lanes, bool(form.fused))

    def tile(n_vectors: int) -> None:
        inputs = [emit.pointer(x.address, at) for at in emit.load_integers(x.starts, n_vectors, I64)]
        ids = emit.load_integers(finish.row_ids, n_rows, I32)
        values, offsets = emit.pointer(weights.values), emit.pointer(weights.columns, kind=I32)

        # Columns take turns with sets of sums, as many as keep the unit busy.
        size = n_rows * n_vectors
        sets = -(-ENOUGH // size)

        def element(at: ir.Value, offset: ir.Value) -> ir.Value:
            return emit.load(builder.gep(at, [builder.mul(offset, x.scale)]), 0)

        def column(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            if kind not in (PAIRS, PAIRS_BY_UNIT):
                offset = builder.sext(builder.load(builder.gep(offsets, [c])), I64)
                elements = [element(at, offset) for at in inputs]
            else:
                first, second = emit.load_pair(builder.gep(offsets, [builder.add(c, c)]))
                elements = [emit.paired(element(at, first), element(at, second)) for at in inputs]
            at = builder.gep(values, [builder.mul(c, emit.integer(n_rows))])
            emit.will_load(builder.gep(at, [emit.integer(AHEAD)]))
            if form.fetch_lines:
                number = builder.ashr(builder.mul(c, walk.pace), emit.integer(PACE_BITS))
                emit.will_load(emit.pointer(builder.add(walk.line, builder.mul(number, walk.stride))))
            return multiplied(at, elements, sums)

        def multiplied(at: ir.Value, elements: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
            loaded = [emit.splat(builder.load(builder.gep(at, [emit.integer(r)]))) for r in range(n_rows)]
            pairs = [(weight, element) for weight in loaded for element in elements]
            if kind == FLOATS:
                return [emit.multiply_add(w, e, s) for (w, e), s in zip(pairs, sums, strict=True)]
            if kind in QUADS:
                return [emit.multiply_quads(e, w, s, kind) for (w, e), s in zip(pairs, sums, strict=True)]
            return [emit.multiply_pairs(w, e, s, kind) for (w, e), s in zip(pairs, sums, strict=True)]

        def alone(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            """Add the last of an odd number of columns, beside zeros, so that infinity stays what it is."""
            offset = builder.sext(builder.load(builder.gep(offsets, [builder.add(c, c)])), I64)
            elements = [emit.paired(element(at, offset), ir.Constant(emit.vector, None)) for at in inputs]
            return multiplied(builder.gep(values, [builder.mul(c, emit.integer(n_rows))]), elements, sums)

        def columns(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            each = [column(builder.add(c, emit.integer(i)), sums[i * size : i * size + size]) for i in range(sets)]
            return [total for some in each for total in some]

        paired = kind in (PAIRS, PAIRS_BY_UNIT)
        steps = builder.ashr(weights.count, emit.integer(1)) if paired else weights.count
        whole = builder.and_(steps, emit.integer(-sets))
        sums = emit.loop(whole, emit.zeros(sets * size), columns, stride=sets)
        first, *others = (sums[i * size : i * size + size] for i in range(sets))
        sums = emit.loop(steps, first, column, start=whole) if others else first
        if paired:
            sums = emit.loop(builder.sub(weights.count, steps), sums, alone, start=steps)
        for other in others:
            sums = [emit.add(a, b, kind) for a, b in zip(sums, other, strict=True)]
        if kind in QUADS:
            sums = convert_row_sums(emit, sums, n_vectors, finish.worth)
        finish_row_sums(emit, RowResults(form.framed, form.leaves), sums, n_vectors, ids, y, finish)

    emit.choose(x.width, {n: partial(tile, n) for n in {form.vectors, 1}})


class TransposeForm(NamedTuple):
    """A transposition of tokens.

    lanes: of a vector, and tokens. numbers: what tiles multiply that read the result; unless FLOATS, each element is
    written as bfloat16 twice (`Emitter.doubled`).
    """

    lanes: int
    numbers: int


@vector_code(TransposeForm)
def tokens_to_lanes(
    builder: ir.IRBuilder,
    form: TransposeForm,
    source: Matrix,
    target: Matrix,
    tokens: ir.Value,
    features: ir.Value,
) -> None:
    """target[f, t] = source[t, f] for as many tokens as there are lanes, both float32.

    Only the first `tokens` (>= 1) rows of the source are read, the last of them again for those beyond.
    """
    n, kind = form.lanes, form.numbers
    emit = Emitter(builder, n, False)
    sources = [emit.row(source.address, t, tokens, source.stride) for t in range(n)]

    def tile(first: ir.Value, features: ir.Value | None) -> None:
        rows = [builder.gep(row, [first]) for row in sources]
        if features is None:
            for row in rows:
                emit.will_load(builder.gep(row, [emit.integer(ROW_AHEAD)]))
            loaded = [emit.load(row, 0) for row in rows]
        else:
            mask = emit.mask(features)
            loaded = [emit.load_masked(row, 0, mask) for row in rows]
        at = emit.address(target.address, builder.mul(first, target.stride))
        columns = [emit.as_read(column, kind) for column in emit.transpose(loaded)]
        # From the last to the first: rows beyond the end are written to the last one, and then overwritten.
        for f in reversed(range(n)):
            emit.store(columns[f], emit.row(at, f, features, target.stride), 0)

    emit.in_tiles(features, tile)


@vector_code(TransposeForm)
def lanes_to_tokens(
    builder: ir.IRBuilder,
    form: TransposeForm,
    source: Matrix,
    target: Matrix,
    tokens: ir.Value,
    features: ir.Value,
) -> None:
    """target[t, f] = source[f, t] for the first `tokens` (>= 1) of as many as there are lanes, both float32.

    The form must be of FLOATS.
    """
    n = form.lanes
    emit = Emitter(builder, n, False)
    targets = [emit.row(target.address, t, tokens, target.stride) for t in range(n)]

    def tile(first: ir.Value, features: ir.Value | None) -> None:
        at = emit.address(source.address, builder.mul(first, source.stride))
        rows = emit.transpose([emit.load(emit.row(at, f, features, source.stride), 0) for f in range(n)])
        mask = None if features is None else emit.mask(features)
        # From the last to the first, as above.
        for t in reversed(range(n)):
            place = builder.gep(targets[t], [first])
            if mask is None:
                emit.store(rows[t], place, 0)
            else:
                emit.store_masked(rows[t], place, 0, mask)

    emit.in_tiles(features, tile)


class CopyForm(NamedTuple):
    """Tiles of vectors of positions that are copied.

    vectors: the most that a tile has. lanes: of a vector. fused: multiply-adds are fused, for `finish_rows`. leaves:
    what that writes.
    """

    vectors: int
    lanes: int
    fused: int
    leaves: int = LEAVES_SUMS


@vector_code(CopyForm)
def copy_columns(
    builder: ir.IRBuilder, form: CopyForm, width: ir.Value, source: VectorSources, target: ir.Value
) -> None:
    """target[c, v, i] = x[starts[v] + offsets[c] + i], of shape (count, vectors, lanes).

    width: how many vectors there are, 1 to `vectors`.
    """
    most, n_lanes = form.vectors, form.lanes
    emit = Emitter(builder, n_lanes, False)
    offsets_pointer, target_pointer = emit.pointer(source.offsets, kind=I32), emit.pointer(target)

    def copy_with(vectors: int) -> None:
        sources = [emit.pointer(source.address, at) for at in emit.load_integers(source.starts, vectors, I64)]

        def column(c: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            offset = builder.sext(builder.load(builder.gep(offsets_pointer, [c])), I64)
            at = builder.gep(target_pointer, [builder.mul(c, emit.integer(most * n_lanes))])
            for v, start in enumerate(sources):
                emit.store(emit.load(builder.gep(start, [offset]), 0), at, v)
            return []

        emit.loop(source.count, [], column)

    emit.choose(width, {n: partial(copy_with, n) for n in range(1, most + 1)})


@vector_code(CopyForm)
def copy_rows(
    builder: ir.IRBuilder, form: CopyForm, width: ir.Value, source: ir.Value, count: ir.Value, y: PackedOutput
) -> None:
    """y[r * y.stride + y.starts[v] + i] = source[r, v, i], of shape (count, vectors, lanes).

    width: how many vectors there are, 1 to `vectors`. Rows of y are often too far apart for the hardware to foresee
    what is stored next: the next tile, which most often lies behind this one, is fetched.
    """
    most, n_lanes = form.vectors, form.lanes
    emit = Emitter(builder, n_lanes, False)
    source_pointer = emit.pointer(source)

    def copy_with(vectors: int) -> None:
        targets = [emit.pointer(y.address, at) for at in emit.load_integers(y.starts, vectors, I64)]

        def row(r: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = builder.gep(source_pointer, [builder.mul(r, emit.integer(most * n_lanes))])
            behind = builder.mul(r, y.stride)
            for v, target in enumerate(targets):
                there = builder.gep(target, [behind])
                emit.store(emit.load(at, v), there, 0)
                emit.will_store(builder.gep(there, [emit.integer(vectors * n_lanes)]))
            return []

        emit.loop(count, [], row)

    emit.choose(width, {n: partial(copy_with, n) for n in range(1, most + 1)})


@vector_code(CopyForm)
def finish_rows(
    builder: ir.IRBuilder,
    form: CopyForm,
    width: ir.Value,
    source: ir.Value,
    count: ir.Value,
    y: FramedOutput,
    activation: ir.Value,
) -> None:
    """y[at] = activation(source[r, v, i] + added[at]) where bit i of keep[v] is set, else 0; at as in `copy_rows`.

    width, source, count: as in `copy_rows`. Where quads are left, y and the source begin with the first row of one.
    """
    most, n_lanes = form.vectors, form.lanes
    emit = Emitter(builder, n_lanes, bool(form.fused))
    source_pointer = emit.pointer(source)

    def finish_with(vectors: int) -> None:
        starts = emit.load_integers(y.starts, vectors, I64)
        bits = emit.load_integers(y.keep, vectors, I64)

        together = 1 if form.leaves == LEAVES_SUMS else QUAD
        leave = None if together == 1 else QuadStore(emit, y, vectors, bits)

        def rows(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            numbers = [first]
            for i in range(1, together):  # beyond the last one that is done again
                behind = builder.add(first, emit.integer(i))
                numbers.append(builder.select(builder.icmp_signed("<", behind, count), behind, numbers[-1]))
            at = [builder.gep(source_pointer, [builder.mul(r, emit.integer(most * n_lanes))]) for r in numbers]
            places = [builder.add(builder.mul(r, y.stride), start) for r in numbers for start in starts]
            sums = [emit.load(row, v) for row in at for v in range(vectors)]
            sums = emit.continued(
                y.added, sums, lambda: [emit.load(emit.pointer(y.added, place), 0) for place in places]
            )

            def store(sums: list[ir.Value]) -> None:
                if leave is not None:
                    leave.store(builder.ashr(first, emit.integer(2)), sums)
                for i, place in enumerate(places) if form.leaves != LEAVES_QUADS else ():
                    emit.store(emit.kept(sums[i], bits[i % vectors]), emit.pointer(y.address, place), 0)

            emit.finish(activation, sums, lambda: emit.zeros(together * vectors), store)
            return []

        emit.loop(count, [], rows, stride=together)

    emit.choose(width, {n: partial(finish_with, n) for n in range(1, most + 1)})


@with_literals
def copy_run(typing_context: Any, lanes: Any, numbers: Any, source: Any, target: Any, count: Any) -> Any:
    """Copy `count` float32 from one address to another, a vector at a time; for runs too short for memcpy to pay.

    numbers: for tiles that multiply what; unless FLOATS, the target gets each as bfloat16 twice (`Emitter.doubled`).
    """
    signature = types.void(lanes, numbers, *([types.intp] * 3))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n, kind = (int(literal.literal_value) for literal in signature.args[:2])
        source, target, count = args[2:]
        emit = Emitter(builder, n, False)
        source_pointer, target_pointer = emit.pointer(source), emit.pointer(target)
        whole = builder.sdiv(count, emit.integer(n))

        def vector(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = builder.mul(i, emit.integer(n))
            copied = emit.load(builder.gep(source_pointer, [at]), 0)
            emit.store(emit.as_read(copied, kind), builder.gep(target_pointer, [at]), 0)
            return []

        emit.loop(whole, [], vector)
        done = builder.mul(whole, emit.integer(n))
        with builder.if_then(builder.icmp_signed("<", done, count)):
            mask = emit.mask(builder.sub(count, done))
            rest = emit.load_masked(builder.gep(source_pointer, [done]), 0, mask)
            emit.store_masked(emit.as_read(rest, kind), builder.gep(target_pointer, [done]), 0, mask)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def copy_vector(typing_context: Any, lanes: Any, numbers: Any, source: Any, target: Any, count: Any) -> Any:
    """target = the first `count` of `lanes` float32 at the source, then zeros: of a vector that will be multiplied.

    What an earlier call left there may be subnormal, and each product of such a number takes a hundred cycles.
    numbers: as `copy_run` takes it.
    """
    signature = types.void(lanes, numbers, *([types.intp] * 3))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n, kind = (int(literal.literal_value) for literal in signature.args[:2])
        emit = Emitter(builder, n, False)
        source, target, count = args[2:]
        copied = emit.load_masked(emit.pointer(source), 0, emit.mask(count))
        emit.store(emit.as_read(copied, kind), emit.pointer(target), 0)
        return context.get_dummy_value()

    return signature, generate


@with_literals
def copy_every_other(typing_context: Any, lanes: Any, numbers: Any, source: Any, target: Any, count: Any) -> Any:
    """target[i] = source[2 * i] for `count` (>= 0) float32; nothing else is touched. numbers: as for `copy_run`."""
    signature = types.void(lanes, numbers, *([types.intp] * 3))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n, kind = (int(literal.literal_value) for literal in signature.args[:2])
        source, target, count = args[2:]
        emit = Emitter(builder, n, False)
        source_pointer, target_pointer = emit.pointer(source), emit.pointer(target)

        def tile(first: ir.Value, rest: ir.Value | None) -> None:
            here = builder.gep(source_pointer, [builder.add(first, first)])
            there = builder.gep(target_pointer, [first])
            if rest is None:
                # The last element is skipped, and may lie beyond the source.
                copied = emit.every_other(emit.load(here, 0), emit.load_masked(here, 1, all_but_last))
                emit.store(emit.as_read(copied, kind), there, 0)
                return
            read = builder.sub(builder.add(rest, rest), emit.integer(1))
            low = emit.load_masked(here, 0, emit.mask(read))
            high = emit.load_masked(here, 1, emit.mask(builder.sub(read, emit.integer(n))))
            emit.store_masked(emit.as_read(emit.every_other(low, high), kind), there, 0, emit.mask(rest))

        all_but_last = emit.mask(emit.integer(n - 1))
        emit.in_tiles(count, tile)
        return context.get_dummy_value()

    return signature, generate
