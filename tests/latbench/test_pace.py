"""The pace of a sweep, with a worker that says what the tests want."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latbench.backends import reference
from latbench.ceilings import Ceilings, Kept
from latbench.measure import Burst
from latbench.pace import EVERY, CpuPace
from latbench.runners.local import TaskFailed, WorkerDied

CEILINGS = Ceilings(1.0, {1: 1.0}, product_seconds=1.0, sum_seconds=1.0)
BY_UNITS = {"flop": 1e9, "size": 1e-9}


class FakeWorker:
    """Says the next of `seconds` for both kernels; None: it dies instead. And of `handed_on` for what cores hand on;
    None: they cannot.
    """

    def __init__(
        self, *seconds: float | None, preempted: tuple[int, ...] = (), handed_on: Iterable[float] | None = None
    ) -> None:
        self._seconds = iter(itertools.chain.from_iterable((value, value) for value in seconds))
        self._preempted = preempted
        self._handed_on = None if handed_on is None else iter(handed_on)
        self.bursts, self.prepared, self.alive = 0, 0, True

    def prepare(self, function: str, *threads: int) -> Any:
        assert function.startswith("latbench.backends.reference:")
        self.prepared, self.alive = self.prepared + 1, True
        if threads and self._handed_on is None:
            raise TaskFailed("NotImplementedError", "threads cannot choose their core", "")
        return SimpleNamespace(function=function)

    def holds(self, prepared: Any) -> bool:
        return self.alive

    def burst(self, prepared: Any, seconds: float) -> Burst:
        if prepared.function.endswith(":handed_on"):
            assert self._handed_on is not None
            return Burst([next(self._handed_on)] * 3)
        value = next(self._seconds)
        if value is None:
            self.alive = False
            next(self._seconds)
            raise WorkerDied("oom", "gone")
        self.bursts += 1
        return Burst([value] * 3, preempted=(self.bursts - 1) // 2 in self._preempted)


@pytest.fixture(autouse=True)
def own_ceilings(own_lock: Path) -> None:
    """Made-up ceilings are kept beside nobody's real ones."""


def pace(worker: FakeWorker, readings: int, threads: int = 1) -> CpuPace:
    """After so many readings, at the times 0, 1, 2 ..."""
    kept = CpuPace(worker, Kept("cpu", 1, "work", lambda: CEILINGS), threads, clock=itertools.count().__next__)  # type: ignore[arg-type]
    for _ in range(readings * EVERY):
        kept.turn()
    return kept


def test_the_reference_is_timed_before_the_first_burst_and_every_few() -> None:
    worker = FakeWorker(1.0, 1.0, 1.0)
    kept = pace(worker, 0)
    counts = []
    for _ in range(2 * EVERY + 1):
        kept.turn()
        counts.append(len(kept.readings))
    assert counts == [1] * EVERY + [2] * EVERY + [3]
    assert worker.prepared == 2  # a product and a sum


def told(kept: CpuPace, at: float) -> tuple[float, bool]:
    """By what factor the machine was slower than usual around then, and whether that is a slow spell."""
    found = kept.reference([at], **BY_UNITS)
    assert found is not None
    return found.seconds[0] / found.usual_seconds, found.slow_spell


def test_the_pace_is_that_of_the_readings_nearest_to_a_moment() -> None:
    kept = pace(FakeWorker(*[1.0] * 20, *[2.0] * 20), 40)
    found = kept.reference([0.0, 10.0, 15.4, 24.0, 38.0], **BY_UNITS)
    assert found is not None and found.usual_seconds == pytest.approx(1)
    assert found.seconds == pytest.approx([1, 1, 1, 2, 2])
    lone = pace(FakeWorker(*[1.0] * 9, 3.0, *[1.0] * 9), 19)
    assert told(lone, 9.0)[0] == pytest.approx(1)  # a stumble is no pace


def test_a_slow_spell_is_slower_than_the_rest_of_the_sweep() -> None:
    always = pace(FakeWorker(*[2.0] * 9), 9)
    assert told(always, 8.0) == (pytest.approx(2), False)
    at_last = pace(FakeWorker(*[1.0] * 20, *[2.0] * 9), 29)
    assert told(at_last, 27.0) == (pytest.approx(2), True)
    found = at_last.reference([3.0, 5.0, 27.0], **BY_UNITS)
    assert found is not None and not found.slow_spell  # most of it was before


def test_it_is_a_slow_spell_when_cores_that_hand_on_data_are_further_apart_than_in_the_rest_of_the_sweep() -> None:
    handed_on = [3e-6] * 20 + [7e-6] * 9
    apart = pace(FakeWorker(*[1.0] * 29, handed_on=handed_on), 29, threads=2)
    assert told(apart, 27.0) == (1.0, True)  # what it costs depends on the work: no time is corrected
    assert told(apart, 3.0) == (1.0, False)
    alone = pace(FakeWorker(*[1.0] * 29, handed_on=handed_on), 29)
    assert told(alone, 27.0) == (1.0, False)  # one thread hands nothing on
    far = pace(FakeWorker(*[1.0] * 9, handed_on=[7e-6] * 9), 9, threads=2)
    assert told(far, 8.0) == (1.0, False)


def test_where_threads_cannot_choose_their_core_the_pace_goes_on_without() -> None:
    worker = FakeWorker(*[1.0] * 3)
    assert told(pace(worker, 3, threads=2), 2.0) == (1.0, False)
    assert worker.prepared == 3  # tried once


needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to choose from"
)


@needs_cores
def test_each_core_finds_what_the_one_before_has_changed() -> None:
    allowed, visited = os.sched_getaffinity(0), []
    work = reference.handed_on(2)

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
        reference.handed_on(1)


def test_a_reading_that_others_cut_into_does_not_count_beside_one_that_they_did_not() -> None:
    assert told(pace(FakeWorker(1.0, 9.0, 9.0, preempted=(1, 2)), 3), 0.0)[0] == pytest.approx(1)
    assert told(pace(FakeWorker(9.0, preempted=(0,)), 1), 0.0)[0] == pytest.approx(9)


def test_a_reference_worker_that_dies_costs_its_reading_and_no_more() -> None:
    worker = FakeWorker(None, 1.0)
    kept = pace(worker, 1)
    assert kept.reference([0.0], **BY_UNITS) is None
    for _ in range(EVERY):
        kept.turn()
    assert told(kept, 0.0)[0] == pytest.approx(1) and worker.prepared == 4
