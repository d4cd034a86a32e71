"""Large batches of images are computed a few at a time, with the result that all at once have."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.graph_passes import image_turns
from sparse_kernels.graph_passes.image_turns import ImageTurns, split_graph
from sparse_kernels.patterns import parse


class Residual(nn.Module):
    """A small network with all that images may meet: strides, padding, pooling, sums, a slice, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.gate, self.down = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.first(x))))
        x = F.relu(x + self.two(F.relu(self.one(x))))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
        x = F.relu(self.down(x) + shortcut)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def build(rng: np.random.Generator, model: nn.Module | None = None, names: tuple[str, ...] = ()) -> nn.Module:
    model = (model or Residual()).eval()
    pattern = parse("vector:8")
    choices = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels >= 16 and (not names or name in names):
            importance = rng.random((layer.out_channels, layer.weight[0].numel()))
            choices[name] = LayerPattern(pattern, pattern.mask(importance, 0.5))
    return convert(model, choices, (torch.randn(2, 3, 12, 12),))


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an image a thread be a turn."""
    monkeypatch.setattr(image_turns, "TURN_BYTES", 1)


def count_turns(model: nn.Module, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return the result, and how many images each call of the first layer had."""
    seen: list[int] = []
    layer = model.get_submodule("one")
    plain = type(layer).__call__

    def noted(self: nn.Module, *args: object, **keywords: object) -> object:
        if self is layer:
            given = args[0]
            seen.append(len(given) if isinstance(given, Tensor) else given.places.batch)  # type: ignore[attr-defined]
        return plain(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "__call__", noted)
        return model(x), seen


