"""Rows of layers that were not measured, and scores of models on shapes that were held out."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator
from sklearn.model_selection import GroupKFold, cross_val_score

from cost_models import AnchoredLookup, Boosted, Hybrid, Roofline, Unanchored, read_training_rows
from cost_models.rows.build_rows import build_rows
from cost_models.rows.shape_groups import group_by_shape
from latbench.errors import UsageError
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import Conv2dShape

Noisy = tuple[pd.DataFrame, np.ndarray]


def test_there_is_a_row_for_each_shape_pattern_and_sparsity() -> None:
    rows = build_rows(shape=[(64, 48, 1), (256, 48, 1)], pattern=["vector:32", "unstructured"], sparsity=[0.5, 0.9])
    found = list(zip(rows["m"], rows["pattern"], rows["sparsity_target"], strict=True))
    assert found == [
        (m, pattern, sparsity)
        for m in (64, 256)
        for pattern in ("vector:32", "unstructured")
        for sparsity in (0.5, 0.9)
    ]


def test_a_pattern_with_a_sparsity_of_its_own_has_one_row() -> None:
    rows = build_rows(shape=(64, 64, 1), pattern=["dense", "nm:2:4"], sparsity=[0.5, 0.9])
    assert rows["sparsity_target"].tolist() == [0.0, 0.5]
    assert build_rows(shape=(64, 64, 1), pattern="dense")["op"].tolist() == ["linear"]


def test_a_convolution_has_its_columns() -> None:
    rows = build_rows(shape=Conv2dShape(1, 16, 8, 8, 32, 3, 3, padding=(1, 1)), pattern=VectorWise(32), sparsity=0.5)
    assert rows.loc[0, ["op", "m", "k", "n", "padding_h"]].tolist() == ["conv2d", 32, 144, 64, 1]


def test_columns_with_one_measured_value_are_filled_and_given_ones_stay(table: Callable[..., pd.DataFrame]) -> None:
    X = pd.concat([table(), table().assign(threads=4)], ignore_index=True)
    [row] = build_rows(shape=(64, 48, 1), pattern="vector:32", sparsity=0.5, measured=X).to_dict("records")
    assert row["device"] == "a-cpu" and "threads" not in row
    [row] = build_rows(
        shape=(64, 48, 1), pattern="vector:32", sparsity=0.5, measured=X, threads=4, device="another"
    ).to_dict("records")
    assert (row["device"], row["threads"]) == ("another", 4)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pattern": "round"}, "round"),
        ({"sparsity": None}, "vector:32 needs a sparsity"),
        ({"sparsity": 1.0}, "between 0 and 1"),
        ({"shape": (64, 48)}, r"\(m, k, n\)"),
        ({"shape": (0, 48, 1)}, r"\(m, k, n\)"),
        ({"color": "red"}, "color is no key column"),
        ({"pattern": "block:64x64"}, "cannot be block:64x64: one block"),
    ],
)
def test_what_is_no_layer_is_refused(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_rows(**{"shape": (64, 48, 1), "pattern": "vector:32", "sparsity": 0.5, **changed})


@pytest.mark.parametrize("model", [Boosted(max_iter=20), Roofline()], ids=lambda model: type(model).__name__)
def test_estimators_predict_built_rows(
    model: BaseEstimator, noisy: Noisy, seconds: Callable[[pd.DataFrame], np.ndarray]
) -> None:
    X, y = noisy
    asked = build_rows(shape=[(128, 96, 16), (512, 512, 64)], pattern="vector:32", sparsity=[0.6, 0.9], measured=X)
    np.testing.assert_allclose(model.fit(X, y).predict(asked), seconds(asked), rtol=0.3)


@pytest.mark.parametrize(
    "model", [Boosted(max_iter=20), Roofline(), Hybrid(max_iter=20)], ids=lambda model: type(model).__name__
)
def test_shapes_that_are_held_out_are_scored(model: BaseEstimator, noisy: Noisy) -> None:
    X, y = noisy
    folds = {"cv": GroupKFold(3), "groups": group_by_shape(X)}
    scores = cross_val_score(model, X, y, error_score="raise", **folds)
    assert len(scores) == 3 and (scores > 0.8).all()


def test_a_wrong_model_has_a_low_score(noisy: Noisy) -> None:
    X, y = noisy
    model = Roofline().fit(X, y)
    assert model.score(X, y) > 0.8 > model.score(X, y[::-1])


def test_the_lookup_says_what_it_lacks_where_shapes_are_held_out(noisy: Noisy) -> None:
    X, y = noisy
    with pytest.raises(Unanchored, match="nothing measured anchors"):
        cross_val_score(
            AnchoredLookup(), X, y, cv=GroupKFold(3), groups=group_by_shape(X), error_score="raise"
        )  # fmt: skip


@pytest.mark.slow
def test_a_bundled_table_gives_three_numbers() -> None:
    X, y = read_training_rows("bundled://amd-epyc-zen4-1-thread", {"backend": "numba"})
    scores = cross_val_score(Boosted(), X, y, cv=GroupKFold(3), groups=group_by_shape(X), error_score="raise")
    assert (scores > 0.9).all()
