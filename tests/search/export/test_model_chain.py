"""A model becomes a chain of steps, or is refused by the name of the first thing that a chain lacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.export.chain_source import generate_chain
from search.export.model_chain import ADD, LAYER, RELU, ModelChain, trace_chain


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
        (nn.Sequential(nn.Identity()), (2, 6), "no layer of it computes its result"),
    ],
)
def test_what_is_no_chain_is_refused_by_name(model: nn.Module, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace(model, *shape)
