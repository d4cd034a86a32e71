"""The staged search: learn the loss that each layer adds (`search.strategies.additive_loss`), and race candidates.

Each round fits the model of the loss to all evaluated profiles. The exact solver finds its likeliest optimum, and the
optima of some draws from the model. All of them are evaluated on a quarter of the batches, the better half on half of
them, the best quarter on all. This is successive halving (Jamieson and Talwalkar 2016, "Non-stochastic best arm
identification"). Losses on fewer batches are compared with the best profile's loss on the same batches. So it does
not matter whether these batches are easy or hard.

The gradient of the loss at a pruned profile tells at once what each of its layers adds
(`search.loss.evaluator.LossEvaluator.layer_shares`). It is computed for the first of the `starts`, and after each
round for the best profile. A loss without gradient needs more evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from search.knapsack.arrays import Choice, Solver
from search.strategies.additive_loss import AdditiveLoss, Prior
from search.strategies.evaluation_budget import EvaluationBudget

CANDIDATES = 8
"""Profiles in each round."""

STAGES = (4, 2, 1)
"""Divisors of the batches in each stage: all candidates on a quarter, half of them on a half, a quarter on all."""

MOST_FITTED = 200
"""Number of best profiles to fit the model to: those far from the optimum say little about it."""

HEATING = 1.15
"""Factor of the temperature after a draw that gave a known profile."""

MOST_DRAWS = 60
"""Draws in a round."""

MOST_SCALED = 4.0
"""Factor between shares and the loss that they add up to, at most: with a larger one the gradient says little."""


def run_staged_search(
    evaluations: EvaluationBudget,
    solver: Solver,
    priors: Sequence[Prior],
    rng: np.random.Generator,
    *,
    starts: Sequence[Choice] = (),
) -> None:
    """Search until no new profile comes up; `evaluations` keeps the profiles.

    The optimum of each prior alone and the `starts` are evaluated in full: the result is no worse than any of them.

    Parameters
    ----------
    evaluations
        Evaluates profiles.
    solver
        Finds the profile of least error within the budget.
    priors
        Losses that options may add (`build_layer_priors`), the measured errors first.
    rng
        Source of randomness. Equal states give equal searches.
    starts
        Further profiles within the budget.

    Raises
    ------
    BudgetExhausted
        The evaluations or the time are used up.
    """
    least = tuple(int(np.argmin(e)) for e in priors[0])
    for prior in priors:
        evaluations.losses([solver(prior).choice], found_by="solve once")
    evaluations.losses(starts, found_by="uniform")
    fewest = max(1, evaluations.batches // STAGES[0])
    evaluations.losses([least], fewest)
    shares: dict[tuple[int, int], float] = {}
    differentiated: set[Choice] = {least}
    for choice in [*starts[:1], evaluations.best.choice]:
        shares |= _find_shares(evaluations, choice, least, fewest, differentiated)
    while evaluations.best.choice != least:
        model = _fit_model(evaluations, priors, least, fewest, shares)
        candidates: list[Choice] = []
        temperature = 0.0
        for _ in range(MOST_DRAWS):
            choice = solver(model.draw(rng, temperature)).choice
            if choice not in evaluations.known and choice not in candidates:
                candidates.append(choice)
                temperature = max(temperature, 1.0)
            else:
                temperature = max(1.0, temperature * HEATING)
            if len(candidates) == CANDIDATES:
                break
        if not candidates:
            return
        _race(evaluations, candidates)
        shares |= _find_shares(evaluations, evaluations.best.choice, least, fewest, differentiated)


def _race(evaluations: EvaluationBudget, candidates: Sequence[Choice]) -> None:
    """Evaluate all candidates on few batches, and ever fewer of them on ever more batches."""
    pool = list(candidates)
    for divisor in STAGES:
        keep = max(1, -(-len(candidates) * divisor // STAGES[0]))
        pool = pool[:keep]
        batches = max(1, evaluations.batches // divisor)
        losses = evaluations.losses(pool, batches, found_by="staged")
        pool = [choice for _, choice in sorted(zip(losses, pool, strict=True), key=lambda pair: pair[0])]


def _find_shares(
    evaluations: EvaluationBudget, choice: Choice, base: Choice, batches: int, differentiated: set[Choice]
) -> dict[tuple[int, int], float]:
    """Return what each layer adds that differs from `base`: (layer, option) -> loss.

    The shares are scaled to add up to the loss of the profile above that of `base`. A gradient that says something
    quite different gives none. Each profile is differentiated once.
    """
    if choice in differentiated:
        return {}
    differentiated.add(choice)
    own = evaluations.layer_shares(choice, batches)
    if own is None:
        return {}
    changed = {(layer, j): own[layer] for layer, j in enumerate(choice) if j != base[layer]}
    known = {key: share for key, share in changed.items() if math.isfinite(share)}
    loss, base_loss = evaluations.losses([choice, base], batches)
    if len(known) < len(changed):  # in eight bits, or hidden by the loss: nothing tells what the others add up to
        return known
    total = math.fsum(known.values())
    factor = (loss - base_loss) / total if total > 0 else math.nan
    return {key: factor * share for key, share in known.items()} if 1 / MOST_SCALED < factor < MOST_SCALED else {}


def _fit_model(
    evaluations: EvaluationBudget, priors: Sequence[Prior], base: Choice, fewest: int,
    shares: Mapping[tuple[int, int], float],
) -> AdditiveLoss:  # fmt: skip
    """Return the model of the loss above that of `base`, fitted to the profiles evaluated so far."""
    best = evaluations.best.choice
    (base_loss,), (best_loss,) = evaluations.losses([base], fewest), evaluations.losses([best], fewest)
    added: dict[Choice, float] = {}
    for batches in sorted(set(evaluations.known.values())):
        choices = [choice for choice, count in evaluations.known.items() if count == batches and choice != base]
        *losses, best_here = evaluations.losses([*choices, best], batches)
        for choice, loss in zip(choices, losses, strict=True):
            added[choice] = loss - best_here + best_loss - base_loss
    worst = max((loss for loss in added.values() if math.isfinite(loss)), default=1.0)
    added = {choice: loss if math.isfinite(loss) else worst for choice, loss in added.items()}
    nearest = sorted(added, key=added.__getitem__)[:MOST_FITTED]
    return AdditiveLoss(priors, nearest, [added[choice] for choice in nearest], shares)
