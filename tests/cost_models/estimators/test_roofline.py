"""The roofline: rates that were put in come out, forms that the table calls for, and what it extrapolates to."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from cost_models import Roofline, Unanchored
from cost_models.features.work_terms import FORMS, count_work, fit_rates

Table = Callable[..., pd.DataFrame]
Seconds = Callable[[pd.DataFrame], np.ndarray]


def test_sums_of_work_are_recovered_from_a_quarter_of_the_shapes_to_thousandfold_work(
    table: Table, seconds: Seconds
) -> None:
    X = table()
    small = (X["m"] * X["k"] * X["n"] < np.median(X["m"] * X["k"] * X["n"])).to_numpy()
    model = Roofline(allow_extrapolation=True).fit(X[small], seconds(X[small]))
    # The truth is of this form but for the word on what a call costs, which has the weight of 0.3% of the rows.
    np.testing.assert_allclose(model.predict(X), seconds(X), rtol=0.02)


def test_few_wild_times_do_not_bend_the_rates(table: Table, seconds: Seconds) -> None:
    X = table()
    wild = seconds(X) * np.where(np.arange(len(X)) % 10 == 0, 5.0, 1.0)
    assert np.median(np.abs(Roofline().fit(X, wild).predict(X) / seconds(X) - 1)) < 0.03


def test_a_call_costs_about_a_third_of_the_shortest_where_nothing_tells(table: Table) -> None:
    X = table(shapes=[(1024, 1024, 1024), (2048, 1024, 1024)], patterns=["dense"], sparsities=(0.0,))
    work = count_work(X, "plain", ("dense",))[:, :1]
    rates = fit_rates(work, np.array([3e-3, 3e-3]))
    # Two rows that are nothing but a call overrule what 0.3% of two rows say, all but for log(0.3) of that weight.
    assert rates[0] * 1.01 >= 3e-3 * 0.3 ** (0.003 / 1.003)
    assert rates[0] <= 3e-3 * 1.01
    no_call = fit_rates(np.array([[1.0, 1e9], [1.0, 2e9], [1.0, 4e9]]), np.array([1e-3, 2e-3, 4e-3]))
    assert 0 <= no_call[0] < 0.3e-3


def test_a_cache_that_weights_outgrow_calls_for_that_form(rng: np.random.Generator) -> None:
    sizes = (2 ** rng.uniform(6, 14, (400, 3))).astype(int)
    X = pd.DataFrame(sizes, columns=["m", "k", "n"]).assign(
        op="linear", backend="torch", device="a-gpu", pattern="dense", sparsity_target=0.0, dtype_w="float32"
    )
    flop, weight = (2.0 * X["m"] * X["k"] * X["n"]).to_numpy(), (4.0 * X["m"] * X["k"]).to_numpy()
    y = (1e-5 + flop / 1e13 * (1 + 4 * weight / (weight + 2**24))) * rng.lognormal(0, 0.02, len(X))
    plain, chosen = Roofline(form="plain").fit(X, y), Roofline(form=None).fit(X, y)
    assert chosen.predictor_.form == "cached"
    assert np.median(np.abs(chosen.predict(X) / y - 1)) < 0.03 < np.median(np.abs(plain.predict(X) / y - 1))


def test_plain_is_chosen_where_shapes_are_few(table: Table, seconds: Seconds) -> None:
    X = table()
    assert Roofline(form=None).fit(X, seconds(X)).predictor_.form == "plain"


@pytest.mark.parametrize("form", FORMS)
def test_no_rate_is_negative_and_more_tokens_take_longer(
    form: str, table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    X = table()
    model = Roofline(form=form, allow_extrapolation=True).fit(X, seconds(X) * rng.lognormal(0, 0.3, len(X)))
    assert (model.predictor_.rates >= 0).all()
    assert (model.predict(X.assign(n=X["n"] * 2)) > model.predict(X)).all()


def test_beyond_the_measured_it_refuses_until_allowed(table: Table, seconds: Seconds) -> None:
    X = table()
    model = Roofline().fit(X, seconds(X))
    far = X.iloc[:1].assign(n=4096)
    with pytest.raises(
        Unanchored, match=r"n of a linear layer is 5\.0 octaves outside the measured range of 1 to 128"
    ):
        model.predict(far)
    assert model.set_params(allow_extrapolation=True).predict(far)[0] == pytest.approx(seconds(far)[0], rel=0.02)


def test_kernels_and_thread_counts_have_rates_of_their_own(table: Table, seconds: Seconds) -> None:
    X = table()
    slow = X.assign(kernel_requested="slow")
    four = X.assign(threads=4)
    both = pd.concat([X, slow, four], ignore_index=True)
    y = np.concatenate([seconds(X), 3 * seconds(X), seconds(X) / 2])
    model = Roofline().fit(both, y)
    np.testing.assert_allclose(model.predict(both), y, rtol=0.02)
    for unseen in (slow.assign(threads=4), X.assign(threads=3)):
        for extrapolate in (False, True):
            with pytest.raises(Unanchored, match="nothing of format vector was measured with kernel_requested"):
                model.set_params(allow_extrapolation=extrapolate).predict(unseen.iloc[:1])
    assert not model.covers(X.assign(threads=3)).any()


def test_what_an_engine_was_not_measured_with_is_refused_and_does_not_bend_hold_outs(
    table: Table, seconds: Seconds
) -> None:
    X = table()
    dense = table(shapes=[(64, 48, 37), (256, 48, 37)], patterns=["dense"], sparsities=(0.0,))
    both = pd.concat([X, dense.assign(kernel_requested="mkldnn")], ignore_index=True)
    model = Roofline().fit(both, np.append(seconds(X), 2 * seconds(dense)))
    with pytest.raises(Unanchored, match="nothing of format vector was measured with kernel_requested mkldnn"):
        model.predict(X.iloc[:1].assign(kernel_requested="mkldnn"))
    assert np.isfinite(model.held_out_errors_).all()
