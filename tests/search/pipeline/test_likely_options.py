"""Options that a search is likely to choose: what the exact solver would choose is among them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from latbench.errors import BadData
from search.knapsack.arrays import Infeasible
from search.pipeline.likely_options import (
    estimate_errors,
    measure_input_energies,
    select_likely_options,
)
from search.problem.layers import DENSE, Interval, LayerOptions, Option
from search.problem.problem import Problem
from search.task import Task, load_task
from sparse_kernels.patterns import Unstructured
from sparse_kernels.prunable_layers import survey_layers

TASK = """
import torch
name = "little"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).eval()
def example(): return (torch.linspace(-1, 1, 8 * 24).sin().view(8, 24),)
def calibration(): return [example(), example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return 1.0
"""
SPARSITIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
OPTIONS = (
    Option(DENSE, 0.0),
    *(Option(pattern, s) for pattern in ("unstructured", "vector:8", "block:8x8") for s in SPARSITIES),
)
SPEED = {"unstructured": 0.8, "vector:8": 1.0, "block:8x8": 1.05}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "little.py").write_text(TASK)
    return load_task(str(tmp_path / "little.py"))


def problem() -> Problem:
    seconds = np.array([1.0, *((1 - it.sparsity) / SPEED[it.pattern] for it in OPTIONS[1:])])
    unknown = np.full(len(OPTIONS), np.nan)
    layers = tuple(LayerOptions(name, OPTIONS, seconds, seconds, seconds, unknown) for name in ("0", "2"))
    return Problem(layers, Interval(0.1, 0.1, 0.1), Interval(2.1, 2.1, 2.1), "torch")


def test_the_energy_of_inputs_is_the_diagonal_of_the_hessian(task: Task) -> None:
    model = task.model()
    energies = measure_input_energies(task, model, ["0", "2"])
    x = torch.cat([batch[0] for batch in task.calibration()]).double()
    assert torch.allclose(energies["0"], x.square().sum(dim=0))
    hidden = torch.relu(model.get_submodule("0")(x.float())).double()
    assert torch.allclose(energies["2"], hidden.square().sum(dim=0))


def test_an_estimated_error_is_the_energy_that_the_mask_drops(task: Task) -> None:
    model = task.model()
    found = estimate_errors(problem(), task, model)
    energies = measure_input_energies(task, model, ["2"])["2"]
    scores = (model.get_submodule("2").weight.detach().double().square() * energies).numpy()
    kept = Unstructured().mask(scores, 0.7)
    assert found["2"][Option("unstructured", 0.7)] == pytest.approx(1 - scores[kept].sum() / scores.sum())
    for layer in found.values():  # freer patterns drop less, and more sparsity drops more
        for sparsity in SPARSITIES:
            free, vectors = (layer[Option(pattern, sparsity)] for pattern in ("unstructured", "vector:8"))
            assert 0 <= free <= vectors <= 1
        assert list(layer.values())[:7] == sorted(list(layer.values())[:7])


@pytest.mark.parametrize("target", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_little_is_lost_even_if_layers_matter_more_than_their_errors_say(
    task: Task, target: float, factor: float
) -> None:
    model, whole = task.model(), problem()
    likely = select_likely_options(whole, task, model, target)
    assert sum(len(layer.options) for layer in likely.layers) < 0.6 * sum(len(it.options) for it in whole.layers)
    for layer in likely.layers:  # dense stays, and so does the fastest
        assert {Option(DENSE, 0.0), Option("block:8x8", 0.95)} <= set(layer.options)
    weighted = {
        name: {option: error * (factor if name == "0" else 1) for option, error in own.items()}
        for name, own in estimate_errors(whole, task, model).items()
    }
    best, found = (it.with_errors(weighted).solve(target).error for it in (whole, likely))
    assert best <= found <= 1.5 * best


def test_shuffled_vectors_are_estimated_as_vectors(task: Task) -> None:
    # Finding the groups of rows takes a hundred times as long as a mask.
    options = (Option(DENSE, 0.0), Option("vector:8", 0.5), Option("shflbw:8", 0.5))
    seconds, unknown = np.ones(3), np.full(3, np.nan)
    layer = LayerOptions("0", options, seconds, seconds, seconds, unknown)
    whole = Problem((layer,), Interval(0.1, 0.1, 0.1), Interval(2.1, 2.1, 2.1), "torch")
    found = estimate_errors(whole, task, task.model())["0"]
    assert found[options[1]] == found[options[2]]


def test_a_target_out_of_reach_leaves_all_options(task: Task) -> None:
    whole = problem()
    assert select_likely_options(whole, task, task.model(), 1000.0) is whole
    with pytest.raises(Infeasible):
        whole.with_prior().solve(1000.0)


def test_one_layer_that_takes_all_of_the_time_keeps_what_just_reaches_the_target(task: Task) -> None:
    # The line of least cost has no corner there: the solver takes what fits.
    seconds = np.array([1.0, *((1 - it.sparsity) / SPEED[it.pattern] for it in OPTIONS[1:])])
    layer = LayerOptions("0", OPTIONS, seconds, seconds, seconds, np.full(len(OPTIONS), np.nan))
    whole = Problem((layer,), Interval(0.01, 0.01, 0.01), Interval(1.01, 1.01, 1.01), "torch")
    for target in (1.5, 2.0, 3.0):
        likely = select_likely_options(whole, task, task.model(), target)
        best = whole.with_errors(estimate_errors(whole, task, task.model())).solve(target).options["0"]
        assert best in likely.layers[0].options
        assert len(likely.layers[0].options) <= 8


def test_in_eight_bits_the_estimate_adds_what_rounding_loses(task: Task) -> None:
    model, dense, vectors = task.model(), Option(DENSE, 0.0, "int8"), Option("vector:8", 0.5, "int8")
    unknown = np.full(3, np.nan)
    options = (Option(DENSE, 0.0), dense, vectors)
    layers = tuple(LayerOptions(name, options, np.ones(3), np.ones(3), np.ones(3), unknown) for name in ("0", "2"))
    one = Problem(layers, Interval(0.1, 0.1, 0.1), Interval(2.1, 2.1, 2.1), "torch")
    found, exact = estimate_errors(one, task, model), estimate_errors(problem(), task, model)
    for name in ("0", "2"):
        added = found[name][vectors] - exact[name][replace(vectors, precision="float32")]
        assert 0 < added < found[name][dense] < 1e-3
    # Of the first layer, by rounding: to 127 steps of a row, and of an input to 255 from the least to the largest.
    weight, x = model.get_submodule("0").weight.detach().numpy(), task.calibration()[0][0].numpy()
    steps = np.abs(weight).max(axis=1, keepdims=True) / 127
    scale = (x.max() - x.min()) / 255
    rounded = np.rint(x / scale) * scale @ (np.rint(weight / steps) * steps).T
    lost = ((rounded - x @ weight.T) ** 2).sum() / ((x @ weight.T) ** 2).sum()
    assert found["0"][dense] == pytest.approx(lost, rel=0.5)


def test_inputs_that_are_not_finite_are_refused_by_name(task: Task) -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return model(batch[0] * torch.nan).nan_to_num().sum()  # as fully masked rows, which nobody reads

    members, model = {**vars(task.implementation), "loss": loss}, task.model()
    with pytest.raises(BadData, match=r"layer \w+: its inputs on the calibration data hold NaN or infinite values"):
        measure_input_energies(
            replace(task, implementation=SimpleNamespace(**members)),
            model,
            list(survey_layers(model).taken),
        )
