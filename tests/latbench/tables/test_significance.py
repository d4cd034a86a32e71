"""Verdicts on two sets of samples."""

import numpy as np
import pytest

from latbench.tables import significance
from latbench.tables.significance import ChangeVerdict, estimate_spread, judge_change, judge_together

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
    judged = [judge_change(noise(rng, 200), factor * noise(rng, 200)) for _ in range(20)]
    assert [each.kind for each in judged].count(kind) >= 19
    assert all(each.low <= each.ratio <= each.high for each in judged)


def test_what_is_equal_is_hardly_ever_called_different():
    rng = np.random.default_rng(1)
    kinds = [judge_change(noise(rng, 60, 0.05), noise(rng, 60, 0.05)).kind for _ in range(100)]
    assert sum(kind in ("FASTER", "SLOWER") for kind in kinds) <= 1


def test_the_interval_covers_the_true_ratio_although_neighbours_resemble_each_other():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(60):
        judged = judge_change(noise(rng, 300), 1.03 * noise(rng, 300))
        covered += judged.low <= 1.03 <= judged.high
    assert covered >= 54


def test_a_difference_at_the_threshold_is_unclear():
    rng = np.random.default_rng(3)
    assert judge_change(noise(rng, 100), 1.02 * noise(rng, 100)).kind == "UNCLEAR"


def test_few_samples_are_unclear_however_far_apart():
    judged = judge_change([1.0, 1.1, 1.2], [9.0, 9.5])
    assert judged.kind == "UNCLEAR"
    assert (judged.low, judged.high) == (9 / 1.2, 9.5 / 1)


def test_a_time_without_an_interval_is_the_same_only_as_itself():
    assert judge_change([0.0138], [0.0138]) == ChangeVerdict("SAME", 1.0, 1.0, 1.0)
    for other in (0.0138001, 0.0137, 9.0):  # how much a single time varies is not known
        assert judge_change([0.0138], [other]).kind == judge_change([other], [0.0138]).kind == "UNCLEAR"


def test_what_is_compared_with_itself_is_the_same_however_noisy():
    times = noise(np.random.default_rng(9), 60, 0.3)
    assert judge_change(times, times, between=0.5).kind == "SAME"
    assert judge_change(times, times[::-1]).kind == "UNCLEAR"


def test_the_same_samples_get_the_same_verdict():
    rng = np.random.default_rng(4)
    before, after = noise(rng, 999), noise(rng, 77)
    assert judge_change(before, after) == judge_change(list(before), list(after))


def test_the_threshold_is_the_callers():
    constant = [1.0] * 10
    assert judge_change(constant, [1.05] * 10, threshold=0.1).kind == "SAME"
    assert judge_change(constant, [1.05] * 10, threshold=0.01).kind == "SLOWER"


def test_a_single_spike_moves_no_verdict():
    before = [1.0, 1.001] * 20
    assert judge_change(before, [*before, 1e6]).kind == "SAME"


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_what_is_no_time_is_refused(samples):
    with pytest.raises(ValueError, match="before"):
        judge_change(samples, [1.0])


def test_a_threshold_of_nothing_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        judge_change([1.0], [1.0], threshold=0)


def test_runs_that_differ_widen_the_interval():
    rng = np.random.default_rng(5)
    before, after = noise(rng, 200, 0.001), 1.05 * noise(rng, 200, 0.001)
    assert judge_change(before, after).kind == "SLOWER"
    assert judge_change(before, after, between=0.005).kind == "SLOWER"
    wide = judge_change(before, after, between=0.05)
    assert wide.kind == "UNCLEAR"
    assert np.log(wide.high / wide.ratio) == pytest.approx(1.96 * 0.05, rel=1e-3)
    assert np.log(wide.ratio / wide.low) == pytest.approx(1.96 * 0.05, rel=1e-3)


def test_the_spread_of_runs_is_that_of_the_points_that_did_not_change():
    rng = np.random.default_rng(6)
    ratios = 1.1 * np.exp(0.03 * rng.normal(size=400))  # a machine that is slower as a whole spreads nothing
    assert estimate_spread(ratios) == pytest.approx(0.03, rel=0.15)
    ratios[:60] *= 1.5
    assert estimate_spread(ratios) == pytest.approx(0.03, rel=0.35)
    assert estimate_spread([1.0, 2.0]) == 0.0


@pytest.mark.parametrize(("count", "blocks"), [(7, 7), (48, 12), (500, 12)])
def test_the_median_of_resamples_is_distributed_as_drawing_them_shows(count, blocks):
    """Against resamples that are drawn one by one; of 20,000 a quantile's rank is known to 1% (3 deviations)."""
    rng = np.random.default_rng(count)
    times = noise(rng, count, 0.05)
    each = [
        np.quantile(block, (np.arange(most) + 0.5) / most, method="hazen")
        for block in np.array_split(times, blocks)
        for most in [min(significance.MOST_OF_A_BLOCK, count // blocks)]
    ]
    drawn = np.sort(
        [np.median(np.concatenate([each[i] for i in rng.integers(blocks, size=blocks)])) for _ in range(20_000)]
    )
    shares = np.array([0.025, 0.2, 0.5, 0.8, 0.975])
    found = significance._medians(times, shares)
    # A median between two values stands for either of them here.
    below, above = (np.searchsorted(drawn, found * edge) / len(drawn) for edge in (1 - 1e-2, 1 + 1e-2))
    assert (below - 0.011 <= shares).all() and (shares <= above + 0.011).all()


@pytest.mark.slow
def test_of_many_points_that_did_not_change_hardly_ever_one_is_called_changed():
    """Runs differ by 3%: of 900 points 2 are beyond their own intervals and the threshold."""
    rng = np.random.default_rng(7)
    tables_with, alone = 0, 0
    for _ in range(20):
        ratios = np.exp(0.03 * rng.normal(size=900))
        judged = [judge_change([1.0] * 6, [ratio] * 6, between=0.03) for ratio in ratios]
        alone += sum(each.kind in ("FASTER", "SLOWER") for each in judged)
        tables_with += any(each.kind in ("FASTER", "SLOWER") for each in judge_together(judged))
    assert alone > 20 and tables_with <= 4  # 1 of 20 expected, 5 have a chance of 0.3%


def test_a_change_is_found_among_many_points_that_did_not():
    rng = np.random.default_rng(8)
    ratios = np.exp(0.01 * rng.normal(size=300))
    ratios[:30] *= 1.1
    judged = judge_together([judge_change([1.0] * 6, [ratio] * 6, between=0.01) for ratio in ratios])
    assert [each.kind for each in judged[:30]].count("SLOWER") >= 28
    assert sum(each.kind in ("FASTER", "SLOWER") for each in judged[30:]) <= 5
    assert {each.kind for each in judged[30:]} > {"SAME"}


def test_a_verdict_alone_stays_as_it_is():
    for factor in (1.0, 1.2, 0.5):
        one = judge_change([1.0, 1.001] * 10, [factor, 1.001 * factor] * 10, between=0.01)
        assert judge_together([one]) == [one]
    assert judge_together([]) == []
    lucky = ChangeVerdict("SLOWER", 1.1, 1.021, 1.2, 0.04)
    assert [each.kind for each in judge_together([lucky] + [ChangeVerdict("SAME", 1.0, 0.99, 1.01)] * 9)] == [
        "UNCLEAR"
    ] + ["SAME"] * 9
