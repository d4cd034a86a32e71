"""What `prepare(..., tune=True)` wins over the default on a CPU: a line a layer, and the median, worst and best.

    python tests/benchmarks/tuner.py [--all] [--threads 2] [--layout token_major] [--m 768 --n 128 ...]

Every layer is tuned afresh. Then both plans are prepared anew, at other addresses, and timed in pairs of blocks: the
ratio (default over tuned, above 1 is faster) is the median of these pairs, not what the tuner saw. Weights come from
beyond the second-level cache, as in a table of latbench. Where the default was kept both plans are the same: these
lines show the noise. Kernels are compiled before anything is timed, which takes minutes the first time.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
import numpy as np

from latbench.backends import copies_for, synthetic_mask
from sparse_kernels.cpu import linear, tuner
from sparse_kernels.formats import Packed, pack
from sparse_kernels.patterns import parse
from sparse_kernels.plan import Plan

SHAPES = ((768, 768), (3072, 768), (768, 3072), (512, 2048))
TOKENS = (1, 8, 128, 500)
PATTERNS = ("vector:32", "shflbw:32", "vector:4", "unstructured")
SPARSITIES = (0.75, 0.9)

PAIRS = 25
BLOCK_SECONDS = 1e-3

Layer = tuple[int, int, int, str, float]


def some_layers() -> list[Layer]:
    """Every shape with every number of tokens, every pattern with both, sparsities in turn."""
    return [
        (m, k, n, PATTERNS[(i + j) % 4], SPARSITIES[(i + j // 2) % 2])
        for i, (m, k) in enumerate(SHAPES)
        for j, n in enumerate(TOKENS)
    ]


def all_layers() -> list[Layer]:
    """Every shape, number of tokens, pattern and sparsity with every other."""
    return [(m, k, *rest) for (m, k), *rest in itertools.product(SHAPES, TOKENS, PATTERNS, SPARSITIES)]


def packed_layer(layer: Layer) -> Packed:
    """Random weights under a random mask."""
    m, k, _, spec, sparsity = layer
    rng = np.random.default_rng(0)
    mask = synthetic_mask(rng, parse(spec), (m, k), sparsity)
    return pack(rng.standard_normal((m, k), np.float32) * mask, mask, parse(spec))


def call(plan: Plan, layer: Layer) -> Callable[[], object]:
    """A call of the layer; copies of its weights take turns."""
    m, k, n, _, _ = layer
    rng = np.random.default_rng(1)
    x_size, y_size = ((n, k), (n, m)) if plan.layout == "token_major" else ((k, n), (m, n))
    x, y, bias = rng.standard_normal(x_size, np.float32), np.empty(y_size, np.float32), np.zeros(m, np.float32)
    turn = itertools.cycle([plan, *(plan.copy() for _ in range(copies_for(plan.nbytes) - 1))])
    return lambda: next(turn)(x, bias, None, y)


def seconds(run: Callable[[], object], loops: int) -> float:
    """The mean of a block of calls."""
    start = time.perf_counter()
    for _ in range(loops):
        run()
    return (time.perf_counter() - start) / loops


def compare(default: Callable[[], object], tuned: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of both, and the median of their ratios in pairs of blocks; every other pair turned round."""
    once = min(seconds(run, 2) for run in (default, tuned))
    loops = max(2, round(BLOCK_SECONDS / once))
    pairs = np.empty((PAIRS, 2))
    for i in range(PAIRS):
        for j in (0, 1) if i % 2 else (1, 0):
            pairs[i, j] = seconds((default, tuned)[j], loops)
    return *np.median(pairs, axis=0), float(np.median(pairs[:, 0] / pairs[:, 1]))


def compile_all(layers: Sequence[Layer], layout: str) -> None:
    """Run every candidate of every kind of layer once."""
    for m, k, n, spec, _ in {(64, 64, n, spec, 0.75) for _, _, n, spec, _ in layers}:
        packed = packed_layer((m, k, n, spec, 0.75))
        for choice in tuner.candidates(packed, layout, n, numba.get_num_threads()):
            call(linear.build(packed, layout, n, choice), (m, k, n, spec, 0.75))()


def summary(name: str, ratios: list[float]) -> str:
    """The median, worst and best of some ratios."""
    if not ratios:
        return f"{name}: none"
    return f"{name}: {len(ratios)} layers, median {np.median(ratios):.3f}x, {min(ratios):.3f} to {max(ratios):.3f}x"


def main() -> None:
    """Parse, tune, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every combination: some minutes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layout", choices=("token_major", "feature_major"), default="token_major")
    parser.add_argument("--m", type=int, help="only layers of so many output features")
    parser.add_argument("--k", type=int, help="only layers of so many input features")
    parser.add_argument("--n", type=int, help="only layers of so many tokens")
    parser.add_argument("--pattern", help="only layers of this pattern")
    given = parser.parse_args()
    numba.set_num_threads(given.threads)
    wanted = (given.m, given.k, given.n, given.pattern, None)
    layers = [
        layer
        for layer in (all_layers() if given.all else some_layers())
        if all(want in (None, own) for want, own in zip(wanted, layer, strict=True))
    ]
    compile_all(layers, given.layout)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        for layer in layers:
            m, k, n, spec, sparsity = layer
            packed = packed_layer(layer)
            start = time.perf_counter()
            tuner.choose(packed, given.layout, n, Path(folder))
            spent.append(time.perf_counter() - start)
            plans = linear.prepare(packed, given.layout, n), tuner.prepare(packed, given.layout, n, Path(folder))
            default, tuned, ratio = compare(*(call(plan, layer) for plan in plans))
            other = plans[0].kernel != plans[1].kernel
            ratios[other].append(ratio)
            print(
                f"{f'{m}x{k}x{n}':13} {spec:12} {sparsity:4.0%} {default * 1e6:8.1f} us {tuned * 1e6:8.1f} us"
                f" {ratio:6.3f}x  {plans[0].kernel}{f' -> {plans[1].kernel}' if other else ''}",
                flush=True,
            )
    print(f"\n{summary('another choice than the default', ratios[True])}")
    print(summary("the default twice, which is the noise", ratios[False]))
    print(f"tuning took {np.median(spent):.2f} s a layer, at most {max(spent):.2f} s, of kernels compiled before")


if __name__ == "__main__":
    main()
