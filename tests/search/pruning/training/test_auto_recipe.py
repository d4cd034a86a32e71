"""`--recipe auto`: distillation, averages of weights, and the choice of length and learning rate."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import hash_model
from search.pruning import prune_model
from search.pruning.masks.layer_targets import resolve_targets
from search.pruning.one_shot.stitch import StitchedLayers
from search.pruning.training.auto_recipe import LONGER, MOST_STEPS, RATES, AutoRecipe, choose_recipe, read_training
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.dense_teacher import DenseTeacher
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import train
from search.pruning.training.weight_average import WeightAverage
from search.task import Task, load_task
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = Path(__file__).parents[2] / "pruning_task.py"
TARGETS = {"conv": ("vector:4", 0.5), "fc": ("nm:2:4", 0.5)}


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


def build_pruned(task: Task) -> tuple[nn.Module, StitchedLayers]:
    """The model pruned by magnitude."""
    model = task.model()
    masks = {}
    for name, target in resolve_targets(TARGETS, model).items():
        weight = weight_matrix(model.get_submodule(name)).detach()
        masks[name] = target.mask(weight.square())
        set_weight_matrix(model.get_submodule(name), weight * masks[name])
    return model, StitchedLayers(masks)


def with_members(task: Task, **members: Any) -> Task:
    return replace(task, implementation=SimpleNamespace(**{**vars(task.implementation), **members}))


def relative(y: Tensor, target: Tensor) -> float:
    return float(((y - target) ** 2).sum() / (target**2).sum())


def test_the_teacher_measures_relative_distances(task: Task) -> None:
    dense, (pruned, _) = task.model(), build_pruned(task)
    [batch] = task.implementation.batches(5, 1)
    with torch.no_grad():
        assert DenseTeacher(task, "layers").compute_loss(task.model(), batch) == 0
        by_hand: dict[str, list[Tensor]] = {}
        for model in (dense, pruned):
            conv = model.conv(batch[0])
            hidden = model.fc(torch.relu(model.norm(conv)).flatten(1))
            for name, y in zip(("conv", "fc", "head"), (conv, hidden, model.head(torch.relu(hidden))), strict=True):
                by_hand.setdefault(name, []).append(y)
    distances = {name: relative(after, before) for name, (before, after) in by_hand.items()}
    of_outputs = DenseTeacher(task, "outputs").compute_loss(pruned, batch)
    of_layers = DenseTeacher(task, "layers").compute_loss(pruned, batch)
    assert of_outputs.item() == pytest.approx(distances["head"], rel=1e-5)
    assert of_layers.item() == pytest.approx(distances["head"] + np.mean(list(distances.values())), rel=1e-5)
    of_layers.backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())


def test_losses_in_what_a_model_returns_teach_nothing(task: Task) -> None:
    """transformers' models return their loss beside the logits: a scalar, and often nearly zero."""

    class WithLoss(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": logits.square().mean() * 1e-9, "logits": logits, "classes": logits.argmax(1)}

    wrapped = with_members(
        task,
        model=lambda: WithLoss(task.model()).eval(),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0])["logits"], batch[1]),
    )
    pruned, _ = build_pruned(task)
    [batch] = task.implementation.batches(5, 1)
    found = DenseTeacher(wrapped, "outputs").compute_loss(WithLoss(pruned), batch)
    assert found.item() == pytest.approx(DenseTeacher(task, "outputs").compute_loss(pruned, batch).item(), rel=1e-6)


def test_a_loss_that_calls_parts_of_the_model_can_teach_layers_alone(task: Task) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model.fc(model.conv(batch[0]).flatten(1)).square().mean()

    parts, (pruned, _) = with_members(task, loss=loss), build_pruned(task)
    [batch] = task.implementation.batches(5, 1)
    assert DenseTeacher(parts, "layers").compute_loss(pruned, batch) > 0
    with pytest.raises(UsageError, match=r"task tiny: its loss\(\) does not call the model as a whole"):
        DenseTeacher(parts, "outputs").compute_loss(pruned, batch)


