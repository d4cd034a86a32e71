"""Fixed work of a CPU's reference worker: its pace during a sweep, and the ceilings of the CPU.

It runs in a process of its own. NumPy takes the pace, because it starts fast. Numba measures the ceilings by chains
of multiply-adds in registers, of vectors, pairs and tiles, and by a sum of vectors. The code is emitted, so that
nothing is optimised away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from latbench.machines.ceilings import Ceilings, make_non_increasing
from latbench.machines.processors import list_allowed_processors
from latbench.timing.sampling import Burst, calibrate_inner_loops, sample_burst

PRODUCT_SIZE = 640  # long against what waking the threads takes, 50 us
SUM_BYTES = 64 * 2**20
HANDED_BYTES = 2**18  # what a core's own cache holds
MOST_CORES = 8  # that hand something on, one to the next

_WORKING_SETS = (2**14, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes a thread
_TRIALS = 30
_PACE_SECONDS = 0.5

WORK = f"product {PRODUCT_SIZE}, sum {SUM_BYTES}, NumPy {np.__version__}, 5"
"""What the reference kernels are; the last number counts changes of how ceilings are found."""


def build_product() -> Callable[[], Any]:
    """Build a dense product of float32 (640, 640) matrices, which takes some milliseconds."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    y = np.empty_like(a)
    return lambda: np.matmul(a, b, out=y)


def build_sum() -> Callable[[], Any]:
    """Build a dot product over 64 MiB of float32."""
    x = np.ones(SUM_BYTES // 4, np.float32)
    return lambda: np.dot(x, x)


class CacheHandOver:
    """Changes 256 KiB of float32 on one core after the other: each core finds them in the cache of the one before.

    A sample is the mean seconds of one core, over all cores in turn: see `latbench.sweeping.core_placement`.
    """

    inner_loops = 1

    def __init__(self, cores: int) -> None:
        self.facts: dict[str, Any] = {}
        self._allowed = list_allowed_processors()
        self._cores = sorted(self._allowed)[:cores]
        self._x = np.ones(HANDED_BYTES // 4, np.float32)

    def burst(self, seconds: float) -> Burst:
        """Take samples for about `seconds`, at least one."""
        samples: list[float] = []
        end = perf_counter() + seconds
        try:
            while not samples or perf_counter() < end:
                samples.append(sum(map(self._changed_on, self._cores)) / len(self._cores))
        finally:
            os.sched_setaffinity(0, self._allowed)
        return Burst(samples)

    def _changed_on(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        start = perf_counter()
        np.negative(self._x, out=self._x)
        return perf_counter() - start


def build_hand_over(threads: int) -> CacheHandOver:
    """Build the work that shows the distance of cores: the first allowed ones, as many as threads.

    Raises NotImplementedError for one thread, and where a thread cannot choose its core.
    """
    cores = min(threads, MOST_CORES)
    if cores < 2 or not hasattr(os, "sched_setaffinity") or len(list_allowed_processors()) < cores:
        raise NotImplementedError("nothing is handed on by one thread, or by threads that cannot choose their core")
    return CacheHandOver(cores)


def measure_ceilings(threads: int) -> Ceilings:
    """Measure the ceilings of this process's CPU with `threads` threads; it takes some seconds."""
    from latbench.backends.cpu import ceiling_kernels
    from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target

    rates: dict[int, float] = {}
    for size in _WORKING_SETS:
        x = np.ones(threads * size // 4, np.float32)
        rates[x.nbytes] = _most(lambda: ceiling_kernels.run_reads(x, threads))  # noqa: B023 - called at once
    floats = pairs = _most(lambda: ceiling_kernels.run_multiply_adds(threads))
    if find_cpu_target().pairs:
        pairs = max(pairs, _most(lambda: ceiling_kernels.run_multiply_pairs(threads)))
    quads = _most(lambda: ceiling_kernels.run_multiply_quads(threads))
    if find_cpu_target().matrix:
        products = _most(lambda: ceiling_kernels.run_matrix_products(threads))
        floats, pairs = max(floats, products / ceiling_kernels.PRODUCTS_PER_FLOAT), max(pairs, products)
        quads = max(quads, _most(lambda: ceiling_kernels.run_matrix_bytes(threads)))
    product, total = _usual(build_product()), _usual(build_sum())
    return Ceilings(floats, make_non_increasing(rates), product, total, pairs, max(floats, quads))


def _most(run: Callable[[], int]) -> float:
    """Return the highest rate of the work that `run` counts, per second."""
    run()  # compiles, and fills the caches
    rates = []
    for _ in range(_TRIALS):
        start = perf_counter()
        done = run()
        rates.append(done / (perf_counter() - start))
    return max(rates)


def _usual(run: Callable[[], Any]) -> float:
    samples = sample_burst(run, _PACE_SECONDS, calibrate_inner_loops(run)).samples
    return float(np.median(samples))
