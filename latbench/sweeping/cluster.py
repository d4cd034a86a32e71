"""A sweep on nodes elsewhere: each measures one block at a time on a bench of its own; this process writes the table.

What is handed out is a block, not a point, because the points of a block are sampled in turns, beside the same fixed
work, and judged beside each other: on a node as here. A node times one point at a time, and nothing else runs there.

A block that loses its node goes to another, whole, because nodes get lost for reasons of their own. One that loses
two is suspected: its points go out alone, and one that then loses a third node gets a row that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import latbench
import sparse_kernels
from latbench import backends
from latbench.backends.gpu_installation import installed
from latbench.backends.gpu_versions import Versions
from latbench.errors import EnvironmentUnusable
from latbench.machines import devices
from latbench.machines.gpu_discovery import find_gpu
from latbench.runners.block_scheduler import Call, Lost, Node
from latbench.runners.device_lock import WAIT_SECONDS, device_lock
from latbench.runners.worker import resolve
from latbench.sweeping.bench import Bench
from latbench.sweeping.gpu_machine import GpuMachine
from latbench.sweeping.settings import Row, SweepSettings, TimeLeft, TimeUsedUp
from latbench.sweeping.sweep import Sweep
from latbench.sweeping.sweep_machine import SweepMachine
from latbench.tables.point_ids import hash_key
from latbench.workloads import points as plan
from latbench.workloads.points import Point

if TYPE_CHECKING:
    import pandas as pd

Block = list[Point]
Measured = tuple[Mapping[str, Any], Sequence[Row]]
"""An environment, and the rows that were measured in it."""


class Nodes(Protocol):
    """What hands work to nodes; see `latbench.runners.block_scheduler`."""

    nodes: list[Node]

    def keep(self, nodes: Iterable[Node]) -> None:
        """Use no others than these from now on."""

    def ask(self, function: str, *args: Any) -> dict[Node, Any]:
        """What "module:function" answers on each node."""

    def run(
        self,
        prepare: Call,
        items: Iterable[Block],
        arguments: Callable[[Block], tuple[Any, ...]],
        *,
        tries: int = 2,
        waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Block, Any]]:
        """Each of `items` with the answer of what `prepare` gives on a node, or with Lost."""


@dataclass(frozen=True)
class Seen:
    """What a node has: the device's name in tables, cores, installed backends for it, the `sources` of latbench; of a
    GPU the versions that its times depend on. Of several nodes: what they have in common, and the versions of all.
    """

    device: str
    cores: int
    backends: frozenset[str]
    sources: str
    versions: tuple[Versions, ...] = ()

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return which rows of a table timed the versions of any of the nodes; of a CPU all."""
        if not self.versions:
            return np.ones(len(table), bool)
        return np.logical_or.reduce([versions.current(table) for versions in self.versions])


def look(gpu: str | None) -> Seen:
    """Run on a node: what it has, for a sweep of its CPU, or of the GPU of that name; raises as find_gpu does."""
    if gpu is not None:
        machine = GpuMachine(find_gpu(gpu))
        backends_here = frozenset(installed())
        return Seen(machine.device, devices.cores(), backends_here, sources(), (machine.versions,))
    there = frozenset(name for name, version in backends.available().items() if version is not None)
    return Seen(devices.cpu_device(), devices.cores(), there, sources())


def sources() -> str:
    """The hash of the sources of latbench and its kernels: what measures must be the same everywhere."""
    found = hashlib.sha256()
    for package in (latbench, sparse_kernels):
        root = Path(package.__path__[0])
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cu", ".cuh")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def survey(nodes: Nodes, gpu: str | None, tell: Callable[[str], None]) -> Seen:
    """What all `nodes` have in common, after those of another device are left out, of which `tell` hears.

    A table is of one device: of several, the one that most nodes have. Raises EnvironmentUnusable where a node's
    latbench is another than this one.
    """
    seen: dict[Node, Seen] = nodes.ask("latbench.sweeping.cluster:look", gpu)
    for node, its in seen.items():
        if its.sources != sources():
            raise EnvironmentUnusable(f"node {node.name} has another latbench than this one: install the same on all")
    counts = Counter(its.device for its in seen.values())
    device = min(counts, key=lambda name: (-counts[name], name))
    for node, its in seen.items():
        if its.device != device:
            tell(f"node {node.name} is left out: it has {its.device}, and a table is of one device, here {device}")
    alike = {node: its for node, its in seen.items() if its.device == device}
    nodes.keep(alike)
    common = frozenset.intersection(*(its.backends for its in alike.values()))
    versions: list[Versions] = []
    for its in alike.values():
        versions += (each for each in its.versions if each not in versions)
    return Seen(device, min(its.cores for its in alike.values()), common, sources(), tuple(versions))


