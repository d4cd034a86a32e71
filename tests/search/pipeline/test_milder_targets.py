"""What milder targets would keep, on a toy whose layers take known times."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from latbench.errors import BadData
from latbench.report import point_frames
from latbench.report.pages import common_sections
from latbench.report.report_inputs import ReportInputs, SourceFile
from latbench.report.sections import target_costs
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import LayerChoice, Profile, read_profile
from search.deployment import Deployment
from search.inputs.problem_builder import build_problem
from search.loss.cache import LossCache
from search.loss.parallel import ParallelEvaluator, Workers
from search.pipeline import milder_targets
from search.pipeline.milder_targets import (
    SHARES,
    MilderTargets,
    ScoredTarget,
    read_milder_targets,
    score_milder_targets,
)
from search.pipeline.prune_to_folder import PruneRequest, prune_to_folder
from search.pipeline.search_request import CandidateOptions, Promise, SearchInputs, SearchPlan, SearchRequest
from search.pipeline.search_setup import SearchSetup
from search.problem.layers import DENSE, LayerOptions, Option
from search.pruning.one_shot.fill_database import fill_database
from search.task import load_task

OPTIONS = (Option(DENSE, 0.0), Option("vector:4", 0.5), Option("vector:4", 0.75), Option("unstructured", 0.9))
SECONDS = np.array([1.0, 0.6, 0.35, 0.2])
TASK = """
import torch
name, score_name = "toy", "agreement"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    ).eval()
dense = model()
def example(): return (torch.linspace(-1, 1, 64 * 16).mul(7).sin().view(64, 16),)
def calibration(): return [example()]
def loss(model, batch): return (model(*batch) - dense(*batch)).square().mean()
def score(model):
    with torch.no_grad():
        return 1 - float(loss(model, example()) / dense(*example()).square().mean())
