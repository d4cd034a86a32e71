"""Measurement noise: how far a measured time may be from the true one, estimated from a table's own rows.

A time is the median of samples. Three things move it away from the true time of the layer:

    samples     they are few, or come in bursts that disagree: low_seconds and high_seconds, the 95% interval of the
                median
    drift       the machine's speed changes while samples are taken: drift_ratio, their later half over the earlier
    occasions   its speed differs from point to point: reference_ratio, a fixed piece of work timed beside each point;
                its spread among the points of one curve, where it should be constant

The first two see the same disagreement, so the larger counts. The third is independent of them. A table does not show
an error that all of its points share, and no model of the table needs it.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd

from cost_models.rows.row_keys import CURVE, FloatArray, RowMask

_NORMAL = NormalDist()
_HALF_INTERVAL = _NORMAL.inv_cdf(0.975)  # half of a 95% interval, in standard deviations
_QUANTILES = 200


def estimate_noise(X: pd.DataFrame) -> FloatArray:
    """Estimate the standard deviation of each row's log seconds around the true value.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Uses low_seconds, high_seconds, drift_ratio and reference_ratio where they are there.

    Returns
    -------
    ndarray of shape (rows,)
        Standard deviations in log seconds; NaN for rows without an interval.
    """
    if not {"low_seconds", "high_seconds"} <= set(X.columns):
        return np.full(len(X), np.nan)
    samples = np.log(X["high_seconds"].to_numpy(float) / X["low_seconds"].to_numpy(float)) / (2 * _HALF_INTERVAL)
    noise: FloatArray = np.hypot(np.maximum(samples, _estimate_drift(X)), _estimate_occasions(X))
    return noise


def estimate_noise_floor(X: pd.DataFrame, among: RowMask | None = None) -> float | None:
    """Estimate the median of |true / measured - 1|: the median error of a model that knows every true time.

    The ratio of a model's median error to this floor says how much is left to learn. Errors are taken as log-normal.
    The estimate is too high if the reference varies by more than the times do; a good look-up may then be below it.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        All rows of the table: the noise is estimated on all of them.
    among : ndarray of bool, shape (rows,), optional
        The rows whose floor is wanted. By default all rows.

    Returns
    -------
    float or None
        The floor; None if no row has an interval.
    """
    noise = estimate_noise(X) if among is None else estimate_noise(X)[among]
    noise = noise[np.isfinite(noise)]
    if not noise.size:
        return None
    # The errors are a mixture of one normal distribution a row. The quantiles of the rows' deviations and of the
    # normal distribution, at the middles of equal shares, represent it.
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = [_NORMAL.inv_cdf(share) for share in middles]
    return float(np.median(np.abs(np.expm1(np.outer(np.quantile(noise, middles), normal)))))


def _estimate_drift(X: pd.DataFrame) -> float:
    """Return the table's typical deviation by drift; 0 without the column.

    Two halves that differ with a standard deviation of d give their mean a deviation of d / 2.
    """
    ratios = X["drift_ratio"].dropna().to_numpy(float) if "drift_ratio" in X.columns else np.empty(0)
    return _estimate_deviation(np.log(ratios)) / 2


def _estimate_occasions(X: pd.DataFrame) -> float:
    """Return the deviation of the reference's log time among the points of a curve; 0 if that is unknown."""
    if "reference_ratio" not in X.columns:
        return 0.0
    known = X[X["reference_ratio"].notna()]
    log_ratio = np.log(known["reference_ratio"].to_numpy(float))
    curve = [name for name in CURVE if name in X.columns]
    grouped = known.assign(log_ratio=log_ratio).groupby(curve, dropna=False, observed=True, sort=False)["log_ratio"]
    count = grouped.transform("size").to_numpy(float)
    several = count > 1
    # n values vary less around their own mean than around the truth, by sqrt(1 - 1/n).
    centred = (log_ratio - grouped.transform("mean").to_numpy())[several] / np.sqrt(1 - 1 / count[several])
    return _estimate_deviation(centred)


def _estimate_deviation(values: FloatArray) -> float:
    """Return the standard deviation around 0, from the median absolute value; 0 for no values.

    A few interrupted measurements do not move it.
    """
    return float(np.median(np.abs(values))) / _NORMAL.inv_cdf(0.75) if values.size else 0.0
