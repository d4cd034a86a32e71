"""What was measured in some buildings promises for others: simulated searches and verifications."""

import numpy as np
import pytest

from search.end_to_end import PROCESSES
from search.risk import SPREAD, WEIGHT, coverage, promise, spread


@pytest.mark.parametrize("actual", [0.01, 0.03])
@pytest.mark.parametrize("risk", [0.9, 0.95])
def test_a_verification_is_not_below_the_lower_end_as_often_as_promised(
    rng: np.random.Generator, risk: float, actual: float
) -> None:
    kept, trials = 0, 3000
    for _ in range(trials):
        truths = np.exp(rng.normal(0.7, 0.2, 3))  # three profiles, the first in two sessions
        timed = [t * np.exp(rng.normal(0, actual, n)) for t, n in zip(truths, (6, 3, 3), strict=True)]
        low = promise(timed[0], spread(timed, 6), risk).low
        verified = truths[0] * np.exp(rng.normal(0, actual, PROCESSES).mean())
        kept += verified >= low
    # What was seen elsewhere counts too: where the spread is half again as large as there, a little is missing.
    least = risk if actual <= SPREAD else risk - 0.045
    assert kept / trials >= least - 4 * np.sqrt(risk * (1 - risk) / trials)


def test_the_spread_is_between_what_was_measured_and_what_is_usual() -> None:
    assert spread([[2.0]], 1).value == SPREAD
    assert spread([[2.0, 2.0, 2.0]], 3).value < SPREAD
    wide = [np.exp([-0.1, 0.0, 0.1]), 3 * np.exp([-0.1, 0.0, 0.1])]
    few, many = spread(wide, 3), spread(wide * 50, 300)
    assert SPREAD < few.value < many.value <= 0.1
    assert (few.freedom, many.freedom) == (WEIGHT + 2, WEIGHT + 200)  # 2 free of each 3 that share their mean


def test_the_speedup_is_the_mean_and_more_buildings_bring_the_ends_nearer() -> None:
    between = spread([[2.0] * 3], 3)
    few, many = promise([1.0, 4.0], between, 0.9), promise([1.0, 4.0] * 50, between, 0.9)
    assert few.value == many.value == pytest.approx(2.0)
    assert few.low < many.low < 2.0 < many.high < few.high
    assert few.low * few.high == pytest.approx(4.0)
    assert many.low < promise([2.0] * 100, between, 0.6).low < 2.0  # the verification's own buildings remain


def test_one_end_at_a_risk_is_two_ends_at_a_coverage() -> None:
    assert coverage(0.95) == pytest.approx(0.9)
