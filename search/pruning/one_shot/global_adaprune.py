"""Global AdaPrune: the kept weights of all layers learn together to reproduce the dense model's activations.

Layer-wise reconstruction uses dense inputs, but in the pruned model each layer's inputs are already off. Global
AdaPrune (Frantar & Alistarh 2022, section 3.3) minimizes the sum over layers of |y' - y|^2 / |y|^2. Here y' and y are
the layer's outputs in the pruned and in the dense model on the same batch. Adam changes the kept weights and all
biases; batch norms stay in eval mode. No labels are used. Layers in eight bits compute as they will: with inputs and
weights rounded to steps, through which gradients pass as if nothing was rounded.

During this tuning pruned layers hold only their kept values, so the masks cannot change, and Adam's two moments are
as small as the values. The whole weight exists during a call of its layer, and again for its gradient, which is used
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

from latbench.errors import BadData
from search.pruning.dense_distance import collect_outputs, compute_distances
from search.pruning.quantization.rounded_inputs import read_arguments
from search.task import Task
from sparse_kernels.formats.int8 import LARGEST, Quantization
from sparse_kernels.prunable_layers import as_weight, is_layer, is_transposed, weight_matrix

LEARNING_RATE = 5e-4
STEPS = 60


@dataclass(frozen=True)
class TuningSettings:
    """Settings of global AdaPrune.

    Attributes
    ----------
    steps : int
        Number of batches, drawn without replacement in each pass over the data.
    learning_rate : float
        Adam's learning rate at the start; it falls along a cosine.
    seed : int
        Seed of the order of the batches.
    """

    steps: int = STEPS
    learning_rate: float = LEARNING_RATE
    seed: int = 0


def run_global_adaprune(
    task: Task,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    batches: Sequence[Any],
    settings: TuningSettings = TuningSettings(),
    *,
    quantizations: Mapping[str, Quantization] = MappingProxyType({}),
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> list[float]:
    """Tune the kept weights of all layers together, in place.

    Layers without a mask train whole, and frozen layers stay as they are. The loss leaves out layers whose outputs
    have other shapes than in the dense model, as in a mixture of experts.

    Parameters
    ----------
    task : Task
        The task, with the dense model.
    model : Module
        The pruned model.
    masks : mapping of str to bool Tensor of shape (m, k)
        Masks by layer; True marks a kept weight.
    batches : sequence
        Calibration batches.
    settings : TuningSettings
        Steps, learning rate and seed.
    quantizations : mapping of str to Quantization
        How layers in eight bits are read. Their weights stay whole numbers of steps.
    progress : callable
        Called with the steps done and all steps.

    Returns
    -------
    list of float
        Loss of each step; empty if no parameter can learn.

    Raises
    ------
    BadData
        An activation or a gradient is not finite.
    """
    layers = [name for name, module in model.named_modules() if is_layer(module)]
    model.eval()
    losses, order, rng = [], list[int](), np.random.default_rng(settings.seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with _hold_kept_values(model, masks, quantizations), ExitStack() as hooks:
        dense = task.model()
        optimizer = _ImmediateAdam(model, layers, names, hooks)
        for step in range(settings.steps if optimizer.can_learn else 0):
            optimizer.rate = settings.learning_rate * (0.5 + 0.5 * math.cos(math.pi * step / settings.steps))
            order = order or list(rng.permutation(len(batches)))
            loss = _compute_loss(task, model, dense, layers, batches[order.pop()])
            loss.backward()
            model.zero_grad()  # parameters that are not tuned have gradients too
            losses.append(loss.item())
            progress(step + 1, settings.steps)
        del dense
        optimizer.clear()  # frees memory before the weights become whole
    return losses


def _compute_loss(task: Task, model: nn.Module, dense: nn.Module, layers: Sequence[str], batch: Any) -> Tensor:
    """Return the distance of the layers' outputs on a batch from those of the dense model."""
    with torch.no_grad():
        targets = collect_outputs(task, dense, layers, batch)
    total = torch.zeros(())
    for name, distance in compute_distances(collect_outputs(task, model, layers, batch), targets).items():
        if not bool(torch.isfinite(distance)):
            raise BadData(f"layer {name}: its outputs on the calibration data hold NaN or infinite values")
        total = total + distance
    return total


