"""`latbench solve`: the best profile for a table of layer times, without a task: nothing is pruned or timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from latbench.cli.options.common_options import LimitsFile
from latbench.cli.options.option_texts import parse_precisions, parse_second_settings
from latbench.cli.options.solve_options import (
    DenseSeconds,
    DeviceName,
    ErrorsFile,
    FixedSeconds,
    LayerBytes,
    NetworkName,
    Resolution,
    SecondSettings,
    SecondTimings,
    SolveBackend,
    SolveBatch,
    SolveModel,
    SolveOutput,
    SolvePatterns,
    SolvePrecisions,
    SolveSparsities,
    SolveTarget,
    SolveThreads,
    SolveWorkload,
    TimedPattern,
    TimingsArgument,
)

if TYPE_CHECKING:
    from rich.table import Table

    from search.problem.limits import Limits
    from search.problem.problem import Problem
    from search.problem.second_budget import SecondBudget
    from search.problem.selection import Selection, TradeOffs

SHOWN = 12
"""Points of a frontier that are printed."""


def solve(
    timings: TimingsArgument,
    target: SolveTarget = None,
    output: SolveOutput = None,
    errors: ErrorsFile = None,
    limits: LimitsFile = None,
    pattern: TimedPattern = "unstructured",
    workload: SolveWorkload = None,
    model: SolveModel = None,
    patterns: SolvePatterns = None,
    sparsities: SolveSparsities = None,
    precisions: SolvePrecisions = None,
    network: NetworkName = None,
    device: DeviceName = None,
    backend: SolveBackend = None,
    threads: SolveThreads = None,
    batch: SolveBatch = None,
    dense_seconds: DenseSeconds = None,
    fixed_seconds: FixedSeconds = None,
    most_bytes: LayerBytes = None,
    resolution: Resolution = 0.0,
    also: SecondTimings = None,
    also_with: SecondSettings = None,
) -> None:
    """Find the profile of least error that a table of layer times allows at a speedup, with a proof."""
    from latbench.workloads.points import parse_patterns, parse_wanted_sparsities
    from search.problem.limits import Limits, read_limits

    _check_options(target, output, most_bytes, resolution, also, also_with)
    differences = {"target": target, **parse_second_settings(also_with or [])}
    shared: dict[str, Any] = {
        "pattern": pattern, "workload": workload,
        "patterns": [str(one) for one in parse_patterns(patterns)] if patterns else None,
        "sparsities": parse_wanted_sparsities(sparsities),
        "precisions": parse_precisions(precisions) if precisions else None,
    }  # fmt: skip
    stated = read_limits(limits) if limits is not None else Limits()
    problem = _read_problem(
        timings, **shared, network=network, model=model, device=device, backend=backend, threads=threads, batch=batch,
        dense_seconds=dense_seconds, fixed_seconds=fixed_seconds,
    )  # fmt: skip
    problem = _with_errors(problem, errors).limited(stated)
    if target is None:
        every = problem.frontier(resolution)
        _print_frontier(every)
        _save(every, output)
        return
    second = None if also is None else _read_second(also, shared, differences, stated)
    found = _solve(problem, target, second, most_bytes)
    _save(found, output)


def _check_options(
    target: float | None,
    output: Path | None,
    most_bytes: float | None,
    resolution: float,
    also: str | None,
    also_with: list[str] | None,
) -> None:
    """Raise UsageError for options that do not go together."""
    from latbench.errors import UsageError

    if target is None and (most_bytes, also) != (None, None):
        raise UsageError("--most-bytes and --also are for a profile, so they need a --target")
    if target is not None and resolution:
        raise UsageError("--resolution is for the frontier, so it does not go with a --target")
    if target is None and output is not None and output.suffix not in (".csv", ".parquet"):
        raise UsageError(f"without a --target the output is a frontier, in a file .csv or .parquet, not {output}")
    if most_bytes is not None and also is not None:
        raise UsageError("--most-bytes and --also both set a second budget, and a profile can have only one")
    if also_with and also is None:
        raise UsageError("--also-with describes --also, which is missing")


def _read_problem(source: str, *, workload: str | None, model: Path | None = None, **settings: Any) -> Problem:
    """Read the layers and their times as a problem."""
    from cost_models.model_file import load
    from search.inputs import read_problem

    learned = load(model, source) if model else None
    return read_problem(source, layers=workload, model=learned, **settings)


def _with_errors(problem: Problem, errors: Path | None) -> Problem:
    """Return the problem with the errors of a file; without both file and own errors, with those of SPDY's prior.

    Raises UsageError for rounded layers that only the prior knows: it has no error of rounding.
    """
    from latbench.base.engine_registry import FLOAT32
    from latbench.errors import UsageError
    from search.inputs.layer_errors import read_errors

    if errors is not None:
        return problem.with_errors(read_errors(errors))
    if problem.errors_known:
        return problem
    rounded = {it.precision for layer in problem.layers for it in layer.options} - {FLOAT32}
    if rounded:
        raise UsageError(
            f"without --errors, errors are guessed from sparsities alone, so rounding to {min(rounded)} would cost "
            "nothing: give --errors a file with the columns layer, pattern, sparsity, precision and error"
        )
    return problem.with_prior()


class _SecondTable(NamedTuple):
    """The second table of layer times: its name, its problem, and its budget for the first problem's profile."""

    name: str
    problem: Problem
    budget: SecondBudget


