"""Given masks are kept while the model trains on: fine-tuning after one-shot pruning, whatever the optimizer does.

    model, choices = load_pruned(folder, task.model())
    pruner = Held(given={name: choice.mask for name, choice in choices.items() if choice.mask is not None})
    pruner.prepare(model, profile, total_steps=...)

Masks cannot be read off the weights: a kept one may be zero, and Shfl-BW's row groups are found by a heuristic, which
drawing anew would run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.pruner import Layer, Pruner, Stage, When
from sparse_kernels.nn import as_matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class Held(Pruner):
    """`given` is {layer: mask (m, k), True = kept}, of exactly the layers that `prepare` is told to prune."""

    given: Mapping[str, Tensor | NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def stage(self, target: Target, when: When) -> Stage:
        """The mask, from the first step on."""
        return Stage(target, fixed=True, last=True)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """None."""
        return ()

    def start(self) -> None:
        """Refuse masks that are missing, left over or of another shape."""
        layers = self.state.layers
        if extra := [name for name in self.given if name not in layers]:
            raise UsageError(f"layer {extra[0]}: a mask is given for it, but no target: it would not be held")
        for name, layer in layers.items():
            if name not in self.given:
                raise UsageError(f"layer {name}: no mask is given for it, and `held` draws none")
            mask, weight = self.given[name], as_matrix(layer.weight)
            if mask.dtype not in (torch.bool, np.bool_) or tuple(mask.shape) != tuple(weight.shape):
                raise UsageError(
                    f"layer {name}: its mask must be bool {tuple(weight.shape)}, not {mask.dtype} {tuple(mask.shape)}"
                )

    def check_state(self, state: dict[str, Any]) -> None:
        """As any pruner's; raises BadData also where the checkpoint holds other masks than the given ones."""
        super().check_state(state)
        for name, given in self.given.items():
            if not torch.equal(as_matrix(state["layers"][name]["mask"]).cpu(), torch.as_tensor(given).cpu()):
                raise BadData(f"layer {name}: the checkpoint has another mask than the given one")

    def draw(self, layer: Layer, target: Target) -> Tensor:
        """The given mask."""
        return torch.as_tensor(self.given[layer.name], device=layer.weight.device)
