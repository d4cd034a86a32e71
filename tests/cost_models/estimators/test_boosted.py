"""The learned model: shapes it has not seen, intervals that hold for them, refusal of what is unlike."""

import itertools
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn.base import clone

from cost_models import Boosted, MixedModes, Unanchored, Uncalibrated, build_hold_outs, evaluate, evaluate_held_out
from latbench.importers.kernel_timings import read_kernel_timings

Table = Callable[..., pd.DataFrame]
Seconds = Callable[[pd.DataFrame], np.ndarray]
Noisy = tuple[pd.DataFrame, np.ndarray]

# The kernels that are made up here do no more than this form says, whatever the backend.
SMALL = Boosted(max_iter=60, learning_rate=0.15, form="plain")


@pytest.fixture(scope="module")
def fitted() -> tuple[Boosted, pd.DataFrame, Seconds]:
    """A model of 2% noise on 40 random shapes, the rows it learned from, and the truth."""
    generator = np.random.default_rng(7)
    sizes = 2 ** generator.uniform(5, 11, (40, 3))
    X = pd.DataFrame(
        [
            {"m": int(m), "k": int(k), "n": int(n), "pattern": pattern, "sparsity_target": sparsity}
            for m, k, n in sizes
            for pattern in ("vector:32", "block:8x8")
            for sparsity in (0.5, 0.7, 0.9)
        ]
    ).assign(op="linear", backend="numba", device="a-cpu", cache_mode="rotated", threads=2)

    def truth(X: pd.DataFrame) -> np.ndarray:
        kept = X["m"] * X["k"] * (1 - X["sparsity_target"])
        # Rows are worked on 32 at a time, which no roofline knows.
        padded = np.ceil(X["m"] / 32) * 32 / X["m"]
        rate = np.where(X["pattern"] == "vector:32", 10e9, 4e9)
        return (2 * kept * X["n"] / rate * padded + 4 * X["n"] * (X["k"] + X["m"]) / 20e9 + 1e-6).to_numpy(float)

    return clone(SMALL).fit(X, truth(X) * generator.lognormal(0, 0.02, len(X))), X, truth


def _unseen(rng: np.random.Generator, count: int) -> pd.DataFrame:
    sizes = (2 ** rng.uniform(5.5, 10.5, (count, 3))).astype(int)
    return pd.DataFrame(sizes, columns=["m", "k", "n"]).assign(
        pattern=rng.choice(["vector:32", "block:8x8"], count), sparsity_target=rng.choice([0.5, 0.7, 0.9], count),
        op="linear", backend="numba", device="a-cpu", cache_mode="rotated", threads=2,
    )  # fmt: skip


def test_unseen_shapes_are_predicted(fitted: tuple[Boosted, pd.DataFrame, Seconds], rng: np.random.Generator) -> None:
    model, _, truth = fitted
    X = _unseen(rng, 200)
    error = np.abs(model.predict(X) / truth(X) - 1)
    # 2% is noise; the padding, up to a third on such shapes, has to be learned from 40 of them.
    assert np.median(error) < 0.03
    assert (error < 0.10).mean() > 0.9


def test_intervals_cover_new_shapes(fitted: tuple[Boosted, pd.DataFrame, Seconds], rng: np.random.Generator) -> None:
    model, _, truth = fitted
    X = _unseen(rng, 400)
    measured = truth(X) * rng.lognormal(0, 0.02, len(X))
    low, high = model.predict_interval(X, 0.8)
    covered = ((low <= measured) & (measured <= high)).mean()
    # The quantile itself is of 40 shapes: its level has the spread of a beta of 40 draws, about that of a binomial.
    assert covered >= 0.8 - norm.ppf(1 - 1e-3) * (0.8 * 0.2 * (1 / 40 + 1 / 400)) ** 0.5
    assert np.median(high / low) < 1.25


