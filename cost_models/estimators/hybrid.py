"""Measured curves where there are some, and boosted trees elsewhere.

A measured curve is interpolated over its sparsity (`AnchoredLookup`), with that model's intervals. Any other shape,
pattern or sparsity is predicted by `Boosted`, with its wider intervals. A row that neither covers is refused.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.scored_regressor import ScoredRegressor
from cost_models.rows.row_keys import FloatArray, RowMask


class Hybrid(ScoredRegressor, BaseEstimator):
    """A look-up of measured curves and boosted trees for the rest, for one device, backend and way of measuring.

    Parameters
    ----------
    max_iter : int
        Number of trees.
    allow_extrapolation : bool
        Whether the trees predict rows that neither model covers; otherwise these are refused.
    random_state : int
        Seed of the trees and of their folds.

    Attributes
    ----------
    lookup_ : AnchoredLookup
        The model of measured curves.
    learned_ : Boosted
        The model of all other rows.
    """

    def __init__(self, max_iter: int = 150, allow_extrapolation: bool = False, random_state: int = 0) -> None:
        self.max_iter = max_iter
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Fit both models to X (rows, columns) with y (rows,) in seconds. Parameters and errors as `Boosted.fit`."""
        self.learned_ = Boosted(max_iter=self.max_iter, random_state=self.random_state).fit(X, y)
        self.lookup_ = AnchoredLookup().fit(X, y)
        return self

    def predict(self, X: pd.DataFrame) -> FloatArray:
        """Predict the seconds of every row of X, (rows,). Raises Unanchored for a row that neither model covers."""
        measured, learned = self._split(X)
        seconds = np.empty(len(X))
        seconds[measured] = self.lookup_.predict(X[measured])
        seconds[~measured] = learned.predict(X[~measured])
        return seconds

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Predict an interval for the time of every row of X, by the model that predicts the row.

        One sample shows no noise. A measured time of that kind gets the width that the trees have for unmeasured
        shapes.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        coverage : float
            Probability that the interval holds the time, in (0, 1).

        Returns
        -------
        low, high : ndarray of shape (rows,)
            Seconds.

        Raises
        ------
        Unanchored
            Neither model covers a row.
        Uncalibrated
            Too little was measured for the model that a row needs.
        """
        measured, learned = self._split(X)
        low, high = np.empty(len(X)), np.empty(len(X))
        if measured.any():
            low[measured], high[measured] = self._find_measured_intervals(X[measured], coverage)
        if not measured.all():
            low[~measured], high[~measured] = learned.predict_interval(X[~measured], coverage)
        return low, high

    def _find_measured_intervals(self, X: pd.DataFrame, coverage: float) -> tuple[FloatArray, FloatArray]:
        low, high = self.lookup_.find_intervals(X, coverage)
        unknown = np.isnan(low)
        if unknown.any():
            seconds = self.lookup_.predict(X[unknown])
            factor = np.exp(self.learned_.half_widths(X[unknown], coverage))
            low[unknown], high[unknown] = seconds / factor, seconds * factor
        return low, high

    def covers(self, X: pd.DataFrame) -> RowMask:
        """Return whether each row of X, (rows,), is predicted without `allow_extrapolation`."""
        check_is_fitted(self)
        covered: RowMask = self.lookup_.covers(X) | self.learned_.covers(X)
        return covered

    def octaves_outside(self, X: pd.DataFrame) -> dict[str, FloatArray]:
        """Return by how many octaves every row exceeds the measured ranges (`LearnedModel.octaves_outside`)."""
        check_is_fitted(self)
        return self.learned_.octaves_outside(X)

    def _split(self, X: pd.DataFrame) -> tuple[RowMask, Boosted]:
        """Return whether a measured curve covers each row, (rows,), and the model for the other rows."""
        check_is_fitted(self)
        learned = copy(self.learned_).set_params(allow_extrapolation=self.allow_extrapolation)
        return self.lookup_.covers(X), learned
