"""A task for latbench: a small CNN for handwritten digits. It runs as it stands.

Put your own model and data where REPLACE is written, then try `latbench check` on this file.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

score_name = "accuracy"  # REPLACE: the name of what score() returns
excluded = ("0", "14")  # REPLACE: layers that stay dense, by name (layer1.* works); here the first and the last
limits: dict[str, list[list[str]]] = {}  # or {"tied": [["3", "6"]]}, for layers that get the same pattern

WEIGHTS = Path(__file__).with_suffix(".pt")  # REPLACE: the file with your trained weights
data = load_digits()  # REPLACE: your data. Several processes import this file, so read it quickly
pixels = np.kron(data.images, np.ones((2, 2))) / 16  # each pixel four times: images of 16 x 16
images, labels = torch.tensor(pixels, dtype=torch.float32)[:, None], torch.tensor(data.target)


def model() -> nn.Module:
    """Return a new model with its trained weights. They must be the same in each call and each process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []  # REPLACE: your architecture
    for c_in, c_out, stride in ((1, 32, 1), (32, 64, 2), (64, 128, 1), (128, 128, 1)):
        layers += [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    if not WEIGHTS.exists():
        train(network)  # REPLACE: remove these two lines and train(), because your weights are trained
    network.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return network.eval()


def example() -> tuple[Tensor]:
    """Return the arguments of the call that is timed. The first dimension is the batch."""
    return (images[-16:],)  # REPLACE: inputs of the size that you deploy with


def calibration() -> list[tuple[Tensor, Tensor]]:
    """Return some batches of training data, the same in each call. A few hundred samples are enough."""
    return [(images[i : i + 64], labels[i : i + 64]) for i in range(0, 512, 64)]  # REPLACE: your batches


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of one batch, a scalar that has gradients."""
    return cross_entropy(model(batch[0]), batch[1])  # REPLACE: the loss that your model was trained with


def score(model: nn.Module) -> float:
    """Return the quality on data that was not used for training. A higher score is better."""
    return float((model(images[1300:]).argmax(1) == labels[1300:]).float().mean())  # REPLACE: your metric


def train_batches(rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield training batches for `latbench prune --recipe`. Remove this function if you do not fine-tune."""
    while True:  # REPLACE: your training data, drawn with rng
        chosen = torch.from_numpy(rng.integers(0, 1300, 32))
        yield images[chosen], labels[chosen]


def train(network: nn.Module) -> None:
    """Train the network in a few seconds, and save its weights: every later process reads them."""
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for _, batch in zip(range(120), train_batches(np.random.default_rng(0)), strict=False):
        optimizer.zero_grad()
        loss(network, batch).backward()
        optimizer.step()
    torch.save(network.state_dict(), WEIGHTS)
