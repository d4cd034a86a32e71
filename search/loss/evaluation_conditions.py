"""The conditions under which a search evaluates losses: found once, and the same for every profile of the search.

Two conditions are wanted. Tensors in channels_last make convolutions of many images 1.5 times as fast in torch. Batch
norms that use the statistics of each batch stand for the tuning that a pruned model gets. Not every model allows
them: `.view` after a convolution, five-dimensional tensors, or a batch of one sample. Then the search falls back to
what the task itself does, condition by condition and norm by norm.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from latbench.errors import LatbenchError, UsageError
from search.example_inputs import ExampleInputs
from search.task import Task

TOLERANCE = 1e-3
"""Largest relative change of a loss by channels_last: roundings stay below it, another computation does not."""


@dataclass(frozen=True)
class EvaluationConditions:
    """How losses are evaluated.

    Attributes
    ----------
    channels_last
        Whether the model's four-dimensional weights are in channels_last.
    fixed_norms
        Batch norms that keep their own statistics, as in eval mode; all others use those of each batch.
    """

    channels_last: bool = True
    fixed_norms: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what differs from the wanted conditions, for the key of losses; empty if nothing does."""
        parts = [] if self.channels_last else ["contiguous"]
        parts += [f"fixed {','.join(self.fixed_norms)}"] if self.fixed_norms else []
        return " ".join(parts)

    def prepare(self, model: nn.Module, device: str = "cpu") -> None:
        """Bring a model in eval mode under these conditions, in place."""
        for name in set(_list_norms(model)) - set(self.fixed_norms):
            norm = model.get_submodule(name)
            assert isinstance(norm, _BatchNorm)
            norm.train()
            norm.momentum = 0.0  # its own statistics stay as they are
        model.to(device)
        for tensor in [*model.parameters(), *model.buffers()] if self.channels_last else ():
            if tensor.ndim == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)


WANTED = EvaluationConditions()
"""The conditions where nothing fails."""


def find_conditions(task: Task, model: nn.Module, batches: Sequence[Any]) -> EvaluationConditions:
    """Try the wanted conditions on the first and on the smallest batches, and leave out those that fail.

    Parameters
    ----------
    task
        The task that computes losses.
    model
        Its dense model in eval mode; it is not changed.
    batches
        Calibration batches.

    Raises
    ------
    UsageError
        The loss of the dense model is not finite, or cannot be computed even as the task itself does.
    """
    found_small = [min(batches, key=count) for count in (_count_elements, _count_samples)]
    tried = list({id(batch): batch for batch in (batches[0], *found_small)}.values())
    losses = [compute_dense_loss(task, model, batch) for batch in tried]
    fixed: tuple[str, ...] = ()
    if _list_norms(model):
        for batch in tried:
            fixed = _find_fixed_norms(task, model, batch, fixed)
    conditions = replace(WANTED, fixed_norms=fixed)
    contiguous = replace(conditions, channels_last=False)
    if all(weight.ndim != 4 for weight in model.parameters()):
        return conditions
    if _list_norms(model):
        losses = [_evaluate(task, model, batch, contiguous) for batch in tried]
    found = [_evaluate(task, model, batch, conditions) for batch in tried]
    same = all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9) for a, b in zip(found, losses, strict=True))
    return conditions if same else contiguous


def compute_dense_loss(task: Task, model: nn.Module, batch: Any) -> float:
    """Return the loss of the dense model. Raises UsageError if it is not finite, or cannot be computed."""
    with torch.no_grad():
        loss = float(task.loss(model, batch))
    if not math.isfinite(loss):
        raise UsageError(
            f"the loss of task {task.name} is {loss} for its own dense model, so no profile can be evaluated; "
            "correct loss() or calibration()"
        )
    return loss


def _find_fixed_norms(task: Task, model: nn.Module, batch: Any, fixed: Sequence[str]) -> tuple[str, ...]:
    """Return `fixed` and the norms that cannot use the statistics of this batch: all if the loss cannot."""
    twin = copy.deepcopy(model)
    EvaluationConditions(channels_last=False, fixed_norms=tuple(fixed)).prepare(twin)
    names = _list_norms(twin)
    failed: list[str] = []
    for name in names:
        norm: Any = twin.get_submodule(name)
        if norm.training:
            norm.forward = functools.partial(_run_or_fix, norm, norm.forward, name, failed)
    loss = _compute_loss(task, twin, batch)
    return tuple(names) if math.isnan(loss) else tuple(name for name in names if name in {*fixed, *failed})


def _run_or_fix(norm: nn.Module, forward: Any, name: str, failed: list[str], *args: Any, **kwargs: Any) -> Any:
    """Run a norm; if it cannot use the statistics of its input, put it in eval mode and run it again."""
    try:
        return forward(*args, **kwargs)
    except Exception:  # noqa: BLE001 - a subclass may raise anything where its input has no statistics
        norm.eval()
        failed.append(name)
        return forward(*args, **kwargs)


def _evaluate(task: Task, model: nn.Module, batch: Any, conditions: EvaluationConditions) -> float:
    twin = copy.deepcopy(model)
    conditions.prepare(twin)
    return _compute_loss(task, twin, batch)


def _compute_loss(task: Task, model: nn.Module, batch: Any) -> float:
    """Return the loss; NaN where it cannot be computed, or is not finite."""
    try:
        with torch.no_grad():
            loss = float(task.loss(model, batch))
    except LatbenchError:
        return math.nan
    return loss if math.isfinite(loss) else math.nan


def _list_norms(model: nn.Module) -> list[str]:
    """List the batch norms that can use the statistics of a batch in place of their own."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]


def _count_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in ExampleInputs((batch,)).tensors())


def _count_samples(batch: Any) -> int:
    return next((len(tensor) for tensor in ExampleInputs((batch,)).tensors() if tensor.ndim), 0)
