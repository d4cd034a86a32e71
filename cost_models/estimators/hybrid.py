"""Measured curves where there are some, a learned model elsewhere.

A curve that was measured is interpolated over its sparsity (`AnchoredLookup`), with that model's intervals; any other
shape, pattern or sparsity is predicted by `Boosted`, with its own, wider ones. A row on no measured curve and unlike
all that was learned is refused.

What it does not know: what either of them does not.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.rows.row_keys import Array


class Hybrid(RegressorMixin, BaseEstimator):
    """A look-up of measured curves and boosted trees for the rest, one model a device, backend and way of measuring.

    Parameters: allow_extrapolation, whether what neither covers is predicted by the learned model instead of refused;
    max_iter of the trees; random_state, a whole number.

    Fitted: lookup_ and learned_.
    """

    def __init__(self, max_iter: int = 150, allow_extrapolation: bool = False, random_state: int = 0) -> None:
        self.max_iter = max_iter
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Learn from the rows of X (key columns, one row a point) with y seconds. Raises as `Boosted.fit`."""
        self.learned_ = Boosted(max_iter=self.max_iter, random_state=self.random_state).fit(X, y)
        self.lookup_ = AnchoredLookup().fit(X, y)
        return self

    def predict(self, X: pd.DataFrame) -> Array:
        """Seconds of every row of X, (rows,). Raises Unanchored for a row that neither model covers."""
        measured, learned = self._split(X)
        seconds = np.empty(len(X))
        seconds[measured] = self.lookup_.predict(X[measured])
        seconds[~measured] = learned.predict(X[~measured])
        return seconds

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[Array, Array]:
        """Seconds (low, high) of every row that hold its time with probability `coverage`, as the two models say it.

        Raises Unanchored as `predict`, and Uncalibrated where too little was measured for the model that a row needs.
        """
        measured, learned = self._split(X)
        low, high = np.empty(len(X)), np.empty(len(X))
        if measured.any():
            low[measured], high[measured] = self.lookup_.predict_interval(X[measured], coverage)
        if not measured.all():
            low[~measured], high[~measured] = learned.predict_interval(X[~measured], coverage)
        return low, high

    def covers(self, X: pd.DataFrame) -> npt.NDArray[np.bool_]:
        """Whether each row of X, (rows,), lies on a measured curve or is like those that were learned from."""
        check_is_fitted(self)
        covered: npt.NDArray[np.bool_] = self.lookup_.covers(X) | self.learned_.covers(X)
        return covered

    def octaves_outside(self, X: pd.DataFrame) -> dict[str, Array]:
        """How far every row lies outside what was learned from, as `Learned.octaves_outside`."""
        check_is_fitted(self)
        return self.learned_.octaves_outside(X)

    def _split(self, X: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], Boosted]:
        """(rows,) whether a measured curve anchors a row, and the model for the others."""
        check_is_fitted(self)
        learned = copy(self.learned_).set_params(allow_extrapolation=self.allow_extrapolation)
        return self.lookup_.covers(X), learned
