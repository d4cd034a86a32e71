"""What panels for the matrix unit share, whatever their tiles hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.runtime.scratch_buffers import copy_to_cache_line


@dataclass(frozen=True, eq=False)
class TilePanels:
    """Panels of 16 or 32 rows that share their columns.

    row_tiles: 1 or 2. values: panel after panel as their kernel takes them. columns: int32, those of each group, or
    once they are `placed` where they lie in x. table: int64 (panels, ...), what each panel begins with. row_ids:
    int32 (rows of all panels), the row of the matrix that each is, -1 for none. positions: uint32, where each row of
    the matrix lies among them.
    """

    row_tiles: int
    values: NDArray[Any]
    columns: NDArray[np.int32]
    table: NDArray[np.int64]
    row_ids: NDArray[np.int32]
    positions: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.values, self.columns, self.table, self.row_ids, self.positions)
        return sum(array.nbytes for array in arrays)

    def copy(self) -> Self:
        """Return the same panels in memory of their own."""
        others = {name: getattr(self, name).copy() for name in ("columns", "table", "row_ids", "positions")}
        return replace(self, values=copy_to_cache_line(self.values), **others)

    def placed(self, offsets: NDArray[np.int32]) -> Self:
        """Return the same panels with offsets[c] in place of each column c."""
        return replace(self, columns=offsets[self.columns])
