"""Models with layers in eight bits: in the database, tuned, trained, in a folder, and on our kernels."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_profile import make_profile
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import Profile, read_profile
from search.loss.evaluator import LossEvaluator
from search.problem.layers import DENSE_OPTION, Option
from search.pruning import prune_model
from search.pruning.forward_hooks import register_forward_hooks
from search.pruning.one_shot.fill_database import fill_database
from search.pruning.one_shot.hessian import extract_input_rows
from search.pruning.one_shot.stitch import stitch
from search.pruning.quantization.rounded_inputs import read_in_steps, read_inputs_in_steps
from search.pruning.quantization.rounded_training import compute_in_steps, round_layers
from search.pruning.storage.model_folder import load_pruned, read_manifest, save_pruned
from search.pruning.storage.packed_file import load_packed, save_packed
from search.pruning.training.recipe import Recipe
from search.task import Task, load_task
from sparse_kernels.convert import convert
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales, round_to_steps
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = Path(__file__).parents[2] / "pruning_task.py"
OPTIONS = {"conv": Option("vector:4", 0.75, "int8"), "fc": Option("block:4x4", 0.5, "int8")}
EVERY = {
    "conv": [OPTIONS["conv"], Option("vector:4", 0.75)],
    "fc": [OPTIONS["fc"], Option("dense", 0.0, "int8"), DENSE_OPTION, Option("dense", 0.0, "bfloat16")],
}


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


@pytest.fixture
def database(task: Task, tmp_path: Path) -> Database:
    model = task.model()
    filled = Database(tmp_path / "database", hash_model(model))
    assert fill_database(task, model, EVERY, filled) == 4  # dense layers that stay as they are need no entry
    return filled


def profile_of(task: Task, options: dict[str, Option]) -> Profile:
    made = make_profile("tiny", task.model(), {name: (it.pattern, it.sparsity) for name, it in options.items()})
    layers = {name: replace(made.layers[name], precision=it.precision) for name, it in options.items()}
    return replace(made, layers=layers, precisions="float32,int8")


def are_steps(model: nn.Module, quantizations: dict[str, Quantization]) -> bool:
    matrices = {name: weight_matrix(model.get_submodule(name)).numpy() for name in quantizations}
    return all(np.array_equal(round_to_steps(it, quantizations[name].scales), it) for name, it in matrices.items())


def collect_rows(task: Task, layer: str) -> Tensor:
    """The rows of a layer's matrix product on the calibration data."""
    rows: list[Tensor] = []

    def add(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        rows.append(extract_input_rows(module, args[0]).double())

    model = task.model()
    with torch.no_grad(), register_forward_hooks(model, {layer: add}):
        for batch in task.calibration():
            task.loss(model, batch)
    return torch.cat(rows)


def test_entries_are_rounded_under_the_mask_of_the_entry_in_float32(task: Task, database: Database) -> None:
    exact, rounded = database.get("conv", EVERY["conv"][1]), database.get("conv", OPTIONS["conv"])
    assert exact.quantization is None and rounded.quantization is not None
    assert torch.equal(exact.mask, rounded.mask)
    whole = (rounded.weight / torch.from_numpy(rounded.quantization.scales)[:, None]).round()
    assert whole.abs().max() == 127 and not whole[~rounded.mask].any()
    assert (rounded.weight - exact.weight).abs().max() < 0.1 * exact.weight.abs().max()
    assert database.error("conv", OPTIONS["conv"]) > database.error("conv", EVERY["conv"][1])
    assert database.error("fc", Option("dense", 0.0, "bfloat16")) == 0.0


@pytest.mark.parametrize(("layer", "option"), [("conv", OPTIONS["conv"]), ("fc", EVERY["fc"][1])])
def test_the_error_is_that_of_the_outputs_with_rounded_weights_and_inputs(
    task: Task, database: Database, layer: str, option: Option
) -> None:
    entry, x = database.get(layer, option), collect_rows(task, layer)
    assert entry.quantization is not None and entry.quantization.input_range is not None
    dense = weight_matrix(task.model().get_submodule(layer)).double()
    read = read_in_steps(x, entry.quantization.input_range)
    expected, found = x @ dense.T, read @ entry.weight.double().T
    measured = float((found - expected).square().sum() / expected.square().sum())
    # Errors of inputs are counted as independent of each other and of what pruning loses.
    assert entry.error == pytest.approx(measured, rel=0.15)


def test_an_interrupted_build_rounds_what_it_had_pruned(task: Task, tmp_path: Path) -> None:
    model = task.model()
    whole, parts = (Database(tmp_path / name, hash_model(model)) for name in ("whole", "parts"))
    fill_database(task, model, EVERY, whole)
    fill_database(task, model, {"conv": EVERY["conv"][1:]}, parts)
    assert fill_database(task, model, EVERY, parts) == 3
    for layer, option in OPTIONS.items():
        assert torch.equal(whole.get(layer, option).weight, parts.get(layer, option).weight)
        assert whole.error(layer, option) == parts.error(layer, option)


def test_entries_in_eight_bits_and_others_are_not_mixed_up(task: Task, database: Database) -> None:
    entry = database.get("conv", OPTIONS["conv"])
    with pytest.raises(TypeError, match="if and only if it is in eight bits"):
        database.put("conv", Option("vector:4", 0.75), entry)
    with pytest.raises(TypeError, match="if and only if it is in eight bits"):
        database.put("conv", OPTIONS["conv"], replace(entry, quantization=None))
    assert entry.quantization is not None
    with pytest.raises(TypeError, match="one range for all inputs"):
        no_range = replace(entry.quantization, input_range=None)
        database.put("conv", OPTIONS["conv"], replace(entry, quantization=no_range))
    [path] = (database.folder / "conv").glob("*.int8.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadData, match="damaged; delete it"):
        database.get("conv", OPTIONS["conv"])


def test_losses_are_those_of_layers_that_read_their_inputs_in_steps(task: Task, database: Database) -> None:
    evaluator = LossEvaluator(task, task.model(), list(OPTIONS), database)
    dense = [DENSE_OPTION] * 2
    before = evaluator.losses(tuple(dense), range(2))
    both = evaluator.losses(tuple(OPTIONS.values()), range(2))
    mixed = evaluator.losses((OPTIONS["conv"], Option("dense", 0.0, "bfloat16")), range(2))
    assert evaluator.losses(tuple(dense), range(2)) == before  # nothing is left behind
    for wanted, found in ((OPTIONS, both), ({"conv": OPTIONS["conv"]}, mixed)):
        model = task.model()
        stitched = stitch(model, wanted, database)
        with read_inputs_in_steps(model, stitched.quantizations):
            again = LossEvaluator(task, model, ["conv"], database)  # norms are prepared alike
            assert again.losses((DENSE_OPTION,), range(2)) == pytest.approx(found, rel=1e-6)
        assert len({*before, *both, *mixed}) == 6


def test_inputs_are_read_by_position_and_by_name_and_end_at_the_ends() -> None:
    layer, reading = nn.Linear(3, 2), InputRange.covering(-1.0, 1.55)  # steps of 0.01
    x = torch.tensor([[0.004, 0.006, -0.5], [9.0, -9.0, 0.0]])
    expected = torch.tensor([[0.0, 0.01, -0.5], [1.55, -1.0, 0.0]])
    torch.testing.assert_close(read_in_steps(x, reading), expected)
    model = nn.ModuleDict({"layer": layer})
    quantization = Quantization(find_scales(layer.weight.detach().numpy()), reading)
    with torch.no_grad(), read_inputs_in_steps(model, {"layer": quantization}):
        torch.testing.assert_close(layer(x), nn.functional.linear(expected, layer.weight, layer.bias))
        torch.testing.assert_close(layer(input=x), layer(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    with (
        pytest.raises(ValueError, match="no range for all inputs"),
        read_inputs_in_steps(model, {"layer": replace(quantization, input_range=None)}),
    ):
        pass


def test_gradients_pass_as_if_nothing_was_rounded() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 5)
    model, x = nn.ModuleDict({"layer": layer}), torch.randn(6, 8, requires_grad=True)
    reading = InputRange.covering(-1.0, 1.0)
    scales = find_scales(layer.weight.detach().numpy())
    with torch.no_grad():
        rounded = copy.deepcopy(layer)
        set_weight_matrix(rounded, torch.from_numpy(round_to_steps(layer.weight.numpy(), scales)))
    inside = x.detach().abs() <= 1.0 + reading.scale / 2
    read = read_in_steps(x.detach(), reading).requires_grad_()
    rounded(read).square().sum().backward()
    quantizations = {"layer": Quantization(scales, reading)}
    with compute_in_steps(model, quantizations):
        layer(x).square().sum().backward()
    found = round_layers(model, quantizations)
    assert x.grad is not None and read.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, rounded.weight.grad)
    torch.testing.assert_close(x.grad, torch.where(inside, read.grad, 0.0))
    assert are_steps(model, found) and torch.equal(layer.weight, rounded.weight)
    assert "weight" in dict(layer.named_parameters()) and "weight" not in vars(layer)


@pytest.mark.parametrize("recipe", [None, Recipe(method="gmp", steps=20)], ids=["tuned", "trained"])
def test_a_model_is_whole_numbers_of_steps_after_every_stage(
    task: Task, database: Database, tmp_path: Path, recipe: Recipe | None
) -> None:
    profile = profile_of(task, OPTIONS)
    settings = prune_model.PruneSettings(recipe=recipe)
    result = prune_model.prune_model(task, profile, database, settings)
    assert [stage.name for stage in result.stages][:3] == ["dense", "one-shot", "global"]
    assert set(result.quantizations) == {"conv", "fc"}
    assert are_steps(result.model, dict(result.quantizations))
    with torch.no_grad(), read_inputs_in_steps(result.model, result.quantizations):
        losses = [task.loss(result.model, batch).item() for batch in task.calibration()]
    assert result.selected.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_a_folder_gives_back_the_model_that_our_kernels_run(task: Task, database: Database, tmp_path: Path) -> None:
    profile, folder = profile_of(task, {**OPTIONS, "head": DENSE_OPTION}), tmp_path / "pruned"
    result = prune_model.prune_model(task, profile_of(task, OPTIONS), database)
    save_pruned(folder, result.model, result.masks, profile, {}, result.quantizations)
    assert read_profile(folder / "profile.json") == profile
    layers = read_manifest(folder)["layers"]
    assert (layers["fc"]["precision"], layers["head"]["precision"]) == ("int8", "float32")
    # A byte a value and four for the scale of a row, beside the positions: of 4x4 blocks two bytes each.
    assert layers["fc"]["packed_bytes"] < 0.4 * layers["fc"]["kept_weights"] * 4 + 16 * 4
    x = task.example().arguments[0]
    with torch.no_grad(), read_inputs_in_steps(result.model, result.quantizations):
        expected = result.model(x)
    packed = save_packed(folder)
    for load, path in ((load_pruned, folder), (load_packed, packed)):
        loaded, choices = load(path, task.model())
        assert hash_model(loaded) == hash_model(result.model)
        for name, quantization in result.quantizations.items():
            read = choices[name].quantization
            assert read is not None and read.input_range == quantization.input_range
            assert np.array_equal(read.scales, quantization.scales)
        assert choices["head"].precision == "float32"
        fast = convert(loaded, choices, (x,))
        # Where 1 / scale is rounded, an input may be read one step off.
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=0.01 * float(expected.abs().max()))
    dense = (sum(p.numel() for p in task.model().parameters())) * 4
    assert packed.stat().st_size < dense


def test_a_folder_is_refused_whose_weights_are_not_its_steps(task: Task, database: Database, tmp_path: Path) -> None:
    profile, model = profile_of(task, OPTIONS), task.model()
    stitched = stitch(model, OPTIONS, database)
    for quantizations, said in (
        ({}, "the profile has it in int8, and there is no quantization of it"),
        ({**stitched.quantizations, "conv": replace(stitched.quantizations["conv"], scales=np.ones(3, np.float32))},
         "has 3 scales, and its weight 8 rows"),
        ({**stitched.quantizations, "conv": replace(stitched.quantizations["conv"], scales=np.ones(8, np.float32))},
         "its weights are not whole numbers of steps"),
        ({**stitched.quantizations, "conv": replace(stitched.quantizations["conv"], input_range=None)},
         "needs one range for all of its inputs"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            save_pruned(tmp_path / "pruned", model, stitched.masks, profile, {}, quantizations)
    float32 = profile_of(task, {name: replace(it, precision="float32") for name, it in OPTIONS.items()})
    with pytest.raises(UsageError, match="it has a quantization, and the profile has it in float32"):
        save_pruned(tmp_path / "pruned", model, stitched.masks, float32, {}, stitched.quantizations)
