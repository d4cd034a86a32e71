"""The training loop of `latbench prune --recipe`: train a task's model with a pruner, as a recipe says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import LayerTarget, LayerTargets, resolve_targets
from search.pruning.one_shot.stitch import StitchedLayers
from search.pruning.quantization.rounded_training import compute_in_steps, round_layers
from search.pruning.saliency.gradient_checks import find_bad_gradient
from search.pruning.training.checkpoint import Checkpoint, Stateful
from search.pruning.training.dense_teacher import DenseTeacher
from search.pruning.training.flops import Flop, compute_training_flop, count_forward_flop
from search.pruning.training.pruner import Pruner
from search.pruning.training.recipe import Recipe
from search.pruning.training.weight_average import WeightAverage
from search.task import Task
from sparse_kernels.formats.int8 import Quantization

_OVER: Any = object()
"""Marks the end of a pass over the training batches."""


class Diverged(BadData):
    """A loss or a gradient is not finite."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of training, beside the model.

    Attributes
    ----------
    masks : dict of str to bool Tensor of shape (m, k)
        Masks by layer; True marks a kept weight.
    flop, dense_flop : Flop
        FLOP of the training, and of dense training of as many steps, counted on the first step's batches.
    quantizations : dict of str to Quantization
        How the layers in eight bits are read.
    """

    masks: dict[str, Tensor]
    flop: Flop
    dense_flop: Flop
    quantizations: dict[str, Quantization] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float]:
        """Return the FLOP of Linear and Conv2d layers over all steps, for a manifest."""
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
    targets: LayerTargets,
    recipe: Recipe,
    *,
    start: StitchedLayers | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> TrainingResult:
    """Prune a model while it trains, in place. It ends in eval mode.

    On a CPU the same recipe gives the same model, also if training was interrupted and continued from its checkpoint.

    Parameters
    ----------
    task : Task
        The task, with its training batches and loss.
    model : Module
        The model at the start, as the recipe's `start` says.
    targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
        Targets by layer.
    recipe : Recipe
        How to train.
    start : StitchedLayers, optional
        What one-shot pruning left: masks, for the start `one_shot`, and the layers that compute in eight bits.
    checkpoint : Checkpoint, optional
        File that keeps the state of training.
    progress : callable
        Called with the steps done and all steps.

    Returns
    -------
    TrainingResult
        Masks and FLOP.

    Raises
    ------
    UsageError
        The task has no training batches.
    Diverged
        The loss or a gradient is not finite.
    """
    layer_targets = build_recipe_targets(recipe, targets, model)
    start = start or StitchedLayers()
    pruner = recipe.build_pruner(start.masks or None)
    # Training may use torch's global generator (dropout): seed it, and restore it afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model.train()
        if recipe.distill is not None:
            _let_norms_alone_train(model)
        if layer_targets:
            pruner.prepare(model, layer_targets, total_steps=recipe.steps)
        run = _build_run(task, model, recipe, pruner if layer_targets else None)
        with compute_in_steps(model, start.quantizations):
            forward_flop = _run_steps(run, checkpoint, progress)
    run.finish()
    spent, dense = run.compute_flop(layer_targets, forward_flop)
    return TrainingResult(pruner.masks, spent, dense, round_layers(model, start.quantizations))


@dataclass(frozen=True)
class _Run:
    """A training, and what takes part in it beside the optimizer."""

    task: Task
    model: nn.Module
    recipe: Recipe
    pruner: Pruner | None
    teacher: DenseTeacher | None
    average: WeightAverage | None

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the loss that training minimizes."""
        if self.teacher is not None:
            return self.teacher.compute_loss(self.model, batch)
        return self.task.loss(self.model, batch)

    def finish(self) -> None:
        """Put the model into eval mode, with exact zeros and averaged weights."""
        self.model.eval()
        if self.pruner is not None:
            self.pruner.finish()
        if self.average is not None:
            self.average.write(self.pruner.masks if self.pruner is not None else {})

    def compute_flop(
        self, targets: Mapping[str, LayerTarget], forward_flop: Mapping[str, float]
    ) -> tuple[Flop, Flop]:
        """Return the FLOP of all steps, the teacher's among them, and those of dense training."""
        dense = compute_training_flop(None, {}, forward_flop, self.recipe.steps)
        spent = compute_training_flop(self.pruner, targets, forward_flop, self.recipe.steps)
        return spent + Flop(dense.forward if self.teacher else 0.0, 0.0, 0.0), dense

    def list_parts(self) -> dict[str, Stateful]:
        """List what has a state in checkpoints, beside the optimizer and its schedule."""
        parts: dict[str, Stateful | None] = {"model": self.model, "pruner": self.pruner, "average": self.average}
        return {name: part for name, part in parts.items() if part is not None}


def _let_norms_alone_train(model: nn.Module) -> None:
    """Let the model compute as the dense one does, which has no dropout: weights would shrink to match such noise."""
    model.eval()
    for module in model.modules():
        # cuDNN has gradients of recurrent layers in training mode alone.
        if isinstance(module, _NormBase) or (isinstance(module, nn.RNNBase) and not module.dropout):
            module.train()


