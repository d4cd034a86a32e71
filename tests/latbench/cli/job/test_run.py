"""`latbench run`: which steps it does, repeats and skips. Steps are fakes here; `make demo` does the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.table import Table

from latbench.base.files import hash_file
from latbench.cli.commands.run import MOST_TRIES, run
from latbench.cli.job import job_steps, job_threads
from latbench.cli.job.job_steps import Job, JobResult, JobSettings
from latbench.cli.job.job_threads import choose_threads
from latbench.errors import BadData, EnvironmentUnusable, PromiseMissed, UsageError
from latbench.machines.processors import count_cores
from latbench.tables.writer import write_part
from search.loss.cache import hash_score_code
from search.pipeline.milder_targets import MilderTargets, ScoredTarget
from search.pipeline.speedup_verdict import INCONCLUSIVE, KEPT, MISSED
from search.pruning.training.auto_recipe import AutoRecipe


@dataclass
class Steps:
    """A job whose verifications have given outcomes, and what was done."""

    outcomes: list[str]
    done: list[str] = field(default_factory=list)
    settings: Any = None

    def __call__(self, reference: str, folder: Path, settings: Any) -> Steps:
        self.settings, self.folder = settings, folder
        return self

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.done.append("closed")

    def estimate_seconds(self) -> dict[str, float]:
        return dict.fromkeys(
            ["reading the task", "timing layers", "fitting the cost model", "searching", "pruning", "verifying",
             "training", "exporting the trained model", "verifying the trained model", "scoring milder targets",
             "writing the report", "exporting"], 1.0,
        )  # fmt: skip

    def search_profile(self, tell: Any, *, refine: bool = False) -> None:
        self.done.append("refine" if refine else "search")

    def verify_model(self, tell: Any) -> Any:
        outcome = self.outcomes.pop(0)
        self.done.append(outcome)
        return SimpleNamespace(
            met=outcome in (KEPT, TOO_FAST), is_needlessly_fast=outcome == TOO_FAST, measured_speedup=2.9,
            predicted_speedup=2.1, sentence=lambda: f"promise {outcome}", advice="do this",
        )  # fmt: skip

    def is_trained(self) -> bool:
        return "train_model" in self.done

    def keep_profile(self) -> None:
        self.done.append("keep_profile")

    def can_search_milder(self, verdict: Any) -> bool:
        return verdict.is_needlessly_fast and "refine" not in self.done

    def write_report(self, tell: Any, verdict: Any) -> Any:
        self.done.append("report")
        record = {"outcome": verdict.sentence()}
        return SimpleNamespace(verdict=verdict, to_record=lambda: record, build_table=Table)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda tell: self.done.append(name)


def carry_out(monkeypatch: pytest.MonkeyPatch, *outcomes: str, load: str | None = None, **options: Any) -> Steps:
    steps = Steps(list(outcomes))
    monkeypatch.setattr("latbench.machines.noise_sources.describe_load_now", lambda threads: load)
    monkeypatch.setattr("latbench.cli.job.job_threads.count_free_cores", lambda seconds: count_cores())
    monkeypatch.setattr("latbench.cli.job.job_steps.Job", steps)
    try:
        run("digits", **options)
    except PromiseMissed as error:
        steps.done.append(str(error))
    return steps


TOO_FAST = "kept, far above the target"

FIRST = ["trace_layers", "time_layers", "fit_cost_model", "search", "prune_model"]
LAST = ["score_milder_targets", "report", "closed"]


def test_a_job_whose_promise_is_kept_has_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = carry_out(monkeypatch, KEPT)
    assert steps.done == [*FIRST, KEPT, *LAST]
    assert steps.folder == Path("latbench-jobs/digits")
    assert (steps.settings.target, steps.settings.quick, steps.settings.confidence) == (2.0, True, 0.9)


def test_a_model_that_leaves_python_is_exported_before_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = carry_out(monkeypatch, MISSED, KEPT, deploy="c")
    again = ["refine", "prune_model", "export_pruned", KEPT]
    assert steps.done == [*FIRST, "export_pruned", MISSED, *again, *LAST]
    assert steps.settings.form == "c" and steps.settings.is_exported
    with pytest.raises(UsageError, match="unknown form 'java' to deploy: known are python, openvino, torch, c"):
        run("digits", deploy="java")


def test_too_many_threads_are_refused_before_anything_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--threads 4096"):
        run("digits", threads=4096)
    assert capsys.readouterr().err == ""


def test_a_missing_task_is_refused_before_anything_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"there is no task file .*nothing\.py"):
        run("nothing.py")
    assert capsys.readouterr().err == ""


TASK = """
import torch
name = "little"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)).eval()
def example(): return (torch.ones(3, 24),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return 1.0
"""


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [("nosuch", BadData, "no recipe nosuch"), ("gmp", UsageError, "task little has no train_batches")],
)
def test_a_recipe_that_cannot_be_followed_is_refused_before_any_work(
    tmp_path: Path, recipe: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "little.py").write_text(TASK)
    job = Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(2.0, recipe=recipe))
    with job, pytest.raises(error, match=message):
        job.trace_layers(lambda what, done, total: None)
    assert not (tmp_path / "job").exists()


def test_the_layers_are_those_of_the_task_as_it_is_now(tmp_path: Path) -> None:
    task, folder = tmp_path / "little.py", tmp_path / "job"
    for features in (32, 40):
        task.write_text(TASK.replace("32", str(features)))
        with Job(str(task), folder, JobSettings(2.0)) as job:
            job.estimate_seconds()  # as a display asks before the first step
            job.trace_layers(lambda what, done, total: None)
            assert {(point.shape.m, point.shape.k) for point in job._points} == {(features, 24), (5, features)}
            assert job.estimate_seconds()["timing layers"] == pytest.approx(0.6 * len(job._points))


@pytest.mark.parametrize("outcome", [MISSED, INCONCLUSIVE])
def test_a_verification_that_was_not_kept_corrects_the_search(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    steps = carry_out(monkeypatch, outcome, KEPT)
    assert steps.done == [*FIRST, outcome, "refine", "prune_model", KEPT, *LAST]


@pytest.mark.parametrize("then", [KEPT, TOO_FAST])
def test_a_model_that_is_needlessly_fast_is_searched_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    steps = carry_out(monkeypatch, TOO_FAST, then)
    assert steps.done == [*FIRST, TOO_FAST, "refine", "prune_model", then, *LAST]
    assert "2.90x measured, and the search predicted 2.10x: a milder profile is searched" in caplog.text


def test_a_milder_profile_that_misses_is_corrected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = ["refine", "prune_model"]
    steps = carry_out(monkeypatch, TOO_FAST, MISSED, MISSED, KEPT)
    assert steps.done == [*FIRST, TOO_FAST, *again, MISSED, *again, MISSED, *again, KEPT, *LAST]


def test_a_kept_promise_stays_where_no_milder_profile_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search = Steps.search_profile

    def refuse(steps: Steps, tell: Any, *, refine: bool = False) -> None:
        search(steps, tell, refine=refine)
        if refine:
            raise PromiseMissed("nothing keeps it")

    monkeypatch.setattr(Steps, "search_profile", refuse)
    assert carry_out(monkeypatch, TOO_FAST).done == [
        *FIRST, TOO_FAST, "refine", "keep_profile", *LAST
    ]  # fmt: skip
    assert "no milder profile was found (nothing keeps it): the one that was verified stays" in caplog.text
    assert carry_out(monkeypatch, MISSED).done[-1].startswith("nothing keeps it")


@pytest.mark.parametrize(
    ("batches", "quick", "tried"), [(7, True, None), (8, True, 4), (9, True, 5), (9, False, None)]
)
def test_a_quick_search_tries_profiles_on_half_of_many_batches(
    tmp_path: Path, batches: int, quick: bool, tried: int | None
) -> None:
    (tmp_path / "little.py").write_text(TASK.replace("[example()]", f"[example()] * {batches}"))
    with Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(2.0, quick=quick)) as job:
        assert job._build_request().plan.batches == tried


def test_a_milder_profile_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "little.py").write_text(TASK)
    verified: list[str] = []
    monkeypatch.setattr(Job, "_read_inputs", lambda job: None)
    monkeypatch.setattr("search.pipeline.search_history.SearchHistory.read_verifications", lambda history: verified)
    fast, kept = SimpleNamespace(is_needlessly_fast=True), SimpleNamespace(is_needlessly_fast=False)
    with Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(2.0)) as job:
        assert job.can_search_milder(fast) and not job.can_search_milder(kept)
        verified.append("fed back by an earlier run of the same job")
        assert not job.can_search_milder(fast)


def test_a_model_is_trained_once_its_profile_keeps_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training changes no time, and may take long."""
    steps = carry_out(monkeypatch, MISSED, KEPT, KEPT, train_budget="5m")
    again = ["refine", "prune_model", KEPT, "train_model", KEPT]
    assert steps.done == [*FIRST, MISSED, *again, *LAST]
    assert steps.settings.training == AutoRecipe(300.0)
    exported = carry_out(monkeypatch, KEPT, KEPT, recipe="auto", deploy="c")
    assert exported.done[len(FIRST) :] == [
        "export_pruned", KEPT, "train_model", "export_pruned", KEPT, *LAST
    ]  # fmt: skip
    assert "train_model" not in carry_out(monkeypatch, *[MISSED] * MOST_TRIES, recipe="auto").done


@pytest.mark.parametrize(
    ("verdict", "options"), [(MISSED, {"recipe": "auto"}), (TOO_FAST, {}), (TOO_FAST, {"recipe": "auto"})]
)
def test_a_trained_model_is_never_given_up_for_another_profile(
    monkeypatch: pytest.MonkeyPatch, verdict: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(Steps, "is_trained", lambda steps: True)
    steps = carry_out(monkeypatch, verdict, KEPT, **options)
    assert "refine" not in steps.done
    assert ("train_model" in steps.done) == (verdict == TOO_FAST and bool(options))  # unless it is up to date


def test_a_budget_that_is_no_time_is_refused_before_anything_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="a duration is a number"):
        run("digits", train_budget="soon")
    with pytest.raises(UsageError, match="--train-budget goes with --recipe auto, not gmp"):
        run("digits", recipe="gmp", train_budget="5m")
    with pytest.raises(UsageError, match="--train-budget is a time above 0, such as 10m, not 0s"):
        run("digits", train_budget="0s")
    assert capsys.readouterr().err == ""


def test_the_dense_engines_of_the_promise_are_chosen_by_their_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = carry_out(monkeypatch, KEPT, precisions=["int8"], over="float32", deploy="c").settings
    assert settings.to_options() == " --precision float32,int8 --over float32 --deploy c"
    assert JobSettings(2.0).to_options() == ""
    other = JobSettings(2.0, 0.8, False, "auto", train_seconds=90.0, seed=3)
    assert other.to_options() == " --thorough --confidence 0.8 --recipe auto --train-budget 90s --seed 3"
    with Job("digits", Path("nowhere"), settings) as job:
        monkeypatch.setattr(Job, "_choose_workers", lambda *_: None)
        rivals = job._build_request().deployment.rivals
    assert "openvino" in rivals and not any("int8" in name or "bf16" in name for name in rivals)
    capsys.readouterr()
    with pytest.raises(UsageError, match="unknown type 'fp8' for --over: known are float32, bfloat16, int8"):
        run("digits", over="fp8")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("pruned", "advised"), [(0.95, True), (0.999, False), (1.2, False)])
