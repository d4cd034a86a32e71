"""One answer to which layers can be pruned, with the reason and the path of all others."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transposed_linear import Conv1D

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseConv1d, SparseLayer, SparseLinear
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.prunable_layers import (
    as_matrix,
    as_weight,
    bake_weights,
    set_weight_matrix,
    survey_layers,
    weight_matrix,
)


class Named(nn.Linear):
    """A class of the user's that computes what a Linear does."""


class Scaled(nn.Linear):
    """A class of the user's that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def make_model() -> nn.Module:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 6), "named": Named(4, 6), "sequence": nn.Conv1d(4, 6, 3),
            "image": nn.Conv2d(4, 6, (1, 3)), "gpt": Conv1D(6, 4), "scaled": Scaled(4, 6),
            "grouped": nn.Conv1d(4, 6, 3, groups=2), "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "circular": nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), "volume": nn.Conv3d(4, 6, 1),
            "embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False), "lazy": nn.LazyLinear(3),
            "float16": nn.Linear(4, 6).half(), "computed": parametrizations.weight_norm(nn.Linear(4, 6)),
            "hooked": nn.Linear(4, 6), "replaced": nn.Linear(4, 6), "meta": nn.Linear(4, 6, device="meta"),
            "attention": nn.MultiheadAttention(4, 2), "norm": nn.LayerNorm(4), "lstm": nn.LSTM(4, 4),
        }
    )  # fmt: skip
    model["head"].weight = model["embedding"].weight
    model["hooked"].register_forward_hook(lambda module, given, result: result)
    model["replaced"].forward = lambda x: x
    return model


def test_every_layer_is_taken_or_left_out_with_its_reason_and_path() -> None:
    survey = survey_layers(nn.ModuleDict({"body": make_model()}))
    assert list(survey.taken) == [f"body.{name}" for name in ("linear", "named", "sequence", "image", "gpt")]
    reasons = {
        "scaled": "computes something of its own", "grouped": "a grouped convolution (2 groups)",
        "depthwise": "a depthwise convolution (4 groups)", "circular": "padding mode 'circular'",
        "volume": "a Conv3d has no sparse kernel", "embedding": "its weight is shared with body.head",
        "head": "its weight is shared with body.embedding", "lazy": "not initialized yet",
        "float16": "its weight is float16, not float32", "computed": "its weight is computed at each call",
        "hooked": "it has hooks", "replaced": "its forward was replaced", "meta": "no numbers (device meta)",
        "attention": "attention reads its projections", "attention.out_proj": "not called but read",
        "lstm": "an LSTM has no sparse kernel",
    }  # fmt: skip
    assert list(survey.left_out) == [f"body.{name}" for name in reasons]
    for name, reason in reasons.items():
        assert reason in survey.left_out[f"body.{name}"]


@pytest.mark.parametrize("name", ["linear", "sequence", "image", "gpt"])
def test_a_matrix_is_the_weight_in_the_order_of_the_inputs(name: str) -> None:
    layer = make_model()[name]
    assert isinstance(layer, nn.Module)
    matrix, before = weight_matrix(layer).clone(), copy.deepcopy(layer)
    assert matrix.shape[0] == 6
    assert torch.equal(as_weight(layer, as_matrix(layer, layer.weight)), layer.weight)
    set_weight_matrix(layer, 2 * matrix)
    assert torch.equal(layer.weight, 2 * before.weight)
    x = {"sequence": torch.randn(2, 4, 8), "image": torch.randn(2, 4, 5, 8)}.get(name, torch.randn(3, 4))
    with torch.no_grad():
        y = layer(x)
        if x.ndim == 2:
            expected = x @ (2 * matrix).T + layer.bias
        else:  # taps of each output, of every channel
            expected = torch.einsum("mtc,bc...lt->bm...l", (2 * matrix).view(6, 3, 4), x.unfold(-1, 3, 1))
            expected = expected + layer.bias.view(-1, *[1] * (x.ndim - 2))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
        nn.utils.weight_norm, nn.utils.spectral_norm, lambda it: prune.l1_unstructured(it, "weight", 0.3),
    ],
)  # fmt: skip
def test_baked_weights_compute_the_same_and_leave_copies_alone(change) -> None:  # type: ignore[no-untyped-def]
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).eval()
    twin = copy.deepcopy(plain)
    for model in (plain, twin):
        change(model[0])
    copied = copy.deepcopy(plain) if hasattr(plain[0], "parametrizations") else None
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = plain(x)
    assert bake_weights(plain) == ["0"]
    assert list(survey_layers(plain).taken) == ["0", "1"]
    assert isinstance(plain[0].weight, nn.Parameter) and plain[0].weight.requires_grad
    assert not plain[0]._forward_pre_hooks and type(plain[0]) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(plain(x), expected)
        if copied is not None:
            torch.testing.assert_close(copied(x), expected)
    assert bake_weights(plain) == []


def test_layers_of_every_kind_are_converted_and_folded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.named, self.sequence = Conv1D(16, 8), Named(16, 8), nn.Conv1d(8, 16, 3, padding=1)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.named(torch.relu(self.gpt(x)))
            return torch.relu(self.norm(self.sequence(x.transpose(1, 2))))

    model, x = Model().eval(), torch.randn(2, 11, 8)
    choices = {}
    for name, layer in survey_layers(model).taken.items():
        mask = VectorWise(8).mask(weight_matrix(layer).abs().numpy(), 0.5)
        choices[name] = LayerPattern(VectorWise(8), mask)
        set_weight_matrix(layer, weight_matrix(layer) * torch.from_numpy(mask))
    with torch.no_grad():
        converted = convert(model, choices, (x,))
        torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    layers = [module for module in converted.modules() if isinstance(module, SparseLayer)]
    assert [type(layer) for layer in layers] == [SparseLinear, SparseLinear, SparseConv1d]
    assert [layer.activation for layer in layers] == ["relu", None, "relu"]


def test_a_layer_that_is_left_out_is_refused_with_the_same_reason() -> None:
    model = make_model()
    left_out = survey_layers(model).left_out
    for name in ("scaled", "grouped", "depthwise", "circular", "volume", "hooked", "replaced", "attention.out_proj"):
        with pytest.raises(ValueError, match="layer") as refused:
            convert(nn.ModuleDict({key: it for key, it in model.items() if key not in ("lazy", "meta")}),
                    {name: LayerPattern(Dense())}, (torch.randn(2, 4),))  # fmt: skip
        assert str(refused.value) == f"layer {name!r}: {left_out[name]}"


def test_a_sparse_layer_answers_what_models_ask_a_weight() -> None:
    linear, conv, sequence = nn.Linear(8, 6), nn.Conv2d(4, 8, 3), nn.Conv1d(4, 8, 3)
    for layer in (linear, conv, sequence):
        x = torch.randn(2, layer.weight.shape[1], *[5] * (layer.weight.ndim - 2))
        sparse = convert(nn.Sequential(layer), {"0": LayerPattern(Dense())}, (x,)).get_submodule("0")
        weight = sparse.weight
        assert (weight.shape, weight.dtype, weight.device) == (
            layer.weight.shape, torch.float32, torch.device("cpu")
        )  # fmt: skip
        assert (weight.size(0), weight.dim(), weight.numel()) == (
            layer.weight.size(0), layer.weight.dim(), layer.weight.numel(),
        )  # fmt: skip
        with pytest.raises(AttributeError, match="keeps its weight packed"):
            weight.abs()
    assert (SparseLinear.from_dense(linear, Dense(), None).in_features, linear.in_features) == (8, 8)


def test_weights_that_share_memory_are_left_out_also_as_two_parameters() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    model["b"].weight.data = model["a"].weight.data
    model["c"].weight = nn.Parameter(model["a"].weight.T)
    survey = survey_layers(model)
    assert not survey.taken
    assert survey.left_out["a"] == "its weight is shared with b, c, where it would be pruned too"
