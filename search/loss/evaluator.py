"""What a profile costs in loss: the database's weights swapped into one model in place, and the calibration loss.

Pruning moves the means and variances of activations, and pruned models get their batch norms tuned to that. So norms
take the statistics of each calibration batch here: about what tuning gives, for nothing. Batches are thus judged
apart: a batch's loss is the same whichever others are judged with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from search.artifacts.layer_database import Database
from search.problem.layers import DENSE
from search.task import Task
from sparse_kernels.nn import set_weight_matrix, weight_matrix

Held = tuple[tuple[str, float], ...]
"""(pattern, sparsity) of each layer: how a profile holds it."""

THREADS = 1
"""Of a judge. Sums in floats depend on how many threads share them, so it is the same number for every judge: losses
do not depend on how many judges there are."""

MEMORY_BYTES = 2 << 30
"""For weights read from the database, all judges together."""


class Judge:
    """Answers the losses of profiles on single batches of the task's calibration data.

    `model` is changed in place: only the layers that differ from the profile before are swapped. Up to `memory_bytes`
    of the database's weights are kept as they are swapped in, those used last. On a GPU, if `device` is one: the loss
    is then asked of a model and batches that lie there.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[str], database: Database,
        memory_bytes: int = MEMORY_BYTES, device: str = "cpu",
    ) -> None:  # fmt: skip
        self._task, self._model, self._names, self._database = task, model, tuple(layers), database
        self._device = device
        self._batches = task.calibration()
        if device != "cpu":  # as exact as there, and the same every time
            self._batches = [on_device(batch, device) for batch in self._batches]
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cudnn.deterministic = True
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.track_running_stats:
                norm.train()
                norm.momentum = 0.0  # its own statistics stay as they are
        # Convolutions of many images are 1.5 times as fast in torch; its stubs do not know the argument.
        model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._modules = [model.get_submodule(name) for name in layers]
        self._dense = [weight_matrix(module).clone() for module in self._modules]
        self._now: list[tuple[str, float]] = [(DENSE, 0.0)] * len(self._names)
        self._kept: OrderedDict[tuple[int, str, float], Tensor] = OrderedDict()
        self._room = memory_bytes

    @property
    def batches(self) -> int:
        """How many batches the calibration data are."""
        return len(self._batches)

    def losses(self, held: Held, batches: range) -> list[float]:
        """The loss of the model on each of these batches, with its layers held so."""
        with _threads(THREADS), torch.inference_mode():
            self._swap(held)
            return [float(self._task.loss(self._model, self._batches[number])) for number in batches]

    def _swap(self, held: Held) -> None:
        for i, wanted in enumerate(held):
            if self._now[i] != wanted:
                set_weight_matrix(self._modules[i], self._weight(i, *wanted))
                self._now[i] = wanted

    def _weight(self, i: int, pattern: str, sparsity: float) -> Tensor:
        if pattern == DENSE:
            return self._dense[i]
        key = i, pattern, sparsity
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        weight = self._database.get(self._names[i], pattern, sparsity).weight.to(self._device)
        self._kept[key] = weight
        self._room -= weight.nbytes
        while self._room < 0:
            _, oldest = self._kept.popitem(last=False)
            self._room += oldest.nbytes
        return weight


def on_device(batch: Any, device: str) -> Any:
    """The batch with its tensors on `device`, in whatever tuples, lists and mappings they are."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: on_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [on_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
