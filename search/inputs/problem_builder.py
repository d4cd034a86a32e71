"""Build a problem from its layers and the times of the whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from latbench.errors import BadData, UsageError
from search.problem.layers import DENSE, DENSE_OPTION, Interval, LayerOptions, convert_to_interval
from search.problem.problem import Problem

Seconds = float | Interval


def build_problem(
    layers: Sequence[LayerOptions],
    *,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
    dense_engine: str = DENSE,
) -> Problem:
    """Return the problem of these layers.

    Parameters
    ----------
    layers
        Layers with their options and seconds.
    dense_seconds
        Seconds of the dense model; by default the dense layers and `fixed_seconds` together.
    fixed_seconds
        Seconds of the converted model besides these layers. By default `dense_seconds` minus the dense layers; 0 if
        both are missing.
    dense_engine
        The engine that runs the dense model.

    Raises
    ------
    UsageError
        A layer has no dense time to derive the other times from.
    BadData
        A time is impossible, or `fixed_seconds` would be negative.
    """
    fixed = None if fixed_seconds is None else convert_to_interval(fixed_seconds)
    if fixed is not None and not all(map(math.isfinite, fixed.ends)):
        raise BadData(f"the time beside the layers (fixed_seconds) must be finite, not {fixed.value:g} s")
    if dense_seconds is None:
        fixed = fixed or convert_to_interval(0.0)
        dense = sum_dense_seconds(layers) + fixed
    else:
        dense = convert_to_interval(dense_seconds)
    if not all(0 < end < math.inf for end in dense.ends):
        raise BadData(f"the time of the dense model must be finite and above 0, not {dense.low:g} s")
    if fixed is None:
        alone = sum_dense_seconds(layers).value
        if dense.value < alone:
            raise BadData(
                f"the dense model takes {dense.value:.4g} s, its layers on their own {alone:.4g} s: give the "
                "time of the pruned model beside them, fixed_seconds (--fixed-seconds)"
            )
        fixed = convert_to_interval(dense.value - alone)
    fastest = sum(float(layer.seconds.min()) for layer in layers)
    if fixed.value + fastest < 0:
        raise BadData(
            f"the model would take {fixed.value + fastest:.4g} s at its fastest: {fastest:.4g} s in its layers, and "
            f"{fixed.value:.4g} s beside them (fixed_seconds, --fixed-seconds)"
        )
    return Problem(tuple(layers), fixed, dense, dense_engine)


def sum_dense_seconds(layers: Sequence[LayerOptions]) -> Interval:
    """Return the sum of the dense layers. Raises UsageError where one has no dense time."""
    if missing := [layer.name for layer in layers if DENSE_OPTION not in layer.options]:
        raise UsageError(
            f"layer {missing[0]} has no dense time: give dense_seconds and fixed_seconds "
            "(--dense-seconds, --fixed-seconds)"
        )
    return sum((layer.time(layer.options.index(DENSE_OPTION)) for layer in layers), start=convert_to_interval(0.0))
