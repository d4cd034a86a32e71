"""`latbench sweep`: measure a device and keep the table."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latbench import MOST_SEED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray
    from rich.table import Table

    from cost_models import Adaptive
    from latbench.cli.commands.progress import Tell
    from latbench.sweeping.gpu_machine import GpuMachine
    from latbench.sweeping.settings import Progress, SweepSummary
    from latbench.tables.storage import Place
    from latbench.workloads.points import Point

ADAPTIVE_HELP = "Six sparsities a curve first, then those that they say least about, or that are near break-even."
BF16_HELP = (
    "Also layers on a CPU in bfloat16: our own with rounded weights, and with all rounded, beside dense ones so."
)
FAILED = ("throttled", "impossible", "oom", "incorrect", "timeout", "error")  # which a summary tells the reasons of
BACKENDS_HELP = "Such as numba,openvino,scipy, or all; by default those that run dense layers, and on a GPU all."

GPU_HELP = (
    "NAME or NAME:INDEX: h200, rtx-4090, a100:2, or the full name. INDEX counts from 0, as nvidia-smi does; with "
    "CUDA_VISIBLE_DEVICES set, in its order. `latbench doctor` prints what to type."
)
ON_HELP = (
    "ray: measure on all nodes of a Ray cluster (RAY_ADDRESS names it) that have the GPU, or no GPU (--cpu); "
    "slurm: in jobs of a Slurm cluster that have a node each for themselves."
)
QUICK_SECONDS = 300.0
QUICK_HELP = (
    "Measure only the points that tell most about a GPU, about five minutes. The same command without --quick "
    "goes on from there."
)
SESSIONS_HELP = (
    "Measure each point in so many processes, one after the other, so that no time hangs on where things lie in the "
    "memory of one; the sweep takes almost as many times longer."
)
SLURM_HELP = "nodes=4 (default 1), time=120 (minutes a job, default 60), partition=, account=, ...: as for sbatch."


def sweep(
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure this machine's CPU.")] = False,
    gpu: Annotated[str | None, typer.Option(help=f"GPU to measure. {GPU_HELP}")] = None,
    on: Annotated[str | None, typer.Option("--on", help=ON_HELP)] = None,
    slurm: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=SLURM_HELP)] = None,
    workload: Annotated[list[str] | None, typer.Option(help="A bundled workload or a YAML file; repeat it.")] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Folder or URI of the table; default latbench-tables/<device>."),
    ] = None,
    time_budget: Annotated[str | None, typer.Option(help="Stop after about so long: 90s, 10m, 1.5h.")] = None,
    wait: Annotated[str, typer.Option(help="How long to wait for another that measures on the same device.")] = "10m",
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    adaptive: Annotated[bool, typer.Option("--adaptive", help=ADAPTIVE_HELP)] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.")] = None,
    patterns: Annotated[list[str] | None, typer.Option(help="Such as dense,vector:32,nm:2:4.")] = None,
    sparsities: Annotated[list[str] | None, typer.Option(help="Such as 0.5,0.75,0.9.")] = None,
    backends: Annotated[list[str] | None, typer.Option(help=BACKENDS_HELP)] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Also find our own CPU kernels by trying a few.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help=BF16_HELP)] = False,
    sessions: Annotated[int, typer.Option(min=1, help=SESSIONS_HELP)] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of the synthetic weights and of the order.")] = 0,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again what is noisy in the table.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON instead of tables.")] = False,
) -> None:
    """Measure kernels, patterns and sparsities on the layers of workloads; what is measured already is skipped."""
    from latbench.errors import UsageError
    from latbench.workloads.points import FINE_SPARSITIES, SPARSITIES, PointSetup, select_points

    seconds = None if time_budget is None else parse_duration(time_budget)
    how = How(seed, seconds, parse_duration(wait), sessions, adaptive, remeasure, dry_run, as_json)
    if cpu == (gpu is not None):
        raise UsageError(
            "--cpu and --gpu are two sweeps: each device has a table of its own"
            if cpu
            else "say what to measure: --cpu, or --gpu NAME"
        )
    if gpu is not None:
        check_ours([], tune=tune, bf16=bf16)
    if quick and (gpu is None or adaptive or on is not None):
        raise UsageError("--quick is for --gpu on this machine, without --adaptive; otherwise use --time-budget 5m")
    if slurm and on != "slurm":
        raise UsageError("--slurm is for a sweep with --on slurm")
    _end_as_by_ctrl_c()
    with contextlib.ExitStack() as stack:
        blocks = None
        if on is not None:
            target = _elsewhere(on, gpu, threads, how, slurm or [])
        elif gpu is not None:
            target = _gpu_here(gpu, backends or [], how)
        else:
            target = _cpu_here(threads, sessions)
        stack.callback(target.close)
        if gpu is not None:
            blocks = gpu_blocks(
                target.device, workload or [], patterns or [], sparsities or [], backends or [], target.backends,
                target.where, seed=seed, adaptive=adaptive,
            )  # fmt: skip
            if quick:
                blocks = within(blocks, QUICK_SECONDS)
            points = [point for block in blocks for point in block]
        else:
            engines = cpu_backends(backends or [], target.backends, target.where)
            check_ours(engines, tune=tune, bf16=bf16)
            points = select_points(
                workload or [],
                patterns or [],
                sparsities or [],
                PointSetup(
                    device=target.device, threads=target.threads, backends=engines, seed=seed, tune=tune, bf16=bf16
                ),
                default_sparsities=FINE_SPARSITIES if adaptive else SPARSITIES,
            )
        # Blocks in their order are for one machine: the nodes of a cluster measure many at the same time.
        _run(output, points, target, how, blocks if on is None and not adaptive else None)


@dataclass(frozen=True)
class Target:
    """What is measured, and by whom: the device's name, threads (of a CPU), the backends that are installed `where`
    it is measured; whether it is a GPU.

    `run` is `latbench.sweeping.sweep.run_sweep` for it; nothing is measured or held any more after `close`. `current`
    tells which rows of a table timed the versions that are there; by default all.
    """

    device: str
    threads: int
    backends: Collection[str]
    run: Callable[..., SweepSummary]
    close: Callable[[], None] = lambda: None
    where: str = "here"
    gpu: bool = False
    current: Callable[[pd.DataFrame], NDArray[np.bool_]] | None = None


def _cpu_here(threads: int | None, sessions: int) -> Target:
    """Return this machine's CPU. Raises UsageError for more threads than processors."""
    from latbench import backends
    from latbench.errors import UsageError
    from latbench.machines.devices import count_cores, list_allowed_processors
    from latbench.sweeping.settings import CPU_SETTINGS
    from latbench.sweeping.sweep import run_sweep
    from latbench.sweeping.sweep_machine import CpuMachine

    if threads is not None and threads > (most := len(list_allowed_processors())):
        raise UsageError(f"--threads {threads}: this process may run on {most} processors, more would only wait")
    cpu = CpuMachine(threads or count_cores())
    there = [name for name, version in backends.available().items() if version is not None]
    run = functools.partial(run_sweep, machine=cpu, settings=replace(CPU_SETTINGS, sessions=sessions))
    return Target(cpu.device, cpu.threads, there, run)


