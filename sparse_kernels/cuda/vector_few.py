"""Vector-wise, Shfl-BW, block-wise and dense weights times few columns, as a model decodes: vector_few.cu.

A product of so few columns waits for its weights, which are read once, from memory. So what counts is that enough of
them are asked for at any time. A multiprocessor needs some 24 KiB under way (4.3 TB/s times 0.7 us for 132 of them,
H200). The weights lie as for vector.cu. `choose_few_tile` says how blocks and warps share them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparse_kernels.cuda.program import DTYPES, Launch, NotSupported, Operand, Variant, parse_activation
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.cuda.variants import MOST_FEW
from sparse_kernels.cuda.vector_tiles import BK, HEIGHTS, VectorTiles, pack_tiles
from sparse_kernels.formats import Packed

STEP_COLUMNS, PIECE_BYTES = 16, 512
"""Kept columns of a step, and bytes of 16 rows of them."""

WIDTHS = (1, 2, 4, 8)
"""Times 8 columns of a block."""

WARPS = (4, 8, 16)
"""Of a block."""

MOST_SUMS = 16
"""Pieces of 16 rows and 8 columns of the result that a warp holds: 64 registers a thread."""

ENOUGH_WARPS = 16
"""Warps of a multiprocessor that are wanted: they have 48 KiB of weights under way, 8 of them half of that."""

ALL_BUSY = 0.9
"""Share of the multiprocessors with a block from which on blocks are not made smaller."""

MEMORY_BYTES_A_CLOCK, CACHE_BYTES_A_CLOCK = 18.6, 40.0
"""Of a multiprocessor while all read, from memory and from the second-level cache.

