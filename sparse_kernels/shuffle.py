"""Which rows to put together, so that groups of v rows share their columns at the least loss (Shfl-BW)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.selection import Scores


def group_rows(scores: Scores, v: int, sparsity: float) -> NDArray[np.int64]:
    """An order (m,) of the rows: the first v are the first group, and so on; the last group may be smaller."""
    return np.argsort(np.argmax(scores, axis=1), kind="stable")
