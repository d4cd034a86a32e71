"""Attention of a converted model: softmax(q @ k.T * scale) @ v for every head, dense, by the tile of `tokens`.

A model whose linear layers are sparse spends much of its time here, so this is as fast as they are. Each head's keys
and values are laid out as panels once; then 8 queries at a time go all the way: their scores, softmax and result stay
in the first-level cache. The scores of 8 queries with all keys are kept, so nothing has to be corrected afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from sparse_kernels.cpu.codegen.cpu_target import host
from sparse_kernels.cpu.codegen.register_tiles import AHEAD, ROWS, copy_vector, token_tile, tokens_to_lanes
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, Emitter, with_literals
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, in_parts
from sparse_kernels.cpu.runtime.scratch_buffers import LINE, borrow, give_back
from sparse_kernels.cpu.runtime.threads import count
from sparse_kernels.plan_protocol import Array

# Where an array lies: the address of its first element, and how many elements a batch, a head and a token are apart.
Place = tuple[int, int, int, int]

VECTORS = 2  # of a register tile


def attention(q: Array, k: Array, v: Array, out: Array, scale: float | None = None) -> Array:
    """softmax(q @ k.T * scale) @ v, float32: q (batch, heads, n, d), k (batch, heads, keys, d), v (..., keys, e).

    Written to out (batch, heads, n, e), which is returned. scale: 1 / sqrt(d) by default. Any strides that are
    multiples of 4 bytes, with the last dimension contiguous. NaN and infinity spread as in dense code. ValueError for
    shapes or strides that do not fit, and for an `out` that is read-only or shares memory with the others.
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
    run(_place(q), _place(k), _place(v), _place(out), (batch, heads, n, d, keys, e), scale)
    return out


