"""The search that learns what each layer adds to the loss, and the account that every search keeps."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from latbench.errors import BadData, EnvironmentUnusable, LatbenchError, UsageError
from latbench.runners.worker_process import WorkerDied
from search.knapsack.arrays import BadProblem, Choice, Infeasible, Solver
from search.knapsack.one_budget import solve
from search.strategies.additive_loss import AdditiveLoss, build_layer_priors
from search.strategies.evaluation_budget import EVALUATED_TOGETHER, BudgetExhausted, EvaluationBudget, SearchResult
from search.strategies.spdy import run_spdy_search
from search.strategies.staged import _find_shares, run_staged_search

LAYERS, OPTIONS = 7, 4
SECONDS = [np.linspace(1 + layer, 0.1, OPTIONS) for layer in range(LAYERS)]
ERRORS = [np.array([0.0, 0.1, 0.3, 1.0])] * LAYERS
PRIORS = build_layer_priors(ERRORS, [np.array([0.0, 0.5, 0.75, 0.9])] * LAYERS)
BUDGET = 12.0


def within(seconds: Sequence[np.ndarray], budget: float) -> Solver:
    return lambda errors: solve(seconds, errors, budget)


SOLVER = within(SECONDS, BUDGET)
PROFILES = [
    choice
    for choice in itertools.product(range(OPTIONS), repeat=LAYERS)
    if sum(t[j] for t, j in zip(SECONDS, choice, strict=True)) <= BUDGET
]


def sensitive(choice: Choice) -> float:
    """The first layers matter most, and neighbours together more than alone: no sum of layer errors."""
    damage = [option / (1 + layer) for layer, option in enumerate(choice)]
    return 1 + sum(d**2 for d in damage) + sum(a * b for a, b in itertools.pairwise(damage))


class Judge:
    """Batches of unlike difficulty, whose losses are multiples of a formula's. `asked`: how many of each profile."""

    def __init__(
        self, loss: Callable[[Choice], float] = sensitive, weights: Sequence[float] = (0.7, 1.2, 0.9, 1.2)
    ) -> None:
        self._loss, self._weights = loss, weights
        self.batches = len(weights)
        self.asked: dict[Choice, int] = {}

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        for choice in choices:
            self.asked[choice] = max(batches, self.asked.get(choice, 0))
        return [self._loss(choice) * sum(self._weights[:batches]) / batches for choice in choices]

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("a formula has no gradient")


class JudgeWithGradients(Judge):
    """Tells what each layer of `sensitive` adds: its own damage, and half of what it does together with others."""

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        damage = [0.0, *(option / (1 + layer) for layer, option in enumerate(choice)), 0.0]
        shares = [
            d * (d + (before + after) / 2)
            for before, d, after in zip(damage[:-2], damage[1:-1], damage[2:], strict=True)
        ]
        return [share * sum(self._weights[:batches]) / batches for share in shares]


def search(judge: Judge, seed: int = 0, allowed: int = 60, **options: Sequence[Choice]) -> SearchResult:
    evaluations = EvaluationBudget(judge, allowed)
    with contextlib.suppress(BudgetExhausted):
        run_staged_search(evaluations, SOLVER, PRIORS, np.random.default_rng(seed), **options)
    return evaluations.result


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_the_optimum_in_a_few_evaluations(seed: int) -> None:
    found = search(Judge(), seed)
    best, once = min(map(sensitive, PROFILES)), sensitive(solve(SECONDS, ERRORS, BUDGET).choice)
    assert once > 1.2 * best
    assert found.loss < 1.02 * best
    published = EvaluationBudget(Judge(), 60)
    with contextlib.suppress(BudgetExhausted):
        run_spdy_search(published, SOLVER, ERRORS, np.random.default_rng(seed))
    assert found.loss <= published.result.loss


def test_only_what_few_batches_like_is_judged_by_all_and_parts_count_as_their_share() -> None:
    judge = Judge()
    found = search(judge)
    counts = list(judge.asked.values())
    assert set(counts) == {1, 2, 4}
    assert counts.count(1) > counts.count(4)
    assert found.spent == sum(counts) / 4 <= 60
    assert {one.choice for one in found.trace} <= {choice for choice, count in judge.asked.items() if count == 4}


def test_every_profile_keeps_the_budget_but_the_one_that_losses_are_compared_with() -> None:
    judge = Judge()
    found = search(judge)
    assert set(judge.asked) - set(PROFILES) == {(0,) * LAYERS}
    assert {one.choice for one in found.trace} <= set(PROFILES)


