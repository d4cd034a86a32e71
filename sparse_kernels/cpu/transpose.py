"""Activations as blocks of tokens, and back, vectorised, threads included.

Blocks are (ceil(n / lanes), features, lanes): element [b, c, i] is feature c of token b * lanes + i. So all that a
vector of tokens needs is packed together and aligned, whatever n is. Lanes beyond n mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import copy_run, transpose_tile
from sparse_kernels.cpu.target import VERSION


@cache
def token_major(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """(into blocks from x (n, k), out of blocks to y (n, m)); called with (x, blocks, parts), (blocks, y, parts)."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def into_blocks(x, blocks, parts):  # type: ignore[no-untyped-def]
        n, k = x.shape
        count = (n + lanes - 1) // lanes
        x_at, blocks_at = x.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for block in range(count * part // parts, count * (part + 1) // parts):
                token = block * lanes
                source, target = x_at + token * k * 4, blocks_at + token * k * 4
                if k >= lanes:
                    for tile in range((k + lanes - 1) // lanes):
                        c = min(tile * lanes, k - lanes)
                        transpose_tile(lanes, version, source + c * 4, k, n - token, target + c * lanes * 4, lanes)
                else:
                    for c in range(k):
                        for i in range(min(lanes, n - token)):
                            blocks[(block * k + c) * lanes + i] = x[token + i, c]

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def out_of_blocks(blocks, y, parts):  # type: ignore[no-untyped-def]
        n, m = y.shape
        count = (n + lanes - 1) // lanes
        y_at, blocks_at = y.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for block in range(count * part // parts, count * (part + 1) // parts):
                token = block * lanes
                source, target = blocks_at + token * m * 4, y_at + token * m * 4
                if m >= lanes and token + lanes <= n:
                    for tile in range((m + lanes - 1) // lanes):
                        r = min(tile * lanes, m - lanes)
                        transpose_tile(lanes, version, source + r * lanes * 4, lanes, lanes, target + r * 4, m)
                else:
                    for i in range(min(lanes, n - token)):
                        for r in range(m):
                            y[token + i, r] = blocks[(block * m + r) * lanes + i]

    return into_blocks, out_of_blocks


@cache
def feature_major(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """(into blocks from x (k, n), out of blocks to y (m, n)); called with (x, blocks, parts), (blocks, y, parts)."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def into_blocks(x, blocks, parts):  # type: ignore[no-untyped-def]
        k, n = x.shape
        count = (n + lanes - 1) // lanes
        x_at, blocks_at = x.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for block in range(count * part // parts, count * (part + 1) // parts):
                width = min(lanes, n - block * lanes)
                for c in range(k):
                    source, target = x_at + (c * n + block * lanes) * 4, blocks_at + (block * k + c) * lanes * 4
                    copy_run(lanes, version, source, target, width)

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def out_of_blocks(blocks, y, parts):  # type: ignore[no-untyped-def]
        m, n = y.shape
        count = (n + lanes - 1) // lanes
        y_at, blocks_at = y.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for r in range(m * part // parts, m * (part + 1) // parts):
                for block in range(count):
                    source, target = blocks_at + (block * m + r) * lanes * 4, y_at + (r * n + block * lanes) * 4
                    copy_run(lanes, version, source, target, min(lanes, n - block * lanes))

    return into_blocks, out_of_blocks
