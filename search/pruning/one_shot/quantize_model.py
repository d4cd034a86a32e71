"""Round layers of a model to eight bits, from calibration inputs alone: no task, no database.

Weights are rounded one column after the other, and each makes up for what those before it lost, dropped weights
included (`search.pruning.one_shot.round_weights`). The range in which a layer reads its inputs is that of
`search.pruning.quantization.input_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from latbench.base.engine_registry import INT8
from latbench.errors import BadData, UsageError
from search.pruning.one_shot.hessian import compute_input_hessians
from search.pruning.one_shot.magnitude import Magnitude
from search.pruning.one_shot.one_shot_pruner import PrunedWeight
from search.pruning.one_shot.round_weights import round_weight
from search.pruning.quantization.input_ranges import DEFAULT_RANGES, find_input_ranges
from sparse_kernels.convert import LayerPattern, check_choices
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.prunable_layers import refuse_layer, set_weight_matrix, weight_matrix


@dataclass(frozen=True)
class _Calls:
    """Calls of a model without a loss: only the inputs of its layers are measured."""

    batches: Sequence[tuple[Any, ...]]
    name: str = "quantize"

    def calibration(self) -> Sequence[tuple[Any, ...]]:
        return self.batches

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        model(*batch)
        return torch.zeros(())


def quantize(
    model: nn.Module,
    choices: Mapping[str, LayerPattern],
    batches: Iterable[tuple[Any, ...]],
    *,
    ranges: str = DEFAULT_RANGES,
) -> dict[str, LayerPattern]:
    """Round layers of a model to eight bits, in place, and return what `convert` needs to multiply them so.

    Parameters
    ----------
    model : Module
        The model, in float32. The weights of these layers change: they become whole numbers of steps, and zero where
        a mask drops them.
    choices : mapping of str to LayerPattern
        Pattern and mask of each layer to round, by name; `LayerPattern(Dense())` keeps all weights.
    batches : iterable of tuple
        Positional arguments of calls of the model: a few hundred samples of real data.
    ranges : str
        How the range of a layer's inputs is chosen: minmax, percentile or mse.

    Returns
    -------
    dict of str to LayerPattern
        The same patterns and masks in int8, each with its quantization.

    Raises
    ------
    UsageError
        A name is no layer that can be rounded, there are no batches, or `ranges` is unknown.
    BadData
        A layer is never called, its inputs are not finite, or its weights are not.

    Examples
    --------
    >>> choices = quantize(model, {"0": LayerPattern(pattern, mask)}, [(x,)])
    >>> fast = convert(model, choices, (x,))
    """
    data, modules = _Calls(tuple(batches)), dict(model.named_modules())
    _check_inputs(data, modules, choices)
    readings = find_input_ranges(data, model, list(choices), ranges)
    weights, quantized = {}, {}
    for name, hessian in compute_input_hessians(data, model, list(choices), data.batches):
        matrix, mask = weight_matrix(modules[name]).detach().float().contiguous(), choices[name].mask
        kept = torch.ones(matrix.shape, dtype=torch.bool) if mask is None else torch.from_numpy(mask)
        try:
            rounded = round_weight(Magnitude(matrix, hessian), PrunedWeight(matrix, kept, 0.0), readings[name])
        except BadData as error:
            raise BadData(f"layer {name}: {error}") from error
        weights[name] = rounded.weight
        reading = Quantization(rounded.scales, readings[name].range)
        quantized[name] = replace(choices[name], precision=INT8, quantization=reading)
    for name, weight in weights.items():
        set_weight_matrix(modules[name], weight)
    return quantized


def _check_inputs(data: _Calls, modules: Mapping[str, nn.Module], choices: Mapping[str, LayerPattern]) -> None:
    """Raise UsageError for what is no choice, no layer to round or no batch, and where there are no batches."""
    try:
        check_choices(choices)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in choices:
        reason = "the model has no such layer" if name not in modules else refuse_layer(modules[name])
        if reason is not None:
            raise UsageError(f"layer {name} cannot be rounded: {reason}")
    if not data.batches:
        raise UsageError("there are no batches: the ranges of inputs are found on them")
    if wrong := [batch for batch in data.batches if not isinstance(batch, tuple | list)]:
        raise UsageError(f"a batch is a tuple of arguments, such as (x,), not a {type(wrong[0]).__name__}")
