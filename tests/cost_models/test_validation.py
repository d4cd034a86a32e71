"""Validation: what is held out, what is said, and a model that is wrong must look wrong."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from cost_models import AnchoredLookup, Boosted, Hybrid, Roofline, build_hold_outs, evaluate, evaluate_held_out
from cost_models.evaluation.held_out_errors import split_by_sparsity
from cost_models.uncertainty.timing_noise import estimate_noise_floor

Table = Callable[..., pd.DataFrame]
Seconds = Callable[[pd.DataFrame], np.ndarray]
Noisy = tuple[pd.DataFrame, np.ndarray]


def test_six_anchors_stay_of_a_long_curve(table: Table) -> None:
    X = table(sparsities=tuple(np.linspace(0.4, 0.99, 21))).sample(frac=1, random_state=0)
    [held_out] = split_by_sparsity(X)
    kept = X[~held_out].groupby(["m", "k", "n", "pattern"])["sparsity_target"]
    assert set(kept.count()) == {6}
    np.testing.assert_allclose([kept.min().max(), kept.max().min()], [0.4, 0.99])


def test_a_short_curve_leaves_out_one_inner_anchor_at_a_time(table: Table) -> None:
    X = table(sparsities=(0.5, 0.6, 0.7, 0.8))
    turns = list(split_by_sparsity(X))
    assert [sorted(set(X[held_out]["sparsity_target"])) for held_out in turns] == [[0.6], [0.7]]
    assert list(split_by_sparsity(table(sparsities=(0.5, 0.9)))) == []


def test_a_lookup_is_validated_to_the_noise_it_was_given(
    table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    X = table(sparsities=tuple(np.linspace(0.5, 0.95, 15)))
    y = seconds(X) * rng.lognormal(0, 0.02, len(X))
    figures = evaluate(AnchoredLookup().fit(X, y), X, y, 0.8)
    assert figures["held_out"] == 54 * 9
    # Error of a measurement and of the anchors around it, both 2%: their median is 0.67 * sqrt(1 + 0.7) * 2%.
    assert figures["median"] == pytest.approx(0.0175, rel=0.25)
    assert figures["within_10"] > 0.99
    assert figures["coverage"] * figures["held_out"] >= binom.ppf(1e-4, figures["held_out"], 0.8)
    assert figures["nominal_coverage"] == 0.8


def test_what_cannot_be_held_out_has_no_figures(table: Table, seconds: Seconds) -> None:
    X = table(sparsities=(0.5, 0.9))
    figures = evaluate(AnchoredLookup().fit(X, seconds(X)), X, seconds(X))
    assert (figures["median"], figures["coverage"], figures["width"], figures["held_out"]) == (None, None, None, 0)


def test_errors_without_intervals_are_still_said(table: Table, seconds: Seconds) -> None:
    X = table(shapes=[(64, 64, 64)], patterns=["vector:32"])
    figures = evaluate(AnchoredLookup().fit(X, seconds(X)), X, seconds(X), 0.9)
    assert figures["median"] is not None and figures["coverage"] is None


def test_a_model_of_the_truth_has_a_median_of_one_noise_floor(
    table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    X = table()
    y = seconds(X) * rng.lognormal(0, 0.02, len(X))
    X = X.assign(low_seconds=y * np.exp(-1.96 * 0.02), high_seconds=y * np.exp(1.96 * 0.02))
    # The times are a sum of work at fixed rates: what a roofline gets wrong is noise.
    figures = evaluate(Roofline().fit(X, y), X, y)
    assert figures["noise_floor"] == estimate_noise_floor(X)
    assert 0.8 < figures["median"] / figures["noise_floor"] < 1.3


def test_times_that_no_feature_explains_look_wrong(table: Table, seconds: Seconds, rng: np.random.Generator) -> None:
    X = table()
    # A factor of its own for each shape: nothing about a shape tells it, its other rows do.
    factor = X.groupby(["m", "k", "n"])["m"].transform(lambda rows: rng.lognormal(0, 0.5)).to_numpy(float)
    y = seconds(X) * factor
    figures = evaluate(Boosted(max_iter=60).fit(X, y), X, y, 0.8)
    assert figures["median"] > 0.15
    assert figures["within_10"] < 0.5
    assert figures["width"] > 0.5


def test_what_is_held_out_is_predicted_by_a_model_of_the_rest(noisy: Noisy) -> None:
    X, y = noisy
    ways = build_hold_outs(X)
    [edge] = ways["largest fifth"]
    found = evaluate_held_out(Roofline(), X, y, ways, 0.8, n_jobs=2)
    assert found == evaluate_held_out(Roofline(), X, y, ways, 0.8) and list(found) == list(ways)
    figures = found["largest fifth"]
    model = Roofline(allow_extrapolation=True).fit(X[~edge].reset_index(drop=True), y[~edge])
    predicted, (low, high) = model.predict(X[edge]), model.predict_interval(X[edge], 0.8)
    assert figures["median"] == pytest.approx(np.median(np.abs(predicted / y[edge] - 1)))
    assert figures["coverage"] == pytest.approx(((low <= y[edge]) & (y[edge] <= high)).mean())
    assert figures["width"] == pytest.approx(np.median((high - low) / predicted))
    assert figures["held_out"] == edge.sum()


def test_what_a_model_refuses_is_not_counted_as_predicted(noisy: Noisy) -> None:
    X, y = noisy
    # No other row is of this operation, so a model of the others refuses it.
    odd = X["m"].eq(64).to_numpy()
    X = X.assign(op=np.where(odd, "conv2d", "linear"))
    assert evaluate_held_out(Roofline(), X, y, {"odd": [odd]})["odd"]["held_out"] == 0
    # Nor does it keep what is predicted from counting.
    both = odd | X["m"].eq(256).to_numpy()
    assert evaluate_held_out(Roofline(), X, y, {"both": [both]})["both"]["held_out"] == (both & ~odd).sum()


def test_a_hybrid_is_judged_by_its_learned_part(noisy: Noisy) -> None:
    X, y = noisy
    assert evaluate(Hybrid(max_iter=5).fit(X, y), X, y, 0.8) == evaluate(Boosted(max_iter=5).fit(X, y), X, y, 0.8)
