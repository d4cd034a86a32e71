"""A second budget beside the seconds: bytes of weights, or the seconds on another device or at another batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from latbench.errors import UsageError
from search.knapsack.arrays import Choice, Floats, sum_in_order
from search.problem.layers import DENSE_OPTION, ROUNDING, Layer, Option
from search.problem.packed_bytes import weight_bytes
from sparse_kernels.shapes import Shape

if TYPE_CHECKING:
    from torch import nn

Order = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SecondBudget:
    """What each option of each layer of the model takes of it, and how much there is, in any unit.

    `what` names it in sentences; `fixed` is what all else takes of it; `order` says which layers must add up in which
    order, tied ones together, where the last bit counts.
    """

    costs: Mapping[str, Mapping[Option, float]]
    budget: float
    what: str = "the second budget"
    fixed: float = 0.0
    order: Order = ()

    def arrays(self, layers: Sequence[Layer]) -> list[Floats]:
        """What the options take, an array a layer. Raises UsageError for a layer or an option that it leaves out."""
        if self.order not in ((), order_of(layers)):
            raise UsageError(
                f"{self.what}: it has other layers, or they are tied otherwise; set both the same limits"
            )

        def costs(part: Layer) -> Layer:
            return replace(part, errors=np.array([self.cost(part.name, option) for option in part.options]))

        return [layer.changed(costs).errors for layer in layers]

    def cost(self, layer: str, option: Option) -> float:
        """What a layer takes of it with this option. Raises UsageError where nothing says so."""
        known = self.costs.get(layer, {})
        if option not in known:
            raise UsageError(f"{self.what}: nothing says what layer {layer} takes as {option}; leave that option out")
        return known[option]

    @property
    def left(self) -> float:
        """What there is for the layers."""
        return self.budget - self.fixed

    def keeps(self, layers: Sequence[Layer], choice: Choice) -> bool:
        """Whether a profile of these layers is within it, summed as `arrays` are."""
        taken = (
            sum_in_order(self.cost(part.name, part.options[j]) for part in layer.parts)
            for layer, j in zip(layers, choice, strict=True)
        )
        return sum_in_order(taken) <= self.left

    def without(self, names: Iterable[str]) -> SecondBudget:
        """What is left of it for the others where these layers stay dense.

        That is another order of adding up: where it counts, what it can change is left unused.
        """
        gone = list(names)
        fixed = self.fixed + sum(self.cost(name, DENSE_OPTION) for name in gone)
        if not gone or not self.order:
            return replace(self, fixed=fixed)
        order = tuple(group for group in self.order if not set(group) & set(gone))
        return replace(self, fixed=fixed, budget=self.budget * (1 - ROUNDING), order=order)

    def used(self, options: Mapping[str, Option]) -> float:
        """What a profile takes of it: `Selection.options`."""
        return self.fixed + sum(self.cost(name, option) for name, option in options.items())


def order_of(layers: Sequence[Layer]) -> Order:
    """The names of the layers of the model that each stands for."""
    return tuple(tuple(part.name for part in layer.parts) for layer in layers)


def bytes_of_weights(searched: Sequence[Layer], shapes: Mapping[str, Shape | None], budget: float) -> SecondBudget:
    """The budget of packed weights, in bytes; the layers of `shapes` that are not `searched` are dense.

    Raises UsageError for a layer without a shape.
    """
    parts = {part.name: part for layer in searched for part in layer.parts}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if missing := [name for name in (*parts, *shapes) if name not in known]:
        raise UsageError(
            f"bytes of weights: the shape of layer {missing[0]} is not known: give a workload that has it"
        )
    costs = {name: {it: weight_bytes(it, known[name]) for it in part.options} for name, part in parts.items()}
    dense = sum(weight_bytes(DENSE_OPTION, shape) for name, shape in known.items() if name not in parts)
    return SecondBudget(costs, budget, "bytes of weights", dense)


def bytes_of_model(
    model: nn.Module, searched: Sequence[Layer], shapes: Mapping[str, Shape | None], budget: float
) -> SecondBudget:
    """The budget of all weights of `model`, in bytes: of `searched` layers as they are packed, all else as it is.

    Biases, norms, embeddings and layers that stay as they are count whole. Raises UsageError for a searched layer
    whose shape `shapes` lacks.
    """
    parts = [part.name for layer in searched for part in layer.parts]
    own = bytes_of_weights(searched, {name: shapes.get(name) for name in parts}, budget)
    packed = {model.get_parameter(f"{name}.weight") for name in parts}
    rest = all_bytes(model) - sum(it.nbytes for it in packed)
    return replace(own, what="bytes of all weights", fixed=own.fixed + rest)


def all_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a dense model; one that several modules share counts once."""
    return sum(it.nbytes for it in model.parameters())
