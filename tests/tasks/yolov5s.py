"""A task for latbench: the convolutions of YOLOv5s (release 6.1) with random weights, one image of 640x640.

A backbone of cross-stage blocks (CSPNet, Wang et al. 2020), pooling at several scales, a neck that goes up and down
again (PANet, Liu et al. 2018), and a 1x1 convolution for each of three scales to 3 anchors x (4 + 1 + 80) channels;
what turns these into boxes is left out. Layers are called as in the published model, by their place in it.
"""

import torch
from random_weights import RandomWeights, images
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d, silu

ANCHORS, CLASSES = 3, 80


class Conv(nn.Module):
    """Convolution, norm and SiLU."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, padding: int | None = None):
        super().__init__()
        same = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, same, bias=False)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.bn(self.conv(x)))


class Residual(nn.Module):
    """1x1 then 3x3; in the backbone added to its input."""

    def __init__(self, c: int, shortcut: bool):
        super().__init__()
        self.cv1, self.cv2, self.shortcut = Conv(c, c), Conv(c, c, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class CrossStage(nn.Module):
    """Half of the channels pass `blocks` residual blocks, half go round them."""

    def __init__(self, c_in: int, c_out: int, blocks: int = 1, shortcut: bool = False):
        super().__init__()
        half = c_out // 2
        self.cv1, self.cv2, self.cv3 = Conv(c_in, half), Conv(c_in, half), Conv(c_out, c_out)
        self.m = nn.Sequential(*(Residual(half, shortcut) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], dim=1))


class Pyramid(nn.Module):
    """The input beside its maxima over 5x5, 9x9 and 13x13 positions, each pooled from the one before."""

    def __init__(self, c: int):
        super().__init__()
        self.cv1, self.cv2 = Conv(c, c // 2), Conv(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        scales = [self.cv1(x)]
        for _ in range(3):
            scales.append(max_pool2d(scales[-1], 5, stride=1, padding=2))
        return self.cv2(torch.cat(scales, dim=1))


class Detect(nn.Module):
    """Boxes, objectness and classes at each scale."""

    def __init__(self, channels: tuple[int, ...]):
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(c, ANCHORS * (5 + CLASSES), 1) for c in channels)

    def forward(self, scales: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(conv(x) for conv, x in zip(self.m, scales, strict=True))


class Yolo(nn.Module):
    """Images (n, 3, 640, 640) to (n, 255, 80, 80), (n, 255, 40, 40) and (n, 255, 20, 20)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({
            "0": Conv(3, 32, 6, 2, 2),
            "1": Conv(32, 64, 3, 2), "2": CrossStage(64, 64, 1, shortcut=True),
            "3": Conv(64, 128, 3, 2), "4": CrossStage(128, 128, 2, shortcut=True),
            "5": Conv(128, 256, 3, 2), "6": CrossStage(256, 256, 3, shortcut=True),
            "7": Conv(256, 512, 3, 2), "8": CrossStage(512, 512, 1, shortcut=True), "9": Pyramid(512),
            "10": Conv(512, 256), "13": CrossStage(512, 256),  # back up, beside 6
            "14": Conv(256, 128), "17": CrossStage(256, 128),  # and beside 4
            "18": Conv(128, 128, 3, 2), "20": CrossStage(256, 256),  # down again, beside 14
            "21": Conv(256, 256, 3, 2), "23": CrossStage(512, 512),  # and beside 10
            "24": Detect((128, 256, 512)),
        })  # fmt: skip

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        def run(x: Tensor, *places: int) -> Tensor:
            for place in places:
                x = self.model[str(place)](x)
            return x

        eighth = run(images, 0, 1, 2, 3, 4)
        sixteenth = run(eighth, 5, 6)
        lowest = run(sixteenth, 7, 8, 9, 10)
        middle = run(torch.cat([doubled(lowest), sixteenth], dim=1), 13, 14)
        fine = run(torch.cat([doubled(middle), eighth], dim=1), 17)
        medium = run(torch.cat([run(fine, 18), middle], dim=1), 20)
        coarse = run(torch.cat([run(medium, 21), lowest], dim=1), 23)
        return self.model["24"]([fine, medium, coarse])


def doubled(x: Tensor) -> Tensor:
    """Every position four times: twice the height and width."""
    return interpolate(x, scale_factor=2.0, mode="nearest")


task = RandomWeights("yolov5s", Yolo, images(640), calibration_batch=1)
model, example, calibration, loss, score = task.model, task.example, task.calibration, task.loss, task.score
name, score_name = task.name, task.score_name
