"""A task: the model to prune, its data, its loss and score, and the inputs that are timed.

A user writes an object or a module with these members (a batch is whatever `loss` accepts):

    model() -> torch.nn.Module             a fresh float32 model in eval mode, with its trained weights
    example() -> tuple | dict              the inputs that are timed: positional arguments, or keywords
    calibration() -> list[batch]           data for layer errors, reconstruction and the search's loss
    loss(model, batch) -> torch.Tensor     a scalar
    score(model) -> float                  on held-out data, higher is better
    train_batches(rng) -> iterator         optional: batches for fine-tuning, drawn with a numpy Generator
    limits: dict                           optional: tied, fixed, excluded layers: `search.problem.limits`
    excluded: tuple[str, ...]              optional: the limits' `excluded` alone
    deploy_device, deploy_dtype: str       optional: "cuda", and "float16" or "bfloat16", for a model on a GPU
    name, score_name: str                  optional: names for reports

`example()` returns a tuple of the model's positional arguments, or a dict of its keywords. Its tensors may lie in
lists, tuples and dicts, beside None, numbers and flags. The first dimension of the first tensor that has one is the
batch. model() and the inputs are on the CPU in float32 also where they are
deployed on a GPU: latbench moves them.

`load_task` finds it and returns a `Task`, which checks what the user's code returns and reports what it raises.
`search.check_task` tries the whole task before anything is timed. The model must be copyable, and have a state of
tensors alone. torch.compile is removed from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from latbench.base.engine_registry import MODEL_TYPES_ON_GPU
from latbench.base.files import hash_file
from latbench.base.own_packages import share_names
from latbench.errors import BadData, UsageError
from search.problem.limits import Limits, parse_limits
from search.user_code import call_user_code, describe_error

if TYPE_CHECKING:
    import numpy as np
    import torch

    from search.example_inputs import ExampleInputs

_LOG = logging.getLogger(__name__)

REQUIRED = {"model": (), "example": (), "calibration": (), "loss": ("model", "batch"), "score": ("model",)}
"""The functions that every task has, with their arguments."""

OPTIONAL = {"train_batches": ("rng",)}
"""Functions that a task may have, with their arguments."""

DEVICES, DTYPES = ("cpu", "cuda"), ("", *MODEL_TYPES_ON_GPU)
"""Where a task may be deployed, and its types on a GPU; an empty one is the usual one, float16."""

Result = TypeVar("Result")

_END: Any = object()
"""Marks the end of the training batches."""


class CalibratedCalls(Protocol):
    """Batches, and a call of a model on each: enough to measure the inputs of its layers. A task has both."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    def calibration(self) -> Sequence[Any]:
        """Return the batches."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return a scalar, after calling the model on a batch."""


