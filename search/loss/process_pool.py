"""Evaluators in processes of this machine: one a core, or one a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Self

from latbench import errors
from latbench.errors import EnvironmentUnusable, LatbenchError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.loss.evaluation_worker import Opening
from search.loss.evaluator import MEMORY_BYTES, THREADS, Held

JUDGE_SECONDS = 3600.0  # an answer that takes longer will not come


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
            answer: list[float] = worker.call(
                "search.loss.evaluation_worker:judge", own, held, batches, timeout=JUDGE_SECONDS
            )
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
