"""What a call costs beside its work: layers so small that nothing is left but the way to the kernel and back.

    python tests/benchmarks/calls.py [--threads 1,2] [--size 64] [--rounds 9]

A linear layer of size x size at 90% sparsity, by way of its plan (NumPy arrays, which are looked at), of `plan.run`
(addresses), and of the torch layer; torch's own dense layer beside them. All take turns; printed is the median of the
rounds' least times, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from sparse_kernels import prepare
from sparse_kernels.cpu.runtime.scratch_buffers import find_addresses
from sparse_kernels.formats import pack
from sparse_kernels.nn import SparseLinear
from sparse_kernels.patterns import parse

CALLS = 1000
TURNS = 5


def cases(spec: str, size: int, n: int) -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    pattern, dense, x = parse(spec), nn.Linear(size, size), torch.randn(n, size)
    weight = dense.weight.detach().numpy()
    mask = pattern.mask(weight.astype(np.float64) ** 2, 0.9)
    plan: Any = prepare(pack(weight, mask, pattern), "numba", "token_major", n)
    layer = SparseLinear.from_dense(dense, pattern, mask)
    read, bias, out = x.numpy(), np.zeros(size, np.float32), np.zeros((n, size), np.float32)
    x_at, y_at, bias_at = find_addresses(read, out, bias)
    return {
        "plan": lambda: plan(read, bias, None, out),
        "plan.run": lambda: plan.run(x_at, y_at, n, bias_at, 0),
        "torch layer": lambda: layer(x),
        "torch, dense": lambda: dense(x),
    }


def least(call: Callable[[], object]) -> float:
    """Seconds of one call, the least mean of some turns."""
    found = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS)
    return min(found)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    for threads in map(int, given.threads.split(",")):
        numba.set_num_threads(threads)
        torch.set_num_threads(threads)
        for spec in ("vector:32", "shflbw:32"):
            for n in (1, 8):
                calls = cases(spec, given.size, n)
                rounds = [{name: least(call) for name, call in calls.items()} for _ in range(given.rounds)]
                medians = (f"{name} {np.median([one[name] for one in rounds]) * 1e6:.2f}" for name in calls)
                print(f"{threads} threads, {spec}, {n} tokens: {', '.join(medians)} us", flush=True)


if __name__ == "__main__":
    main()
