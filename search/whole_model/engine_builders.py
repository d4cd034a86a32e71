"""Which builders time the models of a deployment: the dense engines, and the pruned model as it will run.

Builders are named, because other processes call them. Those of a CPU get the number of threads, those of a GPU the
type of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import DENSE_INT8, MODEL_ENGINES, runs_our_kernels
from search.deployment import Deployment
from search.task import Task
from search.whole_model.end_to_end import EngineBuilder
from search.whole_model.int8_engines import can_quantize
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import OptionsByLayer

_WORKER = "pruned"
"""The worker of pruned models: none of them runs while another does."""

_IN_PYTHON, _EXPORTED, _ON_GPU = range(3)

_BUILDERS = {
    (_IN_PYTHON, False): "search.whole_model.model_engines:build_random_pruned",
    (_IN_PYTHON, True): "search.whole_model.model_engines:build_database_pruned",
    (_EXPORTED, False): "search.export.exported_profile:build_random_exported",
    (_EXPORTED, True): "search.export.exported_profile:build_database_exported",
    (_ON_GPU, False): "search.whole_model.gpu_engines:build_random_on_gpu",
    (_ON_GPU, True): "search.whole_model.gpu_engines:build_database_on_gpu",
}
"""Builders of pruned models, by how they run, and whether there is a layer database."""


def build_dense_engines(task: Task, deployment: Deployment) -> dict[str, EngineBuilder]:
    """Return the dense engines that a pruned model is compared with.

    DeepSparse is among them only where the pruned model runs there, and engines that round only where it may round as
    far. On a GPU they are those of a GPU, in the type of the pruned model.
    """
    return {name: _build_dense_engine(name, task, deployment) for name in deployment.rivals}


def build_informative_engine(task: Task, deployment: Deployment) -> dict[str, EngineBuilder]:
    """Return the dense engine in eight bits that is timed although it is no rival; none if it cannot run."""
    name = DENSE_INT8
    if deployment.on_gpu or name in deployment.rivals or not can_quantize():
        return {}
    return {name: _build_dense_engine(name, task, deployment)}


def build_pruned_engines(
    task: Task, deployment: Deployment, profiles: Mapping[str, OptionsByLayer], database: tuple[str, ...] = ()
) -> dict[str, EngineBuilder]:
    """Return an engine for each profile, in the form in which the model will be deployed.

    Its weights come from the layer database with this folder and hash of the model. Without one, masks are random.
    """
    exported = deployment.form != PYTHON
    where = _ON_GPU if deployment.on_gpu else _EXPORTED if exported else _IN_PYTHON
    given = _list_arguments(task, deployment)
    if not deployment.on_gpu:
        given += (deployment.form if exported else deployment.backend,)
    function = _BUILDERS[where, bool(database)]
    return {
        name: EngineBuilder(_WORKER, function, (*given, *database, options), shares=exported)
        for name, options in profiles.items()
    }


def build_free_engine(task: Task, deployment: Deployment, options: OptionsByLayer) -> EngineBuilder | None:
    """Return the pruned model with searched layers that take no time; None where they cannot be made so."""
    if not runs_our_kernels(deployment.backend) or deployment.form != PYTHON:
        return None
    function = "search.whole_model.model_engines:build_layers_free"
    if deployment.on_gpu:
        function = "search.whole_model.gpu_engines:build_free_on_gpu"
    return EngineBuilder(_WORKER, function, (*_list_arguments(task, deployment), options))


def build_folder_engine(task: Task, deployment: Deployment, folder: Path, onnx: Path) -> EngineBuilder:
    """Return the pruned or exported model in `folder`; on DeepSparse it becomes the file `onnx`."""
    where, given = str(folder.resolve()), _list_arguments(task, deployment)
    if deployment.on_gpu:
        return EngineBuilder(_WORKER, "search.whole_model.gpu_engines:build_folder_on_gpu", (*given, where))
    if deployment.form != PYTHON:
        function = "search.export.deployed_engine:build_exported"
        return EngineBuilder(_WORKER, function, (where, deployment.threads))
    function = "search.whole_model.model_engines:build_folder_pruned"
    return EngineBuilder(_WORKER, function, (*given, deployment.backend, where, str(onnx.resolve())))


def name_score_call(task: Task, deployment: Deployment, folder: Path) -> tuple[str, tuple[Any, ...]]:
    """Return the function that scores the dense model and the one in `folder`, as a text, and its arguments."""
    where, given = str(folder.resolve()), _list_arguments(task, deployment)
    if deployment.on_gpu:
        return "search.whole_model.gpu_engines:score_on_gpu", (*given, where)
    if deployment.form != PYTHON:
        return "search.export.deployed_engine:score_exported", (*given, where)
    return "search.whole_model.model_engines:score_models", (*given, deployment.backend, where)


def _build_dense_engine(name: str, task: Task, deployment: Deployment) -> EngineBuilder:
    arguments = _list_arguments(task, deployment)
    return EngineBuilder(name, DENSE_ENGINES[name], arguments, shares=MODEL_ENGINES[name].shares_export)


def _list_arguments(task: Task, deployment: Deployment) -> tuple[Any, ...]:
    """Return the first arguments of every builder of this deployment's device."""
    return task.reference, deployment.model_type if deployment.on_gpu else deployment.threads