def _gpu_here(wanted: str, given: Sequence[str], how: How) -> Target:
    """Return a GPU of this machine, with the engines that can use it. Raises EnvironmentUnusable where the GPU is not
    here, or where an engine that is needed cannot use it.
    """
    from latbench.backends.gpu_installation import installed
    from latbench.machines.gpu_discovery import find_gpu
    from latbench.sweeping.gpu_machine import GPU_SETTINGS, GpuMachine
    from latbench.sweeping.sweep import run_sweep

    machine = GpuMachine(find_gpu(wanted))
    try:
        there = list(installed()) if how.dry_run else _ready(machine, given, how.wait_seconds)
    except BaseException:
        machine.close()
        raise
    run = functools.partial(run_sweep, machine=machine, settings=replace(GPU_SETTINGS, sessions=how.sessions))
    return Target(machine.device, 1, there, run, machine.close, gpu=True, current=machine.current)


def _ready(machine: GpuMachine, given: Sequence[str], wait_seconds: float) -> list[str]:
    """Start the engines that are `given`, or all that are installed, and return those that can use the GPU.

    Prints why others are left out. Raises EnvironmentUnusable where an engine that is needed cannot use it. Engines
    given by name are all needed; otherwise these are the dense baseline and our kernels.
    """
    from latbench.backends.gpu_installation import NEEDED, installed, missing, refused_by_driver
    from latbench.backends.on_gpu import BACKENDS
    from latbench.sweeping.sweep import lock_machine

    named = [] if not given else _named(given, dict.fromkeys(BACKENDS, ()), BACKENDS, "here")
    by_name = 0 < len(named) < len(BACKENDS)
    wanted = named if by_name else list(installed())
    needed = named if by_name else list(NEEDED)
    refusals = missing(machine.gpu) | refused_by_driver(machine.gpu, installed())
    _refuse(machine.gpu.name, needed, refusals, [] if by_name else wanted)
    wanted = [name for name in wanted if name not in refusals]
    # Processes that start would disturb a sweep that measures there now.
    with lock_machine(machine, wait_seconds, lambda now: typer.echo(f"latbench: {now.activity}", err=True)):
        typer.echo(f"latbench: {machine.gpu.name}: starting {', '.join(wanted)}", err=True)
        refusals |= machine.start(wanted)
    _refuse(machine.gpu.name, needed, refusals, [] if by_name else wanted)
    for name, reason in ({} if by_name else refusals).items():
        typer.echo(f"latbench: {name} is left out: {reason}", err=True)
    return [name for name in wanted if name not in refusals]


