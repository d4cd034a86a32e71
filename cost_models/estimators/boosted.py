"""Boosted trees for unmeasured shapes: they correct a sum of work towards the measured times.

Trees do not extrapolate, but sums of work do. So the trees learn the logarithm of the ratio of both; beyond the
measured range they keep the correction at its edge. The sum of work is that of this project's CPU kernels for their
rows (`cost_models.features.cpu_kernel_work`), and a fitted roofline for other kernels.

A model is of one device, backend, dtype and way of measuring. It refuses others, and kernels and formats without
measurements. For measured shapes `AnchoredLookup` is more precise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from cost_models.estimators.fitted_trees import MIN_SAMPLES_LEAF, TreeCorrection, fit_trees
from cost_models.estimators.learned_model import LearnedModel
from cost_models.estimators.roofline import WorkRates, fit_work_rates, select_form
from cost_models.estimators.tree_arrays import TreeArrays
from cost_models.features.feature_encoder import FeatureEncoder
from cost_models.features.work_terms import find_kernel_form
from cost_models.rows.row_keys import FloatArray


@dataclass(frozen=True)
class CorrectedRates:
    """Sums of work at fitted rates, and the trees that correct their logarithm."""

    rates: WorkRates
    encoder: FeatureEncoder
    trees: TreeCorrection | TreeArrays

    def __call__(self, X: pd.DataFrame) -> FloatArray:
        """Return the logarithm of the seconds of every row of X, (rows,)."""
        return self.rates(X) + self.trees(self.encoder.encode(X))


class Boosted(LearnedModel):
    """Gradient-boosted trees on log(seconds / sum of work), for one device, backend and way of measuring.

    Parameters
    ----------
    max_iter, max_leaf_nodes, min_samples_leaf : int
        Number of trees, and the size of each, as of scikit-learn's `HistGradientBoostingRegressor`.
    learning_rate : float
        Share of each tree's prediction that counts.
    form : str or None
        Form of the sums, of `cost_models.features.work_terms`. None selects that of this project's kernels for the
        backend numba, and for other backends the form that `Roofline` would select.
    folds, allow_extrapolation, random_state
        As of `LearnedModel`.

    Attributes
    ----------
    form_ : str
        The form in use. It is chosen by all rows, so held-out shapes have a say in it.

    See Also
    --------
    LearnedModel : The fitted attributes, and the methods.
    """

    def __init__(
        self,
        max_iter: int = 150,
        learning_rate: float = 0.1,
        max_leaf_nodes: int = 31,
        min_samples_leaf: int = MIN_SAMPLES_LEAF,
        form: str | None = None,
        folds: int = 5,
        allow_extrapolation: bool = False,
        random_state: int = 0,
    ) -> None:
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.max_leaf_nodes = max_leaf_nodes
        self.min_samples_leaf = min_samples_leaf
        self.form = form
        self.folds = folds
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def _prepare(self, X: pd.DataFrame, seconds: FloatArray) -> None:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        self.form_ = self.form or find_kernel_form(X) or select_form(X, seconds, formats)

    def _learn(self, X: pd.DataFrame, seconds: FloatArray) -> CorrectedRates:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        rates = fit_work_rates(X, seconds, formats, self.form_)
        trees = fit_trees(
            self.encoder_.encode(X),
            np.log(seconds) - rates(X),
            max_iter=self.max_iter,
            learning_rate=self.learning_rate,
            max_leaf_nodes=self.max_leaf_nodes,
            min_samples_leaf=self.min_samples_leaf,
            random_state=self.random_state,
        )
        return CorrectedRates(rates, self.encoder_, trees)