def test_the_same_rows_give_the_same_model(noisy: Noisy) -> None:
    X, y = noisy
    again = [clone(SMALL).set_params(max_iter=10).fit(X, y) for _ in range(2)]
    np.testing.assert_array_equal(again[0].predict(X), again[1].predict(X))
    for ours, theirs in zip(again[0].predict_interval(X, 0.8), again[1].predict_interval(X, 0.8), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_hold_outs_are_whole_shapes(fitted: tuple[Boosted, pd.DataFrame, Seconds]) -> None:
    model, X, _ = fitted
    assert X.assign(fold=model.fold_).groupby(["m", "k", "n"])["fold"].nunique().max() == 1
    assert len(set(model.fold_)) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"m": 65536},
            r"cannot predict linear 65536x100x100 vector:32 on numba: m of a linear layer is \d\.\d octaves outside",
        ),
        ({"n": 1}, "n of a linear layer is .* octaves outside the measured range"),
        ({"sparsity_target": 0.99}, "a sparsity of 0.99 is outside the measured range of 0.5 to 0.9"),
        ({"threads": 4}, "threads is 1.0 octaves outside"),
        ({"backend": "torch"}, "backend torch was not measured, only numba"),
        ({"device": "b-cpu"}, "device b-cpu was not measured, only a-cpu"),
        ({"cache_mode": "warm"}, "cache_mode warm was not measured"),
        ({"op": "conv2d"}, "op conv2d was not measured"),
        ({"pattern": "nm:2:4"}, "format nm was not measured, only block, vector"),
        ({"m": np.nan}, "no known m, k and n"),
        ({"m": pd.array([None], "Int64")}, "no known m, k and n"),
        ({"n": 0}, "no known m, k and n of at least 1"),
    ],
)
def test_what_is_unlike_the_measured_is_refused(
    change: dict[str, object], said: str, fitted: tuple[Boosted, pd.DataFrame, Seconds], rng: np.random.Generator
) -> None:
    good = _unseen(rng, 1).assign(m=100, k=100, n=100, pattern="vector:32", sparsity_target=0.6)
    assert fitted[0].predict(good) > 0
    with pytest.raises(Unanchored, match=said):
        fitted[0].predict(good.assign(**change))
    with pytest.raises(Unanchored, match=said):
        fitted[0].predict_interval(good.assign(**change), 0.8)


@pytest.mark.parametrize("name", ["m", "pattern", "sparsity_target"])
def test_a_column_that_is_not_there_is_named(name: str, fitted: tuple[Boosted, pd.DataFrame, Seconds]) -> None:
    model, X, truth = fitted
    with pytest.raises(ValueError, match=f"X has no column {name}"):
        clone(model).fit(X.drop(columns=name), truth(X))
    with pytest.raises(ValueError, match=f"X has no column {name}"):
        model.predict(X.drop(columns=name))
    with pytest.raises(TypeError, match="X must be a pandas frame"):
        clone(model).fit(X.to_numpy(), truth(X))


def test_extrapolation_follows_the_roofline_when_allowed(fitted: tuple[Boosted, pd.DataFrame, Seconds]) -> None:
    model, X, truth = fitted
    far = X.iloc[:1].assign(m=2**13, k=2**12, n=2**12)
    allowed = copy(model).set_params(allow_extrapolation=True)
    assert allowed.predict(far)[0] == pytest.approx(truth(far)[0], rel=0.2)


def test_intervals_widen_with_the_distance_from_what_was_measured(
    fitted: tuple[Boosted, pd.DataFrame, Seconds],
) -> None:
    model, X, _ = fitted
    allowed = copy(model).set_params(allow_extrapolation=True)
    for side, start, factor in (("largest", X["n"].max(), 2), ("smallest", X["n"].min(), 0.5)):
        asked = pd.concat([X.iloc[:1].assign(n=int(start * factor**i)) for i in range(5)], ignore_index=True)
        away = allowed.octaves_outside(asked)[side]
        low, high = allowed.predict_interval(asked, 0.8)
        assert away[0] == 0 and (np.diff(away) > 0).all()
        sizes = 1.0 if model.error_size_ is None else model.error_size_(model.encoder_.encode(asked))
        inside = np.exp(2 * model.find_multiple(0.8) * np.broadcast_to(sizes, len(asked)))
        assert (high / low)[0] == pytest.approx(inside[0])
        # As much as they did where shapes at this edge were left out.
        outside = np.exp(2 * model.edges_[side].half_width(away[1:], 0.8))
        np.testing.assert_allclose((high / low)[1:], np.maximum(outside, inside[1:]))
        assert (np.diff(high / low) >= 0).all()


