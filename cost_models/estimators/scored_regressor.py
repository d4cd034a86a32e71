"""The score of a cost model, as scikit-learn's `cross_val_score` asks for it."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy.typing as npt
import pandas as pd
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score


class ScoredRegressor(RegressorMixin):
    """A regressor whose score counts rows beyond the measured range, which `predict` refuses by default.

    A fold of cross-validation holds the largest or the smallest shapes out, so a score without them does not exist.
    """

    def score(self, X: pd.DataFrame, y: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None) -> float:
        """Return the coefficient of determination (R²) of predicted seconds, extrapolated where that is needed.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        y : array_like of shape (rows,)
            Measured seconds.
        sample_weight : array_like of shape (rows,), optional
            Weight of each row.

        Returns
        -------
        float
            At most 1, for perfect predictions.

        Raises
        ------
        Unanchored
            No measurement supports the prediction of a row, not even by extrapolation. `AnchoredLookup` needs other
            sparsities of each shape among the training rows, so it cannot be scored on shapes that are held out.

        Examples
        --------
        >>> from sklearn.model_selection import GroupKFold, cross_val_score
        >>> import latbench as lb
        >>> X, y = lb.read_training_rows("bundled://amd-epyc-zen4-1-thread", {"backend": "numba"})
        >>> folds = {"cv": GroupKFold(3), "groups": lb.group_by_shape(X)}
        >>> bool(cross_val_score(lb.Boosted(), X, y, **folds).min() > 0.9)
        True
        """
        model: Any = copy(self)
        predicted = model.set_params(allow_extrapolation=True).predict(X)
        return float(r2_score(y, predicted, sample_weight=sample_weight))
