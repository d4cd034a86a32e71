"""Evaluators on a Ray cluster, one a CPU. Ray queues the requests, and gives those of a lost node to another node.

The nodes need latbench, and must see the task and the layer database at the same paths as this machine. A process on
a node keeps its model from one profile to the next.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from latbench.errors import EnvironmentUnusable, LatbenchError
from latbench.runners.block_scheduler import take_first_line
from latbench.runners.ray_nodes import explain_loss, open_ray, parse_nodes
from search.loss.evaluation_worker import LOSSES, EvaluatorSource, Measure, evaluate
from search.loss.evaluator import MEMORY_BYTES, THREADS, ProfileOptions


class RayPool:
    """An `EvaluatorPool` of the CPUs of a Ray cluster: the one that RAY_ADDRESS names, or one of this machine.

    Raises EnvironmentUnusable where Ray is not installed, or there is no cluster, or no CPU in it.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ray = self._stack.enter_context(open_ray())
        cpus = [int(node.cpus) for node in parse_nodes(self._ray.nodes())]
        self.workers, self._most_per_node = sum(cpus), max(cpus, default=0)
        if not self.workers:
            self._stack.close()
            raise EnvironmentUnusable("the Ray cluster has no CPU to evaluate profiles with")
        self._evaluate = self._ray.remote(evaluate).options(num_cpus=THREADS, scheduling_strategy="SPREAD")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def submit(
        self, source: EvaluatorSource, profile: ProfileOptions, batches: range, measure: Measure = LOSSES
    ) -> Any:
        """See `EvaluatorPool`."""
        own = replace(source, memory_bytes=MEMORY_BYTES // self._most_per_node)
        return self._evaluate.remote(own, profile, batches, measure)

    def result(self, handle: Any) -> list[Any]:
        """See `EvaluatorPool`."""
        try:
            found: list[Any] = self._ray.get(handle)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LatbenchError):
                raise error.cause from None
            raise LatbenchError(f"an evaluator on Ray failed: {take_first_line(error.cause)}") from error
        except self._ray.exceptions.RayError as error:
            raise LatbenchError(f"Ray lost an evaluation: {explain_loss(error)}") from error
        return found

    def is_done(self, handle: Any) -> bool:
        """See `EvaluatorPool`."""
        return bool(self._ray.wait([handle], timeout=0)[0])

    def cancel(self, handle: Any) -> None:
        """See `EvaluatorPool`."""
        self._ray.cancel(handle)
