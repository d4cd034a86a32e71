"""Whatever is finished is written soon, whatever the sweep does meanwhile."""

import contextlib
import threading
import time

import pytest

from latbench.errors import EnvironmentUnusable
from latbench.sweeping.publisher import Publisher


class Writes:
    """Counts what is written, and when."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.times: list[float] = []
        self.failure = failure
        self.threads: set[threading.Thread] = set()

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        self.threads.add(threading.current_thread())
        if self.failure is not None:
            raise self.failure

    def wait(self, count: int) -> None:
        end = time.monotonic() + 10
        while len(self.times) < count:
            assert time.monotonic() < end, self.times
            time.sleep(0.005)


def test_a_change_is_written_without_anybody_waiting_for_it() -> None:
    write = Writes()
    with Publisher(write, print, 0.3) as publisher:
        began = time.monotonic()
        publisher.changed()
        write.wait(1)
        publisher.changed()
        publisher.changed()
        write.wait(2)  # this thread does nothing, as a sweep whose worker hangs
        assert write.times[1] - write.times[0] >= 0.3 and write.times[1] - began < 5
        time.sleep(0.4)
        assert len(write.times) == 2  # nothing changed since
        assert threading.main_thread() not in write.threads


@pytest.mark.parametrize("failure", [None, KeyError("in the sweep")])
def test_it_ends_at_once_and_writes_once_more_however_it_ends(failure: Exception | None) -> None:
    write = Writes()
    with contextlib.suppress(KeyError), Publisher(write, print, 60.0) as publisher:
        publisher.changed()
        write.wait(1)
        publisher.changed()
        began = time.monotonic()
        if failure is not None:
            raise failure
    assert time.monotonic() - began < 10 and len(write.times) == 2


def test_a_disk_that_refuses_ends_the_sweep() -> None:
    write = Writes(EnvironmentUnusable("no space left"))
    with pytest.raises(EnvironmentUnusable, match="no space left"), Publisher(write, print, 0.0) as publisher:
        publisher.changed()
        write.wait(1)
        for _ in range(1000):
            publisher.changed()
            time.sleep(0.005)


def test_any_other_failure_is_told_and_tried_again() -> None:
    write, told = Writes(KeyError("column")), []
    with Publisher(write, told.append, 0.0) as publisher:
        publisher.changed()
        write.wait(1)
        write.failure = None
        publisher.changed()
        write.wait(2)
    assert told == ["the results could not be written this time: KeyError: 'column'"]
