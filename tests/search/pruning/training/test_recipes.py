"""Recipes: strict YAML, the loop they drive, and what `latbench prune --recipe` records."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latbench.cli.commands.prune import prune as prune_command
from latbench.errors import BadData, EnvironmentUnusable, LatbenchError, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.problem.layers import Option
from search.pruning.masks.layer_targets import resolve_targets
from search.pruning.one_shot.fill_database import fill_database
from search.pruning.one_shot.stitch import StitchedLayers
from search.pruning.prune_model import check_recipe
from search.pruning.saliency.fisher import MFAC
from search.pruning.storage.model_folder import load_pruned
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.methods.gmp import GMP
from search.pruning.training.methods.mask_decay import MaskDecay
from search.pruning.training.methods.rigl import RigL
from search.pruning.training.methods.structure_decay import StructureDecay
from search.pruning.training.recipe import TRAINING_METHODS, Recipe, read_recipe
from search.pruning.training.train import compute_learning_rate_factor, train
from search.task import Task, load_task
from sparse_kernels.prunable_layers import weight_matrix

TASK = Path(__file__).parents[2] / "pruning_task.py"
TARGETS = {"conv": ("vector:4", 0.75), "fc": ("nm:1:4", 0.75)}


def magnitude_masks(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: target.mask(weight_matrix(model.get_submodule(name)).detach().square())
        for name, target in resolve_targets(TARGETS, model).items()
    }


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


def test_a_recipe_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("method: mask_decay\nsettings: {shape: exponential, rate: 0.01}\nsteps: 40\noptimizer: sgd\n")
    recipe = read_recipe(str(path))
    assert (recipe.steps, recipe.optimizer, recipe.learning_rate) == (40, "sgd", 1e-3)
    assert repr(recipe.build_pruner()) == repr(MaskDecay(shape="exponential", rate=0.01))
    path.write_text("method: structure_decay\nsettings: {stages: ['nm:8:16'], score: magnitude}\n")
    assert repr(read_recipe(str(path)).build_pruner()) == repr(StructureDecay(stages=("nm:8:16",)))
    path.write_text("settings: {score: {name: mfac, gradients: 32, damping: 1e-4}}\nlearning_rate: 2e-3\n")
    assert repr(read_recipe(str(path)).build_pruner()) == repr(GMP(score=MFAC(gradients=32, damping=1e-4)))
    assert read_recipe(str(path)).learning_rate == 2e-3
    assert Recipe(**read_recipe(str(path)).to_dict()) == read_recipe(str(path))


@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_a_methods_name_is_a_recipe(method: str) -> None:
    if method == "held":
        with pytest.raises(UsageError, match="add `start: one_shot` to the recipe"):
            read_recipe(method)
    else:
        assert read_recipe(method) == Recipe(method=method)


def test_a_recipe_tells_its_method_what_it_knows() -> None:
    assert repr(Recipe(method="rigl", seed=3).build_pruner()) == repr(RigL(seed=3, trained=True))
    assert repr(Recipe(method="rigl", settings={"trained": False}).build_pruner()) == repr(RigL())


@pytest.mark.parametrize(
    ("text", "sentence", "code"),
    [
        ("method: magic", "method must be one of gmp, acdc, .*, not 'magic'", 2),
        ("lr: 1", "unknown key 'lr'; known are method, settings", 5),
        (
            "settings: {alpha: 1}",
            "settings of gmp: unknown key 'alpha'; known are score, begin, end, updates, initial",
            2,
        ),
        ("settings: {updates: many}", "settings of gmp: updates must be a whole number, not 'many'", 2),
        ("settings: {end: .nan}", "settings of gmp: end must be a number, not nan", 2),
        (
            "settings: {score: luck}",
            "settings of gmp: score must be one of magnitude, mfac, mfac_dynamic, woodfisher, not 'luck'",
            2,
        ),
        ("settings: {score: [mfac]}", r"settings of gmp: score must be one of .*, not \['mfac'\]", 2),
        (
            "settings: {score: {name: mfac, size: 3}}",
            "settings of mfac: unknown key 'size'; known are gradients, damping, block",
            2,
        ),
        ("settings: {score: {name: mfac_dynamic, block: 3}}", "settings of mfac_dynamic: unknown key 'block'", 2),
        ("settings: {score: {name: mfac, gradients: 0}}", "at least one gradient", 2),
        ("settings: {score: {name: mfac, damping: low}}", "settings of mfac: damping must be a number, not 'low'", 2),
        ("{method: step, optimizer: sgd}", "the optimizer is adam or adamw, not sgd", 2),
        ("method: [gmp]", r"method must be one of gmp.*, not \['gmp'\]", 2),
        ("settings: {begin: 0.9}", "begins and ends within training", 2),
        ("settings: [1]", r"settings must be a mapping, not \[1\]", 5),
        ("steps: 0", "steps must be a whole number of at least 1, not 0", 2),
        ("steps: 1.5", "steps must be a whole number of at least 1, not 1.5", 2),
        ("learning_rate: fast", "learning_rate must be a number above 0, not 'fast'", 2),
        ("seed: -1", "seed must be a whole number from 0 to 4294967295, not -1", 2),
        ("seed: 100000000000000000000", "seed must be a whole number from 0 to 4294967295, not 1000000", 2),
        ("{method: rigl, settings: {seed: -1}}", "RigL's seed is from 0 to 4294967295, not -1", 2),
        ("transposable: 1", "transposable must be one of exact, quick, not 1", 2),
        ("{method: sr_ste, transposable: exact}", "sr_ste draws masks at every step.*take `transposable: quick`", 2),
        ("schedule: up", "schedule must be one of cosine, linear, constant, not 'up'", 2),
        ("start: again", "start must be one of dense, one_shot, not 'again'", 2),
        (
            "{method: held, start: one_shot, settings: {given: a}}",
            "settings of held: unknown key 'given'; known are score",
            2,
        ),
        ("{method: held, start: one_shot, transposable: quick}", "cannot make them transposable", 2),
        ("- a", "a recipe must be a mapping with keys among method,", 5),
        ("a: [", "line 1: not readable YAML", 5),
        ("steps: 3\nsteps: 4", "line 1: not readable YAML: 'steps' is given twice", 5),
        ("settings: {updates: 3, updates: 4}", "'updates' is given twice", 5),
        ("step: 3", r"unknown key 'step' \(steps\?\); known are method", 5),
        ("1: 3", "unknown key 1; known are method", 5),
        ("settings: {update: 1}", r"settings of gmp: unknown key 'update' \(updates\?\); known are", 2),
        (
            "settings: {score: {name: mfac, gradient: 1}}",
            r"settings of mfac: unknown key 'gradient' \(gradients\?\)",
            2,
        ),
        ("settings: {score: wood_fisher}", r"not 'wood_fisher' \(woodfisher\?\)", 2),
        ("method: mask-decay", r"not 'mask-decay' \(mask_decay\?\)", 2),
    ],
)
def test_a_recipe_that_is_wrong_is_said_in_a_sentence(text: str, sentence: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(LatbenchError, match=sentence) as raised:
        read_recipe(str(path))
    assert raised.value.exit_code == code
    assert str(path) in str(raised.value)


def test_a_recipe_that_is_missing_is_said() -> None:
    with pytest.raises(BadData, match=r"no recipe gone\.yaml: give a YAML file, or one of auto, gmp"):
        read_recipe("gone.yaml")
    with pytest.raises(BadData, match=r"no recipe maskdecay \(mask_decay\?\): give a YAML file"):
        read_recipe("maskdecay")


def test_learning_rates_by_hand() -> None:
    recipe = Recipe(steps=12, warmup=2)
    assert [compute_learning_rate_factor(recipe, s) for s in (0, 1, 2, 7, 12)] == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert compute_learning_rate_factor(replace(recipe, schedule="linear"), 7) == pytest.approx(0.5)
    assert compute_learning_rate_factor(replace(recipe, schedule="constant"), 11) == 1


@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_every_method_trains_a_model_and_the_seed_decides(method: str, task: Task) -> None:
    recipe = Recipe(
        method=method, start="one_shot" if method == "held" else "dense", steps=8, learning_rate=1e-2, warmup=1,
        clip_norm=1.0, accumulate=2, seed=4,
    )  # fmt: skip
    results = []
    for _ in range(2):
        model = task.model()
        trained = train(task, model, TARGETS, recipe, start=StitchedLayers(magnitude_masks(model)))
        results.append(hash_model(model))
        assert not model.training
        assert trained.masks["conv"].sum() == 8 * 54 / 4
        assert trained.masks["fc"].sum() == 16 * 72 / 4
        assert 0 < trained.flop.total < trained.dense_flop.total
    assert results[0] == results[1]
    # conv, fc and head, 64 images a step
    assert trained.dense_flop.total == 8 * 3 * 2 * 64 * (8 * 54 * 9 + 16 * 72 + 3 * 16)


@pytest.mark.parametrize("method", ["gmp", "mask_decay", "step"])
def test_training_that_was_stopped_goes_on_bit_equal(method: str, task: Task, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(step: int, _: int) -> None:
        if step == 6:
            raise Stopped

    recipe = Recipe(method=method, steps=10, learning_rate=1e-2, accumulate=2)
    whole, part = task.model(), task.model()
    expected = train(task, whole, TARGETS, recipe)
    path = tmp_path / "training"
    ticks = itertools.chain([0, 1, 1], itertools.repeat(2))  # two seconds are gone after the third step
    checkpoint = Checkpoint(path, seconds=2, clock=lambda: next(ticks))
    with pytest.raises(Stopped):
        train(task, part, TARGETS, recipe, checkpoint=checkpoint, progress=stop)
    assert torch.load(path, weights_only=True)["step"] == 3
    resumed = task.model()
    steps: list[int] = []
    found = train(
        task, resumed, TARGETS, recipe, checkpoint=Checkpoint(path), progress=lambda step, _: steps.append(step)
    )
    assert steps[0] == 4
    assert hash_model(resumed) == hash_model(whole)
    assert found.to_dict() == expected.to_dict()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadData, match=r"damaged .*; delete it to train from the start"):
        train(task, task.model(), TARGETS, recipe, checkpoint=Checkpoint(path))


class Shuffled:
    """The tiny task's batches shuffled by torch's global generator, from which dropout in the model draws too."""

    def __init__(self, task: Task) -> None:
        self.loss = task.implementation.loss
        self.batches = [task.implementation.batches(seed, 1)[0] for seed in range(4)]

    def train_batches(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for i in torch.randperm(4).tolist():
                yield self.batches[i]


def test_training_that_shuffles_and_drops_out_goes_on_bit_equal(task: Task, tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = task.model()
        made.relu = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        return made

    shuffled = replace(task, implementation=Shuffled(task))
    recipe = Recipe(steps=12, learning_rate=1e-2)
    whole, resumed = model(), model()
    path = tmp_path / "training"
    ticks = itertools.chain(range(12), itertools.repeat(11))  # written after each of the first six steps
    train(shuffled, whole, TARGETS, recipe, checkpoint=Checkpoint(path, seconds=1, clock=lambda: next(ticks)))
    assert torch.load(path, weights_only=True)["step"] == 6  # in the second epoch
    train(shuffled, resumed, TARGETS, recipe, checkpoint=Checkpoint(path))
    assert hash_model(resumed) == hash_model(whole)


def test_what_is_no_checkpoint_is_damaged_and_a_full_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "training"
    for content in (b"something else", b"", bytes(1000)):  # the last after a power cut
        path.write_bytes(content)
        with pytest.raises(BadData, match="delete it to train from the start"):
            Checkpoint(path).load({})

    def full(content: object, path: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")  # as torch says it

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(EnvironmentUnusable, match=r"cannot write .*training: \[enforce fail"):
        Checkpoint(path, seconds=0).save_if_due(1, {}, {})
    assert path.read_bytes() == bytes(1000)


def test_optimizers_are_the_recipes(task: Task) -> None:
    for optimizer in ("adam", "adamw", "sgd"):
        model = task.model()
        train(task, model, TARGETS, Recipe(optimizer=optimizer, steps=2, weight_decay=0.1))
        assert hash_model(model) != hash_model(task.model())


class Diverging:
    """The tiny task with a loss or a gradient that is not finite after a step."""

    def __init__(self, task: Task, gradient: bool) -> None:
        self.task, self.gradient, self.calls = task.implementation, gradient, 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        loss = self.task.loss(model, batch)
        if self.calls == 1:
            return loss
        return loss + (loss - loss.detach()).sqrt() if self.gradient else loss * torch.nan

    def train_batches(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        return self.task.train_batches(rng)


@pytest.mark.parametrize(
    ("gradient", "sentence"),
    [
        (False, "the loss is nan at step 1"),
        (True, "the gradient of conv.weight holds NaN or infinite values at step 1"),
    ],
)
def test_training_that_diverges_is_said_at_once(gradient: bool, sentence: str, task: Task) -> None:
    with pytest.raises(BadData, match=f"training diverged: {sentence}; lower the learning rate"):
        train(replace(task, implementation=Diverging(task, gradient)), task.model(), TARGETS, Recipe(steps=3))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.nan, "the gradient of fc.weight holds NaN or infinite values"),
        (1e30, "the norm of all gradients is too large for their type"),  # its square is above float32's most
    ],
)
def test_the_gradient_that_diverged_is_named_and_no_other(
    value: float, sentence: str, clip_norm: float | None, task: Task
) -> None:
    model = task.model()
    model.get_parameter("fc.weight").register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(BadData, match=f"training diverged: {sentence} at step 0; lower the learning rate"):
        train(task, model, TARGETS, Recipe(steps=3, clip_norm=clip_norm))


@pytest.mark.parametrize("method", sorted(TRAINING_METHODS.keys() - {"held"}))
def test_masks_can_be_transposable_where_all_layers_are_n_of_m(method: str, task: Task) -> None:
    kind = "exact" if method in ("asp", "rigl") else "quick"
    settings = {"every": 2, "until": 1.0} if method == "rigl" else {}
    recipe = Recipe(method=method, settings=settings, steps=8, transposable=kind)
    mask = train(task, task.model(), {"fc": ("nm:1:4", 0.75)}, recipe).masks["fc"]
    for groups in (mask.view(16, 18, 4).sum(dim=2), mask.view(4, 4, 72).sum(dim=1)):
        assert bool((groups == 1).all() if kind == "exact" else (groups <= 1).all())


def test_masks_that_cannot_be_transposable_are_refused_by_name(task: Task) -> None:
    recipe = Recipe(method="asp", steps=2, transposable="exact")
    with pytest.raises(UsageError, match="layer conv: only N:M masks can be transposable, not vector:4"):
        train(task, task.model(), TARGETS, recipe)


class OneLayer:
    """Eight rows of sixteen columns: nothing to compute, and all patterns fit."""

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(16, 8, bias=False)).eval()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def train_batches(self, rng: np.random.Generator) -> Iterator[Tensor]:
        while True:
            yield torch.from_numpy(rng.standard_normal((4, 16))).float()


PATTERNS = {
    "unstructured": 0.75, "nm:2:4": 0.5, "nm:1:4": 0.75, "nm:5:8": 0.375, "vectornm:4:1:4": 0.75, "block:4x4": 0.75,
    "block:8x8": 0.9, "vector:4": 0.75, "shflbw:4": 0.75,
}  # fmt: skip
SCHEDULES = {
    "gmp": ({"initial": 0.5}, {"score": {"name": "mfac", "gradients": 2}}, {"end": 1.0}),
    "acdc": ({"warmup": 0, "period": 0.2},),
    "rigl": ({"every": 2, "until": 1.0, "alpha": 1.0}, {"every": 1, "trained": False}),
    "asp": ({"dense": 0.5}, {"dense": 1.0}),
    "mask_decay": ({"shape": "exponential", "every": 2}, {"final": 0.0, "backward": "straight_through"}),
    "structure_decay": (
        {"every": 2}, {"stages": "geometric"}, {"stages": "geometric", "factor": 2}, {"stages": ["nm:3:4"]},
        {"stages": ["vectornm:4:3:4"]},
    ),
    "step": ({"latest": 1.0}, {"every": 3}),
    "grow_and_prune": ({"final": 0.0},),
}  # fmt: skip


@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_every_method_pattern_and_schedule_works_or_is_refused_before_any_work(method: str, task: Task) -> None:
    one = replace(task, implementation=OneLayer())
    refused = []
    for settings in ({}, *SCHEDULES.get(method, ())):
        for (pattern, sparsity), transposable in itertools.product(PATTERNS.items(), (None, "quick", "exact")):
            model = OneLayer().model()
            targets = {"0": (pattern, sparsity)}
            try:
                start = "one_shot" if method == "held" else "dense"
                recipe = Recipe(method=method, settings=settings, steps=6, transposable=transposable, start=start)
                check_recipe(recipe, one, targets, model)
            except UsageError as error:
                assert "\n" not in str(error)
                refused.append((pattern, transposable, settings.get("stages")))
                continue
            mask = resolve_targets(targets, model)["0"].mask(torch.rand(8, 16))
            kept = train(one, model, targets, recipe, start=StitchedLayers({"0": mask})).masks["0"]
            if transposable == "quick":
                assert kept.sum() <= mask.sum()
            else:
                assert kept.sum() == mask.sum()
            assert bool((model[0].weight[~kept] == 0).all())
    # What no kernel and no paper knows is refused, and no more than that.
    for pattern, transposable, stages in refused:
        assert (
            (transposable and not pattern.startswith("nm:"))
            or (transposable == "exact" and "every" in {each.name for each in fields(TRAINING_METHODS[method])})
            or (transposable and method == "held")
            or (method == "rigl" and pattern == "shflbw:4")
            or (stages == "geometric" and (transposable or not pattern.startswith(("nm:", "vectornm:"))))
            or (transposable and stages == ["vectornm:4:3:4"])
        ), (pattern, transposable, stages)


def test_training_batches_that_end_begin_again(task: Task) -> None:
    class Passes:
        passes, loss = 0, staticmethod(task.implementation.loss)

        def train_batches(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            return iter([next(task.implementation.train_batches(rng)) for _ in range(2)])

    whole, parts, passes = task.model(), task.model(), Passes()
    train(task, whole, TARGETS, Recipe(steps=5))
    train(replace(task, implementation=passes), parts, TARGETS, Recipe(steps=5))
    assert passes.passes == 3
    assert hash_model(parts) == hash_model(whole)  # the generator goes on: each pass has another order


def test_training_without_batches_is_said(task: Task) -> None:
    class Once:
        loss = staticmethod(task.implementation.loss)
        only = iter([next(task.train_batches(np.random.default_rng(0)))])

        def train_batches(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            return self.only

    with pytest.raises(UsageError, match=r"train_batches\(\) gave no batch at step 1 of 3: return batches whenever"):
        train(replace(task, implementation=Once()), task.model(), TARGETS, Recipe(steps=3))


def test_the_command_records_recipe_and_flop_and_keeps_what_is_there_when_training_fails(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = task.model()
    layers = {name: LayerChoice(*choice, 1e-3, 9e-4, 2e-3, 0.1) for name, choice in TARGETS.items()}
    Profile(
        task=task.name, layers=layers, backend="numba", threads=2, batch=32, device="cpu", target=2.0,
        dense_engine="torch", dense_seconds=4e-3, dense_seconds_low=4e-3, dense_seconds_high=4e-3,
        fixed_seconds=1e-4, fixed_seconds_low=1e-4, fixed_seconds_high=1e-4, predicted_seconds=2e-3,
        predicted_low=2e-3, predicted_high=2e-3, loss=1.0, error=0.2, bound=0.2, ceiling=4.0, strategy="exact",
        confidence=0.9, additivity_before=0.1, additivity_after=0.1, seed=0, table_hash="t",
        model_hash=hash_model(model), inputs="i",
    ).save(tmp_path / "profile.json")  # fmt: skip
    fill_database(
        task, model, {n: [Option(*c)] for n, c in TARGETS.items()}, Database(tmp_path / "db", hash_model(model))
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: sr_ste\nsteps: 200\nlearning_rate: 1.0e-2\nseed: 7\n")

    def run(**options: object) -> str:
        prune_command(
            str(TASK), tmp_path / "profile.json", tmp_path / "db", tmp_path / "pruned", joint=False, **options
        )  # type: ignore[arg-type]
        return capsys.readouterr().out

    output = run(recipe=str(recipe))
    manifest = json.loads((tmp_path / "pruned" / "manifest.json").read_text())
    assert manifest["recipe"] == Recipe(method="sr_ste", steps=200, learning_rate=1e-2, seed=7).to_dict()
    flop = {stage["name"]: stage.get("training_flop") for stage in manifest["stages"]}
    assert flop["one-shot"] is None
    assert flop["sr_ste"]["dense_total"] == 200 * 3 * 2 * 32 * (8 * 54 * 9 + 16 * 72 + 3 * 16)
    assert f"{flop['sr_ste']['total'] / flop['sr_ste']['dense_total']:.3f}" in output
    assert manifest["method"] == "sr_ste"
    load_pruned(tmp_path / "pruned", task.model())
    assert "up to date" in run(recipe=str(recipe))
    recipe.write_text("method: sr_ste\nsteps: 20\nlearning_rate: 1.0e+30\n")
    with pytest.raises(BadData, match=r"training diverged|hold NaN"):
        run(recipe=str(recipe))
    assert json.loads((tmp_path / "pruned" / "manifest.json").read_text()) == manifest
