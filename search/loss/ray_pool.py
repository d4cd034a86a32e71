"""Profiles judged on a Ray cluster, one a CPU: Ray queues, places, and gives what a lost node had to another.

The nodes need latbench, and have to see the task and the layer database at the same paths as this machine. A process
of theirs keeps its model from one profile to the next.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from latbench.errors import EnvironmentUnusable, LatbenchError
from latbench.runners.block_scheduler import take_first_line
from latbench.runners.ray_nodes import explain_loss, open_ray, parse_nodes
from search.loss.evaluation_worker import Opening, judge
from search.loss.evaluator import MEMORY_BYTES, THREADS, Held


class OnRay:
    """A `search.loss.parallel.Panel` of a judge a CPU of the cluster that RAY_ADDRESS names, or that runs on this
    machine.

    Raises EnvironmentUnusable where Ray is not installed, there is no cluster, or no CPU in it.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ray = self._stack.enter_context(open_ray())
        cpus = [int(node.cpus) for node in parse_nodes(self._ray.nodes())]
        self.width, self._most_a_node = sum(cpus), max(cpus, default=0)
        if not self.width:
            self._stack.close()
            raise EnvironmentUnusable("the Ray cluster has no CPU to judge profiles with")
        self._judge = self._ray.remote(judge).options(num_cpus=THREADS, scheduling_strategy="SPREAD")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def give(self, opening: Opening, held: Held, batches: range) -> Any:
        """See `Panel`."""
        return self._judge.remote(replace(opening, memory_bytes=MEMORY_BYTES // self._most_a_node), held, batches)

    def answer(self, given: Any) -> list[float]:
        """See `Panel`."""
        try:
            answer: list[float] = self._ray.get(given)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LatbenchError):
                raise error.cause from None
            raise LatbenchError(f"a judge on Ray failed: {take_first_line(error.cause)}") from error
        except self._ray.exceptions.RayError as error:
            raise LatbenchError(f"Ray lost what was to be judged: {explain_loss(error)}") from error
        return answer

    def answered(self, given: Any) -> bool:
        """See `Panel`."""
        return bool(self._ray.wait([given], timeout=0)[0])

    def drop(self, given: Any) -> None:
        """See `Panel`."""
        self._ray.cancel(given)
