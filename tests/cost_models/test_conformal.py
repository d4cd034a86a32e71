"""The conformal quantile: the right rank, and a coverage that holds for new scores and for new groups; and how errors
grow with distance.
"""

import numpy as np
import pytest
from scipy.stats import norm

from cost_models import Uncalibrated
from cost_models.uncertainty.conformal import compute_conformal_quantile, fit_error_growth


@pytest.mark.parametrize(("coverage", "rank"), [(0.9, 9), (0.5, 5), (0.45, 5), (0.1, 1), (0.81, 9)])
def test_it_is_the_score_of_rank_n_plus_one_times_coverage_rounded_up(coverage: float, rank: int) -> None:
    scores = np.arange(1.0, 10.0)[::-1]  # (9 + 1) * 0.9 = 9
    assert compute_conformal_quantile(scores, coverage) == rank


def test_too_few_scores_bound_nothing() -> None:
    with pytest.raises(Uncalibrated, match="at least 9 held-out points and this table gives 8"):
        compute_conformal_quantile(np.arange(8.0), 0.9)
    with pytest.raises(Uncalibrated, match="held-out shapes"):
        compute_conformal_quantile(np.arange(80.0), 0.9, groups=np.arange(80) % 8)
    with pytest.raises(Uncalibrated, match="gives 0"):
        compute_conformal_quantile([], 0.5)


def test_groups_of_one_are_no_groups(rng: np.random.Generator) -> None:
    scores = rng.normal(size=57)
    assert compute_conformal_quantile(scores, 0.83) == compute_conformal_quantile(
        scores, 0.83, groups=rng.permutation(57)
    )


@pytest.mark.parametrize("coverage", [0.0, 1.0, 90])
def test_a_coverage_outside_zero_to_one_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        compute_conformal_quantile(np.arange(99.0), coverage)


def _coverage(rng: np.random.Generator, by_group: bool) -> tuple[float, float]:
    """Mean coverage, and its standard error, of a new group's scores over 2000 draws of 19 groups of unlike size."""
    shares = []
    for _ in range(2000):
        sizes = rng.integers(1, 30, size=20)
        groups = np.repeat(np.arange(20), sizes)
        # Small groups behave worse, so counting points instead of groups would be too sure of itself.
        scores = np.abs(rng.normal(size=groups.size) + rng.normal(size=20)[groups]) * (30 / sizes[groups]) ** 0.5
        seen = groups > 0
        bound = compute_conformal_quantile(scores[seen], 0.8, groups=groups[seen] if by_group else None)
        shares.append((scores[~seen] <= bound).mean())
    return float(np.mean(shares)), float(np.std(shares) / len(shares) ** 0.5)


def test_a_new_group_is_covered_and_pooling_points_would_not_cover_it(rng: np.random.Generator) -> None:
    unlikely = norm.ppf(1 - 1e-4)
    mean, error = _coverage(rng, by_group=True)
    assert mean >= 0.8 - unlikely * error
    pooled, error = _coverage(rng, by_group=False)
    assert pooled < 0.8 - unlikely * error


def test_errors_that_grow_with_distance_are_told_from_those_that_do_not(rng: np.random.Generator) -> None:
    distance = rng.uniform(0, 4, 20_000)
    errors = np.abs(rng.laplace(0, 0.02 + 0.05 * distance))
    errors[::50] *= 100  # 2% that are wild shift a median from its 50th to its 51st percentile
    near, further = fit_error_growth(distance, errors)
    # Half of Laplace's values lie within log(2). With the wild ones it is 3% more; over draws the intercept scatters
    # by 3% and the slope by 2%, and four of these are allowed.
    assert near == pytest.approx(0.02 * np.log(2), rel=0.15)
    assert further == pytest.approx(0.05 * np.log(2), rel=0.11)
    near, further = fit_error_growth(distance, np.abs(rng.laplace(0, 0.02, distance.size)))
    assert near == pytest.approx(0.02 * np.log(2), rel=0.05) and further < 0.0005


@pytest.mark.parametrize(
    ("distance", "errors"), [([], []), ([0.0, 0.0], [0.0, 0.0]), ([1.0, 2.0, 3.0], [0.0, 0.0, 1])]
)
def test_no_errors_scatter_by_nothing_that_grows(distance: list[float], errors: list[float]) -> None:
    assert fit_error_growth(distance, errors) == (1.0, 0.0)


def test_errors_that_shrink_with_distance_are_taken_to_stay() -> None:
    near, further = fit_error_growth([0.0, 1.0, 2.0, 3.0], [4.0, 3.0, 2.0, 1.0])
    assert further == pytest.approx(0, abs=1e-9) and 2 <= near <= 3
    assert fit_error_growth([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])[0] > 0