"""


@pytest.fixture
def inputs(tmp_path: Path) -> SearchInputs:
    (tmp_path / "toy.py").write_text(TASK)
    task = load_task(str(tmp_path / "toy.py"))
    return SearchInputs(task, task.model(), None, None, tmp_path, hash_model(task.model()), "t", "")  # type: ignore[arg-type]


@pytest.fixture
def profile(tmp_path: Path, inputs: SearchInputs) -> Path:
    names = ["0", "2", "4"]
    Profile(
        task="toy", backend="numba", threads=1, batch=64, target=3.0, confidence=0.9, dense_engine="torch",
        dense_seconds=3.0, dense_seconds_low=3.0, dense_seconds_high=3.0,
        predicted_seconds=0.9, predicted_low=0.8, predicted_high=1.0, fixed_seconds=0.0,
        fixed_seconds_low=0.0, fixed_seconds_high=0.0, loss=0.1, error=0.9, bound=0.9, ceiling=None,
        additivity_before=0.0, additivity_after=0.0, strategy="staged", seed=0, table_hash="t",
        model_hash=inputs.model_hash, inputs="i", device="d",
        layers={name: LayerChoice("vector:4", 0.75, 0.3, 0.3, 0.3, 0.3) for name in names},
    ).save(tmp_path / "profile.json")  # fmt: skip
    return tmp_path / "profile.json"


def set_up(inputs: SearchInputs) -> SearchSetup:
    names, database = ["0", "2", "4"], Database(inputs.database, inputs.model_hash, inputs.provenance)
    fill_database(inputs.task, inputs.model, dict.fromkeys(names, OPTIONS[1:]), database)
    errors = [np.array([0.0, *(database.get(name, it).error for it in OPTIONS[1:])]) for name in names]
    layers = [
        LayerOptions(name, OPTIONS, SECONDS, SECONDS, SECONDS, own) for name, own in zip(names, errors, strict=True)
    ]
    problem = build_problem(layers)
    cache = LossCache(names, inputs.database / "trials.jsonl", "key")
    evaluator = ParallelEvaluator(inputs.task, inputs.model, problem.layers, database, cache, Workers(1))
    return SearchSetup(problem, evaluator, tuple(layers), None, None)  # type: ignore[arg-type]


REQUEST = SearchRequest(Promise(3.0), Deployment(1), CandidateOptions(), SearchPlan(), Workers(1))


@pytest.fixture
def setup(inputs: SearchInputs, monkeypatch: pytest.MonkeyPatch) -> SearchSetup:
    found = set_up(inputs)
    monkeypatch.setattr(milder_targets, "set_up_search", lambda *_, **__: found)
    return found


def test_milder_targets_keep_more_and_are_scored_as_the_profile_is(
    inputs: SearchInputs, profile: Path, setup: SearchSetup
) -> None:
    said: list[str] = []
    pruned = profile.parent / "pruned"
    prune_to_folder(inputs.task, profile, inputs.database, pruned, PruneRequest())
    found = score_milder_targets(inputs, REQUEST, profile, pruned, None, lambda what, *_: said.append(what))  # type: ignore[arg-type]
    assert [it.target for it in found.targets] == [1.5, 2.0, 2.5, 3.0]
    assert all(it.speedup >= it.target for it in found.targets)
    scores = [it.score for it in found.targets]
    assert found.dense_score == 1.0 > scores[0] > scores[3]
    assert scores[0] >= scores[1] >= scores[2] >= scores[3] - 1e-6
    # The last one is the model that one-shot pruning makes of the profile.
    model, database = inputs.task.model(), Database(inputs.database, inputs.model_hash, inputs.provenance)
    for name in ("0", "2", "4"):
        model.get_submodule(name).weight = torch.nn.Parameter(database.get(name, OPTIONS[2]).weight)
    assert scores[3] == pytest.approx(inputs.task.score(model), abs=1e-6)
    assert found.score_name == "agreement" and found.is_of(inputs.task, profile)
    assert said == [f"scoring a milder target, {1 + share * 2:.2f}x" for share in SHARES]
    profile.write_text(profile.read_text() + " ")
    assert not found.is_of(inputs.task, profile)


def test_speedups_are_predicted_as_that_of_the_profile_was(profile: Path, setup: SearchSetup) -> None:
    chosen = read_profile(profile)
    problem, known = milder_targets._calibrate_to(setup.problem, chosen)
    [choice] = known
    assert setup.problem.speedup(setup.problem.predict(choice)).value < 3.0  # layer by layer, before it was measured
    assert problem.speedup(problem.predict(choice)).value == pytest.approx(chosen.speedup[0])
    assert problem.predict(choice).low == problem.predict(choice).high
    other = replace(chosen, layers={**chosen.layers, "0": replace(chosen.layers["0"], sparsity=0.6)})
    problem, known = milder_targets._calibrate_to(setup.problem, other)
    assert not known and problem.predict(choice).value == setup.problem.predict(choice).value


MILDER = MilderTargets(
    "test accuracy", 0.95, (ScoredTarget(1.5, 1.52, 0.955), ScoredTarget(2.0, 2.01, 0.9)), "0123", "4567"
)  # fmt: skip


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    MILDER.save(tmp_path / "milder_targets.json")
    assert read_milder_targets(tmp_path / "milder_targets.json") == MILDER


@pytest.mark.parametrize(
    "change", [{"version": 9}, {"targets": []}, {"targets": [{"target": 2.0}]}, {"dense_score": "many"}, None]
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, change: Mapping[str, Any] | None) -> None:
    path = tmp_path / "milder_targets.json"
    MILDER.save(path)
    path.write_text("[]" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        BadData, match=r"is no list of milder targets \(.*\): give milder_targets\.json of a latbench run"
    ):
        read_milder_targets(path)
    with pytest.raises(BadData, match=r"cannot be read \(No such file or directory\): give milder_targets\.json"):
        read_milder_targets(tmp_path / "nothing.json")


def test_the_section_says_what_the_target_cost_and_what_others_keep() -> None:
    shown = target_costs.build_section(MILDER)
    assert "At 2.00×, test accuracy changes from 95.00% to 90.00% (-5.00 points)" in shown.sentences[0]
    [(_, table)] = shown.tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["dense, in float32", "–", "95.00%", "–"],
        ["1.50×", "1.52×", "95.50%", "+0.50 points"],
        ["2.00×", "2.01×", "90.00%", "-5.00 points"],
    ]
    hundreds = (ScoredTarget(2.0, 2.0, 75.6),)
    for name, other in (
        ("cosine", replace(MILDER, score_name="cosine")),
        ("top-1 accuracy", MilderTargets("top-1 accuracy", 76.0, hundreds, "", "")),
    ):
        own, dense = other.targets[-1].score, other.dense_score
        said = f"{name} changes from {dense:.4g} to {own:.4g} ({own - dense:+.4g})"
        assert said in target_costs.build_section(other).sentences[0]


def test_a_report_names_a_list_of_another_profile(profile: Path) -> None:
    sources = (SourceFile("profile", profile, "0123"),)
    inputs = ReportInputs(pd.DataFrame(), "t", [], milder=MILDER, sources=sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_frames, "summarise_settings", lambda table: {})
        assert common_sections.check_sources(inputs) == [
            ("The list of milder targets is of this very profile.", True)
        ]
        other = replace(inputs, milder=replace(MILDER, profile="89"))
        assert common_sections.check_sources(other)[0][1] is False


def test_a_pruned_model_without_a_score_has_no_milder_targets(
    inputs: SearchInputs, profile: Path, setup: SearchSetup
) -> None:
    pruned = profile.parent / "pruned"
    prune_to_folder(inputs.task, profile, inputs.database, pruned, PruneRequest())
    manifest = json.loads((pruned / "manifest.json").read_text())
    for stage in manifest["stages"]:
        stage["score"] = None if stage["name"] == "one-shot" else stage["score"]
    (pruned / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadData, match="no score before tuning"):
        score_milder_targets(inputs, REQUEST, profile, pruned, None, lambda *_: None)  # type: ignore[arg-type]
