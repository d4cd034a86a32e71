"""List every fault of a task that can be found in seconds, with its place, and facts about the model.

`search.check_task` raises the first fault that a command's own steps would meet. Here a step is left out if one that
it needs failed. Conversion and scores run in another process, which also shows whether it gets the same model and
data.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from latbench.errors import LatbenchError, UsageError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from latbench.workloads.workload import trace_model
from search.artifacts.layer_database import hash_model
from search.check_task import (
    SCORE_SECONDS,
    TIMEOUT_SECONDS,
    check_copy,
    check_example,
    check_layer_gradients,
    check_training,
    score_briefly,
)
from search.example_inputs import ExampleInputs
from search.loss.evaluation_conditions import find_conditions
from search.pruning.one_shot.fill_database import hash_pruning_inputs
from search.task import OPTIONAL, REQUIRED, Task, find_task, list_interface_faults
from search.user_code import call_user_code
from search.whole_model.convert_model import ForwardAlone, convert_for_example
from sparse_kernels.convert import LayerPattern
from sparse_kernels.denormal_weights import count_denormals
from sparse_kernels.patterns import Dense
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix
from sparse_kernels.shapes import Shape

Result = TypeVar("Result")

SLOW_SCORE_SECONDS = 5.0
"""A score that takes longer is noted, and not computed once more for a damaged model."""

SAME_LOSS = 1e-4
"""Largest relative difference of two losses of the same batch: sums on several threads stay far below it."""

UNTRAINED = 0.9
"""A trained model has less than this share of the loss that a model without weights has."""

SMALL_SHARE = 0.5
"""Below this share of the multiplications, pruning gains little, and that is noted."""


@dataclass(frozen=True)
class TaskFault:
    """One fault of a task: the sentence, and the place of the function that it is about ("" if there is none)."""

    place: str
    sentence: str


@dataclass
class TaskFindings:
    """What was found out about a task. A value is None if the step before it failed.

    Attributes
    ----------
    functions
        The functions that were found.
    deploy_device
        Where the pruned model will run: "cpu" or "cuda".
    kind, parameters
        Class of the model, and the number of its parameters.
    inputs, batch_place, batch
        Shape and type of each tensor of the example by its place; where the batch is, and its size.
    batches, loss
        Number of calibration batches, and the loss of the dense model on the first.
    layers, left_out
        Shapes of the layers that can be pruned, and reasons why others cannot, by name.
    share
        Share of the model's FLOP that is in layers that can be pruned.
    score, score_seconds
        Score of the dense model and its time; the score is None if it was ended.
    faults, notes
        What must be corrected, and what should be looked at.
    """

    functions: list[str] = field(default_factory=list)
    deploy_device: str | None = None
    kind: str | None = None
    parameters: int | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    batch_place: str | None = None
    batch: int | None = None
    batches: int | None = None
    loss: float | None = None
    layers: dict[str, Shape] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    share: float | None = None
    score: float | None = None
    score_seconds: float | None = None
    faults: list[TaskFault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def validate_task(
    reference: str, *, threads: int = 1, progress: Callable[[str], None] = lambda step: None
) -> TaskFindings:
    """Return the facts and the faults of a task.

    Parameters
    ----------
    reference
        The task, as `search.task.load_task` takes it.
    threads
        Threads of the process that runs the converted model.
    progress
        Called with what is done now.

    Returns
    -------
    TaskFindings
        What was found. Nothing is raised for what the task's code does.
    """
    progress("importing the task")
    try:
        task = find_task(reference)
    except LatbenchError as error:
        return TaskFindings(faults=[TaskFault("", str(error))])
    steps = _Steps(task)
    progress("building the model twice")
    steps.try_model()
    steps.try_example()
    progress("computing losses")
    steps.try_calibration()
    if steps.model is not None and steps.example is not None and steps.found.layers:
        progress("converting the model and scoring it")
        steps.try_other_process(threads)
    return steps.found


class _Steps:
    """The steps of a validation. Each notes its facts and faults in `found`, and leaves None where it failed."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.found = TaskFindings()
        self.model: nn.Module | None = None
        self.example: ExampleInputs | None = None
        self.hash_of_data: str | None = None
        names = [name for name in (*REQUIRED, *OPTIONAL) if callable(getattr(task.implementation, name, None))]
        self.found.functions, self.found.deploy_device = names, task.deploy_device
        faults = list_interface_faults(task.implementation)
        self.usable = set(names) - set(faults)
        for member, sentence in faults.items():
            self.add(member, f"the task {sentence}")

    def add(self, member: str, sentence: str) -> None:
        """Note a fault of a member of the task."""
        sentence = " ".join(sentence.split()).removeprefix(f"task {self.task.name}: ")
        begins = sentence.partition("()")[0]
        member = begins if begins in self.found.functions else member
        fault = TaskFault(_find_definition(self.task.implementation, member), sentence)
        if sentence not in {known.sentence for known in self.found.faults}:
            self.found.faults.append(fault)

    def attempt(self, member: str, function: Callable[[], Result]) -> Result | None:
        """Return what the function returns; note what it raises as a fault of the member, and return None."""
        try:
            return function()
        except LatbenchError as error:
            self.add(member, str(error))
            return None

    def try_model(self) -> None:
        """Build the model."""
        if "model" not in self.usable:
            return
        self.model = self.attempt("model", self.task.model)
        if self.model is not None:
            self.found.kind = type(self.model).__name__
            self.found.parameters = sum(parameter.numel() for parameter in self.model.parameters())
            self.found.notes += _note_denormals(self.model)

    def try_example(self) -> None:
        """Run the model on the example twice, copy it, and list its layers."""
        if "example" not in self.usable:
            return
        task, found = self.task, self.found
        self.example = example = self.attempt("example", task.example)
        if example is None:
            return
        found.inputs = example.describe_tensors()
        place = example.find_batch()
        assert place is not None  # by Task.example
        found.batch_place, found.batch = place
        if (model := self.model) is None:
            return
        before = len(found.faults)
        self.attempt("example", lambda: check_example(task, model, example))
        if len(found.faults) > before:
            self.example = None  # nothing that runs the model can be tried
            return
        self.attempt("model", lambda: check_copy(task, model, example))
        if not _gives_same_result(model, example):
            self.add(
                "model",
                "the model gives another result for the same inputs at its second call, as with functional dropout "
                "that ignores eval mode; write dropout(x, p, self.training)",
            )
        self._list_layers(model, example)

    def _list_layers(self, model: nn.Module, example: ExampleInputs) -> None:
        """Note the layers that can be pruned, and their share of the FLOP."""
        traced, skipped = trace_model(model, example.arguments, keywords=example.keywords)
        names = [layer.name for layer in traced.layers]
        limits, others = self.task.limits, [name for name, _ in skipped]
        included = self.attempt("excluded", lambda: limits.select_included(names, others))
        shapes = {layer.name: layer.shape for layer in traced.layers}
        self.found.layers = {name: shapes[name] for name in (names if included is None else included)}
        self.found.left_out = dict(skipped) | dict.fromkeys(
            [name for name in names if name not in self.found.layers], "the task excludes it"
        )
        if not self.found.layers:
            self.add("model", "the model has no layer that can be pruned; the list of its layers says why")
            return
        flop = sum(shape.flop for shape in self.found.layers.values())
        share = self.found.share = flop / max(_count_flop(model, example), flop)
        if share < SMALL_SHARE:
            self.found.notes.append(
                f"Only {share:.0%} of the multiplications are in layers that can be pruned, so even free layers make "
                f"the model at most about {1 / (1 - share):.1f} times as fast."
            )

    def try_calibration(self) -> None:
        """Draw the calibration batches twice, and compute losses as a search and training do."""
        if "calibration" not in self.usable:
            return
        task, model = self.task, self.model
        batches = self.attempt("calibration", task.calibration)
        if batches is None:
            return
        self.found.batches = len(batches)
        drawn_again = self._draw_again()
        if self.example is not None:
            self.found.notes += _note_sizes(self.example, batches[0])
        if model is None or "loss" not in self.usable:
            return
        before = len(self.found.faults)
        self.attempt("loss", lambda: find_conditions(task, model, batches))
        if len(self.found.faults) > before:
            if not isinstance(batches[0], tuple | list | dict) and len(batches) <= 3:
                self.found.notes.append(
                    f"calibration() returned {len(batches)} batches, and the first is a {type(batches[0]).__name__}. "
                    "If these are the parts of one batch, return a list of batches: [(x, y)]."
                )
            return
        with torch.no_grad():
            first, second = (float(task.loss(model, batches[0])) for _ in range(2))
        self.found.loss = first
        if not math.isclose(first, second, rel_tol=SAME_LOSS, abs_tol=1e-9):
            self.add(
                "loss",
                f"loss() of the same model and batch was {first:.6g}, then {second:.6g}; losses of a search are "
                "compared, so leave random numbers out",
            )
        if drawn_again:
            self.attempt("loss", lambda: check_layer_gradients(task, model))
        if "train_batches" in self.usable:
            self.attempt("train_batches", lambda: check_training(task, model))

    def _draw_again(self) -> bool:
        """Note whether the calibration data are the same when they are drawn again; return whether there are any."""
        try:
            hashes = [hash_pruning_inputs(self.task) for _ in range(2)]
        except UsageError as error:
            if "returned no batch" not in str(error):
                self.add("calibration", str(error))
                return True
            self.add(
                "calibration",
                "calibration() returned no batch at its second call, as an iterator does that is used up; return a "
                "list of batches",
            )
            return False
        self.hash_of_data = hashes[0]
        if hashes[0] != hashes[1]:
            self.add("calibration", f"calibration() returned other batches at its second call{_SEEDED}")
        return True

    def try_other_process(self, threads: int) -> None:
        """Build, convert and score the model in another process."""
        assert self.model is not None
        with Worker(threads=threads, name="check") as worker:
            try:
                seen = worker.call(
                    "search.validate_task:examine_task",
                    self.task.reference,
                    list(self.found.layers),
                    self.found.batches is not None and "loss" in self.usable,
                    "score" in self.usable,
                    timeout=TIMEOUT_SECONDS,
                )
            except (WorkerDied, TaskFailed) as error:
                self.add("score", f"another process, which converts and scores the model, failed: {error}")
                return
        for member, sentence in seen["faults"]:
            self.add(member, sentence)
        others = {fault.sentence for fault in self.found.faults}
        if seen["model"] not in (None, hash_model(self.model)) and not any("other weights" in it for it in others):
            self.add("model", f"model() returned other weights in another process{_SEEDED}")
        same = self.hash_of_data is None or seen["data"] in (None, self.hash_of_data)
        if not same and not any("other batches" in it for it in others):
            self.add("calibration", f"calibration() returned other batches in another process{_SEEDED}")
        self.found.score, self.found.score_seconds = seen["score"], seen["seconds"]
        self.found.notes += _note_quality(self.found, seen)


