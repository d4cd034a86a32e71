"""Activations as tiles of tokens, and back, for kernels with tokens along the vector; threads included.

A tile holds a few vectors of tokens side by side, feature after feature: vector v, the tokens from v * lanes on,
starts at starts[v], and its feature f lies `stride` * f behind that. Lanes beyond the last token mean nothing.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from sparse_kernels.cpu.codegen.cpu_target import host
from sparse_kernels.cpu.codegen.register_tiles import copy_run, copy_vector, lanes_to_tokens, tokens_to_lanes
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.vector_grid import TILE, whole_tiles
from sparse_kernels.cpu.runtime.scratch_buffers import address
from sparse_kernels.cpu.runtime.threads import count
from sparse_kernels.plan_protocol import Array


def tokens_in_tile() -> int:
    """Tokens of a tile of layout token_blocked on this machine."""
    return TILE * host().lanes


def blocked(x: Array) -> Array:
    """Token-major x (n, features) as tiles of tokens (tiles, features, tokens of a tile); what is beyond n is 0."""
    (n, features), tokens = x.shape, tokens_in_tile()
    tiles = np.zeros((-(-n // tokens), features, tokens), np.float32)
    if tiles.size:
        lanes, x = host().lanes, np.ascontiguousarray(x, np.float32)
        at = whole_tiles(len(tiles), lanes, features, features)
        starts = at.x_starts[: -(-n // lanes)]
        kernels(lanes, True)[0](address(x), address(tiles), starts, at.x_stride, n, features, count())
        tiles[-1, :, n - (len(tiles) - 1) * tokens :] = 0
    return tiles


def unblocked(tiles: Array, n: int) -> Array:
    """The first n tokens of tiles of tokens (tiles, features, tokens of a tile), token-major (n, features).

    ValueError for tiles of another length, or too few of them.
    """
    total, features, tokens = tiles.shape
    if tokens != tokens_in_tile() or n > total * tokens:
        raise ValueError(f"{tiles.shape} are no tiles of {tokens_in_tile()} tokens that hold {n} of them")
    y = np.empty((n, features), np.float32)
    if y.size:
        lanes, tiles = host().lanes, np.ascontiguousarray(tiles, np.float32)
        at = whole_tiles(len(tiles), lanes, features, features)
        starts = at.x_starts[: -(-n // lanes)]
        kernels(lanes, True)[1](address(y), address(tiles), starts, at.x_stride, n, features, count())
    return y


@cache
def kernels(lanes: int, token_major: bool) -> tuple[ParallelKernel, ParallelKernel]:
    """(pack, unpack), compiled, called with (addresses of matrix and buffer, starts, stride, n, features, parts).

    The matrix is (n, features) where token_major, else (features, n). Threads share vectors.
    """

    @in_parts
    def pack(part, matrix_at, buffer_at, starts, stride, n, features, parts):  # type: ignore[no-untyped-def]
        for v in range(starts.size * part // parts, starts.size * (part + 1) // parts):
            token, here = v * lanes, buffer_at + starts[v] * 4
            if token_major:
                there = matrix_at + token * features * 4
                tokens_to_lanes(lanes, FLOATS, there, features, n - token, features, here, stride)
            else:
                for f in range(features):
                    there = matrix_at + (f * n + token) * 4
                    copy_vector(lanes, FLOATS, there, here + f * stride * 4, n - token)

    @in_parts
    def unpack(part, matrix_at, buffer_at, starts, stride, n, features, parts):  # type: ignore[no-untyped-def]
        for v in range(starts.size * part // parts, starts.size * (part + 1) // parts):
            token, here = v * lanes, buffer_at + starts[v] * 4
            if token_major:
                there = matrix_at + token * features * 4
                lanes_to_tokens(lanes, here, stride, n - token, features, there, features)
            else:
                for f in range(features):
                    there = matrix_at + (f * n + token) * 4
                    copy_run(lanes, FLOATS, here + f * stride * 4, there, min(lanes, n - token))

    return pack, unpack
