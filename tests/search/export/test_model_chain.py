"""A model becomes a chain of steps, or is refused by the name of the first thing that a chain lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latbench.errors import UsageError
from search.export.c_library.chain_source import generate_chain
from search.export.c_library.model_chain import ADD, LAYER, RELU, ModelChain, trace_chain


class Residual(nn.Module):
    """x + fc2(relu(fc1(x))), then ReLU, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + self.fc2(torch.relu(self.fc1(x))))
        y: Tensor = self.head(x) + self.head.bias.sum()
        return y


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.fc(x))
        return y


class Branch(nn.Module):
    """What torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def trace(model: nn.Module, *shape: int) -> ModelChain:
    return trace_chain(model.eval(), {}, torch.zeros(shape))


def test_activations_become_part_of_their_layers() -> None:
    chain = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3), nn.GELU()), 5, 4)
    assert [(each.name, each.activation) for each in chain.layers] == [("0", "relu"), ("3", "gelu")]
    assert [step.kind for step in chain.steps] == [LAYER, LAYER]
    assert (chain.shapes[0], chain.shapes[chain.result]) == ((4,), (3,))


class Readers(nn.Module):
    """A layer, and what `read` makes of its result y, with x and a second layer."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fc, self.fc2, self.drop, self.relu = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Dropout(),
            nn.ReLU(inplace=True),
        )
        self._read = read

    def forward(self, x: Tensor) -> Tensor:
        return self._read(self, x, self.fc(x))


def count_reads(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    return y + torch.relu(self.drop(y))


def flatten_before(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    flat = torch.flatten(y, 1)
    return flat + torch.relu(y)


def flatten_behind(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(y)
    return z + y.flatten(1)


def sum_twice(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    return torch.relu(self.drop(z)) + z.flatten(1)


@pytest.mark.parametrize("read", [count_reads, flatten_before, flatten_behind, sum_twice])
def test_what_another_name_of_a_value_reads_has_no_activation(read: Callable[..., Tensor]) -> None:
    chain = trace(Readers(read), 2, 4)
    assert chain.layers[0].activation is None
    assert not any(step.relu for step in chain.steps if step.kind == ADD)
    assert [step.kind for step in chain.steps].count(RELU) == 1


def relu_in_place(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    z = self.relu(y)
    return z + y


def add_in_place(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    return self.fc2(y.add_(x)) + y


def keep_the_old_name(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    torch.relu_(y.flatten(1))
    return y


def change_the_input(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    z = x
    z += y
    return self.fc2(z) + x


def read_flat(self: Readers, x: Tensor, y: Tensor) -> Tensor:
    flat = y.flatten(1)
    F.relu(y, True)
    return self.fc2(flat)


@pytest.mark.parametrize("read", [relu_in_place, add_in_place, keep_the_old_name, read_flat])
def test_a_change_in_place_that_others_see_is_refused(read: Callable[..., Tensor]) -> None:
    with pytest.raises(UsageError, match=r"changes a value in place, which \w+ reads afterwards"):
        trace(Readers(read), 2, 4)


def test_a_change_in_place_that_a_trace_loses_is_refused() -> None:
    with pytest.raises(UsageError, match=r"what torch\.fx traces gives other results than the model"):
        trace(Readers(change_the_input), 2, 4)


def test_a_change_in_place_that_nobody_else_sees_is_a_step() -> None:
    def read(self: Readers, x: Tensor, y: Tensor) -> Tensor:
        y += x
        return self.fc2(self.relu(y))

    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    chain = trace_chain(Readers(read).eval(), {}, x)
    assert [(step.kind, step.relu) for step in chain.steps] == [(LAYER, False), (ADD, True), (LAYER, False)]
    trace_chain(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).eval(), {}, x)
    assert torch.equal(x, before)


def test_a_value_keeps_its_shape_beside_its_flat_name() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.conv2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
            self.fc = nn.Linear(4 * 20, 4 * 20)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.fc(y.flatten(1)) + self.conv2(y).flatten(1)

    chain = trace(Both(), 2, 3, 4, 5)
    image = chain.layers[-1].image
    assert image is not None and (image.c_in, image.h, image.w) == (4, 4, 5)
    assert chain.shapes[chain.result] == (80,)
    flat = trace(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), 2, 3, 4)
    assert flat.shapes[0] == (3, 4)
    assert trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), 2, 3, 4, 5).shapes[1] == (80,)


def test_a_layer_with_a_hook_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda module, given, result: result + 1)
    with pytest.raises(UsageError, match="0 has hooks"):
        trace(model, 2, 4)


def test_an_activation_of_a_value_that_others_read_stays_a_step() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return y + torch.relu(y)

    chain = trace(Shared(), 2, 4)
    assert [step.kind for step in chain.steps] == [LAYER, RELU, ADD]
    assert chain.layers[0].activation is None


def test_images_are_flattened_for_a_linear_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))
    chain = trace(model, 2, 3, 5, 5)
    assert [each.image is not None for each in chain.layers] == [True, False]
    assert chain.layers[0].image is not None and chain.layers[0].image.out_h == 3
    assert "latbench_conv2d(model, 0, x, batch, 3, 5, 5" in generate_chain(chain)


def test_a_layer_sees_each_token_of_an_input() -> None:
    chain = trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), 2, 7, 4)
    assert "latbench_linear(model, 0, x, batch * 7, 4, v1, 8, threads, error)" in generate_chain(chain)


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (2, 4), "1 \\(Softmax\\) is not supported"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), (2, 4, 5, 5), "0 \\(Conv2d\\) is not supported"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (2, 4), "1 \\(LayerNorm\\) is not supported"),
        (nn.Sequential(nn.GELU(), nn.Linear(4, 4)), (2, 4), "0 \\(GELU\\) is not supported"),
        (Residual(), (2, 6), "is no float32 tensor"),
        (Twice(), (2, 6), "calls layer fc twice"),
        (Branch(), (2, 6), "torch.fx cannot trace it"),
        (Readers(lambda self, x, y: self.fc2(input=y)), (2, 4), "fc2 \\(Linear\\) is not supported"),
        (Readers(lambda self, x, y: torch.relu(input=y)), (2, 4), "relu is not supported"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), (3, 5, 6), "gets an image without a batch"),
        (nn.Sequential(nn.Identity()), (2, 6), "no layer of it computes its result"),
    ],
)
def test_what_is_no_chain_is_refused_by_name(model: nn.Module, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace(model, *shape)
