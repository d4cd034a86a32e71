"""Errors to assume before any layer is pruned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.knapsack.arrays import Floats


def build_quadratic_prior(sparsities: Sequence[float], grid: Sequence[float] | None = None) -> Floats:
    """Return SPDY's prior of a layer's options: (i / (n - 1))^2 for the i-th of n distinct sparsities.

    Source: Frantar and Alistarh 2022, "SPDY: Accurate Pruning with Speedup Guarantees", section 3.2.

    Parameters
    ----------
    sparsities
        The sparsity of each option (options,).
    grid
        The n distinct sparsities; by default the layer's own.

    Returns
    -------
    ndarray
        The errors (options,), between 0 and 1.
    """
    distinct = np.unique(np.asarray(sparsities if grid is None else grid, np.float64))
    rank = np.searchsorted(distinct, np.asarray(sparsities, np.float64))
    return np.asarray((rank / max(1, len(distinct) - 1)) ** 2, np.float64)