def test_errors_at_the_edge_widen_intervals_beyond_it(rng: np.random.Generator) -> None:
    sizes = (2 ** rng.uniform(5, 10, (150, 3))).astype(int)
    X = pd.DataFrame(sizes, columns=["m", "k", "n"]).assign(
        pattern="dense", sparsity_target=0.0, op="linear", backend="numba", device="a-cpu"
    )
    work = 2.0 * X["m"] * X["k"] * X["n"]
    # Large layers slow down by the square root of their work: no sum of work says so, and no tree goes on with it.
    y = (work / 1e9 * np.sqrt(1 + work / np.median(work)) + 1e-6).to_numpy()
    model = clone(SMALL).set_params(allow_extrapolation=True).fit(X, y)
    edge = X.assign(n=X["n"].max() + 1, m=X["m"].max(), k=X["k"].max()).iloc[:1]
    low, high = model.predict_interval(edge, 0.8)
    assert high[0] / low[0] > 1.5 * np.exp(2 * model.half_widths(X[:1], 0.8)[0])


def test_modes_and_devices_do_not_mix(noisy: Noisy) -> None:
    X, y = noisy
    for column, value in (("cache_mode", "warm"), ("device", "b-cpu"), ("backend", "torch"), ("dtype_w", "float16")):
        half = X.copy()
        half.loc[::2, column] = value
        with pytest.raises(MixedModes, match=f"one model cannot learn from {column}"):
            clone(SMALL).fit(half, y)


def test_a_column_that_nobody_knows_is_no_mode(noisy: Noisy) -> None:
    X, y = noisy
    unknown = X.assign(cache_mode=None, launch_mode=np.nan)
    model = Boosted(max_iter=5).fit(unknown, y)
    assert not {"cache_mode", "launch_mode"} & set(model.mode_)
    assert (model.predict(unknown.drop(columns=["cache_mode", "launch_mode"])) > 0).all()
    with pytest.raises(MixedModes, match="cache_mode rotated and unknown"):
        Boosted(max_iter=5).fit(X.assign(cache_mode=X["cache_mode"].where(X["m"] > 64)), y)


def test_few_shapes_give_predictions_but_no_interval(noisy: Noisy) -> None:
    X, y = noisy
    few = (X["m"] == 64) & (X["k"] == 48)
    model = Boosted(max_iter=5).fit(X[few], y[few])
    assert model.predict(X[few]).shape == (int(few.sum()),)
    with pytest.raises(Uncalibrated, match="at least 9 held-out shapes and this table gives 3"):
        model.predict_interval(X[few], 0.9)
    one = few & (X["n"] == 1)
    assert evaluate(Boosted(max_iter=5).fit(X[one], y[one]), X[one], y[one])["median"] is None


def test_a_table_of_convolutions_and_linear_layers_is_one_model(noisy: Noisy) -> None:
    X, y = noisy
    convolution = {"op": "conv2d", "batch": 1, "c_in": 16, "h": 8, "w": 8, "c_out": 64, "kh": 3, "kw": 3}
    both = pd.concat([X, X[X["k"] == 320].assign(**convolution)], ignore_index=True)
    times = np.concatenate([y, 3 * y[X["k"] == 320]])
    model = clone(SMALL).set_params(folds=2).fit(both, times)
    assert np.median(np.abs(model.predict(both) / times - 1)) < 0.05


def test_one_convolution_among_linear_layers_may_be_left_out(noisy: Noisy) -> None:
    # What only convolutions have is then unknown of every row that is learned from.
    X, y = noisy
    convolution = {"op": "conv2d", "batch": 1, "c_in": 16, "h": 8, "w": 8, "c_out": 64, "kh": 3, "kw": 3}
    one = (X["k"] == 320) & (X["m"] == X["m"].max()) & (X["n"] == X["n"].max())
    both = pd.concat([X[~one], X[one].assign(**convolution)], ignore_index=True)
    model = Boosted(max_iter=5).fit(both, np.concatenate([y[~one], y[one]]))
    assert np.isfinite(model.predict(both)).all()


