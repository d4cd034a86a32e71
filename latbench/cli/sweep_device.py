"""The device that `latbench sweep` measures: this machine's CPU, one of its GPUs, or the nodes of a cluster."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from latbench.cli.sweep_points import Installed, select_engines

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from latbench.sweeping.gpu_machine import GpuMachine
    from latbench.sweeping.settings import SweepSummary

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepCommandOptions:
    """What a command line says of a sweep besides its points.

    Attributes
    ----------
    seed : int
        Random seed of weights and order.
    time_budget : float or None
        Seconds that the sweep may take; None for no limit.
    wait_seconds : float
        Seconds to wait at most for another sweep of the same device.
    sessions : int
        Processes per point, one after the other.
    adaptive : bool
        Whether points are chosen during the sweep.
    remeasure : bool
        Whether noisy points are measured again.
    dry_run : bool
        Whether points are listed and not measured.
    as_json : bool
        Whether the summary is JSON.
    """

    seed: int
    time_budget: float | None
    wait_seconds: float
    sessions: int
    adaptive: bool
    remeasure: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True)
class SweepDevice:
    """A device to measure, and what measures it.

    Attributes
    ----------
    device : str
        The device's name in tables.
    threads : int
        Threads of each engine; 1 for a GPU.
    installed : Installed
        The engines that can be used there.
    run : callable
        `latbench.sweeping.sweep.run_sweep` for this device.
    close : callable
        Ends what `run` may have started.
    gpu : bool
        Whether it is a GPU.
    current : callable
        Returns for each row of a table whether it timed the versions that are installed.
    """

    device: str
    threads: int
    installed: Installed
    run: Callable[..., SweepSummary]
    current: Callable[[pd.DataFrame], NDArray[np.bool_]]
    close: Callable[[], None] = lambda: None
    gpu: bool = False


def open_cpu(threads: int | None, sessions: int) -> SweepDevice:
    """Return this machine's CPU. Raises UsageError for more threads than processors."""
    from latbench.machines.processors import select_threads
    from latbench.sweeping.settings import CPU_SETTINGS
    from latbench.sweeping.sweep import run_sweep
    from latbench.sweeping.sweep_machine import CpuMachine

    cpu = CpuMachine(select_threads(threads))
    there = [name for name, version in cpu.versions.packages.items() if version is not None]
    run = functools.partial(run_sweep, machine=cpu, settings=replace(CPU_SETTINGS, sessions=sessions))
    return SweepDevice(cpu.device, cpu.threads, Installed(there), run, cpu.current)


def open_gpu(wanted: str, given: Sequence[str], how: SweepCommandOptions) -> SweepDevice:
    """Return a GPU of this machine, with the engines that can use it.

    Raises EnvironmentUnusable where the GPU is not here, or where an engine that is needed cannot use it.
    """
    from latbench.backends.gpu.gpu_installation import find_installed
    from latbench.machines.gpu_discovery import find_gpu
    from latbench.sweeping.gpu_machine import GPU_SETTINGS, GpuMachine
    from latbench.sweeping.sweep import run_sweep

    machine = GpuMachine(find_gpu(wanted))
    try:
        there = list(find_installed()) if how.dry_run else _start_engines(machine, given, how.wait_seconds)
    except BaseException:
        machine.close()
        raise
    run = functools.partial(run_sweep, machine=machine, settings=replace(GPU_SETTINGS, sessions=how.sessions))
    return SweepDevice(machine.device, 1, Installed(there), run, machine.current, machine.close, gpu=True)


def _start_engines(machine: GpuMachine, given: Sequence[str], wait_seconds: float) -> list[str]:
    """Start the given engines, or all that are installed, and return those that can use the GPU.

    Prints why others are left out. Engines given by name are all needed; otherwise the standard engines are: the
    dense baseline and our kernels. Raises EnvironmentUnusable where one of these cannot use the GPU.
    """
    from latbench.backends.gpu.gpu_installation import explain_driver_refusals, explain_missing, find_installed
    from latbench.base.engine_registry import GPU_ENGINES, list_standard
    from latbench.sweeping.sweep import lock_machine

    named = [] if not given else select_engines(given, dict.fromkeys(GPU_ENGINES, ()), Installed(GPU_ENGINES))
    by_name = 0 < len(named) < len(GPU_ENGINES)
    wanted = named if by_name else list(find_installed())
    needed = named if by_name else list_standard(GPU_ENGINES)
    refusals = explain_missing(machine.gpu) | explain_driver_refusals(machine.gpu, find_installed())
    _check_needed(machine.gpu.name, needed, refusals, [] if by_name else wanted)
    wanted = [name for name in wanted if name not in refusals]
    # Processes that start would disturb a sweep that measures there now.
    with lock_machine(machine, wait_seconds, lambda now: _LOG.warning(now.activity)):
        _LOG.warning(f"{machine.gpu.name}: starting {', '.join(wanted)}")
        refusals |= machine.start(wanted)
    _check_needed(machine.gpu.name, needed, refusals, [] if by_name else wanted)
    for name, reason in ({} if by_name else refusals).items():
        _LOG.warning(f"{name} is left out: {reason}")
    return [name for name in wanted if name not in refusals]


