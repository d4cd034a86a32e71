"""`latbench sweep`: measure a device and write a table."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from latbench.base.bundled_data import is_bundled
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
from latbench.cli.options.option_texts import parse_duration
from latbench.cli.options.sweep_options import (
    Cluster,
    DryRun,
    Quick,
    RefreshTable,
    RemeasureNoisy,
    SlurmSettings,
    SweepBudget,
    SweepCpu,
    SweepGpu,
    SweepOutput,
    SweepSeed,
    Wait,
)
from latbench.cli.sweep_device import SweepCommandOptions, SweepDevice, open_cluster, open_cpu, open_gpu
from latbench.cli.sweep_points import (
    QUICK_SECONDS,
    PointOptions,
    build_estimate,
    check_cpu_kernel_options,
    format_duration,
    list_rounded,
    select_cpu_engines,
    select_cpu_points,
    select_first_blocks,
    select_gpu_blocks,
)
from latbench.cli.sweep_refresh import find_threads, refresh_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from cost_models.adaptive_planner import AdaptivePlanner
    from latbench.sweeping.settings import SweepOptions, SweepStopped, SweepSummary
    from latbench.sweeping.sweep import PointChooser
    from latbench.tables.storage import Place
    from latbench.workloads.points import Point

_LOG = logging.getLogger(__name__)


def sweep(
    cpu: SweepCpu = False,
    gpu: SweepGpu = None,
    on: Cluster = None,
    slurm: SlurmSettings = None,
    workload: Workloads = None,
    output: SweepOutput = None,
    time_budget: SweepBudget = None,
    wait: Wait = "10m",
    quick: Quick = False,
    adaptive: Adaptive = False,
    threads: Threads = None,
    patterns: Patterns = None,
    sparsities: Sparsities = None,
    backends: Engines = None,
    tune: Tune = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    sessions: Sessions = 1,
    seed: SweepSeed = 0,
    remeasure: RemeasureNoisy = False,
    refresh: RefreshTable = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure engines, patterns and sparsities on the layers of workloads. Points in the table are skipped."""
    seconds = None if time_budget is None else parse_duration(time_budget)
    how = SweepCommandOptions(seed, seconds, parse_duration(wait), sessions, adaptive, remeasure, dry_run, as_json)
    options = PointOptions(
        workload or (), patterns or (), sparsities or (), backends or (), adaptive, tune,
        list_rounded(bf16, int8), seed,
    )  # fmt: skip
    _check_device_options(cpu, gpu, on, quick, slurm, options)
    if refresh is not None:
        named = options != PointOptions(rounded=list_rounded(False, False), seed=seed)
        threads = _check_refresh(refresh, named or any((output, quick, remeasure, dry_run)), threads)
    _end_as_by_ctrl_c()
    with contextlib.ExitStack() as stack:
        if on is not None:
            device = open_cluster(on, gpu, threads, how, slurm or [])
        elif gpu is not None:
            device = open_gpu(gpu, options.backends, how)
        else:
            device = open_cpu(threads, sessions)
        stack.callback(device.close)
        if refresh is not None:
            refresh_table(refresh, device, how)
            return
        blocks = _select_blocks(device, options, quick)
        points = [point for block in blocks for point in block]
        # Blocks have an order on one machine only: the nodes of a cluster measure several at the same time.
        ordered = device.gpu and on is None and not adaptive
        _run(output, points, device, how, blocks if ordered else None)


def _check_device_options(
    cpu: bool, gpu: str | None, on: str | None, quick: bool, slurm: list[str] | None, options: PointOptions
) -> None:
    """Raise UsageError for options that do not go together."""
    from latbench.errors import UsageError

    if cpu == (gpu is not None):
        raise UsageError(
            "--cpu and --gpu are two sweeps, because each device has a table of its own: give one of them"
            if cpu
            else "say what to measure: --cpu, or --gpu NAME"
        )
    if gpu is not None:
        check_cpu_kernel_options([], options)
    if quick and (gpu is None or options.adaptive or on is not None):
        raise UsageError("--quick is for --gpu on this machine, without --adaptive; otherwise use --time-budget 5m")
    if slurm and on != "slurm":
        raise UsageError("--slurm is for a sweep with --on slurm")


def _check_refresh(table: str, names_points: bool, threads: int | None) -> int | None:
    """Return the threads with which to time a table's points again: those of the table, unless they are given.

    Raises UsageError for options that name points, for tables that take no new rows, and where the table has several
    numbers of threads.
    """
    from latbench.errors import UsageError

    if names_points:
        raise UsageError(f"--refresh {table} takes its points from {table}: leave out what names points or an output")
    if is_bundled(table):
        raise UsageError(f"{table} came with latbench, and new times are for a table of your own: sweep one")
    if Path(table).is_file():
        raise UsageError(f"{table} is a file, and new times need a folder: merge it into one (latbench merge -o)")
    if threads is None and (threads := find_threads(table)) is None:
        raise UsageError(f"{table} does not have one number of threads: say which to time again, --threads")
    return threads


def _select_blocks(device: SweepDevice, options: PointOptions, quick: bool) -> list[list[Point]]:
    """Select the points of a device; a CPU has one block."""
    if device.gpu:
        blocks = select_gpu_blocks(options, device.device, device.installed)
        return select_first_blocks(blocks, QUICK_SECONDS) if quick else blocks
    engines = select_cpu_engines(options.backends, device.installed)
    check_cpu_kernel_options(engines, options)
    return [select_cpu_points(options, device.device, device.threads, engines)]


