"""The steps of `latbench run`. Each writes into one folder, and is skipped when its result there is up to date.

workload.yaml    the layers that can be pruned.
table/           seconds of layers.
cost_model.json  seconds of layers between those.
database/        pruned layers, losses, and timings of whole models.
profile.json     the options of all layers, and the promise.
pruned/          the pruned model.
deploy/          the exported model, of a job that deploys one.
verify/          the verdict.
milder_targets.json  what milder targets would keep.
report.html      everything, on one page.
summary.json     the main figures.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import filelock
import torch
from rich.table import Table

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.evaluation.held_out_errors import evaluate
from cost_models.model_file import load, save
from cost_models.refusals import BadModel
from cost_models.rows.training_rows import read_training_rows
from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import CPU_ENGINES, FLOAT32, NUMBA, list_standard
from latbench.base.files import write_text_atomically
from latbench.cli.progress_bar import Tell
from latbench.errors import BadData, EnvironmentUnusable, LatbenchError, PromiseMissed, UsageError
from latbench.machines.devices import name_cpu
from latbench.machines.processors import select_threads
from latbench.report import report_data, report_inputs
from latbench.report.pages import html_page
from latbench.report.summary import build_summary_table, summarise
from latbench.sweeping.settings import CPU_SETTINGS, Progress, SweepOptions
from latbench.sweeping.sweep import PointChooser, run_sweep
from latbench.sweeping.sweep_machine import CpuMachine
from latbench.tables.storage import Place, parse_place
from latbench.tables.table import hash_table
from latbench.workloads.points import SPARSITIES, Point, PointSetup, list_points
from latbench.workloads.workload import Layer, Workload, read_workload, write_workload
from search.artifacts.profile import read_profile
from search.check_task import check_task
from search.deployment import Deployment
from search.export.export_manifest import is_export_of
from search.export.export_model import check_can_export, export_model
from search.export.export_steps import ExportRequest
from search.export.model_to_export import read_pruned_model
from search.loss.parallel import MOST_PROCESSES, Workers
from search.pipeline import milder_targets, promising_points, search_job
from search.pipeline import verify as verification
from search.pipeline.prune_to_folder import PruneRequest, is_trained, prune_to_folder
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import (
    CandidateOptions,
    Promise,
    SearchInputs,
    SearchPlan,
    SearchRequest,
    read_inputs,
)
from search.pipeline.speedup_verdict import SpeedupVerdict
from search.pruning.prune_model import check_can_train
from search.pruning.storage.model_folder import hash_manifest
from search.pruning.training.auto_recipe import AutoRecipe, read_training
from search.pruning.training.recipe import Recipe
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.end_to_end import ModelTimer
from sparse_kernels.patterns import ShflBW

_LOG = logging.getLogger(__name__)

QUICK_SETTINGS = replace(CPU_SETTINGS, rel_error=0.02, max_seconds=0.2)
"""A verdict is measured on whole models; the times of layers only guide the search."""

QUICK_OPTION_SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
QUICK_EVALUATIONS, THOROUGH_EVALUATIONS = 100, 200

ENOUGH_BATCHES = 8
"""With at least so many calibration batches, a quick search tries profiles on half of them; the best ones see all."""

SHORT_EVALUATION_SECONDS = 20.0

SMALL_LOSS = 0.005
"""Share of the dense score that pruning may lose before training is advised."""

TRAINING_ADVICE = "`--train-budget 10m` trains the pruned model, and may win back most of what was lost"

# Seconds that steps take on two ordinary cores, as an estimate before they begin.
_POINT_SECONDS, _OPTION_SECONDS, _LAYER_SECONDS = 0.6, 1.0, 2.0  # options of a million weights
_START_SECONDS, _ROUND_SECONDS, _ROUNDS, _VERIFY_SECONDS = 25.0, 15.0, 3, 40.0
_STEP_SECONDS = 0.3  # of training
_MILDER_SECONDS = 15.0


@dataclass(frozen=True)
class JobSettings:
    """What the user asks for.

    Attributes
    ----------
    target
        Speedup over the fastest dense engine.
    confidence
        Probability that a verification keeps the promise.
    quick
        Measure and prune only what the search is likely to choose.
    recipe
        Training recipe of `latbench prune`; None for no training.
    threads
        Threads of each engine; None for one a core.
    pruners
        Processes that prune layers; None for one a thread. Nothing is timed then.
    seed
        Random seed of weights and search.
    precisions
        Types in which layers may be multiplied.
    form
        How the model is deployed, one of `latbench.base.deployed_forms.FORM_PHRASES`.
    train_seconds
        Time budget of the training recipe `auto`; None for its default, or for no training without a recipe.
    over
        Type of the dense engines that the promise is over; empty for the least precise of `precisions`.
    """

    target: float
    confidence: float = 0.9
    quick: bool = True
    recipe: str | None = None
    threads: int | None = None
    pruners: int | None = None
    seed: int = 0
    precisions: tuple[str, ...] = (FLOAT32,)
    form: str = PYTHON
    train_seconds: float | None = None
    over: str = ""

    @cached_property
    def training(self) -> Recipe | AutoRecipe | None:
        """How the model is trained, as its file was when it was read first.

        Raises UsageError or BadData for a wrong recipe.
        """
        return read_training(self.recipe, self.train_seconds)

    def to_options(self) -> str:
        """Return the options but the target that are not the default ones, as text. The folder keeps the threads."""
        seconds, usual = self.train_seconds, JobSettings(self.target)
        given = {
            "--thorough": "" if not self.quick else None,
            "--confidence": f"{self.confidence:g}" if self.confidence != usual.confidence else None,
            "--recipe": self.recipe,
            "--train-budget": None if seconds is None else f"{seconds:g}s",
            "--precision": ",".join(self.precisions) if self.precisions != usual.precisions else None,
            "--over": self.over or None,
            "--deploy": self.form if self.is_exported else None,
            "--seed": str(self.seed) if self.seed != usual.seed else None,
        }
        return "".join(f" {name} {value}".rstrip() for name, value in given.items() if value is not None)

    @property
    def is_exported(self) -> bool:
        """Whether the model is exported, and verified as such."""
        return self.form != PYTHON


@dataclass(frozen=True)
class JobResult:
    """The outcome of a job."""

    verdict: SpeedupVerdict
    inputs: report_inputs.ReportInputs
    report: Path
    can_train: bool = False
    """Whether the task has training data, and the model was not trained."""

    def to_record(self) -> dict[str, Any]:
        """Return the main figures for JSON."""
        return summarise(self.inputs) | {"report": str(self.report)}

    def build_table(self) -> Table:
        """Build the summary that ends the command."""
        lost = self.verdict.score_dense - self.verdict.score_pruned
        advised = self.can_train and lost > SMALL_LOSS * abs(self.verdict.score_dense)
        return build_summary_table(self.inputs, str(self.report), TRAINING_ADVICE if advised else "")


class Job:
    """A job in its folder. A context manager: it ends the processes that time whole models.

    Parameters
    ----------
    reference
        The task, as the user names it.
    folder
        Where the results are.
    settings
        What the user asks for.
    """

    def __init__(self, reference: str, folder: Path, settings: JobSettings) -> None:
        self._reference, self.folder, self.settings = reference, folder, settings
        self._threads = select_threads(settings.threads)
        self._timer = ModelTimer(self._threads)
        self._lock = filelock.FileLock(folder / ".lock")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.__exit__()
        self._lock.release()

    @cached_property
    def task(self) -> Task:
        """The user's task. Raises UsageError for one that runs on a GPU."""
        found = load_task(self._reference)
        if found.deploy_device != "cpu":
            raise UsageError(
                f"task {found.name} has the deploy_device {found.deploy_device}, and `latbench run` measures CPUs: "
                "use sweep --gpu, fit, search, prune and verify, as docs/tutorials/gpu.md shows"
            )
        return found

    @cached_property
    def _workload(self) -> Workload:
        """The layers of the task as it is now. The file of an earlier run may be of another model."""
        shapes = list_prunable_layers(self.task, self.task.model())
        layers = tuple(Layer(name, shape) for name, shape in shapes.items())
        return Workload(self.task.name, f"traced from {self._reference}", layers)

    @cached_property
    def _points(self) -> list[Point]:
        quick = self.settings.quick
        setup = PointSetup(
            name_cpu(), self._threads, [NUMBA] if quick else list_standard(CPU_ENGINES), self.settings.seed,
            rounded=[each for each in self.settings.precisions if each != FLOAT32],
        )  # fmt: skip
        if not quick:
            return list_points([self._workload], setup, sparsities=SPARSITIES)
        points = list_points([self._workload], setup, sparsities=promising_points.SPARSITIES)
        # Vectors are as fast, and grouping the rows of each option for Shfl-BW takes seconds.
        return [point for point in points if not isinstance(point.pattern, ShflBW)]

    @property
    def _table(self) -> Place:
        return parse_place(self._path("table"))

    def _path(self, name: str) -> Path:
        return self.folder / name

    def estimate_seconds(self) -> Mapping[str, float]:
        """Return the estimated seconds of each step, in their order."""
        points, layers, weights = 30, 4, 6e6  # of an ordinary task, until this one was read
        if "_workload" in vars(self):
            points, layers = len(self._points), len(self._workload.layers)
            weights = sum(layer.shape.m * layer.shape.k for layer in self._workload.layers)
        options = 7 if self.settings.quick else 20
        training = {}
        if (asked := self.settings.training) is not None:
            seconds = asked.budget_seconds if isinstance(asked, AutoRecipe) else asked.steps * _STEP_SECONDS
            training = {"training": layers * _LAYER_SECONDS + seconds}
            if self.settings.is_exported:
                training["exporting the trained model"] = _START_SECONDS
            training["verifying the trained model"] = _VERIFY_SECONDS
        milder = {"scoring milder targets": _MILDER_SECONDS} if self._wants_milder_targets else {}
        export = {"exporting": _START_SECONDS} if self.settings.is_exported else {}
        rounds = _ROUNDS * (_ROUND_SECONDS + sum(export.values()))
        return {
            "reading the task": 5.0,
            "timing layers": points * _POINT_SECONDS,
            "fitting the cost model": 2.0,
            "searching": _START_SECONDS + rounds + options * weights / 1e6 * _OPTION_SECONDS,
            "pruning": layers * _LAYER_SECONDS,
            **export,
            "verifying": _VERIFY_SECONDS,
            **training,
            **milder,
            "writing the report": 3.0,
        }

    def trace_layers(self, tell: Tell) -> None:
        """Check the task and the recipe before any long work, and write the task's layers.

        From here on no other job may use the folder. Raises EnvironmentUnusable if one is at work there.
        """
        steps = ["copy"]
        if self.settings.training is not None:
            check_can_train(self.task)
            steps.append("training")
        check_task(self.task, steps)
        if self.settings.is_exported:
            check_can_export(self.task, self.settings.form)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise EnvironmentUnusable(
                f"another latbench run is at work in {self.folder}: wait for its end, or name another folder with -o"
            ) from error
        path = self._path("workload.yaml")
        if not _holds(path, self._workload):
            write_workload(self._workload, path)

    def time_layers(self, tell: Tell) -> None:
        """Time the layers of which the table has no row."""
        points = self._points
        choose: PointChooser = (
            (lambda table: points) if not self.settings.quick else (promising_points.PromisingPoints(points))
        )

        def report(now: Progress) -> None:
            tell(now.activity, now.done, now.total or None)

        run_sweep(
            self._table, choose, machine=CpuMachine(self._threads),
            settings=QUICK_SETTINGS if self.settings.quick else CPU_SETTINGS,
            options=SweepOptions(seed=self.settings.seed), report=report,
        )  # fmt: skip

    def fit_cost_model(self, tell: Tell) -> None:
        """Fit the look-up between the measured sparsities, unless the file holds that of this table."""
        path = self._path("cost_model.json")
        with contextlib.suppress(BadModel):
            load(path, self._table)
            return
        X, seconds = read_training_rows(self._table, {})
        model = AnchoredLookup().fit(X, seconds)
        figures = {"held-out sparsities of measured shapes": evaluate(model, X, seconds)}
        save(path, model, hash_table(self._table), X, validation=figures)

    def search_profile(self, tell: Tell, *, refine: bool = False) -> None:
        """Search the profile unless the file holds that of these inputs; `refine` feeds the verification back."""
        settings, inputs, request = self.settings, self._read_inputs(), self._build_request()
        history, path = SearchHistory(inputs, request), self._path("profile.json")
        if refine:
            history.add_verification(self._path("verify"))
        if not _is_of(path, history.digest()):
            check_task(self.task, ["score"], threads=self._threads)
            try:
                search_job.search(inputs, request, timer=self._timer, progress=tell).save(path)
            except search_job.NearestProfile as error:
                raise PromiseMissed(
                    f"{error}; `latbench run {self._reference} --target {error.profile.target:g} -o {self.folder}"
                    f"{settings.to_options()}` searches for that"
                ) from error

    def keep_profile(self) -> None:
        """Keep the profile that there is, as the result of the search after the verification that was fed back."""
        path, history = self._path("profile.json"), SearchHistory(self._read_inputs(), self._build_request())
        replace(read_profile(path), inputs=history.digest()).save(path)

    def can_search_milder(self, verdict: SpeedupVerdict) -> bool:
        """Return whether a milder profile may keep the promise, too. At most once a job.

        A verification that was fed back has led to one already.
        """
        if not verdict.is_needlessly_fast:
            return False
        return not SearchHistory(self._read_inputs(), self._build_request()).read_verifications()

    def _read_inputs(self) -> SearchInputs:
        return read_inputs(self.task, self._table, self._path("cost_model.json"), self._path("database"))

    def _build_request(self) -> SearchRequest:
        settings, quick = self.settings, self.settings.quick
        evaluations, batches = QUICK_EVALUATIONS if quick else THOROUGH_EVALUATIONS, self._choose_batches()
        return SearchRequest(
            Promise(settings.target, settings.confidence),
            Deployment(self._threads, NUMBA, settings.precisions, settings.form, over=settings.over),
            CandidateOptions(sparsities=QUICK_OPTION_SPARSITIES if quick else None),
            SearchPlan(seed=settings.seed, evaluations=evaluations, batches=batches, quick=quick),
            self._choose_workers(evaluations, batches),
        )

    def _choose_batches(self) -> int | None:
        """Choose on how many calibration batches profiles are tried; None for all."""
        batches = len(self.task.calibration())
        return -(-batches // 2) if self.settings.quick and batches >= ENOUGH_BATCHES else None

    def _choose_workers(self, evaluations: int, most: int | None) -> Workers:
        """Choose where profiles are evaluated: in this process if that takes less than starting others.

        `most` is the number of batches for an evaluation, None for all.
        """
        model, batches = self.task.model(), self.task.calibration()[:most]
        began = time.monotonic()
        with torch.no_grad():
            self.task.loss(model, batches[0])
        seconds = (time.monotonic() - began) * len(batches) * evaluations
        evaluators = 1 if seconds < SHORT_EVALUATION_SECONDS else min(self._threads, MOST_PROCESSES)
        return Workers(evaluators, pruners=min(self.settings.pruners or self._threads, MOST_PROCESSES))

    def prune_model(self, tell: Tell) -> None:
        """Prune the model to the profile, without training, unless the folder holds the result or a trained one."""
        if not self.is_trained():
            self._prune(PruneRequest(), tell)

    def train_model(self, tell: Tell) -> None:
        """Prune the model and train it, unless the folder holds the result."""
        self._prune(PruneRequest(recipe=self.settings.recipe, train_seconds=self.settings.train_seconds), tell)

    def is_trained(self) -> bool:
        """Return whether the folder holds a model that was trained for this profile, also by an earlier command."""
        return is_trained(self.task, self._path("profile.json"), self._path("pruned"))

    def _prune(self, request: PruneRequest, tell: Tell) -> None:
        where = self._path("profile.json"), self._path("database"), self._path("pruned")
        prune_to_folder(self.task, *where, request, progress=tell)

    def export_pruned(self, tell: Tell) -> None:
        """Export the pruned model unless the folder holds its export."""
        pruned, output, form = self._path("pruned"), self._path("deploy"), self.settings.form
        if not is_export_of(output, form, hash_manifest(pruned)):
            read_model = partial(read_pruned_model, self.task, pruned)
            export_model(form, read_model, output, ExportRequest(), lambda step: tell(step, None, None))

    def verify_model(self, tell: Tell) -> SpeedupVerdict:
        """Time the model as it is deployed, unless it was, and kept its promise."""
        folder = self._path("deploy" if self.settings.is_exported else "pruned")
        output = self._path("verify")
        known = verification.read_current_verdict(self.task, folder, output)
        return known or verification.verify(self.task, folder, output, timer=self._timer, progress=tell)

    def score_milder_targets(self, tell: Tell) -> None:
        """Score profiles for milder targets, unless the file holds those of this profile.

        They are an addition to the report: where they cannot be scored, a warning says why.
        """
        path, profile = self._path("milder_targets.json"), self._path("profile.json")
        if not self._wants_milder_targets or self._has_milder_targets():
            return
        inputs, request = self._read_inputs(), self._build_request()
        try:
            milder_targets.score_milder_targets(
                inputs, request, profile, self._path("pruned"), self._timer, tell
            ).save(path)
        except LatbenchError as error:
            _LOG.warning(f"the report leaves out milder targets: {error}")

    @property
    def _wants_milder_targets(self) -> bool:
        return self.settings.target >= milder_targets.LEAST_TARGET

    def _has_milder_targets(self) -> bool:
        """Return whether the file holds the milder targets of the profile that there is."""
        path = self._path("milder_targets.json")
        try:
            return path.exists() and milder_targets.read_milder_targets(path).is_of(
                self.task, self._path("profile.json")
            )
        except BadData:
            return False

    def write_report(self, tell: Tell, verdict: SpeedupVerdict) -> JobResult:
        """Write the report and the summary."""
        files = report_inputs.ReportFiles(
            self._path("cost_model.json"), self._path("profile.json"), self._path("pruned"), self._path("verify"),
            str(self._path("workload.yaml")), self._path("database"),
            milder=self._path("milder_targets.json") if self._has_milder_targets() else None,
        )  # fmt: skip
        inputs = report_inputs.read_inputs(self._table, files)
        page = html_page.build_page(inputs, report_data.build_report_data(inputs), ["latbench", *sys.argv[1:]])
        report = self._path("report.html")
        write_text_atomically(report, html_page.build_html(page))
        result = JobResult(verdict, inputs, report, self.task.can_train and self.settings.training is None)
        write_text_atomically(self._path("summary.json"), json.dumps(result.to_record(), indent=2) + "\n")
        return result


def _holds(path: Path, workload: Workload) -> bool:
    """Return whether a file holds this very workload."""
    try:
        return path.exists() and read_workload(path) == workload
    except BadData:
        return False


def _is_of(path: Path, digest: str) -> bool:
    """Return whether a profile comes from these inputs."""
    try:
        return read_profile(path).inputs == digest
    except BadData:
        return False
