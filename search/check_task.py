"""Check a task in seconds, before anything is timed: try each of its members as later steps will use it.

Each step needs other members. `latbench trace` needs the example alone, and training needs a gradient. What the
user's code raises becomes one sentence with the exception and its place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from latbench.errors import BadData, LatbenchError, UsageError
from latbench.runners.worker_process import TaskFailed, Worker
from search.artifacts.layer_database import hash_model
from search.example_inputs import ExampleInputs
from search.loss.evaluation_conditions import EvaluationConditions, find_conditions
from search.pruning.forward_hooks import get_product, register_forward_hooks
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from search.user_code import call_user_code, describe_error
from search.whole_model.convert_model import ForwardAlone, convert_for_example
from sparse_kernels.convert import LayerPattern
from sparse_kernels.patterns import Dense
from sparse_kernels.prunable_layers import is_layer

STEPS = ("example", "copy", "loss", "layer_gradients", "training", "score")
"""What `check_task` can try, in its order.

    example           the model runs on the inputs of example()
    copy              it can be copied, runs in inference mode, and model() returns the same weights again
    loss              the loss of the dense model is finite; the search's conditions
    layer_gradients   outputs of layers in loss() have a gradient, as joint tuning needs
    training          the loss of a training batch has a gradient, as a recipe needs
    score             score() takes a converted model
"""

SCORE_SECONDS = 10.0
"""After this time, `score()` is ended at its next call of the model: all of it may take minutes."""


TIMEOUT_SECONDS = 3600.0
"""Time limit of all that: `score()` may read its data for long before it calls the model."""


@dataclass(frozen=True)
class TaskFacts:
    """What was found out about a task. Facts of steps that were not asked for are None.

    Attributes
    ----------
    example
        The inputs that are timed.
    batch_place, batch
        Where the batch was found, such as "argument 1" or "keyword input_ids", and its size.
    batches
        Number of calibration batches.
    conditions
        The conditions under which a search evaluates losses.
    """

    example: ExampleInputs
    batch_place: str
    batch: int
    batches: int | None = None
    conditions: EvaluationConditions | None = None


def check_task(
    task: Task, steps: Collection[str] = STEPS, *, threads: int = 1, by_forward: bool = False
) -> TaskFacts:
    """Check a task.

    Parameters
    ----------
    task
        The task.
    steps
        Some of STEPS; "example" is always checked.
    threads
        Threads of the process that scores a converted model.
    by_forward
        Whether `score()` may only call the model, as it is where the model runs on a GPU.

    Returns
    -------
    TaskFacts
        What was found out.

    Raises
    ------
    UsageError
        A member of the task raises an exception, or returns what cannot be used.
    BadData
        A weight is missing, not finite or not float32.
    """
    model, example = task.model(), task.example()
    check_example(task, model, example)
    found = example.find_batch()
    assert found is not None  # by Task.example
    batches = conditions = None
    if "copy" in steps:
        check_copy(task, model, example)
    if "loss" in steps:
        calibration = task.calibration()
        batches, conditions = len(calibration), find_conditions(task, model, calibration)
    if "layer_gradients" in steps:
        check_layer_gradients(task, model)
    if "training" in steps:
        check_training(task, model)
    if "score" in steps:
        _check_score_in_worker(task, model, threads, by_forward)
    return TaskFacts(example, *found, batches, conditions)


def check_example(task: Task, model: nn.Module, example: ExampleInputs) -> None:
    """Raise UsageError if the model does not run on the inputs of example()."""
    with torch.no_grad():
        task.run(model, example)


def check_copy(task: Task, model: nn.Module, example: ExampleInputs) -> None:
    """Raise UsageError if the model cannot be copied, or its copy does not run as it is timed, or changes."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        culprit = _find_uncopyable(model)
        raise UsageError(
            f"task {task.name}: its model cannot be copied, which conversion needs: {culprit} raised "
            f"{describe_error(error)}; keep such an object outside of the model, or give its class a __deepcopy__"
        ) from error
    with torch.inference_mode():
        task.run(twin, example)
    again = task.model()
    if _list_addresses(again) & _list_addresses(model):
        raise UsageError(
            f"task {task.name}: model() returned the same weights in memory at its second call, so pruning would "
            "change the dense model too; build a model in each call, or return copy.deepcopy(model)"
        )
    fresh = hash_model(again)
    # A model that ran may differ by what it counts.
    if fresh not in (hash_model(model), hash_model(task.model())):
        raise UsageError(
            f"task {task.name}: model() returned other weights at its second call; load them from a file, or seed "
            "torch's generator in model()"
        )


