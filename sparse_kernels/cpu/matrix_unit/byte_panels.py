"""Weights in eight bits as tiles of the matrix unit: rows that share their quads, 16 of each at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.tile_registers import ROWS, TILE_BYTES
from sparse_kernels.cpu.layouts.panels import Groups, holds_quads
from sparse_kernels.cpu.matrix_unit.byte_tiles import STEP
from sparse_kernels.cpu.matrix_unit.tile_panels import TilePanels
from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned


class ByteArrays(NamedTuple):
    """Arrays of `BytePanels`, as kernels take them."""

    values: NDArray[np.float32]
    columns: NDArray[np.int32]
    table: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BytePanels(TilePanels):
    """Panels of 16 or 32 rows that share their quads of columns, as tiles of bytes.

    row_tiles: 1 or 2. values: four bytes in the place of a float32, panel after panel as `byte_tile` takes them.
    columns: int32, the quads of each group, or once they are `placed` where they lie in x, in 32 bits. table: int64
    (panels, 3), where values (in bytes) and columns start, and steps (at least one). row_ids: int32 (rows of all
    panels), the row of the matrix that each is, -1 for none. positions: uint32 (m, in whole vectors), where each row
    of the matrix lies among them.
    """

    @property
    def arrays(self) -> ByteArrays:
        """The arrays as kernels take them."""
        return ByteArrays(self.values, self.columns, self.table)

    @property
    def in_order(self) -> bool:
        """Whether rows of the matrix are rows of the panels."""
        m = int((self.row_ids >= 0).sum())
        return bool((self.positions[:m] == np.arange(m)).all())

    @property
    def has_quads(self) -> bool:
        """Whether each four rows are those of one quad of results, in order, as far as they exist."""
        return holds_quads(self.row_ids)


def build_byte_panels(groups: Groups, tiles: int, m: int) -> BytePanels:
    """Cut the groups of a weight of m rows, whose columns are quads, into panels of so many tiles of rows."""
    width = tiles * ROWS
    cuts = -(-groups.height // width)
    counts = np.diff(groups.indptr)
    steps = np.maximum(1, -(-counts // STEP))
    step_bytes = tiles * TILE_BYTES
    values_at = np.concatenate([[0], np.cumsum(cuts * steps * step_bytes)])
    columns_at = np.concatenate([[0], np.cumsum(steps * STEP)])
    values, columns = allocate_aligned(int(values_at[-1]) // 4), np.zeros(int(columns_at[-1]), np.int32)
    for group, (start, stop) in enumerate(zip(groups.indptr, groups.indptr[1:], strict=False)):
        size = int(steps[group]) * STEP
        columns[columns_at[group] : columns_at[group] + stop - start] = groups.columns[start:stop]
        part = np.zeros((size, cuts * width), np.float32)
        part[: stop - start, : groups.height] = groups.values[start:stop]
        part = part.reshape(-1, STEP, cuts, tiles, ROWS).transpose(2, 0, 3, 4, 1)
        values[values_at[group] // 4 : values_at[group + 1] // 4] = part.ravel()
    table = np.empty((counts.size, cuts, 3), np.int64)
    table[..., 0] = values_at[:-1, None] + np.arange(cuts) * (steps * step_bytes)[:, None]
    table[..., 1], table[..., 2] = columns_at[:-1, None], steps[:, None]
    row_ids = np.full((counts.size, cuts * width), -1, np.int32)
    row_ids[:, : groups.height] = groups.row_ids.reshape(counts.size, groups.height)
    exist = np.flatnonzero(row_ids >= 0)
    positions = np.zeros(-(-m // ROWS) * ROWS, np.uint32)
    positions[row_ids.ravel()[exist]] = exist
    # The last group of a matrix with fewer rows may end in panels of rows that do not exist.
    used = -(-int(exist.max(initial=-1) + 1) // width)
    table, row_ids = table.reshape(-1, 3)[:used].copy(), row_ids.ravel()[: used * width].copy()
    return BytePanels(tiles, values, columns, table, row_ids, positions)
