"""Numba's threads. Kernels use numba.get_num_threads() of them; a thread of the caller that has set fewer keeps that.

Numba takes OpenMP where libgomp is installed. Then torch and kernels share one pool in a process, if torch was
imported before the first kernel was made: to alternate between them costs nothing extra. Where libgomp is missing,
Numba uses a queue of its own, which ends the process when two threads of the caller use it at once. Only then kernels
take turns.

A process that has run a kernel must not fork and run one in the child with more than one thread, as libgomp cannot:
that is refused. Let processes start anew instead (`multiprocessing` with `spawn` or `forkserver`), or fork before the
first kernel.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import numba
from llvmlite import binding

from sparse_kernels.cpu.runtime.numba_internals import find_openmp_library, find_thread_counter

T = TypeVar("T")

_MOST: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

_turn = threading.Lock()

_ask: Callable[[], int] | None = None


def count_threads() -> int:
    """Return how many threads kernels use now.

    Numba's own function takes two locks at each call, half a microsecond, to see whether its threads have started.
    """
    global _ask
    if _ask is None:
        _ask = find_thread_counter()
    return _ask()


def set_thread_count(wanted: int) -> None:
    """Let kernels use so many threads, or as many as there are."""
    wanted = min(wanted, _MOST)
    if count_threads() != wanted:
        numba.set_num_threads(wanted)


# Functions of GNU's OpenMP that kernels call. The first runs a function by a team of threads. The others return the
# number of a thread and the size of its team.
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def link_openmp() -> bool:
    """Start Numba's threads, which kernels take for granted, and let kernels call GNU's OpenMP if they are its."""
    numba.get_num_threads()
    if numba.threading_layer() != "omp":
        return False
    # Look where the loader looks. Torch shows its own OpenMP to all, and a second pool beside it would compete with
    # it, each waiting for work on all cores. Otherwise take the one that Numba's own library was linked with.
    for path in (None, find_openmp_library()):
        library = ctypes.CDLL(path)
        if all(hasattr(library, name) for name in _OPENMP):
            for name in _OPENMP:
                binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
            os.register_at_fork(after_in_child=_refuse_threads)
            return True
    return False


def _refuse_threads() -> None:
    """Let nobody wait for threads that stayed in the process that this one was forked from."""
    global _ask

    def ask() -> int:
        if numba.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked from one that had run kernels, whose threads it lacks: start processes anew "
                "(spawn or forkserver), fork before the first kernel, or set one thread"
            )
        return 1

    _ask = ask


def take_turns(kernel: Callable[..., T]) -> Callable[..., T]:
    """Return the kernel, which two callers never run at once where Numba's threads must not be used by two."""
    if numba.threading_layer() != "workqueue":
        return kernel

    @wraps(kernel)
    def alone(*arguments: Any) -> T:
        with _turn:
            return kernel(*arguments)

    return alone
