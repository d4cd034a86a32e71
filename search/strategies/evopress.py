"""EvoPress: an evolution of one profile (Sieberling, Kuznedelev, Kurtic and Alistarh, ICML 2025).

Each generation draws offspring of the best profile so far. An offspring differs by a few level switches: one layer
becomes slower and better by a level, and others become faster until the budget is kept. Offspring are selected in
several steps: all of them on few batches, the best of those on more, and the last one on all, against its parent. A
parent is replaced by a better one only (section 3, algorithm 1).

It differs from the published search in what other strategies share. A level there is a sparsity, and levels cost the
same in all layers. Here levels are a layer's options in the order of their seconds, so a switch may make several
layers faster. Free time is used: where the budget is kept anyway, no layer becomes faster. What is minimised is the
task's loss on the first calibration batches, and not on batches that are drawn anew. Each profile is drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from search.knapsack.arrays import Choice
from search.strategies.evaluation_budget import EvaluationBudget

SELECTION = ((16, 16), (4, 4), (1, 1))
"""Offspring in each step of a selection, and the divisor of the batches that they are evaluated on."""

MOST_SWITCHES = 3
"""The switches of an offspring are the smaller one of two draws from 1 to this number."""

MOST_DRAWS = 40
"""Draws for each offspring. Where all of them give no new profile, the search ends."""

Levels = Sequence[Sequence[int]]
"""For each layer its options from the slowest to the fastest."""


def run_evopress(
    evaluations: EvaluationBudget,
    start: Choice,
    levels: Levels,
    keeps_budget: Callable[[Choice], bool],
    rng: np.random.Generator,
) -> None:
    """Evolve `start` until no new profile comes up; `evaluations` keeps the profiles.

    Parameters
    ----------
    evaluations
        Evaluates profiles.
    start
        A profile within the budget; its options are levels of their layers.
    levels
        The options of each layer, from the slowest to the fastest.
    keeps_budget
        Returns whether a profile is within the budget.
    rng
        Source of randomness. Equal states give equal searches.

    Raises
    ------
    BudgetExhausted
        The evaluations or the time are used up.
    """
    parent, drawn = start, {start}
    [parent_loss] = evaluations.losses([parent], found_by="evopress")
    while offspring := _draw_offspring(parent, levels, keeps_budget, rng, drawn):
        drawn.update(offspring)
        for size, divisor in SELECTION:
            batches = max(1, evaluations.batches // divisor)
            offspring = offspring[:size]
            losses = evaluations.losses(offspring, batches, found_by="evopress")
            ranked = sorted(zip(losses, offspring, strict=True), key=lambda pair: pair[0])
            offspring = [choice for _, choice in ranked]
        if ranked[0][0] < parent_loss:
            parent_loss, parent = ranked[0]


def _draw_offspring(
    parent: Choice, levels: Levels, keeps_budget: Callable[[Choice], bool], rng: np.random.Generator,
    drawn: Collection[Choice],
) -> list[Choice]:  # fmt: skip
    """Return different profiles that were not drawn yet."""
    wanted, found = SELECTION[0][0], list[Choice]()
    for _ in range(MOST_DRAWS * wanted):
        child = parent
        for _ in range(rng.integers(1, MOST_SWITCHES + 1, 2).min()):
            child = switch_levels(child, levels, keeps_budget, rng)
        if child not in found and child not in drawn:
            found.append(child)
        if len(found) == wanted:
            break
    return found


def switch_levels(
    choice: Choice, levels: Levels, keeps_budget: Callable[[Choice], bool], rng: np.random.Generator
) -> Choice:
    """Return the profile with one layer slower by a level, and others faster until it keeps the budget.

    Returns `choice` where no layer can become slower, or the others cannot make up for it.
    """
    places = [level.index(j) for level, j in zip(levels, choice, strict=True)]
    slower = [layer for layer, place in enumerate(places) if place > 0]
    if not slower:
        return choice
    chosen = slower[int(rng.integers(len(slower)))]
    places[chosen] -= 1
    while True:
        switched = tuple(level[place] for level, place in zip(levels, places, strict=True))
        if keeps_budget(switched):
            return switched
        faster = [layer for layer, place in enumerate(places) if place + 1 < len(levels[layer]) and layer != chosen]
        if not faster:
            return choice
        places[faster[int(rng.integers(len(faster)))]] += 1
