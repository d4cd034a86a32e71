"""A gate that calls of a library go through, so that no process forks while one is under way."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition

FORK_SECONDS = 60.0
"""How long a fork waits for calls of other threads."""

SETTLE_SECONDS = 0.5
"""How long a fork waits at most until threads of libraries sleep."""

_TASKS = Path("/proc/self/task")


def wait_until_library_threads_sleep() -> None:
    """Wait until threads that are none of Python's sleep, for which they need some time after a call.

    On their way they take and leave locks of their pool, and a process that forks meanwhile has such a lock taken for
    ever. A thread that runs, or waits to run, is not asleep; so two looks at sleeping threads find no such lock.
    """
    end = time.monotonic() + SETTLE_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < end:
        quiet = 0 if _runs_any_library_thread() else quiet + 1
        time.sleep(0.001)


def _runs_any_library_thread() -> bool:
    """Return whether a thread of a library runs; True where that cannot be told, so that time passes."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    try:
        others = [each for each in _TASKS.iterdir() if each.name not in own]
    except OSError:
        return True
    for each in others:
        with contextlib.suppress(OSError):  # it has ended
            # The state is the first word behind the name, which stands in brackets and may hold some.
            if each.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "S":
                return True
    return False


class ForkGate:
    """Lets calls of a library through, any number at a time, but none while the process forks.

    A forked process has a copy of each lock in the library as it was, and no thread that would free it.

    Parameters
    ----------
    before
        Called before each fork, once nobody is inside.
    in_child
        Called in each forked process.
    """

    def __init__(
        self, before: Callable[[], None] = lambda: None, in_child: Callable[[], None] = lambda: None
    ) -> None:
        self._before, self._in_child = before, in_child
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self.shut, after_in_parent=self.open, after_in_child=self._begin_in_child)

    def _begin(self) -> None:
        self._changed = Condition()
        self._inside, self._forking = 0, 0

    def _begin_in_child(self) -> None:
        self._begin()
        self._in_child()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._forking:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more, and wait until nobody is inside, but not for ever: a call may have hung."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._inside, FORK_SECONDS)
        self._before()

    def open(self) -> None:
        """Let calls in again."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()
