"""A profile's loss is that of the model it gives, swapped in place."""

import copy
import math
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transposed_linear import Conv1D

from latbench.errors import UsageError
from search.artifacts.layer_database import Database, Entry
from search.loss.cache import hash_loss_inputs
from search.loss.evaluator import THREADS, LossEvaluator, ProfileOptions
from search.problem.layers import DENSE, Option
from search.pruning.one_shot.fill_database import hash_pruning_inputs
from search.task import Task
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

OPTIONS = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("unstructured", 0.9))


Evaluated = tuple[LossEvaluator, nn.Module, Database, list[tuple[int, ...]]]


@pytest.fixture
def evaluated(tmp_path: Path, rng: np.random.Generator) -> Evaluated:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 5)).eval()
    batches = [torch.randn(4, 1, 3, 3) for _ in range(2)]
    calls: list[tuple[int, ...]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(batch.shape))
        return model(batch).square().mean()

    task = Task("t", "t", "s", types.SimpleNamespace(calibration=lambda: batches, loss=loss))
    database = Database(tmp_path, "hash")
    for name in ("0", "2"):
        matrix = weight_matrix(model.get_submodule(name))
        for option in OPTIONS[1:]:
            mask = torch.from_numpy(rng.random(tuple(matrix.shape)) > option.sparsity)
            database.put(name, option, Entry(matrix * mask * 1.5, mask, 0.1))
    return LossEvaluator(task, model, ["0", "2"], database), model, database, calls


def options_of_choice(choice: tuple[int, ...]) -> ProfileOptions:
    return tuple(OPTIONS[j] for j in choice)


def test_losses_are_those_of_a_model_built_anew(
    evaluated: Evaluated,
) -> None:
    evaluator, model, database, _ = evaluated
    dense = copy.deepcopy(model)
    batches = evaluator._batches
    for choice in [(0, 0), (1, 2), (1, 0), (2, 2), (0, 1), (0, 0)]:
        fresh = copy.deepcopy(dense)
        for name, j in zip(("0", "2"), choice, strict=True):
            if j:
                entry = database.get(name, OPTIONS[j])
                set_weight_matrix(fresh.get_submodule(name), entry.weight)
        with torch.no_grad():
            expected = [float(fresh(batch).square().mean()) for batch in batches]
        assert evaluator.losses(options_of_choice(choice), range(2)) == pytest.approx(expected, rel=1e-6)


def test_shares_are_what_each_layer_adds_to_a_quadratic_loss(tmp_path: Path, rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    transposed = Conv1D(4, 6)
    model = nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Conv2d(3, 2, 2), "c": transposed}).eval()
    images, vectors = torch.randn(4, 3, 3, 3), torch.randn(8, 6)

    def outputs(model: nn.Module) -> list[torch.Tensor]:
        return [model.get_submodule(name)(images if name == "b" else vectors) for name in "abc"]

    wanted = [y.detach() for y in outputs(model)]

    def loss(model: nn.Module, batch: float) -> torch.Tensor:  # what the two layers change adds up
        return batch * sum((y - y0).square().sum() for y, y0 in zip(outputs(model), wanted, strict=True))

    task = Task("t", "t", "s", types.SimpleNamespace(calibration=lambda: [1.0, 3.0], loss=loss))
    database = Database(tmp_path, "hash")
    for name in "abc":
        matrix = weight_matrix(model.get_submodule(name))
        mask = torch.from_numpy(rng.random(tuple(matrix.shape)) > 0.5)
        database.put(name, OPTIONS[1], Entry((matrix * mask).detach() * 1.5, mask, 0.1))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    evaluator = LossEvaluator(task, model, list("abc"), database)
    choices = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    alone = [evaluator.losses(options_of_choice(choice), range(2)) for choice in choices]
    shares = evaluator.layer_shares(options_of_choice((1, 1, 1)), range(2))
    assert shares == [pytest.approx(row, rel=1e-5) for row in zip(*alone, strict=True)]
    one = evaluator.layer_shares(options_of_choice((1, 0, 0)), range(1))
    assert one == [pytest.approx([alone[0][0], 0.0, 0.0], rel=1e-5, abs=1e-9)]
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_layer_whose_gradient_the_loss_hides_is_unknown(evaluated: Evaluated) -> None:
    evaluator, _, _, _ = evaluated

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = model[0](batch)
        return model[2](model[1](hidden)).square().mean()

    evaluator._task.implementation.loss = loss
    [[hidden, seen]] = evaluator.layer_shares(options_of_choice((1, 1)), range(1))
    assert math.isnan(hidden) and math.isfinite(seen)


