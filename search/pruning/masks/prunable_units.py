"""What goes together: a pattern cuts a matrix into bands of rows, and a band into units that are kept or dropped.

All rows of a band keep the same columns. A unit is `height` rows x `width` columns, less at the lower and right
edges: one weight (unstructured, N:M), a vector, a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, VectorNM, VectorWise
from sparse_kernels.top_units import Mask, Scores, top_units


@dataclass(frozen=True)
class Units:
    """The units of a pattern; where `of` is not 0, at most `keep` of every `of` neighbours in a band are kept."""

    height: int = 1
    width: int = 1
    keep: int = 0
    of: int = 0

    def heights(self, m: int) -> NDArray[np.int64]:
        """The rows of each band of a matrix with m rows."""
        return np.minimum(self.height, m - np.arange(0, m, self.height))

    def widths(self, k: int) -> NDArray[np.int64]:
        """The columns of each unit of a matrix with k columns."""
        return np.minimum(self.width, k - np.arange(0, k, self.width))

    def sizes(self, m: int, k: int) -> NDArray[np.int64]:
        """The elements of every unit, (bands, units)."""
        return np.outer(self.heights(m), self.widths(k))

    def totals(self, scores: Scores) -> NDArray[np.float64]:
        """The sum of scores (m, k) over every unit, (bands, units)."""
        m, k = scores.shape
        by_row = np.add.reduceat(scores, np.arange(0, m, self.height), axis=0, dtype=np.float64)
        return np.add.reduceat(by_row, np.arange(0, k, self.width), axis=1)

    def keeps_of(self, length: int) -> int:
        """How many of `length` <= `of` neighbours are kept at most."""
        return -(-self.keep * length // self.of)

    def best(self, totals: NDArray[np.float64], m: int, k: int, sparsity: float) -> Mask:
        """The units (bands, units) of most score, of the whole matrix, as near the sparsity as can be."""
        return top_units(totals.ravel(), self.sizes(m, k).ravel(), (1 - sparsity) * m * k).reshape(totals.shape)

    def spread(self, kept: Mask, m: int, k: int) -> Mask:
        """The mask (m, k) of kept units (bands, units)."""
        return kept.repeat(self.heights(m), axis=0).repeat(self.widths(k), axis=1)


def units_of(pattern: Pattern, sparsity: float) -> Units:
    """The pattern's units; Shfl-BW's once rows that share their columns are together.

    Raises ValueError for a sparsity that the pattern does not have.
    """
    pattern.mask(np.ones((1, 1)), sparsity)  # what it refuses is refused here, before any work
    match pattern:
        case NM():
            return Units(keep=pattern.keep, of=pattern.of)
        case VectorNM():
            return Units(pattern.v, keep=pattern.keep, of=pattern.of)
        case VectorWise() | ShflBW():
            return Units(pattern.v)
        case BlockWise():
            return Units(pattern.rows, pattern.cols)
        case Dense():
            raise ValueError("a dense layer has nothing to prune")
    return Units()
