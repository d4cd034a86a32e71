"""Confidence intervals of a median by order statistics, without an assumption on the distribution.

A file of its own, because every worker needs it and it imports nothing slow.
"""

from __future__ import annotations

import functools

import numpy as np

FEWEST_FOR_INTERVAL = 6  # with five, all fall on one side of the median in 2 * 2^-5 = 6% of cases


def bound_median(ordered: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% confidence interval of the median from rising samples; (None, None) with fewer than six."""
    rank = find_interval_rank(len(ordered))
    return (None, None) if rank is None else (float(ordered[rank]), float(ordered[-1 - rank]))


@functools.cache
def find_interval_rank(count: int) -> int | None:
    """Return the largest rank r (from 0) whose r-th smallest and r-th largest sample enclose the median in 95%.

    None with fewer than six samples. The interval fails where at most r samples fall on one side: P(Binomial(count,
    1/2) <= r) <= 2.5% on each side.
    """
    if count < FEWEST_FOR_INTERVAL:
        return None
    from scipy.special import (
        bdtr,
        bdtrik,
    )  # imported late, because it takes as long as all other imports and workers do not need it

    rank = int(bdtrik(0.025, count, 0.5))  # an approximation, interpolated over r
    while bdtr(rank + 1, count, 0.5) <= 0.025:
        rank += 1
    while bdtr(rank, count, 0.5) > 0.025:
        rank -= 1
    return rank
