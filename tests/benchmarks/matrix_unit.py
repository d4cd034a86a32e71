"""What the matrix unit (AMX) gains over the vector unit in our linear layers: prints a line a layer, in a minute.

    python tests/benchmarks/matrix_unit.py [--threads 2] [--tokens 128,512] [--patterns shflbw:32,vector:32] [--cold]

The layers are those of the workload `cpu_kernels`. Both compute the same plan's float32 results, in turns, a block of
calls at a time, of which the least time counts; printed is the median of the rounds' ratios (least-most), and how far
each is from the exact result, in units of 2**-24 |w| @ |x|. --cold: copies of the weights take turns that pass the
second-level cache many times, as in a model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial

import numba
import numpy as np
from cpu_kernels import BLOCK_SECONDS, SPINNING_SECONDS, least

from latbench import workloads
from sparse_kernels import oracle
from sparse_kernels.cpu import linear
from sparse_kernels.cpu.scratch import at_cache_line
from sparse_kernels.cpu.target import host
from sparse_kernels.formats import pack
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.shapes import LinearShape

COLD_BYTES = 100e6


def compare(shape: LinearShape, spec: str, sparsity: float, how: argparse.Namespace) -> float | None:
    """Print a line; the ratio, None where the unit does not take this weight."""
    rng, pattern = np.random.default_rng(0), parse(spec)
    weight = rng.standard_normal((shape.m, shape.k), np.float32)
    packed = pack(weight, pattern.mask(weight.astype(np.float64) ** 2, sparsity), pattern)
    matrix = linear.by_matrix(packed)
    if matrix is None:
        return None
    x = at_cache_line(rng.standard_normal((shape.n, shape.k), np.float32))
    y, bias = at_cache_line(np.zeros((shape.n, shape.m), np.float32)), np.zeros(shape.m, np.float32)
    names, calls, errors = [], [], []
    for choice in (matrix, linear.by_vectors(packed, "token_major", shape.n)):
        plan = linear.build(packed, "token_major", shape.n, choice)
        errors.append(oracle.check(plan(x).T, packed, x.T) / oracle.UNIT_ROUNDOFF)
        copies = max(1, round(COLD_BYTES / plan.nbytes)) if how.cold else 1
        turns = [plan, *(plan.copy() for _ in range(copies - 1))]
        calls.append([partial(each, x, bias, None, y) for each in turns])
        names.append(plan.kernel)
    time.sleep(2 * SPINNING_SECONDS)  # NumPy's threads, which have just computed what is exact
    times = np.array([[least(each, BLOCK_SECONDS, how.threads) for each in calls] for _ in range(how.rounds)])
    ratios, seconds = times[:, 1] / times[:, 0], np.median(times, axis=0)
    print(
        f"{spec:10} {sparsity:4.0%} {shape.m}x{shape.k}x{shape.n:<5} {names[0]} {seconds[0] * 1e6:.1f} us, "
        f"{names[1]} {seconds[1] * 1e6:.1f} us: {np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f}), "
        f"errors {errors[0]:.1f} and {errors[1]:.1f}",
        flush=True,
    )
    return float(np.median(ratios))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", default="128,512")
    parser.add_argument("--patterns", default="shflbw:32,vector:32,dense")
    parser.add_argument("--sparsities", default="0.5,0.75,0.9")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    if not host().matrix:
        sys.exit("this processor has no matrix unit")
    numba.set_num_threads(given.threads)
    shapes = [layer.shape for layer in workloads.load("cpu_kernels").layers]
    for n, spec in itertools.product(map(int, given.tokens.split(",")), given.patterns.split(",")):
        dense = isinstance(parse(spec), Dense)
        for sparsity in [0.0] if dense else [float(each) for each in given.sparsities.split(",")]:
            found = [compare(LinearShape(shape.m, shape.k, n), spec, sparsity, given) for shape in shapes]
            known = [each for each in found if each is not None]
            if known:
                print(f"  median {np.median(known):.2f}x of {len(known)} layers\n")


if __name__ == "__main__":
    main()
