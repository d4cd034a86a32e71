"""Global AdaPrune: the layers' kept weights learn together to follow the dense model's activations.

Layer-wise reconstruction sees dense inputs; in the pruned model each layer's inputs are already off. Minimise, over
the kept weights and all biases, the sum over layers of |y' - y|^2 / |y|^2, y' and y the layer's outputs in the pruned
and in the dense model on the same batch (Frantar & Alistarh 2022, section 3.3), by Adam; batch norms stay in eval
mode. No labels are used.

While they learn, pruned layers hold their kept values alone: masks cannot be left, and Adam's two moments are as
small as the values. A whole weight is made for one call of its layer, and once more for its gradient, which is used
up as soon as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

from latbench.errors import BadData
from search.pruning.forward_hooks import forward_hooks, product_of
from search.task import Task
from sparse_kernels.nn import as_weight

LEARNING_RATE = 5e-4
STEPS = 60


def global_adaprune(
    task: Task,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    batches: Sequence[Any],
    *,
    rng: np.random.Generator,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> list[float]:
    """Train `model`, the task's with `masks`, in place for `steps` batches, drawn without replacement in each pass.

    `masks` are (m, k), True = kept; layers without one are matched too and train whole, frozen ones stay as they are.
    Layers whose calls are not of the dense model's shapes, as in a mixture of experts, are left out of the loss.
    Returns each step's loss, none where nothing can learn. Raises BadData when an activation or a gradient is not
    finite.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    model.eval()
    losses = []
    order: list[int] = []
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with _kept_values(model, masks), ExitStack() as hooks:
        dense = task.model()
        modules = dict(model.named_modules())
        # One that several layers share is updated once a step.
        parameters = list(dict.fromkeys(p for name in layers for p in modules[name].parameters() if p.requires_grad))
        optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in parameters}
        rate = learning_rate

        def update(parameter: Tensor) -> None:
            """As soon as its gradient is whole, which is then needed no more."""
            if not bool(torch.linalg.vector_norm(parameter.grad, torch.inf).isfinite()):
                gradient = f"the gradient of {names[parameter]}"
                raise BadData(f"{gradient} holds NaN or infinite values in global AdaPrune: prune with --no-global")
            optimizers[parameter].param_groups[0]["lr"] = rate
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(update).remove)
        for step in range(steps if parameters else 0):
            rate = learning_rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            order = order or list(rng.permutation(len(batches)))
            batch = batches[order.pop()]
            with torch.no_grad():
                targets = _outputs(task, dense, layers, batch)
            loss = _distance(_outputs(task, model, layers, batch), targets)
            loss.backward()
            model.zero_grad()  # those that are not tuned here have gradients, too
            losses.append(loss.item())
            progress(step + 1, steps)
        del dense
        optimizers.clear()  # before the weights are whole again
    return losses


class _KeptValues(nn.Module):
    """A weight as its kept values, (nnz,), in the order of the weight's shape.

    During a call of its layer (`in_call`) the whole weight is written to the memory that all of that shape share, in
    `scratch`: it is needed no longer, and fresh memory for every one would leave holes between the layers' outputs.
    """

    def __init__(self, mask: Tensor, scratch: dict[torch.Size, Tensor]) -> None:
        super().__init__()
        self.mask, self.scratch, self.in_call = mask, scratch, False

    def forward(self, values: Tensor) -> Tensor:
        """The weight."""
        shape = self.mask.shape
        whole = self.scratch.get(shape) if self.in_call else None
        if whole is None:
            whole = torch.empty(shape)
            if self.in_call:
                self.scratch[shape] = whole
        spread: Tensor = _Spread.apply(values, self.mask, whole)
        return spread

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is held of a weight."""
        return _kept(weight.detach(), self.mask)


class _Spread(torch.autograd.Function):
    """Kept values at their places in a weight."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, whole: Tensor) -> Tensor:
        ctx.mask = mask
        return whole.zero_().masked_scatter_(mask, values).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _kept(gradient, ctx.mask), None, None


def _kept(weight: Tensor, mask: Tensor) -> Tensor:
    """As torch's own masked_select, which takes four times the weight's memory on the way."""
    return torch.from_numpy(weight.numpy()[mask.numpy()])


@contextmanager
def _kept_values(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """While the context is open, the masked layers hold no more than their kept values."""
    modules = dict(model.named_modules())
    scratch: dict[torch.Size, Tensor] = {}
    with ExitStack() as stack:
        for name, mask in masks.items():
            stack.callback(_hold_kept_values(modules[name], mask, scratch))
        yield


def _hold_kept_values(layer: nn.Module, mask: Tensor, scratch: dict[torch.Size, Tensor]) -> Callable[[], None]:
    """Returns what makes the layer what it was, with the weights that it has then."""
    own_forward = vars(layer).get("forward")
    parameters = list(layer._parameters)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    layout = torch.channels_last if _in_channels_last(weight) else torch.contiguous_format
    kept, plain = _KeptValues(as_weight(mask, weight.shape), scratch), layer.forward
    register_parametrization(layer, "weight", kept)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.in_call = True
        try:
            return plain(*args, **kwargs)
        finally:
            kept.in_call = False

    # Autograd would keep every layer's weight until its gradient is due.
    layer.forward = partial(checkpoint, forward, use_reentrant=False)

    def undo() -> None:
        del layer.forward
        if own_forward is not None:
            layer.forward = own_forward
        remove_parametrizations(layer, "weight")
        weight.data = weight.data.clone(memory_format=layout)  # out of the scratch memory
        for name in parameters:  # in their order, by which optimizers know them
            layer._parameters[name] = layer._parameters.pop(name)

    return undo


def _in_channels_last(weight: Tensor) -> bool:
    return weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _outputs(task: Task, model: nn.Module, layers: Sequence[str], batch: Any) -> dict[str, list[Tensor]]:
    """What each layer answers on a batch, one tensor a call."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        # A copy, as what follows may change it in place: ReLU(inplace=True).
        return lambda module, args, output: outputs[name].append(product_of(output).clone())

    with forward_hooks(model, {name: remember(name) for name in layers}):
        task.loss(model, batch)
    return outputs


def _distance(outputs: Mapping[str, list[Tensor]], targets: Mapping[str, list[Tensor]]) -> Tensor:
    total = torch.zeros(())
    for name in targets:
        if [y.shape for y in outputs[name]] != [y.shape for y in targets[name]]:
            continue
        for y, target in zip(outputs[name], targets[name], strict=True):
            energy = target.square().sum()
            distance = (y - target).square().sum()
            if not bool(torch.isfinite(distance)):
                raise BadData(f"layer {name}: its outputs on the calibration data hold NaN or infinite values")
            if energy > 0:
                total = total + distance / energy
    return total
