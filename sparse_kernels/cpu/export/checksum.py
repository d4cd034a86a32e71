"""The checksum of packed weights, as `packed_file.c` computes it: 512 sums side by side, so that vectors add them up.

Each step is reversible, so a single changed word always changes the result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES = 512
ROW_BYTES = 8 * LANES
_FACTOR = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def compute_checksum(content: NDArray[np.uint8]) -> int:
    """Return the checksum of bytes, a multiple of ROW_BYTES."""
    rows = content.view(np.uint64).reshape(-1, LANES)
    sums, factor = np.arange(1, LANES + 1, dtype=np.uint64), np.uint64(_FACTOR)
    for row in rows:
        sums ^= row
        sums *= factor
        sums ^= sums >> np.uint64(29)
    found = 0
    for each in sums.tolist():
        found = (found ^ each) * _FACTOR & _WORD
        found ^= found >> 32
    return found
