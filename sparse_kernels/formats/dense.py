"""Dense weight. values float32 (m, k), row-major."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparse_kernels.formats.checks import Mask, NotOfPattern, Weight, check_weight_and_mask, freeze
from sparse_kernels.patterns import Dense


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A weight with every element stored."""

    shape: tuple[int, int]
    pattern: Dense
    values: Weight

    @property
    def nnz(self) -> int:
        """Kept elements: all."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """Bytes of the stored array."""
        return self.values.nbytes


def pack(weight: Weight, mask: Mask, pattern: Dense) -> DenseWeight:
    """Store weight float32 (m, k); NotOfPattern where the mask bool (m, k) drops anything."""
    check_weight_and_mask(weight, mask)
    if not mask.all():
        raise NotOfPattern(f"a dense weight keeps everything, and the mask drops {np.count_nonzero(~mask)} elements")
    return DenseWeight((weight.shape[0], weight.shape[1]), pattern, freeze(weight.copy(order="C")))


def unpack(packed: DenseWeight) -> Weight:
    """Return the weight, float32 (m, k), the caller's own."""
    return packed.values.copy()
