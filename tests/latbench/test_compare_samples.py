"""Verdicts on two sets of samples."""

import numpy as np
import pytest

from latbench.compare_samples import spread, verdict

DIFFERENCES = {"SAME": 1.0, "SLOWER": 1.05, "FASTER": 1 / 1.05}


def noise(rng, count, spread=0.01):
    """Times around a millisecond, each resembling the one before."""
    steps = rng.normal(size=count)
    for i in range(1, count):
        steps[i] = 0.8 * steps[i - 1] + 0.6 * steps[i]
    return 1e-3 * np.exp(spread * steps)


@pytest.mark.parametrize(("kind", "factor"), DIFFERENCES.items())
def test_what_differs_by_more_than_the_threshold_is_told_from_what_does_not(kind, factor):
    rng = np.random.default_rng(len(kind))
    judged = [verdict(noise(rng, 200), factor * noise(rng, 200)) for _ in range(20)]
    assert [each.kind for each in judged].count(kind) >= 19
    assert all(each.low <= each.ratio <= each.high for each in judged)


def test_what_is_equal_is_hardly_ever_called_different():
    rng = np.random.default_rng(1)
    kinds = [verdict(noise(rng, 60, 0.05), noise(rng, 60, 0.05)).kind for _ in range(100)]
    assert sum(kind in ("FASTER", "SLOWER") for kind in kinds) <= 1


def test_the_interval_covers_the_true_ratio_although_neighbours_resemble_each_other():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(60):
        judged = verdict(noise(rng, 300), 1.03 * noise(rng, 300))
        covered += judged.low <= 1.03 <= judged.high
    assert covered >= 54


def test_a_difference_at_the_threshold_is_unclear():
    rng = np.random.default_rng(3)
    assert verdict(noise(rng, 100), 1.02 * noise(rng, 100)).kind == "UNCLEAR"


def test_few_samples_are_unclear_however_far_apart():
    judged = verdict([1.0, 1.1, 1.2], [9.0, 9.5])
    assert judged.kind == "UNCLEAR"
    assert (judged.low, judged.high) == (9 / 1.2, 9.5 / 1)


def test_the_same_samples_get_the_same_verdict():
    rng = np.random.default_rng(4)
    before, after = noise(rng, 999), noise(rng, 77)
    assert verdict(before, after) == verdict(list(before), list(after))


def test_the_threshold_is_the_callers():
    constant = [1.0] * 10
    assert verdict(constant, [1.05] * 10, threshold=0.1).kind == "SAME"
    assert verdict(constant, [1.05] * 10, threshold=0.01).kind == "SLOWER"


def test_a_single_spike_moves_no_verdict():
    before = [1.0, 1.001] * 20
    assert verdict(before, [*before, 1e6]).kind == "SAME"


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_what_is_no_time_is_refused(samples):
    with pytest.raises(ValueError, match="before"):
        verdict(samples, [1.0])


def test_a_threshold_of_nothing_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        verdict([1.0], [1.0], threshold=0)


def test_runs_that_differ_widen_the_interval():
    rng = np.random.default_rng(5)
    before, after = noise(rng, 200, 0.001), 1.05 * noise(rng, 200, 0.001)
    assert verdict(before, after).kind == "SLOWER"
    assert verdict(before, after, between=0.005).kind == "SLOWER"
    wide = verdict(before, after, between=0.05)
    assert wide.kind == "UNCLEAR"
    assert np.log(wide.high / wide.ratio) == pytest.approx(1.96 * 0.05, rel=1e-3)
    assert np.log(wide.ratio / wide.low) == pytest.approx(1.96 * 0.05, rel=1e-3)


def test_the_spread_of_runs_is_that_of_the_points_that_did_not_change():
    rng = np.random.default_rng(6)
    ratios = 1.1 * np.exp(0.03 * rng.normal(size=400))  # a machine that is slower as a whole spreads nothing
    assert spread(ratios) == pytest.approx(0.03, rel=0.15)
    ratios[:60] *= 1.5
    assert spread(ratios) == pytest.approx(0.03, rel=0.35)
    assert spread([1.0, 2.0]) == 0.0
