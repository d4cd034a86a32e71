"""Whole nodes of a Ray cluster, each of which does one thing at a time.

    with RayNodes("a100") as nodes:
        answers = nodes.ask("package.module:look")                      # each node, without holding it
        for item, answer in nodes.run(("package.module:tool",), items, lambda item: (item,)):
            ...                                                         # tool(item), or LostNodes

Ray queues and places the work. An actor that requests all CPUs and GPUs holds a node, so that nothing else that Ray
manages runs there. Ray also reports lost nodes. Functions are named as for the workers of
`latbench.runners.worker_process`, and latbench must be installed on the nodes. Ray's usage statistics are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from latbench.errors import EnvironmentUnusable
from latbench.machines.gpu_names import matches_name
from latbench.runners.block_scheduler import (
    ASK_SECONDS,
    MOST_LOSSES,
    FunctionCall,
    LostNodes,
    Node,
    WholeNodes,
    convert_node_error,
    take_first_line,
)
from latbench.runners.worker import load_function

ADDRESS_VARIABLE = "RAY_ADDRESS"  # the environment variable by which Ray's own tools find a cluster
REACH_SECONDS = 5.0
TICK_SECONDS = 10.0

# Ray before 2.50 or so hides all GPUs (CUDA_VISIBLE_DEVICES="") from a task that asks for none, as a survey does.
_KEEP_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


class RayNodes(WholeNodes):
    """Nodes of the cluster that RAY_ADDRESS names, or that runs on this machine.

    `wanted` is the accelerator as the user calls it; None: nodes with CPUs and no accelerator. Raises
    EnvironmentUnusable where Ray is not installed, there is no cluster, or it has no such node.
    """

    def __init__(self, wanted: str | None) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        try:
            self._ray = self._stack.enter_context(open_ray())
            self.nodes = select_nodes(parse_nodes(self._ray.nodes()), wanted)
        except BaseException:
            self.close()
            raise
        self._actors: dict[str, Any] = {}
        self._losses: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all nodes and kill what still runs there."""
        self._stack.close()

    def keep(self, nodes: Iterable[Node]) -> None:
        """Use no other nodes than these from now on."""
        self.nodes = list(nodes)

    def ask(self, function: str, *args: Any) -> dict[Node, Any]:
        """Return the answer of "module:function" on each node, whatever else runs there.

        Raises the function's LatbenchError, and EnvironmentUnusable where it cannot be called.
        """
        called = self._ray.remote(_called)
        asked = {
            node: called.options(
                num_cpus=0, max_retries=0, runtime_env=_KEEP_VISIBLE, scheduling_strategy=self._on(node)
            ).remote(function, args)
            for node in self.nodes
        }
        return {node: self._answer(ref, node) for node, ref in asked.items()}

    def _answer(self, ref: Any, node: Node) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=ASK_SECONDS)
        except exceptions.RayTaskError as error:
            raise convert_node_error(error.cause, node) or error from None
        except exceptions.RayError as error:
            raise EnvironmentUnusable(f"node {node.name} gives no answer: {explain_loss(error)}") from None

    def _take_all(self, prepare: FunctionCall) -> None:
        for node in self.nodes:
            if node.id not in self._actors:
                actor = self._ray.remote(_Holder).options(
                    num_cpus=node.cpus, num_gpus=node.gpus, max_restarts=0, scheduling_strategy=self._on(node)
                )
                self._actors[node.id] = actor.remote()
                self._starting[self._actors[node.id].prepare.remote(*prepare)] = node

    def _give(self, node: Node, arguments: tuple[Any, ...]) -> Any:
        return self._actors[node.id].call.remote(arguments)

    def _wait(self, refs: Sequence[Any]) -> list[Any]:
        done: list[Any] = self._ray.wait(refs, timeout=TICK_SECONDS)[0]
        return done

    def _outcome(self, ref: Any, node: Node) -> Any:
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(ref)
        except exceptions.RayTaskError as error:
            raise convert_node_error(error.cause, node) or error from None
        except exceptions.RayError as error:
            self._end(node)
            self._losses[node.id] += 1
            if self._losses[node.id] >= MOST_LOSSES or node.id not in self._alive():
                self.nodes.remove(node)
            reason = f"node {node.name} was lost: {explain_loss(error)}"
            self.lost.setdefault(node.name, reason)  # keep the first reason: another attempt may fail too
            return LostNodes((reason,))
        self._idle.append(node)
        return answer

    def _do_without(self, node: Node, why: str) -> None:
        self._end(node)
        self.nodes.remove(node)
        self.lost.setdefault(node.name, why)

    def _end(self, node: Node) -> None:
        """Kill the actor of a node."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actors.pop(node.id))

    def _alive(self) -> set[str]:
        return {node.id for node in parse_nodes(self._ray.nodes())}

    def _on(self, node: Node) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node.id, soft=False)


_ADVICE = (
    f"start one with `ray start --head`, or name it in {ADDRESS_VARIABLE}, such as {ADDRESS_VARIABLE}=10.0.0.1:6379"
)


@contextlib.contextmanager
def open_ray() -> Iterator[Any]:
    """Connect the module `ray` to the cluster that RAY_ADDRESS names, or that runs on this machine.

    Raises EnvironmentUnusable where Ray is not installed, or there is no cluster.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise EnvironmentUnusable("Ray is not installed here: pip install ray") from None
    check_reachable(address := os.environ.get(ADDRESS_VARIABLE, "auto"))
    # Ray prints pages on lost nodes to stdout from a thread; our stdout is for results.
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):  # noqa: PTH123 - no file of ours
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EnvironmentUnusable(f"cannot reach a Ray cluster ({take_first_line(error)}): {_ADVICE}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def check_reachable(address: str) -> None:
    """Raise EnvironmentUnusable where nothing listens at `address`, host:port. Ray itself would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        return  # a keyword of Ray
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentUnusable(f"cannot reach a Ray cluster at {address} ({reason}): {_ADVICE}") from None


def parse_nodes(described: Iterable[dict[str, Any]]) -> list[Node]:
    """Return the nodes that are alive, from the descriptions of `ray.nodes()`."""
    kind = "accelerator_type:"
    return [
        Node(
            id=node["NodeID"],
            name=f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            accelerators=tuple(name.removeprefix(kind) for name in node["Resources"] if name.startswith(kind)),
        )
        for node in described
        if node["Alive"]
    ]


def select_nodes(nodes: Sequence[Node], wanted: str | None) -> list[Node]:
    """Return the nodes with the accelerator `wanted`; None: with CPUs and no accelerator.

    Raises EnvironmentUnusable where there is none, and names the existing accelerators.
    """
    if wanted is None:
        found = [node for node in nodes if node.cpus and not node.gpus]
    else:
        found = [node for node in nodes if node.gpus and any(_same(name, wanted) for name in node.accelerators)]
    if found:
        return found
    counts = Counter(name for node in nodes for name in node.accelerators)
    others = [f"{name} ({count} {'node' if count == 1 else 'nodes'})" for name, count in sorted(counts.items())]
    if wanted is None:
        raise EnvironmentUnusable(
            "--cpu measures nodes without an accelerator, and the Ray cluster has none: its nodes have "
            f"{', '.join(others) or 'no CPUs'}"
        )
    raise EnvironmentUnusable(
        f"--gpu {wanted} requested, but no node of the Ray cluster has it: they have {', '.join(others) or 'no GPU'}"
    )


def _same(accelerator: str, wanted: str) -> bool:
    """Return whether Ray's name of an accelerator is what the user calls `wanted`.

    Either may be the longer one: Ray shortens "NVIDIA A100-SXM4-80GB" to "A100".
    """
    return matches_name(accelerator, wanted) or matches_name(wanted, accelerator)


def explain_loss(error: Exception) -> str:
    """Return Ray's reason for a lost node in a few words."""
    text = str(error)
    found = re.search(r"The actor is dead because ((?:[^.]|\.(?=\S))+)", text)
    if found:
        return found[1]
    return "it cannot be reached any more" if "unavailable" in text else take_first_line(error)


# On the nodes ------------------------------------------------------------------------------------------------------


def _called(function: str, args: tuple[Any, ...]) -> Any:
    return load_function(function)(*args)


class _Holder:
    """An actor that holds a node, and a callable on it."""

    def prepare(self, function: str, *args: Any) -> None:
        self._call = load_function(function)(*args)

    def call(self, args: tuple[Any, ...]) -> Any:
        return self._call(*args)
