"""How large the errors of a model typically are, row by row, learned from its errors on held-out shapes.

Intervals of one width are too wide where a model is good, and too narrow where it is not. Here a row's interval is a
multiple of its typical error, and the multiple is calibrated: locally weighted conformal inference (Lei et al. 2018,
section 5.2). With few shapes the typical error is so uncertain that intervals only get wider. So it is used where it
makes the intervals of held-out rows narrower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.estimators.fitted_trees import TreeCorrection, fit_trees
from cost_models.estimators.tree_arrays import TreeArrays
from cost_models.refusals import Uncalibrated
from cost_models.rows.row_keys import FloatArray
from cost_models.rows.shape_groups import Groups
from cost_models.uncertainty.conformal import compute_conformal_quantile

_COMPARED = 0.9  # coverage at which widths are compared
_GAIN = 0.95  # share of the one width that the mean width has to fall below
_LEAST = 0.05  # share of the median error that every error counts as at least: by luck some are near zero


@dataclass(frozen=True)
class ErrorSize:
    """Trees that predict the logarithm of a row's typical error."""

    trees: TreeCorrection | TreeArrays

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the typical error of every row of `features` (rows, features) in log seconds, (rows,)."""
        return np.exp(self.trees(features))


def fit_error_size(features: FloatArray, errors: FloatArray) -> ErrorSize:
    """Fit the typical error to features (rows, features) and errors (rows,), of which the absolute values count.

    Trees are few, small and of large leaves: sizes of errors scatter far more than times.
    """
    sizes = np.abs(errors)
    least = max(_LEAST * float(np.median(sizes)), np.finfo(float).tiny)
    trees = fit_trees(
        features, np.log(np.maximum(sizes, least)), 20, max_iter=30, max_leaf_nodes=8, learning_rate=0.1,
        random_state=0,
    )  # fmt: skip
    return ErrorSize(trees)


def learn_error_sizes(
    features: FloatArray, errors: FloatArray, shapes: Groups, fold: Groups
) -> tuple[ErrorSize | None, FloatArray]:
    """Learn how large errors typically are, if that makes intervals narrower.

    Parameters
    ----------
    features : ndarray of shape (rows, features)
        As `FeatureEncoder.encode` returns them.
    errors : ndarray of shape (rows,)
        Errors on held-out shapes in log seconds; NaN for rows that were not held out.
    shapes, fold : ndarray of int, shape (rows,)
        Layer shape and fold of every row.

    Returns
    -------
    error_size : ErrorSize or None
        The typical error; None where all rows do best with one width.
    sizes : ndarray of shape (rows,)
        The typical error of each row that was held out, by the errors of the other folds; 1 without.
    """
    same, known = np.ones(len(errors)), ~np.isnan(errors)
    if not fold[known].any():
        return None, same
    sizes = same.copy()
    for held_out in (fold == number for number in range(int(fold[known].max()) + 1)):
        others = known & ~held_out
        sizes[held_out] = fit_error_size(features[others], errors[others])(features[held_out])
    try:
        one, own = (
            compute_conformal_quantile(np.abs(errors[known]) / each, _COMPARED, groups=shapes[known])
            * float(each.mean())
            for each in (same[known], sizes[known])
        )
    except Uncalibrated:
        return None, same
    return (fit_error_size(features[known], errors[known]), sizes) if own < _GAIN * one else (None, same)
