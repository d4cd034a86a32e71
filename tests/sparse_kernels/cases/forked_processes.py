"""Children of a test's own process, of which nothing of the test is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def start_child(work: Callable[[], bool]) -> int:
    """Fork a process that does this work and ends with 0 if it was right. Returns its number."""
    if child := os.fork():
        return child
    right = False
    try:
        signal.alarm(20)  # a child that waits for ever is killed, which its parent reports
        right = work()
    finally:
        os._exit(0 if right else 1)


def wait_for(child: int) -> int:
    """Return the exit code of a child, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
