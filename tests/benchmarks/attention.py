"""How long attention of a converted model takes: in float32, in bytes, and torch's, in turns.

    python tests/benchmarks/attention.py [--threads 2] [--rounds 60] [--size 1x12x128x64]

A size is batch x heads x tokens x width of a head; the default is a layer of BERT-base with one sequence. Arrays are
warm. Printed are medians of the rounds, and of the ratios of float32 and of torch to bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numba
import numpy as np
import torch

from sparse_kernels.nn.attention_operator import attention


def measure(size: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, round by round."""
    batch, heads, tokens, width = size
    q, k, v = (torch.randn(batch, tokens, heads, width).transpose(1, 2) for _ in range(3))
    ways: dict[str, Callable[[], object]] = {
        "bytes": lambda: attention(q, k, v, may_round=True),
        "float32": lambda: attention(q, k, v),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--size", default="1x12x128x64")
    given = parser.parse_args()
    numba.set_num_threads(given.threads)
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    seconds = measure(tuple(map(int, given.size.split("x"))), given.rounds)
    for name, each in seconds.items():
        ratio = np.divide(each, seconds["bytes"])
        low, high = np.quantile(ratio, (0.1, 0.9))
        print(f"{name:8} {np.median(each) * 1e6:7.0f} us, {np.median(ratio):.2f} ({low:.2f}-{high:.2f}) times bytes")


if __name__ == "__main__":
    main()