_SEEDED = "; every process must get the same, so load it from a file, or draw it with a generator of a fixed seed"


def _note_quality(found: TaskFindings, seen: dict[str, Any]) -> list[str]:
    """Return what the scores and losses of the dense model, and of one whose layers are zero, say about the task."""
    notes = []
    score, damaged, loss = seen["score"], seen["damaged_score"], seen["damaged_loss"]
    if found.loss is not None and loss is not None and 0 < loss * UNTRAINED <= found.loss:
        notes.append(
            f"The loss is {found.loss:.4g}, and it is {loss:.4g} with zeros in all layers. Does model() load the "
            "trained weights?"
        )
    elif score is not None and damaged is not None and damaged > score:
        notes.append(
            f"score() is {score:.4g}, and it is {damaged:.4g} with zeros in all layers. Is a higher score better? "
            "If not, return its negative."
        )
    if seen["seconds"] is not None and seen["seconds"] > SLOW_SCORE_SECONDS:
        more = "more than " if score is None else ""
        notes.append(
            f"score() takes {more}{seen['seconds']:.0f} s. It runs several times in prune and verify: score fewer "
            "samples if that is too long."
        )
    return notes


def _note_denormals(model: nn.Module) -> list[str]:
    """Return a note if the model has denormal weights."""
    counts = count_denormals(model)
    if not counts:
        return []
    others = f" and {len(counts) - 1} more" if len(counts) > 1 else ""
    return [
        f"{sum(counts.values()):,} weights are below 1.2e-38, in {next(iter(counts))}{others}. Many processors "
        "multiply such numbers far more slowly, so dense engines may take long. Let model() set them to zero, as "
        "converted models do."
    ]


