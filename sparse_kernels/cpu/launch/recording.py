"""Record what a call of a plan does, instead of doing it: which kernels run, with what arguments.

While a recording is on, `bind` returns a kernel that notes its call. So the plan's own code says what a call comes
down to, and an export needs no second description of it. Record in a process that runs no kernels: plans keep what
they have bound.

A frame is laid out here as compiled code lays it out (`parallel_kernel`), with arrays in place of their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.runtime import scratch_buffers
from sparse_kernels.cpu.runtime.scratch_buffers import ScratchBuffer

FREE_WORD = 0


@dataclass(frozen=True, eq=False)
class RecordedFrame:
    """A frame before anything is at an address.

    words: int64, 0 where an address belongs. arrays: the array whose address belongs in a word. places: the word at
    which each argument begins.
    """

    words: list[int]
    arrays: dict[int, NDArray[Any]]
    places: list[int]

    @property
    def noted(self) -> int:
        """The word in which parts note what they return: the last one."""
        return len(self.words) - 1


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One call of a kernel.

    kernel: the `ParallelKernel`. given: its arguments as they were bound. counts: parts of each stage. varying: words
    of the frame that each call writes, and what the recorded call wrote.
    """

    kernel: Any
    given: Sequence[Any]
    frame: RecordedFrame
    counts: Sequence[int]
    varying: list[tuple[int, int]]


@dataclass
class Recording:
    """What was recorded. buffers: every scratch buffer that was made since it began."""

    steps: list[RecordedStep] = field(default_factory=list)
    buffers: list[ScratchBuffer] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_calls() -> Iterator[Recording]:
    """Yield a recording of all calls of kernels that are bound meanwhile, in this thread."""
    found = Recording()
    token = _recording.set(found)
    try:
        with scratch_buffers.watch_new_buffers(found.buffers.append):
            yield found
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Return whether this thread records."""
    return _recording.get() is not None


class RecordedKernel:
    """Kernel in place of a bound one: a call notes its arguments, and runs nothing."""

    def __init__(
        self,
        kernel: Any,
        given: Sequence[Any],
        counts: Sequence[int],
        find_varying: Callable[[Sequence[int]], list[int]],
    ) -> None:
        self._kernel, self._given, self._counts = kernel, given, counts
        self._frame = lay_out_frame(given)
        self._varying = find_varying(self._frame.places)

    def __call__(self, *words: int) -> bool:
        """Note a call with these words; return True, as a kernel does that computed everything."""
        recording = _recording.get()
        if recording is None:
            raise RuntimeError("a kernel that was bound while calls were recorded cannot run")
        varying = list(zip(self._varying, map(int, words), strict=True))
        recording.steps.append(RecordedStep(self._kernel, self._given, self._frame, self._counts, varying))
        return True


def lay_out_frame(given: Sequence[Any]) -> RecordedFrame:
    """Return the frame of these arguments: integers, arrays, and tuples of them. Raises TypeError for others."""
    words: list[int] = []
    arrays: dict[int, NDArray[Any]] = {}
    places = []
    for each in given:
        places.append(len(words))
        _lay_out(each, words, arrays)
    return RecordedFrame([*words, FREE_WORD], arrays, places)


def _lay_out(value: Any, words: list[int], arrays: dict[int, NDArray[Any]]) -> None:
    if isinstance(value, tuple):
        for each in value:
            _lay_out(each, words, arrays)
    elif isinstance(value, np.ndarray):
        # Numba's array: two pointers of its counting, elements, bytes of one, address, shape, strides.
        arrays[len(words) + 4] = value
        words += [0, 0, value.size, value.itemsize, FREE_WORD, *value.shape, *value.strides]
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        words.append(int(value))
    else:
        raise TypeError(f"a frame holds integers and arrays, not {type(value).__name__}")