def test_it_is_a_scikit_learn_estimator() -> None:
    model = Boosted(max_iter=7, random_state=3)
    assert clone(model).get_params() == model.get_params()
    assert model.get_params()["max_iter"] == 7
    assert not [name for name in vars(model) if name.endswith("_")]


@pytest.mark.slow
def test_published_gpu_timings_of_unseen_shapes_are_met(data: Path) -> None:
    file = data / "neusight_kernels" / "linear_train.csv.gz"
    rows, _ = read_kernel_timings("neusight", file, only={"Device": "NVIDIA A100-PCIE-40GB"})
    X = pd.DataFrame(rows).drop(columns="samples_seconds")
    y = np.array([np.median(row["samples_seconds"]) for row in rows])
    figures = evaluate(Boosted().fit(X, y), X, y, 0.9)
    assert figures["held_out"] == len(X) > 6000
    assert figures["median"] < 0.04
    assert figures["within_10"] > 0.84
    assert 0.88 <= figures["coverage"] <= 0.92
    edge = {"largest fifth": build_hold_outs(X)["largest fifth"]}
    beyond = evaluate_held_out(Boosted(), X, y, edge, 0.9)["largest fifth"]
    assert beyond["median"] < 0.06
    assert beyond["coverage"] >= 0.88 and beyond["width"] > figures["width"]


def test_it_covers_what_it_predicts_without_extrapolating(fitted: tuple[Boosted, pd.DataFrame, Seconds]) -> None:
    model, X, _ = fitted
    first = X.iloc[[0]]
    asked = pd.concat([
        first, first.assign(m=int(X["m"].max()) + 1), first.assign(sparsity_target=0.6),
        first.assign(sparsity_target=0.95), first.assign(pattern="nm:2:4"), first.assign(pattern="vector:16"),
        first.assign(backend="torch"), first.assign(k=np.nan),
    ], ignore_index=True)  # fmt: skip

    def predicts(row: pd.DataFrame) -> bool:
        try:
            model.predict(row)
        except Unanchored:
            return False
        return True

    expected = [True, False, True, False, False, False, False, False]
    assert [predicts(asked.iloc[[i]]) for i in range(len(asked))] == expected
    assert model.covers(asked).tolist() == expected
    bold = copy(model).set_params(allow_extrapolation=True)
    assert bold.covers(asked).tolist() == expected


def test_work_is_predicted_as_far_outside_as_could_be_tried(rng: np.random.Generator) -> None:
    """Of sizes that were measured, and never together: shapes that differ much in form and little in work."""
    m, k = 2 ** rng.uniform(5, 9, (2, 30))
    n = 2 ** rng.uniform(20, 21, 30) / (m * k)
    X = pd.DataFrame({"m": m, "k": k, "n": n}).astype(int).assign(pattern="dense", sparsity_target=0.0, op="linear")
    model = Boosted(max_iter=5).fit(X, X.eval("m * k * n") / 1e9 + 1e-6)
    sizes = itertools.product(*(X[name].unique()[:12] for name in "mkn"))
    asked = X.iloc[[0] * 12**3].assign(**dict(zip("mkn", np.transpose(list(sizes)), strict=True)))
    away = model.octaves_outside(asked)
    reach = {side: edge.reach for side, edge in model.edges_.items()}
    # The two inner fifths, asked for all outside of them: the furthest that anything was tried.
    work = np.sort(np.log2(X.eval("m * k * n")))
    assert reach == pytest.approx({"smallest": work[18] - work[0], "largest": work[-1] - work[11]})
    allowed = np.logical_and.reduce([away[side] <= reach[side] for side in away])
    np.testing.assert_array_equal(model.covers(asked), allowed)
    assert allowed.any() and all((away[side][allowed] > 0).any() for side in away)
    for side in away:
        far = asked[away[side] > reach[side]].iloc[[0]]
        with pytest.raises(Unanchored, match=rf"its work is .* outside .* could be tried up to {reach[side]:.1f}"):
            model.predict(far)
        assert copy(model).set_params(allow_extrapolation=True).predict(far) > 0