def _note_sizes(example: ExampleInputs, batch: Any) -> list[str]:
    """Return a note if the first tensors of the example and of a calibration batch differ in more than the batch."""
    timed, given = (inputs.tensors() for inputs in (example, ExampleInputs((batch,))))
    if not given or timed[0].dtype != given[0].dtype:
        return []
    sizes = [tuple(tensors[0].shape) for tensors in (timed, given)]
    alike = sizes[0][1:] == sizes[1][1:] if timed[0].is_floating_point() else len(sizes[0]) == len(sizes[1])
    if alike and sizes[0]:
        return []
    return [
        f"The first tensor of example() has the shape {sizes[0]}, and that of a calibration batch {sizes[1]}. "
        "Usually only the first dimension differs, which is the batch."
    ]


def examine_task(reference: str, layers: Sequence[str], has_loss: bool, has_score: bool) -> dict[str, Any]:
    """Build a task's model here, convert it, and score it as it is, converted, and with zeros in its layers.

    Returns hashes of the model and of the calibration data, scores and losses by name; each is None if it failed. The
    faults are pairs of a member of the task and a sentence.
    """
    task = find_task(reference)
    faults: list[tuple[str, str]] = []
    seen: dict[str, Any] = {"faults": faults} | dict.fromkeys(
        ("model", "data", "score", "seconds", "damaged_score", "damaged_loss")
    )
    model, example = task.model(), task.example()
    seen["model"] = hash_model(model)
    if has_loss:
        seen["data"] = _try(faults, "calibration", lambda: hash_pruning_inputs(task))
    converted = None
    try:
        converted = convert_for_example(model, dict.fromkeys(layers, LayerPattern(Dense())), example)
    except ValueError as error:
        faults.append(("model", f"the model cannot be converted to latbench's kernels: {error}"))
    if converted is not None and task.deploy_device != "cpu":
        converted = ForwardAlone(converted)
    if has_score:
        start = time.monotonic()
        seen["score"] = _try(faults, "score", lambda: score_briefly(task, model))
        seen["seconds"] = time.monotonic() - start
        if converted is not None and not any(member == "score" for member, _ in faults):
            why = "with a converted model, which keeps its forward alone; let score() only call it"
            limit = SCORE_SECONDS if seen["score"] is not None else 0.0
            _try(faults, "score", lambda: score_briefly(task, converted, limit), f", {why}")
    if not faults:
        for name in layers:
            layer = model.get_submodule(name)
            set_weight_matrix(layer, torch.zeros_like(weight_matrix(layer)))
        if seen["score"] is not None and seen["seconds"] < SLOW_SCORE_SECONDS:
            seen["damaged_score"] = _try([], "score", lambda: score_briefly(task, model))
        if has_loss:
            seen["damaged_loss"] = _try([], "loss", lambda: _first_loss(task, model))
    return seen