def _refuse(gpu: str, needed: Sequence[str], refusals: Mapping[str, str], others: Sequence[str]) -> None:
    """Raise EnvironmentUnusable where an engine that is needed is refused; `others` could be timed without it."""
    from latbench.errors import EnvironmentUnusable

    roles = {"torch_gpu": "the dense baseline (torch_gpu)", "cupy": "our kernels (cupy)"}
    for name in needed:
        if name in refusals:
            left = [other for other in others if other not in refusals]
            instead = f"; to measure without: --backends {','.join(left)}" if left else ""
            raise EnvironmentUnusable(f"{roles.get(name, name)} cannot use {gpu}: {refusals[name]}{instead}")


def _elsewhere(on: str, gpu: str | None, threads: int | None, how: How, options: Sequence[str]) -> Target:
    """The nodes of a cluster that have the GPU, or a CPU alone."""
    from latbench.errors import UsageError
    from latbench.machines.gpu_names import find_device_name, parse_wanted_gpu
    from latbench.runners.ray_nodes import RayNodes
    from latbench.runners.slurm_nodes import SlurmNodes
    from latbench.sweeping.cluster import ClusterSite, survey_nodes
    from latbench.sweeping.gpu_machine import GPU_SETTINGS
    from latbench.sweeping.settings import CPU_SETTINGS
    from latbench.sweeping.sweep import run_sweep_on_cluster

    if on not in ("ray", "slurm"):
        raise UsageError(f"a sweep runs here, or on the nodes of a cluster with --on ray or slurm, not on {on!r}")
    if gpu is not None:
        wanted = parse_wanted_gpu(gpu)
        find_device_name(wanted.name)
        if wanted.index is not None:
            raise UsageError(
                f"--gpu {gpu} with --on {on}: the cluster chooses the GPU of a node; type --gpu {wanted.name}"
            )
    settings = replace(CPU_SETTINGS if gpu is None else GPU_SETTINGS, sessions=how.sessions)

    def tell(line: str) -> None:
        typer.echo(f"latbench: {line}", err=True)

    cluster = RayNodes(gpu) if on == "ray" else SlurmNodes(gpu, options, tell)
    try:
        common = survey_nodes(cluster, gpu, tell)
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
    where = ClusterSite(cluster, common.device, machine, how.seed, settings, how.wait_seconds, current=common.current)
    run = functools.partial(run_sweep_on_cluster, elsewhere=where, settings=settings)

    def close() -> None:
        cluster.close()
        while cluster.lost:
            typer.echo(f"latbench: {cluster.lost.popitem()[1]}", err=True)

    return Target(
        common.device, threads, common.backends, run, close, "on all nodes", gpu is not None, common.current
    )


