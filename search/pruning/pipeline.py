"""From a profile to a pruned model: stitch the database's layers, tune them together, train by a recipe if asked to.

Each stage gives a model; the one with the least loss on the calibration data is kept, so that no stage can do harm
unseen. Test data is scored for the record and decides nothing.

Stitching and tuning happen in one model: memory for its weights, their masks (a byte each) and a layer or two. While
`joint` tuning goes on there are the dense model that is followed and, of each kept weight, its value and two moments:
twice the weights where three quarters are pruned.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import Profile
from search.pruning.masks.layer_targets import targets_of
from search.pruning.one_shot.batchnorm import batchnorms, tune_batchnorm
from search.pruning.one_shot.global_adaprune import global_adaprune
from search.pruning.one_shot.stitch import stitch
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import recipe_targets, train
from search.task import Task
from sparse_kernels.nn import refuses

Progress = Callable[[str, int, int], None]

# Goes up when the same settings would give another model than before.
VERSION = 6


@dataclass(frozen=True)
class Milestone:
    """A model on the way: the model's mean loss on the calibration data, its score, and what making it took."""

    name: str
    loss: float
    score: float
    training_flop: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All stages, and the one that is kept: its name, model and masks (m, k)."""

    stages: Sequence[Milestone]
    kept: Milestone
    model: nn.Module
    masks: Mapping[str, Tensor]


def prune(
    task: Task,
    profile: Profile,
    database: Database,
    *,
    seed: int = 0,
    joint: bool = True,
    recipe: Recipe | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Result:
    """The best of the stages "one-shot", "global" (where `joint`) and the recipe's method (where there is one).

    Training starts from the dense model or from the best so far, as the recipe says, or goes on from `checkpoint`.
    Raises BadData when the profile or the database belongs to another model, or when training diverges, UsageError
    for a recipe that cannot be followed.
    """
    model = task.model()
    check_profile(profile, task, model)
    if recipe is not None:
        check_recipe(recipe, task, profile, model)
    batches = task.calibration()
    choices = {layer: (choice.pattern, choice.sparsity) for layer, choice in profile.layers.items()}
    stages = [Milestone("dense", calibration_loss(task, model, batches), task.score(model))]
    masks = stitch(model, choices, database)
    loss = _with_norms(task, model, batches)
    stages.append(Milestone("one-shot", loss, task.score(model)))
    best = Result(stages, stages[-1], model, masks)
    if joint and masks:
        global_adaprune(
            task, model, masks, batches,
            rng=np.random.default_rng(seed), progress=lambda done, total: progress("global AdaPrune", done, total),
        )  # fmt: skip
        loss = _with_norms(task, model, batches)
        stages.append(Milestone("global", loss, task.score(model)))
        if loss < best.kept.loss:
            best = Result(stages, stages[-1], model, masks)
        else:  # made once more, with the memory of this one, instead of being held all the time
            kept = best.kept
            del best, model
            model = task.model()
            stitch(model, choices, database)
            _with_norms(task, model, batches)
            best = Result(stages, kept, model, masks)
    if recipe is not None:
        model = task.model() if recipe.start == "dense" else copy.deepcopy(best.model)
        trained = train(
            task, model, profile, recipe, masks=best.masks, checkpoint=checkpoint,
            progress=lambda done, total: progress(recipe.method, done, total),
        )  # fmt: skip
        loss = calibration_loss(task, model, batches)
        stages.append(Milestone(recipe.method, loss, task.score(model), trained.facts()))
        best = min(best, Result(stages, stages[-1], model, trained.masks), key=_loss)
    return best


def calibration_loss(task: Task, model: nn.Module, batches: Sequence[Any]) -> float:
    """The mean loss over the batches. Raises BadData when it is not finite."""
    with torch.no_grad():
        loss = sum(task.loss(model, batch).item() for batch in batches) / len(batches)
    if not math.isfinite(loss):
        raise BadData(f"task {task.name}: the loss on the calibration data is {loss}")
    return loss


def check_profile(profile: Profile, task: Task, model: nn.Module) -> None:
    """Raise BadData when the profile is not of this model, the task's, or its layers cannot hold their patterns."""
    modules = dict(model.named_modules())
    for layer in profile.layers:
        reason = "has no such layer" if layer not in modules else refuses(modules[layer])
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
        targets_of(profile, model)
    except UsageError as error:
        raise BadData(f"the profile cannot be followed: {error}") from error


def check_recipe(recipe: Recipe, task: Task, profile: Profile, model: nn.Module) -> None:
    """Raise UsageError, before any work, for a recipe that this task or this profile does not go with.

    Naming the layer, where the method cannot prune it so.
    """
    if not task.can_train:
        raise UsageError(f"task {task.name} has no train_batches(rng): leave --recipe out, or give it training data")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"task {task.name}: no parameter of its model requires a gradient: nothing can be trained")
    recipe.pruner().check(model, recipe_targets(recipe, profile, model), recipe.steps)


def _loss(result: Result) -> float:
    return result.kept.loss


def _with_norms(task: Task, model: nn.Module, batches: Sequence[Any]) -> float:
    """Tune the model's batch norms, in place, if that can be done and lowers its loss; returns the loss."""
    before = calibration_loss(task, model, batches)
    norms = batchnorms(model)
    if not norms:
        return before
    statistics = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    with contextlib.suppress(UsageError):  # such as a batch with one value a channel, of which there is no variance
        tune_batchnorm(task, model, batches)
        after = calibration_loss(task, model, batches)
        if after < before:
            return after
    for norm, kept in zip(norms, statistics, strict=True):
        norm.load_state_dict(kept, strict=False)
    return before
