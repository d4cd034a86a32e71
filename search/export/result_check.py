"""An exported folder, run in processes of its own, gives the results of the pruned model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.export.export_manifest import LEVEL
from search.export.export_steps import PrunedResults

RUN_SECONDS = 600.0
"""Limit of the time in which a deployed model computes the inputs of its check."""


@dataclass(frozen=True)
class ResultCheck:
    """What an exported model must compute.

    Attributes
    ----------
    folder
        The exported folder.
    function
        "module:function", which runs it: from the folder, threads, and arrays of each call to arrays of its results.
    results
        The models whose results they must be.
    levels, threads
        CPU levels and numbers of threads.
    """

    folder: Path
    function: str
    results: PrunedResults
    levels: Sequence[str]
    threads: Sequence[int]

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> float:
        """Return how far the results are from the converted model's, as a share of its largest.

        Each CPU level runs in a process of its own, which takes its kernels from the environment. Raises RuntimeError
        for other results than the model's.
        """
        worst = 0.0
        for level in self.levels:
            environment = {LEVEL: level}
            with Worker(threads=self.threads[-1], name=f"checking {level}", environment=environment) as worker:
                for threads in self.threads:
                    right, apart = self._compare(worker, threads, inputs)
                    if not right:
                        raise RuntimeError(
                            f"the exported model gives other results than the pruned one at CPU level {level}, with "
                            f"{threads} threads"
                        )
                    worst = max(worst, apart)
        return worst

    def agrees(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether inputs of another size give the model's results. An exporter may have fixed what it read."""
        with Worker(threads=1, name="checking sizes", environment={LEVEL: self.levels[-1]}) as worker:
            try:
                return self._compare(worker, 1, [tensors])[0]
            except RuntimeError:
                return False

    def _compare(self, worker: Worker, threads: int, inputs: Sequence[Sequence[Tensor]]) -> tuple[bool, float]:
        """Return whether the results for all of the inputs are right, and how far they lie from the model's."""
        arrays = [[each.numpy() for each in tensors] for tensors in inputs]
        try:
            found = worker.call(self.function, str(self.folder), threads, arrays, timeout=RUN_SECONDS)
        except TaskFailed as error:
            raise RuntimeError(f"the exported model does not run: {error.message}") from error
        except WorkerDied as error:
            raise RuntimeError(f"the exported model does not run: {error}") from error
        compared = [
            self.results.compare([torch.from_numpy(each) for each in given], tensors)
            for given, tensors in zip(found, inputs, strict=True)
        ]
        return all(right for right, _ in compared), max(apart for _, apart in compared)
