"""Emit the product of rows that share no columns: one stream of weights and places, read from front to back.

A row of the stream is two words (how many columns it has, and its number), then its columns: four at a time with
their places, and what is left one by one. `kernels.unstructured_rows` lays it out.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.codegen.register_tiles import AHEAD, ENOUGH
from sparse_kernels.cpu.codegen.row_results import convert_row_sums
from sparse_kernels.cpu.codegen.tile_operands import QuadWorth, StreamEpilogue, WeightStream
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64, QUADS, Emitter

# Columns that are multiplied together, the floats in 128 bits; words that they and their places take.
FOUR = 4
FOUR_WORDS = FOUR + FOUR // 2


class StreamForm(NamedTuple):
    """How rows of a stream are multiplied.

    vectors: of x and y that lie side by side. lanes: of a vector. fused: multiply-adds are fused. halvings: how often
    vectors were halved since the places in the stream were worked out. numbers: what is multiplied.
    """

    vectors: int
    lanes: int
    fused: int
    halvings: int
    numbers: int


@vector_code(StreamForm)
def multiply_stream(
    builder: ir.IRBuilder,
    form: StreamForm,
    width: ir.Value,
    stream: WeightStream,
    x: ir.Value,
    y: ir.Value,
    finish: StreamEpilogue,
) -> None:
    """y[row, v] = activation(start + sum over c of weights[c] * x[places[c], v] + bias[row]) for rows of a stream.

    width: how many vectors there are, 1 to `vectors`. x, y: addresses of packed columns and rows of `vectors`
    vectors. With quads a column is four columns of bytes, in the place of a float32. What sums are worth hangs on
    the row, and on the token: a lane of a vector.

    The stream is fetched ahead. From memory 128 tokens have 1.2 to 1.3 times the speed, and deep convolutions of
    single images 1.15 to 1.2 times. Nothing loses more than 2% where the stream is near (512 to 3072 columns, 75% and
    90% sparsity, Zen 5).
    """
    most, n_lanes, halved = form.vectors, form.lanes, form.halvings
    emit = Emitter(builder, n_lanes, bool(form.fused))
    x_pointer, y_pointer, bias_pointer = emit.pointer(x), emit.pointer(y), emit.pointer(finish.bias)

    def pass_with(vectors: int) -> None:
        # Columns take turns with sets of sums, because an addition must finish before the next one to the same sum
        # begins.
        sets = min(FOUR, -(-ENOUGH // vectors))

        def add(sums: list[ir.Value], turn: int, weight: ir.Value, place: ir.Value) -> None:
            at = builder.gep(x_pointer, [builder.lshr(place, emit.integer(halved)) if halved else place])
            for v in range(vectors):
                index = turn % sets * vectors + v
                if form.numbers in QUADS:
                    sums[index] = emit.multiply_quads(emit.load(at, v), weight, sums[index], form.numbers)
                else:
                    sums[index] = emit.multiply_add(weight, emit.load(at, v), sums[index])

        def row(at: ir.Value) -> ir.Value:
            count, number = emit.load_pair(at)
            columns = builder.gep(at, [emit.integer(2)])
            output = builder.gep(y_pointer, [builder.mul(number, emit.integer(most * n_lanes))])

            def two_fours(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                # Once in 48 bytes. With each four it takes 5% longer where the stream is near.
                emit.will_load(builder.gep(columns, [builder.add(word, emit.integer(AHEAD))]))
                return four(builder.add(word, emit.integer(FOUR_WORDS)), four(word, sums))

            def four(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                sums, here = list(sums), builder.gep(columns, [word])
                places = emit.load_four_shorts(builder.gep(here, [emit.integer(FOUR)]))
                for turn, (weight, place) in enumerate(zip(emit.splat_four(here), places, strict=True)):
                    add(sums, turn, weight, place)
                return sums

            def one(word: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                sums, here = list(sums), builder.gep(columns, [word])
                weight, place = emit.splat(builder.load(here)), builder.gep(here, [emit.integer(1)])
                place = builder.load(builder.bitcast(place, I32.as_pointer()))
                add(sums, 0, weight, builder.zext(place, I64))
                return sums

            fours, ones = builder.lshr(count, emit.integer(2)), builder.and_(count, emit.integer(FOUR - 1))
            whole = builder.mul(fours, emit.integer(FOUR_WORDS))
            words = builder.add(whole, builder.mul(ones, emit.integer(2)))
            eights = builder.mul(builder.lshr(count, emit.integer(3)), emit.integer(2 * FOUR_WORDS))
            sums = emit.loop(eights, emit.zeros(sets * vectors), two_fours, stride=2 * FOUR_WORDS)
            sums = emit.loop(whole, sums, four, start=eights, stride=FOUR_WORDS)
            sums = emit.loop(words, sums, one, start=whole, stride=2)
            for _ in range(sets - 1):
                pairs = zip(sums[:vectors], sums[-vectors:], strict=True)
                sums = [emit.add(a, b, form.numbers) for a, b in pairs] + sums[vectors:-vectors]
            sums = emit.continued(
                finish.add_present, sums, lambda: [emit.load(output, v) for v in range(vectors)], form.numbers
            )

            def biases() -> list[ir.Value]:
                return [emit.splat(builder.load(builder.gep(bias_pointer, [number])))] * vectors

            def store(sums: list[ir.Value]) -> None:
                for v, total in enumerate(sums):
                    emit.store(total, output, v)

            def value(sums: list[ir.Value]) -> list[ir.Value]:
                if form.numbers not in QUADS:
                    return sums
                behind, (offsets, scales, token_scales) = builder.mul(number, emit.integer(4)), finish.worth
                here = QuadWorth(builder.add(offsets, behind), builder.add(scales, behind), token_scales)
                return convert_row_sums(emit, sums, vectors, here)

            emit.finish(finish.activation, sums, biases, store, value)
            return builder.gep(columns, [words])

        emit.walk(emit.pointer(stream.address), stream.rows, row)

    emit.choose(width, {n: partial(pass_with, n) for n in range(1, most + 1)})
