"""What the experiments on objectives and on searched profiles draw, compare and say, with losses by a formula."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from latbench.errors import UsageError
from latbench.report.sections import accuracy
from search.artifacts.layer_database import Database, hash_model
from search.inputs.problem_builder import build_problem
from search.knapsack.arrays import Choice
from search.pipeline.search_request import SearchInputs
from search.problem.layers import LayerOptions, Option
from search.problem.problem import Problem
from search.pruning.one_shot.fill_database import fill_database
from search.strategies.run_strategy import StrategySettings
from search.task import load_task
from sparse_kernels.prunable_layers import as_matrix, weight_matrix
from sparse_kernels.shapes import LinearShape

TASK = Path(__file__).parents[1] / "search" / "pruning_task.py"
OPTIONS = (
    Option("dense", 0.0), Option("vector:4", 0.5), Option("vector:4", 0.75), Option("vector:4", 0.9),
    Option("unstructured", 0.5), Option("unstructured", 0.75), Option("unstructured", 0.9),
)  # fmt: skip
LAYERS = 8


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("objectives")


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("searched_or_uniform")


def build_example() -> Problem:
    """Layers of unlike size, in which vectors are faster and unstructured weights lose less."""
    seconds, errors = np.array([1, 0.5, 0.3, 0.15, 0.7, 0.5, 0.3]), np.array([0, 0.1, 0.3, 1, 0.05, 0.15, 0.5])
    layers = [
        LayerOptions(
            f"layer{i}", OPTIONS, (1 + i) * seconds, (1 + i) * seconds, (1 + i) * seconds, errors * (1 + (3 * i) % 5),
            shape=LinearShape(8, 8, 8),
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    return build_problem(layers)


class Formula:
    """Losses that are no sum of errors: the first layers matter most."""

    batches = 4

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        return [1 + sum(OPTIONS[j].sparsity ** 2 / (1 + i) for i, j in enumerate(choice)) for choice in choices]

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("a formula has no gradient")


def test_profiles_of_equal_time_are_drawn(objectives: ModuleType) -> None:
    problem = build_example()
    choices = objectives.draw_choices(problem, 2.0, 18, Formula())
    assert len(choices) == len(set(choices)) == 18
    budget = problem.dense.value / 2
    assert all(0.98 * budget <= problem.predict(choice).value <= budget for choice in choices)
    losses = Formula().losses(choices, 4)
    assert min(losses[12:]) == min(losses)  # the searched ones are the last, from the best on
    assert losses[12:] == sorted(losses[12:])


def test_cheap_measures_by_hand(objectives: ModuleType, tmp_path: Path) -> None:
    task = load_task(str(TASK))
    model = task.model()
    names, options = ["conv", "fc"], (Option("dense", 0.0), Option("vector:4", 0.5))
    database = Database(tmp_path, hash_model(model))
    fill_database(task, model, dict.fromkeys(names, options[1:]), database)
    numbers = np.array([1.0, 0.5])
    problem = build_problem(
        [LayerOptions(name, options, numbers, numbers, numbers, np.array([0.0, 0.2])) for name in names]
    )
    inputs = SearchInputs(task, model, None, None, tmp_path, hash_model(model), "t", "")  # type: ignore[arg-type]

    class Losses:
        batches = 3

        def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
            known: dict[Choice, float] = {(0, 0): 1.0, (1, 0): 1.5, (0, 1): 1.2, (1, 1): 2.0}
            return [known[choice] for choice in choices]

    both, one = objectives.measure(problem, [(1, 1), (0, 1)], Losses(), inputs)
    assert (both["errors"], both["loss"], both["alone"]) == pytest.approx((0.4, 2.0, 0.7))
    assert (one["errors"], one["loss"], one["alone"]) == pytest.approx((0.2, 1.2, 0.2))
    expected = 0.0
    for batch in task.calibration():
        twin = task.model()
        task.loss(twin, batch).backward()
        for name in names:
            layer: Any = twin.get_submodule(name)
            change = database.get(name, options[1]).weight - weight_matrix(layer).detach()
            gradient = as_matrix(layer, layer.weight.grad)
            expected += float((gradient.square() * change.square()).sum()) / len(task.calibration())
    assert both["fisher"] == pytest.approx(expected, rel=1e-5) and 0 < one["fisher"] < both["fisher"]


def test_correlations_have_bootstrap_intervals(objectives: ModuleType, rng: np.random.Generator) -> None:
    x = rng.standard_normal(30)
    y = x + 0.3 * rng.standard_normal(30)
    text = objectives.correlate(dict(enumerate(x)), dict(enumerate(y)) | {99: 1e9})  # nothing is paired with 99
    value, low, high = (float(part) for part in text.replace("(", "").replace(")", "").replace("to ", "").split())
    assert value == pytest.approx(spearmanr(x, y).statistic, abs=0.005)
    assert low < value < high <= 1


def test_a_searched_profile_takes_no_longer_than_the_uniform_one(comparison: ModuleType) -> None:
    problem = build_example()
    uniform = tuple([OPTIONS.index(Option("unstructured", 0.75))] * LAYERS)
    settings = StrategySettings("staged", 100)
    found = {kind: comparison.find_profile(problem, uniform, kind, settings, Formula()) for kind in comparison.KINDS}
    assert found[comparison.UNIFORM] == uniform
    for kind in (comparison.SEARCHED, comparison.ONE_PATTERN, comparison.ONE_SPARSITY):
        assert problem.predict(found[kind]).value <= problem.predict(uniform).value
        assert Formula().losses([found[kind]], 4) <= Formula().losses([uniform], 4)
    for kind in (comparison.SEARCHED, comparison.ONE_PATTERN):
        assert Formula().losses([found[kind]], 4) < Formula().losses([uniform], 4)
    patterns = {OPTIONS[j].pattern for j in found[comparison.ONE_PATTERN]}
    assert patterns <= {"dense", "unstructured"}
    assert len({OPTIONS[j].sparsity for j in found[comparison.ONE_SPARSITY]}) == 1
    assert {OPTIONS[j].pattern for j in found[comparison.SEARCHED]} >= {"vector:4"}


def test_pairs_are_shown_and_written_for_the_report(
    comparison: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles: list[dict[str, Any]] = [
        {"task": "made", "kind": kind, "target": 2.0, "seed": seed, "options": {"fc": ["vector:4", 0.5, "float32"]}}
        for kind in ("uniform", "searched")
        for seed in range(3)
    ]
    scores = [
        {**{k: row[k] for k in ("task", "kind", "target", "seed")}, "method": "one-shot", "steps": 0,
         "score": 0.8 + 0.05 * row["seed"] + (0.02 + 0.01 * (row["seed"] % 2)) * (row["kind"] == "searched")}
        for row in profiles
    ]  # fmt: skip
    for name, rows in (("profiles", profiles), ("scores", scores)):
        (tmp_path / f"made-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = {f"{row['kind']} 2x seed {row['seed']}": 2.0 - 0.02 * (row["kind"] == "searched") for row in profiles}
    (tmp_path / "made-times.json").write_text(json.dumps({"seconds": {"torch": 5.0, "openvino": 4.0, **times}}))
    comparison.show(tmp_path, "*")
    output = capsys.readouterr().out
    assert "made, 2x: uniform is vector:4 at 50%" in output
    # 0.02, 0.03, 0.02: their mean, and their deviation over the root of three.
    assert "0.8733, +0.0233 +- 0.0033 over uniform (3 pairs), 0.990 to 0.990 of its measured time" in output
    comparison.write_csv(tmp_path, "made", tmp_path / "made.csv")
    results = accuracy.read_results(tmp_path / "made.csv")
    [pair] = accuracy.build_pairs(results).to_dict("records")
    assert (pair["pairs"], pair["difference"]) == (3, pytest.approx(0.07 / 3))
    assert results["speedup"].min() == pytest.approx(2.0)


def test_a_model_of_a_profile_is_trained_by_each_method(objectives: ModuleType, tmp_path: Path) -> None:
    task = load_task(str(TASK))
    options = {"conv": Option("vector:4", 0.5), "fc": Option("dense", 0.0)}
    database = Database(tmp_path, hash_model(task.model()))
    fill_database(task, task.model(), {"conv": [options["conv"]]}, database)
    mask = database.get("conv", options["conv"]).mask
    weights = {}
    for method in objectives.METHODS:
        model = objectives.prune_and_train(task, options, database, method, 5, seed=1)
        weights[method] = weight_matrix(model.get_submodule("conv")).detach()
        zeros = weights[method] == 0
        assert zeros.sum() == (~mask).sum()
        assert method == objectives.BY_GMP or torch.equal(zeros, ~mask)
    assert (
        len({tuple(it.flatten().tolist()) for it in weights.values()}) >= 3
    )  # two trainings of one length are equal
