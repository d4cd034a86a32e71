"""What a pool of evaluators is, and what each of its workers does: open the task once, then evaluate profiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from latbench.errors import BadData
from search import task as tasks
from search.artifacts.layer_database import Database, model_hash
from search.loss.evaluator import MEMORY_BYTES, Held, Judge


@dataclass(frozen=True)
class Opening:
    """What a judge is made from elsewhere: the task's reference, and the layer database with its model's hash."""

    reference: str
    folder: str
    model_hash: str
    layers: tuple[str, ...]
    memory_bytes: int = MEMORY_BYTES
    device: str = "cpu"


class Panel(Protocol):
    """Judges elsewhere, `width` of them: what is given to them is answered later, by whoever is free. A context."""

    width: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def give(self, opening: Opening, held: Held, batches: range) -> Any:
        """Ask for the losses of a profile on these batches; returns what the answer is asked for by."""

    def answer(self, given: Any) -> list[float]:
        """The losses, when they are there. Raises what was raised there if that is a LatbenchError."""

    def answered(self, given: Any) -> bool:
        """Whether the losses are there, so that `answer` need not wait."""

    def drop(self, given: Any) -> None:
        """Begin it no more: nobody waits for the answer."""


def judge(opening: Opening, held: Held, batches: range) -> list[float]:
    """What this process's judge says of a profile on these batches; it is opened for the first one."""
    return _open(opening).losses(held, batches)


@functools.lru_cache(maxsize=1)
def _open(opening: Opening) -> Judge:
    """Load the task and its model, to judge profiles by the database."""
    task = tasks.load(opening.reference)
    model = task.model()
    if (found := model_hash(model)) != opening.model_hash:
        raise BadData(f"task {task.name}: model() gave other weights than before ({found}, not {opening.model_hash})")
    database = Database(Path(opening.folder), opening.model_hash)
    return Judge(task, model, opening.layers, database, opening.memory_bytes, opening.device)
