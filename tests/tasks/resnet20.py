"""A task for latbench: ResNet20 on CIFAR-10 (He et al. 2016), pretrained weights, batch 16.

Data and weights lie in the folder LATBENCH_DATA (`cifar10/` and `resnet_cifar10/`). A batch is (images, labels);
images are float32 (n, 3, 32, 32), normalised with ImageNet's mean and deviation, as the weights want.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu

name = "resnet20"
score_name = "accuracy on 1,000 test images"
excluded = ("conv1", "linear")

DATA = Path(os.environ.get("LATBENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))
TIMED_BATCH = 16
CALIBRATION_IMAGES = 2048
BATCH = 128

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without weights: a stride is skipped over, new channels are zeros."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.stride = stride
        self.new_channels = c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        shortcut = x
        if self.new_channels:
            half = self.new_channels // 2
            shortcut = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return relu(y + shortcut)


class ResNet(nn.Module):
    """Three stages of as many blocks, with 16, 32 and 64 channels."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


def model() -> nn.Module:
    return load_network(3, "resnet20-12fca82f.th")


def load_network(blocks: int, file: str) -> nn.Module:
    """Return a network with its pretrained weights."""
    checkpoint = torch.load(DATA / "resnet_cifar10" / file, weights_only=True, map_location="cpu")
    network = ResNet(blocks)
    network.load_state_dict({key.removeprefix("module."): value for key, value in checkpoint["state_dict"].items()})
    return network.eval()


def example() -> tuple[Tensor]:
    return (_test_set()[0][:TIMED_BATCH],)


def calibration() -> list[Batch]:
    files = [_training_file(i) for i in range(-(-CALIBRATION_IMAGES // 1000))]
    images, labels = (np.concatenate([part for part, _ in files]), torch.cat([part for _, part in files]))
    return [(_normalised(images[i : i + BATCH]), labels[i : i + BATCH]) for i in range(0, CALIBRATION_IMAGES, BATCH)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def score(model: nn.Module) -> float:
    images, labels = _test_set()
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(dim=1) for part in images.split(250)])
    return (answers == labels).double().mean().item()


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    """Endless batches of 128, flipped at random and moved by up to 4 pixels either way."""
    files = [_training_file(i) for i in range(20)]
    images = np.concatenate([part for part, _ in files])
    labels = torch.cat([part for _, part in files])
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield _normalised(_augmented(images[chosen], rng)), labels[torch.from_numpy(chosen)]


def _augmented(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    result = np.empty_like(images)
    for i, (down, right, flip) in enumerate(zip(*rng.integers(0, (9, 9, 2), (len(images), 3)).T, strict=True)):
        crop = padded[i, down : down + 32, right : right + 32]
        result[i] = crop[:, ::-1] if flip else crop
    return result


@cache
def _test_set() -> Batch:
    labels = np.load(DATA / "cifar10" / "labels.npz")
    return _normalised(_read("test_first1000.webp")), torch.from_numpy(labels["test1000"].astype(np.int64))


@cache
def _training_file(number: int) -> tuple[np.ndarray, Tensor]:
    """Images (1000, 32, 32, 3) uint8 and labels."""
    labels = np.load(DATA / "cifar10" / "labels.npz")["train20k"][1000 * number : 1000 * (number + 1)]
    return _read(f"train_{number:02d}.webp"), torch.from_numpy(labels.astype(np.int64))


def _read(file: str) -> np.ndarray:
    """A sheet of 25 x 40 images."""
    sheet = np.asarray(Image.open(DATA / "cifar10" / file).convert("RGB"))
    return sheet.reshape(25, 32, 40, 32, 3).transpose(0, 2, 1, 3, 4).reshape(1000, 32, 32, 3)


def _normalised(images: np.ndarray) -> Tensor:
    """Images (n, 32, 32, 3) uint8 to float32 (n, 3, 32, 32)."""
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return ((x - mean) / deviation).contiguous()
