"""Share work between threads: equal costs, known before anything runs, nothing to wait for."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(inline="never")
def find_part_begin(work: NDArray[np.int64], repeats: int, part: int, parts: int) -> int:
    """Return where part `part` of `parts` begins in `repeats` passes over items, as pass * items + item.

    work: int64 (items + 1), the cost of all items before each one. Part `parts` begins at the end.
    """
    items = work.size - 1
    total = work[items]
    if part >= parts or total == 0:
        return repeats * items if part >= parts else (repeats * items * part) // parts
    wanted = total * repeats * part // parts
    done = wanted // total
    rest = wanted - done * total
    low, high = 0, items
    while low < high:
        middle = (low + high) // 2
        if work[middle] < rest:
            low = middle + 1
        else:
            high = middle
    if low > 0 and rest - work[low - 1] < work[low] - rest:
        low -= 1
    begin: int = done * items + low
    return begin
