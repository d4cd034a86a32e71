"""Tied weights on disk: stored once, and tied again after loading."""

from pathlib import Path

import pytest
import torch
from made_profile import make_profile
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transposed_linear import Conv1D

from latbench.errors import BadData
from search.artifacts.layer_database import hash_model
from search.pruning.storage.model_folder import load_pruned, save_pruned
from search.pruning.storage.packed_file import load_packed, save_packed
from search.pruning.storage.tied_tensors import find_tied, read_state, separate_tensors
from sparse_kernels.patterns import Unstructured
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix


class LanguageModel(nn.Module):
    """An embedding that is tied to the output, and two layers that may be tied to each other."""

    def __init__(self, tied: bool = True, twins: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 5000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if twins:
            self.second.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(self.embedding(tokens)).relu()))
        return result


def prune(model: nn.Module, layers: tuple[str, ...]) -> dict[str, Tensor]:
    """Prune layers to half of their weights, and return the masks."""
    masks = {}
    for layer in layers:
        module = model.get_submodule(layer)
        matrix = weight_matrix(module)
        mask = torch.from_numpy(Unstructured().mask(matrix.double().square().numpy(), 0.5))
        set_weight_matrix(module, torch.where(mask, matrix, 0.0))
        masks[layer] = mask
    return masks


def save(folder: Path, model: nn.Module, layers: tuple[str, ...]) -> None:
    """Prune layers of the model, and save it."""
    masks = prune(model, layers)
    profile = make_profile("own", model, dict.fromkeys(layers, ("unstructured", 0.5)))
    save_pruned(folder, model, masks, profile, {})


def size(model: nn.Module) -> int:
    """Return the bytes of the parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_tied_weight_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = LanguageModel().eval()
    save(tmp_path / "pruned", model, ("first",))
    file = tmp_path / "pruned" / "model.safetensors"
    assert size(model) < file.stat().st_size < size(model) + 1024
    assert "head.weight" not in load_file(file)
    found, _ = load_pruned(tmp_path / "pruned", LanguageModel())
    assert hash_model(found) == hash_model(model)
    assert found.head.weight.data_ptr() == found.embedding.weight.data_ptr()


def test_readers_of_safetensors_read_tied_weights(tmp_path: Path) -> None:
    model = LanguageModel().eval()
    save(tmp_path / "pruned", model, ("first",))
    other = LanguageModel()
    assert load_model(other, tmp_path / "pruned" / "model.safetensors") == (set(), [])
    assert hash_model(other) == hash_model(model)


def test_a_model_that_is_not_tied_gets_both_weights(tmp_path: Path) -> None:
    model = LanguageModel().eval()
    save(tmp_path / "pruned", model, ("first",))
    found, _ = load_pruned(tmp_path / "pruned", LanguageModel(tied=False))
    assert torch.equal(found.head.weight, model.embedding.weight)
    assert found.head.weight.data_ptr() != found.embedding.weight.data_ptr()


def test_weights_that_are_not_tied_are_not_loaded_as_if_they_were(tmp_path: Path) -> None:
    model = LanguageModel(tied=False).eval()
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)  # equal, and not the same
    save(tmp_path / "pruned", model, ("first",))
    assert "head.weight" in load_file(tmp_path / "pruned" / "model.safetensors")


def test_a_packed_file_stores_a_tied_weight_once(tmp_path: Path) -> None:
    model = LanguageModel().eval()
    save(tmp_path / "pruned", model, ("first",))
    path = save_packed(tmp_path / "pruned")
    assert path.stat().st_size < size(model)
    found, choices = load_packed(path, LanguageModel())
    assert hash_model(found) == hash_model(model) and set(choices) == {"first"}
    assert found.head.weight.data_ptr() == found.embedding.weight.data_ptr()
    headless = LanguageModel()
    del headless.head
    for other in (nn.Sequential(nn.Linear(2, 2)), headless):
        with pytest.raises(BadData, match="not the packed weights of this model"):
            load_packed(path, other)


def test_a_damaged_list_of_tied_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "pruned", LanguageModel().eval(), ("first",))
    path = save_packed(tmp_path / "pruned").rename(tmp_path / "alone.safetensors")
    content = path.read_bytes()
    for old, new in ((b'embedding.weight\\"}', b'second.weightxx\\"} '), (b'"tied":"{', b'"tied":"[')):
        assert old in content
        path.write_bytes(content.replace(old, new[: len(old)].ljust(len(old))))
        with pytest.raises(BadData):
            load_packed(path, LanguageModel())


@pytest.mark.parametrize("layers", [("first",), ("second",), ("first", "second")])
def test_tied_layers_that_are_pruned_keep_their_masks(layers: tuple[str, ...], tmp_path: Path) -> None:
    model = LanguageModel(twins=True).eval()
    save(tmp_path / "pruned", model, layers)
    _, expected = load_pruned(tmp_path / "pruned", LanguageModel(twins=True))
    found, choices = load_packed(save_packed(tmp_path / "pruned"), LanguageModel(twins=True))
    assert hash_model(found) == hash_model(model)
    assert set(choices) == set(expected) == set(layers)
    for layer in layers:
        assert (choices[layer].mask == expected[layer].mask).all()


def test_only_the_very_same_tensor_is_tied() -> None:
    base = torch.arange(12.0)
    state = {
        "whole": base, "same": base.view(12), "part": base[:6], "other": base[6:], "square": base.view(3, 4),
        "turned": base.view(3, 4).T, "equal": base.clone(), "none": torch.empty(0), "nothing": torch.empty(0),
    }  # fmt: skip
    assert find_tied(state) == {"same": "whole"}
    separate = separate_tensors(state)
    assert set(separate) == set(state) - {"same"}
    assert all(torch.equal(tensor, state[name]) and tensor.is_contiguous() for name, tensor in separate.items())
    addresses = [tensor.data_ptr() for tensor in separate.values() if tensor.numel()]
    assert len(set(addresses)) == len(addresses)
    assert separate["whole"].data_ptr() == base.data_ptr()  # not copied without need


def test_names_that_are_no_tensors_are_no_tied_ones(tmp_path: Path) -> None:
    model = LanguageModel().eval()
    save(tmp_path / "pruned", model, ("first",))
    file = tmp_path / "pruned" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    state, tied = read_state(file)
    assert tied == {"head.weight": "embedding.weight"} and set(state) == set(model.state_dict())


def test_weights_that_lie_in_other_orders_come_back_as_they_were(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Conv1D(16, 16), Conv1D(8, 16), nn.Conv1d(8, 8, 3), nn.Conv2d(4, 4, 3))

    model = make().eval()
    save(tmp_path / "pruned", model, ("0", "1", "2", "3"))
    found, choices = load_pruned(tmp_path / "pruned", make())
    packed, same = load_packed(save_packed(tmp_path / "pruned"), make())
    assert hash_model(found) == hash_model(packed) == hash_model(model)
    for name, choice in choices.items():
        assert choice.mask is not None and same[name].mask is not None
        kept = weight_matrix(model.get_submodule(name)) != 0
        assert torch.equal(torch.from_numpy(choice.mask), kept) and (same[name].mask == choice.mask).all()
