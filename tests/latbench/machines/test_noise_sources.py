"""Other programs at work just now, from made-up times of processors."""

from typing import Any, NamedTuple

import psutil
import pytest

from latbench.machines import noise_sources
from latbench.machines.noise_sources import describe_load_now, measure_taken_cores


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
