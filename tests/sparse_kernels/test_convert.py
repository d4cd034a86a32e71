"""A converted model is the masked model: whatever is folded, wherever a layer sits."""

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.codegen import cpu_target as target
from sparse_kernels.fx_graphs import drop_identities
from sparse_kernels.nn import SparseConv2d, SparseLinear
from sparse_kernels.patterns import Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.prunable_layers import set_weight_matrix, survey_layers, weight_matrix
from sparse_kernels.same_results import CONVERTED, FOLDED, same_results
from sparse_kernels.tensors.torch_tiles import TokenTiles


class Residual(nn.Module):
    """conv-bn-relu, conv-bn, add, relu: only the first activation has a layer to go into."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Untraceable(nn.Module):
    """Python looks at a value: the whole resists torch.fx, the parts do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = -x
        return self.head(self.inner(x))


class Shared(nn.Module):
    """One layer called twice, once with an activation after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.relu(self.layer(x)))


class ReadTwice(nn.Module):
    """The layer's output is read before and after its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + F.relu(y)


class NormOverTokens(nn.Module):
    """BatchNorm1d after a Linear on (batch, tokens, features) normalises tokens, which no weight can take over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Mlp(nn.Module):
    """Four layers in a row: nothing, an activation of the kernels', and others between them; then a sum."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 40), (40, 24), (24, 33), (33, 16)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        y = third(self.act(F.leaky_relu(second(F.relu(first(x))), 0.3)))
        return x + fourth(y)


MODELS = {
    "residual": (nn.Sequential(Residual(), Residual()), (3, 8, 7, 5)),
    "untraceable": (Untraceable(), (5, 16)),
    "shared": (Shared(), (5, 16)),
    "read twice": (ReadTwice(), (5, 16)),
    "norm over tokens": (NormOverTokens(), (3, 16, 16)),
    "linear and norm": (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), (5, 16)),
    "mlp": (Mlp(), (2, 65, 16)),
    "mlp of few tokens": (Mlp(), (1, 16)),
    "a layer alone": (nn.Linear(16, 16), (5, 16)),
}


def _prepared(name: str, rng: np.random.Generator) -> tuple[nn.Module, Tensor]:
    """The model with random weights and norm statistics, in eval mode, and an input."""
    torch.manual_seed(int(rng.integers(2**31)))
    model, shape = copy.deepcopy(MODELS[name][0]).eval(), MODELS[name][1]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for values in (module.running_mean, module.bias.data):
                nn.init.normal_(values)
            for values in (module.running_var, module.weight.data):
                nn.init.uniform_(values, 0.5, 2)
    return model, torch.randn(shape)


