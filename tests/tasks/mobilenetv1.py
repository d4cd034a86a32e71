"""A task for latbench: MobileNetV1 (Howard et al. 2017, table 1) with random weights, images of 224x224.

`:batch16` times 16 of them. A depthwise 3x3 convolution has nothing to prune: only the others are layers to latbench.
"""

from collections import OrderedDict

from random_weights import RandomWeights, images
from torch import nn

BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1),
)  # channels, stride  # fmt: skip


def block(c_in: int, c_out: int, stride: int) -> nn.Sequential:
    """A 3x3 filter a channel, then all channels mixed at each position."""
    return nn.Sequential(OrderedDict(
        depthwise=nn.Conv2d(c_in, c_in, 3, stride, 1, groups=c_in, bias=False),
        depthwise_norm=nn.BatchNorm2d(c_in),
        depthwise_relu=nn.ReLU(),
        pointwise=nn.Conv2d(c_in, c_out, 1, bias=False),
        pointwise_norm=nn.BatchNorm2d(c_out),
        pointwise_relu=nn.ReLU(),
    ))  # fmt: skip


def mobilenet() -> nn.Sequential:
    """Images (n, 3, 224, 224) to logits (n, 1000)."""
    layers: dict[str, nn.Module] = {
        "stem": nn.Conv2d(3, 32, 3, 2, 1, bias=False), "stem_norm": nn.BatchNorm2d(32), "stem_relu": nn.ReLU(),
    }  # fmt: skip
    c_in = 32
    for number, (c_out, stride) in enumerate(BLOCKS, start=1):
        layers[f"block{number}"] = block(c_in, c_out, stride)
        c_in = c_out
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": nn.Linear(c_in, 1000)}
    return nn.Sequential(OrderedDict(layers))


task = RandomWeights("mobilenetv1", mobilenet, images(224))
batch16 = RandomWeights("mobilenetv1-batch16", mobilenet, images(224), batch=16)
model, example, calibration, loss, score = task.model, task.example, task.calibration, task.loss, task.score
name, score_name = task.name, task.score_name
