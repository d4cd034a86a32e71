"""What training with a pruner computes, against dense training of as many steps: multiplications and additions.

A step of a layer is three products, each 2 m k n FLOP where dense, n the layer's positions: the forward y = W x, the
input's gradient W^T dy and the weight's gradient dy x^T. What counts as sparse, and so costs its density:

- the forward, under a mask whose dropped weights count for nothing: while they fade (D > 0) it is dense;
- the input's gradient likewise, as it multiplies by the same matrix, transposed;
- but of N:M layers only one of these two, that whose products add up along the groups, unless the mask is
  transposable: groups along the inputs are none along the outputs, and no N:M kernel runs on them. Every other
  pattern's mask is one that a format holds when it is transposed, too (vectors are blocks of one row then);
- the weight's gradient only where the mask is fixed: what a straight-through estimator or a redrawn mask needs is
  dense.

Only Linear and Conv2d are counted, those too that have no sparse kernel, such as grouped convolutions, and the four
projections of MultiheadAttention, which has no layers for them; what attention itself computes is not. The first
layer's input gradient, which nobody needs, is counted too; masks, optimizers and norms are not. These are the work's
bounds: whether a kernel is as fast as its FLOP say is measured elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from search.pruning.forward_hooks import Hook, forward_hooks, product_of
from search.pruning.masks.layer_targets import Target
from search.pruning.training.pruner import Pruner, Stage, When
from sparse_kernels.patterns import NM


@dataclass(frozen=True)
class Flop:
    """The three products' FLOP."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.input_gradient + self.weight_gradient

    def __add__(self, other: Flop) -> Flop:
        return Flop(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, factor: float) -> Flop:
        return Flop(factor * self.forward, factor * self.input_gradient, factor * self.weight_gradient)


def step_cost(stage: Stage) -> Flop:
    """One step of one layer, each product as a share of its dense cost."""
    target = stage.target
    if target is None or stage.fade > 0:
        return Flop(1.0, 1.0, 1.0)
    along, density = target.along if isinstance(target.pattern, NM) else "both", target.density
    forward, input_gradient = (1.0 if along == other else density for other in ("outputs", "inputs"))
    return Flop(forward, input_gradient, density if stage.fixed else 1.0)


def layer_cost(pruner: Pruner, target: Target, steps: int, *, layer: int = 0, layers: int = 1) -> Flop:
    """A layer's training over `steps` steps, each product as a share of its dense cost.

    `total` / 3 is the layer's training cost relative to dense. Of a method that switches when the model says so
    (STEP) it is what happened if it has, else the most.
    """
    total = Flop(0.0, 0.0, 0.0)
    for stage, length in pruner.stretches(target, When(0, steps, layer, layers)):
        total += step_cost(stage) * (length / steps)
    return total


def training_flop(
    pruner: Pruner | None, targets: Mapping[str, Target], forward_flop: Mapping[str, float], steps: int
) -> Flop:
    """All layers' FLOP over `steps` steps; `forward_flop`, {layer: dense FLOP of one step's forward}, as counted.

    Layers without a target are dense, and so are all without a pruner.
    """
    total = Flop(0.0, 0.0, 0.0)
    numbers = {name: number for number, name in enumerate(targets)}
    for name, flop in forward_flop.items():
        cost = Flop(1.0, 1.0, 1.0)
        if pruner is not None and name in targets:
            cost = layer_cost(pruner, targets[name], steps, layer=numbers[name], layers=len(targets))
        total += cost * (flop * steps)
    return total


def count_forward(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """{layer: dense forward FLOP} of every Linear and Conv2d while `run()` calls the model, and of the projections of
    each MultiheadAttention.

    Of a subclass it is the product with its weight; where it returns a tuple the first is taken for that.
    """
    counted: dict[str, float] = {}

    def add(name: str, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        product = product_of(output)
        weight = module.weight
        assert isinstance(weight, Tensor)
        each = math.prod(weight.shape[1:])  # of a grouped convolution a group's inputs
        counted[name] = counted.get(name, 0.0) + 2.0 * each * product.numel()

    def add_projections(name: str, module: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        query, key, value = inputs[:3]
        once = 2.0 * module.embed_dim * (2 * query.numel() + key.numel() + value.numel())  # one more makes the output
        counted[name] = counted.get(name, 0.0) + once

    hooks: dict[str, Hook] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            hooks[name] = partial(add_projections, name)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            hooks[name] = partial(add, name)
    with forward_hooks(model, hooks):
        run()
    return counted
