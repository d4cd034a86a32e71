"""Unstructured weight in compressed sparse rows.

indptr int64 (m + 1): row i holds the elements indptr[i] to indptr[i + 1].
indices int32 (nnz): their columns, rising within a row.
values float32 (nnz): a kept zero is stored like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats.checks import Mask, Weight, check_compressed, check_weight_and_mask, freeze
from sparse_kernels.patterns import Unstructured


@dataclass(frozen=True, eq=False)
class CSRWeight:
    """A weight whose kept elements lie anywhere."""

    shape: tuple[int, int]
    pattern: Unstructured
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def nnz(self) -> int:
        """Kept elements."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.values.nbytes


def pack(weight: Weight, mask: Mask, pattern: Unstructured) -> CSRWeight:
    """Store the elements of weight float32 (m, k) that mask bool (m, k) keeps."""
    check_weight_and_mask(weight, mask)
    indptr = np.zeros(weight.shape[0] + 1, np.int64)
    np.cumsum(np.count_nonzero(mask, axis=1), out=indptr[1:])
    indices = np.nonzero(mask)[1].astype(np.int32)
    shape = (weight.shape[0], weight.shape[1])
    return CSRWeight(shape, pattern, freeze(indptr), freeze(indices), freeze(weight[mask]))


def unpack(packed: CSRWeight) -> Weight:
    """Return the weight, float32 (m, k), zero where dropped."""
    weight = np.zeros(packed.shape, np.float32)
    rows = np.repeat(np.arange(packed.shape[0]), np.diff(packed.indptr))
    weight[rows, packed.indices] = packed.values
    return weight


def check(packed: CSRWeight) -> None:
    """Refuse (ValueError) arrays that contradict each other."""
    check_compressed(packed.indptr, packed.indices, packed.shape[1])
