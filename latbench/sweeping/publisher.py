"""Repeated writing of results during a sweep: what is finished is published ten seconds later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Self

from latbench.errors import EnvironmentUnusable

PUBLISH_SECONDS = 10.0


class Publisher:
    """Calls `write` in a thread of its own after changes, at least `seconds` after the last call.

    So a process that hangs within a block does not delay results that were finished before. It writes once more when
    its context is left, however that is.

    Parameters
    ----------
    write
        Writes everything that is finished and changes nothing else. EnvironmentUnusable, from a disk that refuses,
        ends the sweep. Any other failure is reported, and the next change tries again.
    tell
        Gets a line for the user.
    seconds
        Least time between two calls, and so the longest delay of a result.
    """

    def __init__(
        self, write: Callable[[], None], tell: Callable[[str], None], seconds: float = PUBLISH_SECONDS
    ) -> None:
        self._write, self._tell, self._seconds = write, tell, seconds
        self._condition = threading.Condition()
        self._changed = self._ending = False
        self._failure: EnvironmentUnusable | None = None
        self._thread = threading.Thread(target=self._run, name="latbench-publisher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._condition:
            self._ending = True
            self._condition.notify()
        self._thread.join()
        self._try_to_write()
        if self._failure is not None and error is None:
            raise self._failure

    def changed(self) -> None:
        """Announce a change. Raises EnvironmentUnusable where the disk refused the last time."""
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
                    return
                self._changed = False
            self._try_to_write()
            earliest = monotonic() + self._seconds

    def _try_to_write(self) -> None:
        try:
            self._write()
        except EnvironmentUnusable as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - a summary that cannot be written costs no measurement
            self._tell(f"the results could not be written this time: {type(error).__name__}: {error}")
