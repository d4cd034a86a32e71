"""SparseLinear and SparseConv2d are the masked torch layers, and behave as torch modules do."""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_kernels import prepare
from sparse_kernels.nn import SparseConv2d, SparseLinear, attention
from sparse_kernels.patterns import Dense, VectorWise, parse
from sparse_kernels.prunable_layers import refuse_layer, set_weight_matrix, weight_matrix
from sparse_kernels.tensors.padded_conv import unframe
from sparse_kernels.tensors.torch_tiles import TokenTiles

PATTERNS = ["unstructured", "nm:2:4", "block:4x4", "vector:16", "shflbw:16", "vector:4"]


def _mask(module: nn.Module, pattern: str) -> np.ndarray:
    sparsity = 0.5 if pattern.startswith("nm") else 0.7
    return parse(pattern).mask(weight_matrix(module).abs().numpy(), sparsity)


def _masked(module: nn.Module, mask: np.ndarray) -> nn.Module:
    """The oracle: torch's own layer in float64, the pruned weights set to zero."""
    module = copy.deepcopy(module)
    set_weight_matrix(module, weight_matrix(module) * torch.from_numpy(mask))
    return module.double()


def _close(y: torch.Tensor, oracle: torch.Tensor, k: int) -> None:
    # Each output is a sum of at most k products of numbers around 1/sqrt(k) and 1; 8 eps sqrt(k) is generous for it.
    torch.testing.assert_close(y.double(), oracle, rtol=0, atol=float(8 * np.finfo(np.float32).eps * np.sqrt(k)))


