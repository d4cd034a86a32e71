"""`latbench solve`: the best profile for a table of layer times, without a task: nothing is pruned or timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from search.problem.problem import Problem
    from search.problem.second_budget import SecondBudget
    from search.problem.selection import Selection, TradeOffs

SHOWN = 12
"""Points of a frontier that are printed."""

# Both budgets are of one model and one profile: what is said of these (--target, --workload, --pattern, --patterns,
# --sparsities, --limits) holds for --also as well. How times were taken (--network, --model, --device, --backend,
# --threads, --batch, --dense-seconds, --fixed-seconds) is each file's own, and said of --also by --also-with alone.
DIFFERENCES: dict[str, Callable[[str], Any]] = {
    "target": float, "workload": str, "model": Path, "network": str, "device": str, "backend": str, "threads": int,
    "batch": int, "dense_seconds": float, "fixed_seconds": float,
}  # fmt: skip
"""What --also-with may say."""


def solve(
    timings: Annotated[
        str, typer.Argument(help="SPDY's timing file, a CSV or Parquet file of options, or a table of latbench.")
    ],
    target: Annotated[
        float | None, typer.Option(min=1.0, help="The speedup to reach; without one, the frontier is printed.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The profile: .csv or .parquet, else in SPDY's text format. Of a frontier: .csv, .parquet.",
        ),
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="CSV or Parquet: layer, pattern, sparsity, error. By default SPDY's guess.")
    ] = None,
    limits: Annotated[
        Path | None,
        typer.Option(help="YAML: layers that are tied, fixed, excluded, ...; see search/problem/limits.py"),
    ] = None,
    pattern: Annotated[str, typer.Option(help="What the sparse times of a timing file are of.")] = "unstructured",
    workload: Annotated[
        str | None,
        typer.Option(
            help="Of a table: the layers, by shape; without it, or with --network, those timed inside a network. "
            "Elsewhere their shapes, for --most-bytes."
        ),
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
    device: Annotated[str | None, typer.Option(help="Of a table: which, where it holds several.")] = None,
    backend: Annotated[str | None, typer.Option(help="Of a table: which, where sparse layers have several.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a table: how many, where it holds several.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Of layers inside a network: which, where the table holds several.")
    ] = None,
    dense_seconds: Annotated[
        float | None, typer.Option(help="Of the whole dense model; by default as timed, else the sum of its layers.")
    ] = None,
    fixed_seconds: Annotated[
        float | None, typer.Option(help="What the model takes beside the layers; by default dense less their sum.")
    ] = None,
    most_bytes: Annotated[
        float | None, typer.Option(min=0.0, help="What the packed weights of all layers may take together.")
    ] = None,
    resolution: Annotated[
        float,
        typer.Option(min=0.0, help="Of the frontier, in seconds: profiles that lie nearer to each other are one."),
    ] = 0.0,
    also: Annotated[
        str | None,
        typer.Option(
            help="Times of the same layers elsewhere, where the target shall be reached, too. --workload, --pattern, "
            "--patterns, --sparsities and --limits hold for it as well; nothing else that is said of TIMINGS does."
        ),
    ] = None,
    also_with: Annotated[
        list[str] | None,
        typer.Option(
            help="What is to be said of --also itself, or holds otherwise there: "
            f"{', '.join(f'{key}=...' for key in DIFFERENCES)}."
        ),
    ] = None,
) -> None:
    """The profile of least error, proven, that a table of layer times allows at a target speedup."""
    from latbench.errors import UsageError
    from latbench.workloads.points import parse_patterns, parse_wanted_sparsities
    from search.inputs.layer_errors import read_errors
    from search.inputs.problem_source import is_table
    from search.problem.limits import Limits, read_limits

    if target is None and (most_bytes, also) != (None, None):
        raise UsageError("--most-bytes and --also are of a profile: they need a --target")
    if target is not None and resolution:
        raise UsageError("--resolution is of the frontier: it does not go with a --target")
    if target is None and output is not None and output.suffix not in (".csv", ".parquet"):
        raise UsageError(f"without a --target there is no profile, and a frontier is .csv or .parquet, not {output}")
    if most_bytes is not None and also is not None:
        raise UsageError("--most-bytes and --also are a second budget each, and a profile can have one")
    if also_with and also is None:
        raise UsageError("--also-with says more of --also, which is missing")
    differences = {"target": target, **_differences(also_with or [])}
    shared: dict[str, Any] = {
        "pattern": pattern, "workload": workload,
        "patterns": [str(one) for one in parse_patterns(patterns)] if patterns else None,
        "sparsities": parse_wanted_sparsities(sparsities),
    }  # fmt: skip
    stated = read_limits(limits) if limits is not None else Limits()
    problem = _read(
        timings, **shared, network=network, model=model, device=device, backend=backend, threads=threads, batch=batch,
        dense_seconds=dense_seconds, fixed_seconds=fixed_seconds,
    )  # fmt: skip
    if errors is not None:
        problem = problem.with_errors(read_errors(errors))
    elif not problem.errors_known:
        problem = problem.with_prior()
    problem = problem.limited(stated)
    if target is None:
        every = problem.frontier(resolution)
        _show_frontier(every)
        _save(every, output)
        return
    second: Problem | None = None
    budget: SecondBudget | None = None
    if also is not None:
        wanted = differences.pop("target")
        if not is_table(also):  # it has what options it has
            shared = {**shared, "patterns": None, "sparsities": None}
        try:
            second = _read(also, **{**shared, **differences}).limited(stated)
        except UsageError as error:
            raise UsageError(f"{also}: {error}; of --also that is said by --also-with") from error
        budget = second.as_second_budget(wanted, also)
    if most_bytes is not None:
        budget = problem.byte_budget(most_bytes)
    found = problem.solve(target, second_budget=budget)
    _show(found, "of those within both budgets" if budget else "so fast")
    if second is not None:
        typer.echo(f"{also}: {_promise(second.selection(found.options))}")
    elif budget is not None:
        typer.echo(f"weights take {budget.used(found.options):,.0f} of {most_bytes:,.0f} bytes")
    _save(found, output)


def _read(source: str, *, workload: str | None, model: Path | None = None, **settings: Any) -> Problem:
    import cost_models
    from search.inputs import read_problem

    learned = cost_models.load(model, source) if model else None
    return read_problem(source, layers=workload, model=learned, **settings)


def _differences(words: list[str]) -> dict[str, Any]:
    """What --also-with says. Raises UsageError."""
    from latbench.errors import UsageError

    found = {}
    for word in words:
        name, _, text = word.partition("=")
        key = name.replace("-", "_")
        try:
            found[key] = DIFFERENCES[key](text)
        except (KeyError, ValueError):
            raise UsageError(f"--also-with says {', '.join(DIFFERENCES)}, as in batch=16, not {word!r}") from None
    return found


def _show(found: Selection, others: str) -> None:
    """Layer by layer, and the whole."""
    from rich.console import Console

    from latbench.base.number_format import format_seconds

    table = _table("layer", "pattern", "sparsity", "time", "error")
    for row in found.to_frame().to_dict("records"):
        share, error = f"{row['sparsity']:.2%}", f"{row['error']:.3g}"
        table.add_row(row["layer"], row["pattern"], share, format_seconds(row["seconds"]), error)
    console = Console()
    console.print(table)
    proof = f"no profile {others} has less" + ("" if found.bound == found.error else f" than {found.bound:.6g}")
    console.print(
        f"\n{_promise(found)}; total error {found.error:.6g}, and {proof}",
        highlight=False,
        soft_wrap=True,
    )


def _promise(found: Selection) -> str:
    from latbench.base.number_format import format_ratio, format_seconds

    speedup = found.speedup
    known = (
        format_ratio(speedup.value, speedup.low, speedup.high)
        if speedup.low < speedup.high
        else format_ratio(speedup.value)
    )
    return (
        f"{known} over {found.problem.dense_engine}: "
        f"{format_seconds(found.predicted.value)} instead of {format_seconds(found.problem.dense.value)}"
    )


def _show_frontier(every: TradeOffs) -> None:
    """Some of the efficient profiles, evenly spread over their seconds."""
    import numpy as np
    from rich.console import Console

    from latbench.base.number_format import format_ratio, format_seconds

    table = _table("speedup", "time", "total error", left=0)
    wanted = np.linspace(every.seconds[0], every.seconds[-1], SHOWN)
    shown = sorted({int(np.flatnonzero(every.seconds <= most)[-1]) for most in wanted}, reverse=True)
    for i in shown:
        table.add_row(format_ratio(every.speedups[i]), format_seconds(every.seconds[i]), f"{every.errors[i]:.4g}")
    console = Console()
    console.print(table)
    console.print(f"\n{len(shown)} of {len(every):,} efficient profiles; --target gives one", highlight=False)


def _table(*headings: str, left: int = 2) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right")
    return table


def _save(found: Selection | TradeOffs, path: Path | None) -> None:
    """As its suffix says, where there is one: a frame, or of a profile SPDY's text format."""
    from latbench.base.files import write_atomically
    from search.problem.selection import Selection

    if path is None:
        return
    if path.suffix == ".csv":
        write_atomically(path, lambda temporary: found.to_frame().to_csv(temporary, index=False))
    elif path.suffix == ".parquet":
        write_atomically(path, lambda temporary: found.to_frame().to_parquet(temporary, index=False))
    elif isinstance(found, Selection):
        found.save_spdy(path)
    typer.echo(f"{path} is written")
