"""The interface of a pool of evaluators, and what each worker does: load the task once, then evaluate profiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from latbench.errors import BadData
from search.artifacts.layer_database import Database, hash_model
from search.loss.evaluation_conditions import WANTED, EvaluationConditions
from search.loss.evaluator import MEMORY_BYTES, LossEvaluator, ProfileOptions
from search.task import load_task

Measure = Literal["losses", "shares"]
"""What is evaluated: `LossEvaluator.losses` or `LossEvaluator.layer_shares`."""

LOSSES: Measure = "losses"
SHARES: Measure = "shares"


@dataclass(frozen=True)
class EvaluatorSource:
    """What another process makes an evaluator from.

    Attributes
    ----------
    reference
        The task's reference.
    folder
        The folder of the layer database.
    model_hash
        Hash of the weights of the task's model.
    layers
        Names of the layers of a profile.
    memory_bytes
        Bytes for weights that were read from the database.
    device
        torch's name of the device.
    conditions
        How the model is evaluated.
    """

    reference: str
    folder: str
    model_hash: str
    layers: tuple[str, ...]
    memory_bytes: int = MEMORY_BYTES
    device: str = "cpu"
    conditions: EvaluationConditions = WANTED


class EvaluatorPool(Protocol):
    """Evaluators in other processes, a context manager. The next free one of them takes each request."""

    workers: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def submit(
        self, source: EvaluatorSource, profile: ProfileOptions, batches: range, measure: Measure = LOSSES
    ) -> Any:
        """Request the losses of a profile on these batches, or its shares; return a handle for the result."""

    def result(self, handle: Any) -> list[Any]:
        """Wait for the result and return it. Raises what the worker raised if that is a LatbenchError."""

    def is_done(self, handle: Any) -> bool:
        """Return whether the result is there, so that `result` need not wait."""

    def cancel(self, handle: Any) -> None:
        """Drop a request: nobody waits for its result."""


def evaluate(source: EvaluatorSource, profile: ProfileOptions, batches: range, measure: Measure) -> list[Any]:
    """Return the losses of a profile on these batches, or its shares, by this process's evaluator."""
    evaluator = _load_evaluator(source)
    return evaluator.layer_shares(profile, batches) if measure == SHARES else evaluator.losses(profile, batches)


@functools.lru_cache(maxsize=1)
def _load_evaluator(source: EvaluatorSource) -> LossEvaluator:
    """Load the task and its model, for profiles of the database."""
    task = load_task(source.reference)
    model = task.model()
    if (found := hash_model(model)) != source.model_hash:
        raise BadData(
            f"task {task.name}: model() returned other weights than before ({found}, not {source.model_hash}); it "
            "must return the same weights in every process"
        )
    database = Database(Path(source.folder), source.model_hash)
    return LossEvaluator(task, model, source.layers, database, source.memory_bytes, source.device, source.conditions)
