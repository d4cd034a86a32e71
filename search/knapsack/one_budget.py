"""The exact multiple-choice knapsack on float seconds: one option a layer, least error, never over the budget.

A state is a pair (seconds, error) of the layers so far, summed in layer order with plain float addition. Rounding is
monotone (a <= b implies fl(a + x) <= fl(b + x)), so a state that another beats in both stays beaten whatever follows,
and keeping only the efficient ones loses nothing: the answer is exact for the very sums that a caller forms, from the
first layer to the last, and so is the comparison with the budget.

What keeps the states few: the linear relaxation of the layers still to come bounds every completion from below, the
best profile so far bounds the optimum from above (the ceiling), and a state whose lower bound is above that is
dropped. A first pass over the layers keeps few states and finds a good profile, a second keeps more; each lowers the
ceiling, and the first pass that need not drop a state for lack of room proves the optimum.

Sources: Kellerer, Pferschy, Pisinger 2004, "Knapsack Problems", chapter 11 (relaxation, reduction, Pareto states);
Sinha and Zoltners 1979 (only the lower convex hull of a layer's options matters to the relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search.knapsack.arrays import (
    EPS,
    LEAST_SECONDS,
    BadProblem,
    Choice,
    Floats,
    Infeasible,
    Labels,
    Places,
    Solution,
    is_finite,
    sum_in_order,
)

NARROW = (30, 1000)
"""States a layer of the passes that only lower the ceiling."""


@dataclass(frozen=True)
class Options:
    """The efficient options, one layer after the other; within a layer `seconds` rise and `errors` fall.

    Those of layer l lie from first[l] to first[l + 1]; `layer` says whose each is, `place` where it is in the
    caller's array.
    """

    seconds: Floats
    errors: Floats
    layer: Places
    place: Places
    first: Places

    def only(self, kept: NDArray[np.bool_]) -> Options:
        """Those that are `kept`, at least one a layer."""
        layer = self.layer[kept]
        first = np.searchsorted(layer, np.arange(len(self.first)))
        return Options(self.seconds[kept], self.errors[kept], layer, self.place[kept], first)

    def profile(self, taken: Places) -> tuple[float, float, Choice]:
        """Error, seconds and choice of one option a layer."""
        error, seconds = sum_in_order(self.errors[taken].tolist()), sum_in_order(self.seconds[taken].tolist())
        return error, seconds, tuple(self.place[taken].tolist())


def solve(
    seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike], budget: float, *, max_states: int = 50_000
) -> Solution:
    """The profile of least error that takes at most `budget` seconds; of equal ones the fastest.

    `seconds` (>= 0) and `errors` hold an array a layer, of any lengths. `max_states` bounds time and memory: beyond
    it the least promising states are dropped, and the solution's `bound` says what that may have cost.
    Raises BadProblem for what states no problem, Infeasible when nothing fits.
    """
    from search.knapsack.states import trace_back

    options = efficient_options(seconds, errors)
    if not is_finite(budget):
        raise BadProblem(f"the budget must be a finite number of seconds, not {budget}")
    fastest = sum_in_order(options.seconds[options.first[:-1]].tolist())
    if fastest > budget:
        raise Infeasible(float(budget), fastest)

    relaxation = Relaxation(options)
    spare = Spare(options)
    profiles = [options.profile(greedy(options, relaxation, budget - spare.share * budget))]
    bound = -math.inf
    for width in (*(narrow for narrow in NARROW if narrow < max_states), max_states):
        options, relaxation = contending(options, relaxation, budget, min(profiles)[0], spare)
        spare = Spare(options)  # an option of huge error, which blurs all sums, may be gone
        spent, error, begin, least_dropped = label(options, relaxation, budget, min(profiles)[0], spare, width)
        last = slice(begin[-2], begin[-1])
        fitting = np.flatnonzero(spent[last] <= budget)
        if len(fitting):
            best = begin[-2] + fitting[-1]  # seconds rise and errors fall along the states
            taken = trace_back(
                options.first, options.seconds, options.errors, spent, error, begin, spent[best], error[best]
            )
            profiles.append(options.profile(taken))
        bound = max(bound, least_dropped - spare.error)
        if bound > min(profiles)[0]:  # what was dropped is worse
            break
    total_error, total_seconds, choice = min(profiles)
    return Solution(choice, total_seconds, total_error, min(total_error, bound))


class Spare:
    """Sums of the same numbers in another order differ by rounding: bounds are loosened by the most that can be.

    `share` of a sum of seconds, and `error` absolutely.
    """

    def __init__(self, options: Options) -> None:
        self.share = 4 * (len(options.first) + len(options.seconds)) * EPS
        self.error = self.share * float(np.maximum.reduceat(np.abs(options.errors), options.first[:-1]).sum())


def contending(
    options: Options, relaxation: Relaxation, budget: float, best: float, spare: Spare
) -> tuple[Options, Relaxation]:
    """The options that a profile within `budget` of an error up to `best` can have, and their relaxation.

    With fewer options it has fewer steps, and is a bound as good or better.
    """
    kept = contenders(options, relaxation.price(budget), budget, best + spare.error, spare.share)
    options = options.only(kept)
    return options, Relaxation(options)


def label(options: Options, relaxation: Relaxation, budget: float, best: float, spare: Spare, width: int) -> Labels:
    """`search.knapsack.states.label`'s states that a profile within `budget` of an error up to `best` can have."""
    from search.knapsack.states import label as compiled

    return compiled(
        options.first,
        options.seconds,
        options.errors,
        relaxation.layer,
        relaxation.seconds,
        relaxation.gain,
        relaxation.fastest_seconds,
        relaxation.fastest_error,
        budget + spare.share * budget,
        best + spare.error,
        width,
    )


