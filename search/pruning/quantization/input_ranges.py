"""The range in which a layer reads its inputs as bytes, found on calibration data.

A step is what a range is worth divided by 255. A range that holds every input has large steps if a few inputs are
large; a smaller one reads those as its ends. Three ways to choose, as in Nagel et al. 2021, "A White Paper on Neural
Network Quantization", section 3.1:

    minmax       all inputs
    percentile   all but one in ten thousand at each end
    mse          the range of least expected squared error
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from latbench.errors import BadData, UsageError
from search.pruning.forward_hooks import register_forward_hooks
from search.task import CalibratedCalls
from sparse_kernels.formats.int8 import STEPS, InputRange
from sparse_kernels.prunable_layers import find_geometry

BINS = 2048

OUTSIDE = 1e-4
"""Share of inputs beyond each end of the range of `percentile`."""

SHRINKS = np.linspace(1.0, 0.2, 41)
"""Shares of the whole range that `mse` tries."""


@dataclass(frozen=True)
class InputStatistics:
    """What the inputs of a layer are on calibration data.

    Attributes
    ----------
    low, high
        The least and the largest.
    counts
        Array (BINS,): how many inputs lie in each of as many equal parts from low to high.
    rows
        How many rows the layer's matrix product has, on all batches together.
    zeros
        How many inputs are 0, as behind a ReLU: every range reads those exactly.
    """

    low: float
    high: float
    counts: NDArray[np.float64]
    rows: int
    zeros: int = 0

    @property
    def centers(self) -> NDArray[np.float64]:
        """The middle of each part, (BINS,)."""
        return self.low + (self.high - self.low) * (np.arange(BINS) + 0.5) / BINS


def _cover_all(found: InputStatistics) -> InputRange:
    return InputRange.covering(found.low, found.high)


def _cover_most(found: InputStatistics) -> InputRange:
    below = np.cumsum(found.counts) / found.counts.sum()
    width = (found.high - found.low) / BINS
    first, last = np.searchsorted(below, OUTSIDE, side="right"), np.searchsorted(below, 1 - OUTSIDE)
    behind = min(int(last), BINS - 1) + 1
    return InputRange.covering(found.low + width * first, found.low + width * behind)


def _cover_for_least_error(found: InputStatistics) -> InputRange:
    ranges = [InputRange.covering(found.low * shrink, found.high * shrink) for shrink in SHRINKS]
    return min(ranges, key=lambda reading: estimate_reading_error(found, reading))


RANGE_METHODS: Mapping[str, Callable[[InputStatistics], InputRange]] = {
    "minmax": _cover_all,
    "percentile": _cover_most,
    "mse": _cover_for_least_error,
}

DEFAULT_RANGES = "mse"


def estimate_reading_error(found: InputStatistics, reading: InputRange) -> float:
    """Return the mean squared error of inputs that are read in this range.

    Inside it an input is off by up to half a step, every error as likely; outside, by its distance to the end. Zeros
    are not off.
    """
    low, high = (reading.scale * (q - reading.zero) for q in (0, STEPS))
    beyond = np.maximum(low - found.centers, 0) + np.maximum(found.centers - high, 0)
    inside = np.where(beyond == 0, reading.scale**2 / 12, 0.0)
    lost = (found.counts * (beyond**2 + inside)).sum() - found.zeros * reading.scale**2 / 12
    return float(max(lost, 0.0) / found.counts.sum())


@dataclass(frozen=True)
class InputReading:
    """How a layer reads its inputs, and what that loses on calibration data.

    Attributes
    ----------
    range
        The range of its steps.
    squared_error
        The mean squared error of an input.
    rows
        How many rows of inputs there are.
    """

    range: InputRange
    squared_error: float
    rows: int


def find_input_ranges(
    task: CalibratedCalls, model: nn.Module, layers: Sequence[str], method: str = DEFAULT_RANGES
) -> dict[str, InputReading]:
    """Find how each layer reads its inputs.

    Parameters
    ----------
    task : CalibratedCalls
        The task, whose calibration data passes through the model twice.
    model : Module
        The dense model.
    layers : sequence of str
        Names of its layers.
    method : str
        A key of RANGE_METHODS.

    Returns
    -------
    dict of str to InputReading
        The range of each layer, and what it loses.

    Raises
    ------
    UsageError
        The method is unknown.
    BadData
        A layer is never called on the calibration data, or its inputs are not finite.
    """
    if method not in RANGE_METHODS:
        raise UsageError(f"unknown way to choose input ranges {method!r}: known are {', '.join(RANGE_METHODS)}")
    readings = {}
    for name, found in measure_inputs(task, model, layers).items():
        chosen = RANGE_METHODS[method](found)
        readings[name] = InputReading(chosen, estimate_reading_error(found, chosen), found.rows)
    return readings


def measure_inputs(task: CalibratedCalls, model: nn.Module, layers: Sequence[str]) -> dict[str, InputStatistics]:
    """Return the statistics of the inputs of each layer. Raises BadData as `find_input_ranges`."""
    ends: dict[str, tuple[float, float]] = {}
    rows = dict.fromkeys(layers, 0)

    def note_ends(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not args[0].numel():  # an expert may get no token
            return
        low, high = ends.get(name, (0.0, 0.0))
        least, most = (float(each) for each in torch.aminmax(args[0].detach()))
        ends[name] = float(np.minimum(low, least)), float(np.maximum(high, most))  # NaN stays
        rows[name] += _count_rows(module, args[0], output)

    counts, zeros = {name: np.zeros(BINS) for name in layers}, dict.fromkeys(layers, 0)

    def count(name: str, _: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        low, high = ends.get(name, (0.0, 0.0))
        zeros[name] += int((args[0] == 0).sum())
        if high > low:
            counts[name] += torch.histc(args[0].detach().float(), BINS, low, high).double().cpu().numpy()

    for look in (note_ends, count):
        with torch.no_grad(), register_forward_hooks(model, {name: partial(look, name) for name in layers}):
            for batch in task.calibration():
                task.loss(model, batch)
        for name in layers:
            if name not in ends:
                raise BadData(f"layer {name} is never called on the calibration data of task {task.name}: exclude it")
            if not np.isfinite(ends[name]).all():
                raise BadData(f"layer {name}: its inputs on the calibration data hold NaN or infinite values")
    for name, (low, high) in ends.items():
        if low == high:  # only zeros
            counts[name][0] = zeros[name] = 1
    return {name: InputStatistics(*ends[name], counts[name], rows[name], zeros[name]) for name in layers}


def _count_rows(module: nn.Module, x: torch.Tensor, output: Any) -> int:
    """Return the rows of the layer's matrix product: tokens, or output positions of all images."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return x.numel() // max(x.shape[-1], 1)
    find_geometry(module)
    result = output[0] if isinstance(output, tuple) else output
    return int(result.numel() // result.shape[-1 - (2 if isinstance(module, nn.Conv2d) else 1)])
