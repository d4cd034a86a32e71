"""`latbench search`: the profile with the least loss that reaches a speedup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import FLOAT32, NUMBA
from latbench.cli.json_output import print_json
from latbench.cli.load_warning import note_load
from latbench.cli.options.common_options import (
    Json,
    LimitsFile,
    ModelGpu,
    Precisions,
    RivalType,
    TaskArgument,
    Threads,
)
from latbench.cli.options.deployment_options import choose_deployment
from latbench.cli.options.option_texts import check_deployed_form, parse_duration
from latbench.cli.options.search_options import (
    CalibrationBatches,
    Confidence,
    Deploy,
    Evaluations,
    Evaluators,
    LayerErrors,
    MaxDrop,
    ModelBytes,
    Processes,
    ProfileOutput,
    PruningMethod,
    QuickSearch,
    Refine,
    RemeasureModels,
    SearchBackend,
    SearchBudget,
    SearchDatabase,
    SearchModel,
    SearchPatterns,
    SearchSeed,
    SearchSparsities,
    SearchTable,
    SearchTarget,
    Strategy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from latbench.cli.progress_bar import Tell
    from latbench.errors import PromiseMissed
    from search.artifacts.profile import Profile
    from search.pipeline.search_job import NearestProfile
    from search.pipeline.search_request import SearchInputs, SearchRequest
    from search.problem.limits import Limits
    from search.task import Task


def search(
    task: TaskArgument,
    table: SearchTable,
    database: SearchDatabase,
    output: ProfileOutput,
    target: SearchTarget = None,
    max_drop: MaxDrop = None,
    model: SearchModel = None,
    backend: SearchBackend = None,
    gpu: ModelGpu = None,
    deploy: Deploy = PYTHON,
    precisions: Precisions = None,
    over: RivalType = None,
    patterns: SearchPatterns = None,
    sparsities: SearchSparsities = None,
    most_bytes: ModelBytes = None,
    limits: LimitsFile = None,
    errors: LayerErrors = "output",
    seed: SearchSeed = 0,
    evaluations: Evaluations = 200,
    batches: CalibrationBatches = None,
    strategy: Strategy = "staged",
    time_budget: SearchBudget = None,
    processes: Processes = None,
    judges: Evaluators = "cpu",
    method: PruningMethod = "auto",
    confidence: Confidence = 0.9,
    threads: Threads = None,
    refine: Refine = None,
    remeasure: RemeasureModels = False,
    quick: QuickSearch = False,
    as_json: Json = False,
) -> None:
    """Choose a pattern, a sparsity and a precision for every layer: the least loss that reaches a speedup."""
    from latbench.machines.processors import count_cores
    from latbench.workloads.points import parse_wanted_sparsities
    from search.loss.parallel import MOST_PROCESSES, Workers
    from search.pipeline.search_request import CandidateOptions, Promise, SearchPlan, SearchRequest
    from search.task import load_task

    _check_names(strategy, backend, method, judges, errors)
    chosen = [*(patterns or ()), *(sparsities or ()), *(precisions or ())]
    _check_inputs(backend or NUMBA, deploy, model, chosen, most_bytes)
    _check_goal(target, max_drop, {"refine": refine, "remeasure": remeasure, "time-budget": time_budget})
    seconds = None if time_budget is None else parse_duration(time_budget)
    wanted = CandidateOptions(_list_patterns(patterns), parse_wanted_sparsities(sparsities), errors)
    stated, loaded = _read_limits(limits), load_task(task)
    request = SearchRequest(
        Promise(target or 1.0, confidence, most_bytes),
        choose_deployment(loaded, backend, threads=threads, precisions=precisions, form=deploy, gpu=gpu, over=over),
        wanted, SearchPlan(strategy, seed, evaluations, batches, seconds, quick),
        Workers(processes or min(threads or count_cores(), MOST_PROCESSES), judges),
    )  # fmt: skip
    files = _SearchFiles(task, loaded, table, model, database, output, method, stated)
    with note_load(request.deployment.threads):
        if max_drop is None:
            outcome = _search(files, request, refine, remeasure)
        else:
            outcome = _search_fastest(files, request, max_drop)
    _print_outcome(*outcome, as_json)


def _list_patterns(texts: list[str] | None) -> tuple[str, ...] | None:
    from latbench.workloads.points import parse_patterns

    return tuple(map(str, parse_patterns(texts))) if texts else None


def _read_limits(path: Path | None) -> Limits:
    from search.problem.limits import Limits, read_limits

    return Limits() if path is None else read_limits(path)


def _print_outcome(found: Profile | None, last_line: str, as_json: bool) -> None:
    """Print the profile, or the line alone where there is none."""
    from dataclasses import asdict

    if found is None:
        typer.echo(last_line)
    elif as_json:
        print_json(asdict(found) | {"aimed": found.aimed, "speedup": found.speedup})
    else:
        _print_profile(found, last_line)


class _SearchFiles(NamedTuple):
    """What a search reads and writes.

    The task is named as the user does, and loaded. `method` is how the layers of the database are pruned.
    """

    reference: str
    task: Task
    table: str
    model: Path | None
    database: Path
    output: Path
    method: str
    limits: Limits


def _search(
    files: _SearchFiles, request: SearchRequest, refine: Path | None, remeasure: bool
) -> tuple[Profile | None, str]:
    """Find the profile unless the output holds it; return it with a last line, or the line alone."""
    from latbench.cli.progress_bar import live
    from search.pipeline import search_job as job
    from search.pipeline.search_history import SearchHistory

    with live() as tell:
        tell("reading the task", None, None)
        inputs = _read_inputs(files, request.deployment.form)
        history = SearchHistory(inputs, request)
        if refine is not None:
            met = None if remeasure else history.read_met_verdict(refine)
            if met is not None and _finished(files.output, history.digest()) is not None:
                return None, (
                    f"{refine}: {met.sentence()}: there is nothing to refine (--remeasure searches nevertheless)"
                )
            history.add_verification(refine)
        found = None if remeasure else _finished(files.output, history.digest())
        if found is not None:
            return found, f"{files.output} is up to date"
        _check_score(inputs, request, tell)
        try:
            found = job.search(inputs, request, remeasure=remeasure, progress=tell)
        except job.NearestProfile as error:
            raise _keep_nearest(error, files) from error
        found.save(files.output)
    return found, f"{files.output} is written"


def _search_fastest(files: _SearchFiles, request: SearchRequest, max_drop: str) -> tuple[Profile, str]:
    """Find the fastest profile whose score drops at most so far; return it with a last line."""
    from latbench.cli.progress_bar import live
    from search.pipeline.largest_speedup import parse_drop, search_fastest
    from search.whole_model.timed_device import build_model_timer

    drop = parse_drop(max_drop)
    with live() as tell, build_model_timer(request.deployment) as timer:
        inputs = _read_inputs(files, request.deployment.form)
        _check_score(inputs, request, tell)
        found = search_fastest(inputs, request, drop, timer=timer, progress=tell)
        found.save(files.output)
    return found, f"{files.output} is written"


def _read_inputs(files: _SearchFiles, form: str) -> SearchInputs:
    """Read the task, with the limits of the command line, and the inputs of its search; check the form."""
    from dataclasses import replace

    from latbench.tables.storage import parse_place
    from search.check_task import check_task
    from search.export.export_model import check_can_export
    from search.pipeline.search_request import read_inputs

    loaded = replace(files.task, limits=files.task.limits + files.limits)
    check_task(loaded, ["copy"])
    if form != PYTHON:
        check_can_export(loaded, form)
    return read_inputs(loaded, parse_place(files.table), files.model, files.database, files.method)


def _check_score(inputs: SearchInputs, request: SearchRequest, tell: Tell) -> None:
    """Check that the task scores a converted model, before minutes are spent on the search."""
    from latbench.base.engine_registry import is_deepsparse
    from search.check_task import check_task

    tell("checking the task", None, None)
    deployment = request.deployment
    if not is_deepsparse(deployment.backend):
        check_task(inputs.task, ["score"], threads=deployment.host_threads, by_forward=deployment.on_gpu)


def _keep_nearest(error: NearestProfile, files: _SearchFiles) -> PromiseMissed:
    """Save the profile that came nearest to the target beside the output; return the error with what takes it."""
    from latbench.errors import PromiseMissed

    nearest = error.profile
    path = files.output.with_name(f"{files.output.stem}-{nearest.target:g}x{files.output.suffix}")
    nearest.save(path)
    return PromiseMissed(
        f"{error}; {path} is the best profile found, which keeps {nearest.target:g}x: `latbench prune "
        f"{files.reference} --profile {path} --database {files.database} -o pruned` takes it"
    )


def _check_goal(target: float | None, max_drop: str | None, of_targets: Mapping[str, object]) -> None:
    """Raise UsageError unless there is either a target or a largest drop, which takes no options of a target."""
    from latbench.errors import UsageError

    if (target is None) == (max_drop is None):
        raise UsageError("give either --target, a speedup such as 1.5, or --max-drop, a loss of score such as 1%")
    given = [name for name, value in of_targets.items() if value]
    if max_drop is not None and given:
        raise UsageError(f"--{given[0]} belongs to a --target: --max-drop searches the target itself")


def _check_names(strategy: str, backend: str | None, method: str, judges: str, errors: str) -> None:
    """Raise UsageError for an unknown strategy, engine, method, kind of evaluators or kind of errors."""
    from latbench.base.engine_registry import PRUNED_ENGINES
    from latbench.errors import UsageError
    from search.inputs import layer_errors
    from search.loss.pools import POOL_KINDS
    from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS
    from search.strategies.run_strategy import STRATEGIES

    for kind, name, known in (
        ("strategy", strategy, STRATEGIES),
        ("backend", backend, (None, *PRUNED_ENGINES)),
        ("method", method, ONE_SHOT_METHODS),
        ("pool of evaluators", judges, POOL_KINDS),
    ):
        if name not in known:
            raise UsageError(f"unknown {kind} {name!r}: known are {', '.join(filter(None, known))}")
    if errors not in layer_errors.KINDS and not Path(errors).is_file():
        raise UsageError(f"--errors is {', '.join(layer_errors.KINDS)} or a file, and there is no file {errors}")


def _check_inputs(
    backend: str,
    form: str,
    model: Path | None,
    chosen: list[str],
    most_bytes: float | None,
) -> None:
    """Raise UsageError for options that do not fit the engine, EnvironmentUnusable if DeepSparse is not set up.

    chosen: patterns, sparsities and precisions that were asked for.
    """
    from latbench.backends.cpu import deepsparse_environment
    from latbench.base.engine_registry import is_deepsparse, runs_our_kernels
    from latbench.errors import UsageError

    check_deployed_form(form, backend)
    if runs_our_kernels(backend) and model is None:
        raise UsageError("--cost-model is missing: give the cost model that `latbench fit` makes of the table")
    if not is_deepsparse(backend):
        return
    if most_bytes is not None:
        raise UsageError("--most-bytes does not go with deepsparse, because its packed sizes are unknown")
    if model is not None or chosen:
        raise UsageError(
            "--cost-model, --patterns, --sparsities and --precision do not go with deepsparse: its weights are "
            "unstructured float32, and the table of `latbench layers` holds the times of each layer"
        )
    deepsparse_environment.find_environment()
    typer.echo(deepsparse_environment.LICENCE)


def _finished(path: Path, digest: str) -> Profile | None:
    """Return the profile at `path` if it comes from these very inputs and settings; else None."""
    from latbench.errors import BadData
    from search.artifacts.profile import read_profile

    try:
        found = read_profile(path)
    except BadData:
        return None
    return found if found.inputs == digest else None


def _print_profile(found: Profile, last_line: str) -> None:
    """Print the choice for each layer, and the promised speedup."""
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_ratio, format_seconds

    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("pattern")
    if mixed := any(choice.precision != FLOAT32 for choice in found.layers.values()):
        table.add_column("precision")
    for heading in ("sparsity", "time", "error"):
        table.add_column(heading, justify="right")
    for name, choice in found.layers.items():
        table.add_row(
            name, choice.pattern, *([choice.precision] if mixed else []), f"{choice.sparsity:.0%}",
            format_seconds(choice.seconds), f"{choice.error:.3g}",
        )  # fmt: skip
    value, low, high = found.speedup
    weights = f"{found.weights.sentence()}; " if found.weights else ""
    console = Console()
    console.print(table)
    console.print(
        f"\n{format_ratio(found.target)} promised over {found.dense_engine}, {format_ratio(found.aimed)} aimed at, "
        f"{format_ratio(value, low, high)} measured in the search: "
        f"{format_seconds(found.predicted_seconds, found.predicted_low, found.predicted_high)} instead of "
        f"{format_seconds(found.dense_seconds)}; calibration loss {found.loss:.4f} "
        f"({found.strategy}); {weights}{last_line}",
        highlight=False,
        soft_wrap=True,
    )