@pytest.mark.parametrize("can_train", [True, False])
def test_training_is_advised_where_much_was_lost(pruned: float, advised: bool, can_train: bool) -> None:
    verdict: Any = SimpleNamespace(score_dense=1.0, score_pruned=pruned)
    given: list[str] = []
    result = JobResult(verdict, None, Path("report.html"), can_train)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_steps, "build_summary_table", lambda inputs, path, advice: given.append(advice))
        result.build_table()
    assert ("--train-budget" in given[0]) == (advised and can_train)


def test_a_promise_that_is_never_kept_has_a_report_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = carry_out(monkeypatch, *[MISSED] * MOST_TRIES)
    assert steps.done.count(MISSED) == MOST_TRIES
    assert steps.done[-4:-1] == LAST
    assert steps.done[-1] == "promise missed; the same command goes on from there"


def test_the_summary_is_json_if_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    carry_out(monkeypatch, KEPT, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"outcome": "promise kept"}
    assert err.startswith("latbench: digits to 2x, in a few minutes; results are in ")


@pytest.mark.parametrize(
    ("task", "folder"),
    [("my/own_task.py", "own_task"), ("package.module:task", "package.module"), ("digits", "digits")],
)
def test_the_folder_has_the_name_of_the_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "own_task.py").touch()
    steps = Steps([KEPT])
    monkeypatch.setattr("latbench.cli.job.job_steps.Job", steps)
    run(task)
    assert steps.folder == Path("latbench-jobs") / folder