def efficient_options(seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike]) -> Options:
    """The options that none of their layer beats in both. Raises BadProblem for what states no problem."""
    if len(seconds) != len(errors):
        raise BadProblem(f"seconds are given for {len(seconds)} layers, errors for {len(errors)}")
    if not len(seconds):
        raise BadProblem("there is no layer to choose for")
    layers: list[tuple[Floats, Floats, Places]] = []
    for number, (raw_seconds, raw_errors) in enumerate(zip(seconds, errors, strict=True)):
        try:
            t, e = np.asarray(raw_seconds, np.float64), np.asarray(raw_errors, np.float64)
        except (TypeError, ValueError) as error:
            raise BadProblem(f"layer {number} has seconds or errors that are no numbers: {error}") from error
        if t.ndim != 1 or t.shape != e.shape or not len(t):
            raise BadProblem(
                f"layer {number} has seconds of shape {t.shape} and errors of shape {e.shape}: "
                "both must hold one number an option, and at least one"
            )
        if not (np.isfinite(t).all() and np.isfinite(e).all()):
            raise BadProblem(f"layer {number} has seconds or errors that are NaN or infinite")
        if t.min() < 0:
            raise BadProblem(f"layer {number} has negative seconds: {t.min():.6g}")
        if (smallest := t[t > 0].min(initial=np.inf)) < LEAST_SECONDS:  # slopes between such would not be finite
            raise BadProblem(f"layer {number} has seconds of {smallest:.3g}: at least {LEAST_SECONDS:g}, or 0")
        place = efficient(t, e)
        layers.append((t[place], e[place], place))
    most_seconds = sum(float(t[-1]) for t, _, _ in layers)  # seconds rise and errors fall along efficient options
    most_error = sum(max(abs(float(e[0])), abs(float(e[-1]))) for _, e, _ in layers)
    if not (math.isfinite(most_seconds) and math.isfinite(most_error)):
        raise BadProblem("seconds or errors are so large that their sum is not finite")
    all_seconds, all_errors, all_places = (np.concatenate(arrays) for arrays in zip(*layers, strict=True))
    sizes = [len(place) for _, _, place in layers]
    owner = np.repeat(np.arange(len(layers)), sizes)
    return Options(all_seconds, all_errors, owner, all_places, np.append(0, np.cumsum(sizes)))


def efficient(seconds: Floats, errors: Floats) -> Places:
    """Places of the pairs that none beats in both, by rising seconds, so falling error; of equal pairs the first."""
    order = np.lexsort((errors, seconds))
    ordered = errors[order]
    keep = np.ones(len(order), bool)
    keep[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    return order[keep]


class Relaxation:
    """The linear relaxation: layers may mix options. Its steps, the one that gains most a second first.

    Step i moves `layer[i]` along one edge of its hull, to option `to[i]`: `seconds[i]` more for `gain[i]` less error.
    Entry d of `fastest_seconds` and `fastest_error` sums the fastest options of the layers from d on.
    """

    def __init__(self, options: Options) -> None:
        from search.knapsack.states import lower_hull

        hull = lower_hull(options.seconds, options.errors, options.first)
        owner = options.layer[hull]
        to = np.flatnonzero(owner[1:] == owner[:-1]) + 1
        with np.errstate(over="ignore"):
            seconds = options.seconds[hull[to]] - options.seconds[hull[to - 1]]
            gain = options.errors[hull[to - 1]] - options.errors[hull[to]]
            rate = gain / seconds
        # Along one layer rates fall, and a stable sort keeps its edges in order where rates round to equals.
        order = np.argsort(-rate, kind="stable")
        self.layer, self.seconds, self.gain, self.rate = owner[to][order], seconds[order], gain[order], rate[order]
        self.to = hull[to][order]
        self.fastest_seconds = _sums_from(options.seconds[options.first[:-1]])
        self.fastest_error = _sums_from(options.errors[options.first[:-1]])

    def price(self, budget: float) -> float:
        """What a second is worth at the budget, in error: the rate of the step that does not fit whole."""
        unfit = np.flatnonzero(self.fastest_seconds[0] + np.cumsum(self.seconds) > budget)
        return float(self.rate[unfit[0]]) if len(unfit) else 0.0


def _sums_from(values: Floats) -> Floats:
    """Entry d is the sum of the values from d on; the last entry is 0."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def contenders(options: Options, price: float, budget: float, ceiling: float, share: float) -> NDArray[np.bool_]:
    """The options that a profile with an error up to `ceiling` can have.

    With seconds paid for at any price >= 0, the sum of the layers' least costs, less the budget's price, bounds the
    error from below; an option that costs more than its layer's least raises that bound by the difference.
    """
    begins = options.first[:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        cost = options.errors + price * options.seconds
        least = np.minimum.reduceat(cost, begins)
        floor = least.sum() - price * budget
        spare = share * (np.maximum.reduceat(np.abs(cost), begins).sum() + price * budget)
    if not math.isfinite(spare):  # options a rounding apart in seconds have no price
        return np.ones(len(cost), bool)
    return np.asarray(cost - least[options.layer] <= ceiling - floor + spare)


def greedy(options: Options, relaxation: Relaxation, budget: float) -> Places:
    """A good profile: the relaxation's steps that fit; a layer ends where a step of its own does not fit."""
    choice = options.first[:-1].copy()
    left = budget - float(relaxation.fastest_seconds[0])
    stays: set[int] = set()
    steps = zip(relaxation.layer.tolist(), relaxation.seconds.tolist(), relaxation.to.tolist(), strict=True)
    for layer, seconds, to in steps:
        if layer in stays:
            continue
        if seconds > left:
            stays.add(layer)
            continue
        left -= seconds
        choice[layer] = to
    return choice
