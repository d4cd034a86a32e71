"""How long a sweep of a GPU takes and how much disk its table, before it begins; no GPU is needed to say so.

From what a sweep asks of itself (`machine.SETTINGS`), and from what else a point costs: weights that are drawn,
pruned and packed on the host, the float64 product that a result is compared with, kernels to compile, processes to
start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from latbench import plan
from latbench.backends.on_gpu import BACKENDS
from latbench.gpu.machine import SETTINGS
from latbench.plan import Point

ASSUMED = "no kernel compiled and no roofline measured yet, and nothing else at work on the GPU or its host"

_START_SECONDS = 10.0  # of a process, about: importing torch or CuPy, and starting CUDA
_CEILINGS_SECONDS = 5.0  # beside the start of their process
_COMPILE_SECONDS = 1.0  # of one of our kernels: the slowest of the compile gate's take two
_TUNE_SECONDS = 12.0  # torch_sparse.TUNE_SECONDS
_READY_SECONDS = 0.3  # of a point: copies to the GPU, a graph to capture, how often to repeat it
# Of a weight that is drawn, pruned and packed: 1.7e7 with 2:4, 2.8e7 with vectors, 4.6e8 with blocks, measured on an
# ordinary core; our kernels' own order comes on top.
_HOST_ELEMENTS_PER_SECOND = 2e7
_SAMPLES = 400  # of a row: a dozen bursts of a few dozen

# Of the two float64 products of a check. Chips that are not made for float64 have a sixty-fourth of their rate.
_CHECKED_FLOP_PER_SECOND, _SLOWLY_CHECKED = 5e12, 2.5e11
_MADE_FOR_FLOAT64 = {"v100", "a100", "a30", "h100", "h200", "gh200", "b200"}


def seconds(wanted: Iterable[Point]) -> float:
    """About how long measuring takes, within a factor of two or so; longer where a GPU gets hot: throttled points get
    other chances. See ASSUMED.
    """
    every = list(wanted)
    if not every:
        return 0.0
    processes = {BACKENDS[point.backend].process for point in every}
    kernels = {
        (point.backend, point.shape.op, point.pattern, point.dtype) for point in every
        if BACKENDS[point.backend].sources
    }  # fmt: skip
    weights = {(point.shape, point.pattern, point.sparsity): point.shape.m * point.shape.k for point in every}
    tuned = sum(point.kernel.endswith("_tuned") for point in every)
    checks = sum(2 * 2 * math.prod((point.shape.m, point.shape.k, point.shape.n)) for point in every)
    fast = _MADE_FOR_FLOAT64.intersection(every[0].device.split("-"))
    return (
        _START_SECONDS * (len(processes) + 1)
        + _CEILINGS_SECONDS
        + _COMPILE_SECONDS * len(kernels)
        + _TUNE_SECONDS * tuned
        + sum(weights.values()) / _HOST_ELEMENTS_PER_SECOND
        + (_READY_SECONDS + SETTINGS.max_seconds) * len(every)
        + checks / (_CHECKED_FLOP_PER_SECOND if fast else _SLOWLY_CHECKED)
    )


def table_bytes(wanted: Iterable[Point]) -> int:
    """About how much disk the table takes."""
    return plan.estimated_bytes(wanted, SETTINGS.block_points, _SAMPLES)
