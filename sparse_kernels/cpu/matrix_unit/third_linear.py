"""Linear layers by the matrix unit (`third_tiles`), a block of tokens at a time; threads share tokens.

A thread splits a block's x into thirds, with tokens along the vector. It passes the panels over them and writes y; to
put permuted rows (Shfl-BW) back costs nothing. The x of a block stays in the second-level cache while weights pass
by, 6 bytes each. A panel meets all tokens of the block before the next panel.

Needs groups of rows that fill tiles of 16, and finite weights. Sums that are not finite are told: x may not have been
finite, or thirds overflowed where float32 does not, or another way. Then the plan computes all of y again by vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.bf16_split import has_thirds, split_thirds
from sparse_kernels.cpu.codegen.tile_operands import (
    WORTH_OF_FLOATS,
    Epilogue,
    GatherBuffers,
    MatrixSums,
    MatrixWeights,
    NextTile,
    SplitInput,
    TokenRows,
    WaitingSums,
)
from sparse_kernels.cpu.codegen.tile_registers import ROW_BYTES, ROWS, TILE_BYTES
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import Groups, build_groups, count_group_rows
from sparse_kernels.cpu.layouts.vector_grid import TILE, build_column_offsets
from sparse_kernels.cpu.matrix_unit import third_tiles
from sparse_kernels.cpu.matrix_unit.third_tiles import FEATURE_BYTES, GATHERED_BYTES, NARROW_STEP, STEP, TOKENS
from sparse_kernels.cpu.matrix_unit.tile_panels import TilePanels
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned
from sparse_kernels.formats import Packed

# Bytes of the second-level cache of processors that have the unit. Bytes of x and y of a block that stay in it while
# weights pass by.
SECOND_LEVEL_BYTES, CACHED_BYTES = 2_000_000, 700_000

# Tokens of a tile of the layouts that are blocked.
BLOCK_TOKENS = TILE * ROWS


class AmxArrays(NamedTuple):
    """Arrays of `MatrixPanels`, as kernels take them."""

    values: NDArray[np.uint16]
    columns: NDArray[np.int32]
    table: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MatrixPanels(TilePanels):
    """Panels of 16 or 32 rows that share their columns, as tiles of thirds.

    row_tiles: 1 or 2. values: uint16, panel after panel as `matrix_tile` takes them. columns: int32, those of each
    group, or once they are `placed` where they lie in split x, in bfloat16. table: int64 (panels, 4), where
    values (in bytes) and columns start, steps before narrow ones, all steps (at least one). row_ids: int32 (rows of
    all panels), the row of the matrix that each is, -1 for none. positions: uint32 (m), where each row of the matrix
    lies among them.
    """

    @property
    def arrays(self) -> AmxArrays:
        """The arrays as kernels take them."""
        return AmxArrays(self.values, self.columns, self.table)


def count_row_tiles(packed: Packed) -> int | None:
    """Return the tiles of rows in a panel of this weight; None where they would be filled up by over a quarter."""
    return tile_registers.count_row_tiles(count_group_rows(packed))


def accepts_weight(packed: Packed) -> bool:
    """Return whether the unit can multiply this weight, if there is one: its rows fill tiles, and its values have
    thirds.

    There must be a vector of rows and of columns, and a column's place in split x is an int32.
    """
    m, k = packed.shape
    fits = min(m, k) >= ROWS and k * FEATURE_BYTES < 2**31
    return fits and count_row_tiles(packed) is not None and has_thirds(packed.values)


def build_linear_panels(packed: Packed) -> MatrixPanels:
    """Return the panels of a weight that `accepts_weight`, its columns placed among features that are split."""
    tiles, (m, k) = count_row_tiles(packed), packed.shape
    assert tiles is not None
    return build_matrix_panels(build_groups(packed), tiles, m).placed(build_column_offsets(k, FEATURE_BYTES // 2))


def build_matrix_panels(groups: Groups, tiles: int, m: int) -> MatrixPanels:
    """Cut the groups of a weight of m rows, whose values have thirds, into panels of so many tiles of rows."""
    width = tiles * ROWS
    cuts = -(-groups.height // width)
    counts = np.diff(groups.indptr)
    left = counts % STEP
    narrow = (((left > 0) & (left <= NARROW_STEP)) | (counts == 0)).astype(np.int64)
    steps = counts // STEP + (left > NARROW_STEP)
    step_size = 3 * tiles * TILE_BYTES // 2
    values_at = np.concatenate([[0], np.cumsum(cuts * (steps + narrow) * step_size)])
    columns_at = np.concatenate([[0], np.cumsum((steps + narrow) * STEP)])
    values, numbers = allocate_aligned(int(values_at[-1]), np.uint16), np.zeros(int(columns_at[-1]), np.int32)
    split = split_thirds(groups.values)
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
    positions = np.empty(m, np.uint32)
    positions[row_ids.ravel()[exist]] = exist
    # The last group of a matrix with fewer rows may end in panels of rows that do not exist.
    used = -(-int(exist.max(initial=-1) + 1) // width)
    table, row_ids = table.reshape(-1, 4)[:used].copy(), row_ids.ravel()[: used * width].copy()
    return MatrixPanels(tiles, values, numbers, table, row_ids, positions)


class ThreadScratch(NamedTuple):
    """Scratch memory of a thread.

    tiles: of tokens in a block. x_bytes, y_bytes: of x and y of a tile. thread_bytes: of all.
    """

    tiles: int
    x_bytes: int
    y_bytes: int
    thread_bytes: int


def plan_scratch(weights: MatrixPanels, k: int, n: int, threads: int) -> ThreadScratch:
    """Return the scratch memory for n tokens of k features, shared by so many threads.

    It holds as many tiles as stay in the cache. Weights that do not are worth waiting for if two tiles meet them.
    """
    units = -(-n // ROWS)
    each = -(-(-(-units // threads) * ROWS) // TOKENS)
    x_bytes = k * FEATURE_BYTES
    y_bytes = len(weights.table) * weights.row_tiles * ROWS * TOKENS * 4
    least = 1 if weights.nbytes < SECOND_LEVEL_BYTES else 2
    tiles = min(each, max(least, CACHED_BYTES // (x_bytes + y_bytes)))
    return ThreadScratch(
        tiles,
        x_bytes,
        y_bytes,
        tile_registers.SAVED_BYTES + 2 * GATHERED_BYTES + TILE_BYTES + tiles * (x_bytes + y_bytes),
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
        scratch = plan_scratch(self.panels, k, n, parts)
        layer = AmxLayer(self.panels.arrays, self.panels.positions, n, k, m, scratch, parts)
        kernel = build_kernel(self.panels.row_tiles, *between, self.emulated)
        return KernelWithScratch(kernel.bind(LinearCall, layer), parts * scratch.thread_bytes // 4)

    def _otherwise(self) -> CpuLinearPlan:
        return self._vectors

    @cached_property
    def _vectors(self) -> CpuLinearPlan:
        return self.by_vectors()

    def copy(self) -> MatrixPlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy())


class AmxLayer(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels. positions: uint32 (m), where each row of y lies among the panels' rows. n, k, m:
    tokens, features of x and of y. scratch: of each thread. parts: threads, at most as many as there are vectors of
    16 tokens.
    """

    weights: AmxArrays
    positions: NDArray[np.uint32]
    n: int
    k: int
    m: int
    scratch: ThreadScratch
    parts: int


