"""A promise is measured: search a profile, time it, correct the prediction, search again.

The profile of least summed error that should fit is timed end to end, and the prediction corrected by that. Then the
search finds the profile of least calibration loss whose predicted seconds fit, and that one is timed beside those
before it. If the promise does not hold there, or holds with much to spare, the prediction is corrected once more and
the search goes again, a few rounds. Only a profile that was measured to keep the promise, with the room that the risk
asks for, is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from latbench.errors import PromiseMissed
from search import risk
from search.engines import DENSE_ENGINES
from search.evaluations import Found
from search.problem import Choice, Interval, Problem
from search.sessions import Session
from search.solve import Infeasible

# A profile that is faster than it has to be by more than this gave away accuracy for nothing.
TO_SPARE = 0.03
ROUNDS = 4

Search = Callable[[Problem, int, Collection[Choice]], Found]
"""Asked for the profile of a problem in round 0, 1, ..., other than those that missed, if there is another. In round
0 without a search: the solver's own."""


@dataclass(frozen=True)
class Measured:
    """A profile timed end to end: its speedup over `dense_engine`, whose seconds are of the same rounds."""

    speedup: Interval
    dense: Interval
    dense_engine: str

    @property
    def seconds(self) -> Interval:
        """The pruned model's seconds beside dense ones of `dense.value`: the ratio, which is known best."""
        dense = self.dense.value
        return Interval(dense / self.speedup.value, dense / self.speedup.high, dense / self.speedup.low)


@dataclass(frozen=True)
class Tried:
    """A profile that a search found, and the least error that its budget allowed."""

    found: Found
    bound: float


@dataclass(frozen=True)
class Kept:
    """A profile that was measured to keep the promise, and the problem that predicts just that for it."""

    problem: Problem
    found: Found
    bound: float
    measured: Measured


def keep_promise(
    problem: Problem,
    search: Search,
    measure: Callable[[Sequence[Choice]], list[Measured]],
    target: float,
    *,
    before: Mapping[Choice, float] | None = None,
) -> Kept:
    """Search, measure, correct the prediction, search again; the profile of least loss among those that held.

    The first profile is the solver's own, which costs no search and shows how predictions fare where it counts.
    `measure` times profiles side by side and answers with all that it knows of each by then. Profiles from `before`,
    with their losses, are timed beside the others. Raises Infeasible, or PromiseMissed if none held after a few
    rounds.
    """
    tried: dict[Choice, Tried] = {}
    times: dict[Choice, Measured] = {}

    def held() -> list[Choice]:
        return [choice for choice, one in times.items() if one.speedup.low >= target]

    if not _fits(problem, target):
        # The predictions are too uncertain to promise it, yet it may be so: measuring will tell.
        problem = problem.certain()
    predicted = problem
    for number in range(1 + ROUNDS):
        try:
            bound = problem.solve(target).bound
            found = search(problem, number, times.keys() - set(held()))
        except Infeasible:
            if not held():
                raise
            break
        if found.choice in times:
            if found.choice in held():
                break
            problem = corrected(predicted, found.choice, times[found.choice])
            continue
        if number == 0:
            for choice, loss in (before or {}).items():
                tried[choice] = Tried(Found(choice, loss, "verified", (), 0.0, False), bound)
        tried[found.choice] = Tried(found, bound)  # the bound of the budget that this round had
        times = dict(zip(tried, measure(list(tried)), strict=True))
        latest = times[found.choice]
        if number > 0 and target <= latest.speedup.low <= target * (1 + TO_SPARE):
            break
        problem = _closed_in(predicted, times, target)
    if not held():
        fastest = max(times.values(), key=lambda one: one.speedup.low).speedup
        raise PromiseMissed(
            f"{target:g}x was not kept when it was measured: of {len(tried)} profiles that should have, the "
            f"best reached {fastest.value:.2f}x ({fastest.low:.2f}-{fastest.high:.2f}x) end to end; ask for less, or "
            "search again with --remeasure when the machine is quiet"
        )
    best = min(held(), key=lambda choice: tried[choice].found.loss)
    return Kept(corrected(predicted, best, times[best]), tried[best].found, tried[best].bound, times[best])


def corrected(problem: Problem, choice: Choice, measured: Measured) -> Problem:
    """The problem that predicts for the profile what was measured of it."""
    return problem.calibrated(choice, measured.seconds, measured.dense, measured.dense_engine)


def _closed_in(problem: Problem, times: Mapping[Choice, Measured], target: float) -> Problem:
    """The problem that predicts what was measured of the two profiles next to the target, one a side if there is.

    Between and beyond them seconds are taken to follow the line through both. With one profile, or no such line, all
    is as much slower or faster than predicted as the nearest was.
    """
    near = sorted(times, key=lambda choice: abs(math.log(times[choice].speedup.low / target)))
    sides = [[choice for choice in near if (times[choice].speedup.low >= target) == held] for held in (True, False)]
    one, *others = near if not all(sides) else (sides[0][0], sides[1][0])
    measured, found = times[one], None
    if others:
        seconds = measured.dense.value / times[others[0]].speedup.value
        found = problem.on_line(one, others[0], measured.seconds, seconds, measured.dense, measured.dense_engine)
    return found or corrected(problem, near[0], times[near[0]])


def _fits(problem: Problem, target: float) -> bool:
    try:
        problem.budget(target)
    except Infeasible:
        return False
    return True


def measured(timed: Sequence[Session], name: str, probability: float) -> Measured:
    """What all the sessions that timed this profile say of it: its speedup is not below the lower end, if it is
    verified, with this probability.

    In each session it is against the dense engine that was the fastest there, as it will be in the verification.
    """
    speedups: dict[str, list[list[float]]] = {}
    for session in timed:
        dense = session.timings.fastest(list(DENSE_ENGINES))
        for profile in session.profiles:
            speedups.setdefault(profile, []).append(session.timings.speedups(profile, dense))
    buildings = sum(len(set(session.timings.built)) - 1 for session in timed)
    between = risk.spread([one for groups in speedups.values() for one in groups], buildings)
    latest = next(session.timings for session in reversed(timed) if name in session.profiles)
    dense = latest.fastest(list(DENSE_ENGINES))
    seconds = latest.seconds(dense, risk.coverage(probability))
    return Measured(risk.promise(speedups[name], between, probability), seconds, dense)
