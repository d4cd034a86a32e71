"""bfloat16, the upper half of a float32: NumPy has no such type, so its bits lie in uint16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def round_to_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest bfloat16 of each value, ties to even (infinity from 3.39e38 on); of numbers, not of NaN."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((whole + (np.uint32(0x7FFF) + (whole >> 16 & 1))) >> 16).astype(np.uint16)


def widen_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers that these bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
