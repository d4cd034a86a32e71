"""Whole models: joint tuning, batch norms, gradual pruning, the stages of `latbench prune` and its folder."""

import copy
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latbench.base.files import list_hidden_siblings
from latbench.cli.commands.prune import prune as prune_command
from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.pipeline.prune_to_folder import PruneRequest, is_trained, prune_to_folder
from search.problem.layers import Option
from search.pruning import prune_model
from search.pruning.masks.apply_masks import apply_masks
from search.pruning.one_shot.batchnorm import list_batchnorms, tune_batchnorm
from search.pruning.one_shot.fill_database import fill_database, hash_pruning_inputs
from search.pruning.one_shot.global_adaprune import TuningSettings, run_global_adaprune
from search.pruning.one_shot.stitch import stitch
from search.pruning.storage.model_folder import (
    FILES,
    load_pruned,
    save_pruned,
)
from search.pruning.storage.packed_file import save_packed
from search.pruning.training import auto_recipe
from search.pruning.training.auto_recipe import AutoRecipe
from search.pruning.training.checkpoint import Checkpoint
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import TrainingResult, train
from search.task import Task, load_task
from sparse_kernels.patterns import Dense, Unstructured, VectorWise, parse
from sparse_kernels.prunable_layers import weight_matrix

TASK = Path(__file__).parents[1] / "pruning_task.py"
CHOICES = {"conv": ("vector:4", 0.75), "fc": ("unstructured", 0.5)}
OPTIONS = {layer: Option(*choice) for layer, choice in CHOICES.items()}
NOBODY = 999_999_999  # no process has such a number


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


@pytest.fixture
def database(task: Task, tmp_path: Path) -> Database:
    model = task.model()
    filled = Database(tmp_path / "database", hash_model(model))
    fill_database(task, model, {layer: [option] for layer, option in OPTIONS.items()}, filled)
    return filled


def profile_of(task: Task, choices: dict[str, tuple[str, float]]) -> Profile:
    layers = {name: LayerChoice(*choice, 1e-3, 9e-4, 2e-3, 0.1) for name, choice in choices.items()}
    return Profile(
        task=task.name, layers=layers, backend="numba", threads=2, batch=32, device="cpu", target=2.0,
        dense_engine="torch", dense_seconds=4e-3, dense_seconds_low=4e-3, dense_seconds_high=4e-3,
        fixed_seconds=1e-4, fixed_seconds_low=1e-4, fixed_seconds_high=1e-4, predicted_seconds=2e-3,
        predicted_low=2e-3, predicted_high=2e-3, loss=1.0, error=0.2, bound=0.2, ceiling=4.0, strategy="exact",
        confidence=0.9, additivity_before=0.1, additivity_after=0.1,
        seed=0, table_hash="t", model_hash=hash_model(task.model()), inputs="i",
    )  # fmt: skip


def zeros_hold(model: nn.Module, masks: dict[str, Tensor]) -> bool:
    return all(bool((weight_matrix(model.get_submodule(name))[~mask] == 0).all()) for name, mask in masks.items())


def with_model(task: Task, model: Callable[[], nn.Module]) -> Task:
    """The task with another model."""
    return replace(task, implementation=SimpleNamespace(**{**vars(task.implementation), "model": model}))


def test_joint_tuning_comes_nearer_the_dense_activations_and_masks_hold(task: Task, database: Database) -> None:
    model = task.model()
    masks = stitch(model, OPTIONS, database).masks
    statistics = model.get_buffer("norm.running_mean").clone()
    losses = run_global_adaprune(
        task, model, masks, task.calibration(), settings=TuningSettings(steps=60, learning_rate=5e-3)
    )
    assert np.mean(losses[-6:]) < 0.9 * np.mean(losses[:6])  # six batches a pass
    assert zeros_hold(model, masks)
    assert torch.equal(model.get_buffer("norm.running_mean"), statistics)
    assert not any(module._forward_hooks for module in model.modules())
    assert [type(module) for module in model.modules()] == [type(module) for module in task.model().modules()]


def test_joint_tuning_follows_layers_whose_outputs_are_changed_in_place(task: Task) -> None:
    """Before ReLU(inplace=True) as before ReLU(): both models compute the same."""

    def tuned(inplace: bool) -> list[float]:
        def model() -> nn.Module:
            torch.manual_seed(2)
            return nn.Sequential(nn.Flatten(), nn.Linear(150, 8), nn.ReLU(inplace), nn.Linear(8, 3)).eval()

        pruned = model()
        masks = {"1": torch.rand(8, 150, generator=torch.Generator().manual_seed(3)) < 0.5}
        apply_masks(pruned, masks)
        return run_global_adaprune(
            with_model(task, model),
            pruned,
            masks,
            task.calibration(),
            settings=TuningSettings(steps=3),
        )

    assert tuned(True) == tuned(False)


