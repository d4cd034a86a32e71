"""Profiles judged by several at once, each with a model of its own, and every loss kept.

A judge uses one thread (`search.judge.THREADS`), whether it works in this process or another, and judges batches
apart. So the losses, and with them the search, are bit for bit the same whatever the number of processes; on GPUs, or
on other machines of a Ray cluster, they are the same up to rounding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

import torch

from latbench import errors
from latbench.errors import BadData, EnvironmentUnusable, LatbenchError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search import task as tasks
from search.database import Database, model_hash
from search.judge import MEMORY_BYTES, THREADS, Held, Judge
from search.layers import Choice, Layer, options_of
from search.task import Task
from search.trials import Trials

JUDGE_SECONDS = 3600.0  # an answer that takes longer will not come

PLACES = ("cpu", "gpu", "ray")
"""Where profiles are judged: in processes of this machine, one a GPU of this machine, one a CPU of a Ray cluster."""


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


class Judges:
    """Answers mean losses of profiles over the first calibration batches; remembers what it answered in `trials`.

    With one process it is this one, with a copy of `model`; elsewhere, each loads the task's model itself, and is
    started when it is first needed. `place` is one of PLACES. A context: it ends the processes.
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, layers: Sequence[Layer], database: Database, trials: Trials,
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
        options = options_of(self._layers, choice).values()
        return tuple((option.pattern, option.sparsity) for option in options)


def _split(numbers: range, parts: int) -> Iterator[range]:
    """The numbers in so many stretches of about equal length, fewer if there are not so many numbers."""
    size = max(1, -(-len(numbers) // parts))
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


def panel(place: str, processes: int) -> Panel:
    """Who judges at `place`, one of PLACES. Raises EnvironmentUnusable where there is nobody."""
    if place == "ray":
        from search.judges_on_ray import OnRay

        return OnRay()
    if place == "gpu":
        if not (count := torch.cuda.device_count()):
            raise EnvironmentUnusable("--judges gpu needs a GPU that torch sees, and there is none")
        return Processes([f"cuda:{number}" for number in range(count)])
    return Processes(["cpu"] * processes)


class Processes:
    """Judges in processes of this machine, one for each of `devices`, as torch calls them."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.width = len(devices)
        # A worker dies with the thread that started it: these threads last as long as the workers.
        self._pool = ThreadPoolExecutor(self.width)
        self._workers = [(Worker(threads=THREADS, name=f"judge {i}"), device) for i, device in enumerate(devices)]
        self._free: SimpleQueue[tuple[Worker, str]] = SimpleQueue()
        for one in self._workers:
            self._free.put(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker, _device in self._workers:
            worker.close()
        self._pool.shutdown(cancel_futures=True)

    def give(self, opening: Opening, held: Held, batches: range) -> Future[list[float]]:
        """See `Panel`."""
        return self._pool.submit(self._ask, opening, held, batches)

    def answer(self, given: Future[list[float]]) -> list[float]:
        """See `Panel`."""
        return given.result()

    def answered(self, given: Future[list[float]]) -> bool:
        """See `Panel`."""
        return given.done() and not given.cancelled()

    def drop(self, given: Future[list[float]]) -> None:
        """See `Panel`."""
        given.cancel()

    def _ask(self, opening: Opening, held: Held, batches: range) -> list[float]:
        worker, device = self._free.get()
        own = replace(opening, memory_bytes=MEMORY_BYTES // self.width, device=device)
        try:
            answer: list[float] = worker.call("search.judges:judge", own, held, batches, timeout=JUDGE_SECONDS)
        except (TaskFailed, WorkerDied) as error:
            raise _said(error) from error
        finally:
            self._free.put((worker, device))
        return answer


def _said(error: TaskFailed | WorkerDied) -> LatbenchError:
    """What was raised in a worker, as if it had been here; what to do where memory ran out."""
    why = error.kind if isinstance(error, TaskFailed) else error.reason
    if why in ("MemoryError", "oom"):
        return EnvironmentUnusable(f"{error}; fewer --processes need less memory")
    kind = getattr(errors, why, None)
    return kind(error.message) if kind and isinstance(error, TaskFailed) else error


# Where a panel judges ----------------------------------------------------------------------------------------------


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
