"""What `prepare(..., tune=True)` wins over the default on a CPU: a line a layer, and what all of them say.

    python tests/benchmarks/tuner.py [--threads 2] [--layout token_major] [--shapes 768x768x8,...] [--patterns ...]

Every layer is tuned afresh. Then three plans are prepared anew: the default, the default again at other addresses,
and the tuned one. Blocks of calls of all three take turns, in a random order. A line says the default's time, and the
ratios default over default again (the noise) and default over tuned (above 1 is a gain): the median of the rounds,
and the quarters below and above it. Weights come from beyond the second-level cache, as in a table of latbench.

A tuned layer is faster (slower) by more than noise if its upper (lower) three quarters of ratios lie beyond the lower
(upper) three of the default to itself. Kernels are compiled before anything is timed: a minute or two the first time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from latbench.backends.cpu.prepare_point import build_synthetic_mask, count_copies
from sparse_kernels.cpu.plans import autotune, linear
from sparse_kernels.formats import Packed, pack
from sparse_kernels.patterns import NM, Dense, parse
from sparse_kernels.plan_protocol import LAYOUTS, Plan
from sparse_kernels.shapes import LinearShape

SHAPES = (
    "768x768x1,768x768x12,768x768x128,768x3072x4,768x3072x32,768x3072x197,3072x768x1,3072x768x48,3072x768x384,"
    "512x2048x8,512x2048x64,512x2048x500"
)
PATTERNS = "vector:32,shflbw:8,unstructured"
SPARSITIES = (0.75, 0.9)  # in turns
ROUNDS = 21
BLOCK_SECONDS = 1e-3

Call = Callable[[], object]


def packed_layer(shape: LinearShape, spec: str, sparsity: float) -> Packed:
    """Random weights under a random mask."""
    rng, pattern = np.random.default_rng(0), parse(spec)
    sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.0 if isinstance(pattern, Dense) else sparsity
    mask = build_synthetic_mask(rng, pattern, (shape.m, shape.k), sparsity)
    return pack(rng.standard_normal((shape.m, shape.k), np.float32) * mask, mask, pattern)


def call(plan: Plan, shape: LinearShape) -> Call:
    """A call of the layer; copies of its weights take turns."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((shape.n, shape.k), np.float32)
    x = x if plan.layout == "token_major" else np.ascontiguousarray(x.T)
    bias = np.zeros(shape.m, np.float32)
    y = np.empty_like(plan(x, bias))
    plans = [plan, *(plan.copy() for _ in range(count_copies(plan.nbytes) - 1))]
    for each in plans:
        each(x, bias, None, y)  # what it works out once is no part of a call
    turn = itertools.cycle(plans)
    return lambda: next(turn)(x, bias, None, y)


def seconds(run: Call, loops: int) -> float:
    """The mean of a block of calls."""
    start = time.perf_counter()
    for _ in range(loops):
        run()
    return (time.perf_counter() - start) / loops


def in_turns(runs: list[Call]) -> NDArray[np.float64]:
    """Seconds (rounds, runs) of one call."""
    rng = np.random.default_rng(2)
    loops = max(2, round(BLOCK_SECONDS / min(seconds(run, 2) for run in runs)))
    times = np.empty((ROUNDS, len(runs)))
    for row in times:
        for i in rng.permutation(len(runs)):
            row[i] = seconds(runs[i], loops)
    return times


def quarters(times: NDArray[np.float64], i: int) -> tuple[float, float, float]:
    """The quartiles of time 0 over time i."""
    low, middle, high = np.quantile(times[:, 0] / times[:, i], (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def said(ratio: tuple[float, float, float]) -> str:
    """A ratio with its quarters."""
    low, middle, high = ratio
    return f"{middle:5.2f}x ({low:.2f}-{high:.2f})"


def main() -> None:
    """Parse, tune, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="token_major")
    parser.add_argument("--shapes", default=SHAPES, help="MxKxN, separated by commas")
    parser.add_argument("--patterns", default=PATTERNS, help="separated by commas")
    given = parser.parse_args()
    numba.set_num_threads(given.threads)
    shapes = [LinearShape(*(int(number) for number in text.split("x"))) for text in given.shapes.split(",")]
    layers = [
        (shape, spec, SPARSITIES[(i + j) % 2])
        for i, shape in enumerate(shapes)
        for j, spec in enumerate(given.patterns.split(","))
    ]
    noise: list[float] = []
    changes: list[float] = []
    spent: list[float] = []
    faster = slower = 0
    with tempfile.TemporaryDirectory() as name:
        for shape, spec, sparsity in layers:
            packed, n, folder = packed_layer(shape, spec, sparsity), shape.n, Path(name)
            for choice in autotune.list_candidates(linear.describe_layer(packed, given.layout, n)):
                call(linear.build_plan(linear.describe_layer(packed, given.layout, n), choice), shape)  # compiles
            start = time.perf_counter()
            tuned = autotune.prepare_tuned(packed, given.layout, n, folder)
            spent.append(time.perf_counter() - start)
            default, again = (linear.prepare_linear(packed, given.layout, n) for _ in range(2))
            times = in_turns([call(plan, shape) for plan in (default, again, tuned)])
            itself, ratio = quarters(times, 1), quarters(times, 2)
            noise.append(itself[1])
            changed = tuned.kernel != default.kernel
            (changes if changed else noise).append(ratio[1])
            faster += changed and ratio[0] > itself[2]
            slower += changed and ratio[2] < itself[0]
            change = f" -> {tuned.kernel}" if changed else ""
            print(
                f"{f'{shape.m}x{shape.k}x{n}':13} {spec:12} {sparsity:4.0%} {np.median(times[:, 0]) * 1e6:7.0f} us"
                f"  itself {said(itself)}  tuned {said(ratio)}  {default.kernel}{change}",
                flush=True,
            )
    print(f"\n{given.threads} threads, {given.layout}: not the default in {len(changes)} of {len(layers)} layers")
    if changes:
        print(f"default over tuned: median {np.median(changes):.2f}x, {min(changes):.2f} to {max(changes):.2f}x")
    print(f"default over itself: median {np.median(noise):.2f}x, {min(noise):.2f} to {max(noise):.2f}x")
    print(f"faster than the default by more than noise: {faster} of {len(layers)} layers")
    verdict = f"does not hold, {slower} layers are" if slower else "holds"
    print(f"never slower than the default by more than noise: {verdict}")
    print(f"tuning took {np.median(spent):.2f} s a layer, at most {max(spent):.2f} s, of kernels compiled before")


if __name__ == "__main__":
    main()
