"""Profiles of a search as they will be deployed: exported, loaded as users load them, and timed.

A profile is exported once, in a process of its own, to a folder that all its builds share. So the process that is
timed holds nothing but the deployed model. Engines of the same profile and form get the same folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import torch

from latbench.errors import EnvironmentUnusable, LatbenchError, UsageError
from latbench.runners.worker_process import TaskFailed, Worker
from search.export.deployed_engine import Arrays, build_exported
from search.export.export_manifest import is_exported
from search.export.export_model import export_model
from search.export.export_steps import ExportRequest
from search.export.model_to_export import prepare_model
from search.task import load_task
from search.whole_model.model_engines import mask_at_random, prune_from_database
from search.whole_model.sessions import OptionsByLayer, name_profile

EXPORT_SECONDS = 590.0
"""Time limit for one export; whole models are built within ten minutes."""


def build_random_exported(
    reference: str, threads: int, form: str, choices: OptionsByLayer, shared: str
) -> Callable[[], Arrays]:
    """Export the model with random masks to `form`, unless `shared` has it, and build that."""
    return _build(Path(shared), threads, "export_random", (reference, threads, form, choices))


def build_database_exported(
    reference: str, threads: int, form: str, folder: str, model_hash: str, choices: OptionsByLayer, shared: str
) -> Callable[[], Arrays]:
    """Export the model with weights of the layer database to `form`, unless `shared` has it, and build that."""
    return _build(Path(shared), threads, "export_database", (reference, threads, form, folder, model_hash, choices))


def export_random(reference: str, threads: int, form: str, choices: OptionsByLayer, output: str) -> None:
    """Export the model with random masks."""
    _export(mask_at_random(reference, choices), reference, threads, form, output)


def export_database(
    reference: str, threads: int, form: str, folder: str, model_hash: str, choices: OptionsByLayer, output: str
) -> None:
    """Export the model with the weights and masks that the layer database has for these options."""
    _export(prune_from_database(reference, folder, model_hash, choices), reference, threads, form, output)


def _build(shared: Path, threads: int, export: str, arguments: tuple[Any, ...]) -> Callable[[], Arrays]:
    *rest, choices = arguments
    key = hashlib.sha256(repr((export, rest, name_profile(choices))).encode()).hexdigest()[:16]
    output = shared / f"exported-{key}"
    with filelock.FileLock(output.with_suffix(".lock")):
        if not is_exported(output):
            with Worker(threads=threads, name="export") as worker:
                try:
                    worker.call(f"{__name__}:{export}", *arguments, str(output), timeout=EXPORT_SECONDS)
                except TaskFailed as error:
                    raise _explain(error) from error
    return build_exported(str(output), threads)


def _explain(error: TaskFailed) -> Exception:
    """Return the error as the export raised it, if the user can do something about it."""
    for kind in (UsageError, EnvironmentUnusable):
        if error.kind == kind.__name__:
            return kind(error.message)
    return LatbenchError(f"the profile cannot be exported: {error}")


def _export(pruned: tuple[Any, ...], reference: str, threads: int, form: str, output: str) -> None:
    model, choices, _ = pruned
    torch.set_num_threads(threads)
    given = prepare_model(load_task(reference), model, choices, threads)
    export_model(form, lambda: given, Path(output), ExportRequest(only_timed=True))
