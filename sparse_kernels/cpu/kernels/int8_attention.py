"""Attention of a model in eight bits: queries, keys, probabilities and values are bytes, and products are of quads.

Queries and keys have a step each, by their own largest value. Values have a step for each output. Probabilities
have 255 steps below the largest one of a query, so this is for up to MOST_KEYS keys: what lies below half a step of
more keys than that would be missed. Everything else is as in `attention`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sparse_kernels.cpu.codegen.attention_bytes import (
    ByteRows,
    ValueSteps,
    average_rows,
    lay_out_value_panel,
    read_rows,
    sign_key_panel,
)
from sparse_kernels.cpu.codegen.register_tiles import (
    AHEAD,
    FINISHED,
    ROWS,
    copy_vector,
    token_tile,
    tokens_to_lanes,
)
from sparse_kernels.cpu.codegen.softmax import SOFTMAX_ROWS, softmax
from sparse_kernels.cpu.codegen.tile_operands import (
    Epilogue,
    Matrix,
    QuadWorth,
    TileWeights,
    TokenRows,
    TokenSums,
    WeightFetch,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, IDENTITY
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE
from sparse_kernels.formats.int8 import QUAD

MOST_KEYS = 512
"""Keys, at most."""

VECTORS = 2  # of a register tile
ROWS_READ = 4  # at once


class ByteTileForm(NamedTuple):
    """A tile of queries.

    tokens: of the tile. lanes: of a vector. fused: multiply-adds are fused. numbers: how quads are multiplied.
    """

    tokens: int
    lanes: int
    fused: int
    numbers: int


class ByteRoom(NamedTuple):
    """Where the parts of scratch memory begin, in elements of 32 bits, and the size of all.

    keys, values: panels of quads. key_offsets, value_offsets, key_steps, value_steps: what their sums are worth.
    key_means, value_means: what is taken from them. block: rows of bytes. query_steps,
    probability_steps: of the queries of a tile. scores: of these with all keys.
    """

    keys: int
    key_offsets: int
    key_steps: int
    key_means: int
    values: int
    value_offsets: int
    value_steps: int
    value_means: int
    block: int
    query_steps: int
    probability_steps: int
    scores: int
    size: int


def plan_room(sizes: Any, tokens: int, lanes: int) -> ByteRoom:
    """Return the room that a thread needs; sizes: `AttentionSizes`, tokens: queries of a tile."""
    width = VECTORS * lanes
    key_width, value_width = -(-sizes.keys // width) * width, -(-sizes.e // width) * width
    whole_row = -(-sizes.d // lanes) * lanes
    needed = [
        key_width * -(-sizes.d // QUAD), key_width, key_width, whole_row,
        value_width * -(-sizes.keys // QUAD), width, value_width, value_width,
        max(tokens, lanes) * whole_row // QUAD, tokens, tokens, tokens * key_width,
    ]  # fmt: skip
    begins = np.cumsum([0, *(-(-size // LINE) * LINE for size in needed)])
    return ByteRoom(*begins.tolist())


@inline
def lay_out_byte_keys(form: Any, source: Matrix, sizes: Any, room: ByteRoom, scratch_at: int) -> None:
    """Lay the keys of a head out as panels of quads, with their steps and offsets."""
    _, lanes, fused, numbers = form
    width, keys, d = VECTORS * lanes, sizes.keys, sizes.d
    quads, stride = (d + QUAD - 1) // QUAD, (d + lanes - 1) // lanes * lanes // QUAD
    means_at = scratch_at + room.key_means * 4
    block_at, steps_at = scratch_at + room.block * 4, scratch_at + room.key_steps * 4
    average_rows((lanes, fused), source, keys, d, means_at)
    # All of the panels is written: what an earlier call left there may be anything.
    for key in range(0, (keys + width - 1) // width * width, lanes):
        for i in range(0, lanes, ROWS_READ):
            first = min(key + i, keys - 1)
            rows = TokenRows(source.address + first * source.stride * 4, source.stride, keys - first)
            target = ByteRows(block_at + i * stride * 4, stride * 4, steps_at + (key + i) * 4, means_at)
            read_rows((ROWS_READ, lanes, fused), rows, target, d)
        panel_at = scratch_at + (room.keys + key // width * quads * width + key % width) * 4
        tokens_to_lanes((lanes, FLOATS), Matrix(block_at, stride), Matrix(panel_at, width), lanes, quads)
    for panel in range((keys + width - 1) // width):
        panel_at = scratch_at + (room.keys + panel * quads * width) * 4
        sign_key_panel(
            (lanes, VECTORS, fused, numbers), panel_at, quads, scratch_at + (room.key_offsets + panel * width) * 4
        )


@inline
def lay_out_byte_values(form: Any, source: Matrix, sizes: Any, room: ByteRoom, scratch_at: int) -> None:
    """Lay the values of a head out as panels of quads, with their steps and means."""
    _, lanes, fused, numbers = form
    width, keys, e = VECTORS * lanes, sizes.keys, sizes.e
    quads, means_at = (keys + QUAD - 1) // QUAD, scratch_at + room.value_means * 4
    average_rows((lanes, fused), source, keys, e, means_at)
    for panel in range((e + width - 1) // width):
        behind = panel * width * 4
        part = Matrix(source.address + behind, source.stride)
        reading = ValueSteps(means_at + behind, scratch_at + room.value_steps * 4 + behind)
        panel_at = scratch_at + room.values * 4 + behind * quads
        lay_out_value_panel((lanes, VECTORS, fused, numbers), part, keys, e - panel * width, panel_at, reading)
    for first in range(0, width, lanes):
        zeros_at = scratch_at + (room.value_offsets + first) * 4
        copy_vector(lanes, FLOATS, zeros_at, zeros_at, 0)


class HeadBytes(NamedTuple):
    """Keys and values of a head, as bytes. room: where their parts lie. scratch_at: where it begins. columns_at:
    address of 0 1 2 ..."""

    room: Any
    scratch_at: int
    columns_at: int


@inline
def attend_byte_tile(form: Any, head: HeadBytes, queries: TokenRows, results: Matrix, sizes: Any, scale: Any) -> None:
    """Attend to a tile of queries: their bytes, scores, softmax and results."""
    tokens, lanes, fused, numbers = form
    room, scratch_at, columns_at = head.room, head.scratch_at, head.columns_at
    scores_form = (tokens, VECTORS, lanes, fused, 4, AHEAD, 0, ROWS, 0, 0, 0, numbers)  # of `TokenTileForm`
    results_form = (tokens, VECTORS, lanes, fused, 4, AHEAD, 0, FINISHED, 0, 0, 0, numbers)
    width, d, keys, e = VECTORS * lanes, sizes.d, sizes.keys, sizes.e
    quads, stride = (d + QUAD - 1) // QUAD, (d + lanes - 1) // lanes * lanes // QUAD
    key_panels, key_quads = (keys + width - 1) // width, (keys + QUAD - 1) // QUAD
    row, left, unfetched = key_panels * width, queries.left, WeightFetch(0, 0)
    block_at, query_steps_at = scratch_at + room.block * 4, scratch_at + room.query_steps * 4
    scores_at, shares_at = scratch_at + room.scores * 4, scratch_at + room.probability_steps * 4
    for t in range(0, min(tokens, left), ROWS_READ):
        rows = TokenRows(queries.address + t * queries.stride * 4, queries.stride, left - t)
        target = ByteRows(block_at + t * stride * 4, stride * 4, query_steps_at + t * 4, 0)
        read_rows((ROWS_READ, lanes, fused), rows, target, d)
    x = TokenRows(block_at, stride, left)
    for panel in range(key_panels):
        behind = panel * width * 4
        weights = TileWeights(scratch_at + room.keys * 4 + behind * quads, columns_at, quads)
        worth = QuadWorth(
            scratch_at + room.key_offsets * 4 + behind, scratch_at + room.key_steps * 4 + behind, query_steps_at
        )
        scores = TokenSums(scores_at + behind, row, width, 0)
        token_tile(scores_form, weights, x, scores, Epilogue(0, 0, worth), unfetched)
    for t in range(0, min(tokens, left), SOFTMAX_ROWS):
        rows = TokenRows(scores_at + t * row * 4, row, left - t)
        softmax((SOFTMAX_ROWS, lanes, fused, 1), rows, keys, scale, shares_at + t * 4)
    for panel in range((e + width - 1) // width):
        behind = panel * width * 4
        weights = TileWeights(scratch_at + room.values * 4 + behind * key_quads, columns_at, key_quads)
        worth = QuadWorth(scratch_at + room.value_offsets * 4, scratch_at + room.value_steps * 4 + behind, shares_at)
        finish = Epilogue(scratch_at + room.value_means * 4 + behind, IDENTITY, worth)
        y = TokenSums(results.address + behind, results.stride, e - panel * width, 0)
        token_tile(results_form, weights, TokenRows(scores_at, row, left), y, finish, unfetched)


@cache
def build_kernel(tokens: int, lanes: int, fused: bool, numbers: int) -> ParallelKernel:
    """Return the loop over heads and tiles of `tokens` queries.

    It is called with `AttentionCall` and `AttentionLayer`. numbers: how quads are multiplied.
    """

    form = tuple(ByteTileForm(tokens, lanes, int(fused), numbers))

    @build_parallel_kernel
    def attend(part: int, call: Any, layer: Any) -> None:
        q, k, v, out, sizes, scale = layer.q, layer.k, layer.v, layer.out, layer.sizes, np.float32(layer.scale)
        splits, heads, n, room = layer.splits, sizes.heads, sizes.n, layer.room
        tiles, items = (n + tokens - 1) // tokens, sizes.batch * heads * splits
        scratch_at, columns_at = call.scratch_at + part * layer.elements * 4, layer.columns.ctypes.data
        head = HeadBytes(room, scratch_at, columns_at)
        for item in range(items * part // layer.parts, items * (part + 1) // layer.parts):
            b, h, share = item // splits // heads, item // splits % heads, item % splits
            keys = Matrix(call.k_at + (b * k.batch + h * k.head) * 4, k.token)
            values = Matrix(call.v_at + (b * v.batch + h * v.head) * 4, v.token)
            lay_out_byte_keys(form, keys, sizes, room, scratch_at)
            lay_out_byte_values(form, values, sizes, room, scratch_at)
            for tile_number in range(tiles * share // splits, tiles * (share + 1) // splits):
                token = tile_number * tokens
                queries_at = call.q_at + (b * q.batch + h * q.head + token * q.token) * 4
                results_at = call.out_at + (b * out.batch + h * out.head + token * out.token) * 4
                queries, results = TokenRows(queries_at, q.token, n - token), Matrix(results_at, out.token)
                attend_byte_tile(form, head, queries, results, sizes, scale)

    return attend