@pytest.mark.parametrize(("load", "said"), [("other programs take 1.0 of 2 cores now", True), (None, False)])
def test_a_refusal_on_a_busy_machine_says_that_it_was_busy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: str | None, said: bool
) -> None:
    missed = carry_out(monkeypatch, *[MISSED] * MOST_TRIES, load=load).done[-1]
    assert missed.endswith("try again when they are done") is said
    assert ("take 1.0 of 2 cores" in caplog.text) is said


def test_a_search_that_refuses_on_a_busy_machine_says_that_it_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PromiseMissed("target 2x is infeasible: the best is 1.84x.")

    monkeypatch.setattr(Steps, "search_profile", refuse)
    missed = carry_out(monkeypatch, KEPT, load="busy").done[-1]
    assert missed.startswith("target 2x is infeasible: the best is 1.84x; other programs took the cores")


@pytest.mark.parametrize(
    ("wanted", "free", "threads", "said"),
    [(None, 4, 4, ""), (None, 3, 3, "keep 1 of 4 cores busy: each engine has 3 threads"), (2, 1, 2, "")],
)
def test_a_job_leaves_alone_the_cores_that_other_programs_keep_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: int | None, free: int,
    threads: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(job_threads, "count_cores", lambda: 4)
    monkeypatch.setattr(job_threads, "select_threads", lambda wanted: wanted)
    monkeypatch.setattr(job_threads, "count_free_cores", lambda seconds: free)
    assert choose_threads(wanted, tmp_path) == threads
    assert said in caplog.text if said else not caplog.text