def _choices(model: nn.Module) -> dict[str, LayerPattern]:
    return {
        name: LayerPattern(Unstructured(), Unstructured().mask(weight_matrix(module).abs().numpy(), 0.6))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def _masked(model: nn.Module, choices: dict[str, LayerPattern]) -> nn.Module:
    model = copy.deepcopy(model)
    for name, choice in choices.items():
        layer = model.get_submodule(name)
        set_weight_matrix(layer, weight_matrix(layer) * torch.from_numpy(choice.mask))
    return model.double()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_converted_model_is_the_masked_model(name: str, rng: np.random.Generator) -> None:
    model, x = _prepared(name, rng)
    choices = _choices(model)
    converted = convert(model, choices, (x,), backend="reference")
    torch.testing.assert_close(converted(x), _masked(model, choices)(x.double()).float(), rtol=1e-4, atol=1e-5)
    sparse = [module for module in converted.modules() if isinstance(module, SparseLinear | SparseConv2d)]
    assert len(sparse) == len(choices)


@torch.no_grad()
def test_a_norm_without_weights_is_folded_like_one_with(rng: np.random.Generator) -> None:
    norms = nn.BatchNorm2d(8, affine=False), nn.BatchNorm1d(16, affine=False)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norms[0], nn.Flatten(), nn.Linear(8 * 9, 16, bias=False), norms[1]
    ).eval()
    for norm in norms:
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    x = torch.from_numpy(rng.normal(size=(4, 3, 5, 5)).astype(np.float32))
    choices = _choices(model)
    converted = convert(model, choices, (x,))
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in converted.modules())
    torch.testing.assert_close(converted(x), _masked(model, choices)(x.double()).float(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_norms_and_the_activation_that_follows_are_folded(rng: np.random.Generator) -> None:
    model, x = _prepared("residual", rng)
    converted = convert(model, _choices(model), (x,))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())
    assert [converted.get_submodule(f"0.conv{i}").activation for i in (1, 2)] == ["relu", None]
    partly = convert(*_prepared("untraceable", rng)[:1], {"inner.0": LayerPattern(Dense())}, (torch.randn(5, 16),))
    assert partly.inner.get_submodule("0").activation == "gelu"
    assert isinstance(partly.head, nn.Linear)


@torch.no_grad()
def test_an_activation_that_is_not_the_only_reader_stays(rng: np.random.Generator) -> None:
    model, x = _prepared("read twice", rng)
    assert convert(model, _choices(model), (x,)).layer.activation is None


@torch.no_grad()
def test_the_model_given_is_left_as_it_was(rng: np.random.Generator) -> None:
    model, x = _prepared("residual", rng)
    before = copy.deepcopy(model.state_dict())
    expected = model(x)
    convert(model, _choices(model), (x,))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_converted_model_copies_and_saves_its_state(rng: np.random.Generator) -> None:
    model, x = _prepared("residual", rng)
    converted = convert(model, _choices(model), (x,))
    again = convert(model, _choices(model), (x,))
    again.load_state_dict(converted.state_dict())
    for twin in (copy.deepcopy(converted), again):
        assert torch.equal(twin(x), converted(x))


def test_names_and_layers_that_cannot_be_are_refused_in_a_sentence() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 3))
    x = (torch.randn(1, 4, 8, 8),)
    with pytest.raises(ValueError, match="no layer 'fc9'"):
        convert(model, {"fc9": LayerPattern(Dense())}, x)
    with pytest.raises(ValueError, match=r"layer '0': a depthwise convolution \(4 groups\)"):
        convert(model, {"0": LayerPattern(Dense())}, x)
    with pytest.raises(ValueError, match="mask"):
        convert(model, {"1": LayerPattern(VectorWise(2), np.ones((2, 2), bool))}, x)