def test_kinds_that_were_never_measured_together_are_refused(
    noisy: tuple[pd.DataFrame, np.ndarray],
) -> None:
    """Each category alone is known: a kernel of one operation says nothing of the other."""
    X, y = noisy
    convolution = {"op": "conv2d", "batch": 1, "c_in": 16, "h": 8, "w": 8, "kh": 3, "kw": 3}
    both = pd.concat([X, X.assign(**convolution, kernel_requested="gemm")], ignore_index=True)
    model = Boosted(max_iter=5, allow_extrapolation=True).fit(both, np.append(y, y))
    asked = X.iloc[[0]].assign(kernel_requested="gemm")
    with pytest.raises(Unanchored, match=r"format vector was measured with op linear and kernel_.* gemm"):
        model.predict(asked)
    assert not model.covers(asked).any()


def test_what_is_outside_in_anything_but_work_is_refused(noisy: tuple[pd.DataFrame, np.ndarray]) -> None:
    X, y = noisy
    X = X.assign(op="conv2d", batch=1, c_in=16, h=8, w=8, kh=3, kw=3, stride_h=1, stride_w=1)
    model = Boosted(max_iter=5).fit(X, y)
    largest = X[["m", "k", "n"]].max()
    asked = X.iloc[[0]]
    assert model.covers(asked.assign(**largest)).all()
    for beyond, name in (
        ({"kh": 7}, "kh of a convolution is 1.2 octaves"),
        ({"stride_h": 4}, "stride_h of a convolution is 2.0 octaves"),
        ({"pattern": "vector:4"}, "rows of a block of vector is 3.0 octaves"),
    ):
        with pytest.raises(Unanchored, match=f"{name} outside the measured range"):
            model.predict(asked.assign(**beyond))
        assert not model.covers(asked.assign(**beyond)).any()


def build_convolutions(positions: Sequence[int]) -> pd.DataFrame:
    """Convolutions of 3 x 3 with so many output positions."""
    rows = [
        {"m": m, "k": 9 * c, "n": n, "batch": 1, "c_in": c, "h": 8, "w": n // 8, "c_out": m, "kh": 3, "kw": 3}
        for m in (64, 256, 1000) for c in (8, 32, 128) for n in positions
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(
        op="conv2d", pattern="vector:32", sparsity_target=0.8, device="a-cpu", backend="numba", dtype_w="float32",
        dtype_a="float32", dtype_out="float32", layout="nchw", epilogue="bias", kernel_requested="auto",
        context="isolated", cache_mode="rotated", launch_mode="call", threads=2,
    )  # fmt: skip


def test_image_positions_say_nothing_of_tokens(table: Callable[..., pd.DataFrame]) -> None:
    """Linear layers of 1 and 128 tokens, and convolutions of 8 to 64 positions: 8 tokens were never measured."""
    linear = table(shapes=[(m, k, n) for m in (64, 256, 1000) for k in (72, 288, 1152) for n in (1, 128)],
                   patterns=("vector:32",), sparsities=(0.8,))  # fmt: skip
    X = pd.concat([linear, build_convolutions((8, 16, 64))], ignore_index=True)
    y = 1e-6 + (2 * X["m"] * X["k"] * X["n"]).to_numpy(float) / 1e10
    model = Boosted(max_iter=10).fit(X, y)
    asked = pd.concat([linear[linear["n"] == 1][:4].assign(n=n) for n in (1, 2, 8, 100, 128)], ignore_index=True)
    assert model.covers(asked).reshape(5, 4).all(axis=1).tolist() == [True, True, False, True, True]
    with pytest.raises(Unanchored, match=r"n is 3\.0 octaves from the nearest one that was measured with this op"):
        model.predict(asked[8:12])
    low, high = model.predict_interval(asked[asked["n"] != 8], 0.8)
    width = np.log(high / low).reshape(4, 4).mean(axis=1)
    assert (width[[1, 2]] >= width[[0, 3]]).all() and width.max() < 5 * width.min()
    edge = model.edges_["largest"]  # two tokens are one octave above one, and the gap to it is usual
    assert model.usual_gap_ == 0
    assert width[1] - width[0] == pytest.approx(2 * edge.compute_widening(np.ones(1), 0.8)[0])
    assert model.covers(build_convolutions((8, 12, 32))).all()
    assert not model.covers(build_convolutions((1,))).any()
