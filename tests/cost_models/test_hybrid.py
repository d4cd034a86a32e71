"""The hybrid: measured curves as the look-up has them, everything else as the learned model has it."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from cost_models import AnchoredLookup, Boosted, Hybrid, MixedModes, Unanchored

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
    with pytest.raises(Unanchored, match=r"m is 2.0 octaves outside"):
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
