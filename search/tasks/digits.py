"""The bundled task: a residual MLP that classifies handwritten digits (scikit-learn's 1,797 images of 8x8).

`model()` trains the network on first use, in about half a minute on two cores. The weights and the images are kept in
the user's cache folder (the environment variable LATBENCH_CACHE moves it). Six large linear layers take nearly all of
its time on a CPU, so the network represents the feed-forward layers of a Transformer.

Images are float32 rows of 64 pixels in [0, 1]; a batch is a pair (images (n, 64), labels (n,) int64).
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import filelock
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from latbench.base.files import find_cache_folder, write_atomically

Batch = tuple[Tensor, Tensor]

name = "digits"
score_name = "test accuracy"
excluded = ("stem", "head")

TEST_IMAGES = 540
TIMED_BATCH = 128
CALIBRATION_BATCHES = 12


@dataclass(frozen=True)
class Training:
    """Everything that the trained weights depend on. A change of any entry trains the network again."""

    version: int = 1
    seed: int = 2024
    width: int = 512
    hidden: int = 2048
    blocks: int = 3
    steps: int = 400
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.05


TRAINING = Training()


class Block(nn.Module):
    """x + fc2(relu(fc1(x))): the feed-forward layer of a Transformer, without its norm."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, width) to (n, width)."""
        y: Tensor = x + self.fc2(self.relu(self.fc1(x)))
        return y


class ResidualMLP(nn.Module):
    """64 pixels -> stem -> residual blocks -> ten logits."""

    def __init__(self, width: int, hidden: int, blocks: int):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(blocks)))
        self.relu = nn.ReLU()
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 64) to logits (n, 10)."""
        logits: Tensor = self.head(self.relu(self.blocks(self.stem(images))))
        return logits


def model() -> nn.Module:
    """Return the trained network in eval mode; train it if the cache does not have it."""
    network = _untrained()
    path = _cached_weights()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may start together (one for each engine): one trains, the others wait and load.
    with filelock.FileLock(path.with_suffix(".lock")):
        if not _load_weights(network, path):
            _train(network)
            write_atomically(path, lambda temporary: save_file(network.state_dict(), temporary))
    return network.eval()


def example() -> tuple[Tensor]:
    """Return the input that is timed: 128 test images."""
    images, _ = _splits()["test"]
    return (images[:TIMED_BATCH],)


def calibration() -> list[Batch]:
    """Return training images, shifted as in training: layer-wise fits need more samples than a layer has inputs."""
    batches = train_batches(np.random.default_rng(0))
    return [next(batches) for _ in range(CALIBRATION_BATCHES)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def score(model: nn.Module) -> float:
    """Return the share of the 540 test images that the model classifies correctly, in [0, 1]."""
    images, labels = _splits()["test"]
    with torch.no_grad():
        correct: Tensor = model(images).argmax(dim=1) == labels
    return correct.double().mean().item()


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches of 128 training images without end, each image shifted by up to one pixel either way."""
    images, labels = _splits()["train"]
    size = TRAINING.batch
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            chosen = torch.from_numpy(order[start : start + size])
            yield _shift(images[chosen], rng), labels[chosen]


@cache
def _splits() -> dict[str, Batch]:
    """Return the fixed stratified split: 1,257 training and 540 test images.

    The images are kept beside the weights. scikit-learn has them, but takes a second to import, and each engine of
    each timing is a process that needs them.
    """
    path = find_cache_folder() / "tasks" / f"images-{TEST_IMAGES}.safetensors"
    try:
        parts = load_file(path)
        return {part: (parts[f"{part} images"], parts[f"{part} labels"]) for part in ("train", "test")}
    except (FileNotFoundError, SafetensorError, KeyError):
        parts = _split_images()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: save_file(parts, temporary))
    return {part: (parts[f"{part} images"], parts[f"{part} labels"]) for part in ("train", "test")}


def _split_images() -> dict[str, Tensor]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        np.float32(images / 16), labels.astype(np.int64), test_size=TEST_IMAGES, random_state=0, stratify=labels
    )
    names = ("train images", "test images", "train labels", "test labels")
    return dict(zip(names, map(torch.from_numpy, split), strict=True))


def _shift(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Return images (n, 64), each moved by -1, 0 or 1 pixel down and right, with zeros at the edge."""
    n = len(images)
    padded = torch.zeros(n, 10, 10)
    padded[:, 1:9, 1:9] = images.view(n, 8, 8)
    down, right = (torch.from_numpy(rng.integers(0, 3, n)) for _ in range(2))
    rows = down[:, None] + torch.arange(8)
    columns = right[:, None] + torch.arange(8)
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]].reshape(n, 64)


def _untrained() -> ResidualMLP:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRAINING.seed)
        return ResidualMLP(TRAINING.width, TRAINING.hidden, TRAINING.blocks)


def _train(network: nn.Module) -> None:
    """Train in place: AdamW with a linear warm-up and a cosine decay."""
    started = time.monotonic()
    steps = TRAINING.steps
    optimizer = torch.optim.AdamW(network.parameters(), lr=TRAINING.learning_rate, weight_decay=TRAINING.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    batches = train_batches(np.random.default_rng(TRAINING.seed))
    network.train()
    for step in range(steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(network(images), labels, label_smoothing=TRAINING.label_smoothing).backward()
        optimizer.step()
        schedule.step()
        if sys.stderr.isatty() and step % 10 == 0:
            sys.stderr.write(f"\rdigits: training the dense network, once: step {step} of {steps}")
            sys.stderr.flush()
    seconds = time.monotonic() - started
    start_of_line = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start_of_line}digits: trained the dense network, once, in {seconds:.0f} s\n")


def _cached_weights() -> Path:
    digest = hashlib.sha256(json.dumps(asdict(TRAINING), sort_keys=True).encode()).hexdigest()[:12]
    return find_cache_folder() / "tasks" / f"digits-{digest}.safetensors"


def _load_weights(network: nn.Module, path: Path) -> bool:
    """Load the network's weights from the cache; return False if the file is missing or broken."""
    if not path.exists():
        return False
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError):
        return False
    return True
