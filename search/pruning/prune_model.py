"""Make a pruned model of a profile: stitch the database's layers, tune them together, and train by a recipe if any.

Each stage gives a model, and the one with the least loss is selected. Before training it is the loss on the
calibration data. A trained model is compared on training batches, because the other stages were fitted to the
calibration data. Neither shows that a model learned its data by heart. So all stages are scored on test data, and a
kept stage with a lower score than another one is told.

Layers in eight bits have weights of whole numbers of steps after each stage. While a loss or a score is computed,
they read their inputs in steps.

One model is stitched and tuned. This takes memory for its weights, their masks (a byte each) and one or two layers.
During joint tuning the dense model and, for each kept weight, its value and two moments are held too: twice the
weights if three quarters are pruned.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import Profile
from search.pruning.masks.layer_targets import resolve_targets
from search.pruning.one_shot.batchnorm import list_batchnorms, tune_batchnorm
from search.pruning.one_shot.global_adaprune import TuningSettings, run_global_adaprune
from search.pruning.one_shot.stitch import StitchedLayers, stitch
from search.pruning.quantization.rounded_inputs import read_inputs_in_steps
from search.pruning.training.auto_recipe import FRESH_BATCHES, AutoRecipe, choose_recipe, draw_fresh_batches
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import Diverged, build_recipe_targets, train
from search.task import Task
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.prunable_layers import refuse_layer

_LOG = logging.getLogger(__name__)

MOST_TRAININGS = 2
"""Trainings that may diverge, each at a lower rate, before the untrained model stays."""

Progress = Callable[[str, int, int], None]

VERSION = 8
"""Rises whenever the same settings give another model than before."""


@dataclass(frozen=True)
class Milestone:
    """The outcome of a stage.

    Attributes
    ----------
    name : str
        "dense", "one-shot", "global" (joint tuning) or the method of the recipe.
    loss : float
        Mean loss on the calibration data.
    score : float
        The task's score; NaN where it has none, as of a model that answers all alike.
    training_flop : mapping of str to float
        FLOP of its training; empty without training.
    fresh_loss : float or None
        Mean loss on training batches in a new order, where a model was trained. Stages before were fitted to the
        calibration data, and the training was not.
    """

    name: str
    loss: float
    score: float
    training_flop: Mapping[str, float] = field(default_factory=dict)
    fresh_loss: float | None = None

    def is_better_than(self, other: Milestone) -> bool:
        """Return whether it has a score, and the other one has none or a larger loss on the same data."""
        if math.isnan(self.score) or math.isnan(other.score):
            return math.isnan(other.score) and not math.isnan(self.score)
        if self.fresh_loss is not None and other.fresh_loss is not None:
            return self.fresh_loss < other.fresh_loss
        return self.loss < other.loss


@dataclass(frozen=True)
class PruneResult:
    """The outcome of all stages.

    Attributes
    ----------
    stages : sequence of Milestone
        All stages in order, the dense model first.
    selected : Milestone
        The stage with the least loss.
    model : Module
        Its model.
    masks : mapping of str to bool Tensor of shape (m, k)
        Its masks by layer; True marks a kept weight.
    quantizations : mapping of str to Quantization
        How its layers in eight bits are read.
    recipe : Recipe or None
        How a model was trained; None without training.
    """

    stages: Sequence[Milestone]
    selected: Milestone
    model: nn.Module
    masks: Mapping[str, Tensor]
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)
    recipe: Recipe | None = None


@dataclass(frozen=True)
class PruneSettings:
    """How a model is pruned.

    Attributes
    ----------
    seed : int
        Seed of the order of batches in joint tuning.
    joint : bool
        Whether all layers are tuned together after stitching (global AdaPrune).
    recipe : Recipe, AutoRecipe or None
        How the model is trained; None for no training.
    """

    seed: int = 0
    joint: bool = True
    recipe: Recipe | AutoRecipe | None = None


def prune_model(
    task: Task,
    profile: Profile,
    database: Database,
    settings: PruneSettings = PruneSettings(),
    *,
    checkpoint: Checkpoint | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> PruneResult:
    """Prune the task's model to a profile, and return the best of the stages.

    Parameters
    ----------
    task : Task
        The model, its data and its score.
    profile : Profile
        The option of each layer.
    database : Database
        Pruned weights of each layer.
    settings : PruneSettings
        Seed, joint tuning and recipe.
    checkpoint : Checkpoint, optional
        File that keeps the state of training.
    progress : callable
        Called with the stage's name, the steps done and all steps.

    Returns
    -------
    PruneResult
        All stages, and the model with the least loss.

    Raises
    ------
    BadData
        The profile or the database is of another model, training by a given recipe diverges, or no stage has a score.
    UsageError
        The recipe does not suit the task or the profile.
    """
    model, recipe = task.model(), settings.recipe
    _check_inputs(task, profile, recipe, model)
    batches = task.calibration()
    stages = [Milestone("dense", compute_calibration_loss(task, model, batches), task.score(model))]
    stitched = stitch(model, profile.options, database)
    stages.append(_evaluate("one-shot", task, model, stitched.quantizations, batches))
    best = PruneResult(stages, stages[-1], model, stitched.masks, stitched.quantizations)
    if settings.joint and (stitched.masks or stitched.quantizations):
        stages.append(_tune_jointly(task, model, stitched, batches, settings.seed, progress))
        if stages[-1].is_better_than(best.selected):
            best = replace(best, selected=stages[-1])
        else:  # stitch it again in the memory of this model, instead of holding it all the time
            selected = best.selected
            del best, model
            model = _stitch_again(task, profile, database, batches)
            best = PruneResult(stages, selected, model, stitched.masks, stitched.quantizations)
    if recipe is not None:
        best = _improve_by_training(task, profile, recipe, best, batches, checkpoint, progress)
    _check_score(task, best)
    return best


def _check_score(task: Task, pruned: PruneResult) -> None:
    if math.isnan(pruned.selected.score):
        raise BadData(f"task {task.name}: score() returned nan for the pruned model: ask for less speed")


def _check_inputs(task: Task, profile: Profile, recipe: Recipe | AutoRecipe | None, model: nn.Module) -> None:
    check_profile(profile, task, model)
    if recipe is not None:
        check_recipe(recipe.base if isinstance(recipe, AutoRecipe) else recipe, task, profile, model)


def _tune_jointly(
    task: Task,
    model: nn.Module,
    stitched: StitchedLayers,
    batches: Sequence[Any],
    seed: int,
    progress: Progress,
) -> Milestone:
    """Tune all layers together by global AdaPrune, in place."""
    run_global_adaprune(
        task, model, stitched.masks, batches, TuningSettings(seed=seed), quantizations=stitched.quantizations,
        progress=lambda done, total: progress("global AdaPrune", done, total),
    )  # fmt: skip
    return _evaluate("global", task, model, stitched.quantizations, batches)


def _evaluate(
    name: str, task: Task, model: nn.Module, quantizations: Mapping[str, Quantization], batches: Sequence[Any]
) -> Milestone:
    """Tune the batch norms in place, and return the stage."""
    with read_inputs_in_steps(model, quantizations):
        return Milestone(name, tune_norms(task, model, batches), task.score_or_nan(model))


def _stitch_again(task: Task, profile: Profile, database: Database, batches: Sequence[Any]) -> nn.Module:
    """Return the one-shot model, with tuned batch norms."""
    model = task.model()
    stitched = stitch(model, profile.options, database)
    with read_inputs_in_steps(model, stitched.quantizations):
        tune_norms(task, model, batches)
    return model


def _improve_by_training(
    task: Task, profile: Profile, recipe: Recipe | AutoRecipe, best: PruneResult, batches: Sequence[Any],
    checkpoint: Checkpoint | None, progress: Progress,
) -> PruneResult:  # fmt: skip
    """Return the better one of the model and of what training makes of it."""
    trained = _train(task, profile, recipe, best, batches, checkpoint, progress)
    return best if trained is best else _select_by_fresh_batches(task, best, trained, recipe.seed)


def _train(
    task: Task,
    profile: Profile,
    asked: Recipe | AutoRecipe,
    best: PruneResult,
    batches: Sequence[Any],
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> PruneResult:
    """Train by the recipe, or by one that is chosen; return the best model itself where every training diverged."""
    if isinstance(asked, Recipe):
        return _train_further(task, profile, asked, best, batches, checkpoint, progress)
    try:
        recipe = choose_recipe(asked, task, profile, partial(_copy_pruned, task, best), progress=progress)
    except Diverged as error:  # in the first steps, at the least rate
        _LOG.warning(f"the model stays as it was before training: {error}")
        return best
    for _ in range(MOST_TRAININGS):
        # The longer training may diverge at a rate at which a short one did not.
        with contextlib.suppress(Diverged):
            return _train_further(task, profile, recipe, best, batches, checkpoint, progress)
        rate = recipe.learning_rate
        if checkpoint is not None:
            checkpoint.remove()
        recipe = asked.choose_slower(recipe)
        _LOG.warning(f"training diverged at a learning rate of {rate:g}")
    _LOG.warning("the model stays as it was before training, which diverged at every learning rate")
    return best


def _train_further(
    task: Task,
    profile: Profile,
    recipe: Recipe,
    best: PruneResult,
    batches: Sequence[Any],
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> PruneResult:
    """Train the dense model or a copy of the best one by the recipe."""
    model, start = _copy_pruned(task, best)
    if recipe.start == "dense":
        model = task.model()
    trained = train(
        task, model, profile, recipe, start=start, checkpoint=checkpoint,
        progress=lambda done, total: progress("training", done, total),
    )  # fmt: skip
    stage = _evaluate(recipe.method, task, model, trained.quantizations, batches)
    stage = replace(stage, training_flop=trained.to_dict())
    return PruneResult(best.stages, stage, model, trained.masks, trained.quantizations, recipe)


def _copy_pruned(task: Task, pruned: PruneResult) -> tuple[nn.Module, StitchedLayers]:
    """Return a copy of the pruned model, and what pruning left.

    A model that keeps activations cannot be copied after it ran, so a new one gets the weights.
    """
    model = task.model()
    model.load_state_dict(pruned.model.state_dict())
    return model, StitchedLayers(dict(pruned.masks), dict(pruned.quantizations))


def _select_by_fresh_batches(task: Task, pruned: PruneResult, trained: PruneResult, seed: int) -> PruneResult:
    """Return the better one of the pruned and the trained model, by training batches in a new order.

    Pruning was fitted to the calibration data, so the loss there favours what was not trained.
    """
    fresh = draw_fresh_batches(task, seed, FRESH_BATCHES) or task.calibration()
    found = []
    for result in (pruned, trained):
        with read_inputs_in_steps(result.model, result.quantizations):
            loss = compute_calibration_loss(task, result.model, fresh, "training batches")
        found.append(replace(result, selected=replace(result.selected, fresh_loss=loss)))
    before, after = found
    stages = [before.selected if stage is pruned.selected else stage for stage in pruned.stages]
    better = after if after.selected.is_better_than(before.selected) else before
    if better.selected.score < (other := max(stage.score for stage in (before.selected, after.selected))):
        _LOG.warning(
            f"the model of the stage {better.selected.name} is kept, because its loss on training batches is less, "
            f"but it scores {better.selected.score:.4g}, and the other one {other:.4g}"
        )
    return replace(better, stages=[*stages, after.selected], recipe=trained.recipe)


def compute_calibration_loss(
    task: Task, model: nn.Module, batches: Sequence[Any], data: str = "calibration data"
) -> float:
    """Return the mean loss over the batches. Raises BadData if it is not finite."""
    with torch.no_grad():
        loss = sum(task.loss(model, batch).item() for batch in batches) / len(batches)
    if not math.isfinite(loss):
        raise BadData(f"task {task.name}: the loss on the {data} is {loss}")
    return loss


def check_profile(profile: Profile, task: Task, model: nn.Module) -> None:
    """Raise BadData if the profile is of another model than the task's, or a layer cannot hold its pattern."""
    modules = dict(model.named_modules())
    for layer in profile.layers:
        reason = "has no such layer" if layer not in modules else refuse_layer(modules[layer])
        if reason is not None:
            raise BadData(
                f"the profile is of another model ({profile.task}): it prunes layer {layer}, and the model of task "
                f"{task.name} {reason}"
            )
    if (found := hash_model(model)) != profile.model_hash:
        raise BadData(
            f"the profile was searched for a model with other weights ({profile.model_hash}, task {task.name} has "
            f"{found}): search again"
        )
    try:
        resolve_targets(profile, model)
    except UsageError as error:
        raise BadData(f"the profile cannot be followed: {error}") from error


