"""Any packed weight as panels: runs of rows that share their columns.

A panel has `width` rows (of the packed order) and `count` columns. Its values lie column after column, `width`
weights beside each other, as a vector register or a row of broadcasts wants them. Rows that fill up the last panel of
a group have weight 0 and row_ids -1.

values   float32, the bits of bfloat16 in uint16, or int8 (sum of count * width); or `paired`
columns  int32 (sum of count over groups): panels of one group share their columns
table    int64 (stages * panels, 3): where the panel's values start, where its columns start, count; once for each
         stage of columns, of which there is one unless `in_stages` cut them
work     int64 (panels + 1): the cost of all panels before each one, in columns
row_ids  int32 (panels * width): the row of the matrix that a packed row is, -1 for none
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned, copy_into_one_piece, copy_to_cache_line
from sparse_kernels.formats import BlockWeight, CSRWeight, DenseWeight, NMWeight, Packed, VectorWeight, bfloat16
from sparse_kernels.formats.int8 import QUAD

# What a panel costs beside its columns: setting up a tile and finishing its sums takes about as long as six columns.
PANEL_COST = 6


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of `height` rows with equal columns: group g has columns[indptr[g] : indptr[g + 1]].

    values float32 (columns, height); row_ids int32 (groups * height), -1 for rows that do not exist.
    """

    height: int
    indptr: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    row_ids: NDArray[np.int32]


