"""Scheduling of work on whole nodes of a cluster, one item at a time per node; lost items go to another node.

How nodes are acquired, addressed and lost depends on the cluster: `latbench.runners.ray_nodes`,
`latbench.runners.slurm_nodes`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError

ASK_SECONDS = 120.0  # a node's first process may have to load its libraries from a cold disk
MOST_LOSSES = 2  # of one node's process; then the node is no longer used

Item = TypeVar("Item")
FunctionCall = tuple[Any, ...]
"""The name of a function, "module:function", and its arguments."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    cpus: float = 0.0
    gpus: float = 0.0
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostNodes:
    """The answer to an item whose nodes were all lost, with a reason for each."""

    reasons: tuple[str, ...]


@dataclass
class _Attempt(Generic[Item]):
    item: Item
    losses: list[str] = field(default_factory=list)

    def settle(self, answer: Any, tries: int, todo: deque[_Attempt[Item]]) -> Iterator[tuple[Item, Any]]:
        """Yield the item with its answer; a lost item goes back to `todo` until it has lost `tries` nodes."""
        if isinstance(answer, LostNodes):
            self.losses += answer.reasons
            if len(self.losses) < tries:
                todo.append(self)
                return
            answer = LostNodes(tuple(self.losses))
        yield self.item, answer


class WholeNodes(ABC):
    """Nodes that are held, each by a callable that waits on it."""

    nodes: list[Node]

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}  # the first loss of each node by name, in a sentence
        self._starting: dict[Any, Node] = {}  # references to nodes that are not held yet
        self._idle: list[Node] = []

    def run(
        self,
        prepare: FunctionCall,
        items: Iterable[Item],
        arguments: Callable[[Item], tuple[Any, ...]],
        *,
        tries: int = 2,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Item, Any]]:
        """Yield each of `items` with its answer, in the order of completion.

        An item that loses its node goes to another. A node that raises EnvironmentUnusable is no longer used, nor is
        one with a full disk or a missing library. Its item goes to another node.

        Parameters
        ----------
        prepare
            Call that returns a callable on each node, once in the life of this object.
        items
            The items; they are taken as nodes become free.
        arguments
            Returns the arguments of the callable for an item.
        tries
            Nodes that an item may lose; after that its answer is LostNodes.
        waiting
            Is called now and then while all nodes are in use by others.

        Raises
        ------
        Incomplete
            No node is left.
        LatbenchError
            Any other expected failure of the callable.
        """
        source = iter(items)
        todo: deque[_Attempt[Item]] = deque()

        def any_to_do() -> bool:
            if not todo:
                todo.extend(map(_Attempt, itertools.islice(source, 1)))
            return bool(todo)

        running: dict[Any, tuple[Node, _Attempt[Item]]] = {}
        while True:
            if any_to_do():
                self._take_all(prepare)
            while any_to_do() and self._idle:
                node, attempt = self._idle.pop(0), todo.popleft()
                running[self._give(node, arguments(attempt.item))] = node, attempt
            if not todo and not running:
                return
            if not running and not self._starting:
                last = next(reversed(self.lost.values()), "")
                raise Incomplete("every node that could measure is lost" + (f": {last}" if last else ""))
            done = self._wait([*running, *self._starting])
            if not done and not running:
                waiting()
            for ref in done:
                yield from self._collect(ref, running, todo, tries)

    def _collect(
        self,
        ref: Any,
        running: dict[Any, tuple[Node, _Attempt[Item]]],
        todo: deque[_Attempt[Item]],
        tries: int,
    ) -> Iterator[tuple[Item, Any]]:
        """Yield the item and the answer that `ref` stands for, if it is an item that is finished."""
        node, attempt = running.pop(ref) if ref in running else (self._starting.pop(ref), None)
        try:
            answer = self._outcome(ref, node)
        except EnvironmentUnusable as error:  # a fault of the node, whatever its work
            self._do_without(node, f"{error}; it is left out")
            if attempt is not None:
                todo.appendleft(attempt)
            return
        if attempt is not None:
            yield from attempt.settle(answer, tries, todo)

    @abstractmethod
    def _take_all(self, prepare: FunctionCall) -> None:
        """Request every node that is not held yet and prepare it; each of `_starting` arrives when it is free."""

    @abstractmethod
    def _give(self, node: Node, arguments: tuple[Any, ...]) -> Any:
        """Call the callable on an idle node; return a reference to the answer."""

    @abstractmethod
    def _wait(self, refs: Sequence[Any]) -> list[Any]:
        """Return those of `refs` that have an outcome, as soon as there is one; none after a while without."""

    @abstractmethod
    def _outcome(self, ref: Any, node: Node) -> Any:
        """Return the answer, after which the node is idle, or LostNodes, after which it is acquired again or given
        up.

        Raises what was raised on the node.
        """

    @abstractmethod
    def _do_without(self, node: Node, why: str) -> None:
        """Release a node that cannot do its work, for a reason that goes to `lost`."""


def take_first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def convert_node_error(cause: BaseException, node: Node) -> LatbenchError | None:
    """Return the message to the user for an exception on a node; None for an unexpected one."""
    if isinstance(cause, LatbenchError):
        cause.args = (f"on node {node.name}: {cause}",)
        return cause
    if isinstance(cause, OSError | ImportError):
        return EnvironmentUnusable(f"on node {node.name}: {type(cause).__name__}: {take_first_line(cause)}")
    return None
