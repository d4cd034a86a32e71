"""N:M weight: of every `of` consecutive columns of a row, at most `keep` are kept. Mishra et al. 2021.

groups = ceil(k / of); the last group of a row may have fewer columns. values float32 (m, groups, keep). offsets uint8
(m, groups, keep): values[i, g, s] stands at column g * of + offsets[i, g, s], rising within a group. A slot that
holds nothing (a group that keeps fewer) has value 0 and repeats the offset before it (0 for the first). So every slot
names a column that exists. What multiplies it must skip it, or makes NaN of an infinite x there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats.checks import Mask, NotOfPattern, Weight, check_weight_and_mask, freeze
from sparse_kernels.patterns import NM


@dataclass(frozen=True, eq=False)
class NMWeight:
    """A weight with at most `keep` elements in every group of `of` columns."""

    shape: tuple[int, int]
    pattern: NM
    nnz: int
    values: NDArray[np.float32]
    offsets: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return self.values.nbytes + self.offsets.nbytes


def pack(weight: Weight, mask: Mask, pattern: NM) -> NMWeight:
    """Store the elements of weight float32 (m, k) that mask bool (m, k) keeps.

    NotOfPattern where the mask keeps too many of a group.
    """
    check_weight_and_mask(weight, mask)
    m, k = weight.shape
    groups = -(-k // pattern.of)
    kept = np.zeros((m, groups * pattern.of), bool)
    kept[:, :k] = mask
    kept = kept.reshape(m, groups, pattern.of)
    numbers = np.count_nonzero(kept, axis=2)
    most = np.full(groups, pattern.keep)
    most[-1] = pattern.keeps_of(k - (groups - 1) * pattern.of)
    if (numbers > most).any():
        row, group = np.argwhere(numbers > most)[0]
        columns = min(k, (group + 1) * pattern.of) - group * pattern.of
        raise NotOfPattern(
            f"{pattern} keeps at most {most[group]} of {columns} columns, and the mask keeps {numbers[row, group]} "
            f"in row {row}, group {group} (columns {group * pattern.of} to {group * pattern.of + columns - 1})"
        )
    rows, group_of, offset = np.nonzero(kept)
    first = np.cumsum(numbers.ravel()) - numbers.ravel()
    slot = np.arange(rows.size) - first[rows * groups + group_of]
    values = np.zeros((m, groups, pattern.keep), np.float32)
    values[rows, group_of, slot] = weight[rows, group_of * pattern.of + offset]
    offsets = np.zeros((m, groups, pattern.keep), np.uint8)
    offsets[rows, group_of, slot] = offset
    np.maximum.accumulate(offsets, axis=2, out=offsets)
    return NMWeight((m, k), pattern, rows.size, freeze(values), freeze(offsets))


def unpack(packed: NMWeight) -> Weight:
    """Return the weight, float32 (m, k), zero where dropped."""
    weight = np.zeros(packed.shape, np.float32)
    m, groups, keep = packed.values.shape
    rows = np.arange(m)[:, None]
    for slot in range(keep):
        columns = np.arange(groups) * packed.pattern.of + packed.offsets[:, :, slot]
        weight[rows, columns] += packed.values[:, :, slot]  # an empty slot adds 0 to the one before it
    return weight


def check(packed: NMWeight) -> None:
    """Refuse (ValueError) offsets that name no column of their group, or fall."""
    of = packed.pattern.of
    columns = np.minimum(of, packed.shape[1] - of * np.arange(packed.offsets.shape[1]))
    if (packed.offsets >= columns[:, None]).any():
        raise ValueError(f"offsets must lie below {of}, and in a last, narrower group below its columns")
    if (packed.offsets[:, :, 1:] < packed.offsets[:, :, :-1]).any():
        raise ValueError("offsets must not fall within a group")
