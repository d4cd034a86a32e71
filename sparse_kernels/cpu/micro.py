"""The innermost loops of every kernel, emitted as LLVM vector code: register tiles of multiply-adds, float32.

Why emitted: the sums of a tile must stay in vector registers over the whole loop, and the tile must be as large as
the registers allow, or each multiply-add waits for a load. A compiler does neither for loops over sparse columns.

Two tiles cover every pattern (w: packed weights, c: kept column, c < count):

    token_tile   y[t, v] += x[t, column[c]] * w[c, v]        `tokens` rows of x   x  `vectors` vectors of outputs
    row_tile     y[r, p] += w[c, r] * x[offset[c] + p]       `rows` rows of y     x  `vectors` vectors of positions

token_tile reads x token-major; the rows of a group that share their columns lie along the vector. row_tile reads x
feature-major, or any other way in which an element offset stands for a column (a tap of a convolution); tokens or
image positions lie along the vector, so a row needs no companions.

Registers: a tile holds tokens*vectors (rows*vectors) sums, the `vectors` vectors loaded for a column, and one
broadcast. With 32 registers (AVX-512, NEON) that is 8 x 2 sums; with 16 (AVX2, SSE) 4 x 2. It needs at least
latency x multiply-adds a cycle = 8 sums to keep the unit busy. Addresses count too: a pointer for each token, so more
than 8 tokens spill general registers and halve the speed.

The tile sizes are integer literals: they come as free variables of the kernel that calls the tile. So does `version`
(`target.VERSION`), which no code reads: it makes compiled kernels on disk go out of date with this file.

The sums are finished in registers: bias added, then the activation. NaN and infinity go through as in dense code:
no flag here allows the compiler to assume their absence. Addresses are integers, sizes and strides count elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# What happens to the finished sums. PARTIAL: stored as they are, to be continued later.
PARTIAL, IDENTITY, RELU, GELU = -1, 0, 1, 2

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

# 2*Q(a) = erfc(a/sqrt(2)) is nearly 1/p(a)**4 for a >= 0: coefficients of p from a**0 to a**10, a least-squares fit,
# reweighted until the largest error of max(a, 0.6)*Q(a) was 6e-8. In float32, gelu is then wrong by at most
# 3e-7 + |x|*6e-8, and by at most |x|*4.8e-7.
GELU_POLYNOMIAL = (
    1.0,
    0.19946809220256678,
    0.09952645979448602,
    0.025954243294208836,
    0.006360172171597445,
    -7.222039820794773e-05,
    0.0016649162961402068,
    -0.0007593026290009011,
    0.00028816170489576865,
    -5.317379945929177e-05,
    5.03503367371627e-06,
)
GELU_FLAT = 12.0  # from here on a*Q(a) is less than 1e-19


# To a type checker, what @intrinsic returns would take the typing context too.
_with_literals: Any = intrinsic(prefer_literal=True)


@_with_literals
def token_tile(
    typing_context: Any,
    tokens: Any,
    vectors: Any,
    lanes: Any,
    fused: Any,
    version: Any,
    values: Any,
    columns: Any,
    count: Any,
    x: Any,
    x_stride: Any,
    tokens_left: Any,
    y: Any,
    y_stride: Any,
    lanes_left: Any,
    bias: Any,
    start: Any,
    activation: Any,
) -> Any:
    """y[t, v] = activation(start + sum over c of x[t, columns[c]] * values[c, v] + bias[v]).

    values: float32 (count, vectors*lanes); columns: int32 (count); x: rows of stride x_stride; y: rows of stride
    y_stride. Beyond tokens_left (>= 1) the last token is computed again; beyond lanes_left no output is written and
    no bias read. start: 1 continues the sums found in y, 0 starts at zero.
    """
    signature = types.void(*(tokens, vectors, lanes, fused, version), *([types.intp] * 12))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n_tokens, n_vectors, n_lanes, fuse, _ = (int(literal.literal_value) for literal in signature.args[:5])
        values, columns, count, x, x_stride, tokens_left, y, y_stride, lanes_left, bias, start, activation = args[5:]
        emit = _Emitter(builder, n_lanes, bool(fuse))
        width = n_vectors * n_lanes
        last = builder.sub(tokens_left, emit.integer(1))
        x_rows, y_rows = [], []
        for t in range(n_tokens):
            beyond = builder.icmp_signed("<", last, emit.integer(t))
            row = builder.select(beyond, last, emit.integer(t))
            x_rows.append(emit.pointer(x, builder.mul(row, x_stride)))
            y_rows.append(emit.pointer(y, builder.mul(row, y_stride)))
        masks = [emit.mask(builder.sub(lanes_left, emit.integer(v * n_lanes))) for v in range(n_vectors)]
        outputs = [(row, v) for row in y_rows for v in range(n_vectors)]
        sums = emit.begin(start, lambda: [emit.load_masked(row, v, masks[v]) for row, v in outputs])
        values_pointer, columns_pointer = emit.pointer(values), emit.pointer(columns, kind=I32)

        def column(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            index = builder.sext(builder.load(builder.gep(columns_pointer, [c])), I64)
            at = builder.gep(values_pointer, [builder.mul(c, emit.integer(width))])
            weights = [emit.load(at, v) for v in range(n_vectors)]
            factors = [emit.splat(builder.load(builder.gep(row, [index]))) for row in x_rows]
            pairs = [(factor, weight) for factor in factors for weight in weights]
            return [emit.multiply_add(f, w, s) for (f, w), s in zip(pairs, sums, strict=True)]

        sums = emit.loop(count, sums, column)
        bias_pointer = emit.pointer(bias)
        biases = [emit.load_masked(bias_pointer, v, masks[v]) for v in range(n_vectors)]

        def store(sums: list[ir.Value]) -> None:
            for (row, v), total in zip(outputs, sums, strict=True):
                emit.store_masked(total, row, v, masks[v])

        emit.finish(activation, sums, [biases[v] for _, v in outputs], store)
        return context.get_dummy_value()

    return signature, generate


@_with_literals
def row_tile(
    typing_context: Any,
    rows: Any,
    vectors: Any,
    lanes: Any,
    fused: Any,
    version: Any,
    values: Any,
    offsets: Any,
    count: Any,
    x: Any,
    x_scale: Any,
    x_starts: Any,
    y: Any,
    y_stride: Any,
    y_starts: Any,
    row_ids: Any,
    bias: Any,
    start: Any,
    activation: Any,
) -> Any:
    """y[row_ids[r], y_starts[v] + i] = activation(start + sum over c of values[c, r] * x[...] + bias[row_ids[r]]).

    The element of x is x_starts[v] + offsets[c] * x_scale + i, for lane i of vector v. values: float32 (count, rows);
    offsets: int32 (count); x_starts, y_starts: int64 (vectors), where each vector lies, in elements; row_ids: int32
    (rows), a negative one is not written. start: 1 continues the sums found in y, 0 starts at zero.
    """
    signature = types.void(*(rows, vectors, lanes, fused, version), *([types.intp] * 13))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n_rows, n_vectors, n_lanes, fuse, _ = (int(literal.literal_value) for literal in signature.args[:5])
        values, offsets, count, x, x_scale, x_starts, y, y_stride, y_starts, row_ids, bias, start, activation = args[
            5:
        ]
        emit = _Emitter(builder, n_lanes, bool(fuse))
        inputs = [emit.pointer(x, at) for at in emit.load_integers(x_starts, n_vectors, I64)]
        starts = emit.load_integers(y_starts, n_vectors, I64)
        ids = emit.load_integers(row_ids, n_rows, I32)
        written = [builder.icmp_signed(">=", row, emit.integer(0)) for row in ids]
        # A row that is not written stands for row 0 wherever something is read.
        ids = [builder.select(known, row, emit.integer(0)) for known, row in zip(written, ids, strict=True)]
        y_rows = [builder.mul(row, y_stride) for row in ids]
        outputs = [emit.pointer(y, builder.add(row, at)) for row in y_rows for at in starts]
        sums = emit.begin(start, lambda: [emit.load(at, 0) for at in outputs])
        values_pointer, offsets_pointer = emit.pointer(values), emit.pointer(offsets, kind=I32)

        def column(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            offset = builder.sext(builder.load(builder.gep(offsets_pointer, [c])), I64)
            offset = builder.mul(offset, x_scale)
            elements = [emit.load(builder.gep(at, [offset]), 0) for at in inputs]
            at = builder.gep(values_pointer, [builder.mul(c, emit.integer(n_rows))])
            weights = [emit.splat(builder.load(builder.gep(at, [emit.integer(r)]))) for r in range(n_rows)]
            pairs = [(weight, element) for weight in weights for element in elements]
            return [emit.multiply_add(w, e, s) for (w, e), s in zip(pairs, sums, strict=True)]

        sums = emit.loop(count, sums, column)
        bias_pointer = emit.pointer(bias)
        biases = [emit.splat(builder.load(builder.gep(bias_pointer, [row]))) for row in ids]

        def store(sums: list[ir.Value]) -> None:
            for r, known in enumerate(written):
                with builder.if_then(known):
                    for v in range(n_vectors):
                        emit.store(sums[r * n_vectors + v], outputs[r * n_vectors + v], 0)

        emit.finish(activation, sums, [biases[r] for r in range(n_rows) for _ in range(n_vectors)], store)
        return context.get_dummy_value()

    return signature, generate


@_with_literals
def transpose_tile(
    typing_context: Any,
    lanes: Any,
    version: Any,
    source: Any,
    source_stride: Any,
    rows: Any,
    target: Any,
    stride: Any,
) -> Any:
    """target[j, i] = source[i, j] for a lanes x lanes tile, both float32 with their row strides.

    Of the source only the first `rows` (>= 1) rows are read, the last of them again for those beyond.
    """
    signature = types.void(lanes, version, *([types.intp] * 5))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n = int(signature.args[0].literal_value)
        source, source_stride, rows, target, stride = args[2:]
        emit = _Emitter(builder, n, False)
        last = builder.sub(rows, emit.integer(1))
        tile = []
        for i in range(n):
            row = builder.select(builder.icmp_signed("<", last, emit.integer(i)), last, emit.integer(i))
            tile.append(emit.load(emit.pointer(source, builder.mul(row, source_stride)), 0))
        for j, column in enumerate(emit.transpose(tile)):
            emit.store(column, emit.pointer(target, builder.mul(emit.integer(j), stride)), 0)
        return context.get_dummy_value()

    return signature, generate


@_with_literals
def copy_run(typing_context: Any, lanes: Any, version: Any, source: Any, target: Any, count: Any) -> Any:
    """Copy `count` float32 from one address to another, a vector at a time; for runs too short for memcpy to pay."""
    signature = types.void(lanes, version, *([types.intp] * 3))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n = int(signature.args[0].literal_value)
        source, target, count = args[2:]
        emit = _Emitter(builder, n, False)
        source_pointer, target_pointer = emit.pointer(source), emit.pointer(target)
        whole = builder.sdiv(count, emit.integer(n))

        def vector(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = builder.mul(i, emit.integer(n))
            emit.store(emit.load(builder.gep(source_pointer, [at]), 0), builder.gep(target_pointer, [at]), 0)
            return []

        emit.loop(whole, [], vector)
        done = builder.mul(whole, emit.integer(n))
        with builder.if_then(builder.icmp_signed("<", done, count)):
            mask = emit.mask(builder.sub(count, done))
            rest = emit.load_masked(builder.gep(source_pointer, [done]), 0, mask)
            emit.store_masked(rest, builder.gep(target_pointer, [done]), 0, mask)
        return context.get_dummy_value()

    return signature, generate


class _Emitter:
    """Vector code of one width, written with one builder."""

    def __init__(self, builder: ir.IRBuilder, lanes: int, fused: bool) -> None:
        self.builder = builder
        self.lanes = lanes
        self.fused = fused
        self.vector = ir.VectorType(F32, lanes)

    def integer(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def pointer(self, address: ir.Value, offset: ir.Value | None = None, kind: ir.Type = F32) -> ir.Value:
        at = self.builder.inttoptr(address, kind.as_pointer())
        return at if offset is None else self.builder.gep(at, [offset])

    def load_integers(self, address: ir.Value, count: int, kind: ir.IntType) -> list[ir.Value]:
        at = self.pointer(address, kind=kind)
        loaded = [self.builder.load(self.builder.gep(at, [self.integer(i)])) for i in range(count)]
        return [self.builder.sext(value, I64) for value in loaded] if kind is not I64 else loaded

    def at_vector(self, at: ir.Value, v: int) -> ir.Value:
        return self.builder.bitcast(self.builder.gep(at, [self.integer(v * self.lanes)]), self.vector.as_pointer())

    def load(self, at: ir.Value, v: int) -> ir.Value:
        return self.builder.load(self.at_vector(at, v), align=4)

    def store(self, value: ir.Value, at: ir.Value, v: int) -> None:
        self.builder.store(value, self.at_vector(at, v), align=4)

    def mask(self, count: ir.Value) -> ir.Value:
        """True for the first `count` lanes."""
        numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed("<", numbers, self.splat(count))

    def load_masked(self, at: ir.Value, v: int, mask: ir.Value) -> ir.Value:
        pointer = self.at_vector(at, v)
        kind = ir.FunctionType(self.vector, [pointer.type, I32, mask.type, self.vector])
        load = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.load.v{self.lanes}f32.p0")
        return self.builder.call(load, [pointer, ir.Constant(I32, 4), mask, ir.Constant(self.vector, None)])

    def store_masked(self, value: ir.Value, at: ir.Value, v: int, mask: ir.Value) -> None:
        pointer = self.at_vector(at, v)
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, I32, mask.type])
        store = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.masked.store.v{self.lanes}f32.p0")
        self.builder.call(store, [value, pointer, ir.Constant(I32, 4), mask])

    def splat(self, value: ir.Value) -> ir.Value:
        kind = ir.VectorType(value.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, self.lanes), None))

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.lanes)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        if not self.fused:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{self.lanes}f32")
        return self.builder.call(fma, [a, b, c])

    def begin(self, start: ir.Value, load: Callable[[], list[ir.Value]]) -> list[ir.Value]:
        """The sums before the loop: loaded where start is not 0, else zero."""
        builder = self.builder
        before = builder.block
        with builder.if_then(builder.icmp_signed("!=", start, self.integer(0)), likely=False):
            loaded = load()
            inside = builder.block
        sums = []
        for value in loaded:
            total = builder.phi(self.vector)
            total.add_incoming(ir.Constant(self.vector, None), before)
            total.add_incoming(value, inside)
            sums.append(total)
        return sums

    def loop(
        self, count: ir.Value, sums: list[ir.Value], step: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """The sums after sums = step(c, sums) for c from 0 to count - 1."""
        builder = self.builder
        before = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("columns", "column", "summed"))
        builder.branch(head)
        builder.position_at_end(head)
        c = builder.phi(I64)
        c.add_incoming(self.integer(0), before)
        carried = [builder.phi(self.vector) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", c, count), body, after)
        builder.position_at_end(body)
        stepped = step(c, list(carried))
        c.add_incoming(builder.add(c, self.integer(1)), builder.block)
        for phi, value in zip(carried, stepped, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return list(carried)

    def finish(
        self,
        activation: ir.Value,
        sums: list[ir.Value],
        biases: list[ir.Value],
        store: Callable[[list[ir.Value]], None],
    ) -> None:
        """Store the sums as `activation` (one of the codes above) says."""
        builder = self.builder
        done = builder.append_basic_block("stored")
        otherwise = builder.append_basic_block("partial")
        choice = builder.switch(activation, otherwise)
        for code, function in ((IDENTITY, None), (RELU, self.relu), (GELU, self.gelu)):
            block = builder.append_basic_block("finish")
            choice.add_case(self.integer(code), block)
            builder.position_at_end(block)
            totals = [builder.fadd(total, bias) for total, bias in zip(sums, biases, strict=True)]
            store(totals if function is None else [function(total) for total in totals])
            builder.branch(done)
        builder.position_at_end(otherwise)
        store(sums)
        builder.branch(done)
        builder.position_at_end(done)

    def relu(self, x: ir.Value) -> ir.Value:
        """max(x, 0), NaN for NaN: a comparison with NaN is false."""
        zero = ir.Constant(self.vector, None)
        return self.builder.select(self.builder.fcmp_ordered("<", x, zero), zero, x)

    def gelu(self, x: ir.Value) -> ir.Value:
        """x * Phi(x) of one vector: a call, because sixteen copies in line would only fill the instruction cache."""
        module = self.builder.module
        kind = ir.FunctionType(self.vector, [self.vector])
        function = cgutils.get_or_insert_function(module, kind, f"sparse_kernels_gelu_{self.lanes}_{self.fused}")
        if function.is_declaration:
            function.linkage = "internal"
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            builder.ret(_Emitter(builder, self.lanes, self.fused)._gelu(function.args[0]))
        return self.builder.call(function, [x])

    def _gelu(self, x: ir.Value) -> ir.Value:
        """max(x, 0) - a*Q(a), a = |x| and Q the upper tail of the normal distribution; the limits at infinity."""
        builder = self.builder
        absolute = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(self.vector, [self.vector]), f"llvm.fabs.v{self.lanes}f32"
        )
        a = builder.call(absolute, [x])
        flat = self.constant(GELU_FLAT)
        a = builder.select(builder.fcmp_ordered(">", a, flat), flat, a)
        p = self.constant(GELU_POLYNOMIAL[-1])
        for coefficient in reversed(GELU_POLYNOMIAL[:-1]):
            p = self.multiply_add(p, a, self.constant(coefficient))
        for _ in range(2):
            p = builder.fmul(p, p)
        tail = builder.fdiv(builder.fmul(a, self.constant(0.5)), p)
        return builder.fsub(self.relu(x), tail)

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """The columns of a square tile: log2(lanes) rounds, each swaps the off-diagonal quarters of every block."""
        span = 1
        while span < self.lanes:
            blocks = [(i // span) % 2 for i in range(self.lanes)]
            upper = [i if not b else i - span + self.lanes for i, b in enumerate(blocks)]
            lower = [i + span if not b else i + self.lanes for i, b in enumerate(blocks)]
            swapped = list(rows)
            for i, block in enumerate(blocks):
                if not block:
                    pair = rows[i], rows[i + span]
                    swapped[i] = self._shuffle(*pair, upper)
                    swapped[i + span] = self._shuffle(*pair, lower)
            rows, span = swapped, 2 * span
        return rows

    def _shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, self.lanes), lanes))