@dataclass(frozen=True)
class How:
    """How a sweep goes: seed, seconds it may take, seconds it may wait for another to end, in how many sessions each
    point is measured, whether points are chosen on the way, whether noisy rows are taken again, what is printed.
    """

    seed: int
    time_budget: float | None
    wait_seconds: float
    sessions: int
    adaptive: bool
    remeasure: bool
    dry_run: bool
    as_json: bool


def parse_duration(text: str) -> float:
    """Seconds from a number, with s, m or h behind it or nothing. Raises UsageError for anything else."""
    import re

    from latbench.errors import UsageError

    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", text.strip())
    if found is None:
        raise UsageError(f"a time is a number with s, m or h behind it, such as 90s or 10m, not {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def gpu_blocks(
    device: str, names: Sequence[str], specs: Sequence[str], texts: Sequence[str], backends: Sequence[str],
    there: Collection[str], where: str, *, seed: int = 0, adaptive: bool = False,
) -> list[list[Point]]:  # fmt: skip
    """Return the points of a GPU that a command line asks for by workloads, patterns, sparsities and backends, in
    blocks, the most telling first; `there` are the backends that can be used `where` it is measured.
    """
    from latbench.backends import on_gpu
    from latbench.sweeping.gpu_points import list_staged_blocks, list_standard_shapes
    from latbench.workloads.points import FINE_SPARSITIES, parse_patterns, parse_sparsities
    from latbench.workloads.workload import list_workloads, read_workload

    needed = {name: backend.packages[:1] for name, backend in on_gpu.BACKENDS.items()}
    shapes = [layer.shape for name in names or list_workloads() for layer in read_workload(name).layers]
    sparsities = FINE_SPARSITIES if adaptive else None
    return list_staged_blocks(
        shapes if names else [*list_standard_shapes(), *shapes],
        device,
        backends=_named(backends or ["all"], needed, there, where),
        patterns=parse_patterns(specs) if specs else None,
        sparsities=parse_sparsities(texts) if texts else sparsities,
        seed=seed,
    )


def within(blocks: Sequence[list[Point]], seconds: float) -> list[list[Point]]:
    """Return the first of `blocks` of a GPU that take about so many seconds together; one at least."""
    from latbench.sweeping.gpu_estimate import estimate_gpu_seconds

    points: list[Point] = []
    for number, block in enumerate(blocks):
        points += block
        if number and estimate_gpu_seconds(points) > seconds:
            return list(blocks[:number])
    return list(blocks)


def estimates(gpu: bool) -> tuple[Callable[[Sequence[Point]], float], Callable[[Sequence[Point]], int], str]:
    """What tells how long points take, and how many bytes their table; and what that assumes, in words."""
    if gpu:
        from latbench.sweeping.gpu_estimate import (
            GPU_ESTIMATE_ASSUMPTION,
            estimate_gpu_seconds,
            estimate_gpu_table_bytes,
        )

        return estimate_gpu_seconds, estimate_gpu_table_bytes, GPU_ESTIMATE_ASSUMPTION
    from latbench.workloads.points import ESTIMATE_ASSUMPTION, estimate_bytes, estimate_seconds

    return estimate_seconds, estimate_bytes, ESTIMATE_ASSUMPTION


def _run(
    output: str | None,
    points: list[Point],
    target: Target,
    how: How,
    blocks: Sequence[list[Point]] | None = None,
) -> None:
    import json

    from latbench.errors import UsageError
    from latbench.tables.storage import parse_place

    if not points:
        raise UsageError("there is nothing to measure: none of these backends runs any of these layers and patterns")
    if how.dry_run:
        target.close()
        first = _chooser(points).anchors if how.adaptive else points
        in_seconds, in_bytes, assumed = estimates(target.gpu)
        seconds, size = how.sessions * in_seconds(first), in_bytes(first)  # most of the time goes into preparing
        if how.as_json:
            document = {
                "device": target.device,
                "estimated_seconds": round(seconds),
                "estimated_bytes": size,
                "points": [point.key() for point in first],
            }
            typer.echo(json.dumps(document, indent=2))
            return
        for point in first:
            typer.echo(str(point))
        typer.echo(f"latbench: about {duration(seconds)} and {size / 1e6:.1f} MB of disk: {assumed}", err=True)
        return
    folder = parse_place(output or Path("latbench-tables") / target.device)
    if target.gpu:
        about = duration(how.sessions * estimates(True)[0](points))
        typer.echo(
            f"latbench: {len(points)} points, about {about} without those that {folder} has; an interrupted sweep "
            "goes on when it is repeated",
            err=True,
        )
    _measure(folder, points, target, how, blocks)


