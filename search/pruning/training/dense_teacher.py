"""Distillation: a model in training learns to give what the dense model gives, and not to lower the task's loss.

What it lowers is the distance of its outputs from those of the dense model on the same batch
(`search.pruning.dense_distance`). With layers it also lowers the mean distance of their outputs. For classifiers,
squared distances of logits teach at least as well as Kullback-Leibler divergences (Kim et al. 2021, "Comparing
Kullback-Leibler divergence and mean squared error loss in knowledge distillation"), and they fit all models alike.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.pruning.dense_distance import MODEL, collect_outputs, compute_distances
from search.task import Task
from sparse_kernels.prunable_layers import is_layer

_LOG = logging.getLogger(__name__)

OUTPUTS, LAYERS = "outputs", "layers"
TAUGHT = (OUTPUTS, LAYERS)
"""What the dense model teaches: its outputs, or those of its layers, too."""


class DenseTeacher:
    """The dense model of a task, as a teacher.

    Parameters
    ----------
    task : Task
        The task. Its loss calls the models, and its value is not used.
    taught : {"outputs", "layers"}
        What is taught.
    """

    def __init__(self, task: Task, taught: str) -> None:
        self._task, self._dense = task, task.model()
        self._names, self._has_warned = [MODEL], False
        if taught == LAYERS:
            self._names += [name for name, module in self._dense.named_modules() if is_layer(module)]

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the distance of a model from the dense model on a batch.

        Raises UsageError if there is nothing to compare.
        """
        with torch.no_grad():
            targets = collect_outputs(self._task, self._dense, self._names, batch)
        outputs = collect_outputs(self._task, model, self._names, batch)
        distances = compute_distances(outputs, {name: target for name, target in targets.items() if target})
        reason = (
            f"task {self._task.name}: its loss() does not call the model as a whole, or the model returns no float "
            "tensor, or tensors of other shapes in training, so its outputs teach nothing"
        )
        if not distances:
            raise UsageError(f"{reason}: take `distill: {LAYERS}`, or none")
        if MODEL not in distances and not self._has_warned:
            self._has_warned = True
            _LOG.warning(f"{reason}: the model learns the outputs of its layers alone")
        whole = distances.pop(MODEL, torch.zeros(()))
        return whole + torch.stack(list(distances.values())).mean() if distances else whole
