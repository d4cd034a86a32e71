"""Profiles judged by several processes, each with a model of its own, and every loss kept.

A judge uses one thread (`search.judge.THREADS`), whether it works in this process or another, and judges batches
apart. So the losses, and with them the search, are bit for bit the same whatever the number of processes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import torch

from latbench.errors import BadData
from latbench.runners.local import Worker
from search import task as tasks
from search.database import Database, model_hash
from search.judge import MEMORY_BYTES, THREADS, Held, Judge
from search.layers import Choice, Layer, options_of
from search.task import Task
from search.trials import Trials

JUDGE_SECONDS = 3600.0  # an answer that takes longer will not come


class Judges:
    """Answers mean losses of profiles over the first calibration batches; remembers what it answered in `trials`.

    With one process it is this one, with a copy of `model`; with more, each loads the task's model itself, and is
    started when it is first needed. A context: it ends the processes.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[Layer], database: Database, trials: Trials,
        *, processes: int = 1,
    ) -> None:  # fmt: skip
        self._layers, self._trials, self._processes = layers, trials, processes
        names = [part.name for layer in layers for part in layer.parts]
        self.batches = len(task.calibration())
        """How many batches the calibration data are."""
        self._own = Judge(task, copy.deepcopy(model), names, database) if processes == 1 else None
        folder = str(database.folder.resolve())
        self._opening = task.reference, folder, database.model_hash, names, MEMORY_BYTES // processes
        # A worker dies with the thread that started it: these threads last as long as the workers.
        self._pool = ThreadPoolExecutor(processes)
        self._workers = [] if self._own else [Worker(threads=THREADS, name=f"judge {i}") for i in range(processes)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()
        self._pool.shutdown(cancel_futures=True)

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        """The mean loss of each profile over the first `batches` calibration batches.

        Raises what the task raises, and TaskFailed or WorkerDied for what happens in a process.
        """
        held = [self._held(choice) for choice in choices]
        known = {one: len(self._trials.losses(one)) for one in held}
        missing = {one: range(count, batches) for one, count in known.items() if count < batches}
        if self._own is not None:
            for one, numbers in missing.items():
                self._trials.add(one, self._own.losses(one, numbers))
        else:
            self._spread(missing)
        return [sum(self._trials.losses(one)[:batches]) / batches for one in held]

    def _spread(self, missing: Mapping[Held, range]) -> None:
        """Judge these batches of these profiles in the processes."""
        parts = -(-self._processes // max(1, len(missing)))  # so that no process is idle
        answers = {
            one: [self._pool.submit(self._ask, one, part) for part in _split(numbers, parts)]
            for one, numbers in missing.items()
        }
        try:
            for one, futures in answers.items():
                self._trials.add(one, [loss for future in futures for loss in future.result()])
        finally:
            for future in itertools.chain.from_iterable(answers.values()):
                future.cancel()

    def _ask(self, held: Held, batches: range) -> list[float]:
        worker = self._free.get()
        try:
            if worker.generation == 0:
                worker.call("search.judges:open_judge", *self._opening, timeout=JUDGE_SECONDS)
            answer: list[float] = worker.call("search.judges:judge", held, batches, timeout=JUDGE_SECONDS)
            return answer
        finally:
            self._free.put(worker)

    def _held(self, choice: Choice) -> Held:
        options = options_of(self._layers, choice).values()
        return tuple((option.pattern, option.sparsity) for option in options)


def _split(numbers: range, parts: int) -> Iterator[range]:
    """The numbers in so many stretches of about equal length, fewer if there are not so many numbers."""
    size = max(1, -(-len(numbers) // parts))
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


# In a worker -------------------------------------------------------------------------------------------------------

_judges: list[Judge] = []


def open_judge(reference: str, folder: str, weights: str, layers: Sequence[str], memory_bytes: int) -> None:
    """Load the task and its model, to judge profiles of these layers by the database in `folder`."""
    task = tasks.load(reference)
    model = task.model()
    if (found := model_hash(model)) != weights:
        raise BadData(f"task {task.name}: model() gave other weights than before ({found}, not {weights})")
    _judges[:] = [Judge(task, model, layers, Database(Path(folder), weights), memory_bytes)]


def judge(held: Held, batches: range) -> list[float]:
    """What this worker's judge says."""
    return _judges[0].losses(held, batches)
