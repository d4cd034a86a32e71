"""The coefficient search of SPDY as published (Frantar and Alistarh 2022, section 3.2, and its released code).

The loss of a profile is expensive to compute. So the search varies one coefficient for each layer, its sensitivity.
Coefficient x prior gives the errors of a knapsack problem. Its optimum within the budget is the profile of these
coefficients.

1. Draw `DRAWS` coefficient vectors from U(0, 1)^layers and keep the best.
2. For m from a tenth of the layers down to 1: redraw m of its coefficients. Keep the first improvement and restart
   the trials. After `TRIALS` trials without one, decrease m by one.

Two things differ from the published search. The knapsack is solved exactly, not on seconds rounded to buckets, so the
budget holds. A profile that results from several coefficient vectors is evaluated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.knapsack.arrays import Choice, Floats, Solver
from search.strategies.evaluation_budget import EvaluationBudget

DRAWS = 100
TRIALS = 100
NEIGHBOURHOOD = 0.1


def run_spdy_search(
    evaluations: EvaluationBudget,
    solver: Solver,
    prior: Sequence[Floats],
    rng: np.random.Generator,
    *,
    draws: int = DRAWS,
    trials: int = TRIALS,
) -> None:
    """Search until nothing is left to try; `evaluations` keeps the profiles.

    Parameters
    ----------
    evaluations
        Evaluates profiles.
    solver
        Finds the profile of least error within the budget.
    prior
        Errors >= 0: an array (options,) for each layer.
    rng
        Source of randomness. Equal states give equal searches.
    draws
        Coefficient vectors to start with.
    trials
        Trials without an improvement after which m falls.

    Raises
    ------
    BudgetExhausted
        The evaluations or the time are used up.
    """
    layers = len(prior)

    def profile(coefficients: Floats) -> Choice:
        return solver([c * e for c, e in zip(coefficients, prior, strict=True)]).choice

    drawn = [rng.random(layers) for _ in range(draws)]
    losses = evaluations.losses([profile(coefficients) for coefficients in drawn], found_by="spdy")
    best, best_loss = min(zip(drawn, losses, strict=True), key=lambda pair: pair[1])
    for redrawn in range(max(1, round(NEIGHBOURHOOD * layers)), 0, -1):
        failures = 0
        while failures < trials:
            candidate = best.copy()
            candidate[rng.choice(layers, redrawn, replace=False)] = rng.random(redrawn)
            (loss,) = evaluations.losses([profile(candidate)], found_by="spdy")
            if loss < best_loss:
                best, best_loss, failures = candidate, loss, 0
            else:
                failures += 1
