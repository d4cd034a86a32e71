"""Transposition between token-major rows and blocks of tokens, vectorised, threads included.

x (n, k) becomes blocks (ceil(n / span), k, span): element [b, c, i] is feature c of token b * span + i. Tokens beyond
n repeat the last one: what is computed for them is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import transpose_tile
from sparse_kernels.cpu.target import VERSION


@cache
def kernels(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """(into blocks, out of blocks) for vectors of `lanes`."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def into_blocks(x, blocks, span, parts):  # type: ignore[no-untyped-def]
        """x (n, k) to blocks, flat; span a multiple of lanes."""
        n, k = x.shape
        strips = (n + span - 1) // span * (span // lanes)
        x_at, blocks_at = x.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for strip in range(strips * part // parts, strips * (part + 1) // parts):
                token = min(strip * lanes, n - 1)
                target = blocks_at + (strip * lanes // span * k * span + strip * lanes % span) * 4
                source = x_at + token * k * 4
                for c in range(0, k - lanes + 1, lanes):
                    transpose_tile(lanes, version, source + c * 4, k, n - token, target + c * span * 4, span)
                if k >= lanes:
                    c = k - lanes
                    transpose_tile(lanes, version, source + c * 4, k, n - token, target + c * span * 4, span)
                else:
                    at = strip * lanes // span * k * span + strip * lanes % span
                    for c in range(k):
                        for i in range(lanes):
                            blocks[at + c * span + i] = x[min(token + i, n - 1), c]

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def out_of_blocks(blocks, y, span, parts):  # type: ignore[no-untyped-def]
        """Blocks of m features, flat, to y (n, m)."""
        n, m = y.shape
        strips = (n + lanes - 1) // lanes
        y_at, blocks_at = y.ctypes.data, blocks.ctypes.data
        for part in prange(parts):
            for strip in range(strips * part // parts, strips * (part + 1) // parts):
                token = strip * lanes
                at = strip * lanes // span * m * span + strip * lanes % span
                source, target = blocks_at + at * 4, y_at + token * m * 4
                if m >= lanes and token + lanes <= n:
                    for r in range(0, m - lanes + 1, lanes):
                        transpose_tile(lanes, version, source + r * span * 4, span, lanes, target + r * 4, m)
                    r = m - lanes
                    transpose_tile(lanes, version, source + r * span * 4, span, lanes, target + r * 4, m)
                else:
                    for i in range(min(lanes, n - token)):
                        for r in range(m):
                            y[token + i, r] = blocks[at + r * span + i]

    return into_blocks, out_of_blocks
