"""The fastest profile that loses at most so much of the task's score (`latbench search --max-drop`).

A search has a target, and the least loss at it. So the target itself is searched: pruned models at predicted speedups
are stitched from the database and scored, and the highest target whose score is good enough is found by bisection.
Then the search proper measures a profile for it. A profile that lost too much after all lowers the target.

The score is computed on the task's held-out data, once for each step. That data takes part in the choice of one
number, so a score that decides about a release should come from other data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from latbench.errors import PromiseMissed, UsageError
from search.artifacts.profile import Profile
from search.knapsack.arrays import Infeasible
from search.pipeline import search_job
from search.pipeline.profile_scorer import ProfileScorer
from search.pipeline.search_job import NearestProfile
from search.pipeline.search_request import SearchInputs, SearchRequest
from search.pipeline.search_setup import set_up_search
from search.problem.calibration import ignore_intervals
from search.progress import Progress
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.whole_model.end_to_end import ModelTimer

STEPS = 6
"""Targets of the bisection: the last ones differ by a few per cent."""

ROUGH_EVALUATIONS = 60
"""Profiles that are tried at each of these targets, at most: the search proper tries more at the last one."""

LEAST_TARGET = 1.05

BACKOFF = 0.95
"""Factor of the target, at most, after a profile that lost too much. Each further one is the square of the last."""

MOST_SEARCHES = 5
"""The last target is then less than half of the first."""


@dataclass(frozen=True)
class AllowedDrop:
    """How much of a score may be lost: a share of it, or a difference.

    Attributes
    ----------
    value
        Positive number.
    relative
        Whether it is a share of the dense score.
    """

    value: float
    relative: bool

    def least(self, dense: float) -> float:
        """Return the least score that is allowed beside a dense score."""
        return dense - self.value * (abs(dense) if self.relative else 1.0)


def parse_drop(text: str) -> AllowedDrop:
    """Return the drop of a text: `1%` of the dense score, or `0.01` in the units of the score. Raises UsageError."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--max-drop takes a share such as 1%, or a difference of scores such as 0.01, not {text!r}")
    return AllowedDrop(float(found[1]) / (100 if found[2] else 1), bool(found[2]))


def search_fastest(
    inputs: SearchInputs,
    request: SearchRequest,
    drop: AllowedDrop,
    *,
    timer: ModelTimer,
    progress: Progress = lambda what, done, total: None,
) -> Profile:
    """Find the fastest profile whose score drops at most so far, measured to keep its speedup.

    Parameters
    ----------
    inputs, request
        As of `search_job.search`; the target of the request does not count.
    drop
        The allowed drop of the score.
    timer
        Times whole models.
    progress
        Called with the current step.

    Raises
    ------
    PromiseMissed
        No profile that is faster than dense keeps the score, or what `search_job.search` raises.
    """
    # Options for any speedup are needed, not only those near one target.
    request = replace(request, plan=replace(request.plan, quick=False))
    scorer = ProfileScorer(inputs)
    least = drop.least(scorer.dense)
    setup = set_up_search(inputs, with_target(request, LEAST_TARGET), timer, progress=progress)
    problem = ignore_intervals(setup.problem)

    def is_good(target: float) -> bool:
        plan = request.plan
        settings = StrategySettings("staged", min(plan.evaluations, ROUGH_EVALUATIONS), plan.seed, plan.batches)
        found = run_strategy(settings, problem, target, setup.evaluator, progress=progress)
        progress(f"scoring a profile of {target:.2f}x", None, None)
        return math.isfinite(found.loss) and scorer.score(problem, found.choice) >= least

    with setup.evaluator:
        target = find_largest(is_good, LEAST_TARGET, problem.speedup(problem.predict(problem.fastest())).value)
    if target is None:
        raise PromiseMissed(
            f"no profile of {LEAST_TARGET:g}x keeps a {inputs.task.score_name} of {least:.4g} (dense has "
            f"{scorer.dense:.4g}): allow a larger drop, or prune with training (`latbench prune --recipe`)"
        )
    good = target
    for failures in range(MOST_SEARCHES):
        found = _search_nearest(inputs, with_target(request, target), timer, progress)
        progress(f"scoring the profile of {found.target:.2f}x", None, None)
        if scorer.score_options(found.options) >= least:
            return found
        if target <= LEAST_TARGET:
            break
        target = lower_target(found.target, good, problem.selection(found.options).speedup.value, failures)
    raise PromiseMissed(
        f"no measured profile keeps a {inputs.task.score_name} of {least:.4g} (dense has {scorer.dense:.4g}): the "
        f"last one was promised {found.target:g}x; allow a larger drop"
    )


def with_target(request: SearchRequest, target: float) -> SearchRequest:
    """Return the request with another target."""
    return replace(request, promise=replace(request.promise, target=round(target, 3)))


def find_largest(is_good: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the largest value found by bisection, in the logarithm, for which `is_good`; None if `low` is not.

    Parameters
    ----------
    is_good
        Is true up to some value, and false above. Raises Infeasible where it is undefined, which counts as false.
    low, high
        Where to look.
    """

    def holds(value: float) -> bool:
        try:
            return is_good(value)
        except Infeasible:
            return False

    if high < low or not holds(low):
        return None
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def lower_target(target: float, good: float, predicted: float, failures: int) -> float:
    """Return the next target after a profile that lost too much.

    A whole model may gain less than its layers promise: what was predicted for the profile tells how much less.

    Parameters
    ----------
    target
        The target that the profile was measured to keep.
    good
        The largest predicted speedup with a good score.
    predicted
        The predicted speedup of this profile.
    failures
        Profiles before it that lost too much.
    """
    return max(target * min(BACKOFF ** (1 << failures), good / predicted), LEAST_TARGET)


def _search_nearest(inputs: SearchInputs, request: SearchRequest, timer: ModelTimer, progress: Progress) -> Profile:
    """Return the profile of a search; of one whose target is out of reach the nearest one."""
    try:
        return search_job.search(inputs, request, timer=timer, progress=progress)
    except NearestProfile as error:
        return error.profile
