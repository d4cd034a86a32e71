"""The time columns of a row, from its samples: the only place where a table's median is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latbench.base.median_interval import bound_median, find_interval_rank

Reals = NDArray[np.float64]


def summarise_samples(samples: Sequence[float], burst_error: float | None = None) -> dict[str, Any]:
    """Return the time columns of `samples` (seconds a call).

    low_seconds and high_seconds bound the median with 95% confidence by order statistics (Conover, Practical
    Nonparametric Statistics, section 3.2), without an assumption on the distribution. They are None with fewer than
    six samples. That interval takes samples as independent. Where bursts disagree more (`burst_error`), the interval
    is widened to that factor on either side. Raises ValueError without samples, or for one that is not positive and
    finite.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    if ordered.size == 0 or not (np.isfinite(ordered).all() and ordered[0] > 0):
        raise ValueError(f"samples must be positive finite seconds, at least one, not {list(samples)[:5]}")
    low, high = bound_median(ordered)
    q25, median, q75, p95 = np.quantile(ordered, [0.25, 0.5, 0.75, 0.95])
    if low is not None and high is not None and burst_error is not None:
        low, high = min(low, float(median) / (1 + burst_error)), max(high, float(median) * (1 + burst_error))
    return {
        "median_seconds": float(median),
        "min_seconds": float(ordered[0]),
        "mean_seconds": float(ordered.mean()),
        "q25_seconds": float(q25),
        "q75_seconds": float(q75),
        "p95_seconds": float(p95),
        "std_seconds": float(ordered.std(ddof=1)) if ordered.size > 1 else None,
        "low_seconds": low,
        "high_seconds": high,
        "sample_count": int(ordered.size),
    }


def summarise_sample_rows(samples: Reals, burst_errors: Reals) -> dict[str, Reals]:
    """Return the time columns of each row of `samples` (rows, count), with `burst_errors` (rows,) or NaN; NaN for
    None.
    """
    ordered = np.sort(samples, axis=1)
    count = samples.shape[1]
    q25, median, q75, p95 = np.quantile(ordered, [0.25, 0.5, 0.75, 0.95], axis=1)
    nothing = np.full(len(samples), math.nan)
    rank = find_interval_rank(count)
    low, high = (nothing, nothing) if rank is None else (ordered[:, rank], ordered[:, -1 - rank])
    if rank is not None:
        low, high = np.fmin(low, median / (1 + burst_errors)), np.fmax(high, median * (1 + burst_errors))
    return {
        "median_seconds": median,
        "min_seconds": ordered[:, 0],
        "mean_seconds": ordered.mean(axis=1),
        "q25_seconds": q25,
        "q75_seconds": q75,
        "p95_seconds": p95,
        "std_seconds": ordered.std(axis=1, ddof=1) if count > 1 else nothing,
        "low_seconds": low,
        "high_seconds": high,
    }
