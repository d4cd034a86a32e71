"""An exported model as an engine that is timed beside dense ones, and as a module that a task scores.

Both call it as users do, through `lb.load`, with arrays. Both run in a worker process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from search.export.expected_results import read_expected
from search.export.load_model import load_model
from search.task import load_task
from search.whole_model.compiled_module import CompiledModule
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
    model = task.model()
    return task.score(model), task.score(CompiledModule(model, task.example(), _load(Path(folder), threads)))


def _load(folder: Path, threads: int) -> Callable[..., Arrays]:
    """Return a function from arrays to all results of an exported model."""
    model = load_model(folder, threads=threads)

    def run(*arrays: NDArray[Any]) -> Arrays:
        found = model(*arrays)
        return list(found) if isinstance(found, tuple) else [found]

    return run
