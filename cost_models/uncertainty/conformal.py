"""Conformal prediction: a bound on the next error from held-out errors, valid for few of them too.

A score is the size of one held-out error. If the next score is exchangeable with n earlier ones, it is at most the
ceil((n + 1) * coverage)-th smallest of them with probability `coverage` (Vovk et al. 2005; Lei et al. 2018, section
2.2). Scores in groups, such as the points of one layer shape, are not exchangeable with those of a new group, but
whole groups are. So each group has the same weight, and the new group has the same weight at infinity (Dunn,
Wasserman and Ramdas 2022, "Distribution-Free Prediction Sets for Two-Layer Hierarchical Models").
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from cost_models.refusals import Uncalibrated

_STEPS = 30
_SMALLEST_SHARE = 0.05  # a deviation counts as at least this share of the median: the steps divide by it
_LEAST_SHARE = 1e-3  # no expected error is smaller than this share of the median error


def compute_conformal_quantile(scores: npt.ArrayLike, coverage: float, groups: npt.ArrayLike | None = None) -> float:
    """Return the bound that the next score does not exceed with probability `coverage`.

    Parameters
    ----------
    scores : array_like of shape (n,)
        Sizes of held-out errors.
    coverage : float
        Probability, in (0, 1).
    groups : array_like of shape (n,), optional
        Label of each score's group. By default each score is a group of its own.

    Returns
    -------
    float
        The bound, in the unit of the scores.

    Raises
    ------
    Uncalibrated
        There are too few groups for a finite bound.
    ValueError
        `coverage` lies outside (0, 1).
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must lie between 0 and 1, not {coverage}")
    values = np.asarray(scores, dtype=np.float64)
    labels = np.arange(values.size) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    sizes = np.bincount(labels)
    needed = math.ceil(coverage / (1 - coverage) - 1e-9)
    if sizes.size < needed:
        kind = "points" if groups is None else "shapes"
        raise Uncalibrated(
            f"an interval of {coverage * 100:g}% needs at least {needed} held-out {kind} and this table gives "
            f"{sizes.size}: measure more, or ask for a lower coverage"
        )
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(1.0 / sizes[labels[order]]) / (sizes.size + 1)
    # The sum may miss the coverage by rounding alone. The next score would then give a wider interval than needed.
    return float(values[order][np.searchsorted(mass, coverage - 1e-9)])


def fit_error_growth(distance: npt.ArrayLike, errors: npt.ArrayLike) -> tuple[float, float]:
    """Fit the median error at distance d as a + b * d, with a and b not negative.

    Minimizes the sum of absolute deviations (Koenker and Bassett 1978), each relative to the fitted median, because
    errors scatter in proportion to it. A few outliers do not move the line. Intervals use the ratio of an error to
    this line: a poor fit makes some of them wider than needed, but not all of them too narrow.

    Parameters
    ----------
    distance : array_like of shape (n,)
        Distances, at least 0.
    errors : array_like of shape (n,)
        Errors; their absolute values count.

    Returns
    -------
    a, b : float
        Typical error at distance 0, and its growth per unit of distance. (1, 0) if over half of the errors are 0.
    """
    x, size = np.asarray(distance, dtype=np.float64), np.abs(np.asarray(errors, dtype=np.float64))
    median = float(np.median(size)) if size.size else 0.0
    if median == 0:
        return 1.0, 0.0
    unit = float(x.max()) or 1.0
    design = np.column_stack([np.ones(len(x)), x / unit])
    expected = np.full(len(x), median)
    for _ in range(_STEPS):
        # A squared deviation, weighted by its inverse root, is the absolute deviation.
        weight = 1 / np.sqrt(expected * np.maximum(np.abs(size - expected), _SMALLEST_SHARE * expected))
        (near, further), _ = nnls(design * weight[:, None], size * weight)
        near = max(near, _LEAST_SHARE * median)
        expected = near + further * x / unit
    return float(near), float(further / unit)