class AmxForm(NamedTuple):
    """What is known of a kernel when it is compiled.

    row_tiles: of a panel. x_by_token, y_by_token: x, y is token-major. x_blocked, y_blocked: it comes in tiles of
    tokens; else it is feature-major. emulated: the matrix unit is.
    """

    row_tiles: int
    x_by_token: bool
    x_blocked: bool
    y_by_token: bool
    y_blocked: bool
    emulated: int


@inline
def split_block(form: Any, call: LinearCall, layer: AmxLayer, tokens: tuple[int, int], target_at: int) -> None:
    """Split the x of a block of tokens, from one to before another, into thirds."""
    _, by_token, blocked, _, _, _ = form
    n, k = layer.n, layer.k
    for token in range(tokens[0], tokens[1], TOKENS):
        left = tokens[1] - token
        if by_token:
            third_tiles.split_tokens(call.x_at + token * k * 4, k, left, k, target_at)
        elif blocked:
            start = token // BLOCK_TOKENS * k * BLOCK_TOKENS + token % BLOCK_TOKENS
            third_tiles.split_features(call.x_at + start * 4, BLOCK_TOKENS, left, k, target_at)
        else:
            third_tiles.split_features(call.x_at + token * 4, n, left, k, target_at)
        target_at += layer.scratch.x_bytes


