"""Find the profile of least error whose seconds keep a budget with a given probability.

An option takes `seconds`, and with that probability at most its `deviation` more. Deviations of different layers are
independent: they add up like standard deviations, together with one that all profiles share. So a profile must keep

    sum of seconds + sqrt(shared^2 + sum of deviation^2) <= budget

which is not a sum over layers. But a square root lies below its tangents: for every s > 0, sqrt(v) <= v / (2 s) +
s / 2, with equality where s^2 = v. With the right side it becomes a knapsack for `solve`, and every solution keeps
the budget. The search for the best s goes cell by cell. Within a cell the tangent is only slightly too high, and the
difference gives a lower bound of the optimum.

Source: the tangents are those of conic chance constraints (Ben-Tal, El Ghaoui, Nemirovski 2009, "Robust
Optimization", section 2).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from search.knapsack.arrays import BadProblem, Choice, Floats, Infeasible, Solution, sum_in_order
from search.knapsack.one_budget import solve
from search.problem.layers import Interval, LayerOptions
from search.problem.problem import Problem

CELL_RATIO = 1.25
"""Upper by lower end of a cell: the tangent is at most 0.7% of s too high in it."""

LEAST_SHARE = 1e-3
"""The least deviation that differs from none, as a share of the largest."""

UNDERFLOW = 1e-150
"""Deviations whose squares are too small to differ from zero."""

POLISHES = 4
ROUNDING = 1e-12


def compute_upper_seconds(
    seconds: Sequence[Floats], deviations: Sequence[Floats], choice: Sequence[int], shared: float = 0.0
) -> float:
    """Return the seconds that a profile does not exceed with the given probability."""
    squares = sum_in_order(d[j] * d[j] for d, j in zip(deviations, choice, strict=True))
    return sum_in_order(t[j] for t, j in zip(seconds, choice, strict=True)) + math.sqrt(shared * shared + squares)


def build_tangent(
    seconds: Sequence[Floats], deviations: Sequence[Floats], budget: float, shared: float, at: float
) -> tuple[list[Floats], float]:
    """Return seconds of the options and a budget: a profile whose sum keeps this budget keeps `budget` too."""
    return (
        [t + d * d / (2 * at) for t, d in zip(seconds, deviations, strict=True)],
        budget - at / 2 - shared * shared / (2 * at),
    )


class _Profile(NamedTuple):
    """Sums of a profile; `deviation` combines those of its layers with the shared one."""

    error: float
    seconds: float
    choice: Choice
    deviation: float


@dataclass(frozen=True)
class _ChanceProblem:
    """Arrays of all layers, the budget, and the deviation that all profiles share."""

    seconds: list[Floats]
    deviations: list[Floats]
    errors: Sequence[ArrayLike]
    budget: float
    shared: float

    def build_tangent(self, at: float) -> tuple[list[Floats], float]:
        """Return the seconds and the budget of a tangent."""
        return build_tangent(self.seconds, self.deviations, self.budget, self.shared, at)

    def compute_upper_seconds(self, choice: Choice) -> float:
        """Return the seconds that a profile does not exceed with the given probability."""
        return compute_upper_seconds(self.seconds, self.deviations, choice, self.shared)

    def sum_profile(self, choice: Choice) -> _Profile:
        """Return the sums of a profile."""
        error = sum_in_order(np.asarray(e, np.float64)[j] for e, j in zip(self.errors, choice, strict=True))
        spent = sum_in_order(t[j] for t, j in zip(self.seconds, choice, strict=True))
        own = (float(d[j]) for d, j in zip(self.deviations, choice, strict=True))
        return _Profile(error, spent, choice, math.hypot(self.shared, *own))

    def solve(self, seconds: Sequence[Floats], budget: float) -> Solution | None:
        """Return the solution for other seconds and another budget, None where no profile keeps it."""
        try:
            return solve(seconds, self.errors, budget)
        except Infeasible:
            return None

    def polish(self, best: _Profile) -> _Profile:
        """Return the profile, or a better one that the tangents at its deviation lead to."""
        for _ in range(POLISHES if best.deviation > UNDERFLOW else 0):
            solution = self.solve(*self.build_tangent(best.deviation))
            if solution is None:  # by a rounding: the best itself lies on the tangent
                break
            better = self.sum_profile(solution.choice)
            if not better < best or self.compute_upper_seconds(better.choice) > self.budget:
                break
            best = better
        return best


class _CellSearch:
    """Solves the tangents of cells; keeps the profiles that fit, and lower bounds of the error."""

    def __init__(self, problem: _ChanceProblem, smallest: float) -> None:
        self._problem, self._smallest = problem, smallest
        self.fitting: list[_Profile] = []
        self.bounds: list[float] = []
        self.fastest_seconds = math.inf

    def search(self, low: float, high: float) -> None:
        """Search profiles with a deviation from `low` to `high`."""
        problem = self._problem
        s = max(self._smallest, math.sqrt(low * high))
        seconds, budget = problem.build_tangent(s)
        self._solve(seconds, budget)
        # Every profile that deviates by so much, and keeps the budget, keeps this larger one on the tangent.
        too_high = max((end - s) ** 2 for end in (low, high)) / (2 * s)
        relaxed = self._solve(seconds, budget + too_high + ROUNDING * abs(problem.budget))
        if relaxed is not None:
            self.bounds.append(relaxed.bound)
        for _ in range(POLISHES):  # the fastest profile nearby: its own tangent is exact for it
            seconds, _budget = problem.build_tangent(s)
            if (s := self._add(tuple(int(np.argmin(layer)) for layer in seconds))) <= UNDERFLOW:
                break

    def _solve(self, seconds: Sequence[Floats], budget: float) -> Solution | None:
        """Return the solution of a tangent; keep its profile."""
        solution = self._problem.solve(seconds, budget)
        if solution is not None:
            self._add(solution.choice)
        return solution

    def _add(self, choice: Choice) -> float:
        """Return the deviation of a profile; keep the profile if it keeps the budget."""
        profile, needed = self._problem.sum_profile(choice), self._problem.compute_upper_seconds(choice)
        self.fastest_seconds = min(self.fastest_seconds, needed)
        if needed <= self._problem.budget:
            self.fitting.append(profile)
        return profile.deviation


def solve_with_chance(
    seconds: Sequence[ArrayLike],
    deviations: Sequence[ArrayLike],
    errors: Sequence[ArrayLike],
    budget: float,
    shared: float = 0.0,
) -> tuple[Solution, float]:
    """Find the profile of least error that keeps a budget with its deviations.

    Parameters
    ----------
    seconds
        An array (options,) for each layer: seconds >= 0.
    deviations
        Arrays of the same shapes: independent deviations >= 0, in seconds.
    errors
        Arrays of the same shapes.
    budget
        Seconds.
    shared
        Deviation >= 0 of every profile, in seconds.

    Returns
    -------
    solution
        Its `seconds` exclude deviations. No profile that keeps the budget has an error below its `bound`.
    s
        The deviation at which the tangent touches: the parameter s of the module's docstring.

    Raises
    ------
    BadProblem
        The arrays state no problem.
    Infeasible
        No profile keeps the budget.
    """
    t, d = ([np.asarray(layer, np.float64) for layer in arrays] for arrays in (seconds, deviations))
    if len(t) != len(d) or any(a.shape != b.shape for a, b in zip(t, d, strict=True)):
        raise BadProblem("deviations must have the shape of the seconds, layer by layer")
    if not (math.isfinite(shared) and shared >= 0 and all(np.isfinite(x).all() and (x >= 0).all() for x in d)):
        raise BadProblem("deviations must be finite and not negative")
    least, most = (math.hypot(shared, *(float(end(layer)) for layer in d)) for end in (np.min, np.max))
    if most <= UNDERFLOW:
        return solve(t, errors, budget), 0.0
    smallest = max(least, most * LEAST_SHARE)
    problem = _ChanceProblem(t, d, errors, budget, shared)
    cells = _CellSearch(problem, smallest)
    for low, high in [(least, smallest), *itertools.pairwise(_list_cell_ends(smallest, most))]:
        cells.search(low, high)
    if not cells.fitting:
        raise Infeasible(float(budget), cells.fastest_seconds)
    error, spent, choice, s = problem.polish(min(cells.fitting))
    return Solution(choice, spent, error, min([error, *cells.bounds])), s


def _list_cell_ends(low: float, high: float) -> list[float]:
    """Return the ends of cells from `low` to `high`."""
    count = max(1, math.ceil(math.log(high / low) / math.log(CELL_RATIO)))
    return [low * (high / low) ** (i / count) for i in range(count)] + [high]


def assume_independent_times(problem: Problem, target: float) -> Problem:
    """Return the problem with the intervals that it has for a target if the times of layers err independently.

    The interval of `fixed` holds what all layers share, once whole models were timed. Layers of one shape err alike,
    whatever options limits leave them; layers of unknown shape count as alike too. Each of n alike layers counts n
    times as much, which is never too little (Cauchy and Schwarz).

    The sum of the new upper ends is `compute_upper_seconds` for the profile of least error, and too high for other
    profiles. No option's upper end rises: where the tangent is higher, its deviation is added to the root instead,
    which is never too little either (Minkowski). Lower ends shrink by the same share.

    The problem stays as it is where no profile reaches the target, and where the profile of least error has no
    deviation.

    Parameters
    ----------
    problem
        The problem with its errors.
    target
        The speedup over the dense model.
    """
    alike = Counter(part.shape for layer in problem.layers for part in layer.parts)

    def compute_deviation(layer: LayerOptions) -> Floats:
        squares = [alike[part.shape] * (part.high - part.seconds) ** 2 for part in layer.parts]
        return np.asarray(np.sqrt(np.sum(squares, axis=0)))

    seconds, deviations = [layer.seconds for layer in problem.layers], list(map(compute_deviation, problem.layers))
    shared = problem.fixed.high - problem.fixed.value
    budget = problem.dense.low / target - problem.fixed.value
    try:
        _, s = solve_with_chance(seconds, deviations, problem.errors, budget, shared)
    except Infeasible:
        return problem
    if s <= UNDERFLOW:  # its tangent bounds no other profile
        return problem
    half_width = s / 2 + shared * shared / (2 * s)

    def narrow(layer: LayerOptions, deviation: Floats) -> LayerOptions:
        own = layer.high - layer.seconds
        with np.errstate(over="ignore"):
            by_tangent = deviation**2 / (2 * s)
        share = np.divide(np.minimum(by_tangent, own), own, out=np.zeros_like(own), where=own > 0)
        return layer.change_parts(lambda part: replace(
            part, low=part.seconds - share * (part.seconds - part.low),
            high=part.seconds + share * (part.high - part.seconds),
        ))  # fmt: skip

    value = problem.fixed.value
    return replace(
        problem,
        layers=tuple(narrow(layer, it) for layer, it in zip(problem.layers, deviations, strict=True)),
        fixed=Interval(value, value - half_width, value + half_width),
    )
