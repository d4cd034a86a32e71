"""Images stay in frames between sparse convolutions, and the model stays the function that it was."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.layouts import padded_images as frames
from sparse_kernels.nn import SparseConv2d
from sparse_kernels.patterns import Pattern, Unstructured, VectorWise
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix
from sparse_kernels.tensors.padded_conv import frame, unframe


def conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, padding: int | None = None) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2 if padding is None else padding)


class Bottleneck(nn.Module):
    """As in ResNet50, in place where torchvision's is."""

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(c_in, width, 1), conv(width, width, 3, stride)
        self.conv3, self.relu = conv(width, 2 * width, 1), nn.ReLU(inplace=True)
        self.shortcut = conv(c_in, 2 * width, 1, stride) if stride > 1 or c_in != 2 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(self.relu(self.conv2(self.relu(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class Joined(nn.Module):
    """Layers a and b, joined as told."""

    def __init__(self, join: Callable[[nn.Module, nn.Module, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.join, (self.a, self.b) = join, layers

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.a, self.b, x)


def changed_between(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """What a gives is changed in place before b reads it, and read again."""
    y = a(x)
    z = F.relu_(y)
    return b(y) + z


def changed_input(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """The sum goes where x was, and what reads x afterwards reads the sum."""
    x = x * 2
    y = a(x)
    x += y
    return b(x) + x


def changed_by_a_view(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    y = a(x)
    y[:, :2].clamp_(max=0.1)
    return b(y)


def changed_by_another_name(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    y = a(x)
    z = F.relu_(F.dropout(y, training=False))
    return b(y) + z


def changed_as_out(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    y = a(x)
    torch.mul(x, 2, out=y)
    return b(y)


def changed_parts(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    y = a(x)
    first, second = y.chunk(2, 1)
    first.add_(second)
    return b(y)


def changed_before_the_sum(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """What b reads is changed in place before b's result is added to."""
    y = a(x)
    z = b(y)
    w = F.relu_(y)
    return z + x + w


CONVS = conv(8, 8), conv(8, 8)
MODELS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "in a row": (nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 8), conv(8, 6, 5), nn.ReLU()), (3, 4, 9, 11), 2),
    "bottlenecks": (
        nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(16, 8, 1), Bottleneck(16, 8, 2), Bottleneck(16, 8, 1)),
        (2, 8, 14, 15),
        14,
    ),
    "a dense one between": (nn.Sequential(conv(4, 8), nn.Conv2d(8, 8, 3, groups=2), conv(8, 8)), (2, 4, 17, 16), 0),
    "functions that keep zeros": (nn.Sequential(conv(4, 8), nn.SiLU(), conv(8, 8), nn.Hardswish()), (2, 4, 7, 7), 1),
    "one that does not": (nn.Sequential(conv(4, 8), nn.Sigmoid(), conv(8, 8)), (2, 4, 7, 7), 0),
    "in place": (nn.Sequential(conv(4, 8), nn.SiLU(inplace=True), conv(8, 8)), (2, 4, 7, 7), 1),
    "gelu after a sum": (Joined(lambda a, b, x: F.gelu(b(a(x)) + x), *CONVS), (2, 8, 6, 40), 2),
    "the sum of both": (Joined(lambda a, b, x: F.relu(a(x) + b(x)), *CONVS), (2, 8, 6, 6), 2),
    "added twice": (Joined(lambda a, b, x: torch.add(b(a(x)), x).relu() + x, *CONVS), (2, 8, 6, 6), 2),
    "added to itself": (Joined(lambda a, b, x: (y := b(a(x))) + y, *CONVS), (2, 8, 6, 6), 1),
    "a number is added": (Joined(lambda a, b, x: b(a(x) + 1), *CONVS), (2, 8, 6, 6), 0),
    "broadcast": (Joined(lambda a, b, x: b(a(x) + x.mean((2, 3), keepdim=True)), *CONVS), (2, 8, 6, 6), 1),
    "twice": (Joined(lambda a, b, x: b(a(x)) + a(x), *CONVS), (2, 8, 6, 6), 3),
    "changed between": (Joined(changed_between, *CONVS), (2, 8, 6, 6), 0),
    "changed input": (Joined(changed_input, *CONVS), (2, 8, 6, 6), 2),
    "changed by a view": (Joined(changed_by_a_view, *CONVS), (2, 8, 6, 6), 0),
    "changed by another name": (Joined(changed_by_another_name, *CONVS), (2, 8, 6, 6), 0),
    "changed as out": (Joined(changed_as_out, *CONVS), (2, 8, 6, 6), 0),
    "changed parts": (Joined(changed_parts, *CONVS), (2, 8, 6, 6), 0),
    "a size is added": (Joined(lambda a, b, x: b(a(x) + x.shape[1]), *CONVS), (2, 8, 6, 6), 1),
    "a wide one": (nn.Sequential(conv(4, 8), conv(8, 8, 13), conv(8, 8)), (2, 4, 9, 9), 2),
    "changed before the sum": (Joined(changed_before_the_sum, *CONVS), (2, 8, 6, 6), 0),
    "smaller": (nn.Sequential(conv(4, 8), conv(8, 8, padding=0), conv(8, 8)), (2, 4, 9, 9), 2),
    "a single position": (nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 8)), (2, 4, 1, 1), 1),
    "without a batch": (nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 8)), (4, 6, 6), 1),
    "viewed afterwards": (Joined(lambda a, b, x: b(a(x)).view(x.shape[0], -1), *CONVS), (2, 8, 6, 6), 1),
}  # fmt: skip


def prepared(
    name: str, pattern: Pattern, rng: np.random.Generator
) -> tuple[nn.Module, dict[str, LayerPattern], Tensor]:
    """(masked model, choices, input)."""
    torch.manual_seed(int(rng.integers(2**31)))
    model, choices = copy.deepcopy(MODELS[name][0]).eval(), {}
    for layer_name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            mask = pattern.mask(rng.random(weight_matrix(layer).shape), 0.5)
            choices[layer_name] = LayerPattern(pattern, mask)
            set_weight_matrix(layer, torch.where(torch.from_numpy(mask), weight_matrix(layer), 0.0))
    return model, choices, torch.randn(MODELS[name][1])


def in_frames(converted: nn.Module) -> int:
    """How many values the model's sparse convolutions are asked to leave in frames."""
    return sum("margin" in node.kwargs for node in converted.graph.nodes)


@pytest.mark.parametrize("pattern", [VectorWise(8), Unstructured()], ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_model_is_the_same_function(name: str, pattern: Pattern, rng: np.random.Generator) -> None:
    model, choices, x = prepared(name, pattern, rng)
    converted = convert(model, choices, (x,))
    assert in_frames(converted) == MODELS[name][2]
    for batch in (x, torch.cat([x, x.flip(0), x]) if x.ndim == 4 else -x, x):
        before = batch.clone()
        expected = model(batch.clone())
        # Twice: frames are used again, and what was in them must not show.
        for _ in range(2):
            torch.testing.assert_close(converted(batch.clone()), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(batch, before)
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(twin(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-5)
        assert in_frames(twin) == in_frames(converted)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@torch.no_grad()
def test_only_numbas_layers_know_frames(backend: str, rng: np.random.Generator) -> None:
    model, choices, x = prepared("bottlenecks", Unstructured(), rng)
    assert (in_frames(convert(model, choices, (x,), backend=backend)) > 0) == (backend == "numba")


@torch.no_grad()
def test_a_layer_takes_frames_and_gives_them_only_where_asked(rng: np.random.Generator) -> None:
    layer = conv(4, 6)
    sparse = SparseConv2d.from_dense(layer, Unstructured(), np.ones((6, 36), bool))
    slow = SparseConv2d.from_dense(layer, Unstructured(), np.ones((6, 36), bool), backend="reference")
    x, other = torch.randn(2, 4, 5, 6), torch.randn(2, 6, 5, 6)
    expected = F.relu(layer(x) + other)
    for each in (sparse, slow):
        for images in (x, frame(x, 1), frame(x, 3)):
            for added in (other, frame(other, 1), frame(other, 2)):
                for margin in (None, 1, 2):
                    y = each(images, margin=margin, added=added, then="relu")
                    torch.testing.assert_close(unframe(y), expected, rtol=1e-4, atol=1e-5)
                    assert margin is not None or isinstance(y, Tensor)
    assert isinstance(sparse(frame(x, 1), margin=1, added=frame(other, 1)), frames.FramedImages)
    with pytest.raises(ValueError, match="4 channels, not 6"):
        sparse(frame(other, 1), margin=1)


@torch.no_grad()
def test_images_come_out_of_a_frame_as_they_went_in(rng: np.random.Generator) -> None:
    for shape in ((2, 3, 5, 7), (1, 1, 1, 1), (3, 2, 1, 17)):
        x = torch.randn(shape)
        for margin in (0, 1, 3):
            y = frame(x, margin)
            assert isinstance(y, frames.FramedImages)
            assert torch.equal(unframe(y), x)
            assert np.count_nonzero(y.array) == x.numel()  # all else is zero
            assert y.array.ctypes.data % 64 == 0


def test_copies_of_a_frame_are_images_of_their_own() -> None:
    y = frame(torch.ones(2, 3, 5, 7), 1)
    copies = copy.deepcopy(y), pickle.loads(pickle.dumps(y))
    y.array[:] = 7
    for each in copies:
        assert torch.equal(unframe(each), torch.ones(2, 3, 5, 7))
        assert each.array.ctypes.data == each.address


def test_what_cannot_be_framed_stays_as_it_is() -> None:
    x = torch.randn(2, 3, 5, 7)
    for images in (x.double(), x[0], x[:0], x.clone().requires_grad_()):
        assert frame(images, 1) is images


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> frames.Spare:
    """Frames of this test alone."""
    mine = frames.Spare()
    monkeypatch.setattr(frames, "_spare", mine)
    return mine


def test_a_frame_is_used_again_when_nobody_has_it(spare: frames.Spare) -> None:
    places = frames.ImagePlaces(1, 2, 3, 4, 1)
    first, second = frames.FramedImages(places), frames.FramedImages(places)
    assert not np.may_share_memory(first.array, second.array)
    at = first.array.ctypes.data
    del first
    assert frames.FramedImages(places).array.ctypes.data == at
    assert frames.FramedImages(frames.ImagePlaces(1, 2, 3, 4, 2)).array.ctypes.data != at


def test_frames_that_nobody_uses_take_no_more_than_so_much_memory(
    spare: frames.Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [frames.ImagePlaces(1, 1, 8, size, 1) for size in range(8, 40)]
    monkeypatch.setattr(frames, "KEPT", 4 * sum(each.size for each in places[-3:]))
    for each in places:
        frames.FramedImages(each)
    frames.FramedImages(places[-1])
    waiting = {each for each in places if frames.find_floats_home(each).free}
    assert waiting == set(places[-3:])
    assert spare.allocated_bytes == sum(4 * each.size for each in places[-3:]) == frames.KEPT


def test_frames_unused_for_longest_go_first(spare: frames.Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (frames.ImagePlaces(1, 1, 8, 16, margin) for margin in (1, 2, 3))
    monkeypatch.setattr(frames, "KEPT", 4 * max(first.size, second.size, third.size))
    for each in (first, second, first, third, first):  # more than is kept, from the second on
        frames.FramedImages(each)
    waiting = {each for each in (first, second, third) if frames.find_floats_home(each).free}
    assert first in waiting
    assert second not in waiting


def test_what_could_not_be_allocated_does_not_count(spare: frames.Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(frames, "allocate_aligned", refuse)
    with pytest.raises(MemoryError):
        frames.FramedImages(frames.ImagePlaces(1, 2, 3, 4, 1))
    assert spare.allocated_bytes == 0


def test_garbage_may_be_collected_while_a_frame_is_taken(spare: frames.Spare) -> None:
    """A frame in a cycle, as one that an exception's traceback keeps, goes wherever Python happens to collect."""

    class Cycle:
        def __init__(self) -> None:
            self.frame, self.me = frames.FramedImages(frames.ImagePlaces(1, 1, 4, 4, 1)), self

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Cycle()
            frames.FramedImages(frames.ImagePlaces(1, 1, 5, 5, 1))
    finally:
        gc.set_threshold(*before)


@torch.no_grad()
def test_threads_of_the_caller_share_a_converted_model(rng: np.random.Generator) -> None:
    model, choices, x = prepared("bottlenecks", Unstructured(), rng)
    converted = convert(model, choices, (x,))
    inputs = [torch.randn_like(x) for _ in range(4)]
    expected, found = [model(each.clone()) for each in inputs], [[] for _ in inputs]

    def run(number: int) -> None:
        with torch.no_grad():
            found[number] = [converted(inputs[number].clone()) for _ in range(20)]

    callers = [threading.Thread(target=run, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for results, right in zip(found, expected, strict=True):
        assert len(results) == 20
        for result in results:
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_frame_that_is_not_zero_is_seen(rng: np.random.Generator, spare: frames.Spare) -> None:
    """What the tests above rest on: a convolution that reads frames does read their zeros."""
    layer = conv(4, 6)
    sparse = SparseConv2d.from_dense(layer, Unstructured(), np.ones((6, 36), bool))
    x = frame(torch.randn(2, 4, 5, 6), 1)
    right = unframe(sparse(x))
    x.array[x.places.first + 6] = 1.0  # behind the first row
    assert not torch.equal(unframe(sparse(x)), right)
    x.array[x.places.first + 6] = 0.0
    assert torch.equal(unframe(sparse(x)), right)
