"""Whether cores are apart, with a worker that says what the tests want, and on the cores that are here."""

import itertools
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latbench.backends.cpu import cpu_reference
from latbench.runners.worker_process import TaskFailed, WorkerDied
from latbench.sweeping.core_placement import BURST_SECONDS, HANDOVER_TASK, MOST_DEATHS, PREPARE_SECONDS, CorePlacement
from latbench.timing.sampling import Burst


class FakeWorker:
    """Says the next of `seconds`; None: it dies instead."""

    def __init__(self, seconds: Iterable[float | None]) -> None:
        self._seconds = iter(seconds)
        self.prepared, self.alive = 0, True

    def prepare(self, function: str, threads: int, timeout: float) -> Any:
        assert (function, threads, timeout) == (HANDOVER_TASK, 2, PREPARE_SECONDS)
        self.prepared, self.alive = self.prepared + 1, True
        return SimpleNamespace()

    def holds(self, prepared: Any) -> bool:
        return self.alive

    def burst(self, prepared: Any, seconds: float, timeout: float) -> Burst:
        assert timeout == BURST_SECONDS
        value = next(self._seconds)
        if value is None:
            self.alive = False
            raise WorkerDied("oom", "gone")
        return Burst([value, value, 9.0])


def told(seconds: Iterable[float | None], threads: int = 2) -> list[bool]:
    """What a placement says each time it is asked, as long as there are readings."""
    known = list(seconds)
    placement = CorePlacement(FakeWorker(known), threads)  # type: ignore[arg-type]
    return [placement.apart() for _ in known]


def test_a_burst_counts_only_if_cores_were_together_before_it_and_after() -> None:
    together, apart = [3.2e-6, 3.1e-6, 3.4e-6, 3.2e-6], [9.1e-6, 8.8e-6]
    expected = [False] * 4 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert told([*together, *apart, *together, *apart, *together]) == expected


def test_cores_that_stay_where_they_are_are_not_apart_however_far_that_is() -> None:
    rng = np.random.default_rng(0)
    assert not any(told(rng.uniform(8.3e-6, 11e-6, 300)))


def test_one_direction_alone_may_take_longer() -> None:
    """As both did in turns with 3.2 us, while no layer took longer."""
    assert not any(told([3.2e-6, 6.2e-6] * 20))


def test_apart_is_noticed_where_it_is_the_rule() -> None:
    """Of a sweep in which cores were together for a fifth of the time."""
    said = told(([9e-6] * 8 + [3.2e-6] * 2) * 20)
    assert said[100:] == ([True] * 9 + [False]) * 10


def test_what_is_timed_while_cores_are_apart_is_timed_again() -> None:
    placement = CorePlacement(FakeWorker([3e-6, 9e-6, 9e-6, 3e-6, 3e-6, 9e-6, 9e-6]), 2)  # type: ignore[arg-type]
    calls = itertools.count()
    assert placement.together(calls.__next__, 9) == (0, True)
    assert placement.together(calls.__next__, 9) == (4, True)  # one reading more tells that they stayed together
    assert placement.together(calls.__next__, 2) == (6, False)


def test_what_is_best_is_known_of_many_readings_too() -> None:
    said = told(([3.2e-6] * 40 + [9e-6] * 20) * 20)
    assert said[600:] == ([True] + [False] * 39 + [True] * 20) * 10


def test_one_thread_is_never_apart_from_another() -> None:
    assert not any(told([3e-6, 9e-6, 9e-6], threads=1))


def test_a_worker_that_dies_costs_its_reading_and_no_more() -> None:
    worker = FakeWorker([None, 3e-6, 9e-6])
    placement = CorePlacement(worker, 2)  # type: ignore[arg-type]
    assert [placement.apart() for _ in range(3)] == [False, False, True]
    assert worker.prepared == 2


def test_a_worker_that_dies_again_and_again_is_not_asked_any_more() -> None:
    worker = FakeWorker([3e-6, *[None] * MOST_DEATHS, 9e-6])
    placement = CorePlacement(worker, 2)  # type: ignore[arg-type]
    assert [placement.apart() for _ in range(MOST_DEATHS + 3)] == [False] * (MOST_DEATHS + 3)
    assert worker.prepared == MOST_DEATHS


def test_where_threads_cannot_choose_their_core_nothing_is_apart_and_it_is_not_asked_again() -> None:
    class Refusing(FakeWorker):
        def prepare(self, function: str, threads: int, timeout: float) -> Any:
            self.prepared += 1
            raise TaskFailed("NotImplementedError", "threads cannot choose their core", "")

    worker = Refusing([])
    placement = CorePlacement(worker, 2)  # type: ignore[arg-type]
    assert not placement.apart() and not placement.apart() and worker.prepared == 1


needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to choose from"
)


@needs_cores
def test_each_core_finds_what_the_one_before_has_changed() -> None:
    allowed, visited = os.sched_getaffinity(0), []
    work = cpu_reference.build_hand_over(2)

    class Noted(np.ndarray):
        def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
            visited.append(os.sched_getaffinity(0))
            return self

    work._x = work._x.view(Noted)
    samples = work.burst(0.0).samples
    assert len(samples) == 1 and samples[0] > 0
    assert visited == [{core} for core in sorted(allowed)[:2]]
    assert os.sched_getaffinity(0) == allowed


def test_one_thread_hands_nothing_on() -> None:
    with pytest.raises(NotImplementedError):
        cpu_reference.build_hand_over(1)