@inline
def multiply_block(
    form: Any, layer: AmxLayer, tokens: tuple[int, int], gathered_at: int, x_at: int, y_at: int
) -> None:
    """Multiply a block of tokens, split at x_at, by all panels."""
    row_tiles, _, _, _, _, emulated = form
    values, columns, table = layer.weights
    values_at, columns_at = values.ctypes.data, columns.ctypes.data
    x_bytes, y_bytes, panels = layer.scratch.x_bytes, layer.scratch.y_bytes, table.shape[0]
    phase = 0
    third_tiles.gather(columns_at + table[0, 1] * 4, table[0, 2] == 0, x_at, ROW_BYTES, gathered_at)
    for panel in range(panels):
        all_steps = table[panel, 3]
        weights = MatrixWeights(
            values_at + table[panel, 0], columns_at + table[panel, 1] * 4, table[panel, 2], all_steps
        )
        x_tile, y_tile = x_at, y_at + panel * row_tiles * ROWS * TOKENS * 4
        behind = min(panel + 1, panels - 1)
        for token in range(tokens[0], tokens[1], TOKENS):
            then, next_x = (panel, x_tile + x_bytes) if token + TOKENS < tokens[1] else (behind, x_at)
            following = NextTile(
                values_at + table[then, 0], columns_at + table[then, 1] * 4, table[then, 2] == 0, next_x
            )
            sums = MatrixSums(y_tile, 2 if tokens[1] - token > ROWS else 1)
            x, buffers = SplitInput(x_tile, ROW_BYTES), GatherBuffers(gathered_at, phase)
            third_tiles.matrix_tile((emulated, row_tiles), weights, x, following, buffers, sums)
            phase += all_steps
            x_tile = next_x
            y_tile += y_bytes


@inline
def finish_block(
    form: Any, call: LinearCall, layer: AmxLayer, tokens: tuple[int, int], sums_at: int, flag: int
) -> None:
    """Finish the sums of a block of tokens and put them in their places in y."""
    _, _, _, by_token, blocked, _ = form
    n, m, finish = layer.n, layer.m, Epilogue(call.bias_at, call.activation, WORTH_OF_FLOATS)
    positions_at = layer.positions.ctypes.data
    for token in range(tokens[0], tokens[1], TOKENS):
        left = tokens[1] - token
        if by_token:
            for half in range(token, min(token + TOKENS, tokens[1]), ROWS):
                sums = WaitingSums(sums_at + (half - token) * 4, positions_at, m)
                y = TokenRows(call.y_at + half * m * 4, m, tokens[1] - half)
                third_tiles.finish_tokens(sums, y, finish, flag)
        elif blocked:
            start = token // BLOCK_TOKENS * m * BLOCK_TOKENS + token % BLOCK_TOKENS
            y = TokenRows(call.y_at + start * 4, BLOCK_TOKENS, left)
            third_tiles.finish_features(WaitingSums(sums_at, positions_at, m), y, finish, flag)
        else:
            y = TokenRows(call.y_at + token * 4, n, left)
            third_tiles.finish_features(WaitingSums(sums_at, positions_at, m), y, finish, flag)
        sums_at += layer.scratch.y_bytes


@cache
def build_kernel(row_tiles: int, x_layout: str, y_layout: str, emulated: bool = False) -> ParallelKernel:
    """Return the loops for panels of so many tiles; x and y are token_major, feature_major or token_blocked.

    It is called with `LinearCall` and `AmxLayer`, and returns whether all sums were finite; else y means nothing.
    """
    if not (emulated or tile_registers.is_available()):
        raise RuntimeError("this process has no matrix unit: use the vector unit, or emulate the matrix unit")
    x_blocked, y_blocked = x_layout == "token_blocked", y_layout == "token_blocked"
    form = tuple(
        AmxForm(row_tiles, x_layout == "token_major", x_blocked, y_layout == "token_major", y_blocked, int(emulated))
    )
    unit_form = (int(emulated),)
    # Tokens that parts share: a tile must not lie in two blocks.
    unit = TOKENS if x_blocked or y_blocked else ROWS

    @partial(build_parallel_kernel, makes_arrays=True)
    def multiply(part: int, call: LinearCall, layer: AmxLayer) -> int:
        scratch, n = layer.scratch, layer.n
        units = (n + unit - 1) // unit
        flags = np.zeros(1, np.int32)
        saved_at = call.scratch_at + part * scratch.thread_bytes
        gathered_at = saved_at + tile_registers.SAVED_BYTES
        x_at = gathered_at + 2 * GATHERED_BYTES + TILE_BYTES
        y_at = x_at + scratch.tiles * scratch.x_bytes
        first, end = units * part // layer.parts * unit, min(units * (part + 1) // layer.parts * unit, n)
        tile_registers.configure_tiles(unit_form, saved_at)
        while first < end:
            tokens = first, min(first + scratch.tiles * TOKENS, end)
            split_block(form, call, layer, tokens, x_at)
            multiply_block(form, layer, tokens, gathered_at, x_at, y_at)
            finish_block(form, call, layer, tokens, y_at, flags.ctypes.data)
            first = tokens[1]
        tile_registers.restore_tiles(unit_form, saved_at)
        not_finite: int = flags[0]
        return not_finite

    return multiply