def _place(array: Array) -> Place:
    batch, head, token, _ = (stride // array.itemsize for stride in array.strides)
    return array.ctypes.data, batch, head, token


def run(q: Place, k: Place, v: Place, out: Place, sizes: tuple[int, ...], scale: float | None) -> None:
    """The same for arrays at these places; nothing is checked. sizes: batch, heads, n, d, keys, e, all positive."""
    scale = 1 / math.sqrt(sizes[3]) if scale is None else float(scale)
    work, needed = prepared((q[1:], k[1:], v[1:], out[1:]), sizes, scale, count())
    scratch = borrow(needed)
    work(q[0], k[0], v[0], out[0], scratch.at)
    give_back(scratch)


@lru_cache(maxsize=256)
def prepared(
    steps: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], scale: float, threads: int
) -> tuple[BoundKernel, int]:
    """All attention of these sizes (as of `run`) by so many threads, and the elements of scratch that it needs.

    steps: of `Place`, for q, k, v and out, whose addresses it is called with, and that of scratch. Heads are shared;
    where there are fewer than threads, so are their queries, in whole tiles.
    """
    batch, heads, n, d, keys, e = sizes
    target = host()
    tokens, width = 8 if target.registers >= 32 else 4, VECTORS * target.lanes
    key_panels, value_panels = -(-keys // width), -(-e // width)
    elements = key_panels * d * width + value_panels * keys * width + tokens * key_panels * width
    splits = min(-(-threads // (batch * heads)), -(-n // tokens))
    elements = -(-elements // LINE) * LINE
    work = kernel(tokens, target.lanes, target.fused).bound(
        "q_at k_at v_at out_at scratch_at", steps=steps, sizes=sizes, scale=scale,
        columns=np.arange(max(keys, d), dtype=np.int32), elements=elements, splits=splits, parts=threads,
    )  # fmt: skip
    return work, elements * threads


@with_literals
def softmax(typing_context: Any, lanes: Any, fused: Any, row: Any, count: Any, scale: Any) -> Any:
    """row[i] = exp(scale * row[i]) over their sum, for i < count, in place; 0 up to the next whole vector."""
    signature = types.void(lanes, fused, types.intp, types.intp, types.float32)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        n_lanes, fuse = (int(literal.literal_value) for literal in signature.args[:2])
        row, count, scale = args[2:]
        emit = Emitter(builder, n_lanes, bool(fuse))
        pointer, factor = emit.pointer(row), emit.splat(scale)
        minus_infinity = emit.constant(-math.inf)

        def scaled(first: ir.Value) -> ir.Value:
            value = builder.fmul(emit.load(builder.gep(pointer, [first]), 0), factor)
            return builder.select(emit.mask(builder.sub(count, first)), value, minus_infinity)

        def larger(first: ir.Value, most: list[ir.Value]) -> list[ir.Value]:
            return [emit.maximum(most[0], scaled(first))]

        def raised(first: ir.Value, total: list[ir.Value]) -> list[ir.Value]:
            value = emit.exp(builder.fsub(scaled(first), most))
            emit.store(value, builder.gep(pointer, [first]), 0)
            return [builder.fadd(total[0], value)]

        def divided(first: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = builder.gep(pointer, [first])
            emit.store(builder.fmul(emit.load(at, 0), inverse), at, 0)
            return []

        most = emit.over_lanes(emit.loop(count, [minus_infinity], larger, stride=n_lanes)[0], emit.maximum)
        total = emit.over_lanes(emit.loop(count, emit.zeros(1), raised, stride=n_lanes)[0], builder.fadd)
        inverse = builder.fdiv(emit.constant(1.0), total)
        emit.loop(count, [], divided, stride=n_lanes)
        return context.get_dummy_value()

    return signature, generate


@cache
def kernel(tokens: int, lanes: int, fused: bool) -> ParallelKernel:
    """The compiled loop over heads and tiles of `tokens` queries.

    Called with (addresses of q, k, v and out; for each how many elements a batch, a head and a token are apart;
    (batch, heads, n, d, keys, e); scale; 0 1 2 ... up to the larger of d and keys, int32; address of scratch, its
    elements for each part; shares of a head; parts).
    """
    fuse = int(fused)
    form, ahead = ROWS, AHEAD
    vectors = VECTORS
    width = vectors * lanes

    @in_parts
    def attend(  # type: ignore[no-untyped-def]
        part, q_at, k_at, v_at, out_at, steps, sizes, scale, columns, scratch_at, elements, splits, parts
    ):  # fmt: skip
        batch, heads, n, d, keys, e = sizes
        q, k, v, out = steps
        q_step, k_step, v_step, out_step = q[2], k[2], v[2], out[2]
        scale = np.float32(scale)
        key_panels, value_panels = (keys + width - 1) // width, (e + width - 1) // width
        tiles = (n + tokens - 1) // tokens
        items = batch * heads * splits
        row, all_keys, all_values = key_panels * width, key_panels * d * width, value_panels * keys * width
        columns_at = columns.ctypes.data
        keys_at = scratch_at + part * elements * 4
        values_at = keys_at + all_keys * 4
        scores_at = values_at + all_values * 4
        for item in range(items * part // parts, items * (part + 1) // parts):
            b, h = item // splits // heads, item // splits % heads
            share = item % splits
            q_head, k_head, v_head, out_head = (
                q_at + (b * q[0] + h * q[1]) * 4,
                k_at + (b * k[0] + h * k[1]) * 4,
                v_at + (b * v[0] + h * v[1]) * 4,
                out_at + (b * out[0] + h * out[1]) * 4,
            )
            # All of the panels is written: what an earlier call left there may be slow to multiply.
            for key in range(0, row, lanes):
                there = keys_at + (key // width * d * width + key % width) * 4
                source = min(key, keys - 1)
                tokens_to_lanes(lanes, FLOATS, k_head + source * k_step * 4, k_step, keys - source, d, there, width)
            for panel in range(value_panels):
                for key in range(keys):
                    there = values_at + (panel * keys + key) * width * 4
                    source = v_head + (key * v_step + panel * width) * 4
                    for first in range(0, width, lanes):
                        copy_vector(lanes, FLOATS, source + first * 4, there + first * 4, e - panel * width - first)
            for tile in range(tiles * share // splits, tiles * (share + 1) // splits):
                token = tile * tokens
                queries, results = q_head + token * q_step * 4, out_head + token * out_step * 4
                for panel in range(key_panels):
                    token_tile(
                        tokens,
                        vectors,
                        lanes,
                        fuse,
                        4,
                        ahead,
                        0,
                        form,
                        0,
                        0,
                        0,
                        keys_at + panel * d * width * 4,
                        columns_at,
                        d,
                        queries,
                        q_step,
                        n - token,
                        scores_at + panel * width * 4,
                        row,
                        width,
                        0,
                        0,
                        0,
                        0,
                        0,
                    )
                for t in range(min(tokens, n - token)):
                    softmax(lanes, fuse, scores_at + t * row * 4, keys, scale)
                for panel in range(value_panels):
                    token_tile(
                        tokens,
                        vectors,
                        lanes,
                        fuse,
                        4,
                        ahead,
                        0,
                        form,
                        0,
                        0,
                        0,
                        values_at + panel * keys * width * 4,
                        columns_at,
                        keys,
                        scores_at,
                        row,
                        n - token,
                        results + panel * width * 4,
                        out_step,
                        e - panel * width,
                        0,
                        0,
                        0,
                        0,
                        0,
                    )

    return attend
