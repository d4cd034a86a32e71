"""What the GPU's kernel for few columns is expected to take: the predictions of TUNING.md; needs no GPU.

    python tests/sparse_kernels/cuda/predict_few.py [--height 64] [--sparsity 0.75]

Of an H200. Dense float16 reads its weights at 4.3 TB/s. Beside it stands the share of the prediction that reading the
kept weights takes, and what `vector_sm90` is expected to take.
"""

from __future__ import annotations

import argparse

import numpy as np

from sparse_kernels import VectorWise, pack
from sparse_kernels.cuda import sm90, vector_few, vector_sm90
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.cuda.vector_tiles import pack_tiles

SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336))
COLUMNS = (1, 16, 64)
CLOCKS_A_MICROSECOND, DENSE_BYTES_A_MICROSECOND = 1755, 4.3e6
MULTIPROCESSORS = TARGETS[sm90.ARCHITECTURE].multiprocessors


def main() -> None:
    """Print a line for every shape and number of columns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=64, help="rows of a group")
    parser.add_argument("--sparsity", type=float, default=0.75)
    chosen = parser.parse_args()
    for m, k in SHAPES:
        mask = np.zeros((m, k), bool)
        mask[:, : round(k * (1 - chosen.sparsity))] = True
        packed = pack(np.ones((m, k), np.float32), mask, VectorWise(chosen.height))
        tiles = pack_tiles(packed, "float16", volta=False)
        other = vector_sm90.build_program(packed, "float16", sm90.ARCHITECTURE, 1)
        reading = tiles.weights.nbytes / (vector_few.MEMORY_BYTES_A_CLOCK * MULTIPROCESSORS)
        for n in COLUMNS:
            clocks = vector_few.predict_clocks(tiles, n, MULTIPROCESSORS)
            kernel, splits = other.choose(n)
            wide = sm90.predict_clocks(kernel, other.counts, splits, n, MULTIPROCESSORS) / CLOCKS_A_MICROSECOND
            microseconds = clocks / CLOCKS_A_MICROSECOND
            dense = 2 * m * k / DENSE_BYTES_A_MICROSECOND
            print(
                f"{m} x {k}, {n:2} columns: {microseconds:4.1f} us, {dense / microseconds:.1f}x dense, "
                f"reading {reading / clocks:.0%}; vector_sm90 {wide:.1f} us"
            )


if __name__ == "__main__":
    main()
