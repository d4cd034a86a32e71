"""The loop that measures a promise: search a profile, time it, correct the prediction, search again.

First, the profile of least summed error that should fit is timed end to end, and the prediction is corrected by that.
Then the search finds the profile of least calibration loss whose predicted seconds fit, and it is timed beside those
before it. If it misses the promise, or keeps it with much to spare, the prediction is corrected once more. This
repeats for a few rounds. Only a profile that was measured to keep the promise, with the margin that the confidence
asks for, is returned.

The rounds look for the seconds at which the promise just holds, as one looks for a root. Between a profile that kept
the promise and one that missed it, they follow the line through both. An end that stays counts as half as far off
each time, so that the other end moves, too (regula falsi: Dowell and Jarratt 1971, "A modified regula falsi method
for computing the root of an equation"). While all profiles are on one side, layers are taken to be as much slower or
faster than predicted as in the nearest profile. Each further step goes twice as far, until a profile is on the other
side. A line through two profiles of one side would follow their noise.

If no profile kept the promise, the fastest of all is timed in the end. A target that it misses is out of reach. If it
keeps the promise, further rounds start from it.

On a machine whose timings scatter, only a profile much faster than the target keeps the promise with the wanted
probability, and that costs accuracy. So the rounds go on with milder profiles while the best one is above
`MAX_OVERSHOOT` times the target. Each round times all profiles again, so their intervals get narrower.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from latbench.errors import PromiseMissed
from search.knapsack.arrays import Choice, Infeasible
from search.pipeline.search_request import Promise
from search.pipeline.speedup_verdict import MAX_OVERSHOOT
from search.problem.calibration import allow_only_fastest, calibrate, fit_line, ignore_intervals
from search.problem.layers import ROUNDING, Interval
from search.problem.problem import Problem
from search.strategies.evaluation_budget import SearchResult
from search.whole_model.confidence import (
    VERDICT_COVERAGE,
    convert_to_coverage,
    estimate_verdict_width,
    pool_build_spread,
    predict_verified_speedup,
)
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import Session

_LOG = logging.getLogger(__name__)

MAX_SPARE = 0.05
"""A profile that exceeds the target by a larger share gave away accuracy for nothing."""

AIM = 1 + MAX_SPARE / 2
"""Rounds aim at this multiple of the target: half of those that aim at the target itself would miss it."""

ROUNDS = 4

MILDER_ROUNDS = 3
"""Further rounds, at most, for milder profiles."""

NOTED_NOISE = 1.1
"""Above this ratio of a speedup to its lower end, the user is told what the noise costs."""

SearchRound = Callable[[Problem, int, Collection[Choice]], SearchResult]
"""Returns the profile of a problem in round 0, 1, ...; other than those that missed, if there is another. Round 0
needs no search: its profile is the solver's own."""


@dataclass(frozen=True)
class MeasuredSpeedup:
    """A profile that was timed end to end.

    Attributes
    ----------
    speedup
        Its speedup over the dense engine.
    dense
        Seconds of the dense engine in the same rounds.
    dense_engine
        The fastest dense engine.
    """

    speedup: Interval
    dense: Interval
    dense_engine: str

    @property
    def seconds(self) -> Interval:
        """Seconds of the pruned model if the dense one takes `dense.value`: only their ratio is known well."""
        dense = self.dense.value
        return Interval(dense / self.speedup.value, dense / self.speedup.high, dense / self.speedup.low)


TimeProfiles = Callable[[Sequence[Choice]], list[MeasuredSpeedup]]
"""Times profiles side by side, and returns everything that is known of each by then."""


@dataclass(frozen=True)
class PromisedProfile:
    """A profile that was measured to keep the promise.

    Attributes
    ----------
    problem
        The problem, corrected to predict for this profile what was measured.
    found
        The profile, its loss, and how it was found.
    bound
        No profile that keeps the promise in this problem has an error below this.
    measured
        The measured speedup.
    target
        The promised speedup.
    """

    problem: Problem
    found: SearchResult
    bound: float
    measured: MeasuredSpeedup
    target: float


