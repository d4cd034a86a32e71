"""The evaluations that a search may spend, and the profiles that it found with them.

One evaluation computes the loss of one profile on all batches of a search. On fewer batches it counts as their share.
A search ends when its evaluations or its time are used up.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from latbench.errors import EnvironmentUnusable, UsageError
from latbench.runners.worker_process import WorkerDied
from search.knapsack.arrays import BadProblem, Choice

_LOG = logging.getLogger(__name__)

SHARES_COST = 3
"""Evaluations that cost as much as a gradient on the same batches."""

EVALUATED_TOGETHER = 8
"""Profiles evaluated together: more of them run in parallel, fewer of them let a deadline end the search sooner."""


class ProfileEvaluator(Protocol):
    """Computes losses of profiles on `batches` of calibration data."""

    batches: int

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        """Return the mean loss of each profile over the first `batches`; infinity instead of NaN.

        Repeated calls return the same losses.
        """

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        """Return what each layer of a profile adds to the mean loss over the first `batches`; NaN where unknown.

        Raises UsageError where the loss has no gradient.
        """


@dataclass(frozen=True)
class EvaluatedProfile:
    """A profile with its loss on all batches of the search.

    Attributes
    ----------
    choice
        For each layer the index of its option.
    loss
        Mean calibration loss.
    found_by
        The name of the method that proposed it.
    spent
        Evaluations spent before it.
    """

    choice: Choice
    loss: float
    found_by: str
    spent: float


@dataclass(frozen=True)
class SearchResult:
    """The best profile of a search.

    Attributes
    ----------
    choice, loss, found_by
        The profile, its mean calibration loss, and the name of the method that proposed it.
    trace
        Every profile that was evaluated in full, in order.
    spent
        Evaluations; partial ones count as their share.
    out_of_time
        Whether the deadline ended the search.
    """

    choice: Choice
    loss: float
    found_by: str
    trace: tuple[EvaluatedProfile, ...]
    spent: float
    out_of_time: bool


class BudgetExhausted(Exception):
    """The evaluations or the time of a search are used up."""


class EvaluationBudget:
    """Evaluates each profile of a search once, and counts the evaluations.

    Parameters
    ----------
    evaluator
        Computes the losses.
    allowed
        Number of evaluations at most.
    batches
        The first batches of the calibration data that an evaluation uses; all by default.
    known
        Profiles whose losses the evaluator has already, and how they were found. They cost nothing.
    deadline
        Reading of `clock` after which no evaluation begins, once there is a result.
    clock
        Returns seconds.
    report
        Receives the evaluations spent and the least loss so far.
    """

    def __init__(
        self,
        evaluator: ProfileEvaluator,
        allowed: int,
        *,
        batches: int | None = None,
        known: Mapping[Choice, str] | None = None,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[float, float], None] = lambda spent, best: None,
    ) -> None:
        if allowed < 1:
            raise BadProblem("a search needs at least one evaluation")
        self.batches = min(batches or evaluator.batches, evaluator.batches)
        self.known: dict[Choice, int] = {}
        """Profile -> number of batches that it was evaluated on."""
        self._evaluator, self._report = evaluator, report
        self._deadline, self._clock = deadline, clock
        self._allowed = self._left = allowed * self.batches
        self._trace: dict[Choice, EvaluatedProfile] = {}
        self._out_of_time = self._has_no_gradient = False
        known = known or {}
        for (choice, found_by), loss in zip(known.items(), evaluator.losses(list(known), self.batches), strict=True):
            self.known[choice] = self.batches
            self._trace[choice] = EvaluatedProfile(choice, loss, found_by, 0.0)

    @property
    def best(self) -> EvaluatedProfile:
        """The profile of least loss so far; of equal ones the first."""
        return min(self._trace.values(), key=lambda profile: profile.loss)

    @property
    def result(self) -> SearchResult:
        """The result so far."""
        best = self.best
        trace = tuple(self._trace.values())
        return SearchResult(best.choice, best.loss, best.found_by, trace, self._spent, self._out_of_time)

    def losses(
        self, choices: Sequence[Choice], batches: int | None = None, found_by: str | None = None
    ) -> list[float]:
        """Return the mean loss of each profile over the first `batches` (default all).

        Parameters
        ----------
        choices
            Profiles.
        batches
            Number of batches.
        found_by
            The name of the method that proposed them. Only named profiles on all batches can become the result;
            others serve to learn from.

        Raises
        ------
        BudgetExhausted
            The budget does not suffice for all of them. It was spent on the first ones.
        """
        count = batches or self.batches
        is_candidate = count == self.batches and found_by is not None
        new = [
            choice
            for choice in dict.fromkeys(choices)
            if self.known.get(choice, 0) < count or (is_candidate and choice not in self._trace)
        ]
        for start in range(0, len(new), EVALUATED_TOGETHER):
            self._evaluate(new[start : start + EVALUATED_TOGETHER], count, found_by if is_candidate else None)
        return self._evaluator.losses(choices, count)

    def layer_shares(self, choice: Choice, batches: int) -> list[float] | None:
        """Return what each layer of a profile adds to the loss on the first `batches`, as the evaluator says.

        None where the gradient cannot be computed, or the budget does not suffice.
        """
        cost = SHARES_COST * batches
        if self._has_no_gradient or cost > self._left or (self._trace and self._clock() >= self._deadline):
            return None
        try:
            shares = self._evaluator.layer_shares(choice, batches)
        except (UsageError, EnvironmentUnusable, WorkerDied) as error:  # memory may run out, too
            _LOG.info(f"profiles are searched without gradients: {error}")
            self._has_no_gradient = True
            return None
        self._left -= cost
        return shares

    def _evaluate(self, choices: Sequence[Choice], batches: int, found_by: str | None) -> None:
        """Evaluate the first profiles that the budget allows. Raises BudgetExhausted if these are not all."""
        if self._trace and self._clock() >= self._deadline:
            self._out_of_time = True
            raise BudgetExhausted
        costs = [max(0, batches - self.known.get(choice, 0)) for choice in choices]
        within = choices[: sum(cost <= self._left for cost in itertools.accumulate(costs))]
        for choice, cost, loss in zip(within, costs, self._evaluator.losses(within, batches), strict=False):
            self._left -= cost
            self.known[choice] = max(batches, self.known.get(choice, 0))
            if found_by is not None:
                self._trace[choice] = EvaluatedProfile(choice, loss, found_by, self._spent)
        if self._trace:
            self._report(self._spent, self.best.loss)
        if len(within) < len(choices):
            raise BudgetExhausted

    @property
    def _spent(self) -> float:
        """Evaluations spent so far."""
        return (self._allowed - self._left) / self.batches
