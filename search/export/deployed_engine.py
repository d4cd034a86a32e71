"""An exported model as an engine that is timed beside dense ones, and as a module that a task scores.

Both call it as users do, through `lb.load`, with arrays. Both run in a worker process of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from latbench.errors import UsageError
from search.example_inputs import ExampleInputs
from search.export.expected_results import read_expected
from search.export.load_model import load_model
from search.task import Task, load_task
from sparse_kernels.oracle import WrongResult

Arrays = list[NDArray[Any]]


def build_exported(folder: str, threads: int) -> Callable[[], Arrays]:
    """Load an exported model; return a call of it on the inputs that it was exported with.

    Raises WrongResult unless the results are those of the pruned model.
    """
    run = _load(Path(folder), threads)
    expected = read_expected(Path(folder))
    arrays = [each.numpy() for each in expected.inputs]
    right, apart = expected.compare(run(*arrays))
    if not right:
        raise WrongResult(
            f"the exported model in {folder} gives other results than the pruned model: they differ by {apart:.1e} "
            "of the largest"
        )
    return lambda: run(*arrays)


def score_exported(reference: str, threads: int, folder: str) -> tuple[float, float]:
    """Return the task's scores of the dense and the exported model. Raises UsageError if that cannot be called."""
    torch.set_num_threads(threads)
    task = load_task(reference)
    return task.score(task.model()), task.score(ExportedModule(task, _load(Path(folder), threads)))


def _load(folder: Path, threads: int) -> Callable[..., Arrays]:
    """Return a function from arrays to all results of an exported model."""
    model = load_model(folder, threads=threads)

    def run(*arrays: NDArray[Any]) -> Arrays:
        found = model(*arrays)
        return list(found) if isinstance(found, tuple) else [found]

    return run


class ExportedModule(nn.Module):
    """An exported model that is called as the task's model is, with tensors, and returns what that returns.

    Parameters
    ----------
    task : Task
        The task of the pruned model. Its example says what the exported model takes, and in which order.
    run : callable
        From arrays to all results.
    """

    def __init__(self, task: Task, run: Callable[..., Sequence[NDArray[Any]]]) -> None:
        super().__init__()
        model, example = task.model(), task.example()
        self._run, self._name = run, task.name
        self._signature = inspect.signature(model.forward)
        self._wanted = self._place(example)
        with torch.no_grad():
            self._output = example.map_tensors(lambda each: each.clone()).call(model)
        self.eval()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the result, in tensors, for any arguments that name the same tensors as the example's."""
        given = self._place(ExampleInputs(arguments, keywords))
        if given.keys() != self._wanted.keys():
            raise UsageError(
                f"task {self._name}: the exported model takes {', '.join(self._wanted)}, and was called with "
                f"{', '.join(given)}"
            )
        arrays = [given[place].detach().numpy() for place in self._wanted]
        left = iter([torch.from_numpy(np.array(each)) for each in self._run(*arrays)])
        (output,) = ExampleInputs((self._output,)).map_tensors(lambda _: next(left)).arguments
        return output

    def _place(self, inputs: ExampleInputs) -> Mapping[str, Tensor]:
        """Return the tensors of a call by their parameter of the model, and their place in it."""
        bound = self._signature.bind_partial(*inputs.arguments, **inputs.keywords).arguments
        named = ExampleInputs(keywords=bound)
        return dict(zip(named.describe_tensors(), named.tensors(), strict=True))
