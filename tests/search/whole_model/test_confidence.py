"""What was measured in some buildings promises for others: simulated searches and verifications."""

import numpy as np
import pytest

from search.whole_model.confidence import MOOD, SPREAD, WEIGHT, coverage, promise, scatter, spread
from search.whole_model.end_to_end import PROCESSES


@pytest.mark.parametrize(("actual", "mood"), [(0.01, 0.0), (SPREAD, MOOD), (0.03, MOOD)])
@pytest.mark.parametrize("risk", [0.9, 0.95])
def test_a_verification_is_not_below_the_lower_end_as_often_as_promised(
    rng: np.random.Generator, risk: float, actual: float, mood: float
) -> None:
    kept, trials = 0, 3000
    for _ in range(trials):
        truths = np.exp(rng.normal(0.7, 0.2, 3))  # three profiles in the first session, the first in a second one
        moods = rng.normal(0, mood, 3)
        timed = [truths[i] * np.exp(moods[s] + rng.normal(0, actual, 3)) for i, s in ((0, 0), (1, 0), (2, 0), (0, 1))]
        low = promise([timed[0], timed[3]], spread(timed, 4), risk).low
        verified = truths[0] * np.exp(moods[2] + rng.normal(0, actual, PROCESSES).mean())
        kept += verified >= low
    assert kept / trials >= risk - 3 * np.sqrt(risk * (1 - risk) / trials)


def test_the_spread_is_between_what_was_measured_and_what_is_usual() -> None:
    assert spread([[2.0]], 0).value == SPREAD
    assert spread([[2.0, 2.0, 2.0]], 2).value < SPREAD
    wide = [np.exp([-0.1, 0.0, 0.1]), 3 * np.exp([-0.1, 0.0, 0.1])]
    few, many = spread(wide, 2), spread(wide * 50, 200)
    assert SPREAD < few.value < many.value <= 0.1
    assert (few.freedom, many.freedom) == (WEIGHT + 2, WEIGHT + 200)


def test_the_speedup_is_the_mean_and_more_buildings_and_sessions_bring_the_ends_nearer() -> None:
    between = spread([[2.0] * 3], 2)
    few, many = promise([[1.0, 4.0]], between, 0.9), promise([[1.0, 4.0] * 50], between, 0.9)
    sessions = promise([[1.0, 4.0]] * 50, between, 0.9)
    assert few.value == many.value == sessions.value == pytest.approx(2.0)
    assert few.low < many.low < sessions.low < 2.0 < many.high < few.high
    assert few.low * few.high == pytest.approx(4.0)
    assert sessions.low < promise([[2.0] * 2] * 50, between, 0.6).low < 2.0  # what the verification adds remains


def test_the_scatter_of_buildings_and_of_sessions_is_told_apart(rng: np.random.Generator) -> None:
    spread_, mood, profiles = 0.02, 0.015, 400
    speedups = []
    for _ in range(profiles):
        moods = rng.normal(0.7, 0.2) + rng.normal(0, mood, 3)
        speedups.append([np.exp(one + rng.normal(0, spread_, n)) for one, n in zip(moods, (2, 3, 4), strict=True)])
    within, between = scatter(speedups)
    assert (within.freedom, between.freedom) == (6 * profiles, 2 * profiles)
    # A variance of f degrees of freedom is known to sqrt(2 / f) of itself; 5 such.
    assert within.value**2 == pytest.approx(spread_**2, rel=5 * np.sqrt(2 / within.freedom))
    of_means = mood**2 + spread_**2 / 2
    assert between.value**2 == pytest.approx(mood**2, abs=5 * of_means * np.sqrt(2 / between.freedom))


def test_what_was_not_repeated_says_nothing_of_scatter() -> None:
    within, between = scatter([[[2.0]], [[3.0]]])
    assert np.isnan([within.value, between.value]).all() and within.freedom == between.freedom == 0
    assert scatter([[[2.0, 2.2], [2.0, 2.2]]])[1].value == 0.0


def test_one_end_at_a_risk_is_two_ends_at_a_coverage() -> None:
    assert coverage(0.95) == pytest.approx(0.9)
