"""Linear layers on token-major activations: x (n, k) -> y (n, m), outputs along the vector, no repacking of x.

A panel of w is as wide as one or two vectors of outputs; its columns are read for 8 tokens at a time. Order of the
loops: chunks of tokens whose rows of x fit the second-level cache, then panels, then tiles of tokens, so that a
panel's weights stay in the first-level cache over a chunk. Threads share (chunk, panel) pairs by cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import njit, prange

from sparse_kernels.cpu.micro import token_tile
from sparse_kernels.cpu.split import share
from sparse_kernels.cpu.target import VERSION, Target


def tile(height: int, target: Target) -> tuple[int, int, int] | None:
    """(tokens, vectors, lanes) of the register tile for groups of `height` rows; None where none fits.

    A vector must be filled by rows of one group.
    """
    tokens = 8 if target.registers >= 32 else 4
    for vectors in (2, 1):
        if height % (vectors * target.lanes) == 0:
            return tokens, vectors, target.lanes
    return None


@cache
def kernel(tokens: int, vectors: int, lanes: int, fused: bool) -> Callable[..., None]:
    """The compiled loop over chunks, panels and tiles for one tile size.

    Called with (panels.arrays, x (n, k), y (n, m), bias (m), activation code, tokens of a chunk: whole tiles, parts).
    """
    version = VERSION
    fuse = int(fused)
    width = vectors * lanes

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def multiply(weights, x, y, bias, activation, chunk, parts):  # type: ignore[no-untyped-def]
        table, values, columns, work, _ = weights
        n, k = x.shape
        features = y.shape[1]
        panels = table.shape[0]
        chunks = (n + chunk - 1) // chunk
        values_at, columns_at, bias_at = values.ctypes.data, columns.ctypes.data, bias.ctypes.data
        x_at, y_at = x.ctypes.data, y.ctypes.data
        for part in prange(parts):
            for item in range(share(work, chunks, part, parts), share(work, chunks, part + 1, parts)):
                panel = item % panels
                first = item // panels * chunk
                row = panel * width
                for token in range(first, min(first + chunk, n), tokens):
                    token_tile(
                        tokens,
                        vectors,
                        lanes,
                        fuse,
                        version,
                        values_at + table[panel, 0] * 4,
                        columns_at + table[panel, 1] * 4,
                        table[panel, 2],
                        x_at + token * k * 4,
                        k,
                        n - token,
                        y_at + (token * features + row) * 4,
                        features,
                        features - row,
                        bias_at + row * 4,
                        activation,
                    )

    return multiply