def test_the_same_seed_gives_the_same_search_and_another_seed_another() -> None:
    assert search(Judge(), 1) == search(Judge(), 1)
    assert search(Judge(), 1).trace != search(Judge(), 2).trace


def test_it_is_never_worse_than_its_starts_by_the_full_judge() -> None:
    treasure = (3,) * LAYERS  # nothing leads here while the budget allows more, and the first batch does not tell

    class Misleading(Judge):
        def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
            super().losses(choices, batches)
            return [0.0 if choice == treasure and batches == 4 else 1.0 for choice in choices]

    found = search(Misleading(), starts=[treasure])
    assert (found.choice, found.loss, found.found_by) == (treasure, 0.0, "uniform")
    once = solve(SECONDS, ERRORS, BUDGET).choice
    assert search(Judge(lambda choice: float(choice != once))).found_by == "solve once"


def test_a_loss_that_is_infinite_never_wins() -> None:
    once = solve(SECONDS, ERRORS, BUDGET).choice
    found = search(Judge(lambda choice: math.inf if choice == once else sensitive(choice)))
    assert math.isfinite(found.loss)
    assert all(math.isinf(one.loss) == (one.choice == once) for one in found.trace)


def test_where_every_loss_is_infinite_there_still_is_a_profile() -> None:
    found = search(Judge(lambda choice: math.inf))
    assert found.loss == math.inf
    assert found.choice in PROFILES


def test_losses_may_be_negative_or_all_the_same() -> None:
    found = search(Judge(lambda choice: sensitive(choice) - 100))
    assert found.loss + 100 < 1.1 * min(map(sensitive, PROFILES))
    assert search(Judge(lambda choice: 0.0)).loss == 0.0


@pytest.mark.parametrize(
    ("seconds", "errors", "expected"),
    [
        ([np.array([2.0, 1.0])], [np.array([0.0, 1.0])], (1,)),
        ([np.array([1.0])] * 3, [np.array([0.0])] * 3, (0, 0, 0)),
        ([np.array([1.0])] * 3, [np.array([0.5])] * 3, (0, 0, 0)),
        ([np.array([1.0, 0.1])] * 2, [np.zeros(2)] * 2, (1, 1)),
    ],
    ids=["one layer", "one option", "one option with an error", "no errors"],
)
def test_small_problems_end_by_themselves(
    seconds: list[np.ndarray], errors: list[np.ndarray], expected: Choice, rng: np.random.Generator
) -> None:
    evaluations = EvaluationBudget(Judge(lambda choice: 1.0), 1000)
    priors = build_layer_priors(errors, errors)
    run_staged_search(evaluations, within(seconds, 3.0 if len(seconds) > 1 else 1.5), priors, rng)
    assert evaluations.result.choice == expected


def test_infeasible_is_passed_on(rng: np.random.Generator) -> None:
    with pytest.raises(Infeasible):
        run_staged_search(EvaluationBudget(Judge(), 5), within(SECONDS, 0.1), PRIORS, rng)


# Gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_gradients_save_most_evaluations(seed: int) -> None:
    best = min(map(sensitive, PROFILES))
    starts = [(1,) * LAYERS]
    with_gradients = search(JudgeWithGradients(), seed, 12, starts=starts)
    assert with_gradients.spent <= 12
    assert with_gradients.loss < 1.03 * best
    assert with_gradients.loss <= search(Judge(), seed, 12, starts=starts).loss


def test_gradients_that_mislead_do_no_lasting_harm() -> None:
    class Misled(JudgeWithGradients):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            return super().layer_shares(choice, batches)[::-1]  # the last layers seem to matter most

    assert search(Misled(), allowed=90).loss < 1.05 * min(map(sensitive, PROFILES))


@pytest.mark.parametrize("share", [math.nan, math.inf, -1.0, 0.0])
def test_shares_of_any_value_leave_a_search_that_works(share: float) -> None:
    class Odd(Judge):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            return [share] * LAYERS

    assert search(Odd()).loss < 1.1 * min(map(sensitive, PROFILES))


def test_a_loss_without_gradient_is_asked_for_it_once() -> None:
    asked: list[Choice] = []

    class Counted(Judge):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            asked.append(choice)
            return super().layer_shares(choice, batches)

    assert search(Counted()) == search(Judge())
    assert len(asked) == 1


