"""`latbench solve`: the best profile for a table of layer times, without a task: nothing is pruned or timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from search.selection import Selection, TradeOffs

SHOWN = 12
"""Points of a frontier that are printed."""


def solve(
    timings: Annotated[
        str, typer.Argument(help="SPDY's timing file, a CSV or Parquet file of options, or a table of latbench.")
    ],
    target: Annotated[
        float | None, typer.Option(min=1.0, help="The speedup to reach; without one, the frontier is printed.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The profile: .csv or .parquet, else in SPDY's text format.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="CSV or Parquet: layer, pattern, sparsity, error. By default SPDY's guess.")
    ] = None,
    limits: Annotated[
        Path | None, typer.Option(help="YAML: layers that are tied, fixed, excluded, ...; see search/limits.py.")
    ] = None,
    pattern: Annotated[str, typer.Option(help="What the sparse times of a timing file are of.")] = "unstructured",
    workload: Annotated[
        str | None, typer.Option(help="Of a table: the layers, by shape; without it those timed inside a network.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Of a table: the cost model that latbench fit made of it, to predict with.")
    ] = None,
    patterns: Annotated[
        list[str] | None, typer.Option(help="Of a table: only these, such as vector:32,nm:2:4, and dense.")
    ] = None,
    sparsities: Annotated[
        list[str] | None,
        typer.Option(help="Of a table: only these, or `fine`; with --model also those between the measured ones."),
    ] = None,
    network: Annotated[str | None, typer.Option(help="Of a table: which network, where it holds several.")] = None,
    backend: Annotated[str | None, typer.Option(help="Of a table: which, where sparse layers have several.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a table: how many, where it holds several.")] = None,
    dense_seconds: Annotated[
        float | None, typer.Option(help="Of the whole dense model; by default as timed, else the sum of its layers.")
    ] = None,
    fixed_seconds: Annotated[
        float | None, typer.Option(help="What the model takes beside the layers; by default dense less their sum.")
    ] = None,
) -> None:
    """The profile of least error, proven, that a table of layer times allows at a target speedup."""
    import cost_models
    from latbench import plan
    from latbench.errors import UsageError
    from search import frames, layer_errors
    from search import limits as limiting

    if output is not None and target is None:
        raise UsageError("--output is a profile: it needs a --target")
    problem = frames.read(
        timings, pattern=pattern, layers=workload, network=network, backend=backend, threads=threads,
        model=cost_models.load(model, timings) if model else None,
        patterns=[str(one) for one in plan.parse_patterns(patterns)] if patterns else None,
        sparsities=plan.wanted_sparsities(sparsities),
        dense_seconds=dense_seconds, fixed_seconds=fixed_seconds,
    )  # fmt: skip
    if errors is not None:
        problem = problem.with_errors(layer_errors.read(errors))
    elif not problem.errors_known:
        problem = problem.with_prior()
    if limits is not None:
        problem = limiting.read(limits).on(problem)
    if target is None:
        _show_frontier(problem.frontier())
        return
    found = problem.solve(target)
    _show(found)
    if output is not None:
        _save(found, output)
        typer.echo(f"{output} is written")


def _show(found: Selection) -> None:
    """Layer by layer, and the whole."""
    from rich.console import Console

    from latbench.report.units import ratio, seconds

    table = _table("layer", "pattern", "sparsity", "time", "error")
    for row in found.to_frame().to_dict("records"):
        share, error = f"{row['sparsity']:.2%}", f"{row['error']:.3g}"
        table.add_row(row["layer"], row["pattern"], share, seconds(row["seconds"]), error)
    console = Console()
    console.print(table)
    speedup, predicted = found.speedup, found.predicted
    known = ratio(speedup.value, speedup.low, speedup.high) if speedup.low < speedup.high else ratio(speedup.value)
    proof = "no profile so fast has less" if found.bound == found.error else f"none so fast has {found.bound:.6g}"
    console.print(
        f"\n{known} over {found.problem.dense_engine}: "
        f"{seconds(predicted.value)} instead of {seconds(found.problem.dense.value)}; "
        f"total error {found.error:.6g}, and {proof}",
        highlight=False,
        soft_wrap=True,
    )


def _show_frontier(every: TradeOffs) -> None:
    """Some of the efficient profiles, evenly spread over their speedups."""
    import numpy as np
    from rich.console import Console

    from latbench.report.units import ratio, seconds

    table = _table("speedup", "time", "total error", left=0)
    wanted = np.linspace(every.speedups[-1], every.speedups[0], SHOWN)
    shown = sorted({int(np.flatnonzero(every.speedups >= least)[-1]) for least in wanted}, reverse=True)
    for i in shown:
        table.add_row(ratio(every.speedups[i]), seconds(every.seconds[i]), f"{every.errors[i]:.4g}")
    console = Console()
    console.print(table)
    console.print(f"\n{len(shown)} of {len(every):,} efficient profiles; --target gives one", highlight=False)


def _table(*headings: str, left: int = 2) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right")
    return table


def _save(found: Selection, path: Path) -> None:
    from latbench.files import write_atomically

    frame = found.to_frame()
    if path.suffix == ".csv":
        write_atomically(path, lambda temporary: frame.to_csv(temporary, index=False))
    elif path.suffix == ".parquet":
        write_atomically(path, lambda temporary: frame.to_parquet(temporary, index=False))
    else:
        found.save_spdy(path)