def test_joint_tuning_updates_a_weight_that_two_layers_share_once_a_step(task: Task) -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        net = nn.Sequential(nn.Flatten(), nn.Linear(150, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        net.get_submodule("3").weight = net.get_submodule("2").weight
        return net.eval()

    pruned = model()
    masks = {"1": torch.rand(8, 150, generator=torch.Generator().manual_seed(3)) < 0.5}
    apply_masks(pruned, masks)
    run_global_adaprune(
        with_model(task, model),
        pruned,
        masks,
        task.calibration(),
        settings=TuningSettings(steps=1, learning_rate=1e-3),
    )
    changed = (pruned.get_parameter("2.weight") - model().get_parameter("2.weight")).detach().abs().max()
    assert float(changed) == pytest.approx(1e-3, rel=1e-3)  # Adam's first step, of every weight


def tuned_with(
    task: Task, make: Callable[[], nn.Module], inputs: Callable[[nn.Module, Tensor], Tensor], **settings: Any
) -> nn.Module:
    """A model whose layer "0" keeps half its weights, after joint tuning on made-up (9, 8) inputs."""
    batches = list(torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)))
    made = with_model(task, make)
    made = replace(
        made,
        implementation=SimpleNamespace(**{**vars(made.implementation), "loss": lambda net, x: inputs(net, x).sum()}),
    )
    model = make()
    masks = {"0": torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.5}
    apply_masks(model, masks)
    run_global_adaprune(made, model, masks, batches, TuningSettings(steps=2, **settings))
    assert zeros_hold(model, masks)
    return model


def two_layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


@pytest.mark.parametrize("frozen", [("0",), ("2",), ("0", "2")])
def test_joint_tuning_leaves_frozen_layers_as_they_are(task: Task, frozen: tuple[str, ...]) -> None:
    def make() -> nn.Module:
        model = two_layers()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return model

    tuned, before = tuned_with(task, make, lambda net, x: net(x)), make()
    apply_masks(before, {"0": weight_matrix(tuned.get_submodule("0")) != 0})
    for name in ("0", "2"):
        same = torch.equal(tuned.get_parameter(f"{name}.weight"), before.get_parameter(f"{name}.weight"))
        assert same == (name in frozen)
    assert not any(p.requires_grad for name in frozen for p in tuned.get_submodule(name).parameters())


def test_joint_tuning_leaves_out_layers_that_see_other_inputs_than_in_the_dense_model(task: Task) -> None:
    """As experts do, to which a router sends what the layers before it made."""

    def routed(net: nn.Module, x: Tensor) -> Tensor:
        hidden = net.get_submodule("0")(x)
        return net.get_submodule("2")(hidden[hidden[:, 0] > 0]).sum() + hidden.sum()

    assert isinstance(tuned_with(task, two_layers, routed), nn.Sequential)


def test_joint_tuning_gives_back_a_forward_of_the_users_own_and_the_order_of_parameters(task: Task) -> None:
    def make() -> nn.Module:
        model = two_layers()
        plain = model[0].forward
        model[0].forward = lambda x: 2 * plain(x)
        return model

    tuned = tuned_with(task, make, lambda net, x: net(x), learning_rate=0.0)
    expected = make()
    apply_masks(expected, {"0": weight_matrix(tuned.get_submodule("0")) != 0})
    x = torch.ones(1, 8)
    assert torch.equal(tuned(x), expected(x))
    assert list(tuned.state_dict()) == list(expected.state_dict())


def test_joint_tuning_takes_models_that_compute_with_the_weights_of_layers(task: Task) -> None:
    """Such weights are needed until their gradient is due, also those of layers of one shape."""

    def mixed(net: nn.Module, x: Tensor) -> Tensor:
        first, second = (net.get_submodule(name).weight for name in ("0", "2"))
        answer: Tensor = net(torch.nn.functional.linear(x, first * second))
        return answer

    def make() -> nn.Module:
        return two_layers()

    batches = [torch.ones(3, 8)]
    made = with_model(task, make)
    made = replace(
        made,
        implementation=SimpleNamespace(**{**vars(made.implementation), "loss": lambda n, x: mixed(n, x).sum()}),
    )
    model = make()
    masks = {name: torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.5 for name in ("0", "2")}
    apply_masks(model, masks)
    run_global_adaprune(made, model, masks, batches, settings=TuningSettings(steps=2))
    assert zeros_hold(model, masks)


def test_joint_tuning_keeps_how_a_weight_lies(task: Task, database: Database) -> None:
    model = task.model().to(memory_format=torch.channels_last)
    masks = stitch(model, OPTIONS, database).masks
    run_global_adaprune(task, model, masks, task.calibration(), settings=TuningSettings(steps=1))
    assert model.get_parameter("conv.weight").is_contiguous(memory_format=torch.channels_last)


def test_joint_tuning_follows_the_first_of_what_a_layer_returns(task: Task) -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 8), Pair(8, 8)).eval()

    before, tuned = make(), tuned_with(task, make, lambda net, x: net(x)[0])
    assert not torch.equal(tuned.get_parameter("1.weight"), before.get_parameter("1.weight"))


