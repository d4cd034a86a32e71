"""Given masks hold while the model trains: fine-tuning after one-shot pruning, with any optimizer.

    model, choices = load_pruned(folder, task.model())
    masks = {name: choice.mask for name, choice in choices.items() if choice.mask is not None}
    pruner = FixedMask(given_masks=masks)
    pruner.prepare(model, profile, total_steps=...)

Weights do not define their masks: a kept weight may be zero. Drawing again would also repeat the heuristic that finds
the row groups of Shfl-BW.
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
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.pruner import Moment, PrunedLayer, Pruner, Stage
from sparse_kernels.prunable_layers import as_matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedMask(Pruner):
    """Training under given masks.

    Parameters
    ----------
    given_masks : mapping of str to bool Tensor or ndarray of shape (m, k)
        Masks of exactly the layers to prune; True marks a kept weight.
    """

    given_masks: Mapping[str, Tensor | NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the masked stage, from the first step on."""
        return Stage(target, fixed_mask=True, last_mask=True)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return no step: there is one stage."""
        return ()

    def start(self) -> None:
        """Raise UsageError for masks that are missing, left over or of another shape."""
        layers = self.state.layers
        if extra := [name for name in self.given_masks if name not in layers]:
            raise UsageError(f"layer {extra[0]}: a mask is given for it, but no target: it would not be held")
        for name, layer in layers.items():
            if name not in self.given_masks:
                raise UsageError(f"layer {name}: no mask is given for it, and `held` draws none")
            mask, weight = self.given_masks[name], as_matrix(layer.module, layer.weight)
            if mask.dtype not in (torch.bool, np.bool_) or tuple(mask.shape) != tuple(weight.shape):
                raise UsageError(
                    f"layer {name}: its mask must be bool {tuple(weight.shape)}, not {mask.dtype} {tuple(mask.shape)}"
                )

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise BadData as any pruner, and if the checkpoint holds other masks than the given ones."""
        super().check_state(state)
        for name, given in self.given_masks.items():
            if not torch.equal(
                as_matrix(self.state.layers[name].module, state["layers"][name]["mask"]).cpu(),
                torch.as_tensor(given).cpu(),
            ):
                raise BadData(f"layer {name}: the checkpoint has another mask than the given one")

    def draw(self, layer: PrunedLayer, target: LayerTarget) -> Tensor:
        """Return the given mask."""
        return torch.as_tensor(self.given_masks[layer.name], device=layer.weight.device)
