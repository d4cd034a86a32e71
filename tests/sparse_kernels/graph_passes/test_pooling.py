"""Max pooling of a converted model gives what torch's does, whoever reads it."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Unstructured
from sparse_kernels.tensors.padded_conv import frame, max_pool, unframe


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
def test_what_comes_from_a_dense_convolution_is_pooled_with_channels_last(function: bool, batch: int) -> None:
    torch.manual_seed(batch)
    model, x = Pooled(function).eval(), torch.randn(batch, 3, 12, 13)
    converted = convert(model, {"sparse": LayerPattern(Unstructured())}, (x,))
    plain, last = copy.deepcopy(converted), []
    if not function:
        converted.first.register_forward_pre_hook(
            lambda _, args: last.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pickle.loads(pickle.dumps(plain))(x), model(x), rtol=1e-4, atol=1e-5)
    assert last == [True] * (not function)
    assert sum(node.target is max_pool for node in converted.graph.nodes) == 1
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


WINDOWS = [
    ((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 5), (1, 1), (1, 2)), ((3, 2), (3, 1), (0, 0)),
    ((1, 8), (4, 2), (0, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2, 9, 33), (2, 3, 13, 17), (1, 1, 3, 8)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("margins", [*itertools.product((None, 2), repeat=2)], ids=str)
def test_our_kernel_gives_what_torch_does(
    rng: np.random.Generator,
    margins: tuple[int | None, int | None],
    window: tuple[tuple[int, int], ...],
    shape: tuple[int, ...],
) -> None:
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    x.view(-1)[::17], x.view(-1)[5::19] = torch.nan, -torch.inf
    expected = F.max_pool2d(x, *window)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for _ in range(2):  # the second time with lines that the first one has used
            y = max_pool(x if margins[0] is None else frame(x, margins[0]), *window, margins[1])
            assert (margins[1] is None) == isinstance(y, Tensor)
            torch.testing.assert_close(unframe(y), expected, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_pooling_between_convolutions_stays_in_frames() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
    ).eval()
    x = torch.randn(2, 3, 12, 13)
    converted = convert(model, {name: LayerPattern(Unstructured()) for name in ("0", "2")}, (x,))
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert not [node for node in converted.graph.nodes if node.target is unframe]
    torch.testing.assert_close(pickle.loads(pickle.dumps(converted))(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(converted(x[:, :, :, :5]), model(x[:, :, :, :5]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", [2, 5])
def test_images_smaller_than_a_window_are_refused_as_torch_does(side: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(8, 2), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
    ).eval()
    converted = convert(
        model, {name: LayerPattern(Unstructured()) for name in ("0", "2")}, (torch.randn(1, 3, 12, 12),)
    )
    for x in (torch.randn(1, 3, 12, side), torch.randn(1, 3, side, 12)):
        with pytest.raises(RuntimeError, match="too small"):
            model(x)
        with pytest.raises(RuntimeError, match="too small"):
            converted(x)


@torch.no_grad()
def test_windows_that_hang_on_the_images_stay_torchs() -> None:
    class Gate(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            y = self.sparse(self.dense(x))
            whole = F.max_pool2d(y, (y.size(2), y.size(3)), stride=(y.size(2), y.size(3)))
            return whole * F.max_pool2d(y, (1, y.size(3)))

    torch.manual_seed(0)
    model, x = Gate(False).eval(), torch.randn(2, 3, 12, 13)
    converted = convert(model, {"sparse": LayerPattern(Unstructured())}, (x,))
    for images in (x, torch.randn(1, 3, 7, 9)):
        torch.testing.assert_close(converted(images), model(images), rtol=1e-4, atol=1e-5)