@dataclass(frozen=True)
class Task:
    """A user's task. Every method checks what the user's code returns.

    Attributes
    ----------
    reference
        The name by which another process loads the task.
    name, score_name
        Names for reports.
    implementation
        The user's object or module.
    limits
        Limits of the layers.
    source
        Hash of the file that defines the task; empty if there is none.
    deploy_device, deploy_dtype
        Where the pruned model runs by default, one of DEVICES, and its type on a GPU, one of DTYPES.
    """

    reference: str
    name: str
    score_name: str
    implementation: Any
    limits: Limits = field(default_factory=Limits)
    source: str = ""
    deploy_device: str = "cpu"
    deploy_dtype: str = ""

    def model(self) -> torch.nn.Module:
        """Return a fresh model in eval mode, without torch.compile, with plain weights in its layers.

        Weights that are computed at each call (weight norm, parametrizations, torch's own pruning) become what they
        are in eval mode: kernels read them, and pruning writes them. Raises BadData if a weight is missing or not
        finite, if no weight is float32, or if the model has state that is no tensor.
        """
        import torch

        from search.model_weights import check_weights, remove_compilation
        from sparse_kernels.prunable_layers import bake_weights

        model = self._call("model", self.implementation.model)
        if not isinstance(model, torch.nn.Module):
            found = f"the class {model.__name__}" if isinstance(model, type) else _kind(model)
            raise UsageError(f"task {self.name}: model() returned {found}, not an object of torch.nn.Module")
        model = remove_compilation(model)
        call_user_code(f"task {self.name}: eval() of its model", model.eval)
        call_user_code(f"task {self.name}: the weights of its model", lambda: bake_weights(model))
        call_user_code(f"task {self.name}: state_dict() of its model", model.state_dict)
        check_weights(model, self.name)
        return model

    def example(self) -> ExampleInputs:
        """Return the inputs that are timed. Raises UsageError if they have no batch, or are not on the CPU."""
        from search.example_inputs import ExampleInputs

        inputs = self._call("example", self.implementation.example)
        if isinstance(inputs, ExampleInputs):  # of a task that wraps another
            example = inputs
        elif isinstance(inputs, tuple):
            example = ExampleInputs(inputs)
        elif isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
            example = ExampleInputs(keywords={name: inputs[name] for name in inputs})
        else:
            raise UsageError(
                f"task {self.name}: example() must return a tuple of the model's arguments or a dict of its "
                f"keywords, not {_kind(inputs)}; for one argument x, return (x,)"
            )
        if devices := {str(x.device) for x in example.tensors()} - {"cpu"}:
            raise UsageError(f"task {self.name}: example() returned a tensor on {devices.pop()}; return x.cpu()")
        if not (found := example.find_batch()) or not found[1]:
            raise UsageError(f"task {self.name}: example() returned no batch: give it a tensor with the batch first")
        return example

    def run(self, model: torch.nn.Module, example: ExampleInputs) -> Any:
        """Return what the model returns for these inputs. Raises UsageError with what it raises."""
        what = f"task {self.name}: the model, called with the inputs of example(),"
        return call_user_code(what, lambda: example.call(model))

    def calibration(self) -> list[Any]:
        """Return the calibration batches, at least one."""
        import torch

        found = self._call("calibration", self.implementation.calibration)
        if torch.is_tensor(found) or isinstance(found, Mapping | str | bytes) or not isinstance(found, Iterable):
            raise UsageError(f"task {self.name}: calibration() must return a list of batches, not {_kind(found)}")
        batches = self._call("calibration", lambda: list(found))
        if not batches:
            raise UsageError(f"task {self.name}: calibration() returned no batch")
        return batches

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of one batch, a scalar tensor."""
        import torch

        loss = self._call("loss", lambda: self.implementation.loss(model, batch))
        if not torch.is_tensor(loss) or loss.numel() != 1:
            advice = "return its mean" if torch.is_tensor(loss) else "item() and float() drop its gradients"
            raise UsageError(f"task {self.name}: loss() must return a scalar tensor, not {_kind(loss)}; {advice}")
        if loss.is_meta:
            raise UsageError(f"task {self.name}: loss() returned a tensor on the meta device, which has no value")
        return loss

    def score(self, model: torch.nn.Module) -> float:
        """Return the score on held-out data; higher is better. Raises BadData where it is not finite."""
        score = self._compute_score(model)
        if not math.isfinite(score):
            raise BadData(f"task {self.name}: score() returned {score}")
        return score

    def score_or_nan(self, model: torch.nn.Module) -> float:
        """Return the score; NaN where it is not finite, as some are of a model that answers all alike."""
        score = self._compute_score(model)
        return score if math.isfinite(score) else math.nan

    def _compute_score(self, model: torch.nn.Module) -> float:
        import torch

        with torch.no_grad():
            found = self._call("score", lambda: self.implementation.score(model))
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"task {self.name}: score() must return one number, not {_kind(found)}") from error

    @property
    def can_train(self) -> bool:
        """Whether the task has training batches."""
        return callable(getattr(self.implementation, "train_batches", None))

    def train_batches(self, rng: np.random.Generator) -> Iterator[Any]:
        """Return training batches drawn with `rng`. Raises UsageError if the task has none."""
        if not self.can_train:
            raise UsageError(f"task {self.name} has no train_batches(rng): fine-tuning needs training data")
        return self._draw(rng)

    def _draw(self, rng: np.random.Generator) -> Iterator[Any]:
        batches = self._call("train_batches", lambda: iter(self.implementation.train_batches(rng)))
        while (batch := self._call("train_batches", lambda: next(batches, _END))) is not _END:
            yield batch

    def _call(self, member: str, function: Callable[[], Result]) -> Result:
        return call_user_code(f"task {self.name}: {member}()", function)


def load_task(reference: str) -> Task:
    """Return the task of this name.

    Parameters
    ----------
    reference
        A bundled task, a Python file, `package.module` or `package.module:attribute`.

    Raises
    ------
    UsageError
        There is no such task, its import fails, or it lacks a member.
    """
    task = find_task(reference)
    if faults := list_interface_faults(task.implementation):
        raise UsageError(f"task {reference} {' and '.join(faults.values())}")
    return task


def find_task(reference: str) -> Task:
    """Return the task of this name, whatever functions it lacks. Raises as `load_task` does."""
    check_task_file(reference)
    _LOG.info(f"reading the task {reference}")
    source, _, attribute = reference.partition(":")
    if source in list_bundled_tasks():
        module = importlib.import_module(f"search.tasks.{source}")
    elif source.endswith(".py"):
        source = str(Path(source).resolve())
        module = _report_import(source, lambda: _import_file(Path(source)))
    else:
        module = _report_import(source, lambda: _import_module(source))
    implementation = getattr(module, attribute, None) if attribute else module
    if implementation is None:
        raise UsageError(f"{source} has no {attribute!r} to be a task")
    return Task(
        reference=f"{source}:{attribute}" if attribute else source,
        name=str(getattr(implementation, "name", attribute or Path(source).stem.rpartition(".")[2])),
        score_name=str(getattr(implementation, "score_name", "score")),
        implementation=implementation,
        limits=_read_limits(implementation, reference),
        source=hash_file(Path(module.__file__)) if module.__file__ else "",
        deploy_device=_read_choice(implementation, "deploy_device", DEVICES, reference),
        deploy_dtype=_read_choice(implementation, "deploy_dtype", DTYPES, reference),
    )


def check_task_file(reference: str) -> None:
    """Raise UsageError if the reference names a file that does not exist."""
    source = reference.partition(":")[0]
    if source.endswith(".py") and not Path(source).is_file():
        raise UsageError(
            f"there is no task file {Path(source).resolve()}: `latbench new {source}` writes one to start from"
        )


def list_interface_faults(implementation: Any) -> dict[str, str]:
    """Return what is wrong with the functions of a task by name: those that lack, or take other arguments."""
    faults = {}
    missing = [name for name in REQUIRED if not callable(getattr(implementation, name, None))]
    if missing:
        calls = [f"{name}({', '.join(REQUIRED[name])})" for name in missing]
        faults[missing[0]] = f"lacks {', '.join(calls)}; `latbench new FILE.py` writes a file with all of them"
    for name, arguments in (REQUIRED | OPTIONAL).items():
        function = getattr(implementation, name, None)
        if not callable(function):
            continue
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of some functions that are not written in Python
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            shown = str(signature).partition(" ->")[0]
            faults[name] = f"has {name}{shown}, and it is called as {name}({', '.join(arguments)})"
    return faults


def _read_limits(implementation: Any, reference: str) -> Limits:
    """Return the limits of the task's layers, `excluded` among them."""
    excluded = {"excluded": getattr(implementation, "excluded", ())}
    own = parse_limits(getattr(implementation, "limits", {}), f"task {reference}: limits")
    return parse_limits(excluded, f"task {reference}") + own


