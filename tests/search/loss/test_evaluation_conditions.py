"""The conditions of a search's losses are the task's own wherever the wanted ones fail, and only there."""

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.artifacts.layer_database import Database
from search.loss.evaluation_conditions import WANTED, EvaluationConditions, find_conditions
from search.loss.evaluator import LossEvaluator
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import SearchInputs
from search.task import Task

SHAPE = (3, 4, 6, 6)


class View(nn.Module):
    """Flattens what a convolution returns in a way that only contiguous tensors allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 8, 3), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


class MemoryOrder(View):
    """Reads its memory in the order in which it lies: in channels_last it computes another function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.as_strided(self.conv(x), (len(x), 128), (128, 1)))


class Pooled(nn.Module):
    """Two norms: the second sees one value a channel if the batch is one image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.conv(x)).mean((2, 3))))


class PickyNorm(nn.BatchNorm2d):
    """A norm that cannot use the statistics of a batch here, as one for several GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("this norm trains on GPUs")
        return super().forward(x)


class EvalOnly(nn.Module):
    """A model that refuses to run while a norm of it is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm.training:
            raise RuntimeError("call eval() first")
        return self.conv(self.norm(x))


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def task_of(
    *sizes: int | tuple[int, int], shape: tuple[int, ...] = SHAPE[1:], loss: Callable[..., Any] | None = None
) -> Task:
    """A task with batches of so many samples, or of (samples, length of the last side)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(size[0], *shape[:-1], size[1]) if isinstance(size, tuple) else (size, *shape) for size in sizes]
    batches = [torch.randn(*each, generator=generator) for each in shapes]
    members = {"calibration": lambda: batches, "loss": loss or (lambda model, batch: model(batch).square().mean())}
    return Task("t", "t", "s", types.SimpleNamespace(**members))


def found(task: Task, model: nn.Module) -> EvaluationConditions:
    return find_conditions(task, model, task.calibration())


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)), (3, 3), WANTED),
        (View, (3,), EvaluationConditions(channels_last=False)),
        (MemoryOrder, (3,), EvaluationConditions(channels_last=False)),
        (Pooled, (3, 3), WANTED),
        (Pooled, (1, 1), EvaluationConditions(fixed_norms=("second",))),
        (Pooled, (3, 3, 1), EvaluationConditions(fixed_norms=("second",))),  # the last batch of an odd number
        (Pooled, (3, (1, 40)), EvaluationConditions(fixed_norms=("second",))),  # one sample, but a long one
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), PickyNorm(8)), (3,), EvaluationConditions(fixed_norms=("1",))),
        (EvalOnly, (3,), EvaluationConditions(fixed_norms=("norm",))),
        (lambda: nn.Sequential(View(), nn.BatchNorm1d(3)), (1,), EvaluationConditions(False, ("1",))),
    ],
)
def test_each_condition_that_fails_is_left_out_alone(
    kind: Callable[[], nn.Module], sizes: tuple[int, ...], expected: EvaluationConditions
) -> None:
    task, model = task_of(*sizes), build(kind)
    before = copy.deepcopy(model.state_dict())
    assert found(task, model) == expected
    assert not any(module.training for module in model.modules())  # the model is as it was
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_five_dimensional_tensors_are_evaluated() -> None:
    task = task_of(2, shape=(4, 5, 5, 5))
    model = build(lambda: nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8), nn.Flatten(), nn.Linear(216, 3)))
    conditions = found(task, model)
    assert conditions == WANTED
    [loss] = LossEvaluator(task, model, [], Database(Path("none"), ""), conditions=conditions).losses((), range(1))
    assert loss > 0


@pytest.mark.parametrize(("kind", "sizes"), [(View, (3, 2)), (MemoryOrder, (3, 3)), (EvalOnly, (3, 1))])
def test_losses_under_fallen_back_conditions_are_those_of_the_task(
    kind: Callable[[], nn.Module], sizes: tuple[int, ...]
) -> None:
    task, model = task_of(*sizes), build(kind)
    with torch.no_grad():
        expected = [float(task.loss(model, batch)) for batch in task.calibration()]
    evaluator = LossEvaluator(task, model, [], Database(Path("none"), ""), conditions=found(task, model))
    assert evaluator.losses((), range(len(sizes))) == pytest.approx(expected, rel=1e-5)


def test_a_norm_that_can_still_uses_the_statistics_of_each_batch() -> None:
    task, model = task_of(1), build(Pooled)
    conditions = found(task, model)
    conditions.prepare(model)
    assert model.first.training and not model.second.training


def test_the_wanted_conditions_fail_for_such_models() -> None:
    """Known to be wrong: what every search did before it looked."""
    task = task_of(1)
    for kind, what in ((View, "view size is not compatible"), (Pooled, "more than 1 value per channel")):
        evaluator = LossEvaluator(task, build(kind), [], Database(Path("none"), ""))
        with pytest.raises(UsageError, match=what):
            evaluator.losses((), range(1))


def test_a_loss_may_take_gradients_of_its_own() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.enable_grad():
            x = batch.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
        return gradient.square().mean()

    task, model = task_of(3, loss=loss), build(lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()))
    evaluator = LossEvaluator(task, model, [], Database(Path("none"), ""), conditions=found(task, model))
    assert evaluator.losses((), range(1))[0] > 0


def test_a_loss_that_fails_as_the_task_runs_it_is_the_users() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(UsageError, match=r"loss\(\) raised KeyError: 'labels' \(test_evaluation_conditions.py:\d+\)"):
        found(task_of(3, loss=loss), build(View))


def test_a_loss_that_is_not_finite_for_the_dense_model_is_refused() -> None:
    with pytest.raises(UsageError, match="is nan for its own dense model, so no profile can be evaluated"):
        found(task_of(3, loss=lambda model, batch: torch.tensor(float("nan"))), build(View))


def test_conditions_are_part_of_the_key_of_losses_only_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.pipeline.search_history.hash_loss_inputs", lambda *_: "hash")

    def key(conditions: EvaluationConditions) -> str:
        inputs = SearchInputs(None, None, None, None, Path(), "", "", "", conditions=conditions)  # type: ignore[arg-type]
        return SearchHistory(inputs, types.SimpleNamespace(workers=types.SimpleNamespace(pool="cpu"))).loss_key()  # type: ignore[arg-type]

    others = [EvaluationConditions(False), EvaluationConditions(True, ("a",)), EvaluationConditions(True, ("a", "b"))]
    assert key(WANTED) == "hash cpu"  # so that losses of earlier searches count
    assert len({key(WANTED), *map(key, others)}) == 4
