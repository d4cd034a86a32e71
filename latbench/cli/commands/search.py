"""`latbench search`: the profile of least loss that keeps a promised speedup, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latbench import MOST_SEED

if TYPE_CHECKING:
    from search.artifacts.profile import Profile

MOST_PROCESSES = 8  # unless asked for: each holds the model and the calibration data


def search(
    task: Annotated[str, typer.Argument(help="A bundled task, a Python file, or package.module:task.")],
    target: Annotated[float, typer.Option(min=1.0, help="The speedup to promise over the fastest dense engine.")],
    table: Annotated[
        str, typer.Option(help="What latbench sweep, or for deepsparse latbench layers, measured on this machine.")
    ],
    database: Annotated[Path, typer.Option(help="Folder for pruned layers; what is there is used again.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")],
    model: Annotated[Path | None, typer.Option(help="The cost model that latbench fit wrote; for numba.")] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="What shall run the pruned model: numba, latbench's own kernels; numba-bf16, those in bfloat16; or "
            "deepsparse."
        ),
    ] = "numba",
    patterns: Annotated[
        list[str] | None, typer.Option(help="Only these, such as vector:32,nm:2:4, and dense.")
    ] = None,
    sparsities: Annotated[
        list[str] | None,
        typer.Option(help="Only these, such as 0.6,0.7, or `fine`: as far as the cost model does not extrapolate."),
    ] = None,
    most_bytes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="What all weights of the pruned model may take together, as numba's kernels pack them; what is not "
            "pruned counts as it is.",
        ),
    ] = None,
    limits: Annotated[
        Path | None,
        typer.Option(help="YAML: layers that are tied, fixed, excluded, ...; see search/problem/limits.py."),
    ] = None,
    errors: Annotated[
        str,
        typer.Option(help="Of layers: output, weight, or a CSV or Parquet file of layer, pattern, sparsity, error."),
    ] = "output",
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_SEED,
            help="Of the search: the same seed tries the same profiles, as long as what was timed is kept "
            "(no --remeasure) and --time-budget does not end it.",
        ),
    ] = 0,
    evaluations: Annotated[
        int,
        typer.Option(
            min=1,
            help="How often each of up to 4 rounds may go through the calibration data (with --batches, through "
            "those); a part of them counts as a part.",
        ),
    ] = 200,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many calibration batches judge, and the best by all; default all."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="staged: learns each layer's part in the loss. To compare with: spdy, SPDY's search as published; "
            "once: by the layers' errors alone; uniform: one pattern and sparsity in all."
        ),
    ] = "staged",
    time_budget: Annotated[
        str | None,
        typer.Option(
            help="Try no profile after so long and take the best so far: 90s, 10m, 1.5h. It counts from when layers "
            "are pruned and whole models timed; what is found is judged by all data (--batches) and timed even after "
            "it, up to 10 rounds of minutes."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That prune layers and judge profiles; they change no more than roundings. Default: a thread "
            "each, up to 8.",
        ),
    ] = None,
    judges: Annotated[
        str,
        typer.Option(
            help="Where profiles are judged: cpu, in --processes here; gpu, a process for each GPU here; ray, on "
            "each CPU of the Ray cluster (RAY_ADDRESS), whose nodes see the same files."
        ),
    ] = "cpu",
    method: Annotated[
        str,
        typer.Option(
            help="How each layer is pruned: obs, the best; adaprune, sparsegpt, magnitude, which take less time; "
            "or auto, obs where that takes seconds and adaprune elsewhere."
        ),
    ] = "auto",
    risk: Annotated[
        float, typer.Option(min=0.6, max=0.999, help="How likely the promise is to be met when it is verified.")
    ] = 0.9,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.")] = None,
    refine: Annotated[
        Path | None, typer.Option(help="Folder of a `latbench verify` that missed: go on from what it measured.")
    ] = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Time whole models again, and search again.")
    ] = False,
) -> None:
    """Choose a pattern and a sparsity for every layer so that the model reaches a speedup with the least loss."""
    from dataclasses import replace

    from latbench.cli.commands.progress import live
    from latbench.cli.commands.sweep import parse_duration
    from latbench.errors import UsageError
    from latbench.machines.devices import count_cores
    from latbench.tables.storage import parse_place
    from latbench.workloads.points import parse_patterns, parse_wanted_sparsities
    from search.backends import Deployment
    from search.inputs import layer_errors
    from search.loss.parallel import Workers
    from search.pipeline import search_job as job
    from search.pipeline.search_history import SearchHistory
    from search.pipeline.search_request import CandidateOptions, Promise, SearchPlan, SearchRequest, read_inputs
    from search.problem.limits import Limits, read_limits
    from search.task import load_task

    _check(strategy, backend, method, judges, model, patterns, sparsities, most_bytes)
    if errors not in layer_errors.KINDS and not Path(errors).is_file():
        raise UsageError(f"--errors is {', '.join(layer_errors.KINDS)} or a file, and there is no file {errors}")
    chosen = tuple(str(pattern) for pattern in parse_patterns(patterns)) if patterns else None
    threads = threads or count_cores()
    request = SearchRequest(
        Promise(target, risk, most_bytes),
        Deployment(threads, backend),
        CandidateOptions(chosen, parse_wanted_sparsities(sparsities), errors),
        SearchPlan(
            strategy, seed, evaluations, batches, None if time_budget is None else parse_duration(time_budget)
        ),
        Workers(processes or min(threads, MOST_PROCESSES), judges),
    )
    stated = read_limits(limits) if limits is not None else Limits()
    with live() as tell:
        tell("reading the task", None, None)
        loaded = load_task(task)
        loaded = replace(loaded, limits=loaded.limits + stated)
        inputs = read_inputs(loaded, parse_place(table), model, database, method)
        history = SearchHistory(inputs, request)
        if refine is not None:
            met = None if remeasure else history.read_met_verdict(refine)
            if met is not None and _finished(output, history.digest()) is not None:
                typer.echo(
                    f"{refine}: {met.sentence()}: there is nothing to refine (--remeasure searches all the same)"
                )
                return
            history.add_verification(refine)
        found = None if remeasure else _finished(output, history.digest())
        last_line = f"{output} is up to date"
        if found is None:
            found = job.search(inputs, request, remeasure=remeasure, progress=tell)
            found.save(output)
            last_line = f"{output} is written"
    _show(found, last_line)


def _check(
    strategy: str,
    backend: str,
    method: str,
    judges: str,
    model: Path | None,
    patterns: list[str] | None,
    sparsities: list[str] | None,
    most_bytes: float | None,
) -> None:
    """Raise UsageError for options that do not go together, EnvironmentUnusable without the backend."""
    from latbench.backends import deepsparse_environment
    from latbench.errors import UsageError
    from search.backends import OWN
    from search.loss.pools import POOL_KINDS
    from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS
    from search.strategies.run_strategy import STRATEGIES
    from search.whole_model.model_engines import BACKENDS

    for kind, name, known in (
        ("strategy", strategy, STRATEGIES),
        ("backend", backend, BACKENDS),
        ("method", method, ONE_SHOT_METHODS),
        ("pool of evaluators", judges, POOL_KINDS),
    ):
        if name not in known:
            raise UsageError(f"unknown {kind} {name!r}: known are {', '.join(known)}")
    if backend in OWN and model is None:
        raise UsageError("--model is missing: the cost model that `latbench fit` makes of the table")
    if backend == "deepsparse":
        if most_bytes is not None:
            raise UsageError("--most-bytes does not go with deepsparse: nothing tells how that packs its weights")
        if model is not None or patterns or sparsities:
            raise UsageError(
                "--model, --patterns and --sparsities do not go with deepsparse: its weights are unstructured, and "
                "the table of `latbench layers` holds each layer's own times"
            )
        deepsparse_environment.find()
        typer.echo(deepsparse_environment.LICENCE)


def _finished(path: Path, digest: str) -> Profile | None:
    """The profile at `path` if it is what these inputs and settings give."""
    from latbench.errors import BadData
    from search.artifacts.profile import read_profile

    try:
        found = read_profile(path)
    except BadData:
        return None
    return found if found.inputs == digest else None


def _show(found: Profile, last_line: str) -> None:
    """Layer by layer, and the promise."""
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_ratio, format_seconds

    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("pattern")
    for heading in ("sparsity", "time", "error"):
        table.add_column(heading, justify="right")
    for name, choice in found.layers.items():
        table.add_row(
            name, choice.pattern, f"{choice.sparsity:.0%}", format_seconds(choice.seconds), f"{choice.error:.3g}"
        )
    value, low, high = found.speedup
    weights = f"{found.weights.sentence()}; " if found.weights else ""
    console = Console()
    console.print(table)
    console.print(
        f"\n{format_ratio(value, low, high)} promised over {found.dense_engine}: "
        f"{format_seconds(found.predicted_seconds, found.predicted_low, found.predicted_high)} instead of "
        f"{format_seconds(found.dense_seconds)}; {format_ratio(found.target)} was asked for; calibration loss "
        f"{found.loss:.4f} "
        f"({found.strategy}); {weights}{last_line}",
        highlight=False,
        soft_wrap=True,
    )
