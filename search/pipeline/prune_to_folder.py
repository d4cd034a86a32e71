"""Prune a task's model into a folder, unless the folder holds the result of the same settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latbench.base.files import hash_file, is_left_behind, list_hidden_siblings
from latbench.errors import BadData
from latbench.machines.noise_sources import count_free_cores
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import Profile, read_profile
from search.check_task import check_task
from search.progress import Progress
from search.pruning import prune_model as pipeline
from search.pruning.prune_model import PruneResult
from search.pruning.storage import model_folder
from search.pruning.training.auto_recipe import AutoRecipe, read_training
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.recipe import Recipe
from search.task import Task


@dataclass(frozen=True)
class PruneRequest:
    """How a model is pruned.

    Attributes
    ----------
    joint
        Whether all layers are tuned together.
    recipe
        Training recipe: a YAML file, the name of a method, or `auto`. None for no training.
    train_seconds
        Time budget of `auto`, which needs no other name then; None for its default.
    seed
        Random seed of the tuning.
    """

    joint: bool = True
    recipe: str | None = None
    train_seconds: float | None = None
    seed: int = 0


def prune_to_folder(
    task: Task, profile: Path, database: Path, output: Path, request: PruneRequest = PruneRequest(),
    *, progress: Progress = lambda what, done, total: None,
) -> bool:  # fmt: skip
    """Prune the model into `output` unless that holds the result of these very settings; return whether it ran.

    Parameters
    ----------
    task
        The task.
    profile
        The profile file.
    database
        Folder of the layer database that the search filled.
    output
        Folder to write.
    request
        Tuning and training.
    progress
        Called with the current step.

    Raises
    ------
    BadData, UsageError
        As `search.pruning.prune_model.prune_model` does.
    """
    searched, training = read_profile(profile), read_training(request.recipe, request.train_seconds)
    layers = Database(database, searched.model_hash)
    settings = _describe_settings(task, profile, layers, training, request)
    return _prune(task, searched, layers, training, settings, output, progress)


def is_trained(task: Task, profile: Path, output: Path) -> bool:
    """Return whether `output` holds the task's model as pruned to this profile and trained, by any recipe."""
    try:
        manifest = model_folder.read_manifest(output)
    except BadData:
        return False
    made_for = {
        "task_source": task.source, "profile_sha256": hash_file(profile), "pipeline_version": pipeline.VERSION,
    }  # fmt: skip
    return bool(manifest.get("recipe")) and all(manifest.get(key) == value for key, value in made_for.items())


def _describe_settings(
    task: Task, profile: Path, layers: Database, training: Recipe | AutoRecipe | None, request: PruneRequest
) -> dict[str, Any]:
    """Return everything that the pruned model depends on."""
    return {
        "task_reference": task.reference,
        "task_source": task.source,
        "profile_sha256": hash_file(profile),
        "model_hash": hash_model(task.model()),
        "one_shot": layers.provenance,
        "global": request.joint,
        "recipe": None if training is None else training.to_dict(),
        "seed": request.seed,
        "pipeline_version": pipeline.VERSION,
    }


def _hash_settings(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _prune(
    task: Task, profile: Profile, layers: Database, recipe: Recipe | AutoRecipe | None, settings: dict[str, Any],
    output: Path, progress: Progress,
) -> bool:  # fmt: skip
    """Prune the model unless the folder holds the result of these settings; return whether it ran."""
    inputs = _hash_settings(settings)
    if model_folder.is_unchanged(output, inputs):
        return False
    model_folder.check_writable(output)
    checkpoint = Checkpoint(output.parent / f".{output.name}.{inputs}.training")
    if isinstance(recipe, AutoRecipe):
        recipe = replace(recipe, path=output.parent / f".{output.name}.{inputs}.recipe")
    run = pipeline.PruneSettings(seed=settings["seed"], joint=settings["global"], recipe=recipe)
    progress("reading the model and its data", None, None)
    check_task(task, _list_steps(task, settings["global"], recipe))
    progress("pruning", None, None)
    with _leave_busy_cores():
        result = pipeline.prune_model(task, profile, layers, run, checkpoint=checkpoint, progress=progress)
    trained = {} if result.recipe is None else {"recipe": result.recipe.to_dict()}
    facts = {**_describe_stages(task, result), **settings, **trained, "inputs": inputs}
    model_folder.save_pruned(output, result.model, result.masks, profile, facts, result.quantizations)
    # Checkpoints of earlier recipes go, too.
    for left in list_hidden_siblings(output, r"[0-9a-f]{16}\.(training|recipe)(\.\d+\.\w+\.tmp)?"):
        if left.suffix != ".tmp" or is_left_behind(left):
            left.unlink(missing_ok=True)
    return True


@contextmanager
def _leave_busy_cores() -> Iterator[None]:
    """Let torch have no threads for cores that other programs keep busy.

    Each operation waits for its slowest thread, and one on a busy core takes several times as long as the others.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count_free_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _list_steps(task: Task, joint: bool, recipe: Recipe | AutoRecipe | None) -> list[str]:
    """List what the task is checked for, of `search.check_task.STEPS`."""
    steps = ["copy", "loss"]
    if joint:
        steps.append("layer_gradients")
    if recipe is not None and task.can_train:
        steps.append("training")
    return steps


def _describe_stages(task: Task, result: PruneResult) -> dict[str, Any]:
    """Return what the manifest says of the scores and of each stage."""
    return {
        "task": task.name,
        "score_name": task.score_name,
        "score_dense": result.stages[0].score,
        "score_pruned": result.selected.score,
        "method": result.selected.name,
        "stages": [
            {"name": stage.name, "score": None if math.isnan(stage.score) else stage.score, "loss": stage.loss}
            | ({"training_flop": dict(stage.training_flop)} if stage.training_flop else {})
            | ({"fresh_loss": stage.fresh_loss} if stage.fresh_loss is not None else {})
            for stage in result.stages
        ],
    }
