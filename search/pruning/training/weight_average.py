"""The exponential moving average of a model's weights while it trains (Polyak & Juditsky 1992).

It smooths what the last batches did. Early averages weigh recent steps more, so that they forget the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from search.pruning.one_shot.batchnorm import list_batchnorms
from sparse_kernels.prunable_layers import as_weight


class WeightAverage:
    """The average of all float parameters of a model, and of the statistics of its batch norms.

    Other buffers are no weights: a mask of minus infinities has no average.

    Parameters
    ----------
    model : Module
        The model.
    decay : float
        Share of the average that a step leaves, in (0, 1), once there were enough steps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay, self._steps = model, decay, 0
        statistics = [buffer for norm in list_batchnorms(model) for buffer in norm.buffers()]
        self._values = [each for each in (*model.parameters(), *statistics) if each.is_floating_point()]
        self._averages = [value.detach().clone() for value in self._values]

    @torch.no_grad()
    def update(self) -> None:
        """Count the model's weights after a step."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 9))
        torch._foreach_lerp_(self._averages, [value.detach() for value in self._values], 1 - decay)

    @torch.no_grad()
    def write(self, masks: Mapping[str, Tensor]) -> None:
        """Write the averages into the model, under the masks (m, k) of its layers."""
        for value, average in zip(self._values, self._averages, strict=True):
            value.copy_(average)
        for name, mask in masks.items():
            layer: Any = self._model.get_submodule(name)
            layer.weight.mul_(as_weight(layer, mask))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of steps."""
        return {"steps": self._steps, "averages": self._averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._steps = int(state["steps"])
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)
