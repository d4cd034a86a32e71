"""A pruned folder and a dense model become a module that is called as any other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_profile import make_profile
from torch import Tensor, nn

from latbench.errors import BadData, LatbenchError, UsageError
from search.pruning.masks.layer_targets import resolve_targets
from search.pruning.storage.model_folder import save_pruned
from search.whole_model.deployed_model import load_deployed
from sparse_kernels.nn import SparseLayer
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

CHOICES = {"first": ("unstructured", 0.75)}


class Net(nn.Module):
    def __init__(self, wide: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, wide), nn.Linear(wide, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(torch.relu(self.first(x))) * scale


@pytest.fixture
def pruned(tmp_path: Path) -> tuple[Path, nn.Module]:
    """The folder of a pruned model, and the pruned model as torch runs it."""
    model = Net().eval()
    masks = {}
    for layer, target in resolve_targets(CHOICES, model).items():
        module = model.get_submodule(layer)
        masks[layer] = target.mask(weight_matrix(module).square())
        set_weight_matrix(module, torch.where(masks[layer], weight_matrix(module), 0.0))
    save_pruned(tmp_path / "pruned", model, masks, replace(make_profile("tiny", model, CHOICES), threads=1), {})
    return tmp_path / "pruned", model


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("example", ["tensor", "tuple", "keywords"])
def test_a_dense_model_with_any_weights_becomes_the_pruned_one(pruned: tuple[Path, nn.Module], example: str) -> None:
    folder, expected = pruned
    x = torch.randn(8, 32)
    given = {"tensor": x, "tuple": (x, 2.0), "keywords": {"x": x, "scale": 2.0}}[example]
    dense = Net()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    fast = load_deployed(folder, dense, given)
    assert any(isinstance(module, SparseLayer) for module in fast.modules()) and not fast.training
    for batch in (1, 8, 33):
        x = torch.randn(batch, 32)
        torch.testing.assert_close(fast(x), expected(x).detach())
    assert dense.training and all(torch.equal(before[name], it) for name, it in dense.state_dict().items())


def test_it_runs_with_the_threads_of_the_profile_or_with_those_given(pruned: tuple[Path, nn.Module]) -> None:
    folder, _ = pruned
    torch.set_num_threads(2)
    load_deployed(str(folder), Net(), torch.randn(8, 32))
    assert torch.get_num_threads() == 1
    load_deployed(folder, Net(), torch.randn(8, 32), threads=2)
    assert torch.get_num_threads() == 2


def refused(folder: Path, model: object, example: object) -> str:
    """The sentence of a refusal."""
    with pytest.raises(LatbenchError) as refusal:
        load_deployed(folder, model, example)  # type: ignore[arg-type]
    sentence = str(refusal.value)
    assert "\n" not in sentence
    return sentence


def test_what_does_not_fit_is_refused_in_a_sentence(pruned: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, _ = pruned
    x = torch.randn(8, 32)
    assert "pruned from another model than the given one: first.bias is (64,)" in refused(folder, Net(16), x)
    assert "first.bias is (64,) float32, here (64,) float16" in refused(folder, Net().half(), x)
    assert "the model is a type" in refused(folder, Net, x)
    assert "the example is a list" in refused(folder, Net(), [x])
    assert "called with the example inputs, raised RuntimeError" in refused(folder, Net(), torch.randn(8, 31))
    assert "has no manifest.json" in refused(tmp_path / "nothing", Net(), x)
    assert f"give the one of its pruned model, {folder}" in refused(tmp_path, Net(), x)


def test_a_damaged_folder_is_refused(pruned: tuple[Path, nn.Module]) -> None:
    folder, _ = pruned
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(BadData, match=r"model\.safetensors: missing, or not as it was written"):
        load_deployed(folder, Net(), torch.randn(8, 32))


def test_a_model_for_deepsparse_is_refused(tmp_path: Path) -> None:
    model = Net()
    profile = replace(make_profile("tiny", model, {"first": ("dense", 0.0)}), backend="deepsparse")
    save_pruned(tmp_path / "pruned", model, {}, profile, {})
    with pytest.raises(UsageError, match="was pruned for DeepSparse"):
        load_deployed(tmp_path / "pruned", model, torch.randn(8, 32))


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(8, 32)
    with pytest.raises(UsageError, match="the profile has no layer"):
        save_pruned(tmp_path / "empty", model, {}, make_profile("tiny", model, {}), {})
    assert not (tmp_path / "empty").exists()
    save_pruned(tmp_path / "dense", model, {}, make_profile("tiny", model, {"first": ("dense", 0.0)}), {})
    assert json.loads((tmp_path / "dense" / "manifest.json").read_text())["layers"].keys() == {"first"}
    torch.testing.assert_close(load_deployed(tmp_path / "dense", Net(), x)(x), model.eval()(x).detach())
