"""Where vectors of positions (tokens, pixels) lie in x and y, for the kernels with positions along the vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Elements that stay in the second-level cache beside the weights: 400 KB.
CACHED = 100_000

# Elements of x or y from which on parts of it are fetched, each at once, before they are needed: 4 MB. A smaller
# array has just been written, or was written by the last call, and lies in the caches. Fetching it costs 2% to 12%.
LARGE = 2**20

# Vectors of a tile: as many as a kernel for single rows can hold at once.
TILE = 4


@dataclass(frozen=True, eq=False)
class VectorGrid:
    """Vectors of positions, everything in elements.

    lanes: of a vector. x_starts, y_starts: int64 (vectors), where each one starts. x_stride: from one column of x to
    the next, 1 where the weights hold offsets for columns. y_stride: from one row of y to the next. keep: int64
    (vectors), the lanes that are a position as bits, where y is in frames: zero is written to the others.
    """

    lanes: int
    x_starts: NDArray[np.int64]
    x_stride: int
    y_starts: NDArray[np.int64]
    y_stride: int
    keep: NDArray[np.int64] | None = None


def split_tiles(total: int, vectors: int) -> NDArray[np.int64]:
    """Return the first vector of each tile, and the end: `total` vectors in even tiles of at most `vectors`."""
    count = -(-total // vectors)
    return total * np.arange(count + 1) // count


@lru_cache(maxsize=256)
def build_feature_major_grid(n: int, lanes: int) -> VectorGrid:
    """Return the grid of feature-major x and y of n >= lanes tokens.

    The last vector overlaps the one before it, so nothing beyond the end is touched.
    """
    starts = np.minimum(np.arange(-(-n // lanes), dtype=np.int64) * lanes, n - lanes)
    return VectorGrid(lanes, starts, n, starts, n)


@lru_cache(maxsize=64)
def build_column_offsets(k: int, stride: int) -> NDArray[np.int32]:
    """Return the offsets of k columns that are `stride` elements apart; k * stride is below 2**31."""
    return np.arange(k, dtype=np.int32) * np.int32(stride)


@lru_cache(maxsize=256)
def build_tiled_grid(n: int, vectors: int, lanes: int, k: int, m: int) -> VectorGrid:
    """Return the grid of n >= 1 tokens in tiles: x (tiles, k, vectors * lanes), y (tiles, m, vectors * lanes)."""
    firsts = split_tiles(-(-n // lanes), vectors)
    tile = np.repeat(np.arange(firsts.size - 1), np.diff(firsts))
    inside = (np.arange(firsts[-1]) - firsts[tile]) * lanes
    stride = vectors * lanes
    return VectorGrid(lanes, tile * (k * stride) + inside, stride, tile * (m * stride) + inside, stride)


@lru_cache(maxsize=256)
def build_token_blocked_grid(count: int, lanes: int, k: int, m: int) -> VectorGrid:
    """Return the grid of token-blocked x (count, k, TILE * lanes) and y (count, m, TILE * lanes)."""
    vector = np.arange(count * TILE)
    tile, inside, stride = vector // TILE, vector % TILE * lanes, TILE * lanes
    return VectorGrid(lanes, tile * (k * stride) + inside, stride, tile * (m * stride) + inside, stride)
