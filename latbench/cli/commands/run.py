"""`latbench run`: the whole job in one command, from a task to a verified pruned model and its report."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from latbench.base.deployed_forms import PYTHON
from latbench.cli.json_output import print_json
from latbench.cli.load_warning import note_load
from latbench.cli.options.common_options import Json, RivalType, TaskArgument
from latbench.cli.options.option_texts import (
    check_deployed_form,
    parse_precisions,
    parse_rival_type,
    parse_train_budget,
)
from latbench.cli.options.pruning_options import TrainBudget
from latbench.cli.options.run_options import (
    JobFolder,
    Quick,
    RunPrecisions,
    RunRecipe,
    RunSeed,
    RunTarget,
    RunThreads,
)
from latbench.cli.options.search_options import Confidence, Deploy

if TYPE_CHECKING:
    from latbench.cli.job.job_progress import JobProgress
    from latbench.cli.job.job_steps import Job, JobResult
    from search.pipeline.speedup_verdict import SpeedupVerdict

_LOG = logging.getLogger(__name__)

MOST_TRIES = 3
"""Searches, at most: each after the first one is corrected by the verification before it."""


def run(
    task: TaskArgument,
    target: RunTarget = 2.0,
    output: JobFolder = None,
    quick: Quick = True,
    confidence: Confidence = 0.9,
    recipe: RunRecipe = None,
    train_budget: TrainBudget = None,
    precisions: RunPrecisions = None,
    over: RivalType = None,
    deploy: Deploy = PYTHON,
    threads: RunThreads = None,
    seed: RunSeed = 0,
    as_json: Json = False,
) -> None:
    """Do the whole job: time layers, search a profile, prune, verify and report. Exit 1 if the promise is missed.

    Finished steps are kept: the same command continues an interrupted job.
    """
    from latbench.errors import PromiseMissed
    from latbench.machines.processors import count_cores, select_threads
    from search.task import check_task_file

    # First, so that what cannot work is refused before anything is said.
    select_threads(threads)
    allowed, rivals = parse_precisions(precisions), parse_rival_type(over)
    train_seconds = parse_train_budget(train_budget, recipe)
    check_deployed_form(deploy)
    check_task_file(task)
    name = Path(task).stem if task.endswith(".py") else task.rpartition(":")[0] or task
    folder = output or Path("latbench-jobs") / name
    typer.echo(
        f"latbench: {task} to {target:g}x, in {'a few minutes' if quick else 'tens of minutes'}; results are in "
        f"{folder}, and the same command continues an interrupted job",
        err=True,
    )
    from latbench.cli.job.job_steps import Job, JobSettings  # imports torch, which takes seconds
    from latbench.cli.job.job_threads import choose_threads

    # Cores that are left to other programs may take part in what is not timed, but not those that --threads forbids.
    pruners = threads or count_cores()
    threads = choose_threads(threads, folder)
    settings = JobSettings(
        target, confidence, quick, recipe, threads, pruners, seed, allowed, deploy, train_seconds, rivals
    )
    with note_load(threads):
        result = _carry_out(Job(task, folder, settings))
        if as_json:
            print_json(result.to_record())
        else:
            from rich.console import Console

            Console().print(result.build_table())
        if not result.verdict.met:
            raise PromiseMissed(f"{result.verdict.sentence()}; the same command goes on from there")


def _carry_out(job: Job) -> JobResult:
    """Do every step; search again, corrected by the verification, while the promise is not kept.

    A verification far above the target leads to one search for a milder profile, too.
    """
    from latbench.cli.job.job_progress import JobProgress
    from latbench.cli.progress_bar import live

    with live() as tell, job:
        steps = JobProgress(tell, job.estimate_seconds)
        for what, step in (
            ("reading the task", job.trace_layers), ("timing layers", job.time_layers),
            ("fitting the cost model", job.fit_cost_model),
        ):  # fmt: skip
            step(steps.start(what))
        verdict = _prune_and_train(job, steps)
        job.score_milder_targets(steps.start("scoring milder targets"))
        return job.write_report(steps.start("writing the report"), verdict)


def _prune_and_train(job: Job, steps: JobProgress) -> SpeedupVerdict:
    """Find a profile that keeps the promise, then train the model if that is asked for; return the last verdict.

    Training changes no time, and may take long: a profile that misses the promise is not trained, and a trained model
    stays. If its verification misses the promise, the next run verifies it again.
    """
    verdict = _search_until_kept(job, steps)
    if job.settings.training is None or not verdict.met:
        return verdict
    job.train_model(steps.start("training"))
    if job.settings.is_exported:
        job.export_pruned(steps.start("exporting the trained model"))
    return job.verify_model(steps.start("verifying the trained model"))


def _search_until_kept(job: Job, steps: JobProgress) -> SpeedupVerdict:
    """Search, prune and verify, and return the last verdict."""
    from latbench.errors import PromiseMissed

    verdict, tries, is_milder = None, 0, False
    while True:
        try:
            job.search_profile(steps.start("searching"), refine=verdict is not None)
        except PromiseMissed as error:
            if not (is_milder and verdict):
                raise
            _LOG.warning(f"no milder profile was found ({error}): the one that was verified stays")
            job.keep_profile()
            return verdict
        job.prune_model(steps.start("pruning"))
        if job.settings.is_exported:
            job.export_pruned(steps.start("exporting"))
        verdict = job.verify_model(steps.start("verifying"))
        tries += 1
        if job.is_trained():
            return verdict
        is_milder = job.can_search_milder(verdict)
        if is_milder:
            tries = 0  # nobody had to search again: a miss now has all its corrections
            _LOG.warning(
                f"{verdict.measured_speedup:.2f}x measured, and the search predicted "
                f"{verdict.predicted_speedup:.2f}x: a milder profile is searched"
            )
        elif verdict.met or tries == MOST_TRIES:
            return verdict