def test_distillation_comes_nearer_the_dense_model_than_the_tasks_loss(task: Task) -> None:
    """Labels of the tiny task are random: only the dense model says what is right."""
    teacher, fresh = DenseTeacher(task, "outputs"), task.implementation.batches(77, 4)

    def distance_after(distill: str | None) -> float:
        model, start = build_pruned(task)
        recipe = Recipe(method="held", start="one_shot", steps=300, learning_rate=3e-3, distill=distill)
        trained = train(task, model, TARGETS, recipe, start=start)
        assert all(torch.equal(trained.masks[name], mask) for name, mask in start.masks.items())
        for name, mask in start.masks.items():
            assert (weight_matrix(model.get_submodule(name))[~mask] == 0).all()
        assert (trained.flop.forward > trained.dense_flop.forward) == (distill is not None)  # the teacher's, too
        with torch.no_grad():
            return sum(teacher.compute_loss(model, batch).item() for batch in fresh)

    before = sum(teacher.compute_loss(build_pruned(task)[0], batch).item() for batch in fresh)
    by_outputs, by_layers, by_labels = (distance_after(distill) for distill in ("outputs", "layers", None))
    assert max(by_outputs, by_layers) < 0.85 * before < by_labels


def test_an_average_of_weights_follows_its_formula_and_the_masks() -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2))
    average, expected = WeightAverage(model, 0.8), weight_matrix(model[0]).detach().numpy().astype(float)
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]])
    for step in range(1, 60):
        new = rng.standard_normal((2, 4))
        set_weight_matrix(model[0], torch.tensor(new, dtype=torch.float32))
        model[1].running_mean.fill_(float(step))
        average.update()
        decay = min(0.8, step / (step + 9))
        expected = decay * expected + (1 - decay) * new
    average.write({"0": mask})
    # 60 roundings of float32 at most, of numbers below 4.
    np.testing.assert_allclose(weight_matrix(model[0]).detach(), expected * mask.numpy(), atol=60 * 4 * 2**-24)
    # Means of 1 ... 59 lag behind by decay / (1 - decay) steps.
    assert model[1].running_mean[0].item() == pytest.approx(59 - 0.8 / 0.2, abs=0.01)
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("method", ["held", "gmp", "mask_decay"])
def test_distillation_with_an_average_goes_on_bit_equal(method: str, task: Task, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(step: int, _: int) -> None:
        if step == 6:
            raise Stopped

    start = "one_shot" if method == "held" else "dense"
    recipe = Recipe(method=method, start=start, steps=10, learning_rate=1e-2, distill="layers", ema=0.5)
    (whole, given), (part, _), (resumed, _) = (build_pruned(task) for _ in range(3))
    expected = train(task, whole, TARGETS, recipe, start=given)
    ticks = itertools.chain([0, 1, 1], itertools.repeat(2))  # two seconds are gone after the third step
    checkpoint = Checkpoint(tmp_path / "training", seconds=2, clock=lambda: next(ticks))
    with pytest.raises(Stopped):
        train(task, part, TARGETS, recipe, start=given, checkpoint=checkpoint, progress=stop)
    found = train(task, resumed, TARGETS, recipe, start=given, checkpoint=Checkpoint(tmp_path / "training"))
    assert hash_model(resumed) == hash_model(whole)
    assert found.to_dict() == expected.to_dict()
    for name, mask in found.masks.items():
        assert (weight_matrix(resumed.get_submodule(name))[~mask] == 0).all()


class Clock:
    """Seconds that pass by one a batch."""

    def __init__(self, task: Task, seconds: float = 1.0) -> None:
        self.now, self.count, self._seconds = 0.0, 0, seconds
        self.task = with_members(task, train_batches=self._train_batches)
        self._original = task.implementation.train_batches

    def __call__(self) -> float:
        return self.now

    def _train_batches(self, rng: np.random.Generator) -> Iterator[Any]:
        for batch in self._original(rng):
            self.now += self._seconds
            self.count += 1
            yield batch


@pytest.mark.parametrize(("budget", "most"), [(1000.0, 1000), (150.0, 170), (30.0, 40)])
def test_the_choice_fits_the_budget(budget: float, most: int, task: Task) -> None:
    """With a second a step. A budget that is too short for trials gets the shortest ones."""
    clock = Clock(task)
    chosen = choose_recipe(AutoRecipe(budget), clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    assert chosen.steps >= 10
    assert clock.count + chosen.steps <= most
    assert budget < 1000 or clock.count + chosen.steps > 0.95 * budget
    assert (chosen.method, chosen.start, chosen.distill) == ("held", "one_shot", "layers")
    assert chosen.learning_rate in [LONGER * rate for rate in RATES]


def test_a_small_task_is_not_trained_for_the_whole_budget(task: Task) -> None:
    clock = Clock(task, 1e-3)
    chosen = choose_recipe(AutoRecipe(600.0), clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    assert chosen.steps == MOST_STEPS


def test_the_rate_is_better_than_its_neighbours(task: Task) -> None:
    clock = Clock(task)
    auto = AutoRecipe(400.0)
    chosen = choose_recipe(auto, clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    fresh = [next(clock.task.train_batches(np.random.default_rng(1))) for _ in range(1)]
    teacher, number = DenseTeacher(task, "layers"), RATES.index(chosen.learning_rate / LONGER)

    def distance(rate: float) -> float:
        model, start = build_pruned(task)
        train(task, model, TARGETS, replace(auto.base, learning_rate=rate, steps=20, warmup=1), start=start)
        with torch.no_grad():
            return sum(teacher.compute_loss(model, batch).item() for batch in fresh)

    distances = [distance(rate) for rate in RATES]
    # Trials and this test see other batches: a neighbour may be better, but by little.
    assert distances[number] <= 1.2 * min(distances[max(0, number - 1) : number + 2])
    assert distances[number] < distances[0]


def test_rates_that_diverge_are_not_chosen(task: Task) -> None:
    """A model whose loss is not finite once its weights have moved."""
    dense = task.model()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        moved = (model.head.weight - dense.head.weight).abs().max()
        return task.implementation.loss(model, batch) + (torch.nan if moved > 3e-3 else 0.0)

    fragile = with_members(task, loss=loss)
    clock = Clock(fragile)
    teacher = DenseTeacher.compute_loss

    def compute_loss(self: DenseTeacher, model: nn.Module, batch: Any) -> Tensor:
        return teacher(self, model, batch) + 0 * loss(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseTeacher, "compute_loss", compute_loss)
        chosen = choose_recipe(AutoRecipe(400.0), clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    assert chosen.learning_rate <= LONGER * 3e-4  # 20 steps of Adam at 1e-3 move a weight by more


def test_an_interrupted_training_goes_on_with_the_same_choice(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "chosen"
    auto, clock = AutoRecipe(100.0, path=path), Clock(task)
    chosen = choose_recipe(auto, clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    never = with_members(task, train_batches=lambda rng: pytest.fail("it was tried again"))
    assert choose_recipe(auto, never, TARGETS, lambda: pytest.fail("it was tried again")) == chosen
    path.write_text(path.read_text()[:20])
    with pytest.raises(BadData, match=r"chosen: damaged .*; delete it to choose a recipe again"):
        choose_recipe(auto, never, TARGETS, lambda: pytest.fail("it was tried again"))


@pytest.mark.parametrize(
    ("recipe", "seconds", "expected"),
    [
        (None, None, None),
        ("auto", None, AutoRecipe(600.0)),
        (None, 90.0, AutoRecipe(90.0)),
        ("auto", 90.0, AutoRecipe(90.0)),
        ("gmp", None, Recipe(method="gmp")),
    ],
)
def test_what_users_ask_for(recipe: str | None, seconds: float | None, expected: object) -> None:
    assert read_training(recipe, seconds) == expected


def build_result(name: str, task: Task, loss: float, scale: float) -> prune_model.PruneResult:
    """The dense model with scaled logits, and a loss on calibration data that says something else."""
    model = task.model()
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.bias.mul_(scale)
    stage = prune_model.Milestone(name, loss, 0.0)
    return prune_model.PruneResult([stage], stage, model, {}, {}, Recipe())


@pytest.mark.parametrize(("scale", "kept"), [(1.0, "pruned"), (100.0, "pruned"), (0.0, "held")])
def test_the_trained_model_is_compared_on_training_batches(scale: float, kept: str, task: Task) -> None:
    """Labels are random: the surer the answers, the larger the loss, and log 3 is the least."""
    before = build_result("pruned", task, 0.1, 1.0)
    after = replace(build_result("held", task, 0.2, scale), stages=before.stages)
    found = prune_model._select_by_fresh_batches(task, before, after, seed=0)
    assert found.selected.name == kept
    assert [stage.name for stage in found.stages] == ["pruned", "held"]
    losses = [stage.fresh_loss for stage in found.stages]
    assert found.selected.fresh_loss == min(losses)
    assert losses[1] == pytest.approx(np.log(3), rel=1e-6) or scale


@pytest.mark.parametrize("mark", [-1e9, -torch.inf, torch.finfo(torch.float32).min])
def test_marks_in_outputs_teach_nothing(mark: float, task: Task) -> None:
    """Such as logits of tokens that cannot follow."""

    class Masked(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            logits = self.net(x)
            return torch.cat([logits, torch.full_like(logits, mark)], dim=1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0])[:, :3], batch[1])

    masked = with_members(task, model=lambda: Masked(task.model()).eval(), loss=loss)
    pruned, _ = build_pruned(task)
    [batch] = task.implementation.batches(5, 1)
    found = DenseTeacher(masked, "outputs").compute_loss(Masked(pruned), batch)
    assert found.item() == pytest.approx(DenseTeacher(task, "outputs").compute_loss(pruned, batch).item(), rel=1e-6)
    found.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in pruned.parameters())


def test_outputs_of_other_shapes_in_training_are_told_once(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # OpenVINO may have left the root logger at another one

    class Heads(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            logits = self.net(x)
            return (logits, logits) if self.training else logits

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0])
        return nn.functional.cross_entropy(found[0] if isinstance(found, tuple) else found, batch[1])

    heads = with_members(task, model=lambda: Heads(task.model()).eval(), loss=loss)
    student, teacher = Heads(build_pruned(task)[0]).train(), DenseTeacher(heads, "layers")
    for batch in task.implementation.batches(5, 2):
        teacher.compute_loss(student, batch)
    assert [record.message.partition(": the model learns")[2] for record in caplog.records] == [
        " the outputs of its layers alone"
    ]


def test_dropout_drops_nothing_while_the_dense_model_teaches(task: Task) -> None:
    def build(rate: float) -> tuple[nn.Module, StitchedLayers]:
        model, start = build_pruned(task)
        model.relu = nn.Sequential(nn.ReLU(), nn.Dropout(rate))
        return model, start

    hashes = []
    for rate in (0.0, 0.5):
        model, start = build(rate)
        with_dropout = with_members(task, model=lambda rate=rate: build(rate)[0].eval())
        recipe = Recipe(method="held", start="one_shot", steps=5, distill="layers")
        train(with_dropout, model, TARGETS, recipe, start=start)
        hashes.append(hash_model(model))
    assert hashes[0] == hashes[1]


def test_masks_among_the_buffers_have_no_average(task: Task) -> None:
    model = task.model()
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    average = WeightAverage(model, 0.9)
    average.update()
    average.write({})
    assert torch.equal(model.get_buffer("mask"), torch.full((3, 3), -torch.inf).triu(1))


def test_a_budget_of_few_steps_has_no_trials(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # OpenVINO may have left the root logger at another one
    clock = Clock(task, 10.0)
    chosen = choose_recipe(AutoRecipe(60.0), clock.task, TARGETS, lambda: build_pruned(task), clock=clock)
    assert (chosen.steps, chosen.learning_rate) == (10, LONGER * RATES[2])
    assert clock.count <= 10  # the timed steps, and the batches that compare trials
    assert "10 steps of training take 100 s, more than the budget leaves" in caplog.text


class Noisy(nn.Module):
    """Dropout that is no module, as in attention."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.relu(), self.rate if self.training else 0.0)


def test_dropout_inside_other_modules_drops_nothing_either(task: Task) -> None:
    def build(rate: float) -> tuple[nn.Module, StitchedLayers]:
        model, start = build_pruned(task)
        model.relu = Noisy(rate)
        return model, start

    hashes = []
    for rate in (0.0, 0.5):
        model, start = build(rate)
        noisy = with_members(task, model=lambda rate=rate: build(rate)[0].eval())
        before = model.get_buffer("norm.running_mean").clone()
        train(noisy, model, TARGETS, Recipe(method="held", start="one_shot", steps=3, distill="layers"), start=start)
        assert not torch.equal(model.get_buffer("norm.running_mean"), before)  # norms train
        hashes.append(hash_model(model))
    assert hashes[0] == hashes[1]