@pytest.mark.parametrize("tokens", [3, 65])
@torch.no_grad()
def test_rounded_weights_make_the_model_whose_weights_are_rounded(tokens: int, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
    masks = {name: VectorWise(32).mask(weight_matrix(model[int(name)]).abs().numpy(), 0.5) for name in ("0", "2")}
    choices = {name: LayerPattern(VectorWise(32), mask, "bfloat16-weights") for name, mask in masks.items()}
    x = torch.randn(tokens, 48)
    converted = convert(model, choices, (x,))
    nearest = copy.deepcopy(model)
    for name in choices:
        set_weight_matrix(nearest[int(name)], weight_matrix(nearest[int(name)]).bfloat16().float())
    expected = _masked(nearest, choices)(x.double()).float()
    torch.testing.assert_close(converted(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(_masked(model, choices)(x.double()).float(), expected, rtol=1e-5, atol=1e-5)
    assert "precision=bfloat16-weights" in str(converted)
    assert "precision" not in str(convert(model, {"0": LayerPattern(VectorWise(32), masks["0"])}, (x,)))


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
def test_a_model_in_bfloat16_is_near_the_one_whose_weights_are_rounded(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
    masks = {name: ShflBW(32).mask(weight_matrix(model[int(name)]).abs().numpy(), 0.5) for name in ("0", "2")}
    choices = {name: LayerPattern(ShflBW(32), mask, "bfloat16-weights") for name, mask in masks.items()}
    x = torch.randn(128, 48)
    weights_alone = convert(model, choices, (x,))(x)
    converted = convert(
        model, {name: replace(choice, precision="bfloat16") for name, choice in choices.items()}, (x,)
    )
    assert "precision=bfloat16" in str(converted)
    y = converted(x)
    # Each product is off by 2**-8 of itself at most; a tanh passes on no more than it gets.
    torch.testing.assert_close(y, weights_alone, rtol=0, atol=0.02)
    assert torch.equal(y, weights_alone) != (target.find_cpu_target().pairs or target.find_cpu_target().matrix)
    with pytest.raises(ValueError, match="layer '0': bfloat16 is for rows that share columns"):
        convert(model, {"0": LayerPattern(Unstructured(), precision="bfloat16")}, (x,))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Few tokens fill the vectors of one thread, and not of many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sine(nn.Module):
    """Of numbers so large that a rounding leads anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(100 * x)


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("layer", [nn.Linear(48, 64), nn.Conv2d(48, 64, 3, padding=1)], ids=["linear", "conv"])
def test_how_far_rounding_leads_is_no_matter_of_the_conversion(layer: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 48) if isinstance(layer, nn.Linear) else torch.randn(2, 48, 9, 9)
    model = nn.Sequential(copy.deepcopy(layer), Sine())
    converted = convert(model, {"0": LayerPattern(Dense(), precision="bfloat16")}, (x,))
    assert "precision=bfloat16" in str(converted)
    set_weight_matrix(model[0], weight_matrix(model[0]).bfloat16().float())
    exact = convert(model, {"0": LayerPattern(Dense())}, (x,))
    rounds_x = target.find_cpu_target().pairs and not target.find_cpu_target().matrix
    assert same_results(converted(x), exact(x), CONVERTED) != rounds_x


def test_layers_that_cannot_have_rounded_weights_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(4, 32, 1), nn.Flatten(), nn.Linear(32, 32))
    x = (torch.randn(1, 4, 1, 1),)
    with pytest.raises(
        ValueError, match="layer '0': precision='bfloat16-weights' is for linear layers, not for convolutions"
    ):
        convert(model, {"0": LayerPattern(VectorWise(32), precision="bfloat16-weights")}, x)
    with pytest.raises(ValueError, match="layer '2': bfloat16 weights are for rows that share columns"):
        convert(model, {"2": LayerPattern(Unstructured(), precision="bfloat16-weights")}, x)
    with pytest.raises(
        ValueError, match="layer '2': precision='bfloat16-weights' is for backend numba, not reference"
    ):
        convert(model, {"2": LayerPattern(VectorWise(32), precision="bfloat16-weights")}, x, backend="reference")


@torch.no_grad()
def test_tokens_stay_in_tiles_between_sparse_layers(rng: np.random.Generator) -> None:
    model, _ = _prepared("mlp", rng)
    choices = _choices(model)
    converted = convert(model, choices, (torch.randn(3, 16),))
    seen = []

    def remember(name: str) -> None:
        layer = converted.get_submodule(name)
        layer.register_forward_hook(lambda _, args, result: seen.append(isinstance(result, TokenTiles)))

    for name in choices:
        remember(name)
    for shape, kept in (((128, 16), True), ((2, 7, 65, 16), True), ((1, 16), False), ((0, 16), True)):
        seen.clear()
        x = torch.randn(shape)
        y = converted(x)
        # Three layers have another one behind them; few tokens are not worth it where threads must share them.
        assert seen == [kept or torch.get_num_threads() == 1] * 3 + [False]
        torch.testing.assert_close(y, _masked(model, choices)(x.double()).float(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tiles_are_kept_only_where_both_layers_lay_tokens_out_and_no_other_reads(
    rng: np.random.Generator,
) -> None:
    class ReadBetween(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return self[1](y) + y

    def kept(model: nn.Module, pattern: Pattern) -> list[bool]:
        choices = {name: LayerPattern(pattern) for name in ("0", "1")}
        converted = convert(model, choices, (torch.randn(128, 32),))
        return [node.kwargs.get("keep", False) for node in converted.graph.nodes if node.op == "call_module"]

    layers = nn.Linear(32, 32), nn.Linear(32, 32)
    assert kept(nn.Sequential(*layers), Unstructured()) == [True, False]
    assert kept(nn.Sequential(*layers), VectorWise(32)) == [False, False]
    assert kept(ReadBetween(*layers), Unstructured()) == [False, False]


class Resists(nn.Module):
    """Resists torch.fx, and calls its layers from a list, as most encoders do."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("infinite")
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def test_layers_in_lists_of_a_part_that_cannot_be_traced_are_swapped(rng: np.random.Generator) -> None:
    model = Resists(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)).eval()
    choices, x = _choices(model), torch.randn(5, 8)
    converted = convert(model, choices, (x,))
    assert sum(isinstance(module, SparseLinear) for module in converted.modules()) == 3
    torch.testing.assert_close(converted(x), _masked(model, choices)(x.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["layers.0", "layers.2"])
@torch.no_grad()
def test_a_layer_of_several_names_is_one_sparse_layer(rng: np.random.Generator, name: str) -> None:
    layer = nn.Linear(8, 8)
    model, x = Resists(layer, nn.Sequential(layer, nn.ReLU()), layer).eval(), torch.randn(5, 8)
    choices = {name: _choices(model)["layers.0"]}
    converted = convert(model, choices, (x,))
    assert len({converted.layers[0], converted.layers[1][0], converted.layers[2]}) == 1
    torch.testing.assert_close(converted(x), _masked(model, choices)(x.double()).float(), rtol=1e-4, atol=1e-5)


class Autoencoder(nn.Module):
    """Its last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.embedding, self.head = nn.Linear(8, 8), nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x)))


@torch.no_grad()
def test_who_shares_a_weight_with_a_chosen_layer_keeps_all_of_it(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model, x = Autoencoder().eval(), torch.arange(20)
    choices = {"head": _choices(model)["head"]}
    expected = model.inner(model.embedding(x)) @ (model.head.weight * torch.from_numpy(choices["head"].mask)).t()
    torch.testing.assert_close(convert(model, choices, (x,))(x), expected, rtol=1e-4, atol=1e-5)
    assert model.head.weight is model.embedding.weight


@torch.no_grad()
def test_two_layers_of_one_weight_have_a_mask_each(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(5, 8)
    model[1].weight = model[0].weight
    mask = rng.random((8, 8)) < 0.5
    choices = {"0": LayerPattern(Unstructured(), mask), "1": LayerPattern(Unstructured(), ~mask)}
    weight, masks = model[0].weight, [torch.from_numpy(choices[name].mask) for name in "01"]
    expected = F.linear(F.linear(x, weight * masks[0], model[0].bias), weight * masks[1], model[1].bias)
    torch.testing.assert_close(convert(model, choices, (x,))(x), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_layer_of_two_names_has_one_pattern() -> None:
    layer = nn.Linear(8, 8)
    model, x = nn.Sequential(layer, nn.ReLU(), layer).eval(), torch.randn(5, 8)
    mask = np.tri(8, dtype=bool)
    with pytest.raises(ValueError, match="layer '2': it has another name too, under which another pattern is chosen"):
        convert(model, {"0": LayerPattern(Unstructured(), mask), "2": LayerPattern(Unstructured(), mask.T)}, (x,))
    convert(model, {name: LayerPattern(Unstructured(), mask.copy()) for name in "02"}, (x,))


class Hooked(nn.Module):
    """What a conversion would fold, run in tiles or open, if nobody looked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()
        self.second, self.silu, self.third = nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.third(self.silu(self.second(self.relu(self.norm(self.first(x)))))))


@pytest.mark.parametrize("name", ["norm", "relu", "silu", "block", "block.1", ""])
@torch.no_grad()
def test_hooks_of_other_modules_see_what_they_saw(rng: np.random.Generator, name: str) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model, x = Hooked().eval(), torch.randn(256, 16)
    seen: list[Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, inputs, result: seen.extend([*inputs, result]))
    choices = {
        layer: LayerPattern(
            VectorWise(8), VectorWise(8).mask(weight_matrix(model.get_submodule(layer)).abs().numpy(), 0.5)
        )
        for layer in ("first", "second", "third", "block.0")
    }
    masked = copy.deepcopy(model)
    for layer, choice in choices.items():
        module = masked.get_submodule(layer)
        set_weight_matrix(module, weight_matrix(module) * torch.from_numpy(choice.mask))
    masked(x)
    expected = seen.copy()
    converted = convert(model, choices, (x,))
    seen.clear()
    converted(x)
    assert sum(isinstance(module, SparseLinear) for module in converted.modules()) == 4
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


class Doubled(nn.Linear):
    """What a Linear is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.aux = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.aux(x) if self.training else self.used(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight.t())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Keys(nn.Module):
    """Its caller asks for keys, and then calls it with them."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(8, 8), nn.Linear(8, 8)

    def keys(self, memory: Tensor) -> Tensor:
        found: Tensor = self.key(memory)
        return found

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return self.query(x) @ keys.transpose(1, 2)


@torch.no_grad()
def test_a_layer_that_another_method_of_its_module_calls_is_swapped(rng: np.random.Generator) -> None:
    class Caller(Resists):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.layers[0](x, self.layers[0].keys(x))
            return scores if scores.sum() > -1e9 else -scores  # which cannot be traced

    model, x = Caller(Keys()), torch.randn(2, 3, 8)
    choices = _choices(model)
    converted = convert(model, choices, (x,))
    expected = _masked(model, choices)(x.double()).float()
    torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
    sparse = {name for name, module in converted.named_modules() if isinstance(module, SparseLinear)}
    assert sparse == {"layers.0.key", "layers.0.query"}


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, inputs, result: 2 * result)
    return model


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [
        (nn.Sequential(Doubled(8, 8)), "0", "layer '0': a Doubled computes something of its own"),
        (hooked(), "0", "layer '0': it has hooks"),
        (Unused(), "aux", "layer 'aux': the model does not call it on the example inputs"),
        (Tied(), "layer", "layer 'layer': the model reads its weight as well"),
        (Resists(Tied()), "layers.0.layer", "layer 'layer': the model reads its weight as well"),
        (Attention(), "attention.out_proj", "is not called but read, by the attention that owns it"),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_layer_whose_place_a_sparse_one_cannot_take_is_refused(model: nn.Module, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        convert(model, {name: LayerPattern(Dense())}, (torch.randn(2, 3, 8),))


@torch.no_grad()
def test_weights_that_are_computed_are_those_of_the_moment(rng: np.random.Generator) -> None:
    for change in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        for bias in (True, False):
            layers = [change(nn.Linear(8, 8, bias=bias)), nn.ReLU(), change(nn.Linear(8, 8, bias=bias))]
            model = nn.Sequential(*layers).eval()
            mask, x = rng.random((8, 8)) < 0.5, torch.randn(5, 8)
            converted = convert(model, {"0": LayerPattern(Unstructured(), mask)}, (x,))
            weight = model[0].weight * torch.from_numpy(mask)
            expected = model[2](F.relu(F.linear(x, weight, model[0].bias)))
            torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_compute_become_plain_in_the_copy_alone(rng: np.random.Generator) -> None:
    for change in (nn.utils.weight_norm, nn.utils.spectral_norm, lambda it: prune.l1_unstructured(it, "weight", 0.3)):
        model = nn.Sequential(change(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))
        model(torch.randn(2, 8))  # computes weights with gradients
        model.eval()
        mask, x = rng.random((8, 8)) < 0.5, torch.randn(5, 8)
        with torch.no_grad():
            converted = convert(model, {"0": LayerPattern(Unstructured(), mask)}, (x,))
            model(x)
            weight = model[0].weight * torch.from_numpy(mask)
            expected = model[2](F.relu(F.linear(x, weight, model[0].bias)))
            torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
        assert model[0]._forward_pre_hooks  # the model given computes its weight as before


class Mixed(nn.Module):
    """A layer beside parameters of other types, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.times = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.shift = nn.Parameter(torch.randn(8).half(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.times + self.shift.float()

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (nn.DataParallel, "module.layer"), (AveragedModel, "module.layer"),
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod.layer"), (lambda model: model, "layer"),
    ],
    ids=["DataParallel", "AveragedModel", "compile", "nothing"],
)  # fmt: skip
@torch.no_grad()
def test_wrapped_models_are_converted(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model, x = wrap(Mixed()).eval(), torch.randn(5, 8)
    converted = convert(model, {name: LayerPattern(Dense())}, (x,))
    assert sum(isinstance(module, SparseLinear) for module in converted.modules()) == 1
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_model_that_processes_train_together_is_converted() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, x = nn.parallel.DistributedDataParallel(Mixed()).eval(), torch.randn(5, 8)
        converted = convert(model, {"module.layer": LayerPattern(Dense())}, (x,))
        assert sum(isinstance(module, SparseLinear) for module in converted.modules()) == 1
        torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_torchs_transformer_is_converted_but_for_its_attention(batch_first: bool, masked: bool) -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=batch_first).eval()
    source, target = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
    taken = survey_layers(model).taken
    assert len(taken) == 8 and all(name.rpartition(".")[2] in ("linear1", "linear2") for name in taken)
    keywords = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(3)} if masked else {}
    choices = {name: LayerPattern(Dense()) for name in taken}
    converted = convert(model, choices, (source, target), example_keywords=keywords)
    assert sum(isinstance(module, SparseLinear) for module in converted.modules()) == 8
    found, expected = (each(target, source, **keywords) for each in (converted, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_models_without_their_numbers_or_that_cannot_be_copied_are_refused() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lock = nn.Linear(8, 8), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    for model, name, why in (
        (nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4)), "0", "1.weight is not initialized yet"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, device="meta")), "0", "1.weight has no numbers"),
        (Locked(), "layer", "the model cannot be copied: TypeError: cannot pickle"),
    ):
        with pytest.raises(ValueError, match=why):
            convert(model, {name: LayerPattern(Dense())}, (torch.randn(2, 8),))


def test_a_pattern_without_a_mask_and_inputs_that_are_no_tuple_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"layer '0' needs a LayerPattern\(pattern, mask\), not 'vector:4'"):
        convert(model, {"0": "vector:4"}, (x,))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"a tuple, such as \(x,\), not a Tensor"):
        convert(model, {"0": LayerPattern(Dense())}, x)  # type: ignore[arg-type]  # its rows would be arguments


@torch.no_grad()
def test_small_outputs_are_compared_by_their_own_size(rng: np.random.Generator) -> None:
    """A norm over tokens must not be folded, however small what is made of it."""

    class Small(NormOverTokens):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1e-6

    model, x = Small().eval(), torch.randn(3, 16, 16)
    nn.init.normal_(model.norm.running_mean)
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    torch.testing.assert_close(
        convert(model, {"layer": LayerPattern(Dense())}, (x,))(x), model(x), rtol=1e-4, atol=1e-11
    )


@torch.no_grad()
def test_results_of_other_kinds_are_compared_too() -> None:
    @dataclass
    class Output:
        scores: Tensor
        first: np.ndarray

    class Gives(Resists):
        def forward(self, x: Tensor) -> Output:
            y = super().forward(x)
            return Output(y, y[0].numpy())

    model, x = Gives(nn.Linear(8, 8)).eval(), torch.randn(5, 8)
    converted = convert(model, {"layers.0": LayerPattern(Dense())}, (x,))
    torch.testing.assert_close(converted(x).scores, model(x).scores, rtol=1e-4, atol=1e-5)


class Cache:
    """Holds what a decoder computed; equal to itself alone."""

    __slots__ = ("keys", "owner")

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.owner = keys, self


@torch.no_grad()
@pytest.mark.parametrize("wrong", [False, True])
def test_objects_without_equality_are_compared_by_what_they_hold(wrong: bool) -> None:
    class Decodes(Resists):
        def forward(self, x: Tensor) -> dict[str, object]:
            y = super().forward(x)
            sparse = not isinstance(self.layers[0], nn.Linear)
            return {"logits": y, "past": [Cache(2 * y if wrong and sparse else y)]}

    model, x = Decodes(nn.Linear(8, 8)).eval(), torch.randn(5, 8)
    choices = {"layers.0": LayerPattern(Dense())}
    if wrong:
        with pytest.raises(ValueError, match="gives another result on the example inputs"):
            convert(model, choices, (x,))
    else:
        torch.testing.assert_close(convert(model, choices, (x,))(x)["logits"], model(x)["logits"])


@torch.no_grad()
def test_classes_that_a_conversion_changes_are_noticed() -> None:
    class Chooses(Resists):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y if isinstance(self.layers[0], nn.Linear) else -y).argmax(1)

    x, layers = torch.randn(40, 8), {"layers.0": LayerPattern(Dense())}
    with pytest.raises(ValueError, match="gives another result on the example inputs"):
        convert(Chooses(nn.Linear(8, 8)), layers, (x,))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.arange(40), torch.arange(40), True),
        (torch.arange(40), torch.arange(40).roll(1), False),
        (torch.arange(40), torch.cat([torch.arange(39), torch.tensor([0])]), True),  # one near tie
        (torch.tensor(3), torch.tensor(4), False),
        (torch.ones(3, dtype=torch.complex64), 2 * torch.ones(3, dtype=torch.complex64), False),
        (torch.ones(3, dtype=torch.complex64), 1.001 * torch.ones(3, dtype=torch.complex64), True),
        (0.5, 0.5005, True),
        (0.5, 0.6, False),
    ],
)
def test_whole_numbers_may_differ_by_a_near_tie_and_no_more(a: object, b: object, same: bool) -> None:
    assert same_results(a, b, CONVERTED) is same
    assert same_results(a, b, FOLDED) is (same and (torch.equal(a, b) if isinstance(a, Tensor) else a == b))


@torch.no_grad()
def test_a_part_that_treats_its_layers_as_no_layers_is_noticed() -> None:
    class Looks(Resists):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if isinstance(self.layers[0], nn.Linear) else 3.0)

    with pytest.raises(ValueError, match="gives another result on the example inputs"):
        convert(Looks(nn.Linear(8, 8)), {"layers.0": LayerPattern(Dense())}, (torch.randn(5, 8),))


class Dropping(nn.Module):
    """What gives its input as it is stands between a layer and the activation behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.same(self.drop(self.first(x))), 0.3, training=self.training)
        return self.second(torch.relu(x))


@torch.no_grad()
def test_what_gives_its_input_as_it_is_hinders_no_folding():
    torch.manual_seed(0)
    model, x = Dropping().eval(), torch.randn(5, 32)
    converted = convert(model, {"first": LayerPattern(Unstructured())}, (x,))
    assert converted.get_submodule("first").activation == "relu"
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_drops_or_is_watched_stays():
    torch.manual_seed(0)
    x, seen = torch.randn(5, 32), []
    model = Dropping().eval()
    model.same.register_forward_hook(lambda *_: seen.append(True))
    converted = convert(model, {"first": LayerPattern(Unstructured())}, (x,))
    seen.clear()
    converted(x)
    assert seen == [True]
    graph = fx.symbolic_trace(Dropping().train())
    before = len(graph.graph.nodes)
    drop_identities(graph)
    assert before - len(graph.graph.nodes) == 1  # the identity alone
