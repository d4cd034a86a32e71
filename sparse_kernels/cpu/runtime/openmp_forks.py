"""End a pool of OpenMP before a fork, which copies no threads.

Both processes then start their own. An OpenMP from before GCC 9 cannot end its pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_SOFT = 1  # omp_pause_soft


def close_pool(library: Any) -> bool:
    """End the pool of the calling thread; return whether the library can."""
    try:
        return bool(library.omp_pause_resource(_SOFT, library.omp_get_initial_device()) == 0)
    except AttributeError:  # no OpenMP, or one before 5.0
        return False


def close_pool_before_forks(library: Any, otherwise: Callable[[], None] = lambda: None) -> None:
    """End the pool of a thread before it forks; where that fails, call `otherwise` in the child."""
    ended = True

    def end() -> None:
        nonlocal ended
        ended = close_pool(library)

    os.register_at_fork(before=end, after_in_child=lambda: None if ended else otherwise())
