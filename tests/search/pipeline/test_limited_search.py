"""Limits on the way through the search: tied layers are pruned, judged, timed and written down one by one."""

import types
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from latbench.errors import BadData, UsageError
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.deployment import Deployment
from search.inputs import layer_errors
from search.loss.parallel import Workers
from search.pipeline import search_setup
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_job import build_profile
from search.pipeline.search_request import CandidateOptions, Promise, SearchInputs, SearchPlan, SearchRequest
from search.pipeline.search_setup import SearchSetup, set_up_search
from search.pipeline.speedup_loop import MeasuredSpeedup, PromisedProfile
from search.problem.error_table import LayerErrors
from search.problem.layers import DENSE, Interval, LayerOptions, Option, expand_choice
from search.problem.limits import Limits
from search.problem.problem import Problem
from search.pruning.one_shot.fill_database import hash_pruning_inputs
from search.strategies.evaluation_budget import SearchResult
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.end_to_end import ModelTimer
from search.whole_model.sessions import Session
from search.whole_model.timings import Timings
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

OPTIONS = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("vector:4", 0.75))


def request(target: float = 1.2, **chosen: Any) -> SearchRequest:
    """Return a request from the fields of its parts."""
    chosen = {"threads": 1} | chosen

    def part(kind: type[Any], *first: float) -> Any:
        return kind(*first, **{it.name: chosen[it.name] for it in fields(kind) if it.name in chosen})

    return SearchRequest(part(Promise, target), *map(part, (Deployment, CandidateOptions, SearchPlan, Workers)))


REQUEST = request()
LIMITS = {"tied_in_each": [["*.q", "*.k"]], "maximum": {"1.*": 0.5}, "excluded": ["head"]}
TASK = f"""
import torch
from search.problem.error_table import LayerErrors
from search.problem.error_table import LayerErrors
limits = {LIMITS!r}
def model():
    torch.manual_seed(0)
    block = lambda: torch.nn.ModuleDict({{"q": torch.nn.Linear(8, 8), "k": torch.nn.Linear(8, 8)}})
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("0", block()); self.add_module("1", block())
            self.head = torch.nn.Linear(8, 2)
        def forward(self, x):
            for name in "01":
                block = self.get_submodule(name)
                x = torch.tanh(block["q"](x) + block["k"](x))
            return self.head(x)
    return Net().eval()
def example(): return (torch.linspace(-1, 1, 32).view(4, 8),)
def calibration(): return [example()[0]]
def loss(model, batch): return model(batch).square().mean()
def score(model): return 1.0
"""


def set_up(inputs: SearchInputs, asked: SearchRequest) -> SearchSetup:
    return set_up_search(inputs, asked, ModelTimer(1))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchInputs:
    """A task with limits; layers that take 1 s dense, in a model that takes 5 s."""
    (tmp_path / "attention.py").write_text(TASK)
    task = load_task(str(tmp_path / "attention.py"))

    def build_layers(*arguments: Any) -> tuple[LayerOptions, ...]:
        t = np.array([1.0, 0.5, 0.25])
        return tuple(LayerOptions(name, OPTIONS, t, t, t, np.full(3, np.nan)) for name in arguments[-1])

    def steady(seconds: float) -> list[list[float]]:
        return [[seconds] * 5] * 4

    names = ("0.q", "0.k", "1.q", "1.k")
    profiles = {f"all {it}": dict.fromkeys(names, it) for it in (OPTIONS[0], OPTIONS[2])}
    blocks = dict(zip(profiles, (steady(5.0), steady(2.0)), strict=True))
    monkeypatch.setattr(search_setup, "build_layers", build_layers)
    probes = Session(profiles, Timings({"torch": steady(5.0), **blocks}, {}))
    monkeypatch.setattr(search_setup, "_find_probes", lambda *arguments: probes)
    table = parse_place(tmp_path / "table")
    return SearchInputs(
        task, task.model(), table, tmp_path / "m.json", tmp_path / "database", "hash", "t", hash_pruning_inputs(task)
    )


