"""Activations as vectors of tokens, and back, vectorised, threads included.

In a buffer, vector v of tokens, those from v * lanes on, starts at starts[v]: feature c of them lies at
starts[v] + c * stride, one token after the other (`vectors.in_tiles`). Lanes beyond n mean nothing.

A layout is two functions: pack(x, buffer, starts, stride, parts) and unpack(buffer, starts, stride, y, parts).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import copy_run, transpose_tile
from sparse_kernels.cpu.target import VERSION


@cache
def token_major(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The layout x (n, k), y (n, m)."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def pack(x, buffer, starts, stride, parts):  # type: ignore[no-untyped-def]
        n, k = x.shape
        x_at, buffer_at = x.ctypes.data, buffer.ctypes.data
        for part in prange(parts):
            for v in range(starts.size * part // parts, starts.size * (part + 1) // parts):
                token, start = v * lanes, starts[v]
                source, target = x_at + token * k * 4, buffer_at + start * 4
                if k >= lanes:
                    for tile in range((k + lanes - 1) // lanes):
                        c = min(tile * lanes, k - lanes)
                        transpose_tile(lanes, version, source + c * 4, k, n - token, target + c * stride * 4, stride)
                else:
                    for c in range(k):
                        for i in range(min(lanes, n - token)):
                            buffer[start + c * stride + i] = x[token + i, c]

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def unpack(buffer, starts, stride, y, parts):  # type: ignore[no-untyped-def]
        n, m = y.shape
        y_at, buffer_at = y.ctypes.data, buffer.ctypes.data
        for part in prange(parts):
            for v in range(starts.size * part // parts, starts.size * (part + 1) // parts):
                token, start = v * lanes, starts[v]
                source, target = buffer_at + start * 4, y_at + token * m * 4
                if m >= lanes and token + lanes <= n:
                    for tile in range((m + lanes - 1) // lanes):
                        r = min(tile * lanes, m - lanes)
                        transpose_tile(lanes, version, source + r * stride * 4, stride, lanes, target + r * 4, m)
                else:
                    for i in range(min(lanes, n - token)):
                        for r in range(m):
                            y[token + i, r] = buffer[start + r * stride + i]

    return pack, unpack


@cache
def feature_major(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The layout x (k, n), y (m, n)."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def pack(x, buffer, starts, stride, parts):  # type: ignore[no-untyped-def]
        k, n = x.shape
        x_at, buffer_at = x.ctypes.data, buffer.ctypes.data
        for part in prange(parts):
            for v in range(starts.size * part // parts, starts.size * (part + 1) // parts):
                width = min(lanes, n - v * lanes)
                for c in range(k):
                    source, target = x_at + (c * n + v * lanes) * 4, buffer_at + (starts[v] + c * stride) * 4
                    copy_run(lanes, version, source, target, width)

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def unpack(buffer, starts, stride, y, parts):  # type: ignore[no-untyped-def]
        m, n = y.shape
        y_at, buffer_at = y.ctypes.data, buffer.ctypes.data
        for part in prange(parts):
            for r in range(m * part // parts, m * (part + 1) // parts):
                for v in range(starts.size):
                    source, target = buffer_at + (starts[v] + r * stride) * 4, y_at + (r * n + v * lanes) * 4
                    copy_run(lanes, version, source, target, min(lanes, n - v * lanes))

    return pack, unpack
