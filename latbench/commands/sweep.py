"""`latbench sweep`: measure a device and keep the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from rich.table import Table

    from latbench.commands.live import Tell
    from latbench.plan import Point
    from latbench.sweep import Machine, Progress, Settings


def sweep(
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure this machine's CPU.")] = False,
    gpu: Annotated[str | None, typer.Option(help="Measure a GPU: a100, h100, h200, t4, v100 ...")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="A bundled workload or a YAML file; repeat it.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the table; default latbench-tables/<device>.")
    ] = None,
    time_budget: Annotated[float | None, typer.Option(min=0, help="Stop after about so many seconds.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.")] = None,
    patterns: Annotated[list[str] | None, typer.Option(help="Such as dense,vector:32,nm:2:4.")] = None,
    sparsities: Annotated[list[str] | None, typer.Option(help="Such as 0.5,0.75,0.9.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic weights and of the order.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and measure nothing.")] = False,
) -> None:
    """Measure kernels, patterns and sparsities on the layers of workloads; what is measured already is skipped."""
    from latbench import devices, plan
    from latbench import sweep as sweeping
    from latbench.errors import UsageError

    if gpu is not None:
        if cpu:
            raise UsageError("--cpu and --gpu are two sweeps: each device has a table of its own")
        from latbench.gpu.machine import SETTINGS, GpuMachine

        device = GpuMachine(devices.demand_gpu(gpu))
        wanted = _gpu_points(device.device, workload or [], patterns or [], sparsities or [], seed)
        _run(output, wanted, device, SETTINGS, seed, time_budget, dry_run)
        return
    if not cpu:
        raise UsageError("say what to measure: --cpu, or --gpu NAME")
    machine = sweeping.Cpu(threads or devices.cores())
    points = plan.select(
        workload or [], patterns or [], sparsities or [],
        device=machine.device, threads=machine.threads, backends=installed_backends(), seed=seed,
    )  # fmt: skip
    _run(output, points, machine, sweeping.Settings(), seed, time_budget, dry_run)


def _gpu_points(device: str, names: list[str], specs: list[str], texts: list[str], seed: int) -> list[Point]:
    from latbench import plan, workloads
    from latbench.gpu import points as gpu_points
    from latbench.gpu.machine import installed

    shapes = [layer.shape for name in names or workloads.bundled() for layer in workloads.load(name).layers]
    return gpu_points.points(
        shapes,
        device,
        backends=list(installed()),
        patterns=plan.parse_patterns(specs) if specs else None,
        sparsities=plan.parse_sparsities(texts) if texts else gpu_points.SPARSITIES,
        seed=seed,
    )


def _run(
    output: Path | None,
    points: list[Point],
    machine: Machine,
    settings: Settings,
    seed: int,
    time_budget: float | None,
    dry_run: bool,
) -> None:
    if dry_run:
        for point in points:
            typer.echo(str(point))
        return
    _measure(output or Path("latbench-tables") / machine.device, points, machine, settings, seed, time_budget)


def installed_backends() -> list[str]:
    """The engines that can run here; stderr hears of those that cannot, because the fastest dense may be one."""
    from latbench import backends

    versions = backends.available()
    for name, version in versions.items():
        if version is None:
            needed = " ".join(backends.BACKENDS[name][1])
            typer.echo(f"latbench: {name} is left out, it is not installed here: pip install {needed}", err=True)
    return [name for name, version in versions.items() if version is not None]


def duration(seconds: float) -> str:
    """Seconds in words short enough for a column."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _measure(
    folder: Path, points: list[Point], machine: Machine, settings: Settings, seed: int, time_budget: float | None
) -> None:
    import os
    import signal
    from collections import Counter

    from rich.console import Console

    from latbench import devices, tables
    from latbench import sweep as sweeping
    from latbench.commands.live import live

    # What ends a job on a cluster is as good a reason to keep what is finished as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with live() as tell:
        summary = sweeping.run(
            folder,
            lambda table: points,
            machine=machine,
            settings=settings,
            seed=seed,
            time_budget=time_budget,
            report=_with_time_left(tell),
        )
    frame = tables.read(folder)
    console = Console()
    counts = Counter(summary.statuses.values())
    fresh = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    known = f"{summary.skipped} were there already" if summary.skipped else ""
    console.print(f"{folder}: " + "; ".join(part for part in (fresh, known) if part), highlight=False, soft_wrap=True)
    keys = {point.id for point in points}
    failed = frame[frame["point_id"].isin(keys) & frame["status"].isin(["error", "timeout", "oom", "incorrect"])]
    for (status, error), rows in failed.groupby(["status", "error"], sort=False):
        console.print(f"{len(rows)} {status}: {error}", highlight=False, soft_wrap=True)
    ours = frame[frame["point_id"].isin(set(summary.statuses))]
    disturbed = int((tables.timed(ours)["flags"] == "preempted").sum())
    for count, what in (
        (counts["noisy"], "are noisy, their intervals are wide: the same command measures them again"),
        (disturbed, "were measured while other processes took the cores: their times may be too long"),
    ):
        if count:
            load = f"the load is {os.getloadavg()[0]:.1f} on {devices.cores()} cores"
            console.print(f"{count} points {what} ({load})", highlight=False, soft_wrap=True)
    speedups = speedup_table(frame[frame["point_id"].isin(keys)])
    if speedups is not None:
        console.print("\nspeedup over the fastest dense engine, median of layers:")
        console.print(speedups)


def speedup_table(frame: pd.DataFrame) -> Table | None:
    """Rows patterns, columns sparsities: the median over layer shapes of the speedup over the fastest dense engine.

    None where no sparse point has a dense one beside it.
    """
    from rich.table import Table

    from latbench import tables

    timed = tables.timed(frame)
    layer = [
        "op", "m", "k", "n", "batch", "c_in", "h", "w", "kh", "kw",
        "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w", "threads",
    ]  # fmt: skip
    fastest = timed[timed["pattern"] == "dense"].groupby(layer, dropna=False)["median_seconds"].min()
    sparse = timed[timed["pattern"] != "dense"].join(fastest.rename("dense_seconds"), on=layer)
    sparse = sparse.assign(speedup=sparse["dense_seconds"] / sparse["median_seconds"]).dropna(subset="speedup")
    if sparse.empty:
        return None
    medians = sparse.pivot_table(index="pattern", columns="sparsity_target", values="speedup", aggfunc="median")
    table = Table(box=None, pad_edge=False)
    table.add_column("pattern")
    for sparsity in medians.columns:
        table.add_column(f"{sparsity:.0%}", justify="right")
    for pattern, row in medians.sort_index().iterrows():
        table.add_row(str(pattern), *("" if value != value else f"{value:.2f}x" for value in row))
    return table


def _with_time_left(tell: Tell) -> Callable[[Progress], None]:
    """What a sweep reports to: adds how long it will take, from how long its points took so far."""
    import time

    began, before = time.monotonic(), None

    def report(now: Progress) -> None:
        nonlocal before
        before = now.done if before is None else before
        left = ""
        if now.done > before:
            seconds = (time.monotonic() - began) / (now.done - before) * (now.total - now.done)
            left = f", about {duration(seconds)} left"
        tell(now.activity + left, now.done, now.total or None)

    return report