def test_tied_layers_are_pruned_judged_and_timed_one_by_one(inputs: SearchInputs) -> None:
    dense = inputs.task.model()
    assert list(list_prunable_layers(inputs.task, dense)) == ["0.q", "0.k", "1.q", "1.k"]
    setup = set_up(inputs, REQUEST)
    problem, evaluator = setup.problem, setup.evaluator
    assert [[part.name for part in layer.parts] for layer in problem.layers] == [["0.q", "0.k"], ["1.q", "1.k"]]
    assert [len(layer.options) for layer in problem.layers] == [3, 2]
    database = Database(inputs.database, "hash")
    choice = (2, 1)
    wanted = expand_choice(problem.layers, choice)
    assert wanted == {
        "0.q": OPTIONS[2],
        "0.k": OPTIONS[2],
        "1.q": OPTIONS[1],
        "1.k": OPTIONS[1],
    }
    for layer, option in wanted.items():
        set_weight_matrix(dense.get_submodule(layer), database.get(layer, option).weight)
    with torch.no_grad(), evaluator:
        [loss] = evaluator.losses([choice], evaluator.batches)
        assert loss == pytest.approx(float(inputs.task.example().call(dense).square().mean()), rel=1e-5)
    outputs = [database.error(layer, option) for layer, option in wanted.items()]
    assert problem.layers[0].errors[2] == pytest.approx(sum(outputs[:2]))

    measured = MeasuredSpeedup(Interval(2.0, 2.0, 2.0), problem.dense, "torch")
    kept = PromisedProfile(problem, SearchResult(choice, 0.5, "staged", (), 1.0, False), 0.1, measured, 2.0)
    found = build_profile(inputs, REQUEST, kept, digest="digest", additivity=(0.1, 0.0), ceiling=5.0)
    assert found.options == wanted
    assert [it.seconds for it in found.layers.values()] == pytest.approx([0.25, 0.25, 0.5, 0.5])
    assert [it.error for it in found.layers.values()] == pytest.approx(outputs)


def given_errors(path: Path, error: Callable[[str, Option], float], options: Sequence[Option]) -> SearchRequest:
    lines = [
        f"{name},{it.pattern},{it.sparsity},{error(name, it)}"
        for name in ("0.q", "0.k", "1.q", "1.k")
        for it in options
    ]
    path.write_text("\n".join(["layer,pattern,sparsity,error", *lines]))
    return request(errors=str(path))


