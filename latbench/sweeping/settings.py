"""Settings of a sweep, and the values that its parts exchange: rows, progress, summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latbench.errors import Incomplete

NOISY_CHANCES = 3  # disturbances come in spells, and a later try is often a quiet one

NO_ROOFLINE = "no_roofline"  # flag of a row: what the device can do at most could not be measured

SecondsLeft = Callable[[], "float | None"]
"""How many seconds a run still has; None: any time."""

Row = dict[str, Any]
"""A row of the table as it is measured, columns by name; its run and its block are filled in when it is kept."""

Keep = Callable[[Mapping[str, Any], Sequence[Row]], None]
"""Takes an environment and the rows that were measured in it."""


class TimeLeft(NamedTuple):
    """The seconds that are left for points, which have any time while a run has measured nothing; and for what is
    timed beside them, which is worth no more than the run's budget.
    """

    points: SecondsLeft = lambda: None
    beside: SecondsLeft = lambda: None


@dataclass(frozen=True)
class SweepSettings:
    """How carefully a point is measured: until its median is known to `rel_error` or for `max_seconds`, in bursts of
    `round_seconds` that take turns with those of `block_points` points at least.

    In each of several `sessions` the engines' processes are new, and get the points in another order: where in memory
    things lie speeds a point up or slows it down by a percent or two for as long as they lie there.
    """

    rel_error: float = 0.01
    max_seconds: float = 0.4
    round_seconds: float = 0.015
    block_points: int = 24
    sessions: int = 1
    noisy_chances: int = NOISY_CHANCES


CPU_SETTINGS = SweepSettings()
"""Of a CPU."""


@dataclass(frozen=True)
class Progress:
    """Where a sweep is: `done` of `total` points have a row; `activity` says what it does now."""

    done: int
    total: int
    activity: str


@dataclass(frozen=True)
class SweepSummary:
    """What a sweep did: the status of each point measured now, by point_id, and how many the table had before."""

    statuses: dict[str, str]
    skipped: int


class SweepStopped(Incomplete):
    """A sweep that was interrupted (by the user), or used up its time; `summary` is of what it measured."""

    summary: SweepSummary
    interrupted = False


class TimeUsedUp(Exception):
    """The time budget of a run is over."""

    def __str__(self) -> str:
        return "the time budget is used up"