def _build_run(task: Task, model: nn.Module, recipe: Recipe, pruner: Pruner | None) -> _Run:
    """Return the training of a model that has its masks."""
    teacher = None if recipe.distill is None else DenseTeacher(task, recipe.distill)
    average = None if recipe.ema is None else WeightAverage(model, recipe.ema)
    return _Run(task, model, recipe, pruner, teacher, average)


def _run_steps(run: _Run, checkpoint: Checkpoint | None, progress: Callable[[int, int], None]) -> dict[str, float]:
    """Train from the checkpoint, or from the start, to the last step; return the dense forward FLOP by layer."""
    task, model, recipe = run.task, run.model, run.recipe
    batches = draw_batches(task, recipe.seed)
    optimizer = build_optimizer(recipe, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: compute_learning_rate_factor(recipe, step))
    parts = {**run.list_parts(), "optimizer": optimizer, "schedule": schedule}
    first, forward_flop = _resume(task, batches, recipe, checkpoint, parts)
    for step in range(first, recipe.steps):
        optimizer.zero_grad()
        if step == 0:
            forward_flop = count_forward_flop(model, lambda: _backward(run, batches, step=0))
        else:
            _backward(run, batches, step=step)
        _clip_gradients(model, recipe, step)
        optimizer.step()
        schedule.step()
        if run.pruner is not None:
            run.pruner.step()
        if run.average is not None:
            run.average.update()
        if checkpoint is not None:
            checkpoint.save_if_due(step + 1, parts, forward_flop)
        progress(step + 1, recipe.steps)
    return forward_flop


def _resume(
    task: Task, batches: Iterator[Any], recipe: Recipe, checkpoint: Checkpoint | None, parts: Mapping[str, Stateful]
) -> tuple[int, dict[str, float]]:
    """Restore the state of the checkpoint, the batches too, and return the next step and the counted FLOP."""
    if checkpoint is None:
        return 0, {}
    first, counted, generator = checkpoint.load(parts)
    for _ in range(first * recipe.accumulate):
        _get_next_batch(task, batches, recipe, step=first)
    if generator is not None:
        torch.set_rng_state(generator)
    return first, counted


def build_recipe_targets(recipe: Recipe, targets: LayerTargets, model: nn.Module) -> dict[str, LayerTarget]:
    """Build the targets of a recipe. Raises UsageError, which names the layer, for an impossible one."""
    layer_targets = resolve_targets(targets, model)
    if not recipe.transposable:
        return layer_targets
    exact = recipe.transposable == "exact"
    return resolve_targets(
        {name: _make_transposable(name, target, exact) for name, target in layer_targets.items()}, model
    )


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Build the recipe's optimizer for all parameters."""
    settings: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=recipe.momentum, **settings)
    kind: type[Optimizer] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    return kind(model.parameters(), **settings)


def compute_learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Return the factor of the learning rate in step `step`, from 0."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    if recipe.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * done)
    return 1 - done if recipe.schedule == "linear" else 1.0


def _make_transposable(name: str, target: LayerTarget, exact: bool) -> LayerTarget:
    try:
        return replace(target, along="both", exact=exact)
    except UsageError as error:
        raise UsageError(f"layer {name}: {error}; leave `transposable` out of the recipe") from error


def _backward(run: _Run, batches: Iterator[Any], *, step: int) -> None:
    """Accumulate the mean gradient of one step's batches."""
    recipe = run.recipe
    for _ in range(recipe.accumulate):
        loss = run.compute_loss(_get_next_batch(run.task, batches, recipe, step=step))
        if not bool(torch.isfinite(loss)):
            raise Diverged(f"training diverged: the loss is {loss.item()} at step {step}; lower the learning rate")
        (loss / recipe.accumulate).backward()


def _clip_gradients(model: nn.Module, recipe: Recipe, step: int) -> None:
    """Clip the norm of all gradients, if the recipe says so. Raises BadData if a gradient is not finite."""
    norm = get_total_norm([it.grad for it in model.parameters() if it.grad is not None])
    if not bool(torch.isfinite(norm)):
        bad = find_bad_gradient(model) or "the norm of all gradients is too large for their type"
        raise Diverged(f"training diverged: {bad} at step {step}; lower the learning rate")
    if recipe.clip_norm is not None:
        clip_grads_with_norm_(model.parameters(), recipe.clip_norm, norm)


def draw_batches(task: Task, seed: int) -> Iterator[Any]:
    """Yield the task's batches without end: when they are over, they begin again in another order.

    Shuffling has a state of torch's generator of its own.

    So they are the same in a continued run, which skips batches without the draws of the model in between.
    """
    batch_state = torch.Generator("cpu").manual_seed(seed).get_state()
    rng, batches, drawn = np.random.default_rng(seed), None, 0
    while True:
        model_state = torch.get_rng_state()
        torch.set_rng_state(batch_state)
        try:
            if batches is None:
                batches, drawn = task.train_batches(rng), 0
            batch = next(batches, _OVER)
        finally:
            batch_state = torch.get_rng_state()
            torch.set_rng_state(model_state)
        if batch is not _OVER:
            drawn += 1
            yield batch
        elif drawn:
            batches = None
        else:  # nothing comes any more
            return


def _get_next_batch(task: Task, batches: Iterator[Any], recipe: Recipe, *, step: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise UsageError(
            f"task {task.name}: train_batches() gave no batch at step {step} of {recipe.steps}: return batches "
            "whenever it is called, one pass or without end"
        ) from None
