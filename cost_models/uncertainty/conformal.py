"""How wrong may a prediction be: the quantile of held-out errors, with the correction that makes it valid when few.

A score says how far off one held-out prediction was. If the next score is exchangeable with n earlier ones, it is at
most the ceil((n + 1) * coverage)-th smallest of them with probability `coverage` (Vovk et al. 2005; Lei et al.
2018, section 2.2). Scores that come in groups, such as several points of one layer shape, are not exchangeable with
those of a new group; whole groups are. Each group then weighs the same, and one more, the new one, weighs as much at
infinity (Dunn, Wasserman and Ramdas 2022, "Distribution-Free Prediction Sets for Two-Layer Hierarchical Models").
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from cost_models.refusals import Uncalibrated


def quantile(scores: npt.ArrayLike, coverage: float, groups: npt.ArrayLike | None = None) -> float:
    """The bound that the next score stays under with probability `coverage`, in (0, 1).

    scores: (n,) of held-out predictions; groups: (n,) labels, or None where each score is a group of its own.
    Raises Uncalibrated where so few groups allow no finite bound, ValueError for a coverage outside (0, 1).
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must lie between 0 and 1, not {coverage}")
    values = np.asarray(scores, dtype=np.float64)
    labels = np.arange(values.size) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    sizes = np.bincount(labels)
    needed = math.ceil(coverage / (1 - coverage) - 1e-9)
    if sizes.size < needed:
        what = "points" if groups is None else "shapes"
        raise Uncalibrated(
            f"an interval of {coverage * 100:g}% needs at least {needed} held-out {what} and this table gives "
            f"{sizes.size}: measure more, or ask for a lower coverage"
        )
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(1.0 / sizes[labels[order]]) / (sizes.size + 1)
    # The sum may miss the coverage by rounding alone: then the next score would be taken, a wider interval than due.
    return float(values[order][np.searchsorted(mass, coverage - 1e-9)])


_STEPS = 30
_SMALL = 0.05  # a deviation's least share of the median, to divide by
_LEAST_SHARE = 1e-3  # of the median error: none is expected to be smaller than that, anywhere


def scatter(distance: npt.ArrayLike, errors: npt.ArrayLike) -> tuple[float, float]:
    """How large errors typically are at no distance, and by how much more per unit of it; neither is negative.

    distance: (n,), at least 0; errors: (n,), absolute. The median error at distance d is fitted as a + b * d, by the
    least sum of deviations, each in units of that median (Koenker and Bassett 1978), since it scatters by as much. A
    few wild errors do not move it. What intervals come from is the ratio of errors to it, so a poor fit makes them
    wider than need be in places, and not too narrow on the whole. (1, 0) where more than half of the errors are 0.
    """
    x, size = np.asarray(distance, dtype=np.float64), np.abs(np.asarray(errors, dtype=np.float64))
    median = float(np.median(size)) if size.size else 0.0
    if median == 0:
        return 1.0, 0.0
    unit = float(x.max()) or 1.0
    design = np.column_stack([np.ones(len(x)), x / unit])
    expected = np.full(len(x), median)
    for _ in range(_STEPS):
        # A square over its own root is the deviation itself.
        weight = 1 / np.sqrt(expected * np.maximum(np.abs(size - expected), _SMALL * expected))
        (near, further), _ = nnls(design * weight[:, None], size * weight)
        near = max(near, _LEAST_SHARE * median)
        expected = near + further * x / unit
    return float(near), float(further / unit)