def _read_choice(implementation: Any, name: str, known: Sequence[str], reference: str) -> str:
    """Return an attribute of a task that is one of a few texts, such as cuda; torch's own objects count as theirs."""
    given = getattr(implementation, name, known[0])
    text = str(given).removeprefix("torch.")
    if text not in known:
        raise UsageError(f"task {reference}: {name} is {' or '.join(filter(None, known))}, not {given!r}")
    return text


def list_bundled_tasks() -> list[str]:
    """Return the names of the tasks that come with latbench."""
    package = importlib.import_module("search.tasks")
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def _import_file(path: Path) -> ModuleType:
    _make_importable(path.parent)
    name = f"latbench_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled and its dataclasses resolved
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"there is no task {name!r}; bundled tasks: {', '.join(list_bundled_tasks())}; your own task: a file "
                "(my_task.py), a module (package.module) or an attribute of it (package.module:attribute)"
            ) from error
        raise


def _make_importable(folder: Path) -> None:
    """Let a task import the files beside it, as Python lets a script, also those with names of our packages."""
    share_names(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _report_import(source: str, function: Callable[[], ModuleType]) -> ModuleType:
    """Return the imported module; turn what it raises into a UsageError that names the task."""
    try:
        return function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"the import of task {source} raised {describe_error(error)}") from error


def _kind(value: Any) -> str:
    """Return what a value is, as a noun with its article: a dict, a Tensor of shape (8, 4)."""
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if type(value).__name__ == "Tensor" else ""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{shape}"
