"""A pruned model comes back from its folder with its masks, and a folder that changed is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from latbench.errors import BadData
from search import pruned
from search.profile import LayerChoice, Profile
from sparse_kernels.nn import set_weight_matrix, weight_matrix
from sparse_kernels.patterns import parse


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 7)).eval()


def profile() -> Profile:
    layers = {
        "0": LayerChoice("vector:4", 0.5, 1e-3, 1e-3, 1e-3, 0.1),
        "3": LayerChoice("dense", 0.0, 1e-3, 1e-3, 1e-3, 0.0),
    }
    numbers = dict.fromkeys([
        "target", "dense_seconds", "dense_seconds_low", "dense_seconds_high", "fixed_seconds", "fixed_seconds_low",
        "fixed_seconds_high", "predicted_seconds", "predicted_low", "predicted_high", "loss", "error", "bound",
    ], 1.0)  # fmt: skip
    texts = dict.fromkeys(["task", "device", "dense_engine", "strategy", "table_hash", "model_hash", "inputs"], "x")
    return Profile(layers=layers, backend="numba", threads=1, batch=3, ceiling=None, seed=0, **numbers, **texts)


def written(folder: Path) -> tuple[nn.Module, Tensor]:
    model = network()
    matrix = weight_matrix(model[0])
    mask = torch.from_numpy(parse("vector:4").mask(matrix.square().numpy(), 0.5))
    kept = torch.where(mask, matrix, 0.0)
    kept[mask.nonzero()[0, 0], mask.nonzero()[0, 1]] = 0.0  # a weight that is kept and happens to be zero
    set_weight_matrix(model[0], kept)
    pruned.save(folder, model, {"0": mask}, profile(), {"method": "test"})
    return model, mask


def test_weights_masks_profile_and_manifest_come_back(tmp_path: Path) -> None:
    model, mask = written(tmp_path)
    found = pruned.load(tmp_path, network())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.model.parameters(), strict=True))
    assert torch.equal(found.masks["0"], mask)
    assert (found.profile, found.manifest["method"]) == (profile(), "test")


def test_the_converted_model_is_the_same_function(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    x = torch.randn(3, 2, 5, 5)
    converted = pruned.load(tmp_path, network()).convert((x,))
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))
    kinds = [type(module).__name__ for module in converted.modules()]
    assert "SparseConv2d" in kinds
    assert "SparseLinear" in kinds


def test_a_folder_that_is_none_or_changed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="is no pruned model"):
        pruned.load(tmp_path, network())
    written(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BadData, match=r"model.safetensors is not the file that was written"):
        pruned.load(tmp_path, network())
    weights.unlink()
    with pytest.raises(BadData, match=r"model.safetensors is missing"):
        pruned.load(tmp_path, network())
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(BadData, match="not the manifest"):
        pruned.load(tmp_path, network())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BadData, match="do not fit the task's model"):
        pruned.load(tmp_path, nn.Sequential(nn.Linear(3, 4)))


def test_weights_outside_their_mask_are_refused(tmp_path: Path) -> None:
    model, mask = written(tmp_path)
    pruned.save(tmp_path, network(), {"0": mask}, profile(), {})
    with pytest.raises(BadData, match="layer 0 has weights where its mask has none"):
        pruned.load(tmp_path, network())
    pruned.save(tmp_path, model, {}, profile(), {})
    with pytest.raises(BadData, match="layer 0 has no mask"):
        pruned.load(tmp_path, network())
