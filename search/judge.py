"""What a profile costs in loss: the database's weights swapped into one model in place, and the calibration loss.

Pruning moves the means and variances of activations, and pruned models get their batch norms tuned to that. So norms
take the statistics of each calibration batch here: about what tuning gives, for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from search.database import Database
from search.layers import options_of
from search.problem import DENSE, Choice, Layer
from search.task import Task
from sparse_kernels.nn import set_weight_matrix, weight_matrix


class Judge:
    """Called with a choice, answers the mean loss over the task's calibration batches; remembers what it answered.

    `quick` takes only the first `batches` of them: a search asks hundreds of times. `model` is changed in place: only
    the layers that differ from the profile before are swapped.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[Layer], database: Database,
        batches: int | None = None,
    ) -> None:  # fmt: skip
        self._task, self._model, self._layers, self._database = task, model, layers, database
        self._batches = task.calibration()
        self._few = len(self._batches[:batches])
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.track_running_stats:
                norm.train()
                norm.momentum = 0.0  # its own statistics stay as they are
        # Convolutions of many images are 1.5 times as fast in torch; its stubs do not know the argument.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._names = [part.name for layer in layers for part in layer.parts]
        self._modules = [model.get_submodule(name) for name in self._names]
        self._dense = [weight_matrix(module).clone() for module in self._modules]
        self._now: list[tuple[str, float]] = [(DENSE, 0.0)] * len(self._names)
        self._known: dict[tuple[tuple[str, float], ...], list[float]] = {}

    def __call__(self, choice: Choice) -> float:
        """The loss of the model that `choice` gives."""
        return self._loss(choice, len(self._batches))

    def quick(self, choice: Choice) -> float:
        """The same on the first batches."""
        return self._loss(choice, self._few)

    def _loss(self, choice: Choice, count: int) -> float:
        wanted = options_of(self._layers, choice).values()
        key = tuple((option.pattern, option.sparsity) for option in wanted)
        losses = self._known.setdefault(key, [])
        if len(losses) < count:
            self._swap(key)
            with torch.inference_mode():
                losses += [float(self._task.loss(self._model, it)) for it in self._batches[len(losses) : count]]
        return sum(losses[:count]) / count

    def _swap(self, wanted: Sequence[tuple[str, float]]) -> None:
        for i, (name, (pattern, sparsity)) in enumerate(zip(self._names, wanted, strict=True)):
            if self._now[i] != (pattern, sparsity):
                dense = pattern == DENSE
                weight = self._dense[i] if dense else self._database.get(name, pattern, sparsity).weight
                set_weight_matrix(self._modules[i], weight)
                self._now[i] = (pattern, sparsity)
