"""From a profile to a pruned model: stitch the database's layers, tune them together, train by a recipe if asked to.

Each stage gives a model; the one with the least loss on the calibration data is kept, so that no stage can do harm
unseen. Test data is scored for the record and decides nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latbench.errors import BadData
from search.database import Database, model_hash
from search.profile import Profile
from search.pruning.apply import stitch
from search.pruning.batchnorm import tune_batchnorm
from search.pruning.checkpoint import Checkpoint
from search.pruning.global_adaprune import global_adaprune
from search.pruning.recipe import Recipe
from search.pruning.train import train
from search.task import Task
from sparse_kernels.nn import refuses

Progress = Callable[[str, int, int], None]

# Goes up when the same settings would give another model than before.
VERSION = 2


@dataclass(frozen=True)
class Stage:
    """A model on the way, its masks, its mean loss on the calibration data, its score, and what made it took."""

    name: str
    model: nn.Module
    masks: Mapping[str, Tensor]
    loss: float
    score: float
    training_flop: Mapping[str, float] = field(default_factory=dict)


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
) -> list[Stage]:
    """The stages "dense", "one-shot", "global" (where `joint`) and the recipe's method (where there is one).

    Training starts from the dense model, or goes on from `checkpoint`. Raises BadData when the profile or the
    database belongs to another model, or when training diverges.
    """
    dense = task.model()
    check_profile(profile, task, dense)
    batches = task.calibration()
    choices = {layer: (choice.pattern, choice.sparsity) for layer, choice in profile.layers.items()}

    def stage(name: str, model: nn.Module, masks: Mapping[str, Tensor]) -> Stage:
        return Stage(name, model, masks, calibration_loss(task, model, batches), task.score(model))

    one_shot = copy.deepcopy(dense)
    masks = stitch(one_shot, choices, database)
    stages = [stage("dense", dense, {}), stage("one-shot", _with_norms(task, one_shot, batches), masks)]
    if joint and masks:
        together = copy.deepcopy(one_shot)
        global_adaprune(
            task, together, dense, masks, batches,
            rng=np.random.default_rng(seed), progress=lambda done, total: progress("global AdaPrune", done, total),
        )  # fmt: skip
        stages.append(stage("global", _with_norms(task, together, batches), masks))
    if recipe is not None:
        model = copy.deepcopy(dense)
        trained = train(
            task, model, profile, recipe, checkpoint=checkpoint,
            progress=lambda done, total: progress(recipe.method, done, total),
        )  # fmt: skip
        stages.append(replace(stage(recipe.method, model, trained.masks), training_flop=trained.facts()))
    return stages


def best(stages: Sequence[Stage]) -> Stage:
    """The pruned stage with the least loss on the calibration data."""
    return min(stages[1:], key=lambda stage: stage.loss)


def calibration_loss(task: Task, model: nn.Module, batches: Sequence[Any]) -> float:
    """The mean loss over the batches. Raises BadData when it is not finite."""
    with torch.no_grad():
        loss = sum(task.loss(model, batch).item() for batch in batches) / len(batches)
    if not math.isfinite(loss):
        raise BadData(f"task {task.name}: the loss on the calibration data is {loss}")
    return loss


def check_profile(profile: Profile, task: Task, model: nn.Module) -> None:
    """Raise BadData when the profile was searched for another model than this, the task's."""
    modules = dict(model.named_modules())
    for layer in profile.layers:
        reason = "has no such layer" if layer not in modules else refuses(modules[layer])
        if reason is not None:
            raise BadData(
                f"the profile is of another model ({profile.task}): it prunes layer {layer}, and the model of task "
                f"{task.name} {reason}"
            )
    if (found := model_hash(model)) != profile.model_hash:
        raise BadData(
            f"the profile was searched for a model with other weights ({profile.model_hash}, task {task.name} has "
            f"{found}): search again"
        )


def _with_norms(task: Task, model: nn.Module, batches: Sequence[Any]) -> nn.Module:
    """The model with its batch norms tuned, if it has any and that lowers the loss; else the model itself."""
    tuned = copy.deepcopy(model)
    if tune_batchnorm(task, tuned, batches) == 0:
        return model
    return min((model, tuned), key=lambda candidate: calibration_loss(task, candidate, batches))
