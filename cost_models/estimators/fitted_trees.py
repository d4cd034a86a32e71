"""Gradient-boosted trees of scikit-learn that predict a logarithm, by one thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from cost_models.rows.row_keys import FloatArray

MIN_SAMPLES_LEAF = 5


@dataclass(frozen=True)
class TreeCorrection:
    """Fitted trees that correct the logarithm of seconds."""

    fitted: HistGradientBoostingRegressor

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the correction of every row of `features` (rows, features) in log seconds, (rows,)."""
        with _limit_to_one_thread():
            return np.asarray(self.fitted.predict(features), dtype=np.float64)


def fit_trees(
    features: FloatArray, correction: FloatArray, min_samples_leaf: int = MIN_SAMPLES_LEAF, **parameters: Any
) -> TreeCorrection:
    """Fit gradient-boosted trees that predict a correction (Friedman 2001; histograms of Ke et al. 2017).

    Parameters
    ----------
    features : ndarray of shape (rows, features)
        As `FeatureEncoder.encode` returns them; may hold NaN.
    correction : ndarray of shape (rows,)
        log(measured / sum of work).
    min_samples_leaf : int
        Fewest rows of a leaf.
    **parameters
        Further parameters of scikit-learn's `HistGradientBoostingRegressor`.
    """
    # The absolute error tolerates single wrong measurements. It was 3-14% better on five GPUs timed once a shape.
    trees = HistGradientBoostingRegressor(
        loss="absolute_error", early_stopping=False, min_samples_leaf=min_samples_leaf, **parameters
    )
    # scikit-learn cannot bin a feature that is NaN in every row.
    known = np.where(np.isnan(features).all(axis=0), 0.0, features)
    with _limit_to_one_thread():
        trees.fit(known, correction)
    return TreeCorrection(trees)


def _limit_to_one_thread() -> AbstractContextManager[Any]:
    """Return a context with one OpenMP thread: as fast for a small table, and 15 times faster on a busy machine."""
    limits: AbstractContextManager[Any] = _find_thread_pools().limit(limits=1, user_api="openmp")
    return limits


@cache
def _find_thread_pools() -> ThreadpoolController:
    """Return the thread pools of the loaded libraries, among them scikit-learn's. The search takes 4 ms."""
    return ThreadpoolController()
