"""Numba's threads. Kernels use numba.get_num_threads() of them; a thread of the caller that has set fewer keeps that.

Numba takes OpenMP where libgomp is installed. Then torch and kernels share one pool in a process, if torch was
imported before the first kernel was made: to alternate between them costs nothing extra. Where libgomp is missing,
Numba uses a queue of its own, which ends the process when two threads of the caller use it at once. Only then kernels
take turns.

A process that has run kernels may fork, as servers do that load a model before they start workers. A fork copies no
threads. So the thread that forks ends its pool before, and both processes start theirs at the next kernel. An OpenMP
from before GCC 9 cannot end its pool: then a child runs kernels with one thread, and warns of it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import numba
from llvmlite import binding

from sparse_kernels.cpu.runtime.numba_internals import find_openmp_library, find_thread_counter, start_queue
from sparse_kernels.cpu.runtime.openmp_forks import close_pool_before_forks

T = TypeVar("T")

_most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

_ask: Callable[[], int] | None = None


def count_threads() -> int:
    """Return how many threads kernels use now.

    Numba's own function takes two locks at each call, half a microsecond, to see whether its threads have started.
    """
    global _ask
    if _ask is None:
        start_threads()
        _ask = find_thread_counter()
    return _ask()


def set_thread_count(wanted: int) -> int:
    """Let kernels use so many threads, or as many as there are; return how many that is."""
    wanted = min(wanted, _most)
    if count_threads() != wanted:
        numba.set_num_threads(wanted)
    return wanted


# Functions of GNU's OpenMP that kernels call. The first runs a function by a team of threads. The others return the
# number of a thread and the size of its team.
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def start_threads() -> None:
    """Start Numba's threads, which kernels take for granted.

    In an OpenMP that torch shares, Numba then sets its own number for the calling thread. The number that the caller
    has set is put back: kernels of torch modules follow `torch.set_num_threads`.
    """
    seen = ctypes.CDLL(None)
    shared = all(hasattr(seen, name) for name in ("omp_get_max_threads", "omp_set_num_threads"))
    wanted = seen.omp_get_max_threads() if shared else 0
    numba.get_num_threads()
    if shared:
        seen.omp_set_num_threads(wanted)


@cache
def link_openmp() -> bool:
    """Start Numba's threads, and let kernels call GNU's OpenMP if they are its."""
    start_threads()
    # Look where the loader looks. Torch shows its own OpenMP to all, and a second pool beside it would compete with
    # it, each waiting for work on all cores. Otherwise take the one that Numba's own library was linked with.
    seen = ctypes.CDLL(None)
    if numba.threading_layer() != "omp":
        close_pool_before_forks(seen)  # torch's
        return False
    for library in (seen, ctypes.CDLL(find_openmp_library())):
        if all(hasattr(library, name) for name in _OPENMP):
            for name in _OPENMP:
                binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
            close_pool_before_forks(library, set_one_thread)
            return True
    return False


def set_one_thread() -> None:
    """Let all callers in this process run kernels with one thread, and warn at the first one that wants more."""
    global _ask, _most
    _most, warned = 1, False

    def ask() -> int:
        nonlocal warned
        if numba.get_num_threads() > 1:
            numba.set_num_threads(1)
            if not warned:
                warned = True
                warnings.warn(
                    "kernels run with one thread: this process was forked from one that had run them, and its OpenMP "
                    "is older than GCC 9; start processes with spawn or forkserver, or convert after the fork",
                    stacklevel=2,
                )
        return 1

    _ask = ask


@cache
def _share_queue() -> threading.Lock:
    """Return the lock of those who use Numba's queue; in a forked child it is free, and the queue has its threads."""
    turn = threading.Lock()

    def start() -> None:
        start_queue(_most)
        turn.release()

    os.register_at_fork(before=turn.acquire, after_in_parent=turn.release, after_in_child=start)
    return turn


def take_turns(kernel: Callable[..., T]) -> Callable[..., T]:
    """Return the kernel, which two callers never run at once where Numba's threads must not be used by two."""
    if numba.threading_layer() != "workqueue":
        return kernel
    turn = _share_queue()

    @wraps(kernel)
    def alone(*arguments: Any) -> T:
        with turn:
            return kernel(*arguments)

    return alone
