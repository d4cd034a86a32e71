"""Convolutions that read few channels on latbench's dense kernel, over torch's.

    python tests/benchmarks/jobs/first_convolutions.py [--threads 2] [--rounds 60] [--task TASK --pattern vector:16]

Each is a convolution with its ReLU, as first layers of networks have it. torch runs it as it is; ours is converted,
with the copy of the images into a frame. Of a task, its model is timed, pruned at random to 90%: with all layers that
are not searched in torch, and as a job converts it. Both are timed in turns. Printed are medians, and the median of
the rounds' ratios with its quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from search.problem.layers import Option
from search.task import load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.convert_model import convert_for_example
from search.whole_model.model_engines import mask_at_random
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Dense

LAYERS = {
    "small digits, batch 16": (nn.Conv2d(1, 32, 3, padding=1), (16, 1, 16, 16)),
    "MNIST, batch 32": (nn.Conv2d(1, 32, 3, padding=1), (32, 1, 28, 28)),
    "CIFAR ResNet": (nn.Conv2d(3, 16, 3, padding=1), (1, 3, 32, 32)),
    "CIFAR ResNet, batch 64": (nn.Conv2d(3, 16, 3, padding=1), (64, 3, 32, 32)),
    "MobileNet": (nn.Conv2d(3, 32, 3, 2, 1), (1, 3, 224, 224)),
    "ResNet50": (nn.Conv2d(3, 64, 7, 2, 3), (1, 3, 224, 224)),
    "ResNet50, batch 8": (nn.Conv2d(3, 64, 7, 2, 3), (8, 3, 224, 224)),
    "VGG": (nn.Conv2d(3, 64, 3, padding=1), (1, 3, 224, 224)),
    "wav2vec, one second": (nn.Conv1d(1, 512, 10, 5), (1, 1, 16_000)),
}
"""Network -> its first layer, and the shape of its input."""

SPARSITY = 0.9


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--task", help="as for latbench search")
    parser.add_argument("--pattern", default="vector:16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.task is not None:
        _report(given.task, *_build_both(given.task, given.pattern), given.rounds)
        return
    for name, (layer, shape) in LAYERS.items():
        x = torch.randn(shape)
        dense = nn.Sequential(layer, nn.ReLU()).eval()
        ours = convert(dense, {"0": LayerPattern(Dense())}, (x,))
        _report(name, partial(dense, x), partial(ours, x), given.rounds)


def _build_both(reference: str, pattern: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of a task's pruned model with its other layers in torch, and with its first layer ours."""
    task = load_task(reference)
    options = dict.fromkeys(list_prunable_layers(task, task.model()), Option(pattern, SPARSITY))
    model, choices, example = mask_at_random(task.reference, options)
    plain = convert(model, choices, example.arguments, example_keywords=example.keywords)
    return partial(example.call, plain), partial(example.call, convert_for_example(model, choices, example))


def _report(name: str, torchs: Callable[[], object], ours: Callable[[], object], rounds: int) -> None:
    """Time both in turns and print a line."""
    seconds = np.empty((2, rounds))
    with torch.inference_mode():
        for run in (torchs, ours):
            run()
        for i in range(rounds):
            for j, run in enumerate((torchs, ours)):
                start = time.perf_counter()
                run()
                seconds[j, i] = time.perf_counter() - start
    low, middle, high = np.quantile(seconds[0] / seconds[1], (0.25, 0.5, 0.75))
    before, now = 1e3 * np.median(seconds, axis=1)
    print(f"{name:24}torch {before:7.3f} ms, ours {now:7.3f} ms: {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
