"""Units that a pattern keeps or drops as a whole: it cuts a matrix into bands of rows, and a band into units.

All rows of a band keep the same columns. A unit has `height` rows and `width` columns, fewer at the lower and right
edges: one weight (unstructured, N:M), a vector or a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, VectorNM, VectorWise
from sparse_kernels.top_units import Mask, Scores, select_top_units


@dataclass(frozen=True)
class PatternUnits:
    """The units of a pattern.

    Attributes
    ----------
    height, width : int
        Rows and columns of a unit.
    keep, of : int
        At most `keep` of every `of` neighbours in a band are kept (N:M); 0 for other patterns.
    """

    height: int = 1
    width: int = 1
    keep: int = 0
    of: int = 0

    def heights(self, m: int) -> NDArray[np.int64]:
        """Return the rows of each band of a matrix with m rows."""
        return np.minimum(self.height, m - np.arange(0, m, self.height))

    def widths(self, k: int) -> NDArray[np.int64]:
        """Return the columns of each unit of a matrix with k columns."""
        return np.minimum(self.width, k - np.arange(0, k, self.width))

    def sizes(self, m: int, k: int) -> NDArray[np.int64]:
        """Return the elements of every unit, (bands, units)."""
        return np.outer(self.heights(m), self.widths(k))

    def sum_scores(self, scores: Scores) -> NDArray[np.float64]:
        """Return the sum of scores (m, k) over every unit, (bands, units)."""
        m, k = scores.shape
        by_row = np.add.reduceat(scores, np.arange(0, m, self.height), axis=0, dtype=np.float64)
        return np.add.reduceat(by_row, np.arange(0, k, self.width), axis=1)

    def keeps_of(self, length: int) -> int:
        """Return how many of `length` <= `of` neighbours are kept at most."""
        return -(-self.keep * length // self.of)

    def select_best(self, totals: NDArray[np.float64], m: int, k: int, sparsity: float) -> Mask:
        """Select the units (bands, units) with the highest scores in the matrix, close to the sparsity."""
        kept = select_top_units(totals.ravel(), self.sizes(m, k).ravel(), (1 - sparsity) * m * k)
        return kept.reshape(totals.shape)

    def expand(self, kept: Mask, m: int, k: int) -> Mask:
        """Return the mask (m, k) of kept units (bands, units)."""
        return kept.repeat(self.heights(m), axis=0).repeat(self.widths(k), axis=1)


def find_units(pattern: Pattern, sparsity: float) -> PatternUnits:
    """Return the units of a pattern; Shfl-BW's are those after its rows are grouped.

    Raises ValueError for a sparsity that the pattern does not have.
    """
    pattern.mask(np.ones((1, 1)), sparsity)  # raises for a wrong sparsity, before any work
    match pattern:
        case NM():
            return PatternUnits(keep=pattern.keep, of=pattern.of)
        case VectorNM():
            return PatternUnits(pattern.v, keep=pattern.keep, of=pattern.of)
        case VectorWise():
            return PatternUnits(pattern.v)
        case ShflBW():
            return PatternUnits(pattern.v, pattern.cols)
        case BlockWise():
            return PatternUnits(pattern.rows, pattern.cols)
        case Dense():
            raise ValueError("a dense layer has nothing to prune")
    return PatternUnits()
