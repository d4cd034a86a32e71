"""Global AdaPrune: the layers' kept weights learn together to follow the dense model's activations.

Layer-wise reconstruction sees dense inputs; in the pruned model each layer's inputs are already off. Minimise, over
the kept weights and all biases, the sum over layers of |y' - y|^2 / |y|^2, y' and y the layer's outputs in the pruned
and in the dense model on the same batch (Frantar & Alistarh 2022, section 3.3), by Adam; masks hold at every step,
batch norms stay in eval mode. No labels are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latbench.errors import BadData
from search.pruning.gradients import bad_gradient
from search.pruning.hooks import forward_hooks
from search.pruning.masks import apply_masks
from search.task import Task

LEARNING_RATE = 5e-4
STEPS = 60


def global_adaprune(
    task: Task,
    model: nn.Module,
    dense: nn.Module,
    masks: Mapping[str, Tensor],
    batches: Sequence[Any],
    *,
    rng: np.random.Generator,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> list[float]:
    """Train `model` in place for `steps` batches, drawn without replacement in each pass.

    `masks` are (m, k), True = kept; layers without one are matched too and train whole. Returns each step's loss.
    Raises BadData when an activation or a gradient is not finite.
    """
    layers = [name for name, module in dense.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    modules = dict(model.named_modules())
    # One that several layers share is updated once a step.
    parameters = list(dict.fromkeys(p for name in layers for p in modules[name].parameters()))
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 + 0.5 * math.cos(math.pi * s / steps))
    model.eval()
    losses = []
    order: list[int] = []
    for step in range(steps):
        order = order or list(rng.permutation(len(batches)))
        batch = batches[order.pop()]
        with torch.no_grad():
            targets = _outputs(task, dense, layers, batch)
        outputs = _outputs(task, model, layers, batch)
        loss = _distance(outputs, targets)
        model.zero_grad()
        loss.backward()
        if (bad := bad_gradient(model)) is not None:
            raise BadData(f"{bad} in global AdaPrune: prune with --no-global")
        optimizer.step()
        schedule.step()
        apply_masks(model, masks)
        losses.append(loss.item())
        progress(step + 1, steps)
    model.zero_grad()  # of all parameters: those that are not tuned here have gradients, too
    return losses


def _outputs(task: Task, model: nn.Module, layers: Sequence[str], batch: Any) -> dict[str, list[Tensor]]:
    """What each layer answers on a batch, one tensor a call."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        # A copy, as what follows may change it in place: ReLU(inplace=True).
        return lambda module, args, output: outputs[name].append(output.clone())

    with forward_hooks(model, {name: remember(name) for name in layers}):
        task.loss(model, batch)
    return outputs


def _distance(outputs: Mapping[str, list[Tensor]], targets: Mapping[str, list[Tensor]]) -> Tensor:
    total = torch.zeros(())
    for name in targets:
        for y, target in zip(outputs[name], targets[name], strict=True):
            energy = target.square().sum()
            distance = (y - target).square().sum()
            if not bool(torch.isfinite(distance)):
                raise BadData(f"layer {name}: its outputs on the calibration data hold NaN or infinite values")
            if energy > 0:
                total = total + distance / energy
    return total
