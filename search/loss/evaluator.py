"""The loss of a profile: the database's weights are put into one model in place, and the task computes its loss.

Pruning moves the means and variances of activations, and pruned models get their batch norms tuned to that. So norms
use the statistics of each calibration batch here, which gives about what tuning gives and costs nothing. Batches are
thus evaluated apart: the loss on a batch is the same whichever others are evaluated with it. Models that do not allow
this are evaluated under other conditions (`search.loss.evaluation_conditions`). Layers in eight bits read their
inputs in steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from search.artifacts.layer_database import Database
from search.loss.evaluation_conditions import WANTED, EvaluationConditions
from search.problem.layers import DENSE_OPTION, Option
from search.pruning.calibration_hash import check_batches
from search.pruning.quantization.rounded_inputs import add_reading
from search.task import Task
from search.user_code import call_user_code
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.prunable_layers import as_weight, set_weight_matrix, weight_matrix

ProfileOptions = tuple[Option, ...]
"""The option of each layer of a profile, in the order of the layers."""

THREADS = 1
"""Threads of an evaluator. Sums of floats depend on the number of threads that share them. With the same number for
every evaluator, losses do not depend on how many evaluators there are."""

MEMORY_BYTES = 2 << 30
"""Memory for weights that were read from the database, for all evaluators together."""


class LossEvaluator:
    """Computes the losses of profiles on single batches of the task's calibration data.

    The model is changed in place: only the layers that differ from the profile before are swapped.

    Parameters
    ----------
    task
        The task that computes losses.
    model
        The task's dense model.
    layers
        Names of the layers of a profile.
    database
        The pruned layers.
    memory_bytes
        Bytes of the database's weights to keep in memory; the least recently used are dropped.
    device
        torch's name of the device. The model and the batches are moved there.
    conditions
        How the model is evaluated.

    Raises
    ------
    UsageError
        The calibration data is not that of the database.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[str], database: Database,
        memory_bytes: int = MEMORY_BYTES, device: str = "cpu",
        conditions: EvaluationConditions = WANTED,
    ) -> None:  # fmt: skip
        self._task, self._model, self._names, self._database = task, model, tuple(layers), database
        self._device = device
        self._batches = task.calibration()
        check_batches(task.name, self._batches, database.provenance)
        if device != "cpu":  # as exact as on a CPU, and the same every time
            self._batches = [move_to_device(batch, device) for batch in self._batches]
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cudnn.deterministic = True
        conditions.prepare(model, device)
        self._modules = [model.get_submodule(name) for name in layers]
        self._dense = [weight_matrix(module).clone() for module in self._modules]
        self._current = [DENSE_OPTION] * len(self._names)
        self._readings: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._cached: OrderedDict[tuple[int, Option], tuple[Tensor, Quantization | None]] = OrderedDict()
        self._free_bytes = memory_bytes

    @property
    def batches(self) -> int:
        """Number of batches of the calibration data."""
        return len(self._batches)

    def losses(self, profile: ProfileOptions, batches: range) -> list[float]:
        """Return the loss of the model with this profile on each of these batches."""
        with _limit_threads(THREADS), torch.no_grad():  # a loss may need gradients of its own
            self._swap_layers(profile)
            return [float(self._task.loss(self._model, self._batches[number])) for number in batches]

    def layer_shares(self, profile: ProfileOptions, batches: range) -> list[list[float]]:
        """Return for each of these batches what each layer of the profile adds to the loss, by the gradient there.

        A layer's share is half of the sum of gradient times change, over its weights: the trapezoidal rule on the
        line from the dense weights, with a gradient of zero there. Where the loss is quadratic in the changes and
        least at the dense weights, all shares add up to what the profile adds. What two layers change together counts
        half in each. In eight bits inputs are read in steps, but that is no change of weights and has no share. A
        layer whose gradient the loss hides has NaN.

        Raises UsageError where the loss has no gradient.
        """
        weights = [module.get_parameter("weight") for module in self._modules]
        wanted = [weight.requires_grad for weight in weights]
        try:
            with _limit_threads(THREADS), torch.enable_grad():
                with torch.no_grad():
                    self._swap_layers(profile)
                for weight in weights:
                    weight.requires_grad_(True)
                return [self._compute_shares(weights, self._batches[number]) for number in batches]
        finally:
            for weight, before in zip(weights, wanted, strict=True):
                weight.requires_grad_(before)

    def _compute_shares(self, weights: Sequence[Tensor], batch: Any) -> list[float]:
        """Return the shares of all layers in the loss on one batch."""
        loss = self._task.loss(self._model, batch)
        what = f"task {self._task.name}: the gradient of its loss"
        gradients = call_user_code(what, lambda: torch.autograd.grad(loss, weights, allow_unused=True))
        shares = []
        for module, weight, dense, gradient in zip(self._modules, weights, self._dense, gradients, strict=True):
            change = weight.detach() - as_weight(module, dense)
            shares.append(math.nan if gradient is None else float((gradient * change).sum(dtype=torch.float64)) / 2)
        return shares

    def _swap_layers(self, profile: ProfileOptions) -> None:
        for i, wanted in enumerate(profile):
            if self._current[i] != wanted:
                weight, quantization = self._read(i, wanted)
                set_weight_matrix(self._modules[i], weight)
                if i in self._readings:
                    self._readings.pop(i).remove()
                if quantization is not None:
                    self._readings[i] = add_reading(self._modules[i], quantization)
                self._current[i] = wanted

    def _read(self, i: int, option: Option) -> tuple[Tensor, Quantization | None]:
        """Return the weight of an option of layer i, and how the layer is read in eight bits."""
        stored = option.in_database
        if stored is None:
            return self._dense[i], None
        key = i, stored
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        entry = self._database.get(self._names[i], stored)
        weight = entry.weight.to(self._device)
        self._cached[key] = weight, entry.quantization
        self._free_bytes -= weight.nbytes
        while self._free_bytes < 0:
            _, (oldest, _) = self._cached.popitem(last=False)
            self._free_bytes += oldest.nbytes
        return weight, entry.quantization


def move_to_device(batch: Any, device: str) -> Any:
    """Return the batch with its tensors on `device`; they may lie in tuples, lists and mappings."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: move_to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [move_to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


@contextmanager
def _limit_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