def _check_needed(gpu: str, needed: Collection[str], refusals: Mapping[str, str], others: Sequence[str]) -> None:
    """Raise EnvironmentUnusable where an engine that is needed is refused; `others` can be timed without it."""
    from latbench.base.engine_registry import GPU_ENGINES
    from latbench.errors import EnvironmentUnusable

    for name in needed:
        if name in refusals:
            left = [other for other in others if other not in refusals]
            instead = f"; to measure without: --backends {','.join(left)}" if left else ""
            standard, ours = GPU_ENGINES[name].standard, GPU_ENGINES[name].ours
            role = f"{'our kernels' if ours else 'the dense baseline'} ({name})" if standard else name
            raise EnvironmentUnusable(f"{role} cannot use {gpu}: {refusals[name]}{instead}")


def open_cluster(
    on: str, gpu: str | None, threads: int | None, how: SweepCommandOptions, settings: Sequence[str]
) -> SweepDevice:
    """Return the nodes of a cluster that have the GPU, or for None a CPU alone; `settings` are those of Slurm.

    Raises UsageError for more threads than a node has processors.
    """
    from latbench.errors import UsageError
    from latbench.runners.ray_nodes import RayNodes
    from latbench.runners.slurm_nodes import SlurmNodes
    from latbench.sweeping.cluster import ClusterSite, survey_nodes
    from latbench.sweeping.gpu_machine import GPU_SETTINGS
    from latbench.sweeping.settings import CPU_SETTINGS
    from latbench.sweeping.sweep import run_sweep_on_cluster

    _check_cluster(on, gpu)

    cluster = RayNodes(gpu) if on == "ray" else SlurmNodes(gpu, settings, _LOG.warning)
    try:
        common = survey_nodes(cluster, gpu, _LOG.warning)
        if threads is not None and threads > common.processors:
            raise UsageError(
                f"--threads {threads}: one of the nodes may use {common.processors} processors only, and more "
                "threads would only wait; use no more than that"
            )
    except BaseException:
        cluster.close()
        raise
    threads = threads or common.cores
    one = (
        ("latbench.sweeping.sweep_machine:CpuMachine", threads)
        if gpu is None
        else ("latbench.sweeping.cluster:open_gpu_machine", gpu)
    )
    machine = ("latbench.sweeping.cluster:open_matching_machine", common, gpu, one)
    sampling = replace(CPU_SETTINGS if gpu is None else GPU_SETTINGS, sessions=how.sessions)
    where = ClusterSite(cluster, common.device, machine, how.seed, sampling, how.wait_seconds, current=common.current)
    run = functools.partial(run_sweep_on_cluster, elsewhere=where, settings=sampling)

    def close() -> None:
        cluster.close()
        while cluster.lost:
            _LOG.warning(cluster.lost.popitem()[1])

    installed = Installed(common.backends, "on all nodes")
    return SweepDevice(common.device, threads, installed, run, common.current, close, gpu is not None)


def _check_cluster(on: str, gpu: str | None) -> None:
    """Raise UsageError for an unknown kind of cluster, and for a GPU that is unknown or has an index."""
    from latbench.errors import UsageError
    from latbench.machines.gpu_names import find_device_name, parse_wanted_gpu

    if on not in ("ray", "slurm"):
        raise UsageError(f"--on takes ray or slurm, not {on!r}; without it the sweep runs on this machine")
    if gpu is None:
        return
    wanted = parse_wanted_gpu(gpu)
    find_device_name(wanted.name)
    if wanted.index is not None:
        raise UsageError(
            f"--gpu {gpu} with --on {on}: the cluster chooses the GPU of a node; type --gpu {wanted.name}"
        )
