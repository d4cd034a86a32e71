"""Other programs at work just now, from made-up times of processors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from latbench.machines import noise_sources
from latbench.machines.noise_sources import count_free_cores, describe_load_now, measure_taken_cores
from latbench.machines.processors import CpuQuota, Processors


class Times(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float
    guest: float


def spend(monkeypatch: pytest.MonkeyPatch, own: float, *busy: float) -> None:
    """Let a second pass in which each processor is busy so long, this process `own` of it."""
    before = [Times(10.0, 5.0, 100.0, 1.0, 3.0)] * len(busy)
    after = [Times(10.0 + each, 5.0, 100.5 - each, 1.5, 3.0 + each / 2) for each in busy]
    readings, clocks = iter([before, after]), iter([7.0, 7.0 + own])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(readings))
    monkeypatch.setattr(noise_sources.time, "process_time", lambda: next(clocks))
    monkeypatch.setattr(noise_sources.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize(
    ("own", "busy", "allowed", "taken"),
    [(0.0, (1.0, 0.0), {0, 1}, 1.0), (0.5, (1.0, 0.0), {0, 1}, 0.5), (0.0, (1.0, 0.0), {1}, 0.0),
     (0.2, (0.1, 0.0), {0, 1}, 0.0), (0.0, (1.0, 1.0), {0, 1}, 2.0)],
)  # fmt: skip
def test_what_others_take_of_the_allowed_processors_is_counted(
    monkeypatch: pytest.MonkeyPatch, own: float, busy: tuple[float, ...], allowed: set[int], taken: float
) -> None:
    spend(monkeypatch, own, *busy)
    monkeypatch.setattr(noise_sources, "list_allowed_processors", lambda: allowed)
    assert measure_taken_cores(1.0) == pytest.approx(taken, abs=1e-9)


@pytest.mark.parametrize(("taken", "said"), [(1.0, "other programs take 1.0 of"), (0.2, None)])
def test_what_others_take_is_said_with_advice(
    monkeypatch: pytest.MonkeyPatch, taken: float, said: str | None
) -> None:
    monkeypatch.setattr(noise_sources, "measure_taken_cores", lambda: taken)
    monkeypatch.setattr(noise_sources, "describe_load", lambda host: None)
    found: Any = describe_load_now()
    assert found is None if said is None else found.startswith(said) and "end them" in found


@pytest.mark.parametrize(
    ("taken", "threads", "said"),
    [(1.0, 1, False), (1.0, 2, True), (1.0, None, True), (0.5, 2, True), (0.2, 2, False), (2.0, 1, True)],
)
def test_cores_that_no_thread_needs_may_be_taken(
    monkeypatch: pytest.MonkeyPatch, taken: float, threads: int | None, said: bool
) -> None:
    monkeypatch.setattr(noise_sources, "measure_taken_cores", lambda: taken)
    monkeypatch.setattr(noise_sources, "describe_load", lambda host: None)
    monkeypatch.setattr(noise_sources, "read_host", lambda: SimpleNamespace(cores=2))
    assert (describe_load_now(threads) is not None) is said


@pytest.mark.parametrize(
    ("cores", "quota", "taken", "free"),
    [(2, None, 0.0, 2), (2, None, 0.5, 2), (2, None, 0.9, 1), (2, None, 2.0, 1), (8, None, 2.9, 5), (1, None, 1.0, 1),
     (64, 4.0, 30.0, 4), (64, 4.0, 62.0, 2)],
)  # fmt: skip
def test_cores_that_others_keep_busy_are_not_free(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, taken: float, free: int
) -> None:
    here = Processors(cores, cores, None if quota is None else CpuQuota(quota, Path("cpu.max")))
    monkeypatch.setattr(noise_sources, "read_processors", lambda: here)
    monkeypatch.setattr(noise_sources, "measure_taken_cores", lambda seconds: taken)
    assert count_free_cores() == free
