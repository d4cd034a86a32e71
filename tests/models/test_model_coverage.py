"""The check of other libraries' models counts what a model computes, and sees what is wrong."""

import pytest
import torch
import torch.nn.functional as F
from model_coverage import ACTIVATIONS, Row, check_model, differ, explain_rest, list_tensors, summarize
from model_zoo import MODELS, ZooModel
from multiply_adds import Product, count_multiply_adds
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern
from sparse_kernels.nn import SparseLinear


class Mixed(nn.Module):
    """Each kind of product: of layers that are taken and not, of weights that are only read, of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=4)
        self.fc, self.read = nn.Linear(16, 5), nn.Linear(5, 7)
        self.experts = nn.Parameter(torch.randn(3, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.fc(self.grouped(self.conv(x)).flatten(2)), self.read.weight)
        y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None])[:, 0]
        return y[:, :3] @ self.experts[0]


COUNTED = {
    Product("conv", "conv"): 2 * 8 * 36 * 8 * 9,
    Product("grouped", "grouped"): 2 * 8 * 16 * 2 * 9,
    Product("fc", "fc"): 2 * 8 * 16 * 5,
    Product("", "read"): 2 * 8 * 5 * 7,
    Product("", None): 2 * (8 * 8 * 7 + 8 * 8 * 7),
    Product("", ""): 2 * 3 * 7 * 7,
}


def test_every_product_is_counted_once_and_where_it_is_done() -> None:
    assert count_multiply_adds(Mixed(), (torch.randn(2, 8, 8, 8),), {}) == COUNTED


def test_what_is_not_taken_has_a_reason() -> None:
    model = Mixed()
    assert explain_rest(model, count_multiply_adds(model, (torch.randn(2, 8, 8, 8),), {})) == {
        "a grouped convolution (4 groups) has no sparse kernel": 4608,
        "weights of layers that Mixed reads and does not call": 560,
        ACTIVATIONS: 1792,
        "a Mixed has no sparse kernel": 294,
    }


class Cache:
    def __init__(self) -> None:
        self.keys, self.owner = [torch.ones(2), torch.zeros(3)], self


def test_tensors_in_caches_are_compared_too() -> None:
    found = list(list_tensors({"logits": torch.ones(1), "past": (Cache(), "text", None)}, set()))
    assert [len(each) for each in found] == [1, 2, 3]


def test_a_difference_is_relative_to_the_largest_number_and_infinite_for_what_cannot_be_compared() -> None:
    a = torch.tensor([4.0, 1.0, -torch.inf])
    assert differ([a], [torch.tensor([4.0, 0.0, -torch.inf])]) == 0.25
    assert differ([a], [torch.tensor([4.0, 1.0, torch.inf])]) == torch.inf
    assert differ([a], [torch.tensor([4.0, torch.nan, -torch.inf])]) == torch.inf
    assert differ([a], [a[:2]]) == differ([a], [a, a]) == torch.inf


class Tiny(ZooModel):
    """A model of no library."""

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 32), nn.GELU(), nn.Linear(32, 16)).eval()


TINY = Tiny("none", "tiny", size=8)


def test_a_model_that_is_converted_as_it_should_be_has_no_fault() -> None:
    row = check_model(TINY, "reference")
    assert (row.fault, row.refusal, row.taken, row.share, row.measured) == ("", "", 2, 1.0, 1.0)
    assert 0 < row.difference < 1e-5


def test_a_kernel_that_is_wrong_beyond_the_example_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SparseLinear.compute
    wrong = lambda self, x, keep=False: right(self, x) * (1.01 if len(x) == 3 else 1.0)  # noqa: E731
    monkeypatch.setattr(SparseLinear, "compute", wrong)
    row = check_model(TINY, "reference")
    assert row.fault.startswith("dense, another batch: results differ by 0.0")
    assert summarize([row, Row(TINY)]).endswith("0 are refused, and 1 give wrong results.")


def test_what_conversion_refuses_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> LayerPattern:
        raise ValueError("layer '1': no")

    monkeypatch.setattr("model_coverage.convert", refuse)
    row = check_model(TINY, "reference")
    assert (row.refusal, row.fault) == ("layer '1': no", "")


def test_models_are_sixty_and_have_names_of_their_own() -> None:
    assert len({(entry.library, entry.name) for entry in MODELS}) == len(MODELS) == 60
