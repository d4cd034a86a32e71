"""A promise is measured: search a profile, time it, correct the prediction, search again.

The profile of least summed error that should fit is timed end to end, and the prediction corrected by that. Then the
search finds the profile of least calibration loss whose predicted seconds fit, and that one is timed beside those
before it. If the promise does not hold there, or holds with much to spare, the prediction is corrected once more and
the search goes again, a few rounds. Only a profile that was measured to keep the promise, with the room that the risk
asks for, is returned.

Rounds look for the seconds at which the promise just holds, as one looks for a zero. Between a profile that kept it
and one that missed it they follow the line through both; an end that stays counts as half as far off each time, so
that the other end moves, too (regula falsi: Dowell and Jarratt 1971, "A modified regula falsi method for computing
the root of an equation"). While all are on one side, layers are taken to be as much slower or faster than predicted
as in the nearest profile, and each further step goes twice as far, until there is one on the other side. A line
through two profiles of one side would go wherever their noise points.

Where nothing was kept, the fastest profile of all is timed in the end: a target that it misses is out of reach, and
from one that it keeps rounds close in again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from latbench.errors import PromiseMissed
from search.knapsack.arrays import Choice, Infeasible
from search.problem.calibration import allow_only_fastest, calibrate, fit_line, ignore_intervals
from search.problem.layers import ROUNDING, Interval
from search.problem.problem import Problem
from search.strategies.evaluation_budget import SearchResult
from search.whole_model import confidence as risk
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import Session

# A profile that is faster than it has to be by more than this gave away accuracy for nothing.
TO_SPARE = 0.03
AIM = 1 + TO_SPARE / 2  # of the rounds that aim at the edge half miss
ROUNDS = 4

Search = Callable[[Problem, int, Collection[Choice]], SearchResult]
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
class Kept:
    """A profile that was measured to keep the promise, and the problem that predicts just that for it.

    No profile that keeps the promise in this problem has an error below `bound`.
    """

    problem: Problem
    found: SearchResult
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
    with their losses, are timed beside the others. Raises Infeasible where the favourable ends of all predictions say
    that nothing can, and PromiseMissed where the fastest profile was timed and missed, too.
    """
    rounds = _Rounds(problem, search, measure, target, dict(before or {}))
    rounds.go_on([rounds.predicted], 1 + ROUNDS)
    if not rounds.held():
        wanted = rounds.one([allow_only_fastest(ignore_intervals(rounds.predicted), target)])
        rounds.go_on(wanted if rounds.held() else [], ROUNDS)
    if not rounds.held():
        raise PromiseMissed(_missed(rounds.predicted, rounds.times, target))
    best = min(rounds.held(), key=lambda choice: rounds.tried[choice].loss)
    final, times = corrected(rounds.predicted, best, rounds.times[best]), rounds.times[best]
    bound = final.solve(target / (1 + ROUNDING)).bound  # `best` just fits there: no rounding may come between
    return Kept(final, rounds.tried[best], bound, times)


class _Rounds:
    """The rounds of one promise, and what they found: profiles that were `tried`, and `times` of those timed."""

    def __init__(
        self,
        problem: Problem,
        search: Search,
        measure: Callable[[Sequence[Choice]], list[Measured]],
        target: float,
        before: Mapping[Choice, float],
    ) -> None:
        # Where predictions are too uncertain to promise it, it may be so all the same: measuring will tell.
        self.predicted = problem if _fits(problem.reachable, target) else ignore_intervals(problem)
        self.hopeful = _fits(problem.check_could_reach, target)
        self.search, self.measure, self.target, self.before = search, measure, target, before
        self.number = 0
        self.tried: dict[Choice, SearchResult] = {}
        self.times: dict[Choice, Measured] = {}

    def held(self) -> list[Choice]:
        """The profiles that were measured to keep the promise."""
        return [choice for choice, one in self.times.items() if one.speedup.low >= self.target]

    def go_on(self, wanted: Sequence[Problem], most: int) -> None:
        """Rounds until nothing is left to search, at `most` so many."""
        for _ in range(most):
            wanted = self.one(wanted) if wanted else []

    def one(self, wanted: Sequence[Problem]) -> Sequence[Problem]:
        """Search in the first problem that has a profile and time it; what to search next, nothing at the end."""
        number, self.number = self.number, self.number + 1
        missed = self.times.keys() - set(self.held())
        try:
            found = _first_found(self.search, wanted, number, missed)
        except Infeasible:
            if self.times or (number == 0 and (self.before or self.hopeful)):
                return []
            raise
        if found.choice in missed:
            slower = corrected(self.predicted, found.choice, self.times[found.choice])
            return [_aiming(slower, AIM), slower]
        if found.choice in self.times:
            return []
        if not self.times:
            for choice, loss in self.before.items():
                self.tried[choice] = SearchResult(choice, loss, "verified", (), 0.0, False)
        self.tried[found.choice] = found
        self.times.update(zip(self.tried, self.measure(list(self.tried)), strict=True))
        if number > 0 and self.target <= self.times[found.choice].speedup.low <= self.target * (1 + TO_SPARE):
            return []
        return [_closed_in(self.predicted, self.times, self.target, aim) for aim in (AIM, 1.0)]


