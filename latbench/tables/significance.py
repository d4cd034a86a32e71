"""Whether the same work became faster or slower between two measurements, judged by the samples of both.

Consecutive samples resemble each other, because the state of a machine lasts longer than a call. Resampling them one
by one would make the interval far too narrow. Blocks of neighbours are resampled instead (Kunsch 1989, "The jackknife
and the bootstrap for general stationary observations"). So few blocks vary too little. The interval is widened for
that (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.1).

Samples of one run cannot show how runs differ: by the placement of memory, by the load of neighbouring cores. The
other points of the same two tables can (`estimate_spread`), provided that most of them did not change. Among many
unchanged points, chance moves a few beyond any interval. `judge_together` bounds the share of false verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import fft, stats
from scipy.special import ndtr, ndtri, stdtrit

SAME, FASTER, SLOWER, UNCLEAR = "SAME", "FASTER", "SLOWER", "UNCLEAR"

COVERAGE = 0.95  # a verdict also needs the interval to clear the threshold
FEWEST_SAMPLES = 6  # with fewer, not even the range of the samples is a 95% interval of their median
BLOCKS = 12
MOST_OF_A_BLOCK = 20  # evenly spaced quantiles stand for a longer block
MAD_EFFICIENCY = 0.37  # efficiency for a normal distribution, relative to the plain estimate
PAIRS = 4000  # pairs of a resampled median before and one after


@dataclass(frozen=True)
class ChangeVerdict:
    """The comparison of two measurements.

    Parameters
    ----------
    kind
        SAME, FASTER, SLOWER or UNCLEAR.
    ratio, low, high
        Median after / median before and its confidence interval.
    luck
        Probability that work whose change is within the threshold seems to change this much.
    """

    kind: str
    ratio: float
    low: float
    high: float
    luck: float = 1.0


def estimate_spread(ratios: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of `ratios` (median after / before, one per point).

    The estimate is robust: up to half of the points may have changed. It uses the median absolute deviation; 0 for
    fewer than three points. Few points give a poor estimate, as good as that of 0.37 times as many points by the
    plain standard deviation. So it is widened as Student's t is wider than a normal distribution.
    """
    if len(ratios) < 3:
        return 0.0
    logarithms = np.log(ratios)
    deviation = float(np.median(np.abs(logarithms - np.median(logarithms))) / ndtri(0.75))
    inner = (1 + COVERAGE) / 2
    return deviation * float(stdtrit(max(1.0, MAD_EFFICIENCY * (len(ratios) - 1)), inner) / ndtri(inner))


