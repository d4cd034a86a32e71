"""The hybrid: measured curves as the look-up has them, everything else as the learned model has it."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from cost_models import AnchoredLookup, Boosted, Hybrid, MixedModes, Unanchored, Uncalibrated

Table = Callable[..., pd.DataFrame]
Noisy = tuple[pd.DataFrame, np.ndarray]


def test_measured_curves_are_looked_up_and_others_learned(noisy: Noisy, table: Table) -> None:
    X, y = noisy
    hybrid, lookup, learned = (
        Hybrid(max_iter=10).fit(X, y),
        AnchoredLookup().fit(X, y),
        Boosted(max_iter=10).fit(X, y),
    )
    curve = table(shapes=[(256, 320, 37)], sparsities=(0.55, 0.9))
    other = table(shapes=[(300, 300, 100)], sparsities=(0.55, 0.9))
    asked = pd.concat([other, curve], ignore_index=True)
    np.testing.assert_array_equal(hybrid.predict(asked), np.append(learned.predict(other), lookup.predict(curve)))
    for ours, theirs, measured in zip(
        hybrid.predict_interval(asked, 0.8),
        learned.predict_interval(other, 0.8),
        lookup.predict_interval(curve, 0.8),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, np.append(theirs, measured))
    assert hybrid.covers(asked).all()
    assert not np.any(list(hybrid.octaves_outside(asked).values()))


def test_what_neither_covers_is_refused_until_allowed(noisy: Noisy, table: Table) -> None:
    X, y = noisy
    hybrid = Hybrid(max_iter=10).fit(X, y)
    far = table(shapes=[(4096, 320, 37)], sparsities=(0.5,))
    assert not hybrid.covers(far).any()
    with pytest.raises(Unanchored, match=r"m of a linear layer is 2.0 octaves outside"):
        hybrid.predict(far)
    assert (hybrid.set_params(allow_extrapolation=True).predict(far) > 0).all()
    with pytest.raises(Unanchored, match="format block was not measured"):
        hybrid.predict(table(shapes=[(256, 320, 37)], patterns=["block:8x8"]))


def test_no_rows_give_no_seconds(noisy: Noisy) -> None:
    X, y = noisy
    model = Hybrid(max_iter=10).fit(X, y)
    assert model.predict(X.iloc[:0]).shape == (0,)
    assert [bound.shape for bound in model.predict_interval(X.iloc[:0])] == [(0,), (0,)]


def test_modes_do_not_mix(noisy: Noisy) -> None:
    X, y = noisy
    with pytest.raises(MixedModes, match="cache_mode rotated and warm"):
        Hybrid(max_iter=10).fit(X.assign(cache_mode=np.where(np.arange(len(X)) % 2, "warm", "rotated")), y)


def test_measured_times_of_one_sample_have_intervals(noisy: Noisy, table: Table) -> None:
    """As in published tables: no curve has an anchor to leave out, and no time shows its noise."""
    X, y = noisy
    once = X["sparsity_target"].eq(0.8).to_numpy()
    X, y = X[once].reset_index(drop=True), y[once]
    model = Hybrid(max_iter=10).fit(X, y)
    other = table(shapes=[(300, 300, 100)], patterns=("vector:32",), sparsities=(0.8,))
    low, high = model.predict_interval(pd.concat([X[:5], other], ignore_index=True), 0.8)
    assert (low[:5] < y[:5]).all() and (y[:5] < high[:5]).all()
    width = np.exp(2 * model.learned_.half_widths(X[:5], 0.8))
    np.testing.assert_allclose(high[:5] / low[:5], width)
    assert low[5] < model.learned_.predict(other)[0] < high[5]
    with pytest.raises(Uncalibrated, match="held-out points"):
        model.lookup_.predict_interval(X[:5], 0.8)
