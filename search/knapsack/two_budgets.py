"""Solve the multiple-choice knapsack under two budgets: seconds, and for example bytes or another device's seconds.

The second budget is priced into the errors (Lagrange). For any price >= 0, take the exact optimum of `solve` with
errors + price x other, minus the price of that budget: it bounds the error from below. The search for the best price
follows the lines of the lower envelope, one `solve` a line. States (seconds, other, error) of the first layers close
the gap that is left, as in `solve`. A state is dropped where another beats it in all three values, and where its
bound exceeds the best known profile.

Source: Kellerer, Pferschy, Pisinger 2004, "Knapsack Problems", sections 9.2 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search.knapsack.arrays import (
    BadProblem,
    Choice,
    FlatOptions,
    Floats,
    Indices,
    Infeasible,
    Relaxation,
    Solution,
    sum_in_order,
)
from search.knapsack.one_budget import (
    FIRST_WIDTHS,
    RoundingMargin,
    find_contenders,
    relax,
    select_efficient_options,
    solve,
)

Arrays = list[Floats]

MOST_PRICES = 60
"""Prices to try at most. Each is the best for the two profiles around it, so few are needed."""


def solve_two(
    seconds: Sequence[ArrayLike],
    errors: Sequence[ArrayLike],
    budget: float,
    other: Sequence[ArrayLike],
    other_budget: float,
    *,
    max_states: int = 20_000,
) -> Solution:
    """Find the profile of least error that keeps both budgets; of equal ones the fastest.

    Parameters
    ----------
    seconds
        An array (options,) for each layer: seconds >= 0.
    errors
        Arrays of the same shapes: the error of each option, in any unit.
    budget, other_budget
        Seconds, and the amount of the other budget, for all layers together.
    other
        Arrays of the same shapes: the amount >= 0 that each option takes of the other budget, in any unit.
    max_states
        States that a layer may keep, which limits time and memory.

    Returns
    -------
    Solution
        Sums in layer order. Its `bound` equals its error unless a layer needed more than `max_states` states.

    Raises
    ------
    BadProblem
        The arrays state no problem.
    Infeasible
        No profile keeps both budgets.
    """
    select_efficient_options(seconds, errors)
    try:
        select_efficient_options(other, seconds)
    except BadProblem as error:
        raise BadProblem(f"the other budget (its amounts in place of seconds): {error}") from error
    if not math.isfinite(other_budget):
        raise BadProblem(f"the other budget must be a finite number, not {other_budget}")
    t, e, o = ([np.asarray(layer, np.float64) for layer in arrays] for arrays in (seconds, errors, other))
    problem = _TwoBudgetProblem(t, e, o, float(budget), float(other_budget))
    free = solve(t, e, budget)
    if problem.fits(free.choice):
        return free
    least = solve(t, o, budget)
    if least.error > other_budget:
        if least.bound <= other_budget:
            raise BadProblem("the solver could not settle whether a profile keeps both budgets: too many come close")
        raise Infeasible(
            float(budget),
            least.seconds,
            f"no profile within {budget:.6g} s keeps the other budget of {other_budget:.6g}: "
            f"the least that one takes is {least.error:.6g}",
        )
    return problem.solve(free, least, max_states)


@dataclass(frozen=True)
class _TwoBudgetProblem:
    """Both budgets, and the arrays of all layers."""

    seconds: Arrays
    errors: Arrays
    other: Arrays
    budget: float
    other_budget: float

    def sums(self, choice: Choice) -> tuple[float, float, Choice]:
        """Return error, seconds and the choice itself."""
        return _total(self.errors, choice), _total(self.seconds, choice), choice

    def fits(self, choice: Choice) -> bool:
        """Return whether a profile keeps both budgets."""
        return _total(self.seconds, choice) <= self.budget and _total(self.other, choice) <= self.other_budget

    def priced(self, price: float) -> Arrays:
        """Return the errors plus the price of the other budget."""
        return [e + price * o for e, o in zip(self.errors, self.other, strict=True)]

    def solve(self, over: Solution, within: Solution, max_states: int) -> Solution:
        """Return the solution, given the optima that break (`over`) and keep (`within`) the other budget."""
        price, bound, found = self.find_best_price(over, within)
        best = min(self.sums(choice) for choice in found)
        for width in (*(first for first in FIRST_WIDTHS if first < max_states), max_states):
            more, dropped = self.search_states(price, best[0], width)
            best = min([best, *(self.sums(choice) for choice in more)])
            bound = max(bound, dropped)
            if bound > best[0]:
                break
        return Solution(best[2], best[1], best[0], min(best[0], bound))

    @property
    def share(self) -> float:
        """`RoundingMargin.share` of all options."""
        return RoundingMargin(_flatten(self.seconds, self.errors)).share

    def rounding_margin(self, price: float, error: float) -> float:
        """Return the most that rounding can change in the sums of a profile with an error up to `error`.

        The profile keeps the other budget.
        """
        negative = sum(max(0.0, -float(layer.min())) for layer in self.errors)
        return self.share * (error + 2 * negative + price * self.other_budget)  # of the absolute values

    def find_best_price(self, over: Solution, within: Solution) -> tuple[float, float, list[Choice]]:
        """Return the price of the highest bound, that bound, and the profiles on the way that keep both budgets.

        `over` breaks the other budget, `within` keeps it. Each trial uses the price at which both cost the same.
        Either a profile costs less there and replaces one of them, or the bound cannot rise any further.
        """
        price, bound, fitting = 0.0, over.bound, [within.choice]
        a, b = over.choice, within.choice
        most = sum_in_order(layer.max() for layer in self.other) + self.other_budget
        for _ in range(MOST_PRICES):
            gain = _total(self.errors, b) - _total(self.errors, a)
            weight = _total(self.other, a) - _total(self.other, b)
            if not (gain > 0 and weight > 0 and math.isfinite(gain / weight * most)):
                break
            here = gain / weight
            solution = solve(self.seconds, self.priced(here), self.budget)
            margin = self.rounding_margin(here, _total(self.errors, b))
            proven = solution.bound - here * self.other_budget - margin
            if proven > bound:
                price, bound = here, proven
            if self.fits(solution.choice):
                fitting.append(solution.choice)
            if solution.choice in (a, b) or solution.error >= _total(self.priced(here), a) - margin:
                break
            a, b = (a, solution.choice) if self.fits(solution.choice) else (solution.choice, b)
        return price, bound, fitting

    def search_states(self, price: float, best: float, width: int) -> tuple[list[Choice], float]:
        """Return the best profile among at most `width` states a layer, if any fits, and the least bound dropped."""
        from search.knapsack.states import MOST_STATES, find_efficient_in_three

        indices, relaxation, share, margin = self._select_contenders(price, best)
        ceiling = best + price * self.other_budget + margin
        t, e, o = (_take(arrays, indices) for arrays in (self.seconds, self.errors, self.other))
        least_other = np.append(np.cumsum([layer.min() for layer in o][::-1])[::-1], 0.0)
        spent, used, error = np.zeros(1), np.zeros(1), np.zeros(1)
        steps: list[tuple[Indices, Indices]] = []
        dropped = math.inf
        for depth in range(1, len(t) + 1):
            spent, used, error = (
                np.add.outer(old, new[depth - 1]).ravel() for old, new in ((spent, t), (used, o), (error, e))
            )
            left = self.budget * (1 + share) - spent
            bound = error + price * used + bound_remaining_error(relaxation, depth, left)
            fits = used + least_other[depth] <= self.other_budget * (1 + share)
            keep = np.flatnonzero((bound <= ceiling) & fits)
            keep, least = _select_most_promising(keep, bound, max(4 * width, MOST_STATES))
            keep = keep[np.lexsort((error[keep], used[keep], spent[keep]))]
            keep = keep[find_efficient_in_three(spent[keep], used[keep], error[keep])]
            keep, less = _select_most_promising(keep, bound, width)
            dropped = min(dropped, min(least, less) - price * self.other_budget - margin)
            steps.append((keep // len(t[depth - 1]), keep % len(t[depth - 1])))
            spent, used, error = spent[keep], used[keep], error[keep]
        fitting = np.flatnonzero((spent <= self.budget) & (used <= self.other_budget))
        if not len(fitting):
            return [], dropped
        state = int(fitting[np.lexsort((spent[fitting], error[fitting]))[0]])
        choice = []
        for (parent, option), index in zip(reversed(steps), reversed(indices), strict=True):
            choice.append(int(index[option[state]]))
            state = int(parent[state])
        return [tuple(reversed(choice))], dropped

    def _select_contenders(self, price: float, best: float) -> tuple[list[Indices], Relaxation, float, float]:
        """Return the options of a profile with an error up to `best`, their relaxation, and both rounding margins.

        The margins are relative to seconds and absolute in error. Each round leaves out the options of huge error
        that blurred the sums of the round before.
        """
        arrays = self.seconds, self.errors, self.other, self.priced(price)
        indices = [np.arange(len(layer)) for layer in self.seconds]
        while True:
            t, e, o, p = (_take(layers, indices) for layers in arrays)
            every, relaxation = _flatten(t, p), relax(select_efficient_options(t, p))
            share = RoundingMargin(every).share
            largest = sum(float((np.abs(errors) + price * other).max()) for errors, other in zip(e, o, strict=True))
            margin = share * (largest + price * self.other_budget)
            ceiling = best + price * self.other_budget + margin
            kept = find_contenders(every, relaxation.price(self.budget), self.budget, ceiling, share)
            if kept.all():
                return indices, relaxation, share, margin
            indices = [index[kept[every.layer == i]] for i, index in enumerate(indices)]


def bound_remaining_error(relaxation: Relaxation, depth: int, seconds_left: Floats) -> Floats:
    """Return the least error of layers `depth`, `depth` + 1, ... within `seconds_left`; inf where they do not fit."""
    remaining = relaxation.layer >= depth
    seconds = np.cumsum(np.append(relaxation.fastest_seconds[depth], relaxation.seconds[remaining]))
    error = np.cumsum(np.append(relaxation.fastest_error[depth], -relaxation.gain[remaining]))
    return np.asarray(np.interp(seconds_left, seconds, error, left=math.inf), np.float64)


def _take(layers: Arrays, indices: Sequence[Indices]) -> Arrays:
    """Return these entries of each layer's array."""
    return [layer[index] for layer, index in zip(layers, indices, strict=True)]


def _select_most_promising(states: Indices, bound: Floats, width: int) -> tuple[Indices, float]:
    """Return the `width` states of least bound, and the least bound of the others."""
    if len(states) <= width:
        return states, math.inf
    ranked = states[np.argpartition(bound[states], width)]
    return np.sort(ranked[:width]), float(bound[ranked[width]])


def _flatten(seconds: Arrays, errors: Arrays) -> FlatOptions:
    """Return all options: under two budgets an option that is slower and worse may still be the lightest."""
    sizes = [len(layer) for layer in seconds]
    index: NDArray[np.intp] = np.concatenate([np.arange(size) for size in sizes])
    first = np.append(0, np.cumsum(sizes))
    layer = np.repeat(np.arange(len(sizes)), sizes)
    return FlatOptions(np.concatenate(seconds), np.concatenate(errors), layer, index, first)


def _total(values: Arrays, choice: Choice) -> float:
    """Return the sum over the layers in layer order."""
    return sum_in_order(layer[option] for layer, option in zip(values, choice, strict=True))
