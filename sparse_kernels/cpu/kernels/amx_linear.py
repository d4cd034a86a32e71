"""Linear layers by the matrix unit (`amx`), a block of tokens at a time; threads share tokens.

A thread splits a block's x into thirds, with tokens along the vector, passes the panels over it, and puts its y in
its place, permuted rows (Shfl-BW) at no cost. The x of a block stays in the second-level cache, weights pass by, 6
bytes each; a panel meets all tokens of the block before the next.

Needs groups of rows that fill tiles of 16, and finite weights. Sums that are not finite are told: x may not have been
finite, or thirds overflowed where float32 does not, or another way. Then the plan computes all of y again by vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import amx_tiles as amx
from sparse_kernels.cpu.codegen.amx_tiles import (
    FEATURE_BYTES,
    GATHERED_BYTES,
    NARROW_STEP,
    ROW_BYTES,
    ROWS,
    STEP,
    TILE_BYTES,
    TOKENS,
)  # fmt: skip
from sparse_kernels.cpu.codegen.bf16_split import has_thirds, thirds
from sparse_kernels.cpu.launch.linear_call import CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import Groups, group_height, groups
from sparse_kernels.cpu.layouts.vector_grid import TILE, columns
from sparse_kernels.cpu.runtime.scratch_buffers import aligned, at_cache_line
from sparse_kernels.formats import Packed

# Bytes of the second-level cache of processors that have the unit, and those of x and y of a block that stay in it
# while weights pass by.
SECOND_LEVEL_BYTES, CACHED_BYTES = 2_000_000, 700_000

# Tokens of a tile of the layouts that are blocked.
BLOCK_TOKENS = TILE * ROWS


@dataclass(frozen=True, eq=False)
class MatrixPanels:
    """Panels of 16 or 32 rows that share their columns, as tiles of thirds.

    row_tiles: 1 or 2. values: uint16, panel after panel as `amx.matrix_tile` takes them. columns: int32, those of
    each group, or once they are `placed` where they lie in split x, in bfloat16. table: int64 (panels, 4), where
    values (in bytes) and columns start, steps before narrow ones, all steps (at least one). row_ids: int32 (rows of
    all panels), the row of the matrix that each is, -1 for none. places: uint32 (m), where each row of the matrix
    lies among them.
    """

    row_tiles: int
    values: NDArray[np.uint16]
    columns: NDArray[np.int32]
    table: NDArray[np.int64]
    row_ids: NDArray[np.int32]
    places: NDArray[np.uint32]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """(values, columns, table), as the compiled loops take them."""
        return self.values, self.columns, self.table

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (*self.arrays, self.row_ids, self.places))

    def copy(self) -> MatrixPanels:
        """The same panels in memory of their own."""
        others = {name: getattr(self, name).copy() for name in ("columns", "table", "row_ids", "places")}
        return replace(self, values=at_cache_line(self.values), **others)

    def placed(self, offsets: NDArray[np.int32]) -> MatrixPanels:
        """The same panels with offsets[c] in place of each column c."""
        return replace(self, columns=offsets[self.columns])


def row_tiles(packed: Packed) -> int | None:
    """Tiles of rows in a panel of this weight; None where they would be filled up by over a quarter."""
    height = group_height(packed)
    for tiles in (2, 1):
        rows = tiles * ROWS
        if 0 < -(-height // rows) * rows * 4 <= height * 5:
            return tiles
    return None


def takes(packed: Packed) -> bool:
    """Whether the unit can multiply this weight, if there is one: its rows fill tiles, and its values have thirds.

    There must be a vector of rows and of columns, and a column's place in split x is an int32.
    """
    m, k = packed.shape
    fits = min(m, k) >= ROWS and k * FEATURE_BYTES < 2**31
    return fits and row_tiles(packed) is not None and has_thirds(packed.values)


def linear_panels(packed: Packed) -> MatrixPanels:
    """A weight that `takes` accepts, its columns placed among features that are split."""
    tiles, (m, k) = row_tiles(packed), packed.shape
    assert tiles is not None
    return panels(groups(packed), tiles, m).placed(columns(k, FEATURE_BYTES // 2))


def panels(groups: Groups, tiles: int, m: int) -> MatrixPanels:
    """The groups of a weight of m rows, whose values have thirds, in panels of so many tiles of rows."""
    width = tiles * ROWS
    cuts = -(-groups.height // width)
    counts = np.diff(groups.indptr)
    left = counts % STEP
    narrow = (((left > 0) & (left <= NARROW_STEP)) | (counts == 0)).astype(np.int64)
    steps = counts // STEP + (left > NARROW_STEP)
    step_size = 3 * tiles * TILE_BYTES // 2
    values_at = np.concatenate([[0], np.cumsum(cuts * (steps + narrow) * step_size)])
    columns_at = np.concatenate([[0], np.cumsum((steps + narrow) * STEP)])
    values, numbers = aligned(int(values_at[-1]), np.uint16), np.zeros(int(columns_at[-1]), np.int32)
    split = thirds(groups.values)
    for group, (start, stop) in enumerate(zip(groups.indptr, groups.indptr[1:], strict=False)):
        wide_columns = steps[group] * STEP
        filled = np.zeros(wide_columns + narrow[group] * NARROW_STEP, np.int32)
        filled[: stop - start] = groups.columns[start:stop]
        numbers[columns_at[group] : columns_at[group + 1]] = np.concatenate(
            [filled[:wide_columns], np.repeat(filled[wide_columns:], 2)]
        )
        part = np.zeros((3, filled.size, cuts * width), np.uint16)
        part[:, : stop - start, : groups.height] = split[:, start:stop]
        part = part.reshape(3, filled.size, cuts, tiles, ROWS)
        wide = part[:, :wide_columns].reshape(3, steps[group], STEP, cuts, tiles, ROWS)
        wide = wide.transpose(3, 1, 0, 4, 5, 2).reshape(cuts, steps[group] * step_size)
        high, middle, low = part[:, wide_columns:]
        pairs = np.stack([[high, high], [middle, middle], [high, low]])  # (3, 2, columns, cuts, tiles, rows)
        pairs = pairs.transpose(3, 0, 4, 5, 2, 1).reshape(cuts, narrow[group] * step_size)
        values[values_at[group] : values_at[group + 1]] = np.concatenate([wide, pairs], axis=1).ravel()
    table = np.empty((counts.size, cuts, 4), np.int64)
    table[..., 0] = 2 * (values_at[:-1, None] + np.arange(cuts) * ((steps + narrow) * step_size)[:, None])
    table[..., 1] = columns_at[:-1, None]
    table[..., 2], table[..., 3] = steps[:, None], (steps + narrow)[:, None]
    row_ids = np.full((counts.size, cuts * width), -1, np.int32)
    row_ids[:, : groups.height] = groups.row_ids.reshape(counts.size, groups.height)
    exist = np.flatnonzero(row_ids >= 0)
    places = np.empty(m, np.uint32)
    places[row_ids.ravel()[exist]] = exist
    # The last group of a matrix with fewer rows may end in panels of rows that do not exist.
    used = -(-int(exist.max(initial=-1) + 1) // width)
    table, row_ids = table.reshape(-1, 4)[:used].copy(), row_ids.ravel()[: used * width].copy()
    return MatrixPanels(tiles, values, numbers, table, row_ids, places)


@dataclass(frozen=True)
class ThreadScratch:
    """What a thread needs: tiles of tokens of a block, bytes of x and y of a tile, and bytes of all."""

    tiles: int
    x_bytes: int
    y_bytes: int
    thread_bytes: int


def room(weights: MatrixPanels, k: int, n: int, threads: int) -> ThreadScratch:
    """For n tokens of k features, shared by so many threads.

    As many tiles as stay in the cache. Weights that do not are worth waiting for if two tiles meet them.
    """
    units = -(-n // ROWS)
    each = -(-(-(-units // threads) * ROWS) // TOKENS)
    x_bytes = k * FEATURE_BYTES
    y_bytes = len(weights.table) * weights.row_tiles * ROWS * TOKENS * 4
    least = 1 if weights.nbytes < SECOND_LEVEL_BYTES else 2
    tiles = min(each, max(least, CACHED_BYTES // (x_bytes + y_bytes)))
    return ThreadScratch(
        tiles, x_bytes, y_bytes, amx.SAVED_BYTES + 2 * GATHERED_BYTES + TILE_BYTES + tiles * (x_bytes + y_bytes)
    )


@dataclass(frozen=True, eq=False)
class MatrixPlan(CpuLinearPlan):
    """Any layout of x and y, split and put in place by the thread that multiplies.

    by_vectors: makes the plan that computes y where sums are not finite; it is kept from then on. So the plan holds
    on to the packed weight, 4 bytes a number that `nbytes` does not count.
    """

    panels: MatrixPanels
    format: str
    by_vectors: Callable[[], CpuLinearPlan]
    emulated: bool = False

    @property
    def kernel(self) -> str:
        """The name of the kernel."""
        return f"numba.{self.format}.amx{self.panels.row_tiles * ROWS}x{TOKENS}"

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    @property
    def _lanes(self) -> int:
        return ROWS

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        m, k = self.shape
        parts = min(threads, -(-n // ROWS))
        layouts = {"into_blocks": ("token_major", "token_blocked"), "out_of_blocks": ("token_blocked", "token_major")}
        between = layouts.get(self.layout, (self.layout, self.layout))
        needed = room(self.panels, k, n, parts)
        bound = kernel(self.panels.row_tiles, *between, self.emulated).bound(
            "scratch_at x_at y_at bias_at activation", weights=self.panels.arrays, places=self.panels.places,
            n=n, k=k, m=m, tiles=needed.tiles, x_bytes=needed.x_bytes, y_bytes=needed.y_bytes,
            thread_bytes=needed.thread_bytes, parts=parts,
        )  # fmt: skip

        return KernelWithScratch(bound, parts * needed.thread_bytes // 4)

    def _otherwise(self) -> CpuLinearPlan:
        return self._vectors

    @cached_property
    def _vectors(self) -> CpuLinearPlan:
        return self.by_vectors()

    def copy(self) -> MatrixPlan:
        """The same plan with weights of its own."""
        return replace(self, panels=self.panels.copy())


@cache
def kernel(row_tiles: int, x_layout: str, y_layout: str, emulated: bool = False) -> ParallelKernel:
    """The compiled loops for panels of so many tiles; x and y are token_major, feature_major or token_blocked.

    Called with (panels.arrays, panels.places, addresses of x and y, n, k, m, address of bias (m), activation code,
    address of scratch, at a cache line, and what `ThreadScratch` says of it, parts, at most as many as there are vectors of 16
    tokens). Returns whether all sums were finite; else y means nothing.
    """
    if not (emulated or amx.available()):
        raise RuntimeError("this process has no matrix unit")
    emulate = int(emulated)
    x_by_token, y_by_token = x_layout == "token_major", y_layout == "token_major"
    x_blocked, y_blocked = x_layout == "token_blocked", y_layout == "token_blocked"
    panel_bytes = row_tiles * ROWS * TOKENS * 4
    # Tokens that parts share: a tile must not lie in two blocks.
    unit = TOKENS if x_blocked or y_blocked else ROWS

    @in_parts
    def multiply(  # type: ignore[no-untyped-def]
        part, weights, places, x_at, y_at, n, k, m, bias_at, activation, scratch_at,
        tiles, x_bytes, y_bytes, thread_bytes, parts,
    ):  # fmt: skip
        values, columns, table = weights
        values_at, columns_at, places_at = values.ctypes.data, columns.ctypes.data, places.ctypes.data
        panels = table.shape[0]
        units = (n + unit - 1) // unit
        flags = np.zeros(1, np.int32)
        saved = scratch_at + part * thread_bytes
        gathered = saved + amx.SAVED_BYTES
        x_here = gathered + 2 * GATHERED_BYTES + TILE_BYTES
        y_here = x_here + tiles * x_bytes
        flag = flags.ctypes.data
        begin, end = units * part // parts * unit, min(units * (part + 1) // parts * unit, n)
        amx.begin(emulate, saved)
        first = begin
        while first < end:
            stop = min(first + tiles * TOKENS, end)
            here = x_here
            for token in range(first, stop, TOKENS):
                if x_by_token:
                    amx.split_tokens(x_at + token * k * 4, k, stop - token, k, here)
                elif x_blocked:
                    there = token // BLOCK_TOKENS * k * BLOCK_TOKENS + token % BLOCK_TOKENS
                    amx.split_features(x_at + there * 4, BLOCK_TOKENS, stop - token, k, here)
                else:
                    amx.split_features(x_at + token * 4, n, stop - token, k, here)
                here += x_bytes
            phase = 0
            amx.gather(columns_at + table[0, 1] * 4, table[0, 2] == 0, x_here, ROW_BYTES, gathered)
            for panel in range(panels):
                weight, column = values_at + table[panel, 0], columns_at + table[panel, 1] * 4
                steps, all_steps = table[panel, 2], table[panel, 3]
                x_tile, y_tile = x_here, y_here + panel * panel_bytes
                behind = min(panel + 1, panels - 1)
                for token in range(first, stop, TOKENS):
                    if token + TOKENS < stop:
                        then, next_x = panel, x_tile + x_bytes
                    else:
                        then, next_x = behind, x_here
                    next_weight, next_column = values_at + table[then, 0], columns_at + table[then, 1] * 4
                    halves = 2 if stop - token > ROWS else 1
                    amx.matrix_tile(
                        emulate, row_tiles, halves, weight, column, steps, all_steps, x_tile, ROW_BYTES,
                        next_weight, next_column, table[then, 2] == 0, next_x, gathered, phase, y_tile,
                    )  # fmt: skip
                    phase += all_steps
                    x_tile = next_x
                    y_tile += y_bytes
            y_tile = y_here
            for token in range(first, stop, TOKENS):
                if y_by_token:
                    for half in range(token, min(token + TOKENS, stop), ROWS):
                        amx.finish_tokens(
                            y_tile + (half - token) * 4, places_at, bias_at, activation, stop - half, m,
                            y_at + half * m * 4, m, flag,
                        )  # fmt: skip
                elif y_blocked:
                    there = token // BLOCK_TOKENS * m * BLOCK_TOKENS + token % BLOCK_TOKENS
                    amx.finish_features(
                        y_tile, places_at, bias_at, activation, stop - token, m,
                        y_at + there * 4, BLOCK_TOKENS, flag,
                    )  # fmt: skip
                else:
                    amx.finish_features(
                        y_tile, places_at, bias_at, activation, stop - token, m, y_at + token * 4, n, flag
                    )
                y_tile += y_bytes
            first = stop
        amx.end(emulate, saved)
        return flags[0]

    return multiply
