"""Fold each BatchNorm into the layer before it, so that an exported model has neither its time nor its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from search.example_inputs import ExampleInputs, list_tensors
from sparse_kernels.convert import LayerPattern, copy_model
from sparse_kernels.norm_folding import fold_norm
from sparse_kernels.same_results import FOLDED, same_results

Norm = nn.BatchNorm1d | nn.BatchNorm2d
Choices = Mapping[str, LayerPattern]


def fold_norms(
    model: nn.Module, choices: Choices, example: ExampleInputs
) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Return a copy of the model with its norms folded into layers, and the choices that go with it.

    A norm is folded where the example's call gives it what one layer returned. That nothing else reads the layer is
    proved: the copy gives the same results. Where all norms together do not, each is tried by itself.

    Parameters
    ----------
    model : Module
        A model in eval mode, with plain weights. It is not changed.
    choices : mapping of str to LayerPattern
        The patterns of its pruned layers.
    example : ExampleInputs
        Inputs of a call.
    """
    wanted = _call(model, example)
    pairs = _find_pairs(model, example)
    if not pairs:
        return copy_model(model), dict(choices)
    folded, scaled = _fold(model, choices, pairs)
    if _agree(folded, example, wanted):
        return folded, scaled
    right = {
        norm: layer for norm, layer in pairs.items() if _agree(_fold(model, {}, {norm: layer})[0], example, wanted)
    }
    folded, scaled = _fold(model, choices, right)
    return (folded, scaled) if _agree(folded, example, wanted) else (copy_model(model), dict(choices))


def _call(model: nn.Module, example: ExampleInputs) -> list[Tensor]:
    with torch.no_grad():
        return list_tensors(example.map_tensors(lambda each: each.clone()).call(model))


def _agree(model: nn.Module, example: ExampleInputs, wanted: list[Tensor]) -> bool:
    try:
        found = _call(model, example)
    except Exception:  # noqa: BLE001 - a model may ask its norm for what it no longer has
        return False
    return len(found) == len(wanted) and all(map(_same, found, wanted))


def _same(found: Tensor, wanted: Tensor) -> bool:
    return same_results(found, wanted, FOLDED)


def _find_pairs(model: nn.Module, example: ExampleInputs) -> dict[str, str]:
    """Return the norms that get what a layer returned, and that layer; both are called once."""
    calls: dict[str, int] = {}
    returned: dict[int, tuple[str, Tensor]] = {}
    pairs: dict[str, str] = {}

    def note_layer(name: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: Any, result: Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1
            returned[id(result)] = name, result  # kept, so that no other tensor takes over its id

        return note

    def note_norm(name: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            # Of (batch, tokens, features) a norm's channels are the tokens, which no weight can take over.
            if inputs and id(inputs[0]) in returned and inputs[0].ndim in (2, 4):
                pairs[name] = returned[id(inputs[0])][0]

        return note

    handles = []
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            handles.append(module.register_forward_hook(note_layer(name)))
        elif isinstance(module, Norm) and not module.training and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(note_norm(name)))
    try:
        _call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return {norm: layer for norm, layer in pairs.items() if calls[norm] == calls[layer] == 1}


def _fold(model: nn.Module, choices: Choices, pairs: Mapping[str, str]) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Return a copy with these norms folded, and the choices: a norm multiplies a row and its steps alike."""
    copied, scaled = copy_model(model), dict(choices)
    for norm_name, name in pairs.items():
        norm: Any = copied.get_submodule(norm_name)
        layer: Any = copied.get_submodule(name)
        gain = fold_norm(layer, norm)
        copied.set_submodule(norm_name, nn.Identity())
        choice = scaled.get(name)
        if choice is not None and choice.quantization is not None:
            scales = choice.quantization.scales * gain.abs().numpy()
            scaled[name] = replace(choice, quantization=replace(choice.quantization, scales=scales))
    return copied, scaled