def test_joint_tuning_of_the_dense_model_has_nothing_to_do(task: Task) -> None:
    model = task.model()
    assert run_global_adaprune(task, model, {}, task.calibration(), settings=TuningSettings(steps=2)) == [
        0.0,
        0.0,
    ]


def test_joint_tuning_names_a_layer_whose_outputs_are_not_finite(task: Task) -> None:
    model = task.model()
    with torch.no_grad():
        model.get_parameter("fc.bias")[0] = torch.inf
    with pytest.raises(BadData, match="layer fc: its outputs"):
        run_global_adaprune(task, model, {}, task.calibration(), settings=TuningSettings(steps=1))


def test_joint_tuning_names_a_gradient_that_is_not_finite(task: Task, database: Database) -> None:
    model = task.model()
    masks = stitch(model, OPTIONS, database).masks
    model.get_parameter("fc.bias").register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(BadData, match=r"the gradient of fc.bias holds NaN .*: use `latbench prune --no-global`"):
        run_global_adaprune(task, model, masks, task.calibration(), settings=TuningSettings(steps=1))


def test_tuned_batch_norms_have_the_statistics_of_the_calibration_data(task: Task) -> None:
    model = task.model()
    norm = model.get_submodule("norm")
    assert list_batchnorms(model) == [norm]
    tune_batchnorm(task, model, task.calibration())
    outputs = [model.get_submodule("conv")(images).detach() for images, _ in task.calibration()]
    means = torch.stack([y.mean(dim=(0, 2, 3)) for y in outputs]).mean(dim=0)
    variances = torch.stack([y.var(dim=(0, 2, 3)) for y in outputs]).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, means)
    torch.testing.assert_close(norm.running_var, variances)
    assert norm.momentum == 0.1
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("better", [True, False])
def test_batch_norms_are_tuned_where_that_lowers_the_loss_and_else_as_they_were(better: bool, task: Task) -> None:
    model = task.model()
    old = {name: buffer.clone() for name, buffer in model.get_submodule("norm").named_buffers()}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        task.loss(model, batch)
        moved = (model.get_buffer("norm.running_mean") - old["running_mean"]).abs().sum()
        return -moved if better else moved

    judged = replace(task, implementation=SimpleNamespace(loss=loss))
    found = prune_model.tune_norms(judged, model, task.calibration())
    assert (found < 0) == better
    for name, buffer in model.get_submodule("norm").named_buffers():
        assert torch.equal(buffer, old[name]) != better