def _first_found(
    search: Search, problems: Sequence[Problem], number: int, missed: Collection[Choice]
) -> SearchResult:
    """What the search finds in the first problem that has a profile. Raises Infeasible."""
    for problem in problems[:-1]:
        with contextlib.suppress(Infeasible):
            return search(problem, number, missed)
    return search(problems[-1], number, missed)


def corrected(problem: Problem, choice: Choice, measured: Measured) -> Problem:
    """The problem that predicts for the profile what was measured of it."""
    return calibrate(problem, choice, measured.seconds, measured.dense, measured.dense_engine)


def _closed_in(problem: Problem, times: Mapping[Choice, Measured], target: float, aim: float) -> Problem:
    """The problem in which those profiles reach `target` that should reach `aim` times that.

    By the two profiles next to the target, one a side; by the nearest one where there is no other side yet.
    """
    off = {choice: math.log(one.speedup.low / target) for choice, one in times.items()}
    near = sorted(off, key=lambda choice: abs(off[choice]))
    newest, *earlier = [one >= 0 for one in reversed(off.values())]
    again = next((i for i, side in enumerate(earlier) if side is not newest), len(earlier))  # as many on one side
    if (not newest) in earlier:
        kept, missed = (next(one for one in near if (off[one] >= 0) is side) for side in (True, False))
        dense = times[kept].dense.value
        least, most = dense / times[kept].speedup.low, dense / times[missed].speedup.low
        goal = min(max(dense / (target * aim), least), most)
        if newest:
            most = goal + (most - goal) / 2**again
        else:
            least = goal - (goal - least) / 2**again
        line = fit_line(problem, {kept: least, missed: most}, goal * target, times[kept].dense_engine)
        if line is not None:
            return line
        again = 0
    one = times[near[0]]
    further = math.exp(off[near[0]] * (2**again - 1))
    moved = replace(one, speedup=Interval(*(it * further for it in one.speedup.ends)))
    return _aiming(corrected(problem, near[0], moved), aim)


def _aiming(problem: Problem, aim: float) -> Problem:
    """The problem in which those profiles reach a target that reach `aim` times that in `problem`."""
    return replace(problem, dense=Interval(*(it / aim for it in problem.dense.ends)))


def _missed(problem: Problem, times: Mapping[Choice, Measured], target: float) -> str:
    """That no profile kept the target, what the best reached, and what limits it."""
    best = max(times.values(), key=lambda one: one.speedup.low).speedup
    sentence = (
        f"{target:g}x was not kept when it was measured: of {len(times)} profiles timed end to end, the best reached "
        f"{best.value:.2f}x ({best.low:.2f}-{best.high:.2f}x)"
    )
    if target <= best.value:
        sentence += ", and the lower end must reach the target (a lower --risk narrows the interval)"
    fastest = ignore_intervals(problem).fastest()
    if fastest in times:
        limits = corrected(problem, fastest, times[fastest]).describe_remaining_time()
        sentence += f"; it is out of reach: the fastest that there is was among them{limits}"
    return sentence + "; ask for less, or search again with --remeasure when the machine is quiet"


def _fits(reach: Callable[[float], object], target: float) -> bool:
    try:
        reach(target)
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
    buildings = sum(max(len(set(session.timings.built)), 1) - 1 for session in timed)
    between = risk.spread([one for groups in speedups.values() for one in groups], buildings)
    latest = next(session.timings for session in reversed(timed) if name in session.profiles)
    dense = latest.fastest(list(DENSE_ENGINES))
    seconds = latest.seconds(dense, risk.coverage(probability))
    return Measured(risk.promise(speedups[name], between, probability), seconds, dense)
