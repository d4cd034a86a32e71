"""A task for latbench: the bundled digits with noise, moved by up to two pixels, so that pruning can lose accuracy.

`model()` trains the network of `digits` on first use, in about a minute, and keeps the weights in latbench's cache
folder. A batch is (images, labels); images are float32 rows of 64 pixels.
"""

import hashlib
from collections.abc import Iterator
from functools import cache

import filelock
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from latbench.base.files import find_cache_folder, write_atomically
from search.tasks import digits

Batch = tuple[Tensor, Tensor]

name = "noisy-digits"
score_name = "accuracy on 540 test images, ten times with other noise"
excluded = digits.excluded
loss = digits.loss

NOISE, MOVED = 0.3, 2
"""The noise's standard deviation, and pixels; the brightest pixel of a clean image is 1."""

STEPS, BATCH, SEED = 1000, 128, 2026
CALIBRATION_BATCHES, REPEATS = 12, 10


def model() -> nn.Module:
    depends = repr((digits.TRAINING, NOISE, MOVED, STEPS, BATCH, SEED)).encode()
    path = find_cache_folder() / "tasks" / f"{name}-{hashlib.sha256(depends).hexdigest()[:12]}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = digits.ResidualMLP(digits.TRAINING.width, digits.TRAINING.hidden, digits.TRAINING.blocks)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _train(network)
            write_atomically(path, lambda temporary: save_file(network.state_dict(), temporary))
    network.load_state_dict(load_file(path))
    return network.eval()


def example() -> tuple[Tensor]:
    return (_test_batches()[0][0][:BATCH],)


def calibration() -> list[Batch]:
    """Training images, disturbed as in training."""
    batches = train_batches(np.random.default_rng(0))
    return [next(batches) for _ in range(CALIBRATION_BATCHES)]


def score(model: nn.Module) -> float:
    with torch.no_grad():
        right = [(model(images).argmax(dim=1) == labels) for images, labels in _test_batches()]
    return torch.cat(right).double().mean().item()


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    """Endless batches of 128 training images."""
    images, labels = digits._splits()["train"]
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = torch.from_numpy(order[start : start + BATCH])
            yield _disturb(images[chosen], rng), labels[chosen]


def _disturb(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Images (n, 64), each moved and with noise of its own."""
    n, wide = len(images), 8 + 2 * MOVED
    padded = pad(images.view(n, 8, 8), [MOVED] * 4)
    corners = torch.from_numpy(rng.integers(0, 2 * MOVED + 1, (2, n, 1)))
    rows, columns = corners + torch.arange(8)
    moved = padded.view(n, wide * wide).gather(1, (rows[:, :, None] * wide + columns[:, None, :]).view(n, 64))
    return moved + NOISE * torch.from_numpy(rng.standard_normal((n, 64), dtype=np.float32))


def _train(network: nn.Module) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=digits.TRAINING.learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, digits.TRAINING.learning_rate, total_steps=STEPS)
    batches = train_batches(np.random.default_rng(SEED))
    network.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(network, next(batches)).backward()
        optimizer.step()
        schedule.step()


@cache
def _test_batches() -> list[Batch]:
    images, labels = digits._splits()["test"]
    return [(_disturb(images, np.random.default_rng(SEED + i)), labels) for i in range(REPEATS)]