def test_batch_norms_that_cannot_be_tuned_stay_as_they_were(task: Task) -> None:
    """One value a channel has no variance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
    before = copy.deepcopy(model.state_dict())
    judged = replace(task, implementation=SimpleNamespace(loss=lambda net, x: net(x).square().sum()))
    batches = [torch.ones(1, 8)]
    assert prune_model.tune_norms(judged, model, batches) == prune_model.compute_calibration_loss(
        judged, model, batches
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.training


def test_a_frozen_model_cannot_be_trained_and_is_refused_before_any_work(task: Task, database: Database) -> None:
    frozen = with_model(task, lambda: task.implementation.model().requires_grad_(False))
    with pytest.raises(UsageError, match="task tiny: no parameter of its model requires a gradient"):
        prune_model.prune_model(
            frozen, profile_of(task, CHOICES), database, settings=prune_model.PruneSettings(recipe=Recipe())
        )
    assert prune_model.prune_model(frozen, profile_of(task, CHOICES), database).selected.name == "one-shot"


TARGETS = {"conv": (VectorWise(4), 0.75), "fc": (Unstructured(), 0.9), "head": (Dense(), 0.0)}


def test_fine_tuning_learns_under_its_masks(task: Task) -> None:
    model = task.model()
    before = prune_model.compute_calibration_loss(task, model, task.calibration())
    trained = train(task, model, TARGETS, Recipe(method="gmp", steps=40, learning_rate=1e-2))
    assert zeros_hold(model, trained.masks)
    assert set(trained.masks) == {"conv", "fc"}
    assert trained.masks["conv"].sum() == 8 * 54 / 4
    assert prune_model.compute_calibration_loss(task, model, task.calibration()) < before


def test_the_kept_stage_has_the_least_loss_and_the_seed_decides(task: Task, database: Database) -> None:
    profile = profile_of(task, CHOICES)
    result, again = (
        prune_model.prune_model(
            task,
            profile,
            database,
            settings=prune_model.PruneSettings(seed=3, recipe=Recipe(steps=10, learning_rate=1e-2)),
        )
        for _ in range(2)
    )
    assert [stage.name for stage in result.stages] == ["dense", "one-shot", "global", "gmp"]
    before, trained = min(result.stages[1:3], key=lambda stage: stage.loss), result.stages[3]
    compared = [stage.name for stage in result.stages if stage.fresh_loss is not None]
    assert compared == [before.name, trained.name]
    assert result.selected == min((before, trained), key=lambda stage: stage.fresh_loss or 0.0)
    assert result.selected.loss == prune_model.compute_calibration_loss(task, result.model, task.calibration())
    assert result.selected.score == task.score(result.model)
    assert zeros_hold(result.model, dict(result.masks))
    assert again.stages == result.stages
    assert hash_model(again.model) == hash_model(result.model)
    alone = prune_model.prune_model(task, profile, database, settings=prune_model.PruneSettings(joint=False))
    assert alone.stages == [replace(stage, fresh_loss=None) for stage in result.stages[:2]]


def test_one_shot_pruning_holds_the_weights_once(task: Task, database: Database) -> None:
    """Twice the weights and 1 GB is allowed; tests/experiments/memory.py measures it."""
    models: list[weakref.ref[nn.Module]] = []
    most = 0

    def model() -> nn.Module:
        models.append(weakref.ref(made := task.implementation.model()))
        return made

    def loss(model: nn.Module, batch: object) -> Tensor:
        nonlocal most
        most = max(most, sum(type(it) is type(model) for it in gc.get_objects()))
        return task.implementation.loss(model, batch)

    gc.collect()
    watched = replace(
        task, implementation=SimpleNamespace(**{**vars(task.implementation), "model": model, "loss": loss})
    )
    result = prune_model.prune_model(
        watched, profile_of(task, CHOICES), database, settings=prune_model.PruneSettings(joint=False)
    )
    assert [reference() for reference in models] == [result.model]
    assert most == 1


def test_joint_tuning_that_does_harm_is_undone(
    task: Task, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def harm(task: Task, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            model.get_parameter("head.bias")[0] += 50  # always the same answer

    alone = prune_model.prune_model(
        task, profile_of(task, CHOICES), database, settings=prune_model.PruneSettings(joint=False)
    )
    monkeypatch.setattr(prune_model, "run_global_adaprune", harm)
    result = prune_model.prune_model(task, profile_of(task, CHOICES), database)
    assert [stage.name for stage in result.stages] == ["dense", "one-shot", "global"]
    assert result.selected.name == "one-shot" and result.selected.loss == alone.selected.loss
    assert hash_model(result.model) == hash_model(alone.model)


def test_joint_tuning_holds_of_a_pruned_layer_its_kept_values_alone(task: Task, database: Database) -> None:
    model = task.model()
    masks = stitch(model, OPTIONS, database).masks
    numbers: list[dict[str, int]] = []

    def loss(net: nn.Module, batch: object) -> Tensor:
        if net is model:
            numbers.append({name: sum(p.numel() for p in net.get_submodule(name).parameters()) for name in CHOICES})
        return task.implementation.loss(net, batch)

    watched = replace(task, implementation=SimpleNamespace(**{**vars(task.implementation), "loss": loss}))
    run_global_adaprune(watched, model, masks, task.calibration(), settings=TuningSettings(steps=2))
    dense = task.model()
    biases = {
        name: sum(p.numel() for part, p in dense.get_submodule(name).named_parameters() if part == "bias")
        for name in CHOICES
    }
    assert numbers == [{name: int(masks[name].sum()) + biases[name] for name in CHOICES}] * 2
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in dense.named_parameters()
    }
    assert zeros_hold(model, masks)


def test_training_goes_on_from_one_shot_pruning_under_its_masks(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shfl-BW's row groups are found by a heuristic: drawn anew from other weights they would be others."""
    choices = {"conv": ("shflbw:4", 0.5), "fc": ("vector:4", 0.75)}
    built = Database(tmp_path, hash_model(task.model()))
    fill_database(task, task.model(), {layer: [Option(*choice)] for layer, choice in choices.items()}, built)
    profile = profile_of(task, choices)
    one_shot = hash_model(
        prune_model.prune_model(task, profile, built, settings=prune_model.PruneSettings(joint=False)).model
    )
    started: list[str] = []

    def seen(task: Task, model: nn.Module, *args: Any, **kwargs: Any) -> TrainingResult:
        started.append(hash_model(model))
        return train(task, model, *args, **kwargs)

    monkeypatch.setattr(prune_model, "train", seen)
    held = Recipe(method="held", start="one_shot", steps=40, learning_rate=1e-2, weight_decay=0.1)
    result = prune_model.prune_model(
        task, profile, built, settings=prune_model.PruneSettings(joint=False, recipe=held)
    )
    assert result.selected.name == "held"
    assert zeros_hold(result.model, dict(result.masks))
    for layer, choice in choices.items():
        assert torch.equal(result.masks[layer], built.get(layer, Option(*choice)).mask)
    assert started == [one_shot]