def _first_loss(task: Task, model: nn.Module) -> float:
    with torch.no_grad():
        return float(task.loss(model, task.calibration()[0]))


def _try(
    faults: list[tuple[str, str]], member: str, function: Callable[[], Result], addition: str = ""
) -> Result | None:
    """Return what the function returns; add what it raises to the faults of the member, and return None."""
    try:
        return function()
    except LatbenchError as error:
        faults.append((member, f"{error}{addition}"))
        return None


def _find_definition(implementation: Any, member: str) -> str:
    """Return where a function of the task is defined, as file:line; else the file, or "" if there is none."""
    code = getattr(inspect.unwrap(getattr(implementation, member, None) or len), "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    file = getattr(implementation, "__file__", None)
    return Path(file).name if file else ""


def _gives_same_result(model: nn.Module, example: ExampleInputs) -> bool:
    """Return whether the model gives the same result for the same inputs twice, but for roundings."""
    with torch.no_grad():
        first, second = (
            call_user_code("the model", lambda: ExampleInputs((example.call(model),)).tensors()) for _ in range(2)
        )
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _count_flop(model: nn.Module, example: ExampleInputs) -> int:
    """Return the FLOP of all matrix products and convolutions in one call of the model."""
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention_flop}
    # With gradients, torch's encoder layers call their parts one by one, where each is seen.
    with torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=attention) as counter:
        example.call(model)
    return int(counter.get_total_flops())


def _count_attention_flop(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOP of softmax(q @ k.T) @ v, from shapes (..., tokens, features); torch counts it on GPUs alone."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
