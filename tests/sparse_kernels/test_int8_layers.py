"""Torch layers in eight bits, and models converted to them."""

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparse_kernels import Conv2dShape, parse
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.kernels import attention as kernel
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces, QuadImages
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales, round_to_steps
from sparse_kernels.int8.int8_oracle import check_int8, check_int8_conv2d
from sparse_kernels.nn import SparseConv2d, SparseLinear
from sparse_kernels.nn.sparse_layer import KEPT_PLANS
from sparse_kernels.prunable_layers import weight_matrix


def choose(layer: nn.Module, spec: str, reading: InputRange | None, sparsity: float = 0.5) -> LayerPattern:
    """A pattern at a sparsity, in eight bits."""
    weight = weight_matrix(layer).numpy()
    pattern = parse(spec)
    mask = pattern.mask(weight.astype(float) ** 2, 0.0 if spec == "dense" else sparsity)
    return LayerPattern(pattern, mask, "int8", Quantization(find_scales(np.where(mask, weight, 0)), reading))


def to_sparse(layer: Any, choice: LayerPattern, **given: Any) -> Any:
    """The layer in eight bits."""
    kind = SparseConv2d if isinstance(layer, nn.Conv2d) else SparseLinear
    return kind.from_dense(layer, choice.pattern, choice.mask, precision=choice.quantization, **given)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("spec", ["block:32x4", "shflbw:16x4", "block:1x4", "dense"])
