"""`latbench sweep`: measure a device and keep the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import pandas as pd
    from rich.table import Table

    from latbench.commands.live import Tell
    from latbench.plan import Point
    from latbench.sweep import Machine, Progress, Settings

BACKENDS_HELP = "Such as numba,openvino,scipy, or all; by default those that run dense layers, and on a GPU all."


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
    backends: Annotated[list[str] | None, typer.Option(help=BACKENDS_HELP)] = None,
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
        wanted = _gpu_points(device.device, workload or [], patterns or [], sparsities or [], backends or [], seed)
        _run(output, wanted, device, SETTINGS, seed, time_budget, dry_run)
        return
    if not cpu:
        raise UsageError("say what to measure: --cpu, or --gpu NAME")
    machine = sweeping.Cpu(threads or devices.cores())
    points = plan.select(
        workload or [], patterns or [], sparsities or [],
        device=machine.device, threads=machine.threads, backends=cpu_backends(backends or []), seed=seed,
    )  # fmt: skip
    _run(output, points, machine, sweeping.Settings(), seed, time_budget, dry_run)


def _gpu_points(
    device: str, names: list[str], specs: list[str], texts: list[str], backends: list[str], seed: int
) -> list[Point]:
    from latbench import plan, workloads
    from latbench.backends import on_gpu
    from latbench.gpu import points as gpu_points
    from latbench.gpu.machine import installed

    needed = {name: backend.packages[:1] for name, backend in on_gpu.BACKENDS.items()}
    shapes = [layer.shape for name in names or workloads.bundled() for layer in workloads.load(name).layers]
    return gpu_points.points(
        shapes,
        device,
        backends=_named(backends or ["all"], needed, installed()),
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
    from latbench.errors import UsageError

    if not points:
        raise UsageError("there is nothing to measure: none of these backends runs any of these layers and patterns")
    if dry_run:
        for point in points:
            typer.echo(str(point))
        return
    _measure(output or Path("latbench-tables") / machine.device, points, machine, settings, seed, time_budget)


def cpu_backends(given: Sequence[str]) -> list[str]:
    """The engines that are `given`, several in one text separated by commas; by default the standard ones of a CPU.

    stderr hears of standard ones that are not installed, because the fastest dense may be among them.
    """
    from latbench import backends, plan

    needed = {name: packages for name, (_, packages) in backends.BACKENDS.items()}
    installed = [name for name, version in backends.available().items() if version is not None]
    if given:
        return _named(given, needed, installed)
    for name in plan.STANDARD:
        if name not in installed:
            advice = f"pip install {' '.join(needed[name])}"
            typer.echo(f"latbench: {name} is left out, it is not installed here: {advice}", err=True)
    return [name for name in plan.STANDARD if name in installed]


def _named(given: Sequence[str], needed: Mapping[str, Sequence[str]], installed: Collection[str]) -> list[str]:
    """Backends by name, or all that are installed; `needed` says of each known one which packages it takes."""
    from latbench.errors import EnvironmentUnusable, UsageError

    names = dict.fromkeys(name.strip() for text in given for name in text.split(","))
    if "all" in names:
        return [name for name in needed if name in installed]
    for name in names:
        if name not in needed:
            raise UsageError(f"unknown backend {name!r}: known are {', '.join(needed)}, and all")
        if name not in installed:
            raise EnvironmentUnusable(f"{name} is not installed here: pip install {' '.join(needed[name])}")
    return list(names)


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
    failed = frame[
        frame["point_id"].isin(keys) & frame["status"].isin(["error", "timeout", "oom", "incorrect", "impossible"])
    ]
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
        heading, table = speedups
        console.print(f"\n{heading}", highlight=False, soft_wrap=True)
        console.print(table)


def speedup_table(frame: pd.DataFrame) -> tuple[str, Table] | None:
    """A heading that names the fastest dense engines, and a table: rows patterns and engines, columns sparsities, the
    median over layer shapes of the speedup over the fastest dense engine of each.

    None where no sparse point has a dense one beside it.
    """
    from rich.table import Table

    from latbench import tables
    from latbench.report.data import engine_name

    timed = tables.timed(frame)
    names = zip(timed["backend"], timed["kernel_requested"], strict=True)
    timed = timed.assign(engine=[engine_name(*pair) for pair in names])
    layer = [
        "op", "m", "k", "n", "batch", "c_in", "h", "w", "kh", "kw",
        "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w", "threads",
    ]  # fmt: skip
    dense = timed[timed["pattern"] == "dense"]
    fastest = dense.loc[dense.groupby(layer, dropna=False)["median_seconds"].idxmin()].set_index(layer)
    fastest = fastest[["median_seconds", "engine"]].add_prefix("dense_")
    sparse = timed[timed["pattern"] != "dense"].join(fastest, on=layer)
    sparse = sparse.assign(speedup=sparse["dense_median_seconds"] / sparse["median_seconds"]).dropna(subset="speedup")
    if sparse.empty:
        return None
    counts = sparse.drop_duplicates(layer)["dense_engine"].value_counts()
    engines = ", ".join(
        f"{name} in {counts[name]}" for name in sorted(counts.index, key=lambda name: (-counts[name], name))
    )
    medians = sparse.pivot_table(
        index=["pattern", "engine"], columns="sparsity_target", values="speedup", aggfunc="median"
    )
    heading = f"speedup over the fastest dense engine ({engines} of {counts.sum()} layers), median of layers:"
    table = Table("pattern", "engine", box=None, pad_edge=False)
    for sparsity in medians.columns:
        table.add_column(f"{sparsity:.0%}", justify="right")
    for (pattern, engine), row in medians.sort_index().iterrows():
        table.add_row(pattern, engine, *("" if value != value else f"{value:.2f}x" for value in row))
    return heading, table


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
