"""A task for latbench: ResNet32 on CIFAR-10 (He et al. 2016), pretrained weights, batch 16; else as resnet20.py."""

from resnet20 import calibration, example, load_network, loss, score, score_name, train_batches
from torch import nn

__all__ = ["calibration", "example", "excluded", "loss", "model", "name", "score", "score_name", "train_batches"]

name = "resnet32"
excluded = ("conv1", "linear")


def model() -> nn.Module:
    return load_network(5, "resnet32-d509ac18.th")
