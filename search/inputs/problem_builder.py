"""A problem from its layers: what the model takes as a whole, and beside them, as far as it follows from them."""

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
    """The problem of these layers in a dense model of `dense_seconds`, which takes `fixed_seconds` beside them.

    Where one of both is missing it follows from the other and the sum of the dense layers; where both are, nothing
    else takes time. Raises UsageError where a layer has no dense time to follow from, BadData for times that cannot
    be, and where `fixed_seconds` follow to be negative.
    """
    fixed = None if fixed_seconds is None else convert_to_interval(fixed_seconds)
    if fixed is not None and not all(map(math.isfinite, fixed.ends)):
        raise BadData(f"what a model takes beside its layers is a finite time, not {fixed.value:g} s")
    if dense_seconds is None:
        fixed = fixed or convert_to_interval(0.0)
        dense = sum_dense_seconds(layers) + fixed
    else:
        dense = convert_to_interval(dense_seconds)
    if not all(0 < end < math.inf for end in dense.ends):
        raise BadData(f"a dense model takes a finite time above 0, not {dense.low:g} s")
    if fixed is None:
        alone = sum_dense_seconds(layers).value
        if dense.value < alone:
            raise BadData(
                f"the dense model takes {dense.value:.4g} s, its layers on their own {alone:.4g} s: say what the "
                "pruned model takes beside them, fixed_seconds (--fixed-seconds)"
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
    """The sum of the dense layers. Raises UsageError where one has no dense time."""
    if missing := [layer.name for layer in layers if DENSE_OPTION not in layer.options]:
        raise UsageError(
            f"layer {missing[0]} has no dense time: give dense_seconds and fixed_seconds "
            "(--dense-seconds, --fixed-seconds)"
        )
    return sum((layer.time(layer.options.index(DENSE_OPTION)) for layer in layers), start=convert_to_interval(0.0))
