"""scikit-learn's own checks, those that need no numeric X: ours is a frame with the table's columns."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks

from cost_models import AnchoredLookup, Boosted, Hybrid, Roofline, Transfer

CHECKS = (
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
)
ESTIMATORS = [AnchoredLookup(), Roofline(), Boosted(max_iter=5), Hybrid(max_iter=5), Transfer("a-cpu")]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learn_agrees(check: str, estimator: BaseEstimator) -> None:
    getattr(estimator_checks, check)(type(estimator).__name__, clone(estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_unfitted_it_says_so(estimator: BaseEstimator, table: Callable[..., pd.DataFrame]) -> None:
    for ask in (estimator.predict, estimator.predict_interval, estimator.covers):
        with pytest.raises(NotFittedError):
            ask(table())


@pytest.mark.parametrize("estimator", ESTIMATORS[:4], ids=lambda estimator: type(estimator).__name__)
def test_fit_changes_neither_its_arguments_nor_its_parameters(
    estimator: BaseEstimator, noisy: tuple[pd.DataFrame, np.ndarray]
) -> None:
    X, y = noisy
    before, params = X.copy(), estimator.get_params()
    model = clone(estimator)
    assert model.fit(X, y) is model
    pd.testing.assert_frame_equal(X, before)
    assert model.get_params() == params
    assert [name for name in vars(model) if name not in params] == [n for n in vars(model) if n.endswith("_")]