def _read_second(source: str, shared: dict[str, Any], differences: dict[str, Any], limits: Limits) -> _SecondTable:
    """Read the second table with the settings of the first that it shares, and its own ones."""
    from latbench.errors import UsageError
    from search.inputs.problem_source import is_table

    target = differences.pop("target")
    if not is_table(source):  # such a file holds all options it has
        shared = {**shared, "patterns": None, "sparsities": None, "precisions": None}
    try:
        problem = _read_problem(source, **{**shared, **differences}).limited(limits)
    except UsageError as error:
        raise UsageError(f"{source}: {error}; give it for --also by --also-with") from error
    return _SecondTable(source, problem, problem.as_second_budget(target, source))


def _solve(problem: Problem, target: float, second: _SecondTable | None, most_bytes: float | None) -> Selection:
    """Find and print the best profile within the budgets."""
    budget: SecondBudget | None = None if second is None else second.budget
    if most_bytes is not None:
        budget = problem.byte_budget(most_bytes)
    found = problem.solve(target, second_budget=budget)
    _print_selection(found, "within both budgets" if budget else "as fast")
    if second is not None:
        typer.echo(f"{second.name}: {_promise(second.problem.selection(found.options))}")
    elif budget is not None:
        typer.echo(f"weights take {budget.used(found.options):,.0f} of {most_bytes:,.0f} bytes")
    return found


def _print_selection(found: Selection, others: str) -> None:
    """Print the choice for each layer, the speedup and the proof; `others` says which profiles were considered."""
    from rich.console import Console

    from latbench.base.number_format import format_seconds

    frame = found.to_frame()
    same_type = frame["precision"].nunique() == 1
    table = _table("layer", "pattern", "sparsity", *([] if same_type else ["type"]), "time", "error")
    for row in frame.to_dict("records"):
        share, error = f"{row['sparsity']:.2%}", f"{row['error']:.3g}"
        kind = [] if same_type else [row["precision"]]
        table.add_row(row["layer"], row["pattern"], share, *kind, format_seconds(row["seconds"]), error)
    console = Console()
    console.print(table)
    proof = f"no profile {others} has less" + ("" if found.bound == found.error else f" than {found.bound:.6g}")
    console.print(
        f"\n{_promise(found)}; total error {found.error:.6g}, and {proof}",
        highlight=False,
        soft_wrap=True,
    )


def _promise(found: Selection) -> str:
    """Return the speedup and the times of a selection as a text."""
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


def _print_frontier(every: TradeOffs) -> None:
    """Print some of the efficient profiles, evenly spread over their seconds."""
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
    """Build an empty table whose first `left` columns are flush left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right")
    return table


def _save(found: Selection | TradeOffs, path: Path | None) -> None:
    """Write the file that its suffix asks for: a frame, or a profile in SPDY's text format."""
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
