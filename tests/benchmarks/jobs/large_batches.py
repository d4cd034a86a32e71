"""What a converted network gains where large batches of images are computed a few at a time.

    python tests/benchmarks/jobs/large_batches.py TASK [--batch 16] [--size 224] [--pattern block:16x4]
                                                  [--sparsity 0.75] [--precision int8] [--threads 2] [--rounds 15]

The whole batch layer by layer, as `model.forward` computes it, and in turns, as a call of the model does: in each
round both, medians, and the median of the rounds' ratios with its quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from latbench.base.engine_registry import PRECISIONS
from search.problem.layers import Option
from search.task import load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.convert_model import convert_for_example
from search.whole_model.model_engines import mask_at_random
from sparse_kernels.graph_passes.image_turns import ImageTurns


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="as for latbench search; its model takes images alone")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="rows and columns of an image")
    parser.add_argument("--pattern", default="block:16x4")
    parser.add_argument("--sparsity", type=float, default=0.75)
    parser.add_argument("--precision", choices=PRECISIONS, default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    task = load_task(given.task)
    option = Option(given.pattern, given.sparsity, given.precision)
    choices = dict.fromkeys(list_prunable_layers(task, task.model()), option)
    model = convert_for_example(*mask_at_random(task.reference, choices))
    if not isinstance(model, ImageTurns):
        raise SystemExit("this model has no part that computes each image by itself")
    x = torch.randn(given.batch, 3, given.size, given.size)
    ways: dict[str, Callable[[], object]] = {"layer by layer": lambda: model.forward(x), "in turns": lambda: model(x)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for run in ways.values():
            run()
        for _ in range(given.rounds):
            for name, run in ways.items():
                run()  # what the other way left in the caches
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"{name:16}{1e3 * np.median(times):8.2f} ms")
    first, second = seconds.values()
    low, middle, high = np.quantile(np.divide(first, second), (0.25, 0.5, 0.75))
    print(f"in turns {middle:.2f} ({low:.2f}-{high:.2f}) times as fast")


if __name__ == "__main__":
    main()