def check_can_train(task: Task) -> None:
    """Raise UsageError if the task has no training data."""
    if not task.can_train:
        raise UsageError(
            f"task {task.name} has no train_batches(rng): leave --recipe and --train-budget out, or give it training "
            "data"
        )


def check_recipe(recipe: Recipe, task: Task, profile: Profile, model: nn.Module) -> None:
    """Raise UsageError, before any work, if the recipe does not suit the task or the profile.

    The message names the layer that the method cannot prune.
    """
    check_can_train(task)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"task {task.name}: no parameter of its model requires a gradient: nothing can be trained")
    recipe.build_pruner().check(model, build_recipe_targets(recipe, profile, model), recipe.steps)


def tune_norms(task: Task, model: nn.Module, batches: Sequence[Any]) -> float:
    """Tune the batch norms in place if that lowers the loss; return the loss."""
    before = compute_calibration_loss(task, model, batches)
    norms = list_batchnorms(model)
    if not norms:
        return before
    statistics = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    with contextlib.suppress(UsageError):  # such as a batch with one value a channel, which has no variance
        tune_batchnorm(task, model, batches)
        after = compute_calibration_loss(task, model, batches)
        if after < before:
            return after
    for norm, before_tuning in zip(norms, statistics, strict=True):
        norm.load_state_dict(before_tuning, strict=False)
    return before
