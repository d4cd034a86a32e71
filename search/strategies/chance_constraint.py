"""The profile of least error whose seconds stay within a budget with a wanted probability.

An option takes `seconds`, and with that probability at most its `deviation` more. Deviations of different layers are
their own: they add up like standard deviations, together with one that all profiles share. So a profile must keep

    sum of seconds + sqrt(shared^2 + sum of deviation^2) <= budget

which is no sum over layers. But a root lies below its tangents: for every s > 0, sqrt(v) <= v / (2 s) + s / 2, with
equality where s^2 = v. With the right side it is a knapsack that `solve` settles, and whatever it finds keeps the
budget. The best s is looked for cell by cell; within a cell the tangent is hardly too high, and what that may hide
bounds the optimum from below.

Source: the tangents are those of conic chance constraints (Ben-Tal, El Ghaoui, Nemirovski 2009, "Robust
Optimization", section 2).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from search.knapsack.arrays import BadProblem, Choice, Floats, Infeasible, Solution, sum_in_order
from search.knapsack.one_budget import solve
from search.problem.layers import Interval, LayerOptions
from search.problem.problem import Problem

WIDTH = 1.25
"""Upper by lower end of a cell: the tangent is at most 0.7% of s too high in it."""

SMALL = 1e-3
"""The least deviation that is told from none, as a share of the most."""

TINY = 1e-150
"""Deviations whose squares are too small to be told from zero."""

POLISHES = 4
ROUNDING = 1e-12


def compute_upper_seconds(
    seconds: Sequence[Floats], deviations: Sequence[Floats], choice: Sequence[int], shared: float = 0.0
) -> float:
    """The seconds that a profile does not pass with the wanted probability."""
    squares = sum_in_order(d[j] * d[j] for d, j in zip(deviations, choice, strict=True))
    return sum_in_order(t[j] for t, j in zip(seconds, choice, strict=True)) + math.sqrt(shared * shared + squares)


def build_tangent(
    seconds: Sequence[Floats], deviations: Sequence[Floats], budget: float, shared: float, at: float
) -> tuple[list[Floats], float]:
    """Seconds of the options, and a budget for their sum, that no profile keeps without keeping `budget` itself."""
    return (
        [t + d * d / (2 * at) for t, d in zip(seconds, deviations, strict=True)],
        budget - at / 2 - shared * shared / (2 * at),
    )


def solve_with_chance(
    seconds: Sequence[ArrayLike],
    deviations: Sequence[ArrayLike],
    errors: Sequence[ArrayLike],
    budget: float,
    shared: float = 0.0,
) -> tuple[Solution, float]:
    """The profile of least error that keeps `budget` with its deviations, and the s of the tangent that allows it.

    Arrays as `solve` takes them; deviations and `shared` >= 0, in seconds. The solution's `seconds` are without
    deviations; no profile that keeps the budget has an error below its `bound`.
    Raises BadProblem for what states no problem, Infeasible when nothing keeps the budget.
    """
    t, d = ([np.asarray(layer, np.float64) for layer in arrays] for arrays in (seconds, deviations))
    if len(t) != len(d) or any(a.shape != b.shape for a, b in zip(t, d, strict=True)):
        raise BadProblem("deviations must have the shape of the seconds, layer by layer")
    if not (math.isfinite(shared) and shared >= 0 and all(np.isfinite(x).all() and (x >= 0).all() for x in d)):
        raise BadProblem("deviations must be finite and not negative")
    least, most = (math.hypot(shared, *(float(end(layer)) for layer in d)) for end in (np.min, np.max))
    if most <= TINY:
        return solve(t, errors, budget), 0.0
    small = max(least, most * SMALL)
    found: list[tuple[float, float, Choice, float]] = []
    bounds = []
    fastest = math.inf

    def keep(choice: Choice) -> float:
        """The deviation of a profile, which is kept if it keeps the budget."""
        nonlocal fastest
        *_, s = one = _of(t, d, errors, choice, shared)
        fastest = min(fastest, needed := compute_upper_seconds(t, d, choice, shared))
        if needed <= budget:
            found.append(one)
        return s

    def look(within: Sequence[Floats], room: float) -> Solution | None:
        try:
            solution = solve(within, errors, room)
        except Infeasible:
            return None
        keep(solution.choice)
        return solution

    cells = [(least, small), *itertools.pairwise(_cells(small, most))]
    for low, high in cells:
        s = max(small, math.sqrt(low * high))
        within, room = build_tangent(t, d, budget, shared, s)
        look(within, room)
        # Every profile that deviates by so much, and keeps the budget, keeps this.
        too_high = max((end - s) ** 2 for end in (low, high)) / (2 * s)
        relaxed = look(within, room + too_high + ROUNDING * abs(budget))
        bounds += [relaxed.bound] if relaxed is not None else []
        for _ in range(POLISHES):  # the fastest profile near: by its own tangent it is exactly as fast as it is
            within, _room = build_tangent(t, d, budget, shared, s)
            if (s := keep(tuple(int(np.argmin(layer)) for layer in within))) <= TINY:
                break
    if not found:
        raise Infeasible(float(budget), fastest)
    best = min(found)
    for _ in range(POLISHES if best[3] > TINY else 0):
        within, room = build_tangent(t, d, budget, shared, best[3])
        try:
            better = _of(t, d, errors, solve(within, errors, room).choice, shared)
        except Infeasible:  # by a rounding: the best itself is on the tangent
            break
        if not better < best or compute_upper_seconds(t, d, better[2], shared) > budget:
            break
        best = better
    error, spent, choice, s = best
    return Solution(choice, spent, error, min([error, *bounds])), s


def _cells(low: float, high: float) -> list[float]:
    """Ends of cells from `low` to `high`."""
    count = max(1, math.ceil(math.log(high / low) / math.log(WIDTH)))
    return [low * (high / low) ** (i / count) for i in range(count)] + [high]


def _of(
    seconds: Sequence[Floats], deviations: Sequence[Floats], errors: Sequence[ArrayLike], choice: Choice,
    shared: float,
) -> tuple[float, float, Choice, float]:  # fmt: skip
    """Error, seconds, choice and deviation of a profile."""
    error = sum_in_order(np.asarray(e, np.float64)[j] for e, j in zip(errors, choice, strict=True))
    spent = sum_in_order(t[j] for t, j in zip(seconds, choice, strict=True))
    return error, spent, choice, math.hypot(shared, *(float(d[j]) for d, j in zip(deviations, choice, strict=True)))


def assume_independent_times(problem: Problem, target: float) -> Problem:
    """The problem with the upper ends that it has for this target if layers err on their own, not all together.

    What they share is in `fixed`, as it is once whole models were timed. Layers of one shape err alike, whatever
    options limits leave each, and so are those of unknown shape taken to: each of n counts n times as much, which is
    never too little (Cauchy and Schwarz). Upper ends added up are as `upper` says for the profile of least error, and
    too high for others, but no option's above what it was: where the tangent says more, a deviation is added to the
    root instead, which is never too little either (Minkowski). Lower ends shrink alike. The problem as it is where
    nothing reaches the target even so, and where the profile of least error deviates by nothing.
    """
    alike = Counter(part.shape for layer in problem.layers for part in layer.parts)

    def deviation(layer: LayerOptions) -> Floats:
        squares = [alike[part.shape] * (part.high - part.seconds) ** 2 for part in layer.parts]
        return np.asarray(np.sqrt(np.sum(squares, axis=0)))

    seconds, deviations = [layer.seconds for layer in problem.layers], list(map(deviation, problem.layers))
    shared = problem.fixed.high - problem.fixed.value
    budget = problem.dense.low / target - problem.fixed.value
    try:
        _, s = solve_with_chance(seconds, deviations, problem.errors, budget, shared)
    except Infeasible:
        return problem
    if s <= TINY:  # its tangent is no help to any other
        return problem
    around = s / 2 + shared * shared / (2 * s)

    def narrowed(layer: LayerOptions, deviation: Floats) -> LayerOptions:
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
        layers=tuple(narrowed(layer, it) for layer, it in zip(problem.layers, deviations, strict=True)),
        fixed=Interval(value, value - around, value + around),
    )
