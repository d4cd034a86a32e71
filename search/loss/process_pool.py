"""Evaluators in processes of this machine: one a core, or one a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self

from latbench import errors
from latbench.errors import EnvironmentUnusable, LatbenchError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.loss.evaluation_worker import LOSSES, EvaluatorSource, Measure
from search.loss.evaluator import MEMORY_BYTES, THREADS, ProfileOptions

EVALUATION_SECONDS = 3600.0
"""Time limit of one request."""


class ProcessPool:
    """An `EvaluatorPool` of one process for each of `devices`, torch's names."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.workers = len(devices)
        # A worker dies with the thread that started it: these threads last as long as the workers.
        self._threads = ThreadPoolExecutor(self.workers)
        self._workers = [(Worker(threads=THREADS, name=f"evaluator {i}"), device) for i, device in enumerate(devices)]
        self._idle: SimpleQueue[tuple[Worker, str]] = SimpleQueue()
        for pair in self._workers:
            self._idle.put(pair)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker, _device in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def submit(
        self, source: EvaluatorSource, profile: ProfileOptions, batches: range, measure: Measure = LOSSES
    ) -> Future[list[Any]]:
        """See `EvaluatorPool`."""
        return self._threads.submit(self._call, source, profile, batches, measure)

    def result(self, handle: Future[list[Any]]) -> list[Any]:
        """See `EvaluatorPool`."""
        return handle.result()

    def is_done(self, handle: Future[list[Any]]) -> bool:
        """See `EvaluatorPool`."""
        return handle.done() and not handle.cancelled()

    def cancel(self, handle: Future[list[Any]]) -> None:
        """See `EvaluatorPool`."""
        handle.cancel()

    def _call(self, source: EvaluatorSource, profile: ProfileOptions, batches: range, measure: Measure) -> list[Any]:
        worker, device = self._idle.get()
        own = replace(source, memory_bytes=MEMORY_BYTES // self.workers, device=device)
        try:
            found: list[Any] = worker.call(
                "search.loss.evaluation_worker:evaluate", own, profile, batches, measure, timeout=EVALUATION_SECONDS
            )
        except (TaskFailed, WorkerDied) as error:
            raise _as_raised_there(error) from error
        finally:
            self._idle.put((worker, device))
        return found


def _as_raised_there(error: TaskFailed | WorkerDied) -> LatbenchError:
    """Return the error that a worker raised, as if this process had raised it; say what helps if memory ran out."""
    why = error.kind if isinstance(error, TaskFailed) else error.reason
    if why in ("MemoryError", "oom"):
        return EnvironmentUnusable(f"{error}; fewer processes need less memory (`latbench search --processes`)")
    kind = getattr(errors, why, None)
    return kind(error.message) if kind and isinstance(error, TaskFailed) else error
