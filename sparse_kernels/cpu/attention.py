"""Attention of a converted model: softmax(q @ k.T * scale) @ v for every head, dense, by the tile of `tokens`.

A model whose linear layers are sparse spends much of its time here, so this is as fast as they are. Each head's keys
and values are laid out as panels once; then 8 queries at a time go all the way: their scores, softmax and result stay
in the first-level cache. The scores of 8 queries with all keys are kept, so nothing has to be corrected afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types

from sparse_kernels.cpu.compiled import compiled
from sparse_kernels.cpu.emitter import PARTIAL, Emitter, with_literals
from sparse_kernels.cpu.micro import copy_run, token_tile, tokens_to_lanes
from sparse_kernels.cpu.scratch import ALIGNMENT
from sparse_kernels.cpu.target import host
from sparse_kernels.cpu.threads import exclusive
from sparse_kernels.plan import Array


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
    target, threads = host(), numba.get_num_threads()
    tokens = 8 if target.registers >= 32 else 4
    # Heads are shared; where there are fewer than threads, so are their queries, in whole tiles.
    splits = min(-(-threads // (batch * heads)), -(-n // tokens))
    scale = 1 / math.sqrt(d) if scale is None else scale
    run = kernel(tokens, target.lanes, target.fused)
    # One compiled kernel for all orders of memory: addresses, and strides in elements.
    places = np.array([(a.__array_interface__["data"][0], *(s // 4 for s in a.strides[:3])) for a in (q, k, v, out)])
    sizes = np.array((batch, heads, n, d, keys, e))
    with exclusive():
        run(places, sizes, np.float32(scale), np.arange(max(keys, d), dtype=np.int32), splits, threads)
    return out


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
def kernel(tokens: int, lanes: int, fused: bool) -> Callable[..., None]:
    """The compiled loop over heads and tiles of `tokens` queries.

    Called with (int64 (4, 4): address of q, k, v and out, and strides of batch, head and token in elements; int64
    (batch, heads, n, d, keys, e); scale; 0 1 2 ... up to the larger of d and keys (int32); shares of a head; parts).
    """
    fuse = int(fused)
    unfinished = PARTIAL
    vectors = 2
    width = vectors * lanes
    spare = ALIGNMENT // 4

    @compiled
    def attend(places, sizes, scale, columns, splits, parts):  # type: ignore[no-untyped-def]
        batch, heads, n, d, keys, e = sizes
        q_step, k_step, v_step, out_step = places[0, 3], places[1, 3], places[2, 3], places[3, 3]
        key_panels, value_panels = (keys + width - 1) // width, (e + width - 1) // width
        tiles = (n + tokens - 1) // tokens
        items = batch * heads * splits
        all_keys, all_values, row = key_panels * d * width, value_panels * keys * width, key_panels * width
        columns_at = columns.ctypes.data
        for part in prange(parts):
            scratch = np.zeros(all_keys + all_values + tokens * row + spare, np.float32)
            keys_at = (scratch.ctypes.data + 63) // 64 * 64
            values_at = keys_at + all_keys * 4
            scores_at = values_at + all_values * 4
            for item in range(items * part // parts, items * (part + 1) // parts):
                b, h = item // splits // heads, item // splits % heads
                share = item % splits
                q_head, k_at, v_at, out_head = (
                    places[0, 0] + (b * places[0, 1] + h * places[0, 2]) * 4,
                    places[1, 0] + (b * places[1, 1] + h * places[1, 2]) * 4,
                    places[2, 0] + (b * places[2, 1] + h * places[2, 2]) * 4,
                    places[3, 0] + (b * places[3, 1] + h * places[3, 2]) * 4,
                )
                for key in range(0, keys, lanes):
                    there = keys_at + (key // width * d * width + key % width) * 4
                    tokens_to_lanes(lanes, k_at + key * k_step * 4, k_step, keys - key, d, there, width)
                for panel in range(value_panels):
                    for key in range(keys):
                        there = values_at + (panel * keys + key) * width * 4
                        source = v_at + (key * v_step + panel * width) * 4
                        copy_run(lanes, source, there, min(width, e - panel * width))
                for tile in range(tiles * share // splits, tiles * (share + 1) // splits):
                    token = tile * tokens
                    q_at, out_at = q_head + token * q_step * 4, out_head + token * out_step * 4
                    for panel in range(key_panels):
                        token_tile(
                            tokens,
                            vectors,
                            lanes,
                            fuse,
                            4,
                            0,
                            keys_at + panel * d * width * 4,
                            columns_at,
                            d,
                            q_at,
                            q_step,
                            n - token,
                            scores_at + panel * width * 4,
                            row,
                            width,
                            0,
                            keys_at,
                            unfinished,
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
                            0,
                            values_at + panel * keys * width * 4,
                            columns_at,
                            keys,
                            scores_at,
                            row,
                            n - token,
                            out_at + panel * width * 4,
                            out_step,
                            e - panel * width,
                            0,
                            values_at,
                            unfinished,
                        )

    return attend
