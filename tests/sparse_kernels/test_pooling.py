"""Max pooling of a converted model gets images with channels last, and gives them as torch always does."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Unstructured


class Pooled(nn.Module):
    """A dense and a sparse convolution, each with a pooling behind it; the result is viewed, which copies nothing."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.dense, self.sparse = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.first, self.second, self.function = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), function

    def forward(self, x: Tensor) -> Tensor:
        first = F.max_pool2d(F.relu(self.dense(x)), 3, 2, 1) if self.function else self.first(F.relu(self.dense(x)))
        y = self.second(self.sparse(first))
        return y.view(y.shape[0], -1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("function", [False, True])
@torch.no_grad()
def test_pooling_works_with_channels_last(function: bool, batch: int) -> None:
    torch.manual_seed(batch)
    model, x = Pooled(function).eval(), torch.randn(batch, 3, 12, 13)
    converted = convert(model, {"sparse": LayerPattern(Unstructured())}, (x,))
    plain, last = copy.deepcopy(converted), []
    for name in ("first", "second")[function:]:
        pool = converted.get_submodule(name)
        pool.register_forward_pre_hook(
            lambda _, args: last.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pickle.loads(pickle.dumps(plain))(x), model(x), rtol=1e-4, atol=1e-5)
    assert last == [True] * (2 - function)
    # What the dense layer gives has that order already: nothing is copied for the first pooling.
    assert converted.dense(x).is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_poolings_in_a_row_and_what_reads_between_them() -> None:
    class Pyramid(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            y = self.sparse(self.dense(x))
            first = self.first(y)
            second = self.second(first)
            return torch.cat([first.view(x.shape[0], -1), second.view(x.shape[0], -1)], 1)

    torch.manual_seed(0)
    model, x = Pyramid(False).eval(), torch.randn(2, 3, 12, 13)
    converted = convert(model, {"sparse": LayerPattern(Unstructured())}, (x,))
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_no_batch_or_gives_places_is_pooled_as_before() -> None:
    class Places(Pooled):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, places = F.max_pool2d(self.sparse(self.dense(x)), 2, return_indices=True)
            return self.second(y), places

    torch.manual_seed(0)
    for model, x in ((Places(True).eval(), torch.randn(2, 3, 12, 13)), (Places(True).eval(), torch.randn(3, 12, 13))):
        converted = convert(model, {"sparse": LayerPattern(Unstructured())}, (x,))
        for result, expected in zip(converted(x), model(x), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