def _list_addresses(model: nn.Module) -> set[int]:
    """Return the addresses of the weights of all layers that can be pruned."""
    weights = [weight for layer in model.modules() if is_layer(layer) for weight in layer.parameters()]
    return {weight.data_ptr() for weight in weights if weight.numel()}


def _find_uncopyable(model: nn.Module) -> str:
    """Return the attribute that cannot be copied, as the subject of a sentence."""
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - objects of users may raise anything
                return f"attribute {f'{place}.{name}' if place else name} ({type(value).__name__})"
    return "it"


def check_layer_gradients(task: Task, model: nn.Module) -> None:
    """Raise UsageError if no output of a layer has a gradient while `loss()` runs."""
    layers = {name: module for name, module in model.named_modules() if is_layer(module)}
    if not any(parameter.requires_grad for layer in layers.values() for parameter in layer.parameters()):
        return  # nothing is tuned
    found: list[bool] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(get_product(output).requires_grad)

    batch = task.calibration()[0]
    with torch.enable_grad(), register_forward_hooks(model, dict.fromkeys(layers, note)):
        task.loss(model, batch)
    if not any(found):
        reason = "runs without gradients, as under torch.no_grad" if found else "calls no layer of the model"
        raise UsageError(
            f"task {task.name}: loss() {reason}, and the joint tuning of all layers needs gradients; change loss(), "
            "or use `latbench prune --no-global`"
        )


def check_training(task: Task, model: nn.Module) -> None:
    """Raise UsageError if a training batch has no loss with a gradient, in training mode."""
    twin = task.model()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        batch = next(task.train_batches(np.random.default_rng(0)), None)
        if batch is None:
            raise UsageError(f"task {task.name}: train_batches() returned no batch")
        twin.train()
        loss = task.loss(twin, batch)
        if any(parameter.requires_grad for parameter in twin.parameters()) and not loss.requires_grad:
            raise UsageError(
                f"task {task.name}: loss() returned a tensor without a gradient, and training needs one; remove "
                "torch.no_grad, detach() or item() from loss(), or leave --recipe out"
            )
        if loss.requires_grad:
            call_user_code(f"task {task.name}: the gradient of loss()", loss.backward)


def _check_score_in_worker(task: Task, model: nn.Module, threads: int, by_forward: bool) -> None:
    """Raise what `check_score` raises, from a process of its own: threads of kernels would disturb later timings."""
    layers = list(list_prunable_layers(task, model))
    with Worker(threads=threads, name="check") as worker:
        try:
            worker.call("search.check_task:check_score", task.reference, layers, by_forward, timeout=TIMEOUT_SECONDS)
        except TaskFailed as error:
            kinds: dict[str, type[LatbenchError]] = {"UsageError": UsageError, "BadData": BadData}
            raise kinds.get(error.kind, LatbenchError)(error.message) from error


def check_score(reference: str, layers: Sequence[str], by_forward: bool = False) -> None:
    """Score the task's model with these layers on latbench's kernels, dense; raise UsageError if that fails."""
    task = load_task(reference)
    model, example = task.model(), task.example()
    try:
        converted = convert_for_example(model, dict.fromkeys(layers, LayerPattern(Dense())), example)
    except ValueError as error:
        raise UsageError(f"task {task.name}: its model cannot be converted to latbench's kernels: {error}") from error
    try:
        score_briefly(task, ForwardAlone(converted) if by_forward else converted)
    except LatbenchError as error:
        score_briefly(task, model)  # a score that fails for the dense model too is not the conversion's fault
        raise UsageError(
            f"{error}; this happened with a converted model, which keeps its forward alone: let score() only call it"
        ) from error


class _LongEnough(BaseException):
    """Ends a score that works so far; no `except Exception` of a user stops it."""


def score_briefly(task: Task, model: nn.Module, most_seconds: float | None = None) -> float | None:
    """Return the score of a model; None if that was ended: at the first call of the model after the time limit.

    most_seconds: the time limit, by default SCORE_SECONDS.
    """
    end = time.monotonic() + (SCORE_SECONDS if most_seconds is None else most_seconds)

    def stop_when_late(*_: object) -> None:
        if time.monotonic() > end:
            raise _LongEnough

    handle = model.register_forward_hook(stop_when_late)
    try:
        return task.score(model)
    except _LongEnough:
        return None
    finally:
        handle.remove()