def _chooser(points: Sequence[Point]) -> Adaptive:
    from cost_models import Adaptive

    return Adaptive(points)


def cpu_backends(given: Sequence[str], there: Collection[str] | None = None, where: str = "here") -> list[str]:
    """The engines that are `given`, several in one text separated by commas; by default the standard ones of a CPU.
    `there` are the names of those that are installed `where` it is measured; by default here.

    stderr hears of standard ones that are not installed, because the fastest dense may be among them.
    """
    from latbench import backends
    from latbench.workloads.points import STANDARD_ENGINES

    needed = {name: packages for name, (_, packages) in backends.BACKENDS.items()}
    here = (name for name, version in backends.available().items() if version is not None)
    installed = set(here if there is None else there)
    if given:
        return _named(given, needed, installed, where)
    for name in STANDARD_ENGINES:
        if name not in installed:
            advice = f"pip install {' '.join(needed[name])}"
            typer.echo(f"latbench: {name} is left out, it is not installed {where}: {advice}", err=True)
    return [name for name in STANDARD_ENGINES if name in installed]


def check_ours(engines: Sequence[str], *, tune: bool, bf16: bool) -> None:
    """Raise UsageError for options of our own CPU kernels where those are not among the `engines`: none, of a GPU."""
    from latbench.errors import UsageError

    for asked, name, of_a_gpu, taken in (
        (tune, "--tune", "kernels of a GPU are not tuned", ["numba"]),
        (bf16, "--bf16", "a GPU's kernels have 16 bits already", ["numba", "openvino", "torch"]),
    ):
        if asked and not engines:
            raise UsageError(f"{name} is not for --gpu: {of_a_gpu}")
        if asked and not set(taken) & set(engines):
            raise UsageError(f"{name} is for backend {', '.join(taken)}, which is not among those asked for")


def _named(
    given: Sequence[str], needed: Mapping[str, Sequence[str]], installed: Collection[str], where: str
) -> list[str]:
    """Backends by name, or all that are installed `where` it is measured; `needed` says of each known one which
    packages it takes.
    """
    from latbench.errors import EnvironmentUnusable, UsageError

    names = dict.fromkeys(name.strip() for text in given for name in text.split(","))
    if "all" in names:
        return [name for name in needed if name in installed]
    for name in names:
        if name not in needed:
            raise UsageError(f"unknown backend {name!r}: known are {', '.join(needed)}, and all")
        if name not in installed:
            raise EnvironmentUnusable(f"{name} is not installed {where}: pip install {' '.join(needed[name])}")
    return list(names)


