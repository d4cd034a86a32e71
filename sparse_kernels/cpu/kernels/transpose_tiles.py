"""Pack activations into tiles of tokens, and unpack them, for kernels with tokens along the vector.

A tile holds a few vectors of tokens side by side, feature after feature: vector v, the tokens from v * lanes on,
starts at starts[v], and its feature f lies `stride` * f behind that. Lanes beyond the last token mean nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.register_tiles import copy_run, copy_vector, lanes_to_tokens, tokens_to_lanes
from sparse_kernels.cpu.codegen.tile_operands import Matrix
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.vector_grid import TILE, build_token_blocked_grid
from sparse_kernels.cpu.runtime.scratch_buffers import find_address
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.plan_protocol import Array


def count_tile_tokens() -> int:
    """Return the tokens of a tile of layout token_blocked on this machine."""
    return TILE * find_cpu_target().lanes


def pack_tiles(x: Array) -> Array:
    """Lay out token-major x (n, features) as tiles of tokens (tiles, features, tokens of a tile); what is beyond n is
    0."""
    (n, features), tokens = x.shape, count_tile_tokens()
    tiles = np.zeros((-(-n // tokens), features, tokens), np.float32)
    if tiles.size:
        lanes, x = find_cpu_target().lanes, np.ascontiguousarray(x, np.float32)
        at = build_token_blocked_grid(len(tiles), lanes, features, features)
        starts = at.x_starts[: -(-n // lanes)]
        layer = TileLayer(starts, at.x_stride, n, features, count_threads())
        build_kernels(lanes, True)[0](TransposeCall(find_address(x), find_address(tiles)), layer)
        tiles[-1, :, n - (len(tiles) - 1) * tokens :] = 0
    return tiles


def unpack_tiles(tiles: Array, n: int) -> Array:
    """Return the first n tokens of tiles of tokens (tiles, features, tokens of a tile), token-major (n, features).

    ValueError for tiles of another length, or too few of them.
    """
    total, features, tokens = tiles.shape
    if tokens != count_tile_tokens() or n > total * tokens:
        raise ValueError(
            f"tiles of shape {tiles.shape} cannot hold {n} tokens: on this machine a tile has {count_tile_tokens()}"
        )
    y = np.empty((n, features), np.float32)
    if y.size:
        lanes, tiles = find_cpu_target().lanes, np.ascontiguousarray(tiles, np.float32)
        at = build_token_blocked_grid(len(tiles), lanes, features, features)
        starts = at.x_starts[: -(-n // lanes)]
        layer = TileLayer(starts, at.x_stride, n, features, count_threads())
        build_kernels(lanes, True)[1](TransposeCall(find_address(y), find_address(tiles)), layer)
    return y


class TransposeCall(NamedTuple):
    """Addresses of a matrix and of its tiles."""

    matrix_at: int
    tiles_at: int


class TileLayer(NamedTuple):
    """What a transposition knows before it is called.

    starts: int64 (vectors), where each vector of tokens starts in the tiles. stride: elements from one feature of a
    vector to the next. n: tokens. features: of a token. parts: threads.
    """

    starts: NDArray[np.int64]
    stride: int
    n: int
    features: int
    parts: int


@cache
def build_kernels(lanes: int, token_major: bool) -> tuple[ParallelKernel, ParallelKernel]:
    """Return the kernels (pack, unpack) of a matrix (n, features) if token-major, else (features, n).

    They are called with `TransposeCall` and `TileLayer`. Threads share vectors.
    """
    form = (lanes, FLOATS)

    @build_parallel_kernel
    def pack(part: int, call: TransposeCall, layer: TileLayer) -> None:
        starts, stride, n, features = layer.starts, layer.stride, layer.n, layer.features
        for v in range(starts.size * part // layer.parts, starts.size * (part + 1) // layer.parts):
            token, target_at = v * lanes, call.tiles_at + starts[v] * 4
            if token_major:
                source = Matrix(call.matrix_at + token * features * 4, features)
                tokens_to_lanes(form, source, Matrix(target_at, stride), n - token, features)
            else:
                for f in range(features):
                    source_at = call.matrix_at + (f * n + token) * 4
                    copy_vector(lanes, FLOATS, source_at, target_at + f * stride * 4, n - token)

    @build_parallel_kernel
    def unpack(part: int, call: TransposeCall, layer: TileLayer) -> None:
        starts, stride, n, features = layer.starts, layer.stride, layer.n, layer.features
        for v in range(starts.size * part // layer.parts, starts.size * (part + 1) // layer.parts):
            token, source_at = v * lanes, call.tiles_at + starts[v] * 4
            if token_major:
                target = Matrix(call.matrix_at + token * features * 4, features)
                lanes_to_tokens(form, Matrix(source_at, stride), target, n - token, features)
            else:
                for f in range(features):
                    target_at = call.matrix_at + (f * n + token) * 4
                    copy_run(lanes, FLOATS, source_at + f * stride * 4, target_at, min(lanes, n - token))

    return pack, unpack
