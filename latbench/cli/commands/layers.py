"""`latbench layers`: times of a model's layers inside the running network, as DeepSparse reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from latbench.cli.options.common_options import TaskArgument, Threads
from latbench.cli.options.engine_options import (
    LayersOutput,
    LayersSeed,
    LayersSparsities,
    RemeasureLayers,
    Repeats,
    SpdyFile,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from latbench.importers.text_formats import SpdyTimings


def layers(
    task: TaskArgument,
    output: LayersOutput,
    sparsities: LayersSparsities = None,
    threads: Threads = None,
    repeats: Repeats = 3,
    spdy: SpdyFile = None,
    remeasure: RemeasureLayers = False,
    seed: LayersSeed = 0,
) -> None:
    """Time a model's layers in DeepSparse, inside the network, with one sparsity for all layers at a time."""
    from latbench.backends.cpu import deepsparse_environment
    from latbench.importers.text_formats import check_spdy_names, convert_rows_to_spdy, write_spdy
    from latbench.machines.processors import select_threads
    from latbench.workloads.points import SPARSITIES, parse_sparsities

    environment = deepsparse_environment.find_environment()  # before anything that takes a while to load

    from latbench.cli.progress_bar import live
    from search.check_task import check_task
    from search.pipeline.measure_in_network import (
        SPDY_LEVELS,
        RunSchedule,
        count_missing_runs,
        select_task_rows,
        time_layers_in_network,
    )
    from search.task import load_task
    from search.traced_layers import list_prunable_layers

    loaded = load_task(task)
    check_task(loaded, ["example"])
    if spdy is not None:
        check_spdy_names(list_prunable_layers(loaded, loaded.model()))  # not after minutes of measuring
    wanted: Sequence[float] = SPARSITIES
    if sparsities:
        wanted = SPDY_LEVELS if sparsities == ["spdy"] else parse_sparsities(sparsities)
    threads = select_threads(threads)
    runs = dict.fromkeys(wanted, repeats)
    if not remeasure:
        runs = count_missing_runs(loaded, output, threads, wanted, repeats)
    typer.echo(deepsparse_environment.LICENCE)
    if runs:
        with live() as tell:
            untimed = time_layers_in_network(
                loaded, output, environment, RunSchedule(runs, seed), threads=threads, remeasure=remeasure,
                progress=tell,
            )  # fmt: skip
        if untimed:
            typer.echo(f"layers without a time of their own at some sparsity: {', '.join(untimed)}")
    frame = select_task_rows(loaded, output, threads)
    timings = convert_rows_to_spdy(frame, loaded.name)
    if spdy is not None:
        write_spdy(timings, spdy)
        typer.echo(f"{spdy} is written")
    typer.echo(_dense_times(frame, timings))
    known = f"; {len(wanted) - len(runs)} were there already" if len(runs) < len(wanted) else ""
    typer.echo(f"{output}: layers of {loaded.name}, dense and {len(wanted)} times sparse{known}")


def _dense_times(frame: pd.DataFrame, timings: SpdyTimings) -> str:
    """Return a sentence that compares the sum of the dense layers with the network."""
    from latbench.base.number_format import format_seconds

    sentence = (
        f"dense, {len(timings.layers)} layers take {format_seconds(timings.prunable)} of the "
        f"{format_seconds(timings.base)} that "
        "DeepSparse's analysis adds up to"
    )
    whole = frame[frame["purpose"] == "baseline"]
    if whole.empty:
        return sentence
    return f"{sentence}; called as a whole, the model takes {format_seconds(whole['median_seconds'].iloc[-1])}"
