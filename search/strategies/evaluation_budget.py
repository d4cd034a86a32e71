"""What a search may spend, and what it found for it.

An evaluation is one profile judged on all the batches that a search looks at; on fewer of them it counts as their
share. A search ends when its evaluations are used up, or its time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from search.knapsack.arrays import BadProblem, Choice

EVALUATED_TOGETHER = 8
"""Profiles handed to the judge together: what it can share out, and how finely time is watched."""


class ProfileEvaluator(Protocol):
    """Who judges profiles: `batches` are the calibration data."""

    batches: int

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        """The mean loss of each profile over the first `batches`, infinite instead of NaN; the same at every call."""


@dataclass(frozen=True)
class EvaluatedProfile:
    """One profile that was judged in full: its loss, how it was found, and what had been spent by then."""

    choice: Choice
    loss: float
    found_by: str
    spent: float


@dataclass(frozen=True)
class SearchResult:
    """The best profile, how it was found, and every full evaluation in the order made.

    `spent` counts evaluations, partial ones by their share; `out_of_time` says whether there was more to try.
    """

    choice: Choice
    loss: float
    found_by: str
    trace: tuple[EvaluatedProfile, ...]
    spent: float
    out_of_time: bool


class BudgetExhausted(Exception):
    """The evaluations that were allowed are used up, or the time is."""


class EvaluationBudget:
    """Asks the judge for a search, each profile once, and keeps the account.

    At most `allowed` evaluations on the first `batches` (all, if None); once there is a result, none begins when
    `clock` has reached `deadline`. `tell` hears of what is spent and of the
    least loss so far. Profiles that the judge knows, `known` with how they were found, are results for nothing.
    """

    def __init__(
        self,
        judge: ProfileEvaluator,
        allowed: int,
        *,
        batches: int | None = None,
        known: Mapping[Choice, str] | None = None,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[float, float], None] = lambda spent, best: None,
    ) -> None:
        if allowed < 1:
            raise BadProblem("a search needs at least one evaluation")
        self.batches = min(batches or judge.batches, judge.batches)
        self.known: dict[Choice, int] = {}
        """On how many batches each profile was judged."""
        self._judge, self._tell = judge, tell
        self._deadline, self._clock = deadline, clock
        self._allowed = self._left = allowed * self.batches
        self._trace: dict[Choice, EvaluatedProfile] = {}
        self._out_of_time = False
        known = known or {}
        for (choice, found_by), loss in zip(known.items(), judge.losses(list(known), self.batches), strict=True):
            self.known[choice] = self.batches
            self._trace[choice] = EvaluatedProfile(choice, loss, found_by, 0.0)

    @property
    def best(self) -> EvaluatedProfile:
        """The least loss so far, the first of equal ones."""
        return min(self._trace.values(), key=lambda one: one.loss)

    @property
    def found(self) -> SearchResult:
        """What came of it so far."""
        best = self.best
        trace = tuple(self._trace.values())
        return SearchResult(best.choice, best.loss, best.found_by, trace, self._spent, self._out_of_time)

    def losses(
        self, choices: Sequence[Choice], batches: int | None = None, found_by: str | None = None
    ) -> list[float]:
        """The mean loss of each profile over the first `batches` (all, if None).

        Those judged on all may be the search's result where `found_by` says how they were found; without, they were
        asked for to learn from. Raises BudgetExhausted when not all may be asked for; those that may are judged
        before.
        """
        count = batches or self.batches
        enters = count == self.batches and found_by is not None
        new = [
            choice
            for choice in dict.fromkeys(choices)
            if self.known.get(choice, 0) < count or (enters and choice not in self._trace)
        ]
        for start in range(0, len(new), EVALUATED_TOGETHER):
            self._ask(new[start : start + EVALUATED_TOGETHER], count, found_by if enters else None)
        return self._judge.losses(choices, count)

    def _ask(self, choices: Sequence[Choice], batches: int, found_by: str | None) -> None:
        if self._trace and self._clock() >= self._deadline:
            self._out_of_time = True
            raise BudgetExhausted
        costs = [max(0, batches - self.known.get(choice, 0)) for choice in choices]
        within = choices[: sum(cost <= self._left for cost in itertools.accumulate(costs))]
        for choice, cost, loss in zip(within, costs, self._judge.losses(within, batches), strict=False):
            self._left -= cost
            self.known[choice] = max(batches, self.known.get(choice, 0))
            if found_by is not None:
                self._trace[choice] = EvaluatedProfile(choice, loss, found_by, self._spent)
        if self._trace:
            self._tell(self._spent, self.best.loss)
        if len(within) < len(choices):
            raise BudgetExhausted

    @property
    def _spent(self) -> float:
        return (self._allowed - self._left) / self.batches