def test_errors_are_of_weights_or_of_a_file_where_that_is_asked_for(
    inputs: SearchInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = inputs.task.model()
    problem = set_up(inputs, request(errors="weight")).problem
    weight = weight_matrix(dense.get_submodule("1.k")).detach()
    change = weight - Database(inputs.database, "hash").get("1.k", OPTIONS[1]).weight
    assert problem.layers[1].parts[1].errors[1] == pytest.approx(float(change.square().sum() / weight.square().sum()))
    path = tmp_path / "errors.csv"
    asked = given_errors(path, lambda name, it: 4 * it.sparsity, OPTIONS)
    problem = set_up(inputs, asked).problem
    assert problem.layers[0].errors.tolist() == [0.0, 4.0, 6.0]
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    monkeypatch.setattr(search_setup, "fill_database", lambda *_, **__: pytest.fail("layers were pruned"))
    with pytest.raises(BadData, match=r"no error is given for layer 1\.k as vector:4 at 0\.75"):
        set_up(replace(inputs, task=replace(inputs.task, limits=Limits(excluded=("head",)))), asked)


@pytest.fixture
def four_options(monkeypatch: pytest.MonkeyPatch) -> tuple[Option, ...]:
    """Of all layers: unstructured beats vector:4 at the same sparsity, which takes longer, but for their errors."""
    options = (*OPTIONS, Option("vector:4", 0.5))
    t = np.array([1.0, 0.5, 0.25, 0.6])

    def build_layers(*arguments: Any) -> tuple[LayerOptions, ...]:
        return tuple(LayerOptions(name, options, t, t, t, np.full(4, np.nan)) for name in arguments[-1])

    monkeypatch.setattr(search_setup, "build_layers", build_layers)
    return options


def test_an_option_that_is_not_to_be_had_takes_no_other_with_it(
    inputs: SearchInputs, four_options: tuple[Option, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(name: str, it: Option) -> float:
        return np.inf if (name, it) == ("0.q", OPTIONS[1]) else float(it.sparsity)

    expected = [
        (four_options[0], four_options[2], four_options[3]),  # 0.q, with 0.k tied to it
        (four_options[0], four_options[1]),  # 1.q and 1.k, up to a sparsity of 0.5
    ]
    given = set_up(inputs, given_errors(tmp_path / "errors.csv", error, four_options))
    assert [layer.options for layer in given.problem.layers] == expected

    def read_output_errors(problem: Problem, database: Database) -> LayerErrors:
        parts = [part for layer in problem.layers for part in layer.parts]
        return {part.name: {it: error(part.name, it) for it in part.options} for part in parts}

    monkeypatch.setattr(layer_errors, "read_output_errors", read_output_errors)
    found = set_up(inputs, REQUEST)
    assert [layer.options for layer in found.problem.layers] == expected
    database = Database(inputs.database, inputs.model_hash, inputs.provenance)
    assert database.has("0.k", four_options[3]) and not database.has("1.k", four_options[3])


def test_what_a_user_says_of_errors_decides_which_options_are_looked_at(
    inputs: SearchInputs, four_options: tuple[Option, ...], tmp_path: Path
) -> None:
    errors = dict(zip(four_options, (0.0, 0.9, 1.0, 0.1), strict=True))
    given = given_errors(tmp_path / "errors.csv", lambda name, it: errors[it], four_options)
    assert set_up(inputs, given).problem.layers[0].options == four_options
    errors[four_options[2]] = 0.05
    assert set_up(inputs, given_errors(tmp_path / "e.csv", lambda name, it: errors[it], four_options)).problem.layers[
        0
    ].options == (four_options[0], four_options[2])


def test_limits_that_contradict_are_said_before_anything_is_measured(
    inputs: SearchInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_setup, "_find_probes", lambda *arguments: pytest.fail("it was measured"))
    wrong = replace(inputs.task, limits=inputs.task.limits + Limits(minimum=(("1.q", 0.75),)))
    with pytest.raises(UsageError, match=r"layer 1\.q must have a sparsity of at least 0\.75 and of at most"):
        set_up(replace(inputs, task=wrong), REQUEST)


def test_what_a_profile_depends_on_includes_the_limits_and_the_errors(inputs: SearchInputs, tmp_path: Path) -> None:
    inputs = replace(inputs, cost_model=None)
    path = tmp_path / "errors.csv"
    digests = set()
    for text in ("1", "2"):
        path.write_text(text)
        digests.add(SearchHistory(inputs, request(errors=str(path))).digest())
    digests.add(SearchHistory(inputs, REQUEST).digest())
    digests.add(SearchHistory(inputs, request(sparsities=(0.5, 0.6))).digest())
    digests.add(SearchHistory(replace(inputs, task=replace(inputs.task, limits=Limits())), REQUEST).digest())
    assert len(digests) == 5


def test_limits_of_a_task_are_checked_where_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(TASK.replace("tied_in_each", "tide"))
    with pytest.raises(BadData, match=r"task .*wrong\.py: limits: unknown key 'tide'"):
        load_task(str(tmp_path / "wrong.py"))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    example = types.SimpleNamespace(example=lambda: (torch.zeros(2, 4),))
    for glob, said in (
        ("fc", "excluded: no layer is called 'fc'; the model has 0, 2"),
        ("*", "has no layer that can be"),
    ):
        task = Task("t", "t", "s", example, Limits(excluded=(glob,)))
        with pytest.raises(UsageError, match=said):
            list_prunable_layers(task, model)