def judge_change(
    before: Sequence[float], after: Sequence[float], *, threshold: float = 0.02, between: float = 0.0
) -> ChangeVerdict:
    """Compare the samples `after` with the samples `before`, both in seconds and in the order of measurement.

    The same samples always give the same verdict. Where both sides have the same samples, nothing has changed. Such
    are two copies of a published time. Any other difference between too few samples is unclear, however small: how
    much such a time varies is not known.

    Parameters
    ----------
    before, after
        Samples in seconds.
    threshold
        Relative changes below this count as equal.
    between
        Standard deviation of the logarithm of the ratio between pairs of runs of equal work (`estimate_spread`). The
        interval is at least as wide.

    Returns
    -------
    ChangeVerdict
        SLOWER or FASTER if the 95% interval of the ratio lies beyond 1 + `threshold` or below its inverse, SAME if it
        lies between them, UNCLEAR if it contains either or a side has fewer than six samples. SAME for the same
        samples, however few.

    Raises
    ------
    ValueError
        There are no samples, a sample is not positive and finite, or the threshold is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"a threshold is a positive share such as 0.02, not {threshold}")
    old, new = _times(before, "before"), _times(after, "after")
    if np.array_equal(old, new):
        return ChangeVerdict(SAME, 1.0, 1.0, 1.0)
    ratio = float(np.median(new) / np.median(old))
    if min(len(old), len(new)) < FEWEST_SAMPLES:
        return ChangeVerdict(UNCLEAR, ratio, float(new.min() / old.max()), float(new.max() / old.min()))
    shares = (np.arange(PAIRS) + 0.5) / PAIRS
    ratios = _medians(new, shares) / _medians(old, np.random.default_rng(0).permutation(shares))
    tail = _tail(min(BLOCKS, len(old), len(new)))
    low, high = (float(edge) for edge in np.quantile(ratios, [tail, 1 - tail]))
    # Thinned blocks and the midpoint of an even count can leave the plain median just outside.
    low, high = min(low, ratio), max(high, ratio)
    runs = between * float(ndtri((1 + COVERAGE) / 2))
    low, high = min(low, ratio * math.exp(-runs)), max(high, ratio * math.exp(runs))
    return ChangeVerdict(_kind(low, high, 1 + threshold), ratio, low, high, _luck(ratio, low, high, 1 + threshold))


def judge_together(verdicts: Sequence[ChangeVerdict]) -> list[ChangeVerdict]:
    """Return the verdicts on all points of two tables, corrected for their number.

    FASTER and SLOWER become UNCLEAR unless at most 5% of the remaining ones are expected to be wrong. Where no point
    changed, one comparison in 20 has a false verdict (Benjamini and Hochberg 1995, "Controlling the false discovery
    rate").
    """
    luck = stats.false_discovery_control([each.luck for each in verdicts]) if verdicts else []
    return [
        replace(each, kind=UNCLEAR) if each.kind in (FASTER, SLOWER) and share > 1 - COVERAGE else each
        for each, share in zip(verdicts, luck, strict=True)
    ]


def _tail(blocks: int) -> float:
    """Return the share to cut off at each end of a distribution that was resampled from so many blocks."""
    student = stdtrit(blocks - 1, (1 + COVERAGE) / 2)
    return float(ndtr(-math.sqrt(blocks / (blocks - 1)) * student))


def _kind(low: float, high: float, limit: float) -> str:
    if low > limit:
        return SLOWER
    if high < 1 / limit:
        return FASTER
    return SAME if low >= 1 / limit and high <= limit else UNCLEAR


def _luck(ratio: float, low: float, high: float, limit: float) -> float:
    """Return the probability from an interval, as if its logarithm were normally distributed."""
    beyond = abs(math.log(ratio)) - math.log(limit)
    half = math.log(ratio / low) if ratio > 1 else math.log(high / ratio)
    if beyond <= 0:
        return 1.0
    return 2 * float(ndtr(-beyond / half * ndtri((1 + COVERAGE) / 2))) if half > 0 else 0.0


def _times(samples: Sequence[float], which: str) -> NDArray[np.float64]:
    times = np.asarray(samples, float)
    if times.ndim != 1 or not len(times):
        raise ValueError(f"there are no samples from {which}")
    wrong = times[~((times > 0) & (times < math.inf))]
    if len(wrong):
        raise ValueError(f"a sample of {wrong[0]:g} s from {which} is not a valid time")
    return times


def _medians(times: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return quantiles `shares` of the median of a resample of `times` by blocks of neighbours, exactly.

    How many samples of a resample do not exceed a value is a sum of independent draws, one per block.
    """
    blocks = np.array_split(times, min(BLOCKS, len(times)))
    most = min(MOST_OF_A_BLOCK, len(blocks[-1]))  # the last is the shortest; all weigh the same
    inner = (np.arange(most) + 0.5) / most
    thinned = np.array([np.quantile(block, inner, method="hazen") for block in blocks])
    values, count = np.sort(thinned, axis=None), thinned.size
    not_above = np.array([np.searchsorted(block, values, side="right") for block in thinned])
    one = np.array([(not_above == number).mean(axis=0) for number in range(most + 1)])
    size = fft.next_fast_len(count + 1, real=True)
    every = fft.irfft(fft.rfft(one, size, axis=0) ** len(blocks), size, axis=0)[: count + 1]
    # The median of an even number lies between two.
    at_most = every[count // 2 + 1 :].sum(axis=0) + (every[count // 2] / 2 if count % 2 == 0 else 0.0)
    found: NDArray[np.float64] = values[np.minimum(np.searchsorted(at_most, shares), count - 1)]
    return found