@pytest.fixture(autouse=True)
def _seed(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_sparse_linear_is_the_masked_linear(pattern: str, backend: str) -> None:
    linear = nn.Linear(68, 48)
    mask = _mask(linear, pattern)
    sparse = SparseLinear.from_dense(linear, parse(pattern), mask, activation="gelu", backend=backend)
    for shape in [(1, 68), (5, 7, 68), (0, 68), (68,)]:
        x = torch.randn(shape)
        _close(sparse(x), F.gelu(_masked(linear, mask)(x.double())), 68)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_sparse_conv2d_is_the_masked_convolution(pattern: str, backend: str) -> None:
    conv = nn.Conv2d(8, 32, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    mask = _mask(conv, pattern)
    sparse = SparseConv2d.from_dense(conv, parse(pattern), mask, activation="relu", backend=backend)
    for shape in [(2, 8, 9, 11), (1, 8, 5, 5)]:
        x = torch.randn(shape)
        _close(sparse(x), F.relu(_masked(conv, mask)(x.double())), 48)


@torch.no_grad()
def test_dense_pattern_keeps_every_weight() -> None:
    linear, x = nn.Linear(33, 17, bias=False), torch.randn(3, 33)
    _close(SparseLinear.from_dense(linear, Dense(), None)(x), linear.double()(x.double()), 33)


def test_a_convolutions_matrix_has_channels_last() -> None:
    conv = nn.Conv2d(3, 5, (2, 4))
    matrix = weight_matrix(conv)
    assert matrix[4, (1 * 4 + 2) * 3 + 0] == conv.weight[4, 0, 1, 2]
    doubled = matrix * 2
    set_weight_matrix(conv, doubled)
    assert torch.equal(weight_matrix(conv), doubled)


@torch.no_grad()
def test_state_dict_carries_the_weights_to_a_layer_of_the_same_mask() -> None:
    linear, x = nn.Linear(64, 32), torch.randn(4, 64)
    mask = _mask(linear, "vector:16")
    source = SparseLinear.from_dense(linear, VectorWise(16), mask)
    target = SparseLinear.from_dense(nn.Linear(64, 32), VectorWise(16), mask)
    target(x)  # a plan of the old weights exists and must not survive the load
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize(
    ("pattern", "name", "damage", "why"),
    [
        ("unstructured", "indices", lambda a: a[-1].fill_(10**8), "indices must lie in 0 to 63, not 0 to 100000000"),
        ("unstructured", "indices", lambda a: a[0].fill_(-1), "indices must lie in 0 to 63"),
        ("unstructured", "indices", lambda a: a[1].copy_(a[0]), "indices must rise within a row"),
        ("unstructured", "indptr", lambda a: a[-1].add_(1), "indptr must rise from 0"),
        ("vector:16", "indptr", lambda a: a[1].fill_(-3), "indptr must rise from 0"),
        ("block:4x4", "indices", lambda a: a[-1].fill_(16), "indices must lie in 0 to 15"),
        ("nm:2:4", "offsets", lambda a: a[0, 0].fill_(4), "offsets must lie below 4"),
        ("nm:2:4", "offsets", lambda a: a[0, 0].copy_(torch.tensor([3, 1])), "offsets must not fall"),
        ("shflbw:16", "row_ids", lambda a: a[0].copy_(a[1]), "row_ids must name each row from 0 to 31 once"),
    ],
)
@torch.no_grad()
def test_a_state_that_contradicts_itself_is_refused_and_changes_nothing(
    pattern: str, name: str, damage: Callable[[torch.Tensor], object], why: str
) -> None:
    linear, x = nn.Linear(64, 32), torch.randn(4, 64)
    model = nn.Sequential(SparseLinear.from_dense(linear, parse(pattern), _mask(linear, pattern)))
    expected, state = model(x), {key: value.clone() for key, value in model.state_dict().items()}
    state["0.values"] += 1
    damage(state[f"0.{name}"])
    with pytest.raises(RuntimeError, match=f"0: {why}"):
        model.load_state_dict(state)
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_layers_run_among_dense_ones_under_autocast() -> None:
    linear = nn.Linear(64, 32)
    model = nn.Sequential(nn.Linear(16, 64), SparseLinear.from_dense(linear, Dense(), None), nn.Linear(32, 8))
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        between = model[0](x)
        assert between.dtype == torch.bfloat16
        _close(model[1](between), linear.double()(between.double()), 64)
        assert model(x).dtype == torch.bfloat16


@torch.no_grad()
def test_layers_that_keep_tiles_are_operators_to_the_compiler() -> None:
    linear, x = nn.Linear(64, 64), torch.randn(256, 64)
    layer = SparseLinear.from_dense(linear, parse("shflbw:8"), _mask(linear, "shflbw:8"))
    compiled = torch.compile(lambda x: layer(layer(x, keep=True)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(layer(x)))


@torch.no_grad()
def test_copies_and_pickles_compute_the_same() -> None:
    linear, x = nn.Linear(64, 32), torch.randn(4, 64)
    source = SparseLinear.from_dense(linear, VectorWise(16), _mask(linear, "vector:16"))
    expected = source(x)
    file = io.BytesIO()
    torch.save(source, file)
    file.seek(0)
    for copied in (copy.deepcopy(source), torch.load(file, weights_only=False)):
        assert torch.equal(copied(x), expected)


def test_gradients_other_types_and_other_widths_are_refused_in_a_sentence() -> None:
    sparse = SparseLinear.from_dense(nn.Linear(8, 4), Dense(), None)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        sparse(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(TypeError, match="float32"):
        sparse(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="takes 8 features, the input has 7"):
        sparse(torch.randn(2, 7))
    with pytest.raises(ValueError, match="activation 'tanh'"):
        SparseLinear.from_dense(nn.Linear(8, 4), Dense(), None, activation="tanh")


@pytest.mark.parametrize("strided", [False, True])
@torch.no_grad()
def test_views_that_are_negated_or_strided_are_what_they_say(strided: bool) -> None:
    """Kernels get addresses: what lies there must be what the tensor means."""
    linear = nn.Linear(64, 32)
    layer = SparseLinear.from_dense(linear, VectorWise(16), _mask(linear, "vector:16"))
    conv = nn.Conv2d(4, 16, 3, padding=1)
    sparse_conv = SparseConv2d.from_dense(conv, Dense(), None)
    x, image = torch.randn(5, 128), torch.randn(2, 4, 6, 14)
    x, image = (each[..., ::2] if strided else each[..., : each.shape[-1] // 2].contiguous() for each in (x, image))
    expected = layer(x.clone().neg()), sparse_conv(image.clone().neg())
    negated = torch._neg_view(x), torch._neg_view(image)
    assert all(each.is_neg() for each in negated)
    assert torch.equal(layer(negated[0]), expected[0])
    assert torch.equal(sparse_conv(negated[1]), expected[1])
    assert torch.equal(unframe(sparse_conv(negated[1], margin=1)), expected[1])
    q = torch._neg_view(torch.randn(1, 2, 5, 8))
    torch.testing.assert_close(attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


@torch.no_grad()
def test_tensors_without_numbers_are_refused() -> None:
    linear = nn.Linear(64, 32)
    layer = SparseLinear.from_dense(linear, Dense(), None)
    for wrong in (torch.randn(2, 64).to_sparse(), torch.randn(2, 64).to_mkldnn()):
        with pytest.raises((RuntimeError, TypeError)):
            layer(wrong)
    with pytest.raises(TypeError, match="on the CPU"):
        layer(torch.randn(2, 64, device="meta"))
    framed = SparseConv2d.from_dense(nn.Conv2d(4, 4, 3, padding=1), Dense(), None)(torch.randn(1, 4, 6, 7), margin=1)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((RuntimeError, TypeError)):
        unframe(framed)
    with pytest.raises(ValueError, match="do not hold 1000 tokens"):
        layer(TokenTiles(torch.zeros(1, 64, 16), torch.Size([1000])))


def test_what_has_no_kernel_says_why() -> None:
    assert refuse_layer(nn.Conv2d(4, 4, 3, padding="same")) is None
    for module, reason in [
        (nn.Conv2d(4, 4, 3, groups=4), "4 groups"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "reflect"),
        (nn.Conv2d(4, 4, 2, padding="same"), "asymmetric"),
        (nn.Embedding(3, 4), "Embedding"),
    ]:
        assert reason in str(refuse_layer(module))


@torch.no_grad()
def test_inputs_of_other_dimensions_are_taken_as_torch_does_or_refused_in_a_sentence() -> None:
    conv, linear = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(3, 4)
    sparse_conv = SparseConv2d.from_dense(conv, Dense(), None, backend="reference")
    sparse_linear = SparseLinear.from_dense(linear, Dense(), None, backend="reference")
    image, features = torch.randn(3, 7, 9), torch.randn(3)
    torch.testing.assert_close(sparse_conv(image), conv(image), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sparse_linear(features), linear(features), rtol=1e-4, atol=1e-5)
    for wrong in (torch.randn(3, 7), torch.randn(1, 1, 3, 7, 9)):
        with pytest.raises(ValueError, match=r"takes \(batch, c_in, h, w\) or \(c_in, h, w\), not"):
            sparse_conv(wrong)
    with pytest.raises(ValueError, match="takes 3 features, the input is a single number"):
        sparse_linear(torch.tensor(1.0))
    with pytest.raises(TypeError, match="takes a tensor, not a ndarray"):
        sparse_linear(image.numpy())
    with pytest.raises(ValueError, match="n must be a number of columns of at least 0, not None"):
        prepare(sparse_linear.packed, "reference", "token_major", None)
