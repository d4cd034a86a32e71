"""A tiny task for the pruning tests: a convolutional net with batch norms and a linear layer, made from a seed."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

name = "tiny"
excluded = ("head",)

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Six channels of 5x5 to three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(72, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.relu(self.fc(x.flatten(1))))


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Net()
        net.norm.running_mean.normal_(std=0.1)
        net.norm.running_var.uniform_(0.5, 2)
    return net.eval()


def batches(seed: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(32, 6, 5, 5, generator=generator), torch.randint(0, 3, (32,), generator=generator))
        for _ in range(count)
    ]


def example() -> tuple[Tensor]:
    return (batches(0, 1)[0][0],)


def calibration() -> list[Batch]:
    return batches(1, 6)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def score(model: nn.Module) -> float:
    with torch.no_grad():
        return -sum(loss(model, batch).item() for batch in batches(2, 2))


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    while True:
        yield batches(int(rng.integers(1000)), 1)[0]
