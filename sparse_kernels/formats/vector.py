"""Vector-wise and Shfl-BW weight: groups of V rows that share their kept columns. Huang et al., DAC 2022, section 4.

groups = ceil(m / V).
indptr int64 (groups + 1): group g holds the vectors indptr[g] to indptr[g + 1].
indices int32 (vectors): their columns, rising within a group.
values float32 (vectors, V): the V weights of a vector beside each other; 0 in padding rows.
row_ids int32 (groups * V): packed row g * V + i is row row_ids[g * V + i] of the matrix, -1 = padding.
Rows rise within a group; every group but the last is full. Vector-wise: 0 to m - 1, then padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats.checks import Mask, NotOfPattern, Weight, check_compressed, check_weight_and_mask, freeze
from sparse_kernels.patterns import NM, ShflBW, VectorNM, VectorWise


@dataclass(frozen=True, eq=False)
class VectorWeight:
    """A weight whose rows fall into groups with equal columns."""

    shape: tuple[int, int]
    pattern: VectorWise | ShflBW
    nnz: int
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    row_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.values.nbytes + self.row_ids.nbytes


def pack(weight: Weight, mask: Mask, pattern: VectorWise | ShflBW) -> VectorWeight:
    """Store the vectors of weight float32 (m, k) that mask bool (m, k) keeps.

    NotOfPattern where the mask keeps a part of a vector, or its rows do not fall into groups.
    """
    check_weight_and_mask(weight, mask)
    m, k = weight.shape
    v = pattern.v
    row_ids = np.full(-(-m // v) * v, -1, np.int32)
    row_ids[:m] = np.arange(m) if isinstance(pattern, VectorWise) else _row_groups(mask, pattern)
    kept = mask[row_ids[::v]]
    whole = kept.repeat(v, axis=0)[:m]
    if (whole != mask[row_ids[:m]]).any():
        row, column = np.argwhere(whole != mask[row_ids[:m]])[0]
        raise NotOfPattern(
            f"{pattern} keeps whole vectors of {v} rows, and the mask keeps a part of the one at rows "
            f"{row - row % v} to {min(m, row - row % v + v) - 1}, column {column}"
        )
    if isinstance(pattern, VectorNM):
        _check_groups(kept, pattern)
    if isinstance(pattern, ShflBW):
        _check_columns(kept, pattern)
    groups, columns = np.nonzero(kept)
    indptr = np.zeros(kept.shape[0] + 1, np.int64)
    np.cumsum(np.count_nonzero(kept, axis=1), out=indptr[1:])
    padded = np.zeros((row_ids.size, k), np.float32)
    padded[:m] = weight[row_ids[:m]]
    values = padded.reshape(-1, v, k)[groups, :, columns]
    nnz = int(np.count_nonzero(mask))
    indices = columns.astype(np.int32)
    return VectorWeight((m, k), pattern, nnz, freeze(indptr), freeze(indices), freeze(values), freeze(row_ids))


def unpack(packed: VectorWeight) -> Weight:
    """Return the weight, float32 (m, k), zero where dropped."""
    m, k = packed.shape
    v = packed.pattern.v
    groups = np.repeat(np.arange(packed.indptr.size - 1), np.diff(packed.indptr))
    padded = np.zeros((packed.indptr.size - 1, v, k), np.float32)
    padded[groups, :, packed.indices] = packed.values
    weight = np.empty((m, k), np.float32)
    weight[packed.row_ids[:m]] = padded.reshape(-1, k)[:m]
    return weight


def check(packed: VectorWeight) -> None:
    """Refuse (ValueError) arrays that contradict each other."""
    m, k = packed.shape
    check_compressed(packed.indptr, packed.indices, k)
    if (np.sort(packed.row_ids[:m]) != np.arange(m)).any() or (packed.row_ids[m:] != -1).any():
        raise ValueError(f"row_ids must name each row from 0 to {m - 1} once, and -1 after that")


def _check_columns(kept: Mask, pattern: ShflBW) -> None:
    """NotOfPattern where kept vectors bool (groups of rows, k) are a part of the columns that are kept together."""
    whole = kept[:, :: pattern.cols].repeat(pattern.cols, axis=1)[:, : kept.shape[1]]
    if (whole != kept).any():
        column = int(np.argwhere(whole != kept)[0][1])
        raise NotOfPattern(
            f"{pattern} keeps {pattern.cols} columns together, and the mask keeps a part of those from column "
            f"{column - column % pattern.cols} on"
        )


def _check_groups(kept: Mask, pattern: VectorNM) -> None:
    """NotOfPattern where kept vectors bool (groups of rows, k) are too many in `of` consecutive columns."""
    starts = np.arange(0, kept.shape[1], pattern.of)
    numbers = np.add.reduceat(kept, starts, axis=1, dtype=np.int64)
    most = np.full(starts.size, pattern.keep)
    most[-1] = NM(pattern.keep, pattern.of).keeps_of(kept.shape[1] - int(starts[-1]))
    if (numbers > most).any():
        rows, group = np.argwhere(numbers > most)[0]
        raise NotOfPattern(
            f"{pattern} keeps at most {most[group]} vectors from column {starts[group]} on, and the mask keeps "
            f"{numbers[rows, group]} in rows {rows * pattern.v} to {rows * pattern.v + pattern.v - 1}"
        )


def _row_groups(mask: Mask, pattern: ShflBW) -> NDArray[np.int64]:
    """Return the rows (m,), those with equal columns together: full groups by their first row, then the short group.

    NotOfPattern unless equal rows come in multiples of v, apart from the m mod v rows of one short group.
    """
    v = pattern.v
    bits = np.packbits(mask, axis=1)
    _, first, kind, numbers = np.unique(bits, axis=0, return_index=True, return_inverse=True, return_counts=True)
    short = mask.shape[0] % v
    left_over = numbers % v
    if np.count_nonzero(left_over) != (short > 0) or left_over.sum() != short:
        odd = np.flatnonzero(left_over)
        rows = np.flatnonzero(kind.ravel() == odd[np.argmin(first[odd])])
        raise NotOfPattern(
            f"{pattern} needs rows with equal columns in multiples of {v}"
            + (f" (and {short} rows more, as the weight has {mask.shape[0]})" if short else "")
            + f", and the mask has {rows.size} rows with the columns of row {rows[0]}"
        )
    by_kind = np.argsort(kind.ravel(), kind="stable")
    full: list[NDArray[np.int64]] = []
    rest = np.empty(0, np.int64)
    for rows in np.split(by_kind, np.cumsum(numbers)[:-1]):
        whole = rows.size - rows.size % v
        full.extend(rows[:whole].reshape(-1, v))
        if whole < rows.size:
            rest = rows[whole:]
    full.sort(key=lambda rows: int(rows[0]))
    return np.concatenate([*full, rest])