@pytest.mark.parametrize("reading", [InputRange.covering(-3.0, 3.0), None], ids=["one range", "own steps"])
def test_a_linear_layer_gives_the_product_in_eight_bits(
    rng: np.random.Generator, backend: str, spec: str, reading: InputRange | None
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(67, 96)
    sparse = to_sparse(layer, choose(layer, spec, reading), backend=backend, activation="relu")
    for lead in ((), (5,), (2, 3), (0,), (40,)):
        x = torch.from_numpy(rng.standard_normal((*lead, 67)).astype(np.float32))
        y = sparse(x)
        assert y.shape == (*lead, 96)
        rows = x.reshape(-1, 67).numpy(), y.reshape(-1, 96).numpy()
        check_int8(rows[1], sparse.planned_weight, rows[0], bias=sparse.bias.numpy(), activation="relu")


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_convolution_gives_the_product_in_eight_bits(rng: np.random.Generator, backend: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 24, 3, padding=1, stride=2)
    sparse = to_sparse(layer, choose(layer, "block:8x4", InputRange.covering(-3.0, 3.0)), backend=backend)
    x = rng.standard_normal((2, 6, 11, 9)).astype(np.float32)
    shape = Conv2dShape(2, 6, 11, 9, 24, 3, 3, (2, 2), (1, 1), (1, 1))
    y = sparse(torch.from_numpy(x)).numpy()
    check_int8_conv2d(y, sparse.planned_weight, shape, x, bias=sparse.bias.numpy())


def test_precision_and_quantization_belong_together() -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="belong together"):
        SparseLinear.from_dense(layer, parse("dense"), None, precision="int8")
    with pytest.raises(ValueError, match="8 rows needs 8 scales"):
        to_sparse(layer, LayerPattern(parse("dense"), None, "int8", Quantization(np.ones(7, np.float32))))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_compute_the_same(rng: np.random.Generator, again: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    sparse = to_sparse(layer, choose(layer, "block:32x4", InputRange.covering(-1.0, 4.0)))
    x = torch.from_numpy(rng.standard_normal((9, 32)).astype(np.float32))
    torch.testing.assert_close(again(sparse)(x), sparse(x), rtol=0, atol=0)


def test_operators_rebuild_the_layer(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    for reading in (InputRange.covering(-1.0, 4.0), None):
        sparse = to_sparse(layer, choose(layer, "block:32x4", reading))
        other = SparseLinear.rebuild(*sparse.operands())
        x = torch.from_numpy(rng.standard_normal((9, 32)).astype(np.float32))
        assert other.precision == "int8"
        torch.testing.assert_close(other(x), sparse(x), rtol=0, atol=0)


def test_an_exported_model_computes_the_same(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 64)
    sparse = to_sparse(layer, choose(layer, "block:32x4", None))
    x = torch.from_numpy(rng.standard_normal((9, 32)).astype(np.float32))
    with torch.no_grad():
        exported = torch.export.export(nn.Sequential(sparse, nn.Tanh()), (x,)).module()
        torch.testing.assert_close(exported(x), sparse(x).tanh(), rtol=0, atol=0)


class Convolutions(nn.Module):
    """Two convolutions with norms, one of which turns rows around."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def test_a_converted_model_multiplies_bytes_and_folds_norms_into_steps(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    model = Convolutions().eval()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(-2, 2, 16))
        model.norm.running_mean.uniform_(-1, 1)
        model.norm.running_var.uniform_(0.5, 2)
    x = torch.from_numpy(rng.standard_normal((3, 4, 8, 8)).astype(np.float32))
    choices = {
        "first": choose(model.first, "block:4x4", InputRange.covering(-4.0, 4.0), 0.3),
        "second": choose(model.second, "block:4x4", InputRange.covering(0.0, 8.0), 0.3),
        "head": choose(model.head, "dense", None),
    }
    fast = convert(model, choices, (x,))
    layers = {name: module for name, module in fast.named_modules() if hasattr(module, "planned_weight")}
    assert {layer.precision for layer in layers.values()} == {"int8"} and len(layers) == 3
    assert layers["first"].activation == "relu"  # the norm is folded
    whole = np.rint(layers["first"].planned_weight.packed.values)
    assert np.abs(whole).max() == 127

    masked = copy.deepcopy(model)
    with torch.no_grad():
        for name, choice in choices.items():
            layer = masked.get_submodule(name)
            matrix = round_to_steps(weight_matrix(layer).numpy() * choice.mask, choice.quantization.scales)
            from sparse_kernels.prunable_layers import set_weight_matrix

            set_weight_matrix(layer, torch.from_numpy(matrix))
        expected, found = masked(x), fast(x)
    # Each layer reads its input with an error of half a step of 255, so results move by a per cent or two.
    assert 1e-5 < (found - expected).norm() / expected.norm() < 0.05


def test_a_model_in_eight_bits_is_refused_on_a_gpu_backend() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="is for backend numba, not cupy"):
        convert(model, {"0": choose(model[0], "dense", None)}, (torch.zeros(2, 8),), backend="cupy")


class Heads(nn.Module):
    """Attention of 4 heads; queries come from a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.others = nn.Linear(64, 64), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, (k, v) = self.queries(x).unflatten(-1, (4, 16)), self.others(x).unflatten(-1, (2, 4, 16)).unbind(2)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("precision", ["int8", "float32"], ids=["all in bytes", "queries in floats"])
def test_attention_multiplies_bytes_where_all_that_it_reads_comes_from_such_layers(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.from_numpy(rng.standard_normal((2, 33, 64)).astype(np.float32))
    choices = {name: choose(layer, "dense", None) for name, layer in model.named_children()}
    if precision == "float32":
        choices["queries"] = LayerPattern(parse("dense"), None)
    rounds: list[bool] = []
    known = kernel.run

    def run(*given: Any) -> None:
        rounds.append(given[-1])
        known(*given)

    monkeypatch.setattr(kernel, "run", run)
    fast = convert(model, choices, (x,))
    assert rounds == [False]  # the proof compares the conversion, not what rounding does
    y = fast(x)
    assert rounds == [False, precision == "int8"]
    with torch.no_grad():
        expected = model(x)
    assert 1e-4 < (y - expected).norm() / expected.norm() < 0.05
    again = pickle.loads(pickle.dumps(fast))
    torch.testing.assert_close(again(x), y, rtol=0, atol=0)
    assert rounds[-1] is (precision == "int8")
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y, rtol=0, atol=0)


class Residual(nn.Module):
    """A residual block between convolutions, as ResNets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 12, 3, padding=1), nn.Conv2d(12, 16, 1)
        self.inner, self.outer = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.last, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.down(torch.relu(self.first(x))))
        x = torch.relu(self.outer(torch.relu(self.inner(x))) + x)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


LEAVING = {"first": False, "down": True, "inner": False, "outer": False}
"""Which convolutions leave bytes, and whether they leave floats, too: the block adds what `down` gives."""


def convert_residual(rng: np.random.Generator, **ranges: InputRange) -> tuple[nn.Module, torch.Tensor]:
    """The model with its convolutions in eight bits, all by one range but for these, and images."""
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.from_numpy(rng.standard_normal((3, 4, 8, 8)).astype(np.float32))
    choices = {
        name: choose(model.get_submodule(name), "block:4x4", ranges.get(name, InputRange.covering(-3.0, 3.0)))
        for name in ("first", "down", "inner", "outer", "last")
    }
    return convert(model, choices, (x,)), x


def find_leaving(model: Any) -> dict[str, tuple[float, int, bool]]:
    """What the convolutions of a converted model leave as bytes."""
    return {str(node.target): node.kwargs["leave"] for node in model.graph.nodes if "leave" in node.kwargs}


def test_convolutions_leave_bytes_for_those_that_read_them(rng: np.random.Generator) -> None:
    converted, x = convert_residual(rng)
    assert {name: floats for name, (_, _, floats) in find_leaving(converted).items()} == LEAVING
    y = converted(x)
    for node in converted.graph.nodes:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "leave"}
    converted.recompile()
    torch.testing.assert_close(y, converted(x), rtol=0, atol=0)


def test_readers_of_another_range_read_floats(rng: np.random.Generator) -> None:
    converted, x = convert_residual(rng, last=InputRange.covering(-1.0, 9.0), outer=InputRange.covering(-2.0, 2.0))
    leaving = find_leaving(converted)
    assert leaving["outer"][:2] == (InputRange.covering(-1.0, 9.0).scale, 26)
    assert leaving["inner"][:2] == (InputRange.covering(-2.0, 2.0).scale, 128)
    sparse = {name: layer for name, layer in converted.named_modules() if isinstance(layer, SparseConv2d)}
    y = converted(x)
    sparse["last"]._input_range = InputRange.covering(-1.0, 8.0)
    with pytest.raises(ValueError, match="was given bytes"):
        converted(x)
    assert y.isfinite().all()


def test_layers_of_the_reference_are_left_no_bytes(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.from_numpy(rng.standard_normal((3, 4, 8, 8)).astype(np.float32))
    reading = InputRange.covering(-3.0, 3.0)
    model = convert(model, {"inner": choose(model.inner, "block:4x4", reading)}, (x,), backend="reference")
    names = [name for name in ("first", "down", "outer", "last") if isinstance(model.get_submodule(name), nn.Conv2d)]
    choices = {name: choose(model.get_submodule(name), "block:4x4", reading) for name in names}
    converted = convert(model, choices, (x,))
    assert "down" not in find_leaving(converted)
    assert converted(x).isfinite().all()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda images: pickle.loads(pickle.dumps(images))])
def test_copies_of_bytes_have_memory_of_their_own(again: Any) -> None:
    quads = QuadImages(ImagePlaces(1, 6, 3, 4, 1), InputRange(0.5, 9))
    quads.array.view(np.uint32)[20:30] = np.arange(10)
    copied = again(quads)
    np.testing.assert_array_equal(copied.array, quads.array)
    assert (copied.places, copied.input_range) == (quads.places, quads.input_range)
    assert copied.address == copied.array.ctypes.data != quads.address


def test_a_layer_keeps_no_plans_that_it_has_dropped(rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    sparse = to_sparse(nn.Conv2d(4, 8, 3, padding=1), choose(nn.Conv2d(4, 8, 3), "block:4x4", InputRange(0.1)))
    plans = []
    for size in range(5, 13):
        sparse(torch.zeros(1, 4, size, 6), margin=1)
        plans.append(weakref.ref(sparse._latest.plan))
    gc.collect()
    assert sum(plan() is not None for plan in plans) == KEPT_PLANS
