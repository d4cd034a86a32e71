"""The coefficient search of SPDY (Frantar & Alistarh 2022, section 3.2 and its released code).

A profile is judged by the loss of the model it gives, which is costly. So the search is not over profiles but over
one coefficient a layer, how sensitive it is: coefficient x prior are the errors of a knapsack, whose exact optimum
within the budget is the profile that those coefficients stand for.

1. Some profiles to begin with; the solution for equal coefficients is always among them.
2. `draws` coefficient vectors from U(0, 1)^layers; keep the best.
3. For m from 10% of the layers down to 1: redraw m of its coefficients; the first improvement is kept and the trials
   begin anew; after `trials` without one, m falls by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from search.solve import BadProblem, Floats, solve, sum_in_order

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """One profile that was tried: how it was found (start, equal, draw, neighbour) and the loss of its model."""

    choice: Choice
    loss: float
    found_by: str


@dataclass(frozen=True)
class Found:
    """The best profile, and every evaluation in the order made; identical profiles are evaluated once."""

    choice: Choice
    loss: float
    found_by: str
    trace: tuple[Evaluation, ...]


class _Enough(Exception):
    """The evaluations that were allowed are used up."""


def spdy_search(
    evaluate: Callable[[Choice], float],
    seconds: Sequence[Floats],
    prior: Sequence[Floats],
    budget: float,
    rng: np.random.Generator,
    *,
    starts: Sequence[Choice] = (),
    draws: int = 100,
    trials: int = 100,
    neighbourhood: float = 0.1,
    evaluations: int | None = None,
    progress: Callable[[Evaluation, float], None] = lambda evaluation, best: None,
) -> Found:
    """The profile of least loss that the search finds within `budget` seconds, never worse than any of `starts`.

    `seconds` and `prior` (errors >= 0) hold an array a layer; `evaluate(choice)` is the loss of a profile (NaN counts
    as infinite). At most `evaluations` profiles are evaluated, the starts first; `progress` is told of each and of
    the least loss so far. The same `rng` state gives the same result. Raises what `solve` raises, and BadProblem for
    a start that breaks the budget.
    """
    known: dict[Choice, Evaluation] = {}

    def judge(choice: Choice, found_by: str) -> float:
        if choice not in known:
            if evaluations is not None and len(known) >= evaluations:
                raise _Enough
            loss = float(evaluate(choice))
            known[choice] = Evaluation(choice, math.inf if math.isnan(loss) else loss, found_by)
            progress(known[choice], min(one.loss for one in known.values()))
        return known[choice].loss

    def profile(coefficients: Floats) -> Choice:
        return solve(seconds, [c * e for c, e in zip(coefficients, prior, strict=True)], budget).choice

    layers = len(seconds)
    equal = np.ones(layers)
    first = profile(equal)
    for start in starts:
        spent = sum_in_order(layer[option] for layer, option in zip(seconds, start, strict=True))
        if spent > budget:
            raise BadProblem(f"a start takes {spent:.6g} s, more than the budget of {budget:.6g} s")
    try:
        best, best_loss = equal, judge(first, "equal")
        for start in starts:
            judge(start, "start")
        for _ in range(draws):
            candidate = rng.random(layers)
            if (loss := judge(profile(candidate), "draw")) < best_loss:
                best, best_loss = candidate, loss
        for redrawn in range(max(1, round(neighbourhood * layers)), 0, -1):
            failures = 0
            while failures < trials:
                candidate = best.copy()
                candidate[rng.choice(layers, redrawn, replace=False)] = rng.random(redrawn)
                if (loss := judge(profile(candidate), "neighbour")) < best_loss:
                    best, best_loss, failures = candidate, loss, 0
                else:
                    failures += 1
    except _Enough:
        if not known:
            raise BadProblem("a search needs at least one evaluation") from None
    winner = min(known.values(), key=lambda one: one.loss)
    return Found(winner.choice, winner.loss, winner.found_by, tuple(known.values()))


def quadratic_prior(sparsities: Sequence[float]) -> Floats:
    """The published prior of a layer: (i / (n - 1))^2 for each option, i its place among n distinct sparsities."""
    distinct, place = np.unique(np.asarray(sparsities, np.float64), return_inverse=True)
    return np.asarray((place / max(1, len(distinct) - 1)) ** 2, np.float64)