def test_a_gradient_is_paid_for_and_none_is_computed_that_cannot_be() -> None:
    judge = JudgeWithGradients()
    evaluations = EvaluationBudget(judge, 3)
    assert evaluations.layer_shares((1,) * LAYERS, 2) == judge.layer_shares((1,) * LAYERS, 2)
    evaluations.losses([(0,) * LAYERS], found_by="staged")
    assert evaluations.result.spent == 1.5 + 1
    with pytest.raises(BudgetExhausted):
        evaluations.losses([(2,) * LAYERS])
    assert EvaluationBudget(judge, 2).layer_shares((1,) * LAYERS, 4) is None
    late = EvaluationBudget(judge, 9, deadline=5.0, clock=lambda: 9.0)
    assert late.layer_shares((1,) * LAYERS, 1) is not None  # no time ends a search before it has a result
    late.losses([(0,) * LAYERS], found_by="staged")
    assert late.layer_shares((1,) * LAYERS, 1) is None


@pytest.mark.parametrize("error", [EnvironmentUnusable("memory ran out"), WorkerDied("oom", "it died")])
def test_a_gradient_for_which_memory_does_not_suffice_is_done_without(error: LatbenchError) -> None:
    class Poor(Judge):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            raise error

    assert search(Poor()) == search(Judge())


def test_a_damaged_database_still_ends_a_search() -> None:
    class Damaged(Judge):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            raise BadData("the file is damaged")

    with pytest.raises(BadData):
        search(Damaged())


def test_layers_that_the_loss_hides_are_searched_by_their_losses() -> None:
    class Half(JudgeWithGradients):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            return [math.nan if layer < 3 else x for layer, x in enumerate(super().layer_shares(choice, batches))]

    assert search(Half()).loss < 1.05 * min(map(sensitive, PROFILES))


def find_shares(own: Sequence[float], loss: float, base: Choice = (0, 0, 0)) -> dict[tuple[int, int], float]:
    """What `_find_shares` makes of shares of the profile (1, 2, 1), whose loss is so much above that of the base."""

    class Told(Judge):
        def layer_shares(self, choice: Choice, batches: int) -> list[float]:
            return list(own)

    evaluations = EvaluationBudget(Told(lambda choice: loss if choice == (1, 2, 1) else 0.0, (1.0,)), 99)
    return _find_shares(evaluations, (1, 2, 1), base, 1, set())


def test_shares_add_up_to_the_loss_of_what_differs_from_the_base() -> None:
    assert find_shares([0.1, 0.3, 0.6], 2.0) == {(0, 1): 0.2, (1, 2): pytest.approx(0.6), (2, 1): 1.2}
    assert find_shares([0.1, 0.3, 0.6], 2.0, (1, 0, 0)) == {
        (1, 2): pytest.approx(2 / 3),
        (2, 1): pytest.approx(4 / 3),
    }
    assert find_shares([math.nan, 0.3, 0.6], 2.0) == {(1, 2): 0.3, (2, 1): 0.6}  # the hidden one may hold the rest


@pytest.mark.parametrize("own", [[1.0, -0.99, 0.0], [-0.1, -0.2, -0.3], [0.0] * 3, [100.0, 0.0, 0.0]])
def test_shares_far_from_the_loss_are_dropped(own: Sequence[float]) -> None:
    assert find_shares(own, 1.0) == {}


def test_shares_tell_what_single_layers_add(rng: np.random.Generator) -> None:
    truth = [e * factor for e, factor in zip(ERRORS, rng.uniform(0.1, 10, LAYERS), strict=True)]
    choice = (2,) * LAYERS
    own = {(layer, 2): float(e[2]) for layer, e in enumerate(truth)}

    def furthest(shares: dict[tuple[int, int], float]) -> float:
        learnt = AdditiveLoss([ERRORS], [choice], [sum(own.values())], shares).draw(rng, 0.0)
        return max(abs(math.log(w[3] / e[3])) for w, e in zip(learnt, truth, strict=True))

    assert furthest(own) < 0.3 * furthest({})  # what one option adds tells what the others of its layer add


# What is learnt ----------------------------------------------------------------------------------------------------


def test_a_sum_over_layers_is_learnt_from_about_as_many_profiles_as_layers(rng: np.random.Generator) -> None:
    truth = [e * factor for e, factor in zip(ERRORS, rng.uniform(0.2, 3, LAYERS), strict=True)]
    choices = [tuple(rng.integers(0, OPTIONS, LAYERS).tolist()) for _ in range(3 * LAYERS)]
    model = AdditiveLoss([ERRORS], choices, [sum(e[j] for e, j in zip(truth, c, strict=True)) for c in choices])
    learnt = model.draw(rng, 0.0)
    far = np.abs(np.concatenate(ERRORS) - np.concatenate(truth)).max()
    assert np.abs(np.concatenate(learnt) - np.concatenate(truth)).max() < 0.35 * far