@pytest.mark.usefixtures("small_turns")
@pytest.mark.parametrize("batch", [2, 7, 8])
def test_turns_give_what_all_at_once_do(rng: np.random.Generator, batch: int) -> None:
    torch.manual_seed(0)
    model = build(rng)
    assert isinstance(model, ImageTurns)
    torch.set_num_threads(2)
    x = torch.randn(batch, 3, 12, 12)
    expected = model.forward(x)
    model(x)  # looks how large its images are
    y, seen = count_turns(model, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert seen == {2: [2], 7: [3, 2, 2], 8: [2, 2, 2, 2]}[batch]


def test_few_small_images_are_computed_at_once(rng: np.random.Generator) -> None:
    model = build(rng)
    x = torch.randn(64, 3, 12, 12)
    model(x)
    assert count_turns(model, x)[1] == [64]


@pytest.mark.usefixtures("small_turns")
def test_copies_and_pickles_take_turns_too(rng: np.random.Generator) -> None:
    torch.set_num_threads(2)
    model, x = build(rng), torch.randn(6, 3, 12, 12)
    expected = model(x)
    model.extra, model.classes = nn.Linear(2, 2), ["cat", "dog"]  # type: ignore[assignment]
    restored = pickle.loads(pickle.dumps(model))
    assert restored.classes == ["cat", "dog"] and restored.state_dict().keys() == model.state_dict().keys()
    del model.extra
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again(x)
        y, seen = count_turns(again, x)
        torch.testing.assert_close(y, expected)
        assert seen == [2, 2, 2] and again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.usefixtures("small_turns")
def test_a_layer_that_is_replaced_or_watched_is_asked(rng: np.random.Generator) -> None:
    torch.set_num_threads(2)
    model, x = build(rng), torch.randn(6, 3, 12, 12)
    before = model(x)
    seen: list[int] = []
    handle = model.get_submodule("first").register_forward_hook(lambda _, args, y: seen.append(len(args[0])))
    torch.testing.assert_close(model(x), before)
    assert seen == [6]  # hooks see the whole batch
    handle.remove()
    for name, layer in (("head", nn.Linear(32, 5)), ("first", nn.Conv2d(3, 16, 3, padding=1))):
        model.set_submodule(name, layer.requires_grad_(False))
        after = model(x)
        assert not torch.allclose(after, before)
        torch.testing.assert_close(after, model.forward(x), rtol=1e-5, atol=1e-6)
        before = after


class Mixing(nn.Module):
    """Computes something over the batch, or changes values in place, between two layers or behind them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.one, self.two = how, nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":
            x.mul_(2.0)
        x = F.relu(self.one(x))
        if self.how == "mean":
            x = x - x.mean((0, 2), keepdim=True)
        elif self.how == "flip":
            x = torch.flip(x, (0,))
        elif self.how == "slice":
            x = x[1:, :]
        elif self.how == "gate":
            gate = F.adaptive_avg_pool2d(x, 1)
            gate.neg_()
            x = x * torch.sigmoid(gate)
        x = F.relu(self.two(x))
        if self.how == "indices":
            return x[:, [0, 1], :, [0, 1]].mean(2)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        if self.how == "pad":
            x = F.pad(x, (0, 0, 1, 0))
        elif self.how == "axes":
            x = x.mean((-2,))
        elif self.how == "all":
            x = x.mean(())
        elif self.how == "reversed":
            middle = x.mean(0)
            x = F.relu(x - 0.1, inplace=True) + middle
        return x


@pytest.mark.usefixtures("small_turns")
@pytest.mark.parametrize(
    "how", ["none", "input", "mean", "flip", "slice", "gate", "indices", "pad", "axes", "all", "reversed"]
)
def test_what_mixes_images_or_changes_values_gives_the_same(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(image_turns, "SMALLER", 0.01)
    torch.set_num_threads(2)
    torch.manual_seed(1)
    model, x = build(rng, Mixing(how), ("two",)), torch.randn(6, 3, 12, 12)
    expected = model.forward(x.clone())
    for _ in range(2):
        torch.testing.assert_close(model(x.clone()), expected, rtol=1e-5, atol=1e-6)
    if how == "none":  # all others differ from this one, which does take turns
        assert count_turns(model, x)[1] == [2, 2, 2]


@pytest.mark.usefixtures("small_turns")
def test_changes_of_the_graph_and_of_the_mode_are_followed(rng: np.random.Generator) -> None:
    torch.set_num_threads(2)
    model, x = build(rng), torch.randn(6, 3, 12, 12)
    model(x)
    assert isinstance(model, ImageTurns)
    output = next(node for node in model.graph.nodes if node.op == "output")
    with model.graph.inserting_before(output):
        output.args = (model.graph.call_function(torch.softmax, (output.args[0], 1)),)
    model.recompile()
    torch.testing.assert_close(model(x).sum(1), torch.ones(6))


@pytest.mark.usefixtures("small_turns")
def test_a_norm_in_training_sees_the_whole_batch(rng: np.random.Generator) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.norm(torch.sigmoid(self.one(x)))).mean((2, 3))  # type: ignore[no-any-return]

    torch.set_num_threads(2)
    model, x = build(rng, Late(), ("two",)), torch.randn(6, 3, 12, 12)
    model(x)
    assert count_turns(model, x)[1] == [2, 2, 2]
    expected = copy.deepcopy(model).train().forward(x)
    torch.testing.assert_close(model.train()(x), expected)


def test_a_graph_without_a_sparse_convolution_or_with_two_inputs_stays(rng: np.random.Generator) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z: Tensor = self.one(x) + y
            return z

    x = torch.randn(2, 16, 8, 8)
    pattern = parse("vector:8")
    choices = {"one": LayerPattern(pattern, pattern.mask(rng.random((16, 144)), 0.5))}
    assert not isinstance(convert(Two().eval(), choices, (x, x)), ImageTurns)
    assert split_graph(torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 3, 1)))) is None


@pytest.mark.usefixtures("small_turns")
def test_exported_and_empty_batches_go_another_way(rng: np.random.Generator) -> None:
    model = build(rng)
    x = torch.randn(6, 3, 12, 12)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)
    assert model(x[:0]).shape == (0, 5)
