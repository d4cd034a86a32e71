"""Settings of a sweep, and the values that its parts exchange: rows, progress, summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latbench.errors import Incomplete
from latbench.runners.device_lock import WAIT_SECONDS
from latbench.timing.sampling import StopRule

NOISY_CHANCES = 3  # disturbances come in spells, so a later try is often quiet

NO_ROOFLINE = "no_roofline"  # flag of a row: the device's ceilings could not be measured

SecondsLeft = Callable[[], "float | None"]
"""Returns the seconds that a run has left; None: no limit."""

Row = dict[str, Any]
"""A measured row of the table, columns by name; run and block are filled in when it is written."""

RowWriter = Callable[[Mapping[str, Any], Sequence[Row]], None]
"""Gets an environment and the rows measured in it."""


class TimeLeft(NamedTuple):
    """The seconds that are left in a run.

    Parameters
    ----------
    points
        For points. The first points of a run have no limit, because a run without any result could never continue.
    beside
        For reference work, which must stay within the run's budget.
    """

    points: SecondsLeft = lambda: None
    beside: SecondsLeft = lambda: None


@dataclass(frozen=True)
class SweepSettings:
    """How carefully points are measured.

    Parameters
    ----------
    rel_error
        Wanted relative error of the median.
    max_seconds
        Most seconds of sampling per point and session.
    round_seconds
        Seconds of a burst.
    block_points
        Least points of a block, whose bursts take turns.
    sessions
        Sessions with new processes and another order of points. Memory placement changes times by a percent or two
        for as long as a process lives; several sessions average that out.
    noisy_chances
        How often a disturbed point is measured again.
    """

    rel_error: float = 0.01
    max_seconds: float = 0.4
    round_seconds: float = 0.015
    block_points: int = 24
    sessions: int = 1
    noisy_chances: int = NOISY_CHANCES

    @property
    def stop_rule(self) -> StopRule:
        """When the sampling of a point ends."""
        return StopRule(self.rel_error, self.max_seconds, self.round_seconds, self.sessions)


CPU_SETTINGS = SweepSettings()
"""Settings of a CPU."""


@dataclass(frozen=True)
class SweepOptions:
    """Order, limits and repetitions of a sweep.

    Parameters
    ----------
    seed
        Random seed for the order of blocks and points.
    time_budget
        Seconds after which the sweep stops; None: no limit.
    remeasure
        Measure points again whose row in the table is noisy.
    again
        Measure all points, whatever the table has of them.
    wait_seconds
        Longest wait for another process that measures on the device.
    expected
        Number of points for the progress display, where a chooser names them step by step.
    chances_last
        Measure disturbed points again after all others, instead of after the choice that named them.
    """

    seed: int = 0
    time_budget: float | None = None
    remeasure: bool = False
    again: bool = False
    wait_seconds: float = WAIT_SECONDS
    expected: int = 0
    chances_last: bool = False


DEFAULT_OPTIONS = SweepOptions()


@dataclass(frozen=True)
class Progress:
    """The state of a sweep: `done` of `total` points have a row; `activity` is what it does now."""

    done: int
    total: int
    activity: str


@dataclass(frozen=True)
class SweepSummary:
    """The result of a sweep: the status of each point measured now, by point_id, and the number of skipped points."""

    statuses: dict[str, str]
    skipped: int


class SweepStopped(Incomplete):
    """A sweep that was interrupted by the user or used up its time; `summary` is its result so far."""

    summary: SweepSummary
    interrupted = False


class TimeUsedUp(Exception):
    """The end of a run's time budget."""

    def __str__(self) -> str:
        return "the time budget is used up"