def test_a_job_goes_on_with_the_threads_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any]
) -> None:
    monkeypatch.setattr(job_threads, "count_cores", lambda: 4)
    monkeypatch.setattr(job_threads, "count_free_cores", lambda seconds: 1)
    for started, threads in enumerate([3, 2]):  # the newest row counts
        changed = {"threads": threads, "started_at": pd.Timestamp(started, unit="s", tz="UTC")}
        write_part(tmp_path / "table", [row | changed])
    assert choose_threads(None, tmp_path) == 2
    assert "goes on with 2 threads, as it began; --threads 4 uses all" in caplog.text
    monkeypatch.setattr(job_threads, "count_cores", lambda: 1)  # another machine, or another affinity
    assert choose_threads(None, tmp_path) == 1


def test_milder_targets_are_scored_once_and_never_cost_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "little.py").write_text(TASK)
    (tmp_path / "job").mkdir()
    profile, path = tmp_path / "job/profile.json", tmp_path / "job/milder_targets.json"
    profile.write_text("{}")
    scored: list[Path] = []

    def score(inputs: Any, request: Any, profile: Path, pruned: Path, *_: Any) -> MilderTargets:
        if profile.read_text() == "hard":
            raise PromiseMissed("target 1.5x is infeasible")
        scored.append(pruned)
        rows = (ScoredTarget(2.0, 2.1, 0.9),)
        return MilderTargets("score", 1.0, rows, hash_file(profile), hash_score_code(job.task))

    def read(job: Job) -> Path | None:
        """What the report is given."""
        return job._path("milder_targets.json") if job._has_milder_targets() else None

    monkeypatch.setattr(Job, "_read_inputs", lambda job: None)
    monkeypatch.setattr("search.pipeline.milder_targets.score_milder_targets", score)
    tell = lambda what, done, total: None  # noqa: E731
    with Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(2.0)) as job:
        assert "scoring milder targets" in job.estimate_seconds()
        for content, times in (("{}", 1), ("{}", 1), ("{ }", 2)):
            profile.write_text(content)
            job.score_milder_targets(tell)
            assert len(scored) == times and read(job) == path
        path.write_text("damaged")
        assert read(job) is None
        job.score_milder_targets(tell)
        assert len(scored) == 3 and read(job) == path
        profile.write_text("hard")
        job.score_milder_targets(tell)
        assert "the report leaves out milder targets: target 1.5x is infeasible" in caplog.text
        assert read(job) is None  # the file is of another profile
    with Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(1.1)) as job:
        assert "scoring milder targets" not in job.estimate_seconds()
        job.score_milder_targets(tell)
        assert len(scored) == 3


def test_two_jobs_never_share_a_folder(tmp_path: Path) -> None:
    """One would prune to the other's target."""
    (tmp_path / "little.py").write_text(TASK)

    def job(target: float) -> Job:
        return Job(str(tmp_path / "little.py"), tmp_path / "job", JobSettings(target))

    tell = lambda what, done, total: None  # noqa: E731
    with job(2.0) as first, job(3.0) as second:
        first.trace_layers(tell)
        with pytest.raises(EnvironmentUnusable, match=r"another latbench run is at work in .*job: wait for its end"):
            second.trace_layers(tell)
    with job(3.0) as later:
        later.trace_layers(tell)