def _end_as_by_ctrl_c() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that results are kept and the nodes of a cluster are given back."""
    import signal

    for end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(end) != signal.SIG_IGN:  # as under nohup
            signal.signal(end, signal.default_int_handler)


def _run(
    output: str | None,
    points: list[Point],
    device: SweepDevice,
    how: SweepCommandOptions,
    blocks: Sequence[list[Point]] | None = None,
) -> None:
    """List the points for --dry-run, else measure them."""
    from latbench.errors import UsageError
    from latbench.tables.storage import parse_place

    if not points:
        raise UsageError("there is nothing to measure: none of these backends runs any of these layers and patterns")
    if how.dry_run:
        device.close()
        _list_points(points, device, how)
        return
    folder = parse_place(output or Path("latbench-tables") / device.device)
    if device.gpu:
        about = format_duration(how.sessions * build_estimate(gpu=True).seconds(points))
        _LOG.warning(
            f"{len(points)} points, about {about} without those that {folder} has; repeat the command to continue an "
            "interrupted sweep"
        )
    _measure(folder, points, device, how, blocks)


def _list_points(points: list[Point], device: SweepDevice, how: SweepCommandOptions) -> None:
    """Print the points, and what measuring them would cost."""
    first = _adaptive_choice(points).anchors if how.adaptive else points
    estimate = build_estimate(device.gpu)
    seconds, size = how.sessions * estimate.seconds(first), estimate.table_bytes(first)
    if how.as_json:
        document = {
            "device": device.device,
            "estimated_seconds": round(seconds),
            "estimated_bytes": size,
            "points": [point.key() for point in first],
        }
        print_json(document)
        return
    for point in first:
        typer.echo(str(point))
    _LOG.warning(f"about {format_duration(seconds)} and {size / 1e6:.1f} MB of disk: {estimate.assumed}")


def _adaptive_choice(points: Sequence[Point]) -> AdaptivePlanner:
    from cost_models.adaptive_planner import AdaptivePlanner

    return AdaptivePlanner(points)


def _measure(
    folder: Place,
    points: list[Point],
    device: SweepDevice,
    how: SweepCommandOptions,
    blocks: Sequence[list[Point]] | None = None,
) -> None:
    """Measure the points and print the outcome; raises what stopped the sweep."""
    import time

    from latbench.cli.sweep_report import build_summary, check_any_time, print_summary
    from latbench.sweeping.settings import SweepOptions
    from latbench.sweeping.sweep import choose_in_order

    _warn_of_old_times(folder, device)
    adaptive = _adaptive_choice(points) if how.adaptive else None
    choose: PointChooser = (lambda table: points) if adaptive is None else adaptive
    if blocks is not None:
        choose = choose_in_order(blocks)
    began = time.monotonic()
    options = SweepOptions(
        seed=how.seed,
        time_budget=how.time_budget,
        remeasure=how.remeasure,
        wait_seconds=how.wait_seconds,
        expected=0 if blocks is None else len(points),
        chances_last=blocks is not None,
    )
    summary, stopped = _run_to_end(folder, choose, device, options)
    frame = _read_rows(folder, device)
    # An adaptive sweep is complete with its anchors: the rest is what the time allows.
    if stopped is not None and how.time_budget is not None and adaptive is not None and frame is not None:
        spent = time.monotonic() - began >= how.time_budget
        stopped = None if spent and adaptive.has_all_anchors(frame) else stopped
    if how.as_json:
        document = build_summary(folder, device.device, summary, frame, time.monotonic() - began)
        print_json({**document, "complete": stopped is None})
    elif stopped is None:
        assert frame is not None  # a sweep of no points is refused
        print_summary(folder, points, summary, frame)
    if stopped is not None:
        raise stopped
    check_any_time(frame, points)


def _run_to_end(
    folder: Place, choose: PointChooser, device: SweepDevice, options: SweepOptions
) -> tuple[SweepSummary, SweepStopped | None]:
    """Run the sweep, close the device, and return the summary and what stopped the sweep early, if anything did.

    `expected` is the number of points where their order is fixed, else 0.
    """
    from latbench.cli.progress_bar import live
    from latbench.cli.sweep_report import report_time_left
    from latbench.sweeping.settings import SweepStopped

    try:
        with live() as tell:
            summary: SweepSummary = device.run(
                folder,
                choose,
                options=options,
                report=report_time_left(tell, options.time_budget),
            )
    except SweepStopped as error:
        return error.summary, error
    finally:
        device.close()
    return summary, None


def _warn_of_old_times(folder: Place, device: SweepDevice) -> None:
    """Say how many times of the table are of other versions than the installed ones."""
    from latbench.tables.table import has_rows, read_table
    from latbench.workloads.old_times import select_old_times

    if not has_rows(folder):
        return
    columns = ["backend", "kernel_requested", "op", "format", "backend_version", "status", "point_id", "started_at"]
    rows = read_table(folder, columns)
    if old := len(select_old_times(rows, device.current(rows))):
        _LOG.warning(
            f"{old} times of {folder} are of other versions of engines or kernels than the installed ones: where "
            "this sweep names their points, they are measured again "
            f"(`latbench sweep {'--gpu NAME' if device.gpu else '--cpu'} --refresh {folder}` tells which have moved)"
        )


def _read_rows(folder: Place, device: SweepDevice) -> pd.DataFrame | None:
    """Return the rows of the table that timed the installed versions, without their samples; None for no rows."""
    from latbench.tables.schema import KEY_COLUMNS
    from latbench.tables.table import has_rows, read_table

    if not has_rows(folder):
        return None
    columns = [*(field.name for field in KEY_COLUMNS), "point_id", "started_at", "status", "error", "flags"]
    frame = read_table(folder, [*columns, "backend_version", "format", "median_seconds"])
    return frame[device.current(frame)]
