"""EvoPress's evolution of a profile, step by step, on losses that are formulas."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from latbench.errors import UsageError
from search.inputs.problem_builder import build_problem
from search.knapsack.arrays import Choice
from search.problem.layers import LayerOptions, Option
from search.problem.second_budget import SecondBudget
from search.strategies.evaluation_budget import BudgetExhausted, EvaluationBudget, SearchResult
from search.strategies.evopress import SELECTION, run_evopress, switch_levels
from search.strategies.run_strategy import StrategySettings, rank_options, run_strategy
from sparse_kernels.shapes import LinearShape

LAYERS, OPTIONS = 7, 4
SECONDS = [np.linspace(1 + layer, 0.1, OPTIONS) for layer in range(LAYERS)]
LEVELS = [list(range(OPTIONS))] * LAYERS
BUDGET = 12.0
START = (2,) * LAYERS


def spend(choice: Choice) -> float:
    return sum(float(t[j]) for t, j in zip(SECONDS, choice, strict=True))


def keeps(choice: Choice) -> bool:
    return spend(choice) <= BUDGET


def sensitive(choice: Choice) -> float:
    """The first layers matter most, and neighbours together more than alone: no sum of layer errors."""
    damage = [option / (1 + layer) for layer, option in enumerate(choice)]
    return 1 + sum(d**2 for d in damage) + sum(a * b for a, b in itertools.pairwise(damage))


class Judge:
    """Batches of unlike difficulty. `asked`: on how many batches each profile was evaluated."""

    weights = tuple(0.5 + (5 * i % 16) / 15 for i in range(16))
    batches = len(weights)

    def __init__(self, loss: Callable[[Choice], float] = sensitive) -> None:
        self._loss = loss
        self.asked: dict[Choice, int] = {}

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        for choice in choices:
            self.asked[choice] = max(batches, self.asked.get(choice, 0))
        return [self._loss(choice) * sum(self.weights[:batches]) / batches for choice in choices]

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("a formula has no gradient")


def search(rng: np.random.Generator, judge: Judge | None = None, allowed: int = 200) -> SearchResult:
    evaluations = EvaluationBudget(judge or Judge(), allowed)
    with contextlib.suppress(BudgetExhausted):
        run_evopress(evaluations, START, LEVELS, keeps, rng)
    return evaluations.result


def test_a_switch_makes_one_layer_slower_and_others_faster_until_the_budget_is_kept(rng: np.random.Generator) -> None:
    tight, loose = (3, 2, 2, 1, 3, 3, 0), (3,) * LAYERS
    assert BUDGET - 0.5 < spend(tight) <= BUDGET
    for _ in range(200):
        switched = switch_levels(tight, LEVELS, keeps, rng)
        slower = [layer for layer in range(LAYERS) if switched[layer] < tight[layer]]
        assert len(slower) == 1 and tight[slower[0]] - switched[slower[0]] == 1
        assert keeps(switched)
        faster = [layer for layer in range(LAYERS) if switched[layer] > tight[layer]]
        # The last of these steps was needed: without it the budget is exceeded.
        before = [tuple(j - (layer == it) for layer, j in enumerate(switched)) for it in faster]
        assert not before or any(not keeps(choice) for choice in before)
        free = switch_levels(loose, LEVELS, keeps, rng)
        assert sorted(np.subtract(free, loose)) == [-1] + [0] * (LAYERS - 1)


def test_a_switch_that_nothing_can_make_up_for_is_none(rng: np.random.Generator) -> None:
    assert switch_levels((0,) * LAYERS, LEVELS, keeps, rng) == (0,) * LAYERS  # no layer can become slower
    fastest = (3,) * LAYERS
    assert switch_levels(fastest, LEVELS, lambda choice: choice == fastest, rng) == fastest


def test_offspring_are_selected_in_steps_and_parts_count_as_their_share(rng: np.random.Generator) -> None:
    judge = Judge()
    found = search(rng, judge)
    counts = list(judge.asked.values())
    assert set(counts) == {1, 4, 16}
    generations = len(found.trace) - 1  # one profile of each is evaluated in full
    last = counts.count(4) - 3 * generations  # of the generation in which the evaluations ended
    assert 0 <= last <= 4 and counts.count(16) == generations + 1
    assert found.spent == sum(counts) / 16 <= 200
    assert {one.found_by for one in found.trace} == {"evopress"}
    assert all(keeps(choice) for choice in judge.asked)
    assert found.loss == min(one.loss for one in found.trace)


def test_a_generation_is_the_offspring_of_the_best_so_far(rng: np.random.Generator) -> None:
    judge = Judge()
    found = search(rng, judge, allowed=40)
    asked = list(judge.asked)
    parents = [START]
    for number, profile in enumerate(found.trace[1:]):
        drawn = asked[1 + 16 * number : 17 + 16 * number]
        assert profile.choice in drawn and len(set(drawn)) == SELECTION[0][0]
        # Three switches at most: three layers are slower than in the parent, at most.
        slower = [sum(max(0, a - b) for a, b in zip(parents[-1], child, strict=True)) for child in drawn]
        assert max(slower) <= 3
        if sensitive(profile.choice) < sensitive(parents[-1]):
            parents.append(profile.choice)
    assert len(parents) > 2 and found.choice == parents[-1]


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_the_optimum(seed: int) -> None:
    found = search(np.random.default_rng(seed))
    best = min(sensitive(c) for c in itertools.product(range(OPTIONS), repeat=LAYERS) if keeps(c))
    assert sensitive(START) > 1.5 * best
    assert sensitive(found.choice) <= 1.05 * best  # a heuristic of about 80 generations


def test_the_same_seed_gives_the_same_search_and_another_seed_another() -> None:
    first, again, other = (search(np.random.default_rng(seed), allowed=20).trace for seed in (1, 1, 2))
    assert first == again != other


def test_it_ends_where_no_new_profile_comes_up(rng: np.random.Generator) -> None:
    evaluations = EvaluationBudget(Judge(), 10_000)
    run_evopress(evaluations, (1, 1), [[0, 1], [0, 1]], lambda choice: sum(choice) >= 1, rng)
    assert set(evaluations.known) == {(1, 1), (0, 1), (1, 0)}


def test_a_loss_that_is_infinite_never_wins(rng: np.random.Generator) -> None:
    found = search(rng, Judge(lambda choice: math.inf if sum(choice) % 4 else sensitive(choice)))
    assert sum(START) % 4 == 2 and math.isfinite(found.loss)


def test_a_second_round_goes_on_from_the_first(rng: np.random.Generator) -> None:
    options = (Option("dense", 0.0), *(Option("vector:8", s) for s in (0.5, 0.75, 0.9)))
    errors = np.array([0.0, 0.1, 0.3, 1.0])
    problem = build_problem([LayerOptions(f"fc{i}", options, own, own, own, errors) for i, own in enumerate(SECONDS)])
    first = run_strategy(StrategySettings("evopress", 30), problem, 2.0, Judge())
    known = {it.choice: it.found_by for it in first.trace}
    second = run_strategy(StrategySettings("evopress", 30), problem, 2.0, Judge(), known=known)
    fresh = {it.choice for it in second.trace} - set(known)
    assert fresh and second.loss <= first.loss
    assert all(problem.keeps(choice, 2.0) for choice in fresh)
    # The first generation has children of the best profile, and not of the uniform one.
    near = [choice for choice in fresh if sum(max(0, a - b) for a, b in zip(first.choice, choice, strict=True)) <= 3]
    assert near


def test_levels_are_efficient_options_and_those_of_the_start() -> None:
    options = tuple(Option(*each) for each in (
        ("dense", 0.0), ("block:8x4", 0.5), ("vector:8", 0.5), ("vector:8", 0.75), ("block:8x4", 0.75),
    ))  # fmt: skip
    seconds, errors = np.array([1.0, 0.7, 0.6, 0.4, 0.5]), np.array([0.0, 0.3, 0.1, 0.2, 0.4])
    layers = [
        LayerOptions(name, options, seconds, seconds, seconds, errors, shape=LinearShape(8, 8, 8)) for name in "ab"
    ]
    # Blocks are slower than vectors, and lose more: one of them is a level where the start has it.
    problem = build_problem(layers)
    assert rank_options(problem, (1, 3)) == [[0, 1, 2, 3], [0, 2, 3]]
    # Under a budget of bytes, options count that take fewer of them.
    costs = {name: {it: 1 - it.sparsity - 0.1 * (it.pattern == "block:8x4") for it in options} for name in "ab"}
    limited = replace(problem, second_budget=SecondBudget(costs, 1.0))
    assert rank_options(limited, (1, 3)) == [[0, 1, 2, 4, 3], [0, 2, 4, 3]]
