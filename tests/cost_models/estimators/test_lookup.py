"""The anchored look-up: exact where measured, calibrated between, silent nowhere."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm
from sklearn.base import clone

from cost_models import AnchoredLookup, Unanchored, Uncalibrated, evaluate, read_training_rows
from cost_models.estimators.anchored_lookup import LeaveOneOutErrors
from latbench.base.bundled_data import find_bundled_table
from latbench.importers.text_formats import read_spdy

Noisy = tuple[pd.DataFrame, np.ndarray]
Table = Callable[..., pd.DataFrame]
Seconds = Callable[[pd.DataFrame], np.ndarray]


def test_a_measured_point_is_given_back_exactly(noisy: Noisy) -> None:
    X, y = noisy
    order = np.random.default_rng(0).permutation(len(X))
    np.testing.assert_allclose(AnchoredLookup().fit(X, y).predict(X.iloc[order]), y[order], rtol=1e-12)


def test_between_anchors_a_smooth_curve_is_followed(table: Table, seconds: Seconds) -> None:
    X, between = table(), table(sparsities=(0.55, 0.75, 0.93))
    predicted = AnchoredLookup().fit(X, seconds(X)).predict(between)
    # PCHIP is third order in the widest gap; 2% is three times what these curves bend by there.
    np.testing.assert_allclose(predicted, seconds(between), rtol=0.02)


def test_a_rise_with_sparsity_is_kept_not_smoothed_away(table: Table) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.5, 0.6, 0.7))
    predicted = (
        AnchoredLookup()
        .fit(X, [1.0, 0.5, 2.0])
        .predict(table(shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.55, 0.65)))
    )
    assert 0.5 < predicted[0] < 1.0
    assert 0.5 < predicted[1] < 2.0


def test_dense_does_not_anchor_a_sparse_curve(table: Table) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.5, 0.6, 0.7))
    dense = table(shapes=[(8, 8, 8)], patterns=["dense"], sparsities=(0.0,))
    model = AnchoredLookup().fit(pd.concat([X, dense]), [3.0, 2.0, 1.0, 9.0])
    np.testing.assert_allclose(model.predict(dense), [9.0])
    with pytest.raises(
        Unanchored, match=r"linear 8x8x8 unstructured on numba was measured at a sparsity of 0.5 to 0.7"
    ):
        model.predict(X.assign(sparsity_target=0.2))


def test_published_timings_at_six_anchors_are_met_within_ten_percent(data: Path) -> None:
    tables = sorted((data / "spdy_tables").glob("*.txt"))
    rows = [
        (table.stem, layer, sparsity, time)
        for table in tables
        for layer, points in read_spdy(table).layers.items()
        for time, sparsity in points
        if sparsity > 0
    ]
    X = pd.DataFrame(rows, columns=["device", "model", "sparsity_target", "seconds"])
    place = X.groupby(["device", "model"]).cumcount()
    # 41 levels at equal ratios of density, six of them kept.
    kept = place.isin([0, 8, 16, 24, 32, 40])
    model = AnchoredLookup().fit(X[kept], X[kept]["seconds"])
    held_out = X[~kept]
    error = np.abs(model.predict(held_out) / held_out["seconds"] - 1)
    assert (error <= 0.10).mean() >= 0.96
    low, high = model.predict_interval(held_out, 0.9)
    covered = (low <= held_out["seconds"]) & (held_out["seconds"] <= high)
    assert covered.groupby(held_out["device"]).mean().min() >= 0.9


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9])
def test_intervals_cover_new_measurements_between_anchors(
    coverage: float, noisy: Noisy, table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    X, y = noisy
    new = table(sparsities=(0.55, 0.65, 0.75, 0.85))
    measured = seconds(new) * rng.lognormal(0, 0.02, len(new))
    low, high = AnchoredLookup().fit(X, y).predict_interval(new, coverage)
    covered = int(((low <= measured) & (measured <= high)).sum())
    # At least the nominal share, but for the binomial spread of these points (1 in 10,000). Above it the intervals
    # may lie: a left-out anchor sits in a wider gap than a real query. They must still be of the noise's order.
    assert covered >= binom.ppf(1e-4, len(new), coverage)
    assert np.median(np.log(high / low)) / 2 < 6 * 0.02


def test_wider_coverage_gives_wider_intervals_around_the_prediction(noisy: Noisy, table: Table) -> None:
    model, new = AnchoredLookup().fit(*noisy), table(sparsities=(0.55, 0.77))
    narrow, wide = model.predict_interval(new, 0.5), model.predict_interval(new, 0.95)
    predicted = model.predict(new)
    assert (wide[0] < narrow[0]).all() and (narrow[0] < predicted).all()
    assert (predicted < narrow[1]).all() and (narrow[1] < wide[1]).all()


def test_a_measured_point_has_its_measured_noise(noisy: Noisy) -> None:
    X, y = noisy
    X = X.assign(low_seconds=y * 0.97, high_seconds=y / 0.97)
    low, high = AnchoredLookup().fit(X, y).predict_interval(X, 0.95)
    np.testing.assert_allclose(low, y * 0.97)
    np.testing.assert_allclose(high, y / 0.97)


def test_a_machine_that_drifts_makes_its_measurements_less_certain(table: Table, rng: np.random.Generator) -> None:
    X = table(shapes=[(m, 8, 8) for m in range(2000)], patterns=["dense"], sparsities=(0.0,))
    truth = np.ones(len(X))
    # The speed wanders by 5% between the two halves of each measurement.
    halves = rng.lognormal(0, 0.05, (2, len(X)))
    y = truth * halves.mean(axis=0)
    X = X.assign(low_seconds=y, high_seconds=y, drift_ratio=halves[1] / halves[0])
    low, high = AnchoredLookup().fit(X, y).predict_interval(X, 0.9)
    # The interval is that of the median: 90% of them hold the truth, but for the binomial spread, and for the 2.6% by
    # which the drift estimated from 2000 halves may be off (0.5% of coverage) or a mean of two is not log-normal.
    inside = int(((low <= truth) & (truth <= high)).sum())
    assert binom.ppf(1e-4, len(X), 0.9) - 0.02 * len(X) <= inside <= binom.ppf(1 - 1e-4, len(X), 0.9) + 0.02 * len(X)


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_a_wild_anchor_does_not_announce_the_errors_beside_it(
    coverage: float, table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    levels = (0.5, 0.6, 0.75, 0.8, 0.9, 0.95)
    X = table(shapes=[(m, k, 64) for m in range(64, 1064, 100) for k in (64, 256, 1024)], sparsities=levels)
    wild = np.where(rng.random(len(X)) < 0.15, 0.15, 0.01)
    y = seconds(X) * np.exp(rng.normal(0, wild))
    figures = evaluate(AnchoredLookup().fit(X, y), X, y, coverage)
    # 60 curves; were each curve's four points all in or all out, the standard error would be that of 60.
    assert abs(figures["coverage"] - coverage) < norm.ppf(1 - 1e-3) * (coverage * (1 - coverage) / 60) ** 0.5


def test_further_from_what_was_measured_it_is_less_certain(
    table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    coarse = table(shapes=[(512, 512, 64)], patterns=["vector:32"], sparsities=(0.2, 0.6, 0.99))
    X = pd.concat([table(sparsities=(0.5, 0.6, 0.7, 0.8, 0.9, 0.99)), coarse], ignore_index=True)
    # The truth bends between anchors, the more the further from them, and hardly any noise hides it.
    y = seconds(X) * (1 + 0.3 * np.sin(40 * X["sparsity_target"])) * rng.lognormal(0, 1e-3, len(X))
    model = AnchoredLookup().fit(X, y)
    low, high = model.predict_interval(coarse.assign(sparsity_target=[0.595, 0.4, 0.85]), 0.9)
    assert (np.diff(high / low) > 0.01).all()
    # Nearer than most of the anchors that were left out, nothing was seen to be more certain.
    low, high = model.predict_interval(coarse.iloc[:2].assign(sparsity_target=[0.595, 0.5999]), 0.9)
    assert np.diff(high / low) == pytest.approx(0)


def test_the_bundled_tables_held_out_sparsities_lie_in_their_intervals_as_often_as_said() -> None:
    X, y = read_training_rows(find_bundled_table("amd-epyc-zen4-1-thread"))
    figures = evaluate(AnchoredLookup().fit(X, y), X, y, 0.9)
    # 464 points of 116 curves.
    assert 0.88 <= figures["coverage"] <= 0.94
    assert figures["width"] < 0.12


def test_leaving_an_anchor_out_of_a_curve_is_as_if_it_had_not_been_measured(
    table: Table, rng: np.random.Generator
) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["vector:32"], sparsities=tuple(np.linspace(0.3, 0.97, 12)))
    y = rng.lognormal(size=len(X))
    sparsity, values = X["sparsity_target"].to_numpy(), np.log(np.stack([y, y[::-1]], axis=1))
    found = LeaveOneOutErrors.from_curves(sparsity, values)
    for i in range(1, len(X) - 1):
        model = AnchoredLookup().fit(X.drop(index=i), np.delete(y, i))
        assert found.errors[i - 1, 0] == pytest.approx(abs(np.log(model.predict(X.iloc[[i]])[0] / y[i])))
        expected = LeaveOneOutErrors.from_curves(np.delete(sparsity, i), np.delete(values, i, axis=0))
        np.testing.assert_allclose(found.without[i - 1][0], expected.errors, rtol=1e-9)
        np.testing.assert_allclose(found.without[i - 1][1], expected.distances)


def test_a_curve_of_two_anchors_is_trusted_no_more_than_the_worst_curve(table: Table, noisy: Noisy) -> None:
    X, y = noisy
    short = table(shapes=[(8, 8, 8)], patterns=["vector:32"], sparsities=(0.7, 0.9))
    model = AnchoredLookup().fit(pd.concat([X, short]), [*y, 2.0, 1.0])

    def width(query: pd.DataFrame) -> np.ndarray:
        low, high = model.predict_interval(query, 0.9)
        return np.log(high / low)

    # As far from the nearest anchor as the others' between 0.7 and 0.8.
    assert width(short.iloc[:1].assign(sparsity_target=0.73))[0] == pytest.approx(
        width(X.assign(sparsity_target=0.73)).max()
    )


def test_too_few_anchors_for_an_interval_is_said(table: Table, seconds: Seconds) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["vector:32"])
    model = AnchoredLookup().fit(X, seconds(X))
    with pytest.raises(Uncalibrated, match="needs at least 9 held-out points and this table gives 4"):
        model.predict_interval(X.assign(sparsity_target=0.55), 0.9)
    assert np.isfinite(model.predict_interval(X.assign(sparsity_target=0.55), 0.75)).all()


def test_an_unmeasured_shape_is_refused_by_name(noisy: Noisy) -> None:
    X, y = noisy
    model = AnchoredLookup().fit(X, y)
    with pytest.raises(
        Unanchored, match=r"nothing measured anchors linear 65x48x1 vector:32 on numba.*m is 64, not 65"
    ):
        model.predict(X.iloc[:1].assign(m=65))
    with pytest.raises(Unanchored, match="threads is 2, not 1"):
        model.predict_interval(X.iloc[:1].assign(threads=1))
    assert issubclass(Unanchored, ValueError)


def test_columns_that_are_left_out_must_not_matter(noisy: Noisy) -> None:
    X, y = noisy
    few = X[["m", "k", "n", "pattern", "sparsity_target"]]
    np.testing.assert_allclose(AnchoredLookup().fit(X, y).predict(few), y, rtol=1e-12)
    both = AnchoredLookup().fit(pd.concat([X, X.assign(threads=1)]), np.concatenate([y, y]))
    with pytest.raises(Unanchored, match=r"measured in several ways: say which threads 1 or 2"):
        both.predict(few)


def test_missing_values_match_missing_values_whatever_the_dtype(noisy: Noisy) -> None:
    X, y = noisy
    model = AnchoredLookup().fit(X.astype({"m": "float64", "batch": "object"}), y)
    np.testing.assert_allclose(model.predict(X.assign(batch=None).convert_dtypes()), y, rtol=1e-12)


def test_extrapolation_is_a_straight_line_when_allowed(table: Table) -> None:
    X = table(
        shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.36, 0.51, 0.64)
    )  # densities .8^2 .7^2 .6^2
    query = X.iloc[:2].assign(sparsity_target=[0.19, 0.75])
    model = AnchoredLookup(allow_extrapolation=True).fit(X, np.exp([2.0, 1.0, 0.5]))
    np.testing.assert_allclose(np.log(model.predict(query)), [3.0, 0.0])
    low, high = (
        AnchoredLookup(allow_extrapolation=True)
        .fit(pd.concat([X.assign(m=m) for m in range(20)]), np.tile(np.exp([2.0, 1.0, 0.5]), 20))
        .predict_interval(query.assign(m=1), 0.9)
    )
    assert low[0] < np.exp(2.0) and high[0] > np.exp(3.0)
    assert low[1] < np.exp(0.0) and high[1] > np.exp(0.5)


def test_everything_pruned_is_a_sparsity_like_any_other(table: Table) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.5, 0.9, 1.0))
    model = AnchoredLookup().fit(X, [3.0, 2.0, 1.0])
    assert 1.0 < model.predict(X.iloc[:1].assign(sparsity_target=0.99))[0] < 2.0


@pytest.mark.parametrize("times", [[1.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf], [1.0, 0.0]])
def test_times_that_are_none_are_refused(times: list[float], table: Table) -> None:
    X = table(shapes=[(8, 8, 8)], patterns=["unstructured"], sparsities=(0.5, 0.9))
    with pytest.raises(ValueError, match=r"one time a row|positive finite"):
        AnchoredLookup().fit(X, times)


def test_a_sparsity_outside_zero_to_one_is_refused(noisy: Noisy) -> None:
    X, y = noisy
    with pytest.raises(ValueError, match=r"sparsity_target must lie in \[0, 1\], and it is 75\.0 in 1 rows"):
        AnchoredLookup().fit(X, y).predict(X.iloc[:1].assign(sparsity_target=75.0))


def test_it_is_a_scikit_learn_estimator(noisy: Noisy) -> None:
    model = AnchoredLookup(allow_extrapolation=True)
    assert clone(model).get_params() == {"allow_extrapolation": True}
    assert not [name for name in vars(model) if name.endswith("_")]
    assert model.fit(*noisy) is model
    assert model.score(*noisy) == pytest.approx(1)
    np.testing.assert_array_equal(model.predict(noisy[0]), clone(model).fit(*noisy).predict(noisy[0]))


def test_an_empty_query_gives_an_empty_answer(noisy: Noisy) -> None:
    model = AnchoredLookup().fit(*noisy)
    assert model.predict(noisy[0].iloc[:0]).shape == (0,)


def test_it_covers_what_it_predicts_without_extrapolating(noisy: Noisy, table: Table) -> None:
    X, y = noisy
    asked = pd.concat([
        table(sparsities=(0.4, 0.5, 0.66, 0.95, 0.96)), table(patterns=["nm:2:4"], sparsities=(0.5,)),
        table(shapes=[(65, 48, 1)], sparsities=(0.5, 0.9)),
    ], ignore_index=True)  # fmt: skip
    model = AnchoredLookup().fit(X, y)

    def predicts(row: pd.DataFrame) -> bool:
        try:
            model.predict(row)
        except Unanchored:
            return False
        return True

    covered = model.covers(asked)
    some = np.arange(0, len(asked), 7)
    assert covered[some].tolist() == [predicts(asked.iloc[[i]]) for i in some]
    assert 0 < covered[some].sum() < len(some)
    # What is allowed to be extrapolated is not covered for that.
    assert AnchoredLookup(allow_extrapolation=True).fit(X, y).covers(asked).tolist() == covered.tolist()
    both = model.fit(pd.concat([X, X.assign(threads=1)]), np.tile(y, 2))
    assert not both.covers(asked.drop(columns="threads")).any()  # it would have to say which
