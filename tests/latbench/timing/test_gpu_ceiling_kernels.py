"""The kernels that find a GPU's ceilings do all that is counted, and no more."""

import emulator
import numpy as np
import pytest

from latbench.timing import gpu_ceiling_kernels
from latbench.timing.gpu_ceiling_kernels import CHAINS, PIECE_BYTES, SOURCE, THREADS, build_multiply_adds, build_reads
from sparse_kernels.cuda.targets import ARCHITECTURES


def left(fixed, words=None):
    """What a launch leaves behind; x is as long as the working set, so that reads beyond it are errors."""
    out = np.empty(fixed.threads, fixed.dtype)
    emulator.run([fixed.launch], np.zeros(4, np.uint32) if words is None else words, out, seed=0)
    return out


@pytest.mark.parametrize("steps", [3, 40])
def test_every_thread_does_all_multiply_adds(steps):
    fixed = build_multiply_adds(1, steps)
    sums = np.arange(CHAINS, dtype=np.float32)
    for _ in range(steps):
        sums = np.float32(0.5) * sums + np.float32(0.5)  # halving is exact: as if fused
    np.testing.assert_array_equal(left(fixed), np.full(fixed.threads, sums.sum(dtype=np.float32)))
    assert fixed.done == 2 * CHAINS * steps * fixed.threads
    if steps >= 32:
        assert (left(fixed) == fixed.result).all()


@pytest.mark.parametrize(("size", "least"), [(2**10, 2**16), (2**14, 2**16), (2**16, 0), (2**18, 2**17)])
def test_threads_together_read_the_whole_working_set(rng, size, least):
    fixed = build_reads(size, 1, least)
    words = rng.integers(0, 2**32, size // 4, dtype=np.uint32)
    count = int(fixed.launch.arguments[-1])
    places = np.arange(count * fixed.threads).reshape(count, fixed.threads) % (size // PIECE_BYTES)
    pieces = words.reshape(-1, 4).sum(axis=1, dtype=np.uint32)
    np.testing.assert_array_equal(left(fixed, words), pieces[places].sum(axis=0, dtype=np.uint32))
    assert set(places.flat) == set(range(size // PIECE_BYTES))
    assert fixed.done == PIECE_BYTES * places.size >= least
    assert (left(fixed, np.ones_like(words)) == fixed.result).all()


def test_what_a_sweep_launches_keeps_every_multiprocessor_busy_for_a_while():
    for multiprocessors in (40, 132):
        for fixed in (build_multiply_adds(multiprocessors), build_reads(2**29, multiprocessors)):
            (blocks, _, _), (threads, _, _) = fixed.launch.grid, fixed.launch.block
            assert blocks % multiprocessors == 0 and threads == THREADS
            assert fixed.threads == blocks * threads and fixed.done >= 1e9
    assert all(variant.source == str(SOURCE) for variant in gpu_ceiling_kernels.VARIANTS)
    assert all(variant.architectures == ARCHITECTURES for variant in gpu_ceiling_kernels.VARIANTS)
