"""Implausible measurements: invalid times, times that the device cannot reach, unexplained outliers.

Such a point gets a status and no time, because one impossible number spoils every minimum over a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

MOST_UTILISATION = 1.25
"""Highest accepted utilisation. Ceilings are measured within milliseconds, and clocks rise above that for a while."""

SPIKE_RATIO = 1.5
"""Accepted ratio of a time to those of both neighbouring sparsities. Steps where libraries switch kernels are real
but mostly smaller; a second measurement decides."""


def explain_impossible(samples: Sequence[float], roofline_seconds: float | None) -> str | None:
    """Return why these samples (seconds) cannot be times of the work; None if they can.

    `roofline_seconds` is the shortest time that the device allows, if it is known.
    """
    for sample in samples:
        if not 0 < sample < math.inf:
            return f"a sample of {sample:g} s: the clock went backwards or does not resolve it"
    if roofline_seconds is None or not samples:
        return None
    return explain_too_fast(
        float(np.median(samples)), roofline_seconds
    )  # the table's median, which `latbench validate` checks too


def explain_too_fast(seconds: float, roofline_seconds: float) -> str | None:
    """Return why work that needs `roofline_seconds` cannot take `seconds`; None if it can."""
    if seconds * MOST_UTILISATION >= roofline_seconds:
        return None
    return (
        f"{seconds:.3g} s is {roofline_seconds / seconds:.2g} times faster than this device can "
        f"({roofline_seconds:.3g} s): the work was not done, or the ceilings are of another machine"
    )


def find_spikes(curve: Mapping[float, float]) -> list[float]:
    """Return the sparsities at which a curve (sparsity -> seconds) exceeds both neighbours SPIKE_RATIO times.

    The ends have one neighbour only and are not judged.
    """
    at = sorted(curve)
    return [
        here
        for lower, here, higher in zip(at, at[1:], at[2:], strict=False)
        if curve[here] > SPIKE_RATIO * max(curve[lower], curve[higher])
    ]
