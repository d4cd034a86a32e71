"""The search by learning what each layer adds to the loss (`search.strategies.additive_loss`), in stages.

Round by round: the model of the loss is fitted to all that was judged so far; its likeliest optimum and some drawn
from it are solved for within the budget; they are judged on few batches, the better half on more, the best
quarter on all (successive halving: Jamieson and Talwalkar 2016, "Non-stochastic best arm identification"). Losses on
few batches are compared with the best profile's on the same ones, so what makes batches easy or hard cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from search.knapsack.arrays import Choice, Solver
from search.strategies.additive_loss import AdditiveLoss, Prior
from search.strategies.evaluation_budget import EvaluationBudget

WIDTH = 8
"""Profiles a round."""

STAGES = (4, 2, 1)
"""A fourth of the batches judges all profiles of a round, a half of them half of those, and all a fourth."""

LEARNT_FROM = 200
"""Profiles, the best ones: those far away say little of the optimum."""

HOTTER = 1.15
TRIES = 60
"""A draw that leads to a known profile is followed by one from a wider posterior, so often in a round."""


def run_staged_search(
    evaluations: EvaluationBudget,
    solver: Solver,
    priors: Sequence[Prior],
    rng: np.random.Generator,
    *,
    starts: Sequence[Choice] = (),
) -> None:
    """Search profiles of `solver` until no new one comes up; `evaluations` keeps what was found.

    `solver` knows the budget; `priors` are what options may add to the loss, the measured errors first. What it makes
    of each prior alone, and the `starts`, which keep the budget, are judged in full: the result is no worse than any
    of them. The same `rng` state gives the same search. Raises BudgetExhausted when `evaluations` are used up before,
    and what `solver` raises.
    """
    least = tuple(int(np.argmin(e)) for e in priors[0])
    for prior in priors:
        evaluations.losses([solver(prior).choice], found_by="solve once")
    evaluations.losses(starts, found_by="uniform")
    few = max(1, evaluations.batches // STAGES[0])
    evaluations.losses([least], few)
    while evaluations.best.choice != least:
        model = _learnt(evaluations, priors, least, few)
        candidates: list[Choice] = []
        temperature = 0.0
        for _ in range(TRIES):
            choice = solver(model.draw(rng, temperature)).choice
            if choice not in evaluations.known and choice not in candidates:
                candidates.append(choice)
                temperature = max(temperature, 1.0)
            else:
                temperature = max(1.0, temperature * HOTTER)
            if len(candidates) == WIDTH:
                break
        if not candidates:
            return
        _race(evaluations, candidates)


def _race(evaluations: EvaluationBudget, candidates: Sequence[Choice]) -> None:
    """Judge all on few batches, and ever fewer on ever more."""
    pool = list(candidates)
    for part in STAGES:
        keep = max(1, -(-len(candidates) * part // STAGES[0]))
        pool = pool[:keep]
        batches = max(1, evaluations.batches // part)
        losses = evaluations.losses(pool, batches, found_by="staged")
        pool = [choice for _, choice in sorted(zip(losses, pool, strict=True), key=lambda one: one[0])]


def _learnt(evaluations: EvaluationBudget, priors: Sequence[Prior], base: Choice, few: int) -> AdditiveLoss:
    """The model of what profiles add to the loss of `base`, by what was judged so far."""
    best = evaluations.best.choice
    (of_base,), (of_best,) = evaluations.losses([base], few), evaluations.losses([best], few)
    added: dict[Choice, float] = {}
    for batches in sorted(set(evaluations.known.values())):
        choices = [choice for choice, count in evaluations.known.items() if count == batches and choice != base]
        *losses, of_the_same = evaluations.losses([*choices, best], batches)
        for choice, loss in zip(choices, losses, strict=True):
            added[choice] = loss - of_the_same + of_best - of_base
    worst = max((one for one in added.values() if math.isfinite(one)), default=1.0)
    added = {choice: one if math.isfinite(one) else worst for choice, one in added.items()}
    nearest = sorted(added, key=added.__getitem__)[:LEARNT_FROM]
    return AdditiveLoss(priors, nearest, [added[choice] for choice in nearest])