class PanelArrays(NamedTuple):
    """The arrays of the module's docstring, as kernels take them."""

    table: NDArray[np.int64]
    values: NDArray[Any]
    columns: NDArray[np.int32]
    work: NDArray[np.int64]
    row_ids: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Panels:
    """Panels of one width; the arrays are those of the module's docstring."""

    width: int
    values: NDArray[Any]
    columns: NDArray[np.int32]
    table: NDArray[np.int64]
    work: NDArray[np.int64]
    row_ids: NDArray[np.int32]

    @property
    def arrays(self) -> PanelArrays:
        """The arrays as kernels take them."""
        return PanelArrays(self.table, self.values, self.columns, self.work, self.row_ids)

    @cached_property
    def in_order(self) -> bool:
        """Whether the rows that exist are those of the matrix in their order."""
        exist = self.row_ids[self.row_ids >= 0]
        return np.array_equal(exist, np.arange(exist.size))

    @cached_property
    def has_quads(self) -> bool:
        """Whether each four rows are those of one quad of results, in order, as far as they exist."""
        return self.width % QUAD == 0 and holds_quads(self.row_ids)

    @property
    def stages(self) -> int:
        """In how many stages the columns are."""
        return len(self.table) // (len(self.work) - 1)

    def density(self, k: int) -> float:
        """Return the share of k columns that is kept, in the mean of all rows."""
        return self.values.size / (self.row_ids.size * k)

    @cached_property
    def positions(self) -> NDArray[np.uint32]:
        """The position of each row of the matrix among the packed ones, (m); unsigned, so no sign is checked."""
        exist = np.flatnonzero(self.row_ids >= 0)
        found = np.empty(exist.size, np.uint32)
        found[self.row_ids[exist]] = exist
        return found

    def positions_in_fours(self, lanes: int) -> NDArray[np.uint32]:
        """Return the same where fours of tokens lie as `token_tile` leaves them, by vectors of so many lanes.

        Of a vector every fourth row from the first on, then from the second, the third and the fourth on.
        """
        vector, row = np.divmod(self.positions.astype(np.int64), lanes)
        positions: NDArray[np.uint32] = (vector * lanes + row % 4 * (lanes // 4) + row // 4).astype(np.uint32)
        return positions

    def used(self, stride: int) -> NDArray[np.int64]:
        """Return where the columns start that any panel has, `stride` elements apart; rising."""
        return np.unique(self.columns).astype(np.int64) * stride

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def copy(self) -> Panels:
        """Return the same panels in memory of their own, in one piece.

        In a model all of it comes from memory at each call, and each page of it has to be found first.
        """
        work, table, columns, row_ids, values = copy_into_one_piece(
            self.work, self.table, self.columns, self.row_ids, self.values
        )
        return Panels(self.width, values, columns, table, work, row_ids)

    def narrowed(self) -> Panels:
        """Return the same panels with the nearest bfloat16 of each float32."""
        return replace(self, values=copy_to_cache_line(bfloat16.round_to_bits(self.values)))

    def in_bytes(self) -> Panels:
        """Return the same panels, of whole numbers from -127 to 127, with a byte for each."""
        return replace(self, values=copy_to_cache_line(self.values.astype(np.int8)))

    def paired(self) -> Panels:
        """Return the same panels as bfloat16, two columns in the place of one float32.

        The earlier column's is the lower half; where a panel has an odd number of columns, the last upper half is 0.
        """
        table, halves, at = self.table.copy(), bfloat16.round_to_bits(self.values), 0
        values = allocate_aligned(int(((table[:, 2] + 1) // 2).sum()) * self.width)
        for panel, (first, _, count) in enumerate(self.table):
            columns = halves[first : first + count * self.width].reshape(count, self.width)
            pairs = values[at : at + (count + 1) // 2 * self.width].view(np.uint16).reshape(-1, self.width, 2)
            pairs[:, :, 0] = columns[::2]
            pairs[: count // 2, :, 1] = columns[1::2]
            pairs[count // 2 :, :, 1] = 0
            table[panel, 0] = at
            at += pairs.size // 2
        return replace(self, values=values, table=table)

    def in_stages(self, stages: int, k: int) -> Panels:
        """Return the same panels with the k columns in so many stages, in whose order the values lie, too."""
        if stages == 1:
            return self
        panels = len(self.table)
        table, values = np.empty((stages, panels, 3), np.int64), allocate_aligned(self.values.size, self.values.dtype)
        cuts, at = k * np.arange(stages + 1) // stages, 0
        places = [
            start + np.searchsorted(self.columns[start : start + count], cuts) for _, start, count in self.table
        ]
        for stage in range(stages):
            for panel, (first, start, _) in enumerate(self.table):
                begin, end = places[panel][stage : stage + 2]
                size = (end - begin) * self.width
                table[stage, panel] = at, begin, end - begin
                values[at : at + size] = self.values[first + (begin - start) * self.width :][:size]
                at += size
        return replace(self, values=values, table=table.reshape(-1, 3))

    def placed(self, offsets: NDArray[np.int32]) -> Panels:
        """Return the same panels with offsets[c] in place of each column c."""
        return replace(self, columns=offsets[self.columns])


def holds_quads(row_ids: NDArray[np.int32]) -> bool:
    """Return whether each four of these rows, -1 for none, are those of one quad of results, in order."""
    fours = row_ids.reshape(-1, QUAD)
    alike = (fours == fours[:, :1] + np.arange(QUAD)) | (fours < 0)
    return bool(alike.all() and ((fours[:, 0] % QUAD == 0) | (fours < 0).all(axis=1)).all())


def count_group_rows(packed: Packed) -> int:
    """Return how many rows share their columns in this weight; every height is possible where all columns are kept:
    m."""
    match packed:
        case DenseWeight():
            return packed.shape[0]
        case CSRWeight() | NMWeight():
            return 1
        case BlockWeight():
            return packed.pattern.rows
        case VectorWeight():
            return packed.pattern.v
    raise TypeError(f"a packed weight is needed, not {type(packed).__name__}")


def build_groups(packed: Packed) -> Groups:
    """Return the groups of a packed weight, in the order of its rows; column lists rise."""
    m, k = packed.shape
    match packed:
        case DenseWeight():
            indptr = np.array([0, k], np.int64)
            return Groups(
                m, indptr, np.arange(k, dtype=np.int32), packed.values.T.copy(), np.arange(m, dtype=np.int32)
            )
        case CSRWeight():
            return Groups(1, packed.indptr, packed.indices, packed.values[:, None], np.arange(m, dtype=np.int32))
        case NMWeight():
            return _nm_groups(packed)
        case BlockWeight():
            return _block_groups(packed)
        case VectorWeight():
            return Groups(packed.pattern.v, packed.indptr, packed.indices, packed.values, packed.row_ids)
    raise TypeError(f"a packed weight is needed, not {type(packed).__name__}")


def build_panels(groups: Groups, width: int) -> Panels:
    """Cut each group into panels of `width` rows, the last one filled up."""
    cuts = -(-groups.height // width)
    filled = cuts * width
    counts = np.diff(groups.indptr)
    n_groups = counts.size
    padded = np.zeros((groups.columns.size, filled), np.float32)
    padded[:, : groups.height] = groups.values
    # From (column, row) to (cut, column, row in cut), a group at a time: panels of a group lie one after the other.
    values = allocate_aligned(padded.size)
    for start, stop in zip(groups.indptr, groups.indptr[1:], strict=False):
        block = padded[start:stop].reshape(stop - start, cuts, width).swapaxes(0, 1)
        values[start * filled : stop * filled] = block.ravel()
    table = np.empty((n_groups, cuts, 3), np.int64)
    table[..., 0] = groups.indptr[:-1, None] * filled + np.arange(cuts) * width * counts[:, None]
    table[..., 1] = groups.indptr[:-1, None]
    table[..., 2] = counts[:, None]
    work = np.zeros(n_groups * cuts + 1, np.int64)
    np.cumsum(np.repeat(counts + PANEL_COST, cuts), out=work[1:])
    row_ids = np.full((n_groups, filled), -1, np.int32)
    row_ids[:, : groups.height] = groups.row_ids.reshape(n_groups, groups.height)
    # The last group of a matrix with fewer rows may end in panels of rows that do not exist.
    exist = -(-int(np.flatnonzero(row_ids >= 0).max(initial=-1) + 1) // width)
    return Panels(
        width, values, groups.columns.copy(), table.reshape(-1, 3)[:exist].copy(), work[: exist + 1].copy(),
        row_ids.ravel()[: exist * width].copy(),
    )  # fmt: skip


def _nm_groups(packed: NMWeight) -> Groups:
    """Return rows one by one, without the slots that hold nothing: they repeat the offset before them, with weight
    0."""
    m, n_groups, _ = packed.values.shape
    offsets = packed.offsets.astype(np.int32)
    filled = np.ones(offsets.shape, bool)
    filled[:, :, 1:] = (offsets[:, :, 1:] != offsets[:, :, :-1]) | (packed.values[:, :, 1:] != 0)
    filled[:, :, 0] = (offsets[:, :, 0] != 0) | (packed.values[:, :, 0] != 0)
    columns = np.arange(n_groups, dtype=np.int32)[:, None] * packed.pattern.of + offsets
    indptr = np.zeros(m + 1, np.int64)
    np.cumsum(np.count_nonzero(filled.reshape(m, -1), axis=1), out=indptr[1:])
    return Groups(1, indptr, columns[filled], packed.values[filled][:, None], np.arange(m, dtype=np.int32))


def _block_groups(packed: BlockWeight) -> Groups:
    """Return block rows with their columns written out, those beyond k left out."""
    m, k = packed.shape
    _, rows, cols = packed.values.shape
    columns = packed.indices[:, None] * cols + np.arange(cols, dtype=np.int32)
    exists = columns < k
    values = packed.values.swapaxes(1, 2)[exists]
    ends = np.concatenate([[0], np.cumsum(np.count_nonzero(exists, axis=1))])
    row_ids = np.full((packed.indptr.size - 1) * rows, -1, np.int32)
    row_ids[:m] = np.arange(m)
    return Groups(rows, ends[packed.indptr].astype(np.int64), columns[exists].astype(np.int32), values, row_ids)
