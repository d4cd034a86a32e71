"""`latbench layers`: what each layer of a model takes inside the running network, as an engine itself tells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latbench import MOST_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from latbench.importers.text_formats import SpdyTimings


def layers(
    task: Annotated[str, typer.Argument(help="A bundled task, a Python file, or package.module:task.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the table to add to.")],
    sparsities: Annotated[
        list[str] | None, typer.Option(help="Such as 0.5,0.75,0.9; or spdy, the 41 levels of that paper.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine; by default all cores.")] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often each sparsity is run, in turns; runs in the table count.")
    ] = 3,
    spdy: Annotated[Path | None, typer.Option(help="Also write the times as a SPDY timing file.")] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Time again what is in the table.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of the order in which sparsities take turns.")] = 0,
) -> None:
    """Time a model's layers in DeepSparse, inside the network, with the same share of zeros imposed on all."""
    from latbench.backends import deepsparse_environment

    environment = deepsparse_environment.find()  # before anything that takes a while to load

    from latbench.cli.commands.progress import live
    from latbench.importers.text_formats import convert_rows_to_spdy, write_spdy
    from latbench.machines.devices import count_cores
    from latbench.workloads.points import SPARSITIES, parse_sparsities
    from search.pipeline.measure_in_network import (
        SPDY_LEVELS,
        RunSchedule,
        count_missing_runs,
        select_task_rows,
        time_layers_in_network,
    )
    from search.task import load_task

    loaded = load_task(task)
    wanted: Sequence[float] = SPARSITIES
    if sparsities:
        wanted = SPDY_LEVELS if sparsities == ["spdy"] else parse_sparsities(sparsities)
    threads = threads or count_cores()
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
            typer.echo(f"without a time of their own at some sparsity: {', '.join(untimed)}")
    frame = select_task_rows(loaded, output, threads)
    timings = convert_rows_to_spdy(frame, loaded.name)
    if spdy is not None:
        write_spdy(timings, spdy)
        typer.echo(f"{spdy} is written")
    typer.echo(_dense_times(frame, timings))
    known = f"; {len(wanted) - len(runs)} were there already" if len(runs) < len(wanted) else ""
    typer.echo(f"{output}: layers of {loaded.name}, dense and {len(wanted)} times sparse{known}")


def _dense_times(frame: pd.DataFrame, timings: SpdyTimings) -> str:
    """How far the layers add up to the network."""
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
