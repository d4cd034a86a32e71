"""Writes results again and again while a sweep goes on: whatever is finished is there ten seconds later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Self

PUBLISH_SECONDS = 10.0


class Publisher:
    """Calls `write` in a thread of its own, `seconds` after the last time at the earliest, when something changed.

    A process that hangs in the middle of a block does not keep it from writing what was finished before.

    Parameters
    ----------
    write
        Writes everything that is finished. It must not change anything else.
    seconds
        Between two times, and so the longest that something finished waits.
    """

    def __init__(self, write: Callable[[], None], seconds: float = PUBLISH_SECONDS) -> None:
        self._write, self._seconds = write, seconds
        self._condition = threading.Condition()
        self._changed = self._ending = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="latbench-publisher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._ending = True
            self._condition.notify()
        self._thread.join()

    def changed(self) -> None:
        """Say that something is finished. Raises what the last `write` raised."""
        with self._condition:
            if self._failure is not None:
                raise self._failure
            self._changed = True
            self._condition.notify()

    def _run(self) -> None:
        earliest = monotonic()
        while True:
            with self._condition:
                while not self._ending and (not self._changed or monotonic() < earliest):
                    self._condition.wait(max(0.0, earliest - monotonic()) if self._changed else None)
                if self._ending:
                    return  # whoever ends it writes the last time
                self._changed = False
            try:
                self._write()
            except Exception as error:  # noqa: BLE001 - raised again where the sweep can end
                self._failure = error
                return
            earliest = monotonic() + self._seconds