class _ImmediateAdam:
    """Adam that updates each parameter of the layers as soon as its gradient is complete, and drops the gradient.

    `rate` is the learning rate of the next updates. `names` are those of the parameters for messages. `hooks` removes
    the hooks of the parameters.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], names: Mapping[nn.Parameter, str], hooks: ExitStack
    ) -> None:
        modules = dict(model.named_modules())
        # A parameter that several layers share is updated once a step.
        parameters = dict.fromkeys(p for name in layers for p in modules[name].parameters() if p.requires_grad)
        self.names: Mapping[Any, str] = names
        self.optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in parameters}
        self.rate = 0.0
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(self._update).remove)

    @property
    def can_learn(self) -> bool:
        """Whether a layer has a trainable parameter."""
        return bool(self.optimizers)

    def clear(self) -> None:
        """Free the moments."""
        self.optimizers.clear()

    def _update(self, parameter: Tensor) -> None:
        if not bool(torch.linalg.vector_norm(parameter.grad, torch.inf).isfinite()):
            gradient = f"the gradient of {self.names[parameter]}"
            raise BadData(
                f"{gradient} holds NaN or infinite values in global AdaPrune: use `latbench prune --no-global`"
            )
        optimizer = self.optimizers[parameter]
        optimizer.param_groups[0]["lr"] = self.rate
        optimizer.step()
        parameter.grad = None


class _KeptValues(nn.Module):
    """The kept values (nnz,) of a weight, in the order of the weight's elements.

    During a call of its layer (`in_call`) the whole weight is written to `scratch`, which all weights of that shape
    share. Afterwards it is not needed. New memory for every weight would leave holes between the layers' outputs.
    `steps` are of the weight's rows, in a shape that goes with the weight; None leaves weights as they are.
    """

    def __init__(self, mask: Tensor, scratch: dict[torch.Size, Tensor], steps: Tensor | None) -> None:
        super().__init__()
        self.mask, self.scratch, self.steps, self.in_call = mask, scratch, steps, False

    def forward(self, values: Tensor) -> Tensor:
        """Return the whole weight."""
        shape = self.mask.shape
        whole = self.scratch.get(shape) if self.in_call else None
        if whole is None:
            whole = torch.empty(shape)
            if self.in_call:
                self.scratch[shape] = whole
        apply: Callable[..., Tensor] = _Spread.apply
        return apply(values, self.mask, whole, self.steps)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the kept values of a weight."""
        return _select_kept(weight.detach(), self.mask)


class _Spread(torch.autograd.Function):
    """Write kept values to their positions in a weight, rounded to steps if it has some."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, whole: Tensor, steps: Tensor | None) -> Tensor:
        ctx.mask = mask
        whole.zero_().masked_scatter_(mask, values)
        if steps is not None:
            whole.div_(steps).round_().clamp_(-LARGEST, LARGEST).mul_(steps)
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _select_kept(gradient, ctx.mask), None, None, None


def _select_kept(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the kept values, like torch's masked_select, which needs four times the weight's memory."""
    return torch.from_numpy(weight.numpy()[mask.numpy()])


@contextmanager
def _hold_kept_values(
    model: nn.Module, masks: Mapping[str, Tensor], quantizations: Mapping[str, Quantization]
) -> Iterator[None]:
    """Let the masked layers, and those in eight bits, hold only their kept values while the context is open."""
    modules = dict(model.named_modules())
    scratch: dict[torch.Size, Tensor] = {}
    with ExitStack() as stack:
        for name in dict.fromkeys([*masks, *quantizations]):
            mask = masks.get(name)
            if mask is None:
                mask = torch.ones(weight_matrix(modules[name]).shape, dtype=torch.bool)
            stack.callback(_hold_layer_values(modules[name], mask, scratch, quantizations.get(name)))
        yield


def _hold_layer_values(
    layer: nn.Module, mask: Tensor, scratch: dict[torch.Size, Tensor], quantization: Quantization | None
) -> Callable[[], None]:
    """Let a layer hold only its kept values; return a function that restores it with its current weights."""
    own_forward = vars(layer).get("forward")
    parameters = list(layer._parameters)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    layout = torch.channels_last if _is_channels_last(weight) else torch.contiguous_format
    steps = reading = None
    if quantization is not None:
        beside = [1] * weight.ndim
        beside[1 if is_transposed(layer) else 0] = -1
        steps, reading = torch.from_numpy(quantization.scales).view(beside), quantization.input_range
    kept, plain = _KeptValues(as_weight(layer, mask), scratch, steps), layer.forward
    register_parametrization(layer, "weight", kept)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.in_call = True
        if reading is not None:
            args, kwargs = read_arguments(reading, args, kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            kept.in_call = False

    # Recomputing saves memory: autograd would keep every weight until its gradient is computed.
    layer.forward = partial(checkpoint, forward, use_reentrant=False)

    def undo() -> None:
        del layer.forward
        if own_forward is not None:
            layer.forward = own_forward
        remove_parametrizations(layer, "weight")
        weight.data = weight.data.clone(memory_format=layout)  # copied out of the scratch memory
        for name in parameters:  # in their old order, which optimizers rely on
            layer._parameters[name] = layer._parameters.pop(name)

    return undo


def _is_channels_last(weight: Tensor) -> bool:
    return weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
