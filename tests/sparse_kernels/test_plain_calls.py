"""A converted model is called as any module is: in any thread, with gradients on or off."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Unstructured
from sparse_kernels.prunable_layers import weight_matrix


class Mixed(nn.Module):
    """Dense and sparse layers, attention, and a plain tensor that asks for gradients."""

    def __init__(self, traceable: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.scale = torch.full((32,), 2.0, requires_grad=True)
        self.traceable = traceable

    def forward(self, x: Tensor) -> Tensor:
        if not self.traceable and x.sum() > 1e9:
            x = -x
        q = self.first(x)[:, None]
        x = F.scaled_dot_product_attention(q, q, q)[:, 0]
        return self.last(self.norm(F.gelu(self.middle(self.encoder(x))) * self.scale))


@pytest.fixture(params=[True, False], ids=["traced", "untraced"])
def models(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor]:
    """A dense model, the same converted, and an input."""
    dense, x = Mixed(request.param).eval(), torch.randn(3, 5, 32)
    mask = Unstructured().mask(weight_matrix(dense.middle).numpy() ** 2, 0.5)
    return dense, convert(dense, {"middle": LayerPattern(Unstructured(), mask)}, (x,)), x


def test_a_plain_call_is_the_call_without_gradients(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, fast, x = models
    with torch.inference_mode():
        expected = fast(x)
    with torch.no_grad():
        assert torch.equal(fast(x), expected)
    assert torch.is_grad_enabled()
    found = fast(x)
    assert torch.equal(found, expected) and not found.requires_grad


def test_threads_of_a_server_call_it(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, fast, x = models
    with torch.no_grad():  # of this thread alone
        expected = fast(x)
        with ThreadPoolExecutor(3) as pool:
            assert all(torch.equal(found, expected) for found in pool.map(fast, [x] * 12))


def test_an_input_that_requires_grad_is_refused_in_a_sentence(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, fast, x = models
    with pytest.raises(RuntimeError, match=r"an input requires grad: call the model under torch\.no_grad\(\)"):
        fast(x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(fast(x.clone().requires_grad_()), fast(x))


def test_the_given_model_keeps_its_gradients(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    dense, _, x = models
    assert all(parameter.requires_grad for parameter in dense.parameters()) and dense.scale.requires_grad
    dense(x).sum().backward()
    assert dense.middle.weight.grad is not None
