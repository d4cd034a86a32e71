"""How far the outputs of a pruned model and of its layers are from those of the dense model on the same batch.

The distance of an output is |y' - y|^2 / |y|^2, summed over all calls (Frantar & Alistarh 2022, section 3.3). It
needs no labels, and is of the same size in every layer and for every task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from search.example_inputs import list_tensors
from search.pruning.forward_hooks import Hook, get_product, register_forward_hooks
from search.task import CalibratedCalls

MODEL = ""
"""The name of the whole model, as torch has it: its outputs are all float tensors that it returns but scalars, which
are losses."""

ORDINARY = 1e6
"""Larger outputs of a model do not count: -1e9 and minus infinity mark what cannot be, such as a token."""

Outputs = Mapping[str, Sequence[Tensor]]
"""Name of a layer, or MODEL -> its outputs in the order of the calls."""


def collect_outputs(
    task: CalibratedCalls, model: nn.Module, names: Sequence[str], batch: Any
) -> dict[str, list[Tensor]]:
    """Return the outputs of these layers, or of MODEL, while the task computes its loss on a batch."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}

    # Copies: the next module may change the output in place, as ReLU(inplace=True) does.
    def remember_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs[MODEL] += [each.clone() for each in list_tensors(output) if each.ndim and each.is_floating_point()]

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda module, args, output: outputs[name].append(get_product(output).clone())

    hooks: dict[str, Hook] = {name: remember_model if name == MODEL else remember(name) for name in names}
    with register_forward_hooks(model, hooks):
        task.loss(model, batch)
    return outputs


def compute_distances(outputs: Outputs, targets: Outputs) -> dict[str, Tensor]:
    """Return the distance of each layer's outputs from the targets, scalars.

    Left out are layers whose outputs have other shapes than the targets, as in a mixture of experts. Zero targets
    have no relative distance, and count as none.
    """
    distances = {}
    for name in targets:
        if [y.shape for y in outputs[name]] != [y.shape for y in targets[name]]:
            continue
        total = torch.zeros(())
        for y, target in zip(outputs[name], targets[name], strict=True):
            if name == MODEL and not bool((ordinary := target.abs() <= ORDINARY).all()):
                y, target = y[ordinary], target[ordinary]
            energy = target.square().sum()
            if energy > 0 or not bool(torch.isfinite(energy)):
                total = total + (y - target).square().sum() / energy
        distances[name] = total
    return distances
