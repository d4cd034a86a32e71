"""Solve the multiple-choice knapsack exactly: one option a layer, least error, within a budget of float seconds.

A state is a pair (seconds, error) of the first layers, summed in layer order with plain float addition. Rounding is
monotone: a <= b implies fl(a + x) <= fl(b + x). So a state that another state beats in both values stays beaten, and
it suffices to keep the efficient ones. The answer is exact for the sums that a caller forms from the first layer to
the last. So is the comparison with the budget.

Two bounds keep the states few. The linear relaxation of the layers to come bounds every completion from below. The
best profile so far bounds the optimum from above (the ceiling). A state whose lower bound exceeds the ceiling is
dropped. Passes over the layers keep ever more states, and each may lower the ceiling. The first pass that need not
drop a state for lack of room proves the optimum.

Sources: Kellerer, Pferschy, Pisinger 2004, "Knapsack Problems", chapter 11 (relaxation, reduction, Pareto states).
Sinha and Zoltners 1979 (only the lower convex hull of a layer's options matters to the relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search.knapsack.arrays import (
    BadProblem,
    FlatOptions,
    Floats,
    Indices,
    Infeasible,
    Relaxation,
    Solution,
    is_finite,
    sum_in_order,
)

if TYPE_CHECKING:
    from search.knapsack.states import StateTable

EPS = float(np.finfo(np.float64).eps)

LEAST_SECONDS = 1e-300
"""Slopes between options of fewer seconds would not be finite."""

FIRST_WIDTHS = (30, 1000)
"""States a layer of the first passes, which only lower the ceiling."""


def solve(
    seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike], budget: float, *, max_states: int = 50_000
) -> Solution:
    """Find the profile of least error that takes at most `budget` seconds; of equal ones the fastest.

    Parameters
    ----------
    seconds
        An array (options,) for each layer: seconds >= 0. Layers may have different numbers of options.
    errors
        Arrays of the same shapes: the error of each option, in any unit.
    budget
        Seconds for all layers together.
    max_states
        States that a layer may keep, which limits time and memory. Beyond it the least promising states are dropped,
        and the solution's `bound` tells what that may have cost.

    Returns
    -------
    Solution
        Choice, seconds, error, and a lower bound of the error.

    Raises
    ------
    BadProblem
        The arrays state no problem.
    Infeasible
        No profile keeps the budget.
    """
    from search.knapsack.states import trace_back

    options = select_efficient_options(seconds, errors)
    if not is_finite(budget):
        raise BadProblem(f"the budget must be a finite number of seconds, not {budget}")
    fastest = sum_in_order(options.seconds[options.first[:-1]].tolist())
    if fastest > budget:
        raise Infeasible(float(budget), fastest)

    relaxation = relax(options)
    margin = RoundingMargin(options)
    profiles = [options.sum_profile(choose_greedily(options, relaxation, budget - margin.share * budget))]
    bound = -math.inf
    for width in (*(first for first in FIRST_WIDTHS if first < max_states), max_states):
        options = select_contenders(options, relaxation, budget, min(profiles)[0], margin)
        relaxation = relax(options)  # with fewer options it has fewer steps, and bounds as well or better
        margin = RoundingMargin(options)  # an option of huge error, which blurs all sums, may be gone
        states, least_dropped = build_states(options, relaxation, budget, min(profiles)[0], margin, width)
        spent, _, begin = states
        fitting = np.flatnonzero(spent[begin[-2] :] <= budget)
        if len(fitting):  # the last one has the least error: seconds rise and errors fall along the states
            profiles.append(options.sum_profile(trace_back(options.arrays, states, begin[-2] + fitting[-1])))
        bound = max(bound, least_dropped - margin.error)
        if bound > min(profiles)[0]:  # everything that was dropped is worse
            break
    total_error, total_seconds, choice = min(profiles)
    return Solution(choice, total_seconds, total_error, min(total_error, bound))


class RoundingMargin:
    """The most that rounding can change: sums of the same numbers in another order differ.

    `share` is relative to a sum of seconds, `error` is absolute. Bounds are loosened by them.
    """

    def __init__(self, options: FlatOptions) -> None:
        self.share = 4 * (len(options.first) + len(options.seconds)) * EPS
        self.error = self.share * float(np.maximum.reduceat(np.abs(options.errors), options.first[:-1]).sum())


def select_contenders(
    options: FlatOptions, relaxation: Relaxation, budget: float, best: float, margin: RoundingMargin
) -> FlatOptions:
    """Return the options that a profile within `budget` with an error up to `best` can have."""
    return options.select(
        find_contenders(options, relaxation.price(budget), budget, best + margin.error, margin.share)
    )


def build_states(
    options: FlatOptions, relaxation: Relaxation, budget: float, best: float, margin: RoundingMargin, width: int
) -> tuple[StateTable, float]:
    """Return the states that a profile within `budget` with an error up to `best` can have.

    At most `width` states a layer are kept. The second value is the least bound of those dropped for that.
    """
    from search.knapsack import states

    horizon, ceiling = budget + margin.share * budget, best + margin.error
    return states.build_states(options.arrays, relaxation.arrays, horizon, ceiling, width)


def select_efficient_options(seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike]) -> FlatOptions:
    """Return the options that no other option of their layer beats in both values.

    Within a layer seconds rise and errors fall. Raises BadProblem for arrays that state no problem.
    """
    if len(seconds) != len(errors):
        raise BadProblem(f"seconds are given for {len(seconds)} layers, errors for {len(errors)}")
    if not len(seconds):
        raise BadProblem("there is no layer to choose for")
    layers: list[tuple[Floats, Floats, Indices]] = []
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
        if (smallest := t[t > 0].min(initial=np.inf)) < LEAST_SECONDS:
            raise BadProblem(f"layer {number} has seconds of {smallest:.3g}: at least {LEAST_SECONDS:g}, or 0")
        index = find_efficient(t, e)
        layers.append((t[index], e[index], index))
    most_seconds = sum(float(t[-1]) for t, _, _ in layers)
    most_error = sum(max(abs(float(e[0])), abs(float(e[-1]))) for _, e, _ in layers)
    if not (math.isfinite(most_seconds) and math.isfinite(most_error)):
        raise BadProblem("seconds or errors are so large that their sum is not finite")
    all_seconds, all_errors, indices = (np.concatenate(arrays) for arrays in zip(*layers, strict=True))
    sizes = [len(index) for _, _, index in layers]
    owner = np.repeat(np.arange(len(layers)), sizes)
    return FlatOptions(all_seconds, all_errors, owner, indices, np.append(0, np.cumsum(sizes)))


def find_efficient(seconds: Floats, errors: Floats) -> Indices:
    """Return the indices of the pairs that no pair beats in both values, by rising seconds; of equal pairs the first.

    Errors fall along them.
    """
    order = np.lexsort((errors, seconds))
    ordered = errors[order]
    keep = np.ones(len(order), bool)
    keep[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    return order[keep]


def relax(options: FlatOptions) -> Relaxation:
    """Return the linear relaxation of efficient options."""
    from search.knapsack.states import find_lower_hull

    hull = find_lower_hull(options.seconds, options.errors, options.first)
    owner = options.layer[hull]
    to = np.flatnonzero(owner[1:] == owner[:-1]) + 1
    with np.errstate(over="ignore"):
        seconds = options.seconds[hull[to]] - options.seconds[hull[to - 1]]
        gain = options.errors[hull[to - 1]] - options.errors[hull[to]]
        rate = gain / seconds
    # Rates fall along a layer; a stable sort keeps its edges in order where rates round to equal numbers.
    order = np.argsort(-rate, kind="stable")
    fastest = options.first[:-1]
    return Relaxation(
        owner[to][order], seconds[order], gain[order], rate[order], hull[to][order],
        _sum_to_end(options.seconds[fastest]), _sum_to_end(options.errors[fastest]),
    )  # fmt: skip


def _sum_to_end(values: Floats) -> Floats:
    """Return the sums of the values from each index on; the last entry is 0."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def find_contenders(
    options: FlatOptions, price: float, budget: float, ceiling: float, share: float
) -> NDArray[np.bool_]:
    """Return which options a profile with an error up to `ceiling` can have.

    The price of a second, >= 0, turns seconds into error. The sum of the layers' least costs, minus the price of the
    budget, bounds the error from below. An option that costs more than its layer's least raises that bound by the
    difference.
    """
    begins = options.first[:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        cost = options.errors + price * options.seconds
        least = np.minimum.reduceat(cost, begins)
        floor = least.sum() - price * budget
        margin = share * (np.maximum.reduceat(np.abs(cost), begins).sum() + price * budget)
    if not math.isfinite(margin):  # options whose seconds differ by a rounding have no price
        return np.ones(len(cost), bool)
    return np.asarray(cost - least[options.layer] <= ceiling - floor + margin)


def choose_greedily(options: FlatOptions, relaxation: Relaxation, budget: float) -> Indices:
    """Return a good profile: the relaxation's steps that fit. A layer stops at its first step that does not fit."""
    choice = options.first[:-1].copy()
    left = budget - float(relaxation.fastest_seconds[0])
    stopped: set[int] = set()
    steps = zip(relaxation.layer.tolist(), relaxation.seconds.tolist(), relaxation.to.tolist(), strict=True)
    for layer, seconds, to in steps:
        if layer in stopped:
            continue
        if seconds > left:
            stopped.add(layer)
            continue
        left -= seconds
        choice[layer] = to
    return choice
