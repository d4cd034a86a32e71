"""Evaluate profiles in several processes at once, each with a model of its own, and keep every loss.

An evaluator uses one thread (`search.loss.evaluator.THREADS`) in this process as in another, and evaluates batches
apart. So the losses, and with them the search, are bit for bit the same for any number of processes. On GPUs, or on
other machines of a Ray cluster, they are the same up to rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from latbench.base.engine_registry import INT8
from latbench.errors import LatbenchError
from search.artifacts.layer_database import Database
from search.knapsack.arrays import Choice
from search.loss.cache import LossCache
from search.loss.evaluation_conditions import WANTED, EvaluationConditions
from search.loss.evaluation_worker import SHARES, EvaluatorPool, EvaluatorSource
from search.loss.evaluator import LossEvaluator, ProfileOptions
from search.loss.pools import open_pool
from search.problem.layers import LayerOptions, expand_choice
from search.task import Task

MOST_PROCESSES = 8
"""Processes by default, at most: each holds the model and the calibration data."""

MOST_GRADIENTS = 2
"""Gradients that are computed at a time, at most: each keeps all that its batch computes in memory."""


@dataclass(frozen=True)
class Workers:
    """Who evaluates profiles.

    Attributes
    ----------
    processes
        Processes of this machine.
    pool
        Kind of the pool, one of `search.loss.pools.POOL_KINDS`. Only "cpu" uses `processes`.
    pruners
        Processes that prune layers; None for as many as evaluate profiles.
    """

    processes: int = 1
    pool: str = "cpu"
    pruners: int | None = None

    @property
    def prune_processes(self) -> int:
        """Processes that prune layers."""
        return self.pruners or self.processes

    @property
    def are_here(self) -> bool:
        """Whether this process evaluates profiles."""
        return (self.processes, self.pool) == (1, "cpu")


THIS_PROCESS = Workers()


class ParallelEvaluator:
    """Computes mean losses of profiles over the first calibration batches, and keeps them in a cache.

    One process means this one, with a copy of the model. Workers of a pool load the task's model themselves, and are
    started when they are first needed. A context manager: it ends the workers.

    Parameters
    ----------
    task, model
        The task and its dense model.
    layers
        The layers of a profile.
    database
        The pruned layers.
    cache
        The losses that are known.
    workers
        Where profiles are evaluated.
    conditions
        How the model is evaluated.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[LayerOptions], database: Database,
        cache: LossCache, workers: Workers = THIS_PROCESS,
        conditions: EvaluationConditions = WANTED,
    ) -> None:  # fmt: skip
        self._layers, self._losses, self._workers = layers, cache, workers
        self._shares: dict[tuple[ProfileOptions, int], list[list[float]]] = {}
        names = tuple(part.name for layer in layers for part in layer.parts)
        self.batches = len(task.calibration())
        """Number of batches of the calibration data."""
        here = workers.are_here
        self._evaluator = (
            LossEvaluator(task, copy.deepcopy(model), names, database, conditions=conditions) if here else None
        )
        self._source = EvaluatorSource(
            task.reference, str(database.folder.resolve()), database.model_hash, names, conditions=conditions
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def _pool(self) -> EvaluatorPool:
        return self._stack.enter_context(open_pool(self._workers.pool, self._workers.processes))

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        """Return the mean loss of each profile over the first `batches`; infinite where it is NaN.

        Losses that were computed before an error or an interrupt stay in the cache. Raises what the task raises, and
        a LatbenchError for a failure of a worker.
        """
        profiles = [self._options(choice) for choice in choices]
        known = {profile: len(self._losses.losses(profile)) for profile in profiles}
        missing = {profile: range(count, batches) for profile, count in known.items() if count < batches}
        if self._evaluator is not None:
            for profile, numbers in missing.items():
                self._evaluate_here(self._evaluator, profile, numbers)
        elif missing:
            self._evaluate_in_pool(missing)
        means = [sum(self._losses.losses(profile)[:batches]) / batches for profile in profiles]
        return [math.inf if math.isnan(loss) else loss for loss in means]

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        """Return what each layer adds to the mean loss over the first `batches`, by the gradient at the profile.

        See `LossEvaluator.layer_shares`. The parts of tied layers add up. A layer in eight bits has NaN, because what
        rounded inputs cost is not seen. Raises UsageError where there is no gradient.
        """
        profile = self._options(choice)
        if (profile, batches) not in self._shares:
            self._shares[profile, batches] = self._compute_shares(profile, range(batches))
        rows = self._shares[profile, batches]
        means = iter(
            math.nan if option.precision == INT8 else sum(column) / batches
            for option, column in zip(profile, zip(*rows, strict=True), strict=True)
        )
        return [sum(next(means) for _ in layer.parts) for layer in self._layers]

    def _compute_shares(self, profile: ProfileOptions, numbers: range) -> list[list[float]]:
        """Return the shares of the profile's layers on each of these batches."""
        if self._evaluator is not None:
            return self._evaluator.layer_shares(profile, numbers)
        parts = _split(numbers, min(self._pool.workers, MOST_GRADIENTS))
        handles = [self._pool.submit(self._source, profile, part, SHARES) for part in parts]
        try:
            return [row for handle in handles for row in self._pool.result(handle)]
        except BaseException:
            for handle in handles:
                self._pool.cancel(handle)
            raise

    def _evaluate_here(self, evaluator: LossEvaluator, profile: ProfileOptions, numbers: range) -> None:
        """Evaluate a profile on these batches in this process."""
        losses: list[float] = []
        try:
            for number in numbers:
                losses += evaluator.losses(profile, range(number, number + 1))
        finally:
            self._losses.add(profile, losses)

    def _evaluate_in_pool(self, missing: Mapping[ProfileOptions, range]) -> None:
        """Evaluate profiles on these batches in the pool."""
        parts = -(-self._pool.workers // len(missing))  # so that no worker is idle
        submitted = {
            profile: [self._pool.submit(self._source, profile, part) for part in _split(numbers, parts)]
            for profile, numbers in missing.items()
        }
        finished: set[ProfileOptions] = set()
        try:
            for profile, handles in submitted.items():
                losses = [loss for handle in handles for loss in self._pool.result(handle)]
                finished.add(profile)
                self._losses.add(profile, losses)
        except BaseException:
            for handle in itertools.chain.from_iterable(submitted.values()):
                self._pool.cancel(handle)
            for profile, handles in submitted.items():
                if profile not in finished:
                    self._losses.add(profile, self._collect_done(handles))
            raise

    def _collect_done(self, handles: Sequence[Any]) -> list[float]:
        """Return the losses that are there, up to the first that are not."""
        losses: list[float] = []
        for handle in handles:
            if not self._pool.is_done(handle):
                break
            try:
                losses += self._pool.result(handle)
            except LatbenchError:
                break
        return losses

    def _options(self, choice: Choice) -> ProfileOptions:
        return tuple(expand_choice(self._layers, choice).values())


def _split(numbers: range, parts: int) -> Iterator[range]:
    """Yield the numbers in `parts` ranges of about equal length; fewer if there are fewer numbers."""
    size = max(1, -(-len(numbers) // parts))
    return (numbers[i : i + size] for i in range(0, len(numbers), size))
