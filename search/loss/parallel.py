"""Profiles judged by several at once, each with a model of its own, and every loss kept.

A judge uses one thread (`search.loss.evaluator.THREADS`), whether it works in this process or another, and judges
batches apart. So the losses, and with them the search, are bit for bit the same whatever the number of processes; on
GPUs, or on other machines of a Ray cluster, they are the same up to rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from latbench.errors import LatbenchError
from search.artifacts.layer_database import Database
from search.knapsack.arrays import Choice
from search.loss.cache import Trials
from search.loss.evaluation_worker import Opening, Panel
from search.loss.evaluator import Held, Judge
from search.loss.pools import panel
from search.problem.layers import LayerOptions, expand_choice
from search.task import Task


class Judges:
    """Answers mean losses of profiles over the first calibration batches; remembers what it answered in `trials`.

    With one process it is this one, with a copy of `model`; elsewhere, each loads the task's model itself, and is
    started when it is first needed. `place` is one of PLACES. A context: it ends the processes.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[LayerOptions], database: Database, trials: Trials,
        *, processes: int = 1, place: str = "cpu",
    ) -> None:  # fmt: skip
        self._layers, self._trials, self._processes, self._place = layers, trials, processes, place
        names = tuple(part.name for layer in layers for part in layer.parts)
        self.batches = len(task.calibration())
        """How many batches the calibration data are."""
        alone = place == "cpu" and processes == 1
        self._own = Judge(task, copy.deepcopy(model), names, database) if alone else None
        self._opening = Opening(task.reference, str(database.folder.resolve()), database.model_hash, names)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def _panel(self) -> Panel:
        return self._stack.enter_context(panel(self._place, self._processes))

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        """The mean loss of each profile over the first `batches` calibration batches; infinite where it is NaN.

        Raises what the task raises, and a LatbenchError for what happens in a process. What was judged by then is
        kept, also where this is interrupted.
        """
        held = [self._held(choice) for choice in choices]
        known = {one: len(self._trials.losses(one)) for one in held}
        missing = {one: range(count, batches) for one, count in known.items() if count < batches}
        if self._own is not None:
            for one, numbers in missing.items():
                self._judge(self._own, one, numbers)
        elif missing:
            self._spread(missing)
        means = [sum(self._trials.losses(one)[:batches]) / batches for one in held]
        return [math.inf if math.isnan(loss) else loss for loss in means]

    def _judge(self, judge: Judge, one: Held, numbers: range) -> None:
        """Judge these batches of a profile here."""
        losses: list[float] = []
        try:
            for number in numbers:
                losses += judge.losses(one, range(number, number + 1))
        finally:
            self._trials.add(one, losses)

    def _spread(self, missing: Mapping[Held, range]) -> None:
        """Judge these batches of these profiles on the panel."""
        parts = -(-self._panel.width // len(missing))  # so that none is idle
        given = {
            one: [self._panel.give(self._opening, one, part) for part in _split(numbers, parts)]
            for one, numbers in missing.items()
        }
        kept: set[Held] = set()
        try:
            for one, answers in given.items():
                losses = [loss for answer in answers for loss in self._panel.answer(answer)]
                kept.add(one)
                self._trials.add(one, losses)
        except BaseException:
            for answer in itertools.chain.from_iterable(given.values()):
                self._panel.drop(answer)
            for one, answers in given.items():
                if one not in kept:
                    self._trials.add(one, self._answered(answers))
            raise

    def _answered(self, answers: Sequence[Any]) -> list[float]:
        """The losses that are there, up to the first that are not."""
        losses: list[float] = []
        for answer in answers:
            if not self._panel.answered(answer):
                break
            try:
                losses += self._panel.answer(answer)
            except LatbenchError:
                break
        return losses

    def _held(self, choice: Choice) -> Held:
        options = expand_choice(self._layers, choice).values()
        return tuple((option.pattern, option.sparsity) for option in options)


def _split(numbers: range, parts: int) -> Iterator[range]:
    """The numbers in so many stretches of about equal length, fewer if there are not so many numbers."""
    size = max(1, -(-len(numbers) // parts))
    return (numbers[i : i + size] for i in range(0, len(numbers), size))
