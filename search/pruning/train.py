"""The loop behind `latbench prune --recipe`: train a task's model with a pruner, as a recipe says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from latbench.errors import BadData, UsageError
from search.pruning.flops import Flop, count_forward, training_flop
from search.pruning.recipe import Recipe
from search.pruning.targets import Target, Targets, targets_of
from search.task import Task


@dataclass(frozen=True)
class Trained:
    """What training leaves beside the model: masks (m, k), the FLOP it took, and what dense training would take."""

    masks: dict[str, Tensor]
    flop: Flop
    dense_flop: Flop

    def facts(self) -> dict[str, float]:
        """For a manifest: FLOP of Linear and Conv2d layers over all steps, as `flops` counts them."""
        return {
            "forward": self.flop.forward,
            "input_gradient": self.flop.input_gradient,
            "weight_gradient": self.flop.weight_gradient,
            "total": self.flop.total,
            "dense_total": self.dense_flop.total,
        }


def train(
    task: Task,
    model: nn.Module,
    targets: Targets,
    recipe: Recipe,
    *,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> Trained:
    """Prune the dense `model` to `targets` while it trains, in place; it ends in eval mode.

    The same recipe gives the same model. Raises UsageError when the task has no training batches, BadData when the
    loss or a gradient is not finite.
    """
    wanted = targets_of(targets, model)
    if recipe.transposable:
        wanted = {name: _transposable(name, target) for name, target in wanted.items()}
        wanted = targets_of(wanted, model)
    batches = task.train_batches(np.random.default_rng(recipe.seed))
    pruner = recipe.pruner()
    optimizer = make_optimizer(recipe, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(recipe, step))
    # Training code may draw from torch's global generator (dropout): seeded, and left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model.train()
        if wanted:
            pruner.prepare(model, wanted, total_steps=recipe.steps)
        counted: dict[str, float] = {}
        for step in range(recipe.steps):
            optimizer.zero_grad()
            if step == 0:
                counted = count_forward(model, lambda: _backward(task, model, batches, recipe, step=0))
            else:
                _backward(task, model, batches, recipe, step=step)
            norm = clip_grad_norm_(model.parameters(), recipe.clip_norm or math.inf)
            if not bool(torch.isfinite(norm)):
                raise BadData(f"training diverged: {_bad_gradient(model)} at step {step}; lower the learning rate")
            optimizer.step()
            schedule.step()
            if wanted:
                pruner.step()
            progress(step + 1, recipe.steps)
    model.eval()
    if not wanted:
        dense = training_flop(None, {}, counted, recipe.steps)
        return Trained({}, dense, dense)
    pruner.finish()
    return Trained(
        pruner.masks,
        training_flop(pruner, wanted, counted, recipe.steps),
        training_flop(None, {}, counted, recipe.steps),
    )


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer for all parameters."""
    settings: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=recipe.momentum, **settings)
    kind: type[Optimizer] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    return kind(model.parameters(), **settings)


def learning_rate(recipe: Recipe, step: int) -> float:
    """The factor of the learning rate in step `step`, from 0."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    if recipe.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * done)
    return 1 - done if recipe.schedule == "linear" else 1.0


def _transposable(name: str, target: Target) -> Target:
    try:
        return replace(target, along="both")
    except UsageError as error:
        raise UsageError(f"layer {name}: {error}; leave `transposable` out of the recipe") from error


def _backward(task: Task, model: nn.Module, batches: Iterator[Any], recipe: Recipe, *, step: int) -> None:
    """Add up the gradients of one step's batches, their mean."""
    for _ in range(recipe.accumulate):
        try:
            batch = next(batches)
        except StopIteration:
            raise UsageError(
                f"task {task.name}: train_batches() ended at step {step} of {recipe.steps}: "
                "let it go on, or take fewer steps"
            ) from None
        loss = task.loss(model, batch)
        if not bool(torch.isfinite(loss)):
            raise BadData(f"training diverged: the loss is {loss.item()} at step {step}; lower the learning rate")
        (loss / recipe.accumulate).backward()


def _bad_gradient(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"the gradient of {name} holds NaN or infinite values"
    return "the gradients' norm is not finite"
