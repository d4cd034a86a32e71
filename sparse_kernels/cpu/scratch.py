"""Buffers that a plan reuses from call to call; a call that finds none free makes its own, so plans may be shared."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


class Pool:
    """Free buffers, float32. Taking and giving back are single steps of a deque, safe between threads."""

    def __init__(self) -> None:
        self._free: deque[NDArray[np.float32]] = deque(maxlen=4)

    def take(self, size: int) -> NDArray[np.float32]:
        """A buffer of at least `size` elements, its contents anything but NaN traps: it was zero when made."""
        try:
            buffer = self._free.pop()
        except IndexError:
            return aligned(size)
        return buffer if buffer.size >= size else aligned(size)

    def give_back(self, buffer: NDArray[np.float32]) -> None:
        """Let the next call have it."""
        self._free.append(buffer)


def aligned(size: int) -> NDArray[np.float32]:
    """Zeros, float32 (size), that start at a cache line."""
    raw = np.zeros(size + ALIGNMENT // 4, np.float32)
    skip = -raw.ctypes.data % ALIGNMENT // 4
    return raw[skip : skip + size]
