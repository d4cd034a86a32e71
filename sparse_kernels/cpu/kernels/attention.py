"""Attention of a converted model: softmax(q @ k.T * scale) @ v for every head, dense, by the tile of `tokens`.

A model whose linear layers are sparse spends much of its time here, so this is as fast as they are. Each head's keys
and values are laid out as panels once; then 8 queries at a time go all the way: their scores, softmax and result stay
in the first-level cache. The scores of 8 queries with all keys are kept, so nothing has to be corrected afterwards.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.register_tiles import (
    AHEAD,
    ROWS,
    TokenTileForm,
    copy_vector,
    token_tile,
    tokens_to_lanes,
)
from sparse_kernels.cpu.codegen.softmax import SOFTMAX_ROWS, softmax
from sparse_kernels.cpu.codegen.tile_operands import (
    WORTH_OF_FLOATS,
    Epilogue,
    Matrix,
    TileWeights,
    TokenRows,
    TokenSums,
    WeightFetch,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, QUADS_BY_UNIT
from sparse_kernels.cpu.kernels import int8_attention
from sparse_kernels.cpu.kernels.int8_attention import MOST_KEYS, VECTORS, ByteRoom, plan_room
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE, borrow, give_back
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.plan_protocol import Array

# Where an array lies: the address of its first element, and how many elements a batch, a head and a token are apart.
Place = tuple[int, int, int, int]


def attention(
    q: Array, k: Array, v: Array, out: Array, scale: float | None = None, *, may_round: bool = False
) -> Array:
    """softmax(q @ k.T * scale) @ v, float32: q (batch, heads, n, d), k (batch, heads, keys, d), v (..., keys, e).

    Written to out (batch, heads, n, e), which is returned. scale: 1 / sqrt(d) by default. Any strides that are
    multiples of 4 bytes, with the last dimension contiguous. NaN and infinity spread as in dense code. may_round: to
    eight bits, where that is faster (`int8_attention`); then a result may be NaN where dense code gives infinity.
    ValueError for shapes or strides that do not fit, and for an `out` that is read-only or shares memory with the
    others.
    """
    if any(array.ndim != 4 for array in (q, k, v, out)):
        raise ValueError(f"attention takes arrays of 4 dimensions, not {[array.ndim for array in (q, k, v, out)]}")
    batch, heads, n, d = q.shape
    keys, e = v.shape[2:]
    if k.shape != (batch, heads, keys, d) or v.shape[:2] != (batch, heads) or out.shape != (batch, heads, n, e):
        shapes = ", ".join(str(array.shape) for array in (q, k, v, out))
        raise ValueError(
            f"attention takes (batch, heads, n, d), (..., keys, d), (..., keys, e), (..., n, e), not {shapes}"
        )
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        if array.dtype != np.float32 or array.strides[3] != 4 or any(stride % 4 for stride in array.strides):
            raise ValueError(
                f"{name} must be float32, its last dimension contiguous, not {array.dtype}, {array.strides}"
            )
    if not out.flags.writeable or any(np.may_share_memory(out, array) for array in (q, k, v)):
        raise ValueError("out must be writable and share no memory with q, k and v")
    if not out.size:
        return out
    if not keys:
        raise ValueError("attention needs at least one key")
    run(_place(q), _place(k), _place(v), _place(out), (batch, heads, n, d, keys, e), scale, may_round)
    return out


def _place(array: Array) -> Place:
    batch, head, token, _ = (stride // array.itemsize for stride in array.strides)
    return array.ctypes.data, batch, head, token


def run(
    q: Place, k: Place, v: Place, out: Place, sizes: tuple[int, ...], scale: float | None, may_round: bool
) -> None:
    """Do the same for arrays at these places; nothing is checked. sizes: those of `AttentionSizes`."""
    scale = 1 / math.sqrt(sizes[3]) if scale is None else float(scale)
    steps = Steps(*q[1:]), Steps(*k[1:]), Steps(*v[1:]), Steps(*out[1:])
    attend, needed = bind_attention(steps, AttentionSizes(*sizes), scale, count_threads(), may_round)
    scratch = borrow(needed)
    attend(q[0], k[0], v[0], out[0], scratch.address)
    give_back(scratch)


class AttentionCall(NamedTuple):
    """Addresses of q, k, v, the result, and of scratch memory at a cache line."""

    q_at: int
    k_at: int
    v_at: int
    out_at: int
    scratch_at: int


class AttentionSizes(NamedTuple):
    """Sizes of q (batch, heads, n, d), k (batch, heads, keys, d), v (batch, heads, keys, e); all positive."""

    batch: int
    heads: int
    n: int
    d: int
    keys: int
    e: int


class Steps(NamedTuple):
    """How many elements of an array a batch, a head and a token are apart."""

    batch: int
    head: int
    token: int


class AttentionLayer(NamedTuple):
    """What attention knows before it is called.

    q, k, v, out: steps of the arrays. sizes: of the arrays. scale: of the scores. columns: int32, 0 1 2 ... up to the
    larger of d and keys. elements: of scratch memory for each part. splits: shares of a head. parts: threads. room:
    where parts of scratch memory begin; only attention in eight bits looks at it.
    """

    q: Steps
    k: Steps
    v: Steps
    out: Steps
    sizes: AttentionSizes
    scale: float
    columns: NDArray[np.int32]
    elements: int
    splits: int
    parts: int
    room: ByteRoom


@lru_cache(maxsize=256)
def bind_attention(
    steps: tuple[Steps, Steps, Steps, Steps], sizes: AttentionSizes, scale: float, threads: int, may_round: bool
) -> tuple[BoundKernel, int]:
    """Return attention of these sizes as a function of `AttentionCall`, and the elements of scratch that it needs.

    Heads are shared by threads; where there are fewer than threads, so are their queries, in whole tiles.
    """
    batch, heads, n, d, keys, e = sizes
    target = find_cpu_target()
    tokens, width = 8 if target.registers >= 32 else 4, VECTORS * target.lanes
    key_panels, value_panels = -(-keys // width), -(-e // width)
    elements = key_panels * d * width + value_panels * keys * width + tokens * key_panels * width
    elements = -(-elements // LINE) * LINE
    room = plan_room(sizes, tokens, target.lanes)
    in_bytes = may_round and keys <= MOST_KEYS and target.quads == QUADS_BY_UNIT
    if in_bytes:
        elements = room.size
    splits = min(-(-threads // (batch * heads)), -(-n // tokens))
    columns = np.arange(max(keys, d), dtype=np.int32)
    layer = AttentionLayer(*steps, sizes, scale, columns, elements, splits, threads, room)
    if in_bytes:
        kernel = int8_attention.build_kernel(tokens, target.lanes, target.fused, target.quads)
    else:
        kernel = build_kernel(tokens, target.lanes, target.fused)
    return kernel.bind(AttentionCall, layer), elements * threads


@inline
def lay_out_keys(lanes: int, width: int, source_at: int, step: int, sizes: AttentionSizes, target_at: int) -> None:
    """Lay the keys of a head out in panels of `width`; step: elements from one key to the next."""
    keys, d = sizes.keys, sizes.d
    # All of the panels is written: what an earlier call left there may be slow to multiply.
    for key in range(0, (keys + width - 1) // width * width, lanes):
        panel_at = target_at + (key // width * d * width + key % width) * 4
        first = min(key, keys - 1)
        source = Matrix(source_at + first * step * 4, step)
        tokens_to_lanes((lanes, FLOATS), source, Matrix(panel_at, width), keys - first, d)


@inline
def lay_out_values(lanes: int, width: int, source_at: int, step: int, sizes: AttentionSizes, target_at: int) -> None:
    """Lay the values of a head out in panels of `width`; step: elements from one value to the next."""
    keys, e = sizes.keys, sizes.e
    for panel in range((e + width - 1) // width):
        for key in range(keys):
            row_at = target_at + (panel * keys + key) * width * 4
            value_at = source_at + (key * step + panel * width) * 4
            for first in range(0, width, lanes):
                copy_vector(lanes, FLOATS, value_at + first * 4, row_at + first * 4, e - panel * width - first)


class HeadPanels(NamedTuple):
    """Keys and values of a head, as panels. keys_at, values_at: addresses. columns_at: address of 0 1 2 ..."""

    keys_at: int
    values_at: int
    columns_at: int


@inline
def attend_tile(
    form: Any,
    head: HeadPanels,
    queries: TokenRows,
    results: Matrix,
    sizes: AttentionSizes,
    scale: Any,
    scores_at: int,
) -> None:
    """Attend to a tile of queries: their scores, softmax and results. form: of `token_tile`, sums as they are."""
    tokens, vectors, lanes, fused, _, _, _, _, _, _, _, _ = form
    width = vectors * lanes
    key_panels = (sizes.keys + width - 1) // width
    row, left, unfetched = key_panels * width, queries.left, WeightFetch(0, 0)
    nothing = Epilogue(0, 0, WORTH_OF_FLOATS)
    for panel in range(key_panels):
        weights = TileWeights(head.keys_at + panel * sizes.d * width * 4, head.columns_at, sizes.d)
        scores = TokenSums(scores_at + panel * width * 4, row, width, 0)
        token_tile(form, weights, queries, scores, nothing, unfetched)
    for t in range(0, min(tokens, left), SOFTMAX_ROWS):
        rows = TokenRows(scores_at + t * row * 4, row, left - t)
        softmax((SOFTMAX_ROWS, lanes, fused, 0), rows, sizes.keys, scale, 0)
    for panel in range((sizes.e + width - 1) // width):
        weights = TileWeights(head.values_at + panel * sizes.keys * width * 4, head.columns_at, sizes.keys)
        y = TokenSums(results.address + panel * width * 4, results.stride, sizes.e - panel * width, 0)
        token_tile(form, weights, TokenRows(scores_at, row, left), y, nothing, unfetched)


@cache
def build_kernel(tokens: int, lanes: int, fused: bool) -> ParallelKernel:
    """Return the loop over heads and tiles of `tokens` queries.

    It is called with `AttentionCall` and `AttentionLayer`.
    """
    form = tuple(TokenTileForm(tokens, VECTORS, lanes, int(fused), 4, AHEAD, 0, ROWS, 0, 0, 0))
    width = VECTORS * lanes

    @build_parallel_kernel
    def attend(part: int, call: AttentionCall, layer: AttentionLayer) -> None:
        q, k, v, out, sizes, scale = layer.q, layer.k, layer.v, layer.out, layer.sizes, np.float32(layer.scale)
        splits, heads, n = layer.splits, sizes.heads, sizes.n
        key_panels, value_panels = (sizes.keys + width - 1) // width, (sizes.e + width - 1) // width
        tiles, items = (n + tokens - 1) // tokens, sizes.batch * heads * splits
        keys_at = call.scratch_at + part * layer.elements * 4
        values_at = keys_at + key_panels * sizes.d * width * 4
        scores_at = values_at + value_panels * sizes.keys * width * 4
        head = HeadPanels(keys_at, values_at, layer.columns.ctypes.data)
        for item in range(items * part // layer.parts, items * (part + 1) // layer.parts):
            b, h, share = item // splits // heads, item // splits % heads, item % splits
            keys_source, values_source = b * k.batch + h * k.head, b * v.batch + h * v.head
            lay_out_keys(lanes, width, call.k_at + keys_source * 4, k.token, sizes, keys_at)
            lay_out_values(lanes, width, call.v_at + values_source * 4, v.token, sizes, values_at)
            for tile in range(tiles * share // splits, tiles * (share + 1) // splits):
                token = tile * tokens
                queries_at = call.q_at + (b * q.batch + h * q.head + token * q.token) * 4
                results_at = call.out_at + (b * out.batch + h * out.head + token * out.token) * 4
                queries, results = TokenRows(queries_at, q.token, n - token), Matrix(results_at, out.token)
                attend_tile(form, head, queries, results, sizes, scale, scores_at)

    return attend
