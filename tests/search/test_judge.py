"""A profile's loss is that of the model it gives, swapped in place and computed once."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from search.database import Database
from search.judge import Judge
from search.problem import DENSE, Layer, Option
from search.task import Task
from sparse_kernels.nn import set_weight_matrix, weight_matrix

OPTIONS = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("unstructured", 0.9))


@pytest.fixture
def judged(tmp_path: Path, rng: np.random.Generator) -> tuple[Judge, nn.Module, Database, list[tuple[int, ...]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 5)).eval()
    batches = [torch.randn(4, 1, 3, 3) for _ in range(2)]
    calls: list[tuple[int, ...]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(batch.shape))
        return model(batch).square().mean()

    task = Task("t", "t", "s", (), types.SimpleNamespace(calibration=lambda: batches, loss=loss))
    database = Database(tmp_path, "hash")
    zeros = np.zeros(3)
    for name in ("0", "2"):
        matrix = weight_matrix(model.get_submodule(name))
        for option in OPTIONS[1:]:
            mask = torch.from_numpy(rng.random(tuple(matrix.shape)) > option.sparsity)
            database.put(name, option.pattern, option.sparsity, matrix * mask * 1.5, mask, 0.1)
    layers = [Layer(name, OPTIONS, zeros, zeros, zeros, zeros) for name in ("0", "2")]
    return Judge(task, model, layers, database), model, database, calls


def test_losses_are_those_of_a_model_built_anew(
    judged: tuple[Judge, nn.Module, Database, list[tuple[int, ...]]], rng: np.random.Generator
) -> None:
    import copy

    judge, model, database, _ = judged
    dense = copy.deepcopy(model)
    batches = judge._batches
    for choice in [(0, 0), (1, 2), (1, 0), (2, 2), (0, 1), (0, 0)]:
        fresh = copy.deepcopy(dense)
        for name, j in zip(("0", "2"), choice, strict=True):
            if j:
                entry = database.get(name, OPTIONS[j].pattern, OPTIONS[j].sparsity)
                set_weight_matrix(fresh.get_submodule(name), entry.weight)
        with torch.no_grad():
            expected = np.mean([float(fresh(batch).square().mean()) for batch in batches])
        assert judge(choice) == pytest.approx(expected, rel=1e-6)


def test_batch_norms_see_each_batch_and_keep_their_statistics(tmp_path: Path, rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    batch = 3 + 5 * torch.randn(40, 6)
    task = Task(
        "t", "t", "s", (),
        types.SimpleNamespace(calibration=lambda: [batch], loss=lambda model, batch: model(batch).square().mean()),
    )  # fmt: skip
    layer = Layer("0", OPTIONS[:1], *[np.zeros(1)] * 4)
    running = model[1].running_mean.clone()
    assert Judge(task, model, [layer], Database(tmp_path, "hash"))((0,)) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(model[1].running_mean, running)


def test_only_the_first_batches_judge_quickly(tmp_path: Path) -> None:
    task = Task(
        "t", "t", "s", (),
        types.SimpleNamespace(
            calibration=lambda: [torch.full((2, 1), x) for x in (1.0, 2.0, 6.0)],
            loss=lambda model, batch: batch.mean(),
        ),
    )  # fmt: skip
    model, database = nn.Sequential(nn.Linear(1, 1)), Database(tmp_path, "hash")
    layer = Layer("0", OPTIONS[:1], *[np.zeros(1)] * 4)
    assert Judge(task, model, [layer], database)((0,)) == 3.0
    quick = Judge(task, model, [layer], database, batches=2)
    assert quick.quick((0,)) == 1.5
    assert quick((0,)) == 3.0
    assert quick.quick((0,)) == 1.5


def test_a_profile_is_computed_once(
    judged: tuple[Judge, nn.Module, Database, list[tuple[int, ...]]],
) -> None:
    judge, _, _, calls = judged
    assert judge((1, 1)) == judge((1, 1))
    assert len(calls) == 2
