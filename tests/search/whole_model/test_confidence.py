"""What was measured in some buildings promises for others: simulated searches and verifications."""

import numpy as np
import pytest

from search.whole_model.confidence import (
    BUILD_SPREAD,
    PRIOR_BUILDS,
    SESSION_SPREAD,
    convert_to_coverage,
    estimate_spreads,
    pool_build_spread,
    predict_verified_speedup,
)
from search.whole_model.end_to_end import BUILDS


@pytest.mark.parametrize(
    ("actual", "between_sessions"), [(0.01, 0.0), (BUILD_SPREAD, SESSION_SPREAD), (0.03, SESSION_SPREAD)]
)
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_a_verification_is_not_below_the_lower_end_as_often_as_promised(
    rng: np.random.Generator, confidence: float, actual: float, between_sessions: float
) -> None:
    kept, trials = 0, 3000
    for _ in range(trials):
        truths = np.exp(rng.normal(0.7, 0.2, 3))  # three profiles in the first session, the first in a second one
        offsets = rng.normal(0, between_sessions, 3)
        timed = [
            truths[i] * np.exp(offsets[s] + rng.normal(0, actual, 3)) for i, s in ((0, 0), (1, 0), (2, 0), (0, 1))
        ]
        low = predict_verified_speedup([timed[0], timed[3]], pool_build_spread(timed, 4), confidence).low
        verified = truths[0] * np.exp(offsets[2] + rng.normal(0, actual, BUILDS).mean())
        kept += verified >= low
    assert kept / trials >= confidence - 3 * np.sqrt(confidence * (1 - confidence) / trials)


def test_the_spread_is_between_what_was_measured_and_what_is_usual() -> None:
    assert pool_build_spread([[2.0]], 0).value == BUILD_SPREAD
    assert pool_build_spread([[2.0, 2.0, 2.0]], 2).value < BUILD_SPREAD
    wide = [np.exp([-0.1, 0.0, 0.1]), 3 * np.exp([-0.1, 0.0, 0.1])]
    few, many = pool_build_spread(wide, 2), pool_build_spread(wide * 50, 200)
    assert BUILD_SPREAD < few.value < many.value <= 0.1
    assert (few.freedom, many.freedom) == (PRIOR_BUILDS + 2, PRIOR_BUILDS + 200)


def test_the_speedup_is_the_mean_and_more_buildings_and_sessions_bring_the_ends_nearer() -> None:
    between = pool_build_spread([[2.0] * 3], 2)
    few, many = (
        predict_verified_speedup([[1.0, 4.0]], between, 0.9),
        predict_verified_speedup([[1.0, 4.0] * 50], between, 0.9),
    )
    sessions = predict_verified_speedup([[1.0, 4.0]] * 50, between, 0.9)
    assert few.value == many.value == sessions.value == pytest.approx(2.0)
    assert few.low < many.low < sessions.low < 2.0 < many.high < few.high
    assert few.low * few.high == pytest.approx(4.0)
    assert (
        sessions.low < predict_verified_speedup([[2.0] * 2] * 50, between, 0.6).low < 2.0
    )  # what the verification adds remains


def test_the_scatter_of_buildings_and_of_sessions_is_told_apart(rng: np.random.Generator) -> None:
    spread_, between_sessions, profiles = 0.02, 0.015, 400
    speedups = []
    for _ in range(profiles):
        offsets = rng.normal(0.7, 0.2) + rng.normal(0, between_sessions, 3)
        speedups.append([np.exp(one + rng.normal(0, spread_, n)) for one, n in zip(offsets, (2, 3, 4), strict=True)])
    within, between = estimate_spreads(speedups)
    assert (within.freedom, between.freedom) == (6 * profiles, 2 * profiles)
    # A variance of f degrees of freedom is known to sqrt(2 / f) of itself; 5 such.
    assert within.value**2 == pytest.approx(spread_**2, rel=5 * np.sqrt(2 / within.freedom))
    of_means = between_sessions**2 + spread_**2 / 2
    assert between.value**2 == pytest.approx(between_sessions**2, abs=5 * of_means * np.sqrt(2 / between.freedom))


def test_what_was_not_repeated_says_nothing_of_scatter() -> None:
    within, between = estimate_spreads([[[2.0]], [[3.0]]])
    assert np.isnan([within.value, between.value]).all() and within.freedom == between.freedom == 0
    assert estimate_spreads([[[2.0, 2.2], [2.0, 2.2]]])[1].value == 0.0


def test_one_end_at_a_risk_is_two_ends_at_a_coverage() -> None:
    assert convert_to_coverage(0.95) == pytest.approx(0.9)