class TargetMissed(PromiseMissed):
    """No measured profile kept the target. `best` is the profile that came nearest, with a promise that it keeps."""

    def __init__(self, sentence: str, best: PromisedProfile | None) -> None:
        super().__init__(sentence)
        self.best = best


def run_speedup_loop(
    problem: Problem,
    search: SearchRound,
    time_profiles: TimeProfiles,
    target: float,
    *,
    before: Mapping[Choice, float] | None = None,
) -> PromisedProfile:
    """Search, time and correct in rounds; return the profile of least loss among those that kept the promise.

    The first profile is the solver's own. It costs no search, and shows the error of predictions where it counts.

    Parameters
    ----------
    problem
        The problem with its predicted seconds.
    search
        Searches one round.
    time_profiles
        Times profiles end to end.
    target
        The speedup to promise.
    before
        Known profile -> its loss. These profiles are timed beside the others.

    Raises
    ------
    Infeasible
        No profile keeps the second budget.
    TargetMissed
        The fastest profile was timed, and missed the target as all others did.
    """
    loop = _SpeedupLoop(problem, search, time_profiles, target, dict(before or {}))
    loop.run_rounds([loop.predicted], 1 + ROUNDS)
    if not loop.kept():
        problems = loop.run_round([allow_only_fastest(ignore_intervals(loop.predicted), target)])
        loop.run_rounds(problems if loop.kept() else [], ROUNDS)
    if not loop.kept():
        raise TargetMissed(_explain_miss(loop.predicted, loop.measured, target), loop.build_best_promise())
    for _ in range(MILDER_ROUNDS):
        if loop.measured[loop.best()].speedup.value <= MAX_OVERSHOOT * target:
            break
        loop.run_round([loop.build_milder_problem()])
    return loop.build_promise(loop.best(), target)