@pytest.mark.parametrize(
    ("missing", "recipe", "sentence"),
    [
        ("train_batches", Recipe(), r"task tiny has no train_batches\(rng\): leave --recipe and --train-budget out"),
        ("", Recipe(transposable="exact"), "layer conv: only N:M masks can be transposable, not vector:4"),
        (
            "",
            Recipe(method="structure_decay", settings={"stages": "geometric"}),
            "layer conv: geometric structure decay is for N:M patterns, not vector:4",
        ),
        (
            "",
            Recipe(method="structure_decay", settings={"stages": ["nm:8:16"]}),
            "layer conv: in structure decay's nm:8:16: .* needs input channels in multiples of 16",
        ),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused_before_any_work(
    missing: str, recipe: Recipe, sentence: str, task: Task, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {name: it for name, it in vars(task.implementation).items() if name != missing}
    monkeypatch.setattr(prune_model, "stitch", lambda *_: pytest.fail("work was done"))
    with pytest.raises(UsageError, match=sentence):
        prune_model.prune_model(
            replace(task, implementation=SimpleNamespace(**members)), profile_of(task, CHOICES), database,
            prune_model.PruneSettings(recipe=recipe),
        )  # fmt: skip


def test_a_profile_of_another_model_is_refused_in_one_sentence(task: Task, database: Database) -> None:
    with pytest.raises(BadData, match=r"of another model .*layer conv9, .* has no such layer"):
        prune_model.prune_model(task, profile_of(task, {"conv9": ("dense", 0.0)}), database)
    with pytest.raises(BadData, match=r"layer norm, .*BatchNorm2d has no sparse kernel"):
        prune_model.prune_model(task, profile_of(task, {"norm": ("dense", 0.0)}), database)
    with pytest.raises(BadData, match=r"model with other weights .0000"):
        prune_model.prune_model(task, replace(profile_of(task, CHOICES), model_hash="0000"), database)
    with pytest.raises(
        BadData, match=r"cannot be followed: layer conv: nm:2:4 needs input channels in multiples of 4"
    ):
        prune_model.prune_model(task, profile_of(task, {"conv": ("nm:2:4", 0.5)}), database)


def test_a_folder_gives_back_weights_masks_and_patterns(task: Task, database: Database, tmp_path: Path) -> None:
    profile = profile_of(task, {**CHOICES, "head": ("dense", 0.0)})
    model = task.model()
    masks = stitch(model, OPTIONS, database).masks
    manifest = save_pruned(tmp_path / "pruned", model, masks, profile, {"task": "tiny", "inputs": "x"})
    found, choices = load_pruned(tmp_path / "pruned", task.model())
    assert hash_model(found) == hash_model(model)
    assert list(choices) == ["conv", "fc", "head"]
    assert str(choices["conv"].pattern) == "vector:4"
    assert choices["head"].mask is None
    for name, mask in masks.items():
        assert np.array_equal(choices[name].mask, mask.numpy())
        assert manifest["layers"][name]["kept_weights"] == mask.sum()
    assert manifest["layers"]["fc"]["sparsity"] == 0.5
    assert "along" not in manifest["layers"]["fc"]
    assert (manifest["predicted_seconds"], manifest["layers"]["fc"]["predicted_seconds"]) == (2e-3, 1e-3)
    assert manifest["bytes"] == {name: (tmp_path / "pruned" / name).stat().st_size for name in FILES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["database", "pruned"]
    assert {choice.precision for choice in choices.values()} == {"float32"}
    halves = {name: replace(choice, precision="bfloat16") for name, choice in profile.layers.items()}
    save_pruned(tmp_path / "halves", model, masks, replace(profile, layers=halves), {"task": "tiny"})
    _, choices = load_pruned(tmp_path / "halves", task.model())
    found_so = {name: choice.precision for name, choice in choices.items()}
    assert found_so == {"conv": "bfloat16", "fc": "float32", "head": "bfloat16"}  # single weights have no such kernel


def test_a_damaged_or_foreign_folder_is_refused(task: Task, database: Database, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    model = task.model()
    save_pruned(pruned, model, stitch(model, OPTIONS, database).masks, profile_of(task, CHOICES), {})
    with pytest.raises(BadData, match=r"pruned from another model .*: bias is missing, here \(2,\)"):
        load_pruned(pruned, nn.Linear(2, 2))
    other = task.model()
    other.head = nn.Linear(16, 4)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(BadData, match=r"pruned from another model .*: head.bias is \(3,\) float32, here \(4,\)"):
        load_pruned(pruned, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    (pruned / "masks.safetensors").write_bytes((pruned / "masks.safetensors").read_bytes()[:-1])
    with pytest.raises(BadData, match=r"masks.safetensors: missing, or not as it was written"):
        load_pruned(pruned, task.model())
    with pytest.raises(BadData, match="is no pruned model"):
        load_pruned(tmp_path, task.model())
    manifest = json.loads((pruned / "manifest.json").read_text())
    (pruned / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(BadData, match="version 99, this latbench reads 3"):
        load_pruned(pruned, task.model())


def test_what_is_no_pruned_model_is_never_overwritten(task: Task, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(UsageError, match="is no pruned model: give another output folder"):
        save_pruned(tmp_path, task.model(), {}, profile_of(task, CHOICES), {})
    assert (tmp_path / "thesis.tex").read_text() == "irreplaceable"


def test_another_tools_manifest_makes_no_pruned_model(task: Task, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 3, "files": {"index.html": "0"}}))
    with pytest.raises(UsageError, match="is no pruned model: give another output folder"):
        save_pruned(tmp_path, task.model(), {}, profile_of(task, CHOICES), {})
    assert (tmp_path / "manifest.json").is_file()


def test_what_lies_beside_the_weights_stays_there_also_behind_a_link(
    task: Task, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "pruned").symlink_to(tmp_path / "disk")
    for _ in range(2):
        model = task.model()
        save_pruned(tmp_path / "pruned", model, stitch(model, OPTIONS, database).masks, profile_of(task, CHOICES), {})
        load_pruned(tmp_path / "pruned", task.model())
        (tmp_path / "disk" / "config.json").write_text("{}")
    assert (tmp_path / "pruned").is_symlink() and (tmp_path / "disk" / "config.json").read_text() == "{}"


def test_a_folder_whose_name_goes_on_is_another_one(tmp_path: Path) -> None:
    names = [".a.0123456789abcdef.training", ".a.b.0123456789abcdef.training", ".a.17.tmp", ".a.b.17.tmp"]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in list_hidden_siblings(tmp_path / "a", r"\d+\.tmp")] == [".a.17.tmp"]
    assert [path.name for path in list_hidden_siblings(tmp_path / "a", r"[0-9a-f]{16}\.training")] == [names[0]]


def test_a_killed_write_leaves_no_half_folder(task: Task, database: Database, tmp_path: Path) -> None:
    profile_of(task, CHOICES).save(tmp_path / "profile.json")
    dying = (
        "import os, signal, search.pruning.storage.model_folder as folder\n"
        "from pathlib import Path\n"
        "folder.describe_layers = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from latbench.cli.commands.prune import prune\n"
        f"prune({str(TASK)!r}, Path('profile.json'), Path('database'), Path('pruned'), joint=False)\n"
    )
    killed = subprocess.run([sys.executable, "-c", dying], cwd=tmp_path, env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "pruned").exists()
    living, reused = (tmp_path / f".pruned.{pid}.tmp" for pid in (os.getppid(), os.getpid()))
    living.mkdir()
    reused.mkdir()  # in a container the next prune often has the number of the one before
    prune_command(str(TASK), tmp_path / "profile.json", tmp_path / "database", tmp_path / "pruned", joint=False)
    load_pruned(tmp_path / "pruned", task.model())
    assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, "database", "profile.json", "pruned"]


def test_the_command_is_up_to_date_on_a_second_run_and_only_then(
    task: Task, database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, pruned = tmp_path / "profile.json", tmp_path / "pruned"
    profile_of(task, CHOICES).save(profile)

    def run(**options: object) -> str:
        prune_command(str(TASK), profile, database.folder, pruned, **options)  # type: ignore[arg-type]
        out, progress = capsys.readouterr()
        assert bool(progress) == ("is written" in out)  # lines where there is no terminal
        return out

    first = run()
    assert "pruned is written" in first
    assert "dense" in first
    assert "one-shot" in first
    assert "global" in first
    assert "pruned is up to date" in run()
    assert "pruned is written" in run(seed=1)
    (pruned / "model.safetensors").write_bytes(b"")
    assert "pruned is written" in run(seed=1)
    manifest = json.loads((pruned / "manifest.json").read_text())
    assert manifest["score_dense"] == task.score(task.model())
    assert manifest["score_pruned"] == task.score(load_pruned(pruned, task.model())[0])


def test_another_database_or_another_task_is_pruned_anew(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, profile, pruned = tmp_path / "mine.py", tmp_path / "profile.json", tmp_path / "pruned"
    mine.write_text(TASK.read_text())
    profile_of(task, CHOICES).save(profile)
    model = task.model()

    def run(method: str) -> str:
        filled = Database(tmp_path / method, hash_model(model), hash_pruning_inputs(task, method))
        fill_database(task, model, {layer: [option] for layer, option in OPTIONS.items()}, filled, method=method)
        prune_command(str(mine), profile, filled.folder, pruned, joint=False)
        return capsys.readouterr().out

    for method in ("magnitude", "obs"):
        assert "pruned is written" in run(method)
        assert f"layers pruned by {method};" in run(method)
        assert json.loads((pruned / "manifest.json").read_text())["one_shot"] == hash_pruning_inputs(task, method)
    assert "pruned is up to date" in run("obs")
    mine.write_text(TASK.read_text().replace("rng.integers(1000)", "rng.integers(2000)"))  # other training data
    assert "pruned is written" in run("obs")


def test_checkpoints_of_other_recipes_go_when_a_model_is_written(
    task: Task, database: Database, tmp_path: Path
) -> None:
    profile_of(task, CHOICES).save(tmp_path / "profile.json")
    (tmp_path / ".pruned.0123456789abcdef.training").write_bytes(b"half")
    other, half, being_written = (
        f".{name}.0123456789abcdef.training{ending}"
        for name, ending in (("other", ""), ("pruned", f".{NOBODY}.x_1.tmp"), ("pruned", f".{os.getppid()}.x_1.tmp"))
    )
    for name in (other, half, being_written):
        (tmp_path / name).write_bytes(b"half")
    prune_command(str(TASK), tmp_path / "profile.json", database.folder, tmp_path / "pruned", joint=False)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [other, being_written]


def test_what_killed_writers_of_packed_weights_left_goes_and_nothing_else(
    task: Task, database: Database, tmp_path: Path
) -> None:
    model, pruned = task.model(), tmp_path / "pruned"
    save_pruned(pruned, model, stitch(model, OPTIONS, database).masks, profile_of(task, CHOICES), {})
    names = [f".{name}.{NOBODY}.x_1.tmp" for name in ("packed.safetensors", "manifest.json", "thesis.tex")]
    for name in names:
        (pruned / name).write_bytes(b"half")
    save_packed(pruned)
    assert [path.name for path in pruned.glob(".*")] == [names[-1]]


def test_an_automatic_training_that_diverges_begins_again_more_slowly(
    task: Task, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = AutoRecipe(30.0, path=tmp_path / "chosen")
    chosen = Recipe(**{**auto.base.to_dict(), "steps": 20, "learning_rate": 1e30})
    auto.keep(chosen)
    monkeypatch.setattr(auto_recipe, "SLOWER", 1e32)
    settings = prune_model.PruneSettings(recipe=auto)
    result = prune_model.prune_model(task, profile_of(task, CHOICES), database, settings=settings)
    assert result.recipe == replace(chosen, learning_rate=1e-2)
    assert [stage.name for stage in result.stages] == ["dense", "one-shot", "global", "held"]
    assert json.loads((tmp_path / "chosen").read_text())["learning_rate"] == pytest.approx(1e-2)
    assert result.stages[-1].name == "held" and zeros_hold(result.model, dict(result.masks))


def test_the_command_trains_within_a_budget(
    task: Task, database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_of(task, CHOICES).save(tmp_path / "profile.json")

    def run(budget: str) -> dict[str, Any]:
        prune_command(
            str(TASK), tmp_path / "profile.json", tmp_path / "database", tmp_path / "pruned", train_budget=budget
        )
        return json.loads((tmp_path / "pruned" / "manifest.json").read_text())

    manifest = run("2s")
    assert [stage["name"] for stage in manifest["stages"]] == ["dense", "one-shot", "global", "held"]
    assert manifest["recipe"]["distill"] == "layers" and manifest["recipe"]["steps"] >= 10
    assert "loss on" in capsys.readouterr().out
    assert not list(tmp_path.glob(".pruned*"))  # neither checkpoint nor choice
    assert run("2s") == manifest
    assert "up to date" in capsys.readouterr().out


def test_a_training_that_always_diverges_leaves_the_untrained_model(
    task: Task, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")  # OpenVINO may have left the root logger at another one
    auto = AutoRecipe(30.0, path=tmp_path / "chosen")
    auto.keep(Recipe(**{**auto.base.to_dict(), "steps": 5, "learning_rate": 1e30}))
    checkpoint = Checkpoint(tmp_path / "training", seconds=0.0)
    settings = prune_model.PruneSettings(recipe=auto)
    profile = profile_of(task, CHOICES)
    result = prune_model.prune_model(task, profile, database, settings=settings, checkpoint=checkpoint)
    untrained = prune_model.prune_model(task, profile, database)
    assert hash_model(result.model) == hash_model(untrained.model)
    assert result.recipe is None and result.stages == untrained.stages
    assert "training diverged at a learning rate of 1e+30" in caplog.text
    assert "the model stays as it was before training" in caplog.text
    assert not checkpoint.path.exists()


def test_only_a_model_trained_for_this_profile_counts_as_trained(
    task: Task, database: Database, tmp_path: Path
) -> None:
    path, pruned = tmp_path / "profile.json", tmp_path / "pruned"
    profile_of(task, CHOICES).save(path)
    where = task, path, tmp_path / "database", pruned
    assert not is_trained(task, path, pruned)
    prune_to_folder(*where)
    assert not is_trained(task, path, pruned)
    prune_to_folder(*where, PruneRequest(train_seconds=1.0))
    assert is_trained(task, path, pruned)
    replace(profile_of(task, CHOICES), target=2.5).save(path)
    assert not is_trained(task, path, pruned)


def test_batch_norms_that_the_loss_never_calls_keep_their_statistics(task: Task) -> None:
    def model() -> nn.Module:
        net = task.model()
        net.other = nn.BatchNorm2d(8).eval()  # of another domain
        net.other.running_mean.fill_(3.0)
        return net

    net = model()
    tune_batchnorm(with_model(task, model), net, task.calibration())
    assert torch.equal(net.get_buffer("other.running_mean"), torch.full((8,), 3.0))
    assert not torch.equal(net.get_buffer("norm.running_mean"), task.model().get_buffer("norm.running_mean"))


def with_scores(task: Task, *scores: float) -> Task:
    """The task, whose score() returns these one after the other."""
    left = list(scores)
    members = {**vars(task.implementation), "score": lambda model: left.pop(0)}
    return replace(task, implementation=SimpleNamespace(**members))


def test_a_stage_without_a_score_is_kept_only_if_no_other_has_one(task: Task, database: Database) -> None:
    profile = profile_of(task, CHOICES)
    found = prune_model.prune_model(with_scores(task, 0.9, 0.5, 0.6), profile, database)
    assert found.selected.name == "one-shot"  # its loss is less
    found = prune_model.prune_model(with_scores(task, 0.9, math.nan, 0.6), profile, database)
    assert found.selected.name == "global" and [math.isnan(it.score) for it in found.stages] == [False, True, False]
    kept, scored = found.selected, replace(found.selected, loss=found.selected.loss / 2)
    assert scored.is_better_than(kept) and not replace(scored, score=math.nan).is_better_than(kept)
    with pytest.raises(BadData, match=r"score\(\) returned nan for the pruned model"):
        prune_model.prune_model(with_scores(task, 0.9, math.nan, math.nan), profile, database)
    with pytest.raises(BadData, match=r"score\(\) returned nan"):
        prune_model.prune_model(with_scores(task, math.nan), profile, database)


def test_stages_without_a_score_are_shown(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    score = "_left = [0.9, float('nan'), 0.5]\ndef score(model): return _left.pop(0)\n"
    mine.write_text(f"{TASK.read_text()}\n\n{score}")
    profile_of(load_task(str(mine)), CHOICES).save(tmp_path / "profile.json")
    prune_command(str(mine), tmp_path / "profile.json", database.folder, tmp_path / "pruned")
    stages = json.loads((tmp_path / "pruned" / "manifest.json").read_text())["stages"]
    assert [stage["score"] for stage in stages] == [0.9, None, 0.5]
    assert re.search(r"one-shot +none", capsys.readouterr().out)


def test_a_model_with_other_weights_than_before_is_searched_again_and_never_up_to_date(
    task: Task, database: Database, tmp_path: Path
) -> None:
    profile_of(task, CHOICES).save(tmp_path / "profile.json")
    arguments = tmp_path / "profile.json", database.folder, tmp_path / "pruned", PruneRequest(joint=False)
    assert prune_to_folder(task, *arguments)
    assert not prune_to_folder(task, *arguments)

    def model() -> nn.Module:
        net = task.model()
        with torch.no_grad():
            net.get_parameter("fc.bias").add_(1.0)
        return net

    with pytest.raises(BadData, match="searched for a model with other weights"):
        prune_to_folder(with_model(task, model), *arguments)


def test_an_automatic_training_whose_first_steps_diverge_leaves_the_untrained_model(
    task: Task, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")  # OpenVINO may have left the root logger at another one

    def train_batches(rng: np.random.Generator) -> Any:
        while True:
            images, labels = task.calibration()[0]
            yield images * torch.inf, labels

    members = {**vars(task.implementation), "train_batches": train_batches}
    task = replace(task, implementation=SimpleNamespace(**members))
    settings = prune_model.PruneSettings(recipe=AutoRecipe(30.0))
    result = prune_model.prune_model(task, profile_of(task, CHOICES), database, settings=settings)
    untrained = prune_model.prune_model(task, profile_of(task, CHOICES), database)
    assert result.recipe is None and result.stages == untrained.stages
    assert "the model stays as it was before training: training diverged" in caplog.text


@pytest.mark.parametrize("spec", ["nm:1:4", "vectornm:4:1:4"])
def test_groups_that_are_not_whole_keep_more_and_are_saved(spec: str, task: Task, tmp_path: Path) -> None:
    """Of five columns 1:4 keeps two: 60% are dropped, not 75%."""

    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(150, 5), nn.Linear(5, 1024), nn.Linear(1024, 3)).eval()

    task, net = with_model(task, model), model()
    option = Option(spec, 0.75)
    database = Database(tmp_path / "database", hash_model(net))
    fill_database(task, net, {"2": [option]}, database)
    masks = stitch(net, {"2": option}, database).masks
    assert masks["2"].float().mean() == pytest.approx(0.4)
    profile = profile_of(task, {"2": (spec, 0.75)})
    save_pruned(tmp_path / "pruned", net, masks, profile, {})
    assert load_pruned(tmp_path / "pruned", model())[1]["2"].pattern == parse(spec)