@pytest.mark.parametrize("hides", ["detached", "no_grad", "in place"])
def test_a_loss_without_gradient_is_refused_in_a_sentence(evaluated: Evaluated, hides: str) -> None:
    evaluator, _, _, _ = evaluated

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if hides == "no_grad":
            with torch.no_grad():
                return model(batch).square().mean()
        if hides == "in place":
            hidden = model[0](batch)
            squares = hidden.square().mean()
            hidden.zero_()
            return squares
        return model(batch).square().mean().detach()

    evaluator._task.implementation.loss = loss
    with pytest.raises(UsageError, match="task t: the gradient of its loss raised RuntimeError"):
        evaluator.layer_shares(options_of_choice((1, 1)), range(1))


def test_batch_norms_see_each_batch_and_keep_their_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    batch = 3 + 5 * torch.randn(40, 6)
    task = Task(
        "t", "t", "s",
        types.SimpleNamespace(calibration=lambda: [batch], loss=lambda model, batch: model(batch).square().mean()),
    )  # fmt: skip
    running = model[1].running_mean.clone()
    evaluator = LossEvaluator(task, model, ["0"], Database(tmp_path, "hash"))
    assert evaluator.losses(options_of_choice((0,)), range(1)) == pytest.approx([1.0], rel=1e-4)
    assert torch.equal(model[1].running_mean, running)


def test_a_batch_has_the_same_loss_whichever_are_judged_with_it(
    evaluated: Evaluated,
) -> None:
    evaluator, _, _, calls = evaluated
    both = evaluator.losses(options_of_choice((1, 1)), range(2))
    assert evaluator.losses(options_of_choice((1, 1)), range(1, 2)) == both[1:]
    assert len(calls) == 3


@pytest.mark.parametrize(("room", "reads"), [(0, 6), (1 << 20, 3)])
def test_weights_are_read_once_while_there_is_room(
    evaluated: Evaluated,
    room: int,
    reads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model, database, _ = evaluated
    read: list[tuple[object, ...]] = []
    get = Database.get

    def counted(self: Database, *entry: Any) -> Any:
        read.append(entry)
        return get(self, *entry)

    monkeypatch.setattr(Database, "get", counted)
    task = Task("t", "t", "s", types.SimpleNamespace(calibration=lambda: [0], loss=lambda model, batch: 0.0))
    evaluator = LossEvaluator(task, model, ["0", "2"], database, memory_bytes=room)
    dense = [weight_matrix(model.get_submodule(name)).clone() for name in ("0", "2")]
    for choice in [(1, 1), (0, 0), (1, 1), (0, 0), (2, 1)]:
        evaluator._swap_layers(options_of_choice(choice))
    assert len(read) == reads
    evaluator._swap_layers(options_of_choice((0, 0)))
    assert all(torch.equal(weight_matrix(model.get_submodule(n)), w) for n, w in zip(("0", "2"), dense, strict=True))


def test_it_uses_its_number_of_threads_and_gives_the_others_back(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.zeros(())

    before = torch.get_num_threads()
    task = Task("t", "t", "s", types.SimpleNamespace(calibration=lambda: [0], loss=loss))
    LossEvaluator(task, nn.Sequential(nn.Linear(2, 2)), ["0"], Database(tmp_path, "hash")).losses(
        options_of_choice((0,)), range(1)
    )
    assert seen == [THREADS]
    assert torch.get_num_threads() == before


def test_other_calibration_data_than_the_layers_were_pruned_on_is_refused(tmp_path: Path) -> None:
    """Losses on other batches could not be compared."""
    draws = torch.Generator().manual_seed(1)
    members = {"calibration": lambda: [torch.randn(4, 3, generator=draws)], "loss": lambda model, x: model(x).sum()}
    task, model = Task("t", "t", "s", types.SimpleNamespace(**members)), nn.Sequential(nn.Linear(3, 2)).eval()
    database = Database(tmp_path, "hash", hash_pruning_inputs(task))
    database.begin(1.0)
    with pytest.raises(UsageError, match=r"task t: calibration\(\) returned other data than at an earlier call"):
        LossEvaluator(task, model, ["0"], Database(tmp_path, "hash"))


def test_tasks_of_one_file_have_losses_of_their_own(evaluated: Evaluated) -> None:
    evaluator, model, _, _ = evaluated
    tasks = [replace(evaluator._task, reference=f"tasks.py:{name}") for name in "ab"]
    assert len({hash_loss_inputs(task, model, "hash", "") for task in tasks}) == 2
