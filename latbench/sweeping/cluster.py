"""A sweep on nodes of a cluster: each measures one block at a time; this process writes the table.

The unit of work is a block, not a point. The points of a block are sampled in turns, beside the same reference work,
and judged beside each other, on a node as here. A node times one point at a time, and nothing else runs there.

A block that loses its node goes to another as a whole, because nodes get lost for many reasons. After two losses, its
points go out alone. A point that then loses a third node gets a row that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latbench.backends.cpu.cpu_versions import CpuVersions
from latbench.backends.gpu.gpu_installation import find_installed
from latbench.backends.gpu.gpu_versions import Versions
from latbench.base.own_packages import FOLDER
from latbench.errors import EnvironmentUnusable, UsageError
from latbench.machines.devices import name_cpu
from latbench.machines.gpu_discovery import find_gpu
from latbench.machines.processors import read_processors
from latbench.runners.block_scheduler import FunctionCall, LostNodes, Node
from latbench.runners.device_lock import WAIT_SECONDS, lock_device
from latbench.runners.worker import load_function
from latbench.sweeping.bench import Bench
from latbench.sweeping.gpu_machine import GpuMachine
from latbench.sweeping.settings import Row, SweepSettings, TimeLeft, TimeUsedUp
from latbench.sweeping.sweep import Sweep
from latbench.sweeping.sweep_machine import SweepMachine
from latbench.tables.point_ids import hash_key
from latbench.workloads.points import Point, group_into_blocks

if TYPE_CHECKING:
    import pandas as pd

Block = list[Point]
MeasuredRows = tuple[Mapping[str, Any], Sequence[Row]]
"""An environment and the rows measured in it."""


class NodePool(Protocol):
    """A pool of nodes that runs work; see `latbench.runners.block_scheduler`."""

    nodes: list[Node]

    def keep(self, nodes: Iterable[Node]) -> None:
        """Use no other nodes than these from now on."""

    def ask(self, function: str, *args: Any) -> dict[Node, Any]:
        """Return the answer of "module:function" on each node."""

    def run(
        self,
        prepare: FunctionCall,
        items: Iterable[Block],
        arguments: Callable[[Block], tuple[Any, ...]],
        *,
        tries: int = 2,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Block, Any]]:
        """Yield each of `items` with the answer of the callable that `prepare` gives on a node, or with LostNodes."""


@dataclass(frozen=True)
class NodeInventory:
    """What a node has, or what several nodes have in common.

    Parameters
    ----------
    device
        The device's name in tables.
    cores
        Cores that may be used: the default number of threads.
    processors
        Processors that may be used: the most threads.
    backends
        Installed backends for the device.
    sources
        Hash of the sources of latbench (`hash_sources`).
    versions
        The versions that its times depend on; for several nodes, those of all.
    """

    device: str
    cores: int
    processors: int
    backends: frozenset[str]
    sources: str
    versions: tuple[Versions | CpuVersions, ...]

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return which rows of a table timed the versions of any of the nodes."""
        current: NDArray[np.bool_] = np.logical_or.reduce([versions.current(table) for versions in self.versions])
        return current


def inspect_node(gpu: str | None) -> NodeInventory:
    """Return the inventory of this node for its CPU, or for the GPU of that name; raises as `find_gpu`."""
    here = read_processors()
    cores, most = here.default_threads, here.most_threads
    if gpu is not None:
        machine = GpuMachine(find_gpu(gpu))
        backends = frozenset(find_installed())
        return NodeInventory(machine.device, cores, most, backends, hash_sources(), (machine.versions,))
    versions = CpuVersions.find()
    backends = frozenset(name for name, version in versions.packages.items() if version is not None)
    return NodeInventory(name_cpu(), cores, most, backends, hash_sources(), (versions,))


def hash_sources() -> str:
    """Return the hash of the sources of latbench and its kernels, which must be equal on all nodes."""
    found = hashlib.sha256()
    for name in ("latbench", "sparse_kernels"):
        root = FOLDER / name
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cu", ".cuh")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def survey_nodes(nodes: NodePool, gpu: str | None, tell: Callable[[str], None]) -> NodeInventory:
    """Return what all nodes have in common, after nodes with another device are dropped.

    A table belongs to one device: the one that most nodes have. `tell` gets a sentence on each dropped node. Raises
    EnvironmentUnusable where a node has other sources of latbench than this machine.
    """
    inventories: dict[Node, NodeInventory] = nodes.ask("latbench.sweeping.cluster:inspect_node", gpu)
    for node, inventory in inventories.items():
        if inventory.sources != hash_sources():
            raise EnvironmentUnusable(f"node {node.name} has another latbench than this one: install the same on all")
    counts = Counter(inventory.device for inventory in inventories.values())
    device = min(counts, key=lambda name: (-counts[name], name))
    for node, inventory in inventories.items():
        if inventory.device != device:
            tell(f"node {node.name} is left out: it has {inventory.device}, and this table is of {device} only")
    matching = {node: inventory for node, inventory in inventories.items() if inventory.device == device}
    nodes.keep(matching)
    common = frozenset.intersection(*(inventory.backends for inventory in matching.values()))
    versions: list[Versions | CpuVersions] = []
    for inventory in matching.values():
        versions += (each for each in inventory.versions if each not in versions)
    cores, processors = (
        min(getattr(inventory, name) for inventory in matching.values()) for name in ("cores", "processors")
    )
    return NodeInventory(device, cores, processors, common, hash_sources(), tuple(versions))


