"""What no measurement may say: a time that is none, one that the device cannot reach, one that nothing explains.

Pure. Such a point gets a status and no time, because one impossible number in a table spoils every minimum over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

MOST_UTILISATION = 1.25
"""Of what the ceilings say: they are the fastest of some milliseconds, and clocks rise for a while above that."""

SPIKE_RATIO = 1.5
"""How far a time may lie above those of the two neighbouring sparsities. Steps where libraries switch kernels are
real, and are mostly smaller; a second measurement tells."""


def explain_impossible(samples: Sequence[float], roofline_seconds: float | None) -> str | None:
    """Why these samples, in seconds, are no times of anything; None if they may be.

    `roofline_seconds` is the least that the work can take on the device, if that is known.
    """
    for sample in samples:
        if not 0 < sample < math.inf:
            return f"a sample of {sample:g} s: the clock went backwards or does not resolve it"
    if roofline_seconds is None or not samples:
        return None
    return explain_too_fast(
        float(np.median(samples)), roofline_seconds
    )  # the table's median, which validate judges too


def explain_too_fast(seconds: float, roofline_seconds: float) -> str | None:
    """Why nothing takes only `seconds` that needs `roofline_seconds` at least; None if it may."""
    if seconds * MOST_UTILISATION >= roofline_seconds:
        return None
    return (
        f"{seconds:.3g} s is {roofline_seconds / seconds:.2g} times faster than this device can "
        f"({roofline_seconds:.3g} s): the work was not done, or the ceilings are of another machine"
    )


def find_spikes(curve: Mapping[float, float]) -> list[float]:
    """The sparsities at which a curve (sparsity: seconds) takes SPIKE times as long as at the next lower one and at
    the next higher one. The ends have one neighbour only, and are not judged.
    """
    at = sorted(curve)
    return [
        here
        for lower, here, higher in zip(at, at[1:], at[2:], strict=False)
        if curve[here] > SPIKE_RATIO * max(curve[lower], curve[higher])
    ]
