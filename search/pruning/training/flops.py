"""The FLOP (multiplications and additions) of training with a pruner, against dense training of as many steps.

A step of a layer is three products, each of 2 m k n FLOP if dense, for n positions: the forward y = W x, the input
gradient W^T dy and the weight gradient dy x^T. A sparse product costs its density:

- the forward is sparse under a mask, unless dropped weights still have a fade above 0;
- the input gradient is sparse likewise: it multiplies by the same matrix, transposed. But of an N:M layer only one of
  the two is sparse, whose sums run along the groups, unless the mask is transposable. Groups along the inputs are no
  groups along the outputs, and no N:M kernel runs on them. Other patterns have a format for the transposed mask too
  (vectors are then blocks of one row);
- the weight gradient is sparse only if the mask is fixed. A straight-through estimator or a new mask needs it dense.

Linear and Conv2d layers are counted, also those without a sparse kernel, such as grouped convolutions. So are the
four projections of MultiheadAttention, but not attention itself. The first layer's input gradient counts, though
nobody needs it. Masks, optimizers and norms do not count. These are bounds of the work, not times of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from search.pruning.forward_hooks import Hook, get_product, register_forward_hooks
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.pruner import Moment, Pruner, Stage
from sparse_kernels.patterns import NM
from sparse_kernels.prunable_layers import as_matrix, is_layer


@dataclass(frozen=True)
class Flop:
    """FLOP of the three products of a training step.

    Attributes
    ----------
    forward, input_gradient, weight_gradient : float
        FLOP of each product, or its share of the dense cost.
    """

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """FLOP of all three products."""
        return self.forward + self.input_gradient + self.weight_gradient

    def __add__(self, other: Flop) -> Flop:
        return Flop(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, factor: float) -> Flop:
        return Flop(factor * self.forward, factor * self.input_gradient, factor * self.weight_gradient)


def compute_step_cost(stage: Stage) -> Flop:
    """Return the cost of one step of one layer, each product as a share of its dense cost."""
    target = stage.target
    if target is None or stage.fade > 0:
        return Flop(1.0, 1.0, 1.0)
    along, density = target.along if isinstance(target.pattern, NM) else "both", target.density
    forward, input_gradient = (1.0 if along == other else density for other in ("outputs", "inputs"))
    return Flop(forward, input_gradient, density if stage.fixed_mask else 1.0)


def compute_layer_cost(pruner: Pruner, target: LayerTarget, steps: int, *, layer: int = 0, layers: int = 1) -> Flop:
    """Return the cost of a layer's training over `steps` steps, each product as a share of its dense cost.

    `total` / 3 is the training cost relative to dense. STEP chooses its switch during training: before that the cost
    is the most that it can be.
    """
    total = Flop(0.0, 0.0, 0.0)
    for stage, length in pruner.list_stages(target, Moment(0, steps, layer, layers)):
        total += compute_step_cost(stage) * (length / steps)
    return total


def compute_training_flop(
    pruner: Pruner | None, targets: Mapping[str, LayerTarget], forward_flop: Mapping[str, float], steps: int
) -> Flop:
    """Return the FLOP of all layers over `steps` steps.

    `forward_flop` is the dense FLOP of one step's forward by layer, as `count_forward_flop` returns it. Layers
    without a target are dense; without a pruner all are.
    """
    total = Flop(0.0, 0.0, 0.0)
    numbers = {name: number for number, name in enumerate(targets)}
    for name, flop in forward_flop.items():
        cost = Flop(1.0, 1.0, 1.0)
        if pruner is not None and name in targets:
            cost = compute_layer_cost(pruner, targets[name], steps, layer=numbers[name], layers=len(targets))
        total += cost * (flop * steps)
    return total


def count_forward_flop(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Return the dense forward FLOP of each layer while `run()` calls the model.

    The layers are Linear, Conv1d, Conv2d, Conv1D of transformers, and the projections of MultiheadAttention. Of a
    subclass it is the product with its
    weight, the first output if there are several.
    """
    counted: dict[str, float] = {}

    def add(name: str, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        product = get_product(output)
        weight = module.weight
        assert isinstance(weight, Tensor)
        inputs = as_matrix(module, weight).shape[1]  # those of one group in a grouped convolution
        counted[name] = counted.get(name, 0.0) + 2.0 * inputs * product.numel()

    def add_projections(name: str, module: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        query, key, value = inputs[:3]
        once = (
            2.0 * module.embed_dim * (2 * query.numel() + key.numel() + value.numel())
        )  # two of the query: one makes the output
        counted[name] = counted.get(name, 0.0) + once

    hooks: dict[str, Hook] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            hooks[name] = partial(add_projections, name)
        elif is_layer(module):
            hooks[name] = partial(add, name)
    with register_forward_hooks(model, hooks):
        run()
    return counted
