"""How far a measured time may be from the true one: what a table's own rows say about it.

A time is the median of samples. Three things move it away from what the layer takes:

    samples     are few, or come in bursts that disagree: low_seconds and high_seconds, the 95% interval of the median
    drift       the machine's speed changes while they are taken: drift_ratio, their later half over the earlier
    occasions   it has another speed when another point is measured: reference_ratio, a fixed piece of work timed
                beside each point, as it differs among the points of one curve, where nothing else should move it

The first two see the same disagreement, so the larger counts; the third is independent of them. What moves every
point of a table alike, no table can tell, and no model of it need know.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.rows.row_keys import CURVE, Array

_NORMAL = NormalDist()
_FAR = _NORMAL.inv_cdf(0.975)  # half of a 95% interval, in standard deviations
_PARTS = 200


def deviations(X: pd.DataFrame) -> Array:
    """The standard deviation of each row's log seconds around the truth, (rows,); NaN where its samples tell none."""
    if not {"low_seconds", "high_seconds"} <= set(X.columns):
        return np.full(len(X), np.nan)
    samples = np.log(X["high_seconds"].to_numpy(float) / X["low_seconds"].to_numpy(float)) / (2 * _FAR)
    return np.hypot(np.maximum(samples, _drift(X)), _occasions(X))


def floor(X: pd.DataFrame, among: npt.NDArray[np.bool_] | None = None) -> float | None:
    """The median of |true / measured - 1| over the rows of X, or over those `among` them (rows,); None where they do
    not tell. How far each may be off is told by all rows.

    It is what a model's median error would be if the model knew every true time, so that a ratio of the two says how
    much is left to learn. Errors are taken to be log-normal. It is an estimate, and too high where the reference
    varies by more than the times do: a good look-up may come out below it.
    """
    known = deviations(X) if among is None else deviations(X)[among]
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    # The errors are a mixture of as many normal ones as there are rows: quantiles of the rows' deviations and of the
    # normal distribution, at the middle of equal shares, stand for it.
    middles = (np.arange(_PARTS) + 0.5) / _PARTS
    normal = [_NORMAL.inv_cdf(share) for share in middles]
    return float(np.median(np.abs(np.expm1(np.outer(np.quantile(known, middles), normal)))))


def _drift(X: pd.DataFrame) -> float:
    """The table's typical deviation by drift; 0 where it does not say.

    Two halves that differ with a standard deviation d leave their mean one of d / 2.
    """
    ratios = X["drift_ratio"].dropna().to_numpy(float) if "drift_ratio" in X.columns else np.empty(0)
    return _robust(np.log(ratios)) / 2


def _occasions(X: pd.DataFrame) -> float:
    """How much the reference's time varies among the points of a curve; 0 where that is not known."""
    if "reference_ratio" not in X.columns:
        return 0.0
    known = X[X["reference_ratio"].notna()]
    log_ratio = np.log(known["reference_ratio"].to_numpy(float))
    curve = [name for name in CURVE if name in X.columns]
    grouped = known.assign(log_ratio=log_ratio).groupby(curve, dropna=False, observed=True, sort=False)["log_ratio"]
    count = grouped.transform("size").to_numpy(float)
    several = count > 1
    # Around the mean of n values they vary less than around the truth, by sqrt(1 - 1/n).
    around = (log_ratio - grouped.transform("mean").to_numpy())[several] / np.sqrt(1 - 1 / count[several])
    return _robust(around)


def _robust(values: Array) -> float:
    """The standard deviation around 0, by the median absolute value, which a few interrupted measurements do not
    move; 0 of nothing.
    """
    return float(np.median(np.abs(values))) / _NORMAL.inv_cdf(0.75) if values.size else 0.0