def open_gpu_machine(name: str) -> GpuMachine:
    """Return the GPU of this machine that the user calls `name`."""
    return GpuMachine(find_gpu(name))


def open_matching_machine(common: NodeInventory, gpu: str | None, machine: FunctionCall) -> SweepMachine:
    """Return the machine of this node, if it matches the nodes of the survey.

    A node that arrives after the survey may differ; then EnvironmentUnusable is raised.
    """
    inventory = inspect_node(gpu)
    if (inventory.device, inventory.sources) != (
        common.device,
        common.sources,
    ) or not inventory.backends >= common.backends:
        missing = ", ".join(sorted(common.backends - inventory.backends)) or "another latbench than the other nodes"
        what = inventory.device if inventory.device != common.device else missing
        raise EnvironmentUnusable(f"it has {what}")
    name, *args = machine
    try:
        found: SweepMachine = load_function(name)(*args)
    except UsageError as error:  # this node has fewer processors than those of the survey
        raise EnvironmentUnusable(str(error)) from error
    return found


class NodeBench:
    """A bench on a node: measures blocks on the machine that the call `machine` gives, and locks its device."""

    def __init__(self, machine: FunctionCall, seed: int, settings: SweepSettings, wait_seconds: float) -> None:
        name, *args = machine
        self._bench = Bench(load_function(name)(*args), seed, settings)
        self._wait_seconds = wait_seconds

    def __call__(self, points: Block, chance: int, seconds: float | None) -> list[MeasuredRows]:
        """Return what is measured of `points` within `seconds`, in parts where they do not fit into memory."""
        end = None if seconds is None else monotonic() + seconds

        def seconds_left() -> float | None:
            return None if end is None else end - monotonic()

        measured: list[MeasuredRows] = []
        unit = self._bench.environment["device_uuid_hash"]
        with (
            lock_device(self._bench.machine.device, unit, wait_seconds=self._wait_seconds),
            contextlib.suppress(TimeUsedUp),
        ):
            for chunk in self._bench.split_to_fit(points):
                self._bench.measure_block(
                    chunk,
                    lambda *kept: measured.append(kept),
                    chance=chance,
                    time_left=TimeLeft(seconds_left, seconds_left),
                )
        return measured

    def close(self) -> None:
        """End its processes; they also end with this one."""
        self._bench.engines.close()


class ClusterSite:
    """A MeasurementSite on the nodes of a cluster.

    Parameters
    ----------
    nodes
        The nodes.
    device
        The device's name in tables.
    machine
        Call that gives the machine on each node.
    seed
        Random seed for the order of points.
    settings
        How carefully points are measured.
    wait_seconds
        Longest wait for another process that measures on a node.
    current
        Returns which rows of a table are of the present versions; by default all.
    """

    def __init__(
        self, nodes: NodePool, device: str, machine: FunctionCall, seed: int, settings: SweepSettings,
        wait_seconds: float = WAIT_SECONDS, current: Callable[[pd.DataFrame], NDArray[np.bool_]] | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self._nodes, self._current = nodes, current
        self._bench: FunctionCall = ("latbench.sweeping.cluster:NodeBench", machine, seed, settings, wait_seconds)

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See MeasurementSite."""
        return np.ones(len(table), bool) if self._current is None else self._current(table)

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """See MeasurementSite. Blocks are smaller than usual where there would be fewer of them than nodes."""
        share = -(-len(points) // max(1, len(self._nodes.nodes)))
        blocks = group_into_blocks(points, sweep.options.seed, min(sweep.settings.block_points, share))
        suspects = self._spread(blocks, sweep, chance, tries=2)
        self._spread([[point] for block in suspects for point in block], sweep, chance, tries=1)

    def _spread(self, blocks: Sequence[Block], sweep: Sweep, chance: int, tries: int) -> list[Block]:
        """Measure and keep `blocks`; return those of several points that lost `tries` nodes.

        A single point that did gets a row. Raises TimeUsedUp where points are left because of it.
        """
        left = {point.id for block in blocks for point in block}
        suspects: list[Block] = []

        def in_time() -> Iterator[Block]:
            with contextlib.suppress(TimeUsedUp):
                for block in blocks:
                    sweep.check_time(even_first=True)
                    yield block

        def tell() -> None:
            sweep.tell(f"timing: on {len(self._nodes.nodes)} nodes")

        def arguments(block: Block) -> tuple[Block, int, float | None]:
            tell()
            return block, chance, sweep.seconds_left()

        def waiting() -> None:
            sweep.check_time(even_first=True)  # no block is running that could use the time
            sweep.tell("waiting: others use the nodes")

        for block, answer in self._nodes.run(self._bench, in_time(), arguments, tries=tries, waiting=waiting):
            if isinstance(answer, LostNodes):
                left -= {point.id for point in block}
                if len(block) > 1:
                    suspects.append(block)
                    continue
                error = f"{block[0].backend} may take nodes down, this point was alone on one: {answer.reasons[-1]}"
                sweep.write_block(None, [{**block[0].key(), "status": "error", "error": error}])
            else:
                for environment, rows in answer:
                    sweep.write_block(environment, rows)
                    left -= {hash_key(row) for row in rows}
            tell()
        if left:
            raise TimeUsedUp
        return suspects
