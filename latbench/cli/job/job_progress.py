"""One progress display for all steps of a job, with an estimate of the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from latbench.cli.progress_bar import Tell
from latbench.cli.sweep_points import format_duration

OVERDUE_SHARE = 0.2
"""Share of its own seconds that a step is expected to take on, once it has taken longer than estimated."""

LEAST_PACE = 0.5
"""Least ratio of seconds to estimated ones: steps whose results were there take no time, and later ones will."""

TRUST = 0.25
"""The pace of steps counts as much as the estimates do once their estimated seconds are this share of all. The first
step is short, and in a new environment Python compiles its imports in it: that says little about the others."""


class JobProgress:
    """Reports the steps of a job to one display.

    Parameters
    ----------
    tell
        The display.
    estimate_seconds
        Returns the estimated seconds of each step by name, in their order. It is asked again at each step, because
        later steps are better known by then.
    clock
        Returns seconds.
    """

    def __init__(
        self, tell: Tell, estimate_seconds: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._tell, self._estimate, self._clock = tell, estimate_seconds, clock
        self._step, self._began = "", clock()
        self._past: dict[str, tuple[float, float]] = {}
        """Step -> its seconds and their estimate."""

    def start(self, step: str) -> Tell:
        """Begin a step; return what it reports to."""
        now = self._clock()
        if self._step:
            spent = now - self._began
            self._past[self._step] = spent, self._estimate()[self._step]
        self._step, self._began = step, now
        self._report(step, None, None)

        def report(what: str, done: int | None, total: int | None) -> None:
            self._report(what if what.startswith(step) else f"{step}: {what}", done, total)

        return report

    def _report(self, what: str, done: int | None, total: int | None) -> None:
        left = self.estimate_seconds_left()
        self._tell(f"{what} (about {format_duration(left)} left)", done, total)

    def estimate_seconds_left(self) -> float:
        """Return the estimated seconds until all steps are done, corrected by the pace of the steps so far."""
        estimates = self._estimate()
        names = list(estimates)
        elapsed, own = self._clock() - self._began, estimates[self._step]
        paces = [*self._past.values(), (elapsed, own)] if elapsed > own else [*self._past.values()]
        trusted = TRUST * sum(estimates.values())
        pace = (trusted + sum(spent for spent, _ in paces)) / (trusted + sum(expected for _, expected in paces))
        pace = max(pace, LEAST_PACE)
        later = sum(estimates[name] for name in names[names.index(self._step) + 1 :])
        return max(pace * own - elapsed, OVERDUE_SHARE * elapsed) + pace * later
