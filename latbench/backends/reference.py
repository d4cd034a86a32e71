"""Fixed work of a CPU's reference worker: what shows its pace during a sweep, and what finds its ceilings.

Runs in a process of its own. The pace is taken with NumPy, which starts fast. The ceilings are found with Numba:
chains of multiply-adds in registers, of vectors, and of pairs and tiles where there are any, and a sum by vectors,
all emitted so that nothing is optimised away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from latbench.machines.ceilings import Ceilings, make_non_increasing
from latbench.machines.devices import list_allowed_processors
from latbench.timing.sampling import Burst, calibrate_inner_loops, sample_burst

PRODUCT_SIZE = 640  # long against what waking the threads takes, 50 us
SUM_BYTES = 64 * 2**20
HANDED_BYTES = 2**18  # what a core's own cache holds
MOST_CORES = 8  # that hand something on, one to the next

_WORKING_SETS = (2**14, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes a thread
_TRIALS = 30
_PACE_SECONDS = 0.5

WORK = f"product {PRODUCT_SIZE}, sum {SUM_BYTES}, NumPy {np.__version__}, 4"
"""What the reference kernels are; the last number counts changes of how ceilings are found."""


def product() -> Callable[[], Any]:
    """A dense product of float32 (640, 640) matrices, some milliseconds."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    y = np.empty_like(a)
    return lambda: np.matmul(a, b, out=y)


def total() -> Callable[[], Any]:
    """A dot product over 64 MiB of float32."""
    x = np.ones(SUM_BYTES // 4, np.float32)
    return lambda: np.dot(x, x)


class HandedOn:
    """Changes 256 KiB of float32 on one core after the other: each finds them in the cache of the one before.

    A sample is the seconds that a core takes for it, the mean over all of them in turn:
    `latbench.sweeping.core_placement`.
    """

    inner_loops = 1

    def __init__(self, cores: int) -> None:
        self.facts: dict[str, Any] = {}
        self._allowed = list_allowed_processors()
        self._cores = sorted(self._allowed)[:cores]
        self._x = np.ones(HANDED_BYTES // 4, np.float32)

    def burst(self, seconds: float) -> Burst:
        """Samples taken for about `seconds`, at least one."""
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


def handed_on(threads: int) -> HandedOn:
    """What shows how far apart cores are: the first of those allowed, as many as there are threads, which may run on
    others. Raises NotImplementedError for one thread, and where a thread cannot choose its core.
    """
    cores = min(threads, MOST_CORES)
    if cores < 2 or not hasattr(os, "sched_setaffinity") or len(list_allowed_processors()) < cores:
        raise NotImplementedError("nothing is handed on by one thread, or by threads that cannot choose their core")
    return HandedOn(cores)


def find(threads: int) -> Ceilings:
    """Measure the ceilings of this process's CPU with `threads` threads; takes some seconds."""
    from latbench.backends import ceiling_kernels
    from sparse_kernels.cpu.codegen.cpu_target import host

    rates: dict[int, float] = {}
    for size in _WORKING_SETS:
        x = np.ones(threads * size // 4, np.float32)
        rates[x.nbytes] = _most(lambda: ceiling_kernels.read(x, threads))  # noqa: B023 - called at once
    floats = pairs = _most(lambda: ceiling_kernels.multiply_add(threads))
    if host().pairs:
        pairs = max(pairs, _most(lambda: ceiling_kernels.multiply_pairs(threads)))
    if host().matrix:
        products = _most(lambda: ceiling_kernels.matrix_products(threads))
        floats, pairs = max(floats, products / ceiling_kernels.OF_A_FLOAT), max(pairs, products)
    return Ceilings(floats, make_non_increasing(rates), _usual(product()), _usual(total()), pairs)


def _most(run: Callable[[], int]) -> float:
    """The highest rate at which `run` does what it counts, a second."""
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
