"""The pace of a sweep, with a worker that says what the tests want."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latbench.machines.ceilings import CachedCeilings, Ceilings
from latbench.runners.worker_process import WorkerDied
from latbench.sweeping.core_placement import BURST_SECONDS, MOST_DEATHS, PREPARE_SECONDS
from latbench.sweeping.roofline_pace import READ_EVERY_BURSTS, CpuPace
from latbench.timing.sampling import Burst

CEILINGS = Ceilings(1.0, {1: 1.0}, product_seconds=1.0, sum_seconds=1.0)
BY_UNITS = {"flop": 1e9, "size": 1e-9}


class FakeWorker:
    """Says the next of `seconds` for both kernels; None: it dies instead, for this reason."""

    def __init__(self, *seconds: float | None, preempted: tuple[int, ...] = (), reason: str = "oom") -> None:
        self._reason = reason
        self._seconds = iter(itertools.chain.from_iterable((value, value) for value in seconds))
        self._preempted = preempted
        self.bursts, self.prepared, self.alive = 0, 0, True

    def prepare(self, function: str, timeout: float) -> Any:
        assert timeout == PREPARE_SECONDS
        assert function.startswith("latbench.backends.cpu.cpu_reference:")
        self.prepared, self.alive = self.prepared + 1, True
        return SimpleNamespace(function=function)

    def holds(self, prepared: Any) -> bool:
        return self.alive

    def burst(self, prepared: Any, seconds: float, timeout: float) -> Burst:
        assert timeout == BURST_SECONDS
        value = next(self._seconds)
        if value is None:
            self.alive = False
            next(self._seconds)
            raise WorkerDied(self._reason, "gone")
        self.bursts += 1
        return Burst([value] * 3, preempted=(self.bursts - 1) // 2 in self._preempted)


@pytest.fixture(autouse=True)
def own_ceilings(own_lock: Path) -> None:
    """Made-up ceilings are kept beside nobody's real ones."""


def pace(worker: FakeWorker, readings: int) -> CpuPace:
    """After so many readings, at the times 0, 1, 2 ..."""
    kept = CpuPace(worker, CachedCeilings("cpu", 1, "work", lambda: CEILINGS), 1, clock=itertools.count().__next__)  # type: ignore[arg-type]
    for _ in range(readings * READ_EVERY_BURSTS):
        kept.turn()
    return kept


def test_the_reference_is_timed_before_the_first_burst_and_every_few() -> None:
    worker = FakeWorker(1.0, 1.0, 1.0)
    kept = pace(worker, 0)
    counts = []
    for _ in range(2 * READ_EVERY_BURSTS + 1):
        kept.turn()
        counts.append(len(kept.readings))
    assert counts == [1] * READ_EVERY_BURSTS + [2] * READ_EVERY_BURSTS + [3]
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


def test_a_reading_that_others_cut_into_does_not_count_beside_one_that_they_did_not() -> None:
    assert told(pace(FakeWorker(1.0, 9.0, 9.0, preempted=(1, 2)), 3), 0.0)[0] == pytest.approx(1)
    assert told(pace(FakeWorker(9.0, preempted=(0,)), 1), 0.0)[0] == pytest.approx(9)


def test_a_reference_worker_that_dies_costs_its_reading_and_no_more() -> None:
    worker = FakeWorker(None, 1.0)
    kept = pace(worker, 1)
    assert kept.reference([0.0], **BY_UNITS) is None
    for _ in range(READ_EVERY_BURSTS):
        kept.turn()
    assert told(kept, 0.0)[0] == pytest.approx(1) and worker.prepared == 4


def test_a_reference_worker_that_hangs_again_and_again_is_given_up() -> None:
    hangs = [None] * MOST_DEATHS
    worker = FakeWorker(1.0, *hangs, 1.0, reason="timeout")
    kept = pace(worker, 1)
    assert kept.reference([0.0], **BY_UNITS) is not None
    for _ in range(MOST_DEATHS * READ_EVERY_BURSTS):
        kept.turn()
    assert kept.given_up and kept.reference([0.0], **BY_UNITS) is None
    prepared = worker.prepared
    for _ in range(READ_EVERY_BURSTS):
        kept.turn()
    assert worker.prepared == prepared and len(kept.readings) == 1  # it is not asked again


@pytest.mark.parametrize("reason", ["timeout", "late"])
def test_a_hang_now_and_then_or_the_end_of_the_time_gives_nothing_up(reason: str) -> None:
    seconds = [1.0, None] * (MOST_DEATHS + 1) if reason == "timeout" else [None] * (MOST_DEATHS + 1)
    kept = pace(FakeWorker(*seconds, reason=reason), len(seconds))
    assert not kept.given_up
