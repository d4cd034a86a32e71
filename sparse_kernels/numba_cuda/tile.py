"""What one block of threads computes: a tile of y, `height` rows by `width` columns.

Threads lie in a block as columns lie in y: the threads (lanes) of a warp take neighbouring columns of the same rows.
So a warp reads and writes neighbouring elements of x and y, which memory serves in one piece (coalesced). A weight is
the same for all threads of a warp, which shared memory serves once (a broadcast).

Every element of x and w in a tile is needed by many threads of the block. They fetch it from global memory once,
together, into shared memory, `depth` columns of w at a time, and then all compute from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparse_kernels.numba_cuda.library import cuda, float32

WARP = 32  # threads that run together on every NVIDIA GPU so far
MOST_WARPS = 4
DEPTH = 32

SQRT_HALF = math.sqrt(0.5)


@dataclass(frozen=True)
class ThreadBlockTile:
    """`warps` of `lanes` threads, each with `rows` x `columns` sums; `depth` columns of w in a stage.

    lanes is 32 on a GPU. The simulator, which runs a Python thread for each, is tested with fewer.
    """

    lanes: int
    warps: int
    rows: int
    columns: int
    depth: int

    def __post_init__(self) -> None:
        if self.rows > 1 and self.height > self.depth:
            raise ValueError(f"the sums of {self} do not fit where x is staged: the height may not pass the depth")

    @property
    def height(self) -> int:
        """Rows of y that a block computes."""
        return self.warps * self.rows

    @property
    def width(self) -> int:
        """Columns of y that a block computes."""
        return self.lanes * self.columns

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block: along x the lane, along y the warp."""
        return self.lanes, self.warps


def fit_tile(height: int, n: int) -> ThreadBlockTile:
    """Return the tile for groups of `height` rows that share their columns, and n columns of x.

    With r rows and c columns a thread loads r + c numbers from shared memory for r * c products. Loading takes longer
    than multiplying: 12 loads for 32 products is three times as good as 9 for 8. Yet more sums would take registers
    that keep further warps from running while some wait for memory.
    """
    rows = 8 if height >= 4 * 8 else 4 if height >= 4 else 1
    return ThreadBlockTile(WARP, min(MOST_WARPS, -(-height // rows)), rows, fit_columns(n), DEPTH)


def fit_columns(n: int) -> int:
    """Return the columns of a thread, for n in all: no more than there are warps full of columns."""
    return 4 if n > 2 * WARP else 2 if n > WARP else 1


@cuda.jit(device=True, inline="always")
def stage_weights(staged, weights, start, count, first, thread, threads):  # type: ignore[no-untyped-def]
    """Set staged[t, r] = weights[start + t, first + r], for t < count, by all threads of a block; 0 beyond its rows.

    weights: (columns, rows), the rows beside each other, so that neighbouring threads read neighbouring elements.
    """
    height = staged.shape[1]
    for element in range(thread, count * height, threads):
        t, r = element // height, element % height
        value = float32(0)
        if first + r < weights.shape[1]:
            value = float32(weights[start + t, first + r])
        staged[t, r] = value


@cuda.jit(device=True, inline="always")
def add_products(sums, weights, x, count, first, lane, lanes):  # type: ignore[no-untyped-def]
    """Add: sums[r, c] += weights[t, first + r] * x[t, lane + c * lanes] over all t < count: both in shared memory.

    `sums` never lies in memory: the loops over it are unrolled, as their lengths are known, and each sum becomes a
    register.
    """
    for t in range(count):
        for r in range(sums.shape[0]):
            for c in range(sums.shape[1]):
                sums[r, c] += weights[t, first + r] * x[t, lane + c * lanes]


@cuda.jit(device=True, inline="always")
def store_sums(staged, sums, first, lane, lanes):  # type: ignore[no-untyped-def]
    """Set staged[first + r, lane + c * lanes] = sums[r, c]: from registers into shared memory, where x has been.

    What comes next (bias, activation, the row's target) is too long to be unrolled. A loop that stays a loop cannot
    run over registers. A thread reads back only what it wrote itself, so no barrier is needed.
    """
    for r in range(sums.shape[0]):
        for c in range(sums.shape[1]):
            staged[first + r, lane + c * lanes] = sums[r, c]


@cuda.jit(device=True, inline="always")
def activated(value, activation):  # type: ignore[no-untyped-def]
    """Return the activation of that number in `plan_protocol.ACTIVATIONS`. NaN stays NaN: it is not less than 0."""
    if activation == 1 and value < float32(0):
        value = float32(0)
    if activation == 2:
        value = value * (float32(0.5) * (float32(1) + math.erf(value * float32(SQRT_HALF))))
    return value
