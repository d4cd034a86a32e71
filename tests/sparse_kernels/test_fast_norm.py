"""Layer norm of converted models gives what torch's does, in float64, and takes over the addition before it."""

import copy
import pickle
from typing import Any

import numba
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn.fast_norm import FastLayerNorm
from sparse_kernels.patterns import Unstructured

EPSILON = 2.0**-24


def draw_norm(features: int, **settings: Any) -> nn.LayerNorm:
    """A norm whose gain and shift are no defaults."""
    norm = nn.LayerNorm(features, **settings)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(features))
    return norm.requires_grad_(False)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 16), (130, 67), (128, 768)], ids=str)
def test_it_is_the_norm_in_float64(shape: tuple[int, ...], adds: bool) -> None:
    torch.manual_seed(0)
    norm, x = draw_norm(shape[-1]), 3 * torch.randn(shape) + 1
    added = torch.randn(shape) if adds else None
    exact = norm.double()
    total = x.double() if added is None else x.double() + added.double()
    expected = exact(total)
    fast = FastLayerNorm.of(copy.deepcopy(norm).float())
    # Sums of k elements are off by at most k roundings of their absolute sum, here of the size of the spread; the
    # quotient and the product add a few more.
    spread = (total.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    size = (total.abs().amax(-1, keepdim=True) / spread) * exact.weight.abs() + exact.bias.abs() + 1
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        torch.set_num_threads(threads)
        y = fast(x, added)
        assert ((y.double() - expected).abs() <= (shape[-1] + 16) * EPSILON * size).all()


def test_what_is_not_a_number_stays_in_its_row() -> None:
    torch.manual_seed(0)
    norm, x = draw_norm(40), torch.randn(9, 40)
    x[2, 3], x[5, 39], x[7] = torch.nan, torch.inf, 4.0
    y, expected = FastLayerNorm.of(norm)(x), norm(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("settings", [{"bias": False}, {"elementwise_affine": False}, {"eps": 0.5}], ids=str)
def test_settings_are_those_of_torch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    norm, x = draw_norm(40, **settings), torch.randn(9, 40)
    torch.testing.assert_close(FastLayerNorm.of(norm)(x), norm(x), rtol=1e-5, atol=1e-5)


def test_what_our_kernel_does_not_take_is_torchs() -> None:
    torch.manual_seed(0)
    norm = draw_norm(40)
    fast = FastLayerNorm.of(norm)
    wide, row = torch.randn(40, 18), torch.randn(40)
    for x, added in ((wide.T, wide.T), (wide.T, row), (wide.T[:, :40][::2], None), (torch.empty(0, 40), None)):
        expected = norm(x if added is None else x + added)
        torch.testing.assert_close(fast(x, added), expected, rtol=1e-5, atol=1e-5)
    with torch.enable_grad():
        x = torch.randn(3, 40, requires_grad=True)
        assert fast(x).requires_grad
    assert fast.double()(torch.randn(3, 40).double()).dtype is torch.float64
    with pytest.raises(RuntimeError):
        FastLayerNorm.of(norm.float())(torch.randn(3, 39))


class Blocks(nn.Module):
    """Two halves of a transformer's block: a norm behind a sum that nothing else reads, and one whose sum goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.after, self.before = draw_norm(24), draw_norm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(x + self.first(x))
        y = x + self.second(x)
        return y + F.gelu(self.before(y))


@torch.no_grad()
def test_a_converted_model_adds_and_normalises_at_once() -> None:
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.randn(2, 11, 24)
    choices = {name: LayerPattern(Unstructured()) for name in ("first", "second")}
    converted = convert(model, choices, (x,))
    taken = {str(node.target): "added" in node.kwargs for node in converted.graph.nodes if node.op == "call_module"}
    assert (taken["after"], taken["before"]) == (True, False)
    assert all(isinstance(converted.get_submodule(name), FastLayerNorm) for name in ("after", "before"))
    for images in (x, torch.randn(1, 3, 24)):
        torch.testing.assert_close(converted(images), model(images), rtol=1e-4, atol=1e-5)
    again = pickle.loads(pickle.dumps(converted))
    torch.testing.assert_close(again(x), converted(x), rtol=0, atol=0)
    assert set(model.state_dict()) >= {name for name in converted.state_dict() if "after" in name or "before" in name}


@torch.no_grad()
def test_what_is_changed_before_the_norm_is_added_where_it_was() -> None:
    class Changed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            total = y + x
            z = self.second(y.mul_(2))
            return self.after(total) + z

    torch.manual_seed(0)
    model, x = Changed().eval(), torch.randn(2, 11, 24)
    converted = convert(model, {"second": LayerPattern(Unstructured())}, (x.clone(),))
    torch.testing.assert_close(converted(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-5)