def gpu_machine(name: str) -> GpuMachine:
    """The GPU of this machine that the user calls `name`."""
    return GpuMachine(find_gpu(name))


def machine_like(common: Seen, gpu: str | None, machine: Call) -> SweepMachine:
    """Run on a node: what the call `machine` gives; raises EnvironmentUnusable where it is not what the table is of,
    `common`, which may be so of a node that came after the survey.
    """
    its = look(gpu)
    if (its.device, its.sources) != (common.device, common.sources) or not its.backends >= common.backends:
        missing = ", ".join(sorted(common.backends - its.backends)) or "another latbench than the other nodes"
        what = its.device if its.device != common.device else missing
        raise EnvironmentUnusable(f"it has {what}")
    name, *args = machine
    found: SweepMachine = resolve(name)(*args)
    return found


class OnNode:
    """Run on a node: measures blocks on the machine that the call `machine` gives, for which it waits so long."""

    def __init__(self, machine: Call, seed: int, settings: SweepSettings, wait_seconds: float) -> None:
        name, *args = machine
        self._bench = Bench(resolve(name)(*args), seed, settings)
        self._wait_seconds = wait_seconds

    def __call__(self, points: Block, chance: int, seconds: float | None) -> list[Measured]:
        """What is measured of `points` within so many seconds; in parts where they do not fit into memory."""
        end = None if seconds is None else monotonic() + seconds

        def seconds_left() -> float | None:
            return None if end is None else end - monotonic()

        measured: list[Measured] = []
        unit = self._bench.environment["device_uuid_hash"]
        with (
            device_lock(self._bench.machine.device, unit, wait_seconds=self._wait_seconds),
            contextlib.suppress(TimeUsedUp),
        ):
            for chunk in self._bench.fitting(points):
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


class Elsewhere:
    """Where a sweep measures (`latbench.sweeping.sweep.Where`): on the machine that the call `machine` gives on each
    node, where it waits `wait_seconds` for another that measures there.
    """

    def __init__(
        self, nodes: Nodes, device: str, machine: Call, seed: int, settings: SweepSettings,
        wait_seconds: float = WAIT_SECONDS, current: Callable[[pd.DataFrame], NDArray[np.bool_]] | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self._nodes, self._current = nodes, current
        self._bench: Call = ("latbench.sweeping.cluster:OnNode", machine, seed, settings, wait_seconds)

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """See Where: every row, unless `current` tells which."""
        return np.ones(len(table), bool) if self._current is None else self._current(table)

    def measure(self, points: Sequence[Point], sweep: Sweep, chance: int) -> None:
        """See Where. Blocks are smaller than usual where there would be fewer of them than nodes."""
        share = -(-len(points) // max(1, len(self._nodes.nodes)))
        blocks = plan.blocks(points, sweep.seed, min(sweep.settings.block_points, share))
        suspects = self._spread(blocks, sweep, chance, tries=2)
        self._spread([[point] for block in suspects for point in block], sweep, chance, tries=1)

    def _spread(self, blocks: Sequence[Block], sweep: Sweep, chance: int, tries: int) -> list[Block]:
        """Measure and keep `blocks`; returns those of several points that lost `tries` nodes, a single point gets a
        row. Raises TimeUsedUp where points are left because of it.
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
            sweep.check_time(even_first=True)  # nothing is measured that could end by itself
            sweep.tell("waiting: others use the nodes")

        for block, answer in self._nodes.run(self._bench, in_time(), arguments, tries=tries, waiting=waiting):
            if isinstance(answer, Lost):
                left -= {point.id for point in block}
                if len(block) > 1:
                    suspects.append(block)
                    continue
                error = f"{block[0].backend} may take nodes down, this point was alone on one: {answer.reasons[-1]}"
                sweep.keep(None, [{**block[0].key(), "status": "error", "error": error}])
            else:
                for environment, rows in answer:
                    sweep.keep(environment, rows)
                    left -= {hash_key(row) for row in rows}
            tell()
        if left:
            raise TimeUsedUp
        return suspects
