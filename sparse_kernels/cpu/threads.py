"""Numba's threads. Kernels use numba.get_num_threads() of them; a thread of the caller that has set fewer keeps that.

With OpenMP, which Numba takes where libgomp is installed, torch and Numba share one pool in a process: calls of one
after calls of the other cost nothing extra. Where it is missing, Numba falls back to a queue of its own that ends the
process when two threads of the caller use it at once; only then kernels take turns.

A process that has run a kernel must not fork and run one in the child: libgomp cannot, and Numba ends the child.
Let processes start anew instead (`multiprocessing` with `spawn` or `forkserver`), or fork before the first kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numba
from numba.np.ufunc import parallel

_MOST: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

_turn = threading.Lock()
_free: AbstractContextManager[object] = nullcontext()
_held: AbstractContextManager[object] | None = None  # what to hold, once Numba has chosen how its threads work

_ask: Callable[[], int] | None = None


def count() -> int:
    """How many threads kernels use now.

    Numba's own function takes two locks at each call, half a microsecond, to see whether its threads have started.
    """
    global _ask
    if _ask is None:
        numba.get_num_threads()  # they have now
        _ask = getattr(parallel, "_get_num_threads", numba.get_num_threads)
    return _ask()


def use(wanted: int) -> None:
    """Let kernels use so many threads, or as many as there are."""
    wanted = min(wanted, _MOST)
    if count() != wanted:
        numba.set_num_threads(wanted)


def exclusive() -> AbstractContextManager[object]:
    """What to hold while kernels run: a lock if Numba's threads must not be used by two callers, else nothing."""
    global _held
    if _held is None:
        try:
            layer = numba.threading_layer()
        except ValueError:  # no kernel has run yet, so Numba has not chosen
            return _turn
        _held = _turn if layer == "workqueue" else _free
    return _held
