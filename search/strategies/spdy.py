"""The coefficient search of SPDY as published (Frantar and Alistarh 2022, section 3.2, and its released code).

A profile is judged by the loss of the model it gives, which is costly. So the search is not over profiles but over
one coefficient a layer, how sensitive it is: coefficient x prior are the errors of a knapsack, whose optimum within
the budget is the profile that those coefficients stand for.

1. `DRAWS` coefficient vectors from U(0, 1)^layers; keep the best.
2. For m from a tenth of the layers down to 1: redraw m of its coefficients; the first improvement is kept and the
   trials begin anew; after `TRIALS` without one, m falls by one.

Ours differs in two things: the knapsack is solved exactly, not on seconds rounded to buckets, so the budget holds;
and a profile that several coefficients stand for is judged once, so it is paid for once.
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
    """Search profiles of `solver` until nothing is left to try; `evaluations` keeps what was found.

    `solver` knows the budget; `prior` (errors >= 0) holds an array a layer. The same `rng` state gives the same
    search. Raises BudgetExhausted when `evaluations` are used up before, and what `solver` raises.
    """
    layers = len(prior)

    def profile(coefficients: Floats) -> Choice:
        return solver([c * e for c, e in zip(coefficients, prior, strict=True)]).choice

    drawn = [rng.random(layers) for _ in range(draws)]
    losses = evaluations.losses([profile(one) for one in drawn], found_by="spdy")
    best, best_loss = min(zip(drawn, losses, strict=True), key=lambda one: one[1])
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