def test_draws_scatter_about_the_likeliest_and_the_less_the_more_is_known(rng: np.random.Generator) -> None:
    choices = [tuple(rng.integers(0, OPTIONS, LAYERS).tolist()) for _ in range(40)]
    added = [sum(e[j] for e, j in zip(ERRORS, c, strict=True)) for c in choices]

    def spread(count: int) -> float:
        model = AdditiveLoss([ERRORS], choices[:count], added[:count])
        draws = np.array([np.concatenate(model.draw(rng)) for _ in range(100)])
        assert (draws >= 0).all()
        return float(draws.std(axis=0).sum())

    assert spread(40) < 0.7 * spread(2)


def test_priors_are_of_one_size_and_nothing_adds_nothing() -> None:
    errors = [np.array([0.1, 0.3, 0.5]), np.array([0.0, 0.002]), np.array([0.7])]
    as_measured, levelled, squared = build_layer_priors(
        errors, [np.array([0.0, 0.5, 0.9]), np.array([0.5, 0.9]), np.zeros(1)]
    )
    level = (0.4 + 0.002 + 0.0) / 3
    assert [e.tolist() for e in as_measured] == [pytest.approx(e) for e in ([0, 0.2, 0.4], [0, 0.002], [0])]
    assert [e.tolist() for e in levelled] == [pytest.approx(e) for e in ([0, level / 2, level], [0, level], [0])]
    assert [e.tolist() for e in squared] == [
        pytest.approx(e) for e in ([0, level * 0.25 / 0.81, level], [0, level], [0])
    ]


def test_what_measured_errors_hide_is_found() -> None:
    # The first layer's errors are tiny, and yet it matters most.
    errors = [ERRORS[0] / 1000, *ERRORS[1:]]
    evaluations = EvaluationBudget(Judge(), 60)
    priors = build_layer_priors(errors, [np.array([0.0, 0.5, 0.75, 0.9])] * LAYERS)
    with contextlib.suppress(BudgetExhausted):
        run_staged_search(evaluations, SOLVER, priors, np.random.default_rng(0))
    assert sensitive(solve(SECONDS, errors, BUDGET).choice) > 3 * min(map(sensitive, PROFILES))
    assert evaluations.result.loss < 1.05 * min(map(sensitive, PROFILES))


# The account -------------------------------------------------------------------------------------------------------


def test_what_is_asked_is_paid_once_and_in_parts() -> None:
    judge = Judge()
    evaluations = EvaluationBudget(judge, 2)
    assert evaluations.losses([(0,), (1,), (0,)], 1) == judge.losses([(0,), (1,), (0,)], 1)
    evaluations.losses([(0,)], found_by="staged")
    evaluations.losses([(0,)], 2)
    assert evaluations.result.spent == 1.25
    with pytest.raises(BudgetExhausted):
        evaluations.losses([(2,), (3,)], 2)
    assert evaluations.known == {(0,): 4, (1,): 1, (2,): 2}
    assert [one.choice for one in evaluations.result.trace] == [(0,)]


def test_time_ends_a_search_but_not_before_it_has_a_result() -> None:
    evaluations = EvaluationBudget(Judge(), 100, deadline=5.0, clock=lambda: 9.0)
    evaluations.losses([(0,)], 1)
    evaluations.losses([(1,)], found_by="staged")
    with pytest.raises(BudgetExhausted):
        evaluations.losses([(2,)], 1)
    assert evaluations.result.out_of_time
    assert (2,) not in evaluations.known


def test_time_is_watched_within_a_long_list() -> None:
    moments = iter(range(100))
    evaluations = EvaluationBudget(Judge(), 100, deadline=1.0, clock=lambda: float(next(moments)))
    with pytest.raises(BudgetExhausted):
        evaluations.losses([(i,) for i in range(50)], found_by="spdy")
    assert len(evaluations.result.trace) == 2 * EVALUATED_TOGETHER


def test_a_search_needs_an_evaluation() -> None:
    with pytest.raises(BadProblem, match="at least one"):
        EvaluationBudget(Judge(), 0)


def test_what_is_spent_is_told_with_the_least_loss() -> None:
    told: list[tuple[float, float]] = []
    evaluations = EvaluationBudget(
        Judge(lambda choice: 1.0 + choice[0], (1.0,)), 9, report=lambda *now: told.append(now)
    )
    for choice in [(2,), (0,), (1,)]:
        evaluations.losses([choice], found_by="spdy")
    assert told == [(1, 3.0), (2, 1.0), (3, 1.0)]
