"""The multiple-choice knapsack under two budgets: seconds, and bytes of weights or a second device's seconds.

The second budget is priced into the errors (Lagrange): for any price >= 0, the exact optimum of `solve` with errors +
price x other, less the price of that budget, bounds the error from below. The best price is found by following the
lower envelope's lines, one `solve` a line. The gap that is left is closed by states (seconds, other, error) of the
layers so far, as in `solve`: those that another beats in all three are dropped, and those whose bound is above the
best profile known.

Source: Kellerer, Pferschy, Pisinger 2004, "Knapsack Problems", sections 9.2 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search.knapsack.arrays import BadProblem, Choice, Floats, Infeasible, Places, Solution, sum_in_order
from search.knapsack.one_budget import NARROW, Options, Relaxation, Spare, contenders, efficient_options, solve

Arrays = list[Floats]

PRICES = 60
"""At most so many prices are tried; each is the best for the two profiles around it, and few are needed."""


def solve_two(
    seconds: Sequence[ArrayLike],
    errors: Sequence[ArrayLike],
    budget: float,
    other: Sequence[ArrayLike],
    other_budget: float,
    *,
    max_states: int = 20_000,
) -> Solution:
    """The profile of least error within `budget` seconds and `other_budget` of the other; of equal ones the fastest.

    `seconds`, `errors` and `other` (>= 0, any unit) hold an array a layer; all sums are in layer order. No profile
    that keeps both budgets has an error below the solution's `bound`, which equals its error where the optimum is
    proven and is less where more than `max_states` states a layer would have been needed.
    Raises BadProblem for what states no problem, Infeasible when nothing keeps both budgets.
    """
    efficient_options(seconds, errors)
    try:
        efficient_options(other, seconds)
    except BadProblem as error:
        raise BadProblem(f"of the other budget, in its own unit for seconds: {error}") from error
    if not math.isfinite(other_budget):
        raise BadProblem(f"the other budget must be a finite number, not {other_budget}")
    t, e, o = ([np.asarray(layer, np.float64) for layer in arrays] for arrays in (seconds, errors, other))
    problem = _Two(t, e, o, float(budget), float(other_budget))
    free = solve(t, e, budget)
    if problem.fits(free.choice):
        return free
    least = solve(t, o, budget)
    if least.error > other_budget:
        if least.bound <= other_budget:
            raise BadProblem("whether a profile keeps both budgets was not settled: too many come close")
        raise Infeasible(
            float(budget),
            least.seconds,
            f"no profile within {budget:.6g} s keeps the other budget of {other_budget:.6g}: "
            f"the least that one takes is {least.error:.6g}",
        )
    price, bound, found = problem.best_price(free, least)
    best = min(problem.sums(choice) for choice in found)
    for width in (*(narrow for narrow in NARROW if narrow < max_states), max_states):
        more, dropped = problem.states(price, best[0], width)
        best = min([best, *(problem.sums(choice) for choice in more)])
        bound = max(bound, dropped)
        if bound > best[0]:
            break
    return Solution(best[2], best[1], best[0], min(best[0], bound))


@dataclass(frozen=True)
class _Two:
    """Both budgets and an array a layer of each kind."""

    seconds: Arrays
    errors: Arrays
    other: Arrays
    budget: float
    other_budget: float

    def sums(self, choice: Choice) -> tuple[float, float, Choice]:
        """Error, seconds and the choice itself."""
        return _total(self.errors, choice), _total(self.seconds, choice), choice

    def fits(self, choice: Choice) -> bool:
        """Whether both budgets are kept."""
        return _total(self.seconds, choice) <= self.budget and _total(self.other, choice) <= self.other_budget

    def priced(self, price: float) -> Arrays:
        """Errors, with the other paid for."""
        return [e + price * o for e, o in zip(self.errors, self.other, strict=True)]

    @property
    def share(self) -> float:
        """`Spare.share` of all options."""
        return Spare(_all_options(self.seconds, self.errors)).share

    def spare(self, price: float, error: float) -> float:
        """What rounding can do to the sums of a profile that keeps the other budget, with an error up to `error`."""
        negative = sum(max(0.0, -float(layer.min())) for layer in self.errors)
        return self.share * (error + 2 * negative + price * self.other_budget)  # its numbers without their signs

    def best_price(self, over: Solution, within: Solution) -> tuple[float, float, list[Choice]]:
        """The price whose bound is highest, that bound, and the profiles met that keep both budgets.

        `over` breaks the other budget, `within` keeps it. The price at which both cost the same is tried: either a
        profile costs less there and replaces one of them, or the bound can rise no further.
        """
        price, bound, fitting = 0.0, over.bound, [within.choice]
        a, b = over.choice, within.choice
        most = sum_in_order(layer.max() for layer in self.other) + self.other_budget
        for _ in range(PRICES):
            gain = _total(self.errors, b) - _total(self.errors, a)
            weight = _total(self.other, a) - _total(self.other, b)
            if not (gain > 0 and weight > 0 and math.isfinite(gain / weight * most)):
                break
            here = gain / weight
            solution = solve(self.seconds, self.priced(here), self.budget)
            spare = self.spare(here, _total(self.errors, b))
            proven = solution.bound - here * self.other_budget - spare
            if proven > bound:
                price, bound = here, proven
            if self.fits(solution.choice):
                fitting.append(solution.choice)
            if solution.choice in (a, b) or solution.error >= _total(self.priced(here), a) - spare:
                break
            a, b = (a, solution.choice) if self.fits(solution.choice) else (solution.choice, b)
        return price, bound, fitting

    def states(self, price: float, best: float, width: int) -> tuple[list[Choice], float]:
        """The best profile among the states that bounds leave, if any fits, and the least bound of those dropped."""
        from search.knapsack.states import ROOM, efficient_in_three

        arrays = self.seconds, self.errors, self.other, self.priced(price)
        places = [np.arange(len(layer)) for layer in self.seconds]
        while True:  # each time without the options of huge error that blurred the sums before
            t, e, o, p = ([layer[here] for layer, here in zip(of, places, strict=True)] for of in arrays)
            every, relaxation = _all_options(t, p), Relaxation(efficient_options(t, p))
            share = Spare(every).share
            largest = sum(float((np.abs(errors) + price * other).max()) for errors, other in zip(e, o, strict=True))
            spare = share * (largest + price * self.other_budget)
            ceiling = best + price * self.other_budget + spare
            kept = contenders(every, relaxation.price(self.budget), self.budget, ceiling, share)
            if kept.all():
                break
            places = [here[kept[every.layer == i]] for i, here in enumerate(places)]
        least_other = np.append(np.cumsum([layer.min() for layer in o][::-1])[::-1], 0.0)
        spent, used, error = np.zeros(1), np.zeros(1), np.zeros(1)
        came: list[tuple[Places, Places]] = []
        dropped = math.inf
        for depth in range(1, len(t) + 1):
            spent, used, error = (
                np.add.outer(old, new[depth - 1]).ravel() for old, new in ((spent, t), (used, o), (error, e))
            )
            left = self.budget * (1 + share) - spent
            bound = error + price * used + error_after(relaxation, depth, left)
            enough = used + least_other[depth] <= self.other_budget * (1 + share)
            keep = np.flatnonzero((bound <= ceiling) & enough)
            keep, least = _promising(keep, bound, max(4 * width, ROOM))
            keep = keep[np.lexsort((error[keep], used[keep], spent[keep]))]
            keep = keep[efficient_in_three(spent[keep], used[keep], error[keep])]
            keep, less = _promising(keep, bound, width)
            dropped = min(dropped, min(least, less) - price * self.other_budget - spare)
            came.append((keep // len(t[depth - 1]), keep % len(t[depth - 1])))
            spent, used, error = spent[keep], used[keep], error[keep]
        fitting = np.flatnonzero((spent <= self.budget) & (used <= self.other_budget))
        if not len(fitting):
            return [], dropped
        state = int(fitting[np.lexsort((spent[fitting], error[fitting]))[0]])
        choice = []
        for (parent, option), here in zip(reversed(came), reversed(places), strict=True):
            choice.append(int(here[option[state]]))
            state = int(parent[state])
        return [tuple(reversed(choice))], dropped


def error_after(relaxation: Relaxation, depth: int, seconds_left: Floats) -> Floats:
    """The least error of layers `depth`, `depth` + 1, ... within `seconds_left`; inf where they do not fit."""
    open_ = relaxation.layer >= depth
    seconds = np.cumsum(np.append(relaxation.fastest_seconds[depth], relaxation.seconds[open_]))
    error = np.cumsum(np.append(relaxation.fastest_error[depth], -relaxation.gain[open_]))
    return np.interp(seconds_left, seconds, error, left=math.inf)


def _promising(states: Places, bound: Floats, width: int) -> tuple[Places, float]:
    """The `width` states of least bound, and the least bound of the others."""
    if len(states) <= width:
        return states, math.inf
    ranked = states[np.argpartition(bound[states], width)]
    return np.sort(ranked[:width]), float(bound[ranked[width]])


def _all_options(seconds: Arrays, errors: Arrays) -> Options:
    """Every option, beaten or not: under two budgets one that is slower and worse may still be the lighter."""
    sizes = [len(layer) for layer in seconds]
    place: NDArray[np.intp] = np.concatenate([np.arange(size) for size in sizes])
    first = np.append(0, np.cumsum(sizes))
    return Options(
        np.concatenate(seconds), np.concatenate(errors), np.repeat(np.arange(len(sizes)), sizes), place, first
    )


def _total(values: Arrays, choice: Choice) -> float:
    return sum_in_order(layer[option] for layer, option in zip(values, choice, strict=True))