The first is 4.3 TB/s among 132 at 1.755 GHz, the second was measured in other kernels (H200, TUNING.md).
"""

FIXED_CLOCKS = 1600
"""Of a launch: a name of a row comes from memory, then that row from a cache. In the end sums meet."""

ARCHITECTURES = tuple(name for name, target in TARGETS.items() if target.capability >= (8, 0))


class FewTile(NamedTuple):
    """What a block of vector_few.cu computes.

    row_tiles: times 16 rows of a group. width: times 8 columns. warps: that share the kept columns.
    """

    row_tiles: int
    width: int
    warps: int


@dataclass(frozen=True, eq=False)
class FewProgram:
    """A linear layer's tiles. `multiprocessors`: of the machine. `tile`: in place of the program's own choice."""

    tiles: VectorTiles
    dtype: str
    multiprocessors: int
    tile: FewTile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        return self.tiles.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return the launch that multiplies x (k, n) to out (m, n); each 64 columns read the weights again."""
        if n == 0:
            return []
        tiles = self.tiles
        tile = self.tile or choose_few_tile(tiles, n, self.multiprocessors)
        parts = tiles.height // 16 // tile.row_tiles
        blocks = tiles.groups * parts * -(-n // (8 * tile.width))
        if max(blocks, n + 8 * tile.width) >= 2**31:
            raise NotSupported(f"{n} columns are more than one launch numbers with 32 bits")
        arrays = (tiles.weights, tiles.columns, tiles.starts, tiles.row_ids)
        scalars = (np.int32(parts), np.int32(n), parse_activation(activation))
        variant = build_variant(tile.row_tiles, tile.width, n % tile.width == 0, self.dtype)
        operands = (Operand.X, Operand.OUT, Operand.BIAS)
        shared = count_shared_bytes(tile)
        return [Launch(variant, (blocks, 1, 1), (32 * tile.warps, 1, 1), shared, (*arrays, *operands, *scalars))]


def build_program(
    packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None
) -> FewProgram:
    """Return a linear layer's weight for up to MOST_FEW columns; NotSupported says what does not run."""
    if architecture not in ARCHITECTURES:
        raise NotSupported(f"the kernel for few columns is for {', '.join(ARCHITECTURES)}, not {architecture}")
    if dtype not in DTYPES:
        raise NotSupported(f"elements are {' or '.join(DTYPES)}, not {dtype}")
    if n > MOST_FEW:
        raise NotSupported(f"the kernel for few columns takes up to {MOST_FEW}, not {n}")
    tiles = pack_tiles(packed, dtype, volta=False)
    return FewProgram(tiles, dtype, multiprocessors or TARGETS[architecture].multiprocessors)


def choose_few_tile(tiles: VectorTiles, n: int, multiprocessors: int) -> FewTile:
    """Return how blocks share a weight for n columns.

    Rows of a block are as many as leave no multiprocessor without one: each reads the rows of x that it needs by
    itself. Warps are as many as have enough under way, and as have a step in the group with most kept columns.
    """
    width = next((width for width in WIDTHS if n <= 8 * width), WIDTHS[-1])
    columns, parts = -(-n // (8 * width)), tiles.height // 16
    busy = [
        tall
        for tall in list_row_tiles(tiles.height, width)
        if tiles.groups * parts // tall * columns >= ALL_BUSY * multiprocessors
    ]
    row_tiles = max(busy, default=1)
    blocks = tiles.groups * parts // row_tiles * columns
    steps = int(np.diff(tiles.starts).max(initial=0)) * (BK // STEP_COLUMNS)
    wanted = min(ENOUGH_WARPS / max(1, blocks // multiprocessors), steps)
    most = find_most_warps(row_tiles, width)
    return FewTile(row_tiles, width, next(warps for warps in WARPS if warps >= wanted or warps == most))


def list_row_tiles(height: int, width: int) -> list[int]:
    """Return the row tiles that a block of groups of this height may have beside so many columns."""
    parts = height // 16
    return [tall for tall in (1, 2, 4) if parts % tall == 0 and tall * width <= MOST_SUMS]


def count_shared_bytes(tile: FewTile) -> int:
    """Return the dynamic shared memory of a block: the ring of each warp, and then its sums in the same place."""
    ring = find_depth(tile.row_tiles) * (tile.row_tiles * PIECE_BYTES + STEP_COLUMNS * 4)
    pitch = 8 * tile.width + (8 if tile.width > 1 else 0)
    return tile.warps * max(ring, tile.row_tiles * 16 * pitch * 4)


def find_depth(row_tiles: int) -> int:
    """Return the steps of a ring: 4 or more, and 4 KiB or more."""
    return max(4, 8 // row_tiles)


def find_most_warps(row_tiles: int, width: int) -> int:
    """Return the warps that a block may have: 16 with 128 registers a thread each, or 8 where that is too few.

    So is the shared memory of the smallest machines (99 KiB) for 16 rings of four row tiles.
    """
    return WARPS[-1] if row_tiles * width <= MOST_SUMS // 2 and row_tiles < 4 else WARPS[-2]


def build_variant(row_tiles: int, width: int, aligned: bool, dtype: str) -> Variant:
    """Return the kernel of such blocks; `aligned` where rows of x start at a multiple of `width` elements."""
    defines = {
        "ROW_TILES": row_tiles,
        "WIDTH": width,
        "DEPTH": find_depth(row_tiles),
        "MOST_WARPS": find_most_warps(row_tiles, width),
        "ALIGNED": int(aligned),
        "BF16": DTYPES.index(dtype),
    }
    return Variant("vector_few.cu", "vector_few", defines, ARCHITECTURES, "HMMA.16816.F32")


def predict_clocks(tiles: VectorTiles, n: int, multiprocessors: int) -> float:
    """Return what a product is expected to take, in clocks, without the launch itself.

    Weights and the names of kept columns are read from memory once. Each block reads its own, and the rows of x that
    they name, from the second-level cache.
    """
    tile = choose_few_tile(tiles, n, multiprocessors)
    columns, parts = -(-n // (8 * tile.width)), tiles.height // 16 // tile.row_tiles
    x_bytes = tiles.columns.size * parts * columns * 8 * tile.width * 2
    from_cache = x_bytes + columns * (tiles.weights.nbytes + parts * tiles.columns.nbytes)
    from_memory = tiles.weights.nbytes + tiles.columns.nbytes
    clocks = max(from_memory / MEMORY_BYTES_A_CLOCK, from_cache / CACHE_BYTES_A_CLOCK) / multiprocessors
    return FIXED_CLOCKS + clocks


def _variants() -> Iterator[Variant]:
    for width, dtype, aligned in itertools.product(WIDTHS, DTYPES, (True, False)):
        for row_tiles in list_row_tiles(HEIGHTS[-1], width):
            if aligned or width > 1:  # single elements are always aligned
                yield build_variant(row_tiles, width, aligned, dtype)


VARIANTS = tuple(_variants())
