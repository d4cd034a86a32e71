"""A task for latbench: ResNet50 (He et al. 2016) with random weights, images of 224x224; `:batch16` times 16 of them.

The stride of a downsampling block sits in its 3x3 convolution, and layers are called as in torchvision.
"""

import torch
from random_weights import RandomWeights, images
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last to four times the channels, and a shortcut."""

    def __init__(self, c_in: int, c: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c, 1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, stride, 1, bias=False), nn.BatchNorm2d(c)
        self.conv3, self.bn3 = nn.Conv2d(c, 4 * c, 1, bias=False), nn.BatchNorm2d(4 * c)
        self.downsample: nn.Module = nn.Identity()
        if c_in != 4 * c:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, 4 * c, 1, stride, bias=False), nn.BatchNorm2d(4 * c))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))
        return relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """Images (n, 3, 224, 224) to logits (n, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        c_in = 64
        for number, (c, blocks, stride) in enumerate(STAGES, start=1):
            stage = [Bottleneck(c_in, c, stride), *(Bottleneck(4 * c, c, 1) for _ in range(blocks - 1))]
            self.add_module(f"layer{number}", nn.Sequential(*stage))
            c_in = 4 * c
        self.fc = nn.Linear(c_in, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = max_pool2d(relu(self.bn1(self.conv1(images))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.mean(x, dim=(2, 3)))


task = RandomWeights("resnet50", ResNet50, images(224))
batch16 = RandomWeights("resnet50-batch16", ResNet50, images(224), batch=16)
model, example, calibration, loss, score = task.model, task.example, task.calibration, task.loss, task.score
name, score_name = task.name, task.score_name
