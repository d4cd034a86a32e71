"""Linear layers on token-major activations: x (n, k) -> y (n, m), outputs along the vector, no repacking of x.

A panel of w is as wide as one or two vectors of outputs; its columns are read for 8 tokens at a time. Order of the
loops: chunks of tokens, blocks of panels, tiles of tokens, panels of the block. The x of a chunk and the weights of a
block stay in the second-level cache; between two panels a tile's x stays in the first-level cache as far as it fits.
Threads share (chunk, panel) pairs by cost.

Permuted rows (Shfl-BW) wait in a tile of their own, from which they go to their places one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import njit, prange

from sparse_kernels.cpu.micro import token_tile
from sparse_kernels.cpu.panels import Panels
from sparse_kernels.cpu.split import share
from sparse_kernels.cpu.target import VERSION, Target
from sparse_kernels.cpu.vectors import CACHED


def tile(height: int, target: Target) -> tuple[int, int, int] | None:
    """(tokens, vectors, lanes) of the register tile for groups of `height` rows; None where none fits.

    A vector must be filled by rows of one group.
    """
    tokens = 8 if target.registers >= 32 else 4
    for vectors in (2, 1):
        if height % (vectors * target.lanes) == 0:
            return tokens, vectors, target.lanes
    return None


def order(tokens: int, k: int, weights: Panels) -> tuple[int, int]:
    """(tokens of a chunk, in whole tiles of `tokens`; panels of a block) for rows of k elements."""
    panel = max(1, weights.values.size // len(weights.table))
    return max(1, CACHED // (k * tokens)) * tokens, max(1, CACHED // 2 // panel)


def close(n: int, tokens: int, target: Target) -> bool:
    """Whether n tokens, `tokens` at a time, are enough for the weights to be fetched to the first-level cache.

    A tile reads whole cache lines of them for each column. Where they are passed over often they lie in the second
    level, which Intel's units wait for: 3% to 9% less time for 128 tokens. Where they come from memory, or where x
    of few tokens needs the first level for itself, it takes 2% to 6% longer (8 and 32 tokens).
    """
    return target.shared and n >= 8 * tokens


@cache
def kernel(
    tokens: int, vectors: int, lanes: int, fused: bool, permuted: bool, size: int = 4, close: bool = False
) -> Callable[..., None]:
    """The compiled loops for one tile size; `permuted` rows are put in their places; weights of `size` bytes.

    close: weights are fetched ahead to the first-level cache, not only to the second.

    Called with (panels.arrays, x (n, k), y (n, m), bias (m), activation code, tokens of a chunk, panels of a block,
    parts).
    """
    version = VERSION
    fuse, near = int(fused), int(close)
    width = vectors * lanes

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def multiply(weights, x, y, bias, activation, chunk, block, parts):  # type: ignore[no-untyped-def]
        table, values, columns, work, row_ids = weights
        n, k = x.shape
        features = y.shape[1]
        panels = table.shape[0]
        chunks = (n + chunk - 1) // chunk
        values_at, columns_at = values.ctypes.data, columns.ctypes.data
        x_at, y_at = x.ctypes.data, y.ctypes.data
        for part in prange(parts):
            item, end = share(work, chunks, part, parts), share(work, chunks, part + 1, parts)
            bias_at = bias.ctypes.data
            if permuted:
                waiting = np.empty((tokens, width), np.float32)
                sorted_bias = np.empty(panels * width, np.float32)
                for row in range(panels * width):
                    sorted_bias[row] = bias[max(row_ids[row], 0)]
                bias_at = sorted_bias.ctypes.data
            while item < end:
                # As many panels of this part as lie in one chunk and in one block.
                chunk_begin = item // panels * chunk
                first = item % panels
                stop = min(first + block, panels, first + end - item)
                item += stop - first
                for token in range(chunk_begin, min(chunk_begin + chunk, n), tokens):
                    for panel in range(first, stop):
                        row = panel * width
                        if permuted:
                            tile_at, stride, room = waiting.ctypes.data, width, width
                        else:
                            tile_at, stride, room = y_at + (token * features + row) * 4, features, features - row
                        token_tile(
                            tokens,
                            vectors,
                            lanes,
                            fuse,
                            version,
                            size,
                            near,
                            values_at + table[panel, 0] * size,
                            columns_at + table[panel, 1] * 4,
                            table[panel, 2],
                            x_at + token * k * 4,
                            k,
                            n - token,
                            tile_at,
                            stride,
                            room,
                            bias_at + row * 4,
                            activation,
                        )
                        if permuted:
                            for t in range(min(tokens, n - token)):
                                for i in range(width):
                                    place = row_ids[row + i]
                                    if place >= 0:
                                        y[token + t, place] = waiting[t, i]

    return multiply
