"""`latbench plan`: the points of a sweep, and an estimate of its time and disk space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import (
    Adaptive,
    Bf16,
    Engines,
    Int8,
    Json,
    Patterns,
    Sessions,
    Sparsities,
    Threads,
    Tune,
    Workloads,
)
from latbench.cli.options.sweep_options import PlanCpu, PlanGpu
from latbench.cli.sweep_points import (
    Installed,
    PointOptions,
    build_estimate,
    check_cpu_kernel_options,
    format_duration,
    list_rounded,
    select_cpu_engines,
    select_cpu_points,
    select_gpu_blocks,
)

if TYPE_CHECKING:
    from latbench.workloads.points import Point


def plan(
    cpu: PlanCpu = False,
    gpu: PlanGpu = None,
    workload: Workloads = None,
    patterns: Patterns = None,
    sparsities: Sparsities = None,
    backends: Engines = None,
    threads: Threads = None,
    adaptive: Adaptive = False,
    tune: Tune = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    sessions: Sessions = 1,
    as_json: Json = False,
) -> None:
    """Show the points that a sweep of a CPU or GPU would measure, its time and its disk space."""
    from latbench.errors import UsageError
    from latbench.workloads.workload import list_standard_workloads

    options = PointOptions(
        workload or (), patterns or (), sparsities or (), backends or (), adaptive, tune, list_rounded(bf16, int8)
    )
    if gpu is not None:
        if cpu:
            raise UsageError("a plan is for the CPU (--cpu) or for a GPU (--gpu), not for both")
        if threads:
            raise UsageError("--threads is for a plan without --gpu")
        check_cpu_kernel_options([], options)
    device = _plan_cpu(options, threads) if gpu is None else _plan_gpu(options, gpu)
    names = [str(name) for name in workload or list_standard_workloads()]
    every = device.select(names)
    each = {name: device.select([name]) for name in names}
    used = {point.backend for point in every}
    device = device._replace(versions={name: version for name, version in device.versions.items() if name in used})
    if as_json:
        _print_json(device, every, each, sessions)
    else:
        _print_table(device, every, each, sessions, adaptive)


class _PlannedDevice(NamedTuple):
    """A device to plan for.

    `versions` holds the version by engine, None where it is unknown, and `select` returns the points of workloads.
    `threads` is None for a GPU.
    """

    device: str
    threads: int | None
    versions: Mapping[str, str | None]
    select: Callable[[list[str]], list[Point]]

    @property
    def assumed(self) -> str:
        """What the estimate assumes, in words."""
        assumed = build_estimate(self.threads is None).assumed
        return f"every engine installed, {assumed}" if None in self.versions.values() else assumed

    def seconds(self, points: list[Point], sessions: int) -> float:
        """Return the estimated seconds of a sweep; each session prepares every point anew, which takes most of it."""
        return sessions * build_estimate(self.threads is None).seconds(points)

    def table_bytes(self, points: list[Point]) -> int:
        """Return the estimated bytes of the table."""
        return build_estimate(self.threads is None).table_bytes(points)


def _anchors(points: list[Point], adaptive: bool) -> list[Point]:
    """Return the points whose number is known beforehand: of an adaptive sweep its anchors, else all."""
    from cost_models.adaptive_planner import AdaptivePlanner

    return AdaptivePlanner(points).anchors if adaptive else points


def _plan_cpu(options: PointOptions, threads: int | None) -> _PlannedDevice:
    """Return this machine's CPU with the engines of a sweep."""
    from dataclasses import replace

    from latbench.backends.installed_engines import list_cpu_versions
    from latbench.machines.devices import name_cpu
    from latbench.machines.processors import select_threads

    device, count = name_cpu(), select_threads(threads)
    engines = select_cpu_engines(options.backends)
    check_cpu_kernel_options(engines, options)
    versions = {name: version for name, version in list_cpu_versions().items() if name in engines}

    def select(names: list[str]) -> list[Point]:
        points = select_cpu_points(replace(options, workloads=names), device, count, engines)
        return _anchors(points, options.adaptive)

    return _PlannedDevice(device, count, versions, select)


def _plan_gpu(options: PointOptions, wanted: str) -> _PlannedDevice:
    """Return a GPU with its engines: the installed ones for a GPU of this machine, else all.

    A GPU elsewhere is named as far as `wanted` tells it. Raises UsageError for an unknown name.
    """
    from dataclasses import replace

    from latbench.backends.gpu.gpu_installation import find_installed
    from latbench.base.engine_registry import GPU_ENGINES
    from latbench.machines.gpu_discovery import list_gpus
    from latbench.machines.gpu_names import find_device_name, parse_wanted_gpu, select_gpu

    asked = parse_wanted_gpu(wanted)
    here = list_gpus()[0]
    gpu = select_gpu(asked, here) if here else None
    device = find_device_name(asked.name) if gpu is None else gpu.device
    versions: dict[str, str | None] = dict.fromkeys(GPU_ENGINES) if gpu is None else dict(find_installed())

    def select(names: list[str]) -> list[Point]:
        blocks = select_gpu_blocks(replace(options, workloads=names), device, Installed(versions))
        return _anchors([point for block in blocks for point in block], options.adaptive)

    return _PlannedDevice(device, None, versions, select)


def _count_shapes(points: list[Point]) -> int:
    return len({point.shape for point in points})


def _print_json(device: _PlannedDevice, every: list[Point], each: dict[str, list[Point]], sessions: int) -> None:
    from collections import Counter

    document = {
        "device": device.device,
        "threads": device.threads or 1,
        "backends": device.versions,
        "points": len(every),
        "shapes": _count_shapes(every),
        "estimated_seconds": round(device.seconds(every, sessions)),
        "estimated_bytes": device.table_bytes(every),
        "assumed": device.assumed,
        "patterns": dict(Counter(str(point.pattern) for point in every)),
        "workloads": {
            name: {"points": len(points), "shapes": _count_shapes(points)} for name, points in each.items()
        },
    }
    print_json(document)


def _print_table(
    device: _PlannedDevice, every: list[Point], each: dict[str, list[Point]], sessions: int, adaptive: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_threads

    table = Table(box=None, pad_edge=False)
    for heading in ("workload", "shapes", "points", "about"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    rows = dict(each)
    if len(each) > 1:
        rows["all, equal shapes once"] = every
    for name, points in rows.items():
        about = format_duration(device.seconds(points, sessions))
        table.add_row(name, str(_count_shapes(points)), str(len(points)), about)
    console = Console()
    console.print(table)
    threads = f" with {format_threads(device.threads)}" if device.threads is not None else ""
    console.print(
        f"\non {device.device}{threads}: {', '.join(device.versions)}; "
        f"about {format_duration(device.seconds(every, sessions))} and "
        f"{device.table_bytes(every) / 1e6:.1f} MB of disk"
        + (" for the anchors; then what the time budget allows" if adaptive else "")
        + f" (assumptions: {device.assumed})",
        highlight=False,
        soft_wrap=True,
    )
