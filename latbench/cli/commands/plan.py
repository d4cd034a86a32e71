"""`latbench plan`: what a sweep would measure, how long it would take and how much disk."""

from __future__ import annotations

from typing import Annotated

import typer

from latbench.cli.commands.sweep import (
    ADAPTIVE_HELP,
    BACKENDS_HELP,
    BF16_HELP,
    GPU_HELP,
    SESSIONS_HELP,
    check_ours,
    cpu_backends,
    duration,
    estimates,
    gpu_blocks,
)


def plan(
    cpu: Annotated[bool, typer.Option("--cpu", help="Of this machine's CPU, the default.")] = False,
    gpu: Annotated[str | None, typer.Option(help=f"GPU to plan for, here or elsewhere. {GPU_HELP}")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="A bundled workload or a YAML file; repeat it.")] = None,
    patterns: Annotated[list[str] | None, typer.Option(help="Such as dense,vector:32,nm:2:4.")] = None,
    sparsities: Annotated[list[str] | None, typer.Option(help="Such as 0.5,0.75,0.9.")] = None,
    backends: Annotated[list[str] | None, typer.Option(help=BACKENDS_HELP)] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help=ADAPTIVE_HELP)] = False,
    tune: Annotated[bool, typer.Option("--tune", help="With our own CPU kernels found by trying a few.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help=BF16_HELP)] = False,
    sessions: Annotated[int, typer.Option(min=1, help=SESSIONS_HELP)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the points that a sweep of this CPU, or of a GPU, would measure, the time and the disk it would take."""
    import json
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    from cost_models import Adaptive
    from latbench.backends import available
    from latbench.errors import UsageError
    from latbench.machines.devices import count_cores, name_cpu
    from latbench.workloads.points import FINE_SPARSITIES, SPARSITIES, Point, PointSetup, select_points
    from latbench.workloads.workload import list_workloads

    if gpu is not None:
        if cpu:
            raise UsageError("a plan is either of the CPU (--cpu) or of a GPU (--gpu)")
        if threads:
            raise UsageError("--threads is for a plan without --gpu")
        check_ours([], tune=tune, bf16=bf16)
    names = workload or list_workloads()
    once, in_bytes, assumed = estimates(gpu is not None)
    usual = FINE_SPARSITIES if adaptive else SPARSITIES
    if gpu is None:
        device, threads = name_cpu(), threads or count_cores()
        engines = cpu_backends(backends or [])
        check_ours(engines, tune=tune, bf16=bf16)
        versions = {name: version for name, version in available().items() if name in engines}
    else:
        device, versions = _of_gpu(gpu)
        threads = 1
        if None in versions.values():
            assumed = f"every engine installed, {assumed}"

    def select(chosen: list[str]) -> list[Point]:
        if gpu is None:
            points = select_points(
                chosen,
                patterns or [],
                sparsities or [],
                PointSetup(device=device, threads=threads, backends=engines, tune=tune, bf16=bf16),
                default_sparsities=usual,
            )
        else:
            blocks = gpu_blocks(
                device, chosen, patterns or [], sparsities or [], backends or [], versions, "here", adaptive=adaptive
            )
            points = [point for block in blocks for point in block]
        return Adaptive(points).anchors if adaptive else points

    def in_seconds(points: list[Point]) -> float:
        return sessions * once(points)  # most of the time goes into preparing

    every = select(names)
    each = {name: select([name]) for name in names}
    seconds, size = in_seconds(every), in_bytes(every)
    used = {point.backend for point in every}
    versions = {name: version for name, version in versions.items() if name in used}
    if as_json:
        document = {
            "device": device,
            "threads": threads,
            "backends": versions,
            "points": len(every),
            "shapes": len({point.shape for point in every}),
            "estimated_seconds": round(seconds),
            "estimated_bytes": size,
            "assumed": assumed,
            "patterns": dict(Counter(str(point.pattern) for point in every)),
            "workloads": {
                name: {"points": len(points), "shapes": len({point.shape for point in points})}
                for name, points in each.items()
            },
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("workload", "shapes", "points", "about"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for name, points in each.items():
        shapes = len({point.shape for point in points})
        table.add_row(str(name), str(shapes), str(len(points)), duration(in_seconds(points)))
    if len(each) > 1:
        distinct = len({point.shape for point in every})
        table.add_row("all, equal shapes once", str(distinct), str(len(every)), duration(seconds))
    console = Console()
    console.print(table)
    console.print(
        f"\non {device}{f' with {threads} threads' if gpu is None else ''}: {', '.join(versions)}; "
        f"about {duration(seconds)} and "
        f"{size / 1e6:.1f} MB of disk"
        + (" for the anchors; then what the time budget allows" if adaptive else "")
        + f" (it assumes {assumed})",
        highlight=False,
        soft_wrap=True,
    )


def _of_gpu(wanted: str) -> tuple[str, dict[str, str | None]]:
    """Return the name of a GPU in tables and the engines that run there.

    For a GPU of this machine these are the installed engines, with their versions. For one elsewhere these are all
    engines, and the name is as far as `wanted` tells it. Raises UsageError for an unknown name.
    """
    from latbench.backends import on_gpu
    from latbench.backends.gpu_installation import installed
    from latbench.machines.gpu_discovery import list_gpus
    from latbench.machines.gpu_names import find_device_name, parse_wanted_gpu, select_gpu

    asked = parse_wanted_gpu(wanted)
    here = list_gpus()[0]
    gpu = select_gpu(asked, here) if here else None
    if gpu is not None:
        return gpu.device, dict(installed())
    return find_device_name(asked.name), dict.fromkeys(on_gpu.BACKENDS)
