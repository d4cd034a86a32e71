"""Buffers that calls reuse; a call that finds none free makes its own, so plans may be shared by threads.

Most of what a call needs means nothing when it is done. So `borrow` gives all layers of a process the same memory,
which stays in the caches from one layer to the next. The process keeps a buffer, as large as ever needed, for each
caller that there was at a time (KEPT at most). Where what lies in a buffer is used again, a plan has a `Pool`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.runtime.kernel_cache import compile_cached

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
LINE = ALIGNMENT // 4  # elements of a cache line; longer vectors (`third_tiles`) are read and written by halves
KEPT = 8  # buffers a pool holds on to; those longest unused go first


class ScratchBuffer:
    """Memory of `size` elements, float32, at an address; it lives as long as this object.

    fill: the 32 bits of each element that calls find in it, None where they find anything.
    """

    __slots__ = ("_array", "address", "fill", "size")

    def __init__(self, array: NDArray[np.float32], fill: int | None = None) -> None:
        self._array, self.address, self.size, self.fill = array, find_address(array), array.size, fill
        for see in _watchers:
            see(self)

    def __reduce__(self) -> Any:
        raise TypeError("a scratch buffer cannot be copied or pickled: an address means nothing to a copy")


_free: deque[ScratchBuffer] = deque(maxlen=KEPT)
_watchers: list[Callable[[ScratchBuffer], None]] = []


@contextmanager
def watch_new_buffers(see: Callable[[ScratchBuffer], None]) -> Iterator[None]:
    """Call `see` with each buffer that is made meanwhile; what `borrow` gives then is new."""
    _free.clear()
    _watchers.append(see)
    try:
        yield
    finally:
        _watchers.remove(see)
        _free.clear()


def borrow(size: int) -> ScratchBuffer:
    """Return memory for at least `size` elements, aligned, with anything in it."""
    try:
        buffer = _free.pop()
    except IndexError:
        return ScratchBuffer(allocate_aligned(size))
    return buffer if buffer.size >= size else ScratchBuffer(allocate_aligned(size))  # drops a small one


def give_back(buffer: ScratchBuffer) -> None:
    """Let a later call have what `borrow` gave, all of it."""
    _free.append(buffer)


class Pool:
    """Free buffers, float32. Taking and giving back are single steps of a deque, safe between threads.

    fill: the 32 bits of each element of a new buffer.
    """

    def __init__(self, fill: int = 0) -> None:
        self._fill = fill
        self._free: deque[tuple[object, ScratchBuffer]] = deque(maxlen=KEPT)

    def take(self, size: int, key: object = 0) -> ScratchBuffer:
        """Return memory for `size` elements, aligned: what was given back with this key and size, else a new one."""
        for _ in range(KEPT):
            try:
                kept, buffer = self._free.pop()
            except IndexError:
                break
            if kept == key and buffer.size == size:
                return buffer
            self._free.appendleft((kept, buffer))
        new = allocate_aligned(size)
        if self._fill:
            new.view(np.uint32)[:] = self._fill
        return ScratchBuffer(new, self._fill)

    def give_back(self, buffer: ScratchBuffer, key: object = 0) -> None:
        """Let a later call have it."""
        self._free.append((key, buffer))


def _address(array: NDArray[Any]) -> int:
    return array.ctypes.data


# The address at which an array begins, as kernels take it. NumPy itself takes four times as long to return it, almost
# a microsecond.
find_address = compile_cached(_address)


def _addresses(x: NDArray[Any], y: NDArray[Any], bias: NDArray[Any]) -> tuple[int, int, int]:
    return x.ctypes.data, y.ctypes.data, bias.ctypes.data


# The addresses of three arrays, in half the time of three calls.
find_addresses = compile_cached(_addresses)


def copy_to_cache_line(array: NDArray[Any]) -> NDArray[Any]:
    """Return a C-contiguous copy that starts at a cache line, so that no vector needs two loads or stores.

    Frameworks place their tensors so; NumPy places large arrays 16 bytes behind one.
    """
    copied = allocate_aligned(array.size, array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def copy_into_one_piece(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Return copies that lie one behind the other, each from the start of a cache line on."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    buffer = allocate_aligned(int(starts[-1]), np.uint8)
    copies: list[NDArray[Any]] = []
    for start, array in zip(starts, arrays, strict=False):
        copies.append(buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        copies[-1][...] = array
    return copies


def allocate_aligned(
    size: int, dtype: Any = np.float32, allocate: Callable[..., NDArray[Any]] = np.zeros
) -> NDArray[Any]:
    """Return zeros, or what else `allocate` gives, (size), that start at a cache line."""
    each = np.dtype(dtype).itemsize
    raw = allocate(size + ALIGNMENT // each, dtype)
    skip = -raw.ctypes.data % ALIGNMENT // each
    return raw[skip : skip + size]
