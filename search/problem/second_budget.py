"""A second budget beside the seconds: bytes of weights, or the seconds on another device or at another batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from latbench.errors import UsageError
from search.knapsack.arrays import Choice, Floats, sum_in_order
from search.problem.layers import DENSE_OPTION, ROUNDING, LayerOptions, Option
from search.problem.packed_bytes import count_weight_bytes
from sparse_kernels.shapes import Shape

if TYPE_CHECKING:
    from torch import nn

Order = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SecondBudget:
    """A second budget, in any unit, and the amount that each option of each layer takes of it.

    Attributes
    ----------
    costs
        Layer name -> option -> amount.
    budget
        The amount for the whole model.
    name
        The budget's name in messages.
    fixed
        The amount that everything but these layers takes.
    order
        The names of the layers in the order of addition, tied ones together; for budgets where the last bit counts.
    """

    costs: Mapping[str, Mapping[Option, float]]
    budget: float
    name: str = "the second budget"
    fixed: float = 0.0
    order: Order = ()

    def arrays(self, layers: Sequence[LayerOptions]) -> list[Floats]:
        """Return the amounts of the options, an array (options,) for each layer.

        Raises UsageError for a layer or an option that `costs` lacks.
        """
        if self.order not in ((), list_tied_names(layers)):
            raise UsageError(
                f"{self.name}: it has other layers, or other layers are tied; give both problems the same limits"
            )

        def costs(part: LayerOptions) -> LayerOptions:
            return replace(part, errors=np.array([self.cost(part.name, option) for option in part.options]))

        return [layer.change_parts(costs).errors for layer in layers]

    def cost(self, layer: str, option: Option) -> float:
        """Return the amount that a layer takes with this option. Raises UsageError where it is unknown."""
        known = self.costs.get(layer, {})
        if option not in known:
            raise UsageError(f"{self.name}: the cost of layer {layer} as {option} is unknown; leave that option out")
        return known[option]

    @property
    def left(self) -> float:
        """The amount for the layers."""
        return self.budget - self.fixed

    def keeps(self, layers: Sequence[LayerOptions], choice: Choice) -> bool:
        """Return whether a profile of these layers keeps the budget, summed in the order of `arrays`."""
        taken = (
            sum_in_order(self.cost(part.name, part.options[j]) for part in layer.parts)
            for layer, j in zip(layers, choice, strict=True)
        )
        return sum_in_order(taken) <= self.left

    def without(self, names: Iterable[str]) -> SecondBudget:
        """Return the budget of the other layers where these layers stay dense.

        This changes the order of addition. Where the order counts, the amount that it can change stays unused.
        """
        removed = list(names)
        fixed = self.fixed + sum(self.cost(name, DENSE_OPTION) for name in removed)
        if not removed or not self.order:
            return replace(self, fixed=fixed)
        order = tuple(group for group in self.order if not set(group) & set(removed))
        return replace(self, fixed=fixed, budget=self.budget * (1 - ROUNDING), order=order)

    def used(self, options: Mapping[str, Option]) -> float:
        """Return the amount that a profile (`Selection.options`) takes."""
        return self.fixed + sum(self.cost(name, option) for name, option in options.items())


def list_tied_names(layers: Sequence[LayerOptions]) -> Order:
    """Return for each layer the names of the layers that it stands for."""
    return tuple(tuple(part.name for part in layer.parts) for layer in layers)


def build_weight_budget(
    searched: Sequence[LayerOptions], shapes: Mapping[str, Shape | None], budget: float
) -> SecondBudget:
    """Return the budget of packed weights, in bytes.

    Layers of `shapes` that are not `searched` count as dense. Raises UsageError for a layer without a shape.
    """
    parts = {part.name: part for layer in searched for part in layer.parts}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    if missing := [name for name in (*parts, *shapes) if name not in known]:
        raise UsageError(f"bytes of weights: the shape of layer {missing[0]} is unknown; give a workload that has it")
    costs = {name: {it: count_weight_bytes(it, known[name]) for it in part.options} for name, part in parts.items()}
    dense = sum(count_weight_bytes(DENSE_OPTION, shape) for name, shape in known.items() if name not in parts)
    return SecondBudget(costs, budget, "bytes of weights", dense)


def build_model_budget(
    model: nn.Module, searched: Sequence[LayerOptions], shapes: Mapping[str, Shape | None], budget: float
) -> SecondBudget:
    """Return the budget of all weights of `model`, in bytes: `searched` layers packed, everything else as it is.

    Biases, norms, embeddings and layers that stay dense count in full. Raises UsageError for a searched layer whose
    shape `shapes` lacks.
    """
    parts = [part.name for layer in searched for part in layer.parts]
    own = build_weight_budget(searched, {name: shapes.get(name) for name in parts}, budget)
    packed = {model.get_parameter(f"{name}.weight") for name in parts}
    rest = count_model_bytes(model) - sum(it.nbytes for it in packed)
    return replace(own, name="bytes of all weights", fixed=own.fixed + rest)


def count_model_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights of a dense model; a weight that several modules share counts once."""
    return sum(it.nbytes for it in model.parameters())