class _SpeedupLoop:
    """The loop while it runs.

    `predicted` is the uncorrected problem, `found` maps profiles to what the search found, `measured` to speedups.
    """

    def __init__(
        self, problem: Problem, search: SearchRound, time_profiles: TimeProfiles, target: float,
        before: Mapping[Choice, float],
    ) -> None:  # fmt: skip
        # Predictions that are too uncertain for a promise may still turn out well: measuring decides.
        self.predicted = problem if _is_feasible(problem.reachable, target) else ignore_intervals(problem)
        self._search, self._time_profiles, self._target, self._before = search, time_profiles, target, before
        self._number = 0
        self.found: dict[Choice, SearchResult] = {}
        self.measured: dict[Choice, MeasuredSpeedup] = {}

    def kept(self) -> list[Choice]:
        """Return the profiles that were measured to keep the promise."""
        return [choice for choice, it in self.measured.items() if it.speedup.low >= self._target]

    def best(self) -> Choice:
        """Return the profile of least loss that was measured to keep the promise."""
        return min(self.kept(), key=lambda choice: self.found[choice].loss)

    def build_milder_problem(self) -> Problem:
        """Return the problem in which profiles reach the target if they are half way from the best one to it."""
        best = self.best()
        measured = self.measured[best]
        half_way = math.sqrt(measured.speedup.value / self._target)
        return _raise_goal(ignore_intervals(calibrate_to(self.predicted, best, measured)), half_way)

    def build_promise(self, choice: Choice, target: float) -> PromisedProfile:
        """Return a measured profile with a promise that it keeps."""
        measured = self.measured[choice]
        final = calibrate_to(self.predicted, choice, measured)
        bound = final.solve(target / (1 + ROUNDING)).bound  # it just fits: no rounding may exclude it
        return PromisedProfile(final, self.found[choice], bound, measured, target)

    def build_best_promise(self) -> PromisedProfile | None:
        """Return the profile of the highest lower end, with that as its promise; None if dense is as fast."""
        fastest = max(self.measured, key=lambda choice: self.measured[choice].speedup.low)
        target = math.floor(100 * self.measured[fastest].speedup.low) / 100
        return self.build_promise(fastest, target) if target > 1 else None

    def run_rounds(self, problems: Sequence[Problem], max_rounds: int) -> None:
        """Run rounds until nothing is left to search, `max_rounds` at most."""
        for _ in range(max_rounds):
            problems = self.run_round(problems) if problems else []

    def run_round(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        """Search the first problem that has a profile, and time it; return the problems of the next round, if any."""
        number, self._number = self._number, self._number + 1
        missed = self.measured.keys() - set(self.kept())
        try:
            found = _search_first(self._search, problems, number, missed)
        except Infeasible:
            if self.measured or number == 0:  # before a target is refused, the fastest profile is timed
                return []
            raise
        if found.choice in missed:
            slower = calibrate_to(self.predicted, found.choice, self.measured[found.choice])
            return [_raise_goal(slower, AIM), slower]
        if found.choice in self.measured:
            if found.out_of_time:  # this search might have found another one
                self.found[found.choice] = replace(self.found[found.choice], out_of_time=True)
            return []
        if not self.measured:
            for choice, loss in self._before.items():
                self.found[choice] = SearchResult(choice, loss, "verified", (), 0.0, False)
        self.found[found.choice] = found
        self.measured.update(zip(self.found, self._time_profiles(list(self.found)), strict=True))
        low = self.measured[found.choice].speedup.low
        if number > 0 and self._target <= low <= self._target * (1 + MAX_SPARE):
            return []
        return [interpolate(self.predicted, self.measured, self._target, aim) for aim in (AIM, 1.0)]


def _search_first(
    search: SearchRound, problems: Sequence[Problem], number: int, missed: Collection[Choice]
) -> SearchResult:
    """Return what the search finds in the first problem that has a profile. Raises Infeasible."""
    for problem in problems[:-1]:
        with contextlib.suppress(Infeasible):
            return search(problem, number, missed)
    return search(problems[-1], number, missed)


def calibrate_to(problem: Problem, choice: Choice, measured: MeasuredSpeedup) -> Problem:
    """Return the problem that predicts for the profile what was measured."""
    return calibrate(problem, choice, measured.seconds, measured.dense, measured.dense_engine)


def interpolate(problem: Problem, measured: Mapping[Choice, MeasuredSpeedup], target: float, aim: float) -> Problem:
    """Return the problem in which profiles reach `target` if they should really reach `aim` times the target.

    The two profiles next to the target, one on each side, decide; only the nearest one if all are on one side.

    Parameters
    ----------
    problem
        The uncorrected problem.
    measured
        The profiles in the order in which they were timed.
    target
        The speedup to promise.
    aim
        Factor, at least 1.
    """
    distance = {choice: math.log(it.speedup.low / target) for choice, it in measured.items()}
    nearest = sorted(distance, key=lambda choice: abs(distance[choice]))
    newest_kept, *earlier = [value >= 0 for value in reversed(distance.values())]
    repeats = next((i for i, kept in enumerate(earlier) if kept is not newest_kept), len(earlier))  # on one side
    if (not newest_kept) in earlier:
        kept, missed = (next(it for it in nearest if (distance[it] >= 0) is side) for side in (True, False))
        dense = measured[kept].dense.value
        least, most = dense / measured[kept].speedup.low, dense / measured[missed].speedup.low
        goal = min(max(dense / (target * aim), least), most)
        if newest_kept:
            most = goal + (most - goal) / 2**repeats
        else:
            least = goal - (goal - least) / 2**repeats
        line = fit_line(problem, {kept: least, missed: most}, goal * target, measured[kept].dense_engine)
        if line is not None:
            return line
        repeats = 0
    choice = nearest[0]
    further = math.exp(distance[choice] * (2**repeats - 1))
    moved = replace(measured[choice], speedup=Interval(*(end * further for end in measured[choice].speedup.ends)))
    return _raise_goal(calibrate_to(problem, choice, moved), aim)


def _raise_goal(problem: Problem, aim: float) -> Problem:
    """Return the problem in which profiles reach a target if they reach `aim` times the target in `problem`."""
    return replace(problem, dense=Interval(*(end / aim for end in problem.dense.ends)))


def _explain_miss(problem: Problem, measured: Mapping[Choice, MeasuredSpeedup], target: float) -> str:
    """Return a sentence: no profile kept the target, the best measured speedup, and what limits it."""
    best = max(measured.values(), key=lambda it: it.speedup.low).speedup
    sentence = (
        f"no measured profile kept {target:g}x: of {len(measured)} profiles timed end to end, the best reached "
        f"{best.value:.2f}x ({best.low:.2f}-{best.high:.2f}x)"
    )
    if target <= best.value:
        sentence += ", and the lower end must reach the target (a lower --confidence narrows the interval)"
    fastest = ignore_intervals(problem).fastest()
    if fastest in measured:
        limits = calibrate_to(problem, fastest, measured[fastest]).describe_remaining_time()
        sentence += f"; it is out of reach: the fastest possible profile was among them{limits}"
    return sentence + "; ask for less, or repeat the search when the machine is quiet"


def is_verdict_clear(speedup: Interval, target: float) -> bool:
    """Return whether the interval of a measured speedup lies on one side of the target."""
    return speedup.low >= target or speedup.high < target


def warn_of_noise(speedup: Interval, promise: Promise) -> None:
    """Warn the user of what the scatter of timings costs, if it is much."""
    noise = speedup.value / speedup.low
    if noise > NOTED_NOISE:
        _LOG.warning(
            f"timings scatter by {noise - 1:.0%}: to keep {promise.target:g}x with probability "
            f"{promise.confidence:g}, {promise.target * noise:.2f}x is aimed at; quieten the machine "
            "(`latbench doctor` says how), or take a lower --confidence"
        )


def warn_of_overshoot(promised: PromisedProfile) -> None:
    """Warn the user where no profile near the target was found, so that accuracy is spent on unwanted speed."""
    value = promised.measured.speedup.value
    if value > MAX_OVERSHOOT * promised.target:
        _LOG.warning(
            f"the profile runs {value:.2f}x faster for a target of {promised.target:g}x, and no milder one that was "
            "measured keeps the target: quieten the machine, or search without --quick (`latbench run --thorough`)"
        )


def _is_feasible(check: Callable[[float], object], target: float) -> bool:
    try:
        check(target)
    except Infeasible:
        return False
    return True


def pool_sessions(sessions: Sequence[Session], name: str, confidence: float) -> MeasuredSpeedup:
    """Return the speedup of a profile by all sessions that timed it.

    In each session, the baseline is the dense engine that was the fastest there, as in the verification.

    Parameters
    ----------
    sessions
        Sessions in the order in which they were timed.
    name
        The profile's name in them.
    confidence
        Probability that a verification does not fall below the lower end of the interval.
    """
    speedups: dict[str, list[list[float]]] = {}
    for session in sessions:
        dense = session.timings.fastest(list(DENSE_ENGINES))
        for profile in session.profiles:
            speedups.setdefault(profile, []).append(session.timings.speedups(profile, dense))
    builds = sum(max(len(set(session.timings.builds)), 1) - 1 for session in sessions)
    spread = pool_build_spread([group for groups in speedups.values() for group in groups], builds)
    latest = next(session.timings for session in reversed(sessions) if name in session.profiles)
    dense = latest.fastest(list(DENSE_ENGINES))
    seconds = latest.seconds(dense, convert_to_coverage(confidence))
    verdict_width = estimate_verdict_width(latest.speedup(name, dense, VERDICT_COVERAGE), len(latest.blocks[name]))
    speedup = predict_verified_speedup(speedups[name], spread, confidence, verdict_width)
    return MeasuredSpeedup(speedup, seconds, dense)
