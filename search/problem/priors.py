"""Errors that are guessed before any layer is pruned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.knapsack.arrays import Floats


def quadratic_prior(sparsities: Sequence[float], grid: Sequence[float] | None = None) -> Floats:
    """The published prior of a layer's options: (i / (n - 1))^2, i the place of each sparsity among n distinct ones.

    Those n are `grid`'s, or else the layer's own.
    """
    distinct = np.unique(np.asarray(sparsities if grid is None else grid, np.float64))
    place = np.searchsorted(distinct, np.asarray(sparsities, np.float64))
    return np.asarray((place / max(1, len(distinct) - 1)) ** 2, np.float64)