def duration(seconds: float) -> str:
    """Seconds in words short enough for a column."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _end_as_by_ctrl_c() -> None:
    """What ends a job on a cluster, or a terminal, is as good a reason as Ctrl-C to keep what is finished and to give
    nodes back.
    """
    import signal

    for end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(end) != signal.SIG_IGN:  # as under nohup
            signal.signal(end, signal.default_int_handler)


def _measure(
    folder: Place, points: list[Point], target: Target, how: How, blocks: Sequence[list[Point]] | None = None
) -> None:
    import json
    import time

    from latbench.cli.commands.progress import live
    from latbench.sweeping.settings import SweepOptions, SweepStopped
    from latbench.sweeping.sweep import PointChooser, choose_in_order
    from latbench.tables.schema import KEY_COLUMNS
    from latbench.tables.table import has_rows, read_table

    chooser = _chooser(points) if how.adaptive else None
    choose: PointChooser = (lambda table: points) if chooser is None else chooser
    if blocks is not None:
        choose = choose_in_order(blocks)
    options = SweepOptions(
        seed=how.seed,
        time_budget=how.time_budget,
        remeasure=how.remeasure,
        wait_seconds=how.wait_seconds,
        expected=0 if blocks is None else len(points),
        chances_last=blocks is not None,
    )
    began = time.monotonic()
    stopped: SweepStopped | None = None
    try:
        with live() as tell:
            summary = target.run(
                folder,
                choose,
                options=options,
                report=_with_time_left(tell, how.time_budget),
            )
    except SweepStopped as error:
        stopped, summary = error, error.summary
    finally:
        target.close()
    # All but what fills it: samples.
    wanted = [*(field.name for field in KEY_COLUMNS), "point_id", "started_at", "status", "error", "flags"]
    wanted += ["backend_version", "format"]
    frame = read_table(folder, [*wanted, "median_seconds"]) if has_rows(folder) else None
    if frame is not None and target.current is not None:
        frame = frame[target.current(frame)]
    # With its anchors an adaptive sweep is whole: the rest is what the time allows.
    if stopped is not None and how.time_budget is not None and chooser is not None and frame is not None:
        spent = time.monotonic() - began >= how.time_budget
        stopped = None if spent and chooser.anchored(frame) else stopped
    if how.as_json:
        document = _document(folder, target.device, summary, frame, time.monotonic() - began)
        typer.echo(json.dumps({**document, "complete": stopped is None}, indent=2))
    elif stopped is None:
        assert frame is not None  # a sweep of no points is refused
        _tell(folder, points, summary, frame)
    if stopped is not None:
        raise stopped
    refuse_without_times(frame, points)


def refuse_without_times(frame: pd.DataFrame | None, points: Sequence[Point]) -> None:
    """Raise EnvironmentUnusable where a sweep that went on to its end has no time for any of `points`: what failed
    most often is what is wrong with the machine, or with the request.
    """
    from latbench.errors import EnvironmentUnusable
    from latbench.tables.table import select_timed

    keys = {point.id for point in points}
    rows = None if frame is None else frame[frame["point_id"].isin(keys)]
    if rows is None or rows.empty or len(select_timed(rows)):
        return
    latest = rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    reasons = (latest["status"] + ": " + latest["error"].fillna("no reason was given")).value_counts()
    raise EnvironmentUnusable(
        f"nothing could be timed: {len(latest)} of {len(points)} points failed, {reasons.iloc[0]} of them with "
        f"{reasons.index[0]}"
    )


def _document(
    folder: Place, device: str, summary: SweepSummary, frame: pd.DataFrame | None, seconds: float
) -> dict[str, Any]:
    """What --json prints of a sweep, for machines: statuses count the points measured now."""
    from collections import Counter

    return {
        "table": str(folder),
        "device": device,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(Counter(summary.statuses.values()).items())),
        "skipped": summary.skipped,
        "rows": 0 if frame is None else len(frame),
    }


def _tell(folder: Place, points: Sequence[Point], summary: SweepSummary, frame: pd.DataFrame) -> None:
    """Print what a sweep did, for people."""
    import os
    from collections import Counter

    from rich.console import Console

    from latbench.machines.devices import count_cores
    from latbench.sweeping.settings import NO_ROOFLINE
    from latbench.tables.table import select_timed

    console = Console()
    counts = Counter(summary.statuses.values())
    fresh = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    known = f"{summary.skipped} were there already" if summary.skipped else ""
    console.print(f"{folder}: " + "; ".join(part for part in (fresh, known) if part), highlight=False, soft_wrap=True)
    keys = {point.id for point in points}
    ours = frame[frame["point_id"].isin(set(summary.statuses))]  # of this run, and earlier tries
    latest = ours.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")
    failed = latest[latest["status"].isin(FAILED)]
    for (status, error), rows in failed.groupby(["status", "error"], sort=False):
        console.print(f"{len(rows)} {status}: {error}", highlight=False, soft_wrap=True)
    without = int(latest["flags"].str.contains(NO_ROOFLINE, na=False).sum())
    if without:
        what = "could not be measured, so nothing tells whether their times are possible"
        console.print(f"{without} points have no roofline: it {what}", highlight=False, soft_wrap=True)
    disturbed = int(select_timed(ours)["flags"].str.contains("preempted|slow_spell", na=False).sum())
    for count, what in (
        (counts["noisy"], "are noisy, their intervals are wide: --remeasure measures them again"),
        (disturbed, "were measured while others took the cores or slowed them: their times may be too long"),
    ):
        if count:
            load = f"the load is {os.getloadavg()[0]:.1f} on {count_cores()} cores"
            console.print(f"{count} points {what} ({load})", highlight=False, soft_wrap=True)
    speedups = speedup_table(frame[frame["point_id"].isin(keys)])
    if speedups is not None:
        heading, table = speedups
        console.print(f"\n{heading}", highlight=False, soft_wrap=True)
        console.print(table)


def speedup_table(frame: pd.DataFrame) -> tuple[str, Table] | None:
    """A heading that names the fastest dense engines, and a table: rows patterns and engines, columns sparsities, the
    median over layer shapes of the speedup over the fastest dense engine of each, measured in the same way; what is
    multiplied in bfloat16 has dense engines of its own, and those in float32.

    None where no sparse point has a dense one beside it.
    """
    from rich.table import Table

    from latbench.report.frames import SETTING, SHAPE, engine_name, with_rivals
    from latbench.tables.table import select_timed

    timed = with_rivals(select_timed(frame))
    names = zip(timed["backend"], timed["kernel_requested"], strict=True)
    timed = timed.assign(engine=[engine_name(*pair) for pair in names])
    layer = [*SHAPE, *SETTING]  # times of unlike modes are not compared
    dense = timed[timed["pattern"] == "dense"]
    fastest = dense.loc[dense.groupby(layer, dropna=False)["median_seconds"].idxmin()].set_index(layer)
    fastest = fastest[["median_seconds", "engine"]].add_prefix("dense_")
    sparse = timed[timed["pattern"] != "dense"].join(fastest, on=layer)
    sparse = sparse.assign(speedup=sparse["dense_median_seconds"] / sparse["median_seconds"]).dropna(subset="speedup")
    if sparse.empty:
        return None
    rounded = sparse["dtype_a"] == "bfloat16"
    engines = [
        f"{of}{_counted(rows.drop_duplicates(layer)['dense_engine'].value_counts())}"
        for of, rows in (("", sparse[~rounded]), ("in bfloat16 ", sparse[rounded]))
        if len(rows)
    ]
    medians = sparse.pivot_table(
        index=["pattern", "engine"], columns="sparsity_target", values="speedup", aggfunc="median"
    )
    heading = f"speedup over the fastest dense engine ({'; '.join(engines)}), median of layers:"
    table = Table("pattern", "engine", box=None, pad_edge=False)
    for sparsity in medians.columns:
        table.add_column(f"{sparsity:.0%}", justify="right")
    for (pattern, engine), row in medians.sort_index().iterrows():
        table.add_row(pattern, engine, *("" if value != value else f"{value:.2f}x" for value in row))
    return heading, table


def _counted(counts: pd.Series) -> str:
    """How many layers have each engine."""
    names = sorted(counts.index, key=lambda name: (-counts[name], name))
    return f"{', '.join(f'{name} in {counts[name]}' for name in names)} of {counts.sum()} layers"


def _with_time_left(tell: Tell, time_budget: float | None = None) -> Callable[[Progress], None]:
    """What a sweep reports to: adds how long it will take, from how long its points took so far; never longer than
    its budget.
    """
    import time

    began, before = time.monotonic(), None

    def report(now: Progress) -> None:
        nonlocal before
        before = now.done if before is None else before
        left = ""
        if before < now.done < now.total:  # repeats of what was disturbed come after that, and nobody knows how many
            passed = time.monotonic() - began
            seconds = passed / (now.done - before) * (now.total - now.done)
            if time_budget is not None:
                seconds = max(0.0, min(seconds, time_budget - passed))
            left = f", about {duration(seconds)} left"
        tell(now.activity + left, now.done, now.total or None)

    return report
