"""The loop behind `latbench prune --recipe`: train a task's model with a pruner, as a recipe says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import Target, Targets, targets_of
from search.pruning.saliency.gradient_checks import bad_gradient
from search.pruning.training.checkpoint import Checkpoint, Stateful
from search.pruning.training.flops import Flop, count_forward, training_flop
from search.pruning.training.recipe import Recipe
from search.task import Task


@dataclass(frozen=True)
class Trained:
    """What training leaves beside the model: masks (m, k), the FLOP it took, and what dense training would take.

    FLOP are counted on the first step's batches.
    """

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
    masks: Mapping[str, Tensor] | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> Trained:
    """Prune `model` to `targets` while it trains, in place; it ends in eval mode.

    The model is what the recipe's `start` says; `masks`, {layer: (m, k)}, are those of one-shot pruning, if that.
    The same recipe gives the same model on a CPU, whether or not training was stopped and went on from its
    checkpoint. Raises UsageError when the task has no training batches, BadData when the loss or a gradient is not
    finite.
    """
    wanted = recipe_targets(recipe, targets, model)
    batches = _batches(task, recipe)
    pruner = recipe.pruner(masks)
    optimizer = make_optimizer(recipe, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(recipe, step))
    parts: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    # Training code may draw from torch's global generator (dropout): seeded, and left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model.train()
        if wanted:
            pruner.prepare(model, wanted, total_steps=recipe.steps)
            parts["pruner"] = pruner
        first, counted = _go_on(task, batches, recipe, checkpoint, parts)
        for step in range(first, recipe.steps):
            optimizer.zero_grad()
            if step == 0:
                counted = count_forward(model, lambda: _backward(task, model, batches, recipe, step=0))
            else:
                _backward(task, model, batches, recipe, step=step)
            norm = get_total_norm([it.grad for it in model.parameters() if it.grad is not None])
            if not bool(torch.isfinite(norm)):
                bad = bad_gradient(model) or "the norm of all gradients is too large for their type"
                raise BadData(f"training diverged: {bad} at step {step}; lower the learning rate")
            if recipe.clip_norm is not None:
                clip_grads_with_norm_(model.parameters(), recipe.clip_norm, norm)
            optimizer.step()
            schedule.step()
            if wanted:
                pruner.step()
            if checkpoint is not None:
                checkpoint.save_if_due(step + 1, parts, counted)
            progress(step + 1, recipe.steps)
    model.eval()
    if wanted:
        pruner.finish()
    dense = training_flop(None, {}, counted, recipe.steps)
    spent = training_flop(pruner, wanted, counted, recipe.steps) if wanted else dense
    return Trained(pruner.masks, spent, dense)


def _go_on(
    task: Task, batches: Iterator[Any], recipe: Recipe, checkpoint: Checkpoint | None, parts: Mapping[str, Stateful]
) -> tuple[int, dict[str, float]]:
    """(The next step, FLOP counted), with everything as the checkpoint left it, the batches too."""
    if checkpoint is None:
        return 0, {}
    first, counted, generator = checkpoint.load(parts)
    for _ in range(first * recipe.accumulate):
        _next(task, batches, recipe, step=first)
    if generator is not None:
        torch.set_rng_state(generator)
    return first, counted


def recipe_targets(recipe: Recipe, targets: Targets, model: nn.Module) -> dict[str, Target]:
    """What the recipe prunes each layer to. Raises UsageError, naming the layer, where that cannot be."""
    wanted = targets_of(targets, model)
    if not recipe.transposable:
        return wanted
    exact = recipe.transposable == "exact"
    return targets_of({name: _transposable(name, target, exact) for name, target in wanted.items()}, model)


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


def _transposable(name: str, target: Target, exact: bool) -> Target:
    try:
        return replace(target, along="both", exact=exact)
    except UsageError as error:
        raise UsageError(f"layer {name}: {error}; leave `transposable` out of the recipe") from error


def _backward(task: Task, model: nn.Module, batches: Iterator[Any], recipe: Recipe, *, step: int) -> None:
    """Add up the gradients of one step's batches, their mean."""
    for _ in range(recipe.accumulate):
        loss = task.loss(model, _next(task, batches, recipe, step=step))
        if not bool(torch.isfinite(loss)):
            raise BadData(f"training diverged: the loss is {loss.item()} at step {step}; lower the learning rate")
        (loss / recipe.accumulate).backward()


def _batches(task: Task, recipe: Recipe) -> Iterator[Any]:
    """The task's batches. What they draw of torch's global generator (shuffling) has a state of its own.

    So they are the same in a run that goes on, which passes over them without what the model draws in between.
    """
    own = torch.Generator("cpu").manual_seed(recipe.seed).get_state()
    batches: Iterator[Any] | None = None
    while True:
        others = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            if batches is None:
                batches = task.train_batches(np.random.default_rng(recipe.seed))
            batch = next(batches)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(others)
        yield batch


def _next(task: Task, batches: Iterator[Any], recipe: Recipe, *, step: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise UsageError(
            f"task {task.name}: train_batches() ended at step {step} of {recipe.steps}: "
            "let it go on, or take fewer steps"
        ) from None
