"""Training of layers that will multiply in eight bits: each call rounds weights and inputs to steps.

Gradients pass as if nothing was rounded (straight-through: Bengio et al. 2013; Jacob et al. 2018, section 3), so the
weights that learn stay in float32. A step of a row is its largest weight divided by 127, as the row is in that call.
Ranges of inputs stay as they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from search.pruning.quantization.rounded_inputs import read_arguments
from sparse_kernels.formats.int8 import Quantization, find_scales, round_to_steps
from sparse_kernels.prunable_layers import as_weight, set_weight_matrix, weight_matrix


@contextmanager
def compute_in_steps(model: nn.Module, quantizations: Mapping[str, Quantization]) -> Iterator[None]:
    """Let layers compute with rounded weights and inputs while the context is open.

    Parameters
    ----------
    model : Module
        The model to train.
    quantizations : mapping of str to Quantization
        Ranges of the inputs of layers in eight bits.
    """
    with ExitStack() as stack:
        for name, quantization in quantizations.items():
            stack.callback(_compute_in_steps(model.get_submodule(name), quantization))
        yield


def round_layers(model: nn.Module, quantizations: Mapping[str, Quantization]) -> dict[str, Quantization]:
    """Round the weights of layers to steps, in place; return how these layers are read then."""
    found = {}
    for name, quantization in quantizations.items():
        layer = model.get_submodule(name)
        matrix = weight_matrix(layer).float().cpu().contiguous().numpy()
        scales = find_scales(matrix)
        set_weight_matrix(layer, torch.from_numpy(round_to_steps(matrix, scales)))
        found[name] = replace(quantization, scales=scales)
    return found


def _compute_in_steps(layer: nn.Module, quantization: Quantization) -> Callable[[], None]:
    """Let a layer round its weight and its input in each call; return a function that ends this."""
    reading = quantization.input_range
    assert reading is not None

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        vars(layer)["weight"] = round_straight_through(layer)  # found before the parameter of this name
        return read_arguments(reading, args, kwargs)

    def after(*_: Any) -> None:
        del vars(layer)["weight"]

    handles = (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def round_straight_through(layer: nn.Module) -> Tensor:
    """Return a layer's weight rounded to steps of its rows, with the gradient of the weight itself."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    matrix = weight_matrix(layer).detach().float().cpu().contiguous().numpy()
    rounded = as_weight(layer, torch.from_numpy(round_to_steps(matrix, find_scales(matrix)))).to(weight)
    return weight + (rounded - weight.detach())
