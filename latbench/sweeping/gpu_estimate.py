"""Estimates of the time and disk that a sweep of a GPU needs; no GPU is needed.

The time follows from the settings of a sweep (`GPU_SETTINGS`) and from the other costs of a point: weights that are
drawn, pruned and packed on the host, the float64 product that checks a result, kernels to compile, processes to
start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from latbench.base.engine_registry import GPU_ENGINES
from latbench.sweeping.gpu_machine import GPU_SETTINGS
from latbench.workloads.points import Point, estimate_bytes
from sparse_kernels.shapes import Shape

GPU_ESTIMATE_ASSUMPTION = (
    "no kernel compiled and no roofline measured yet, and nothing else at work on the GPU or its host"
)

_START_SECONDS = 10.0  # of a process: importing torch or CuPy, and starting CUDA
_CEILINGS_SECONDS = 5.0  # without the start of their process
_COMPILE_SECONDS = 1.0  # of one of our kernels; the slowest take two
_TUNE_SECONDS = 12.0  # torch_sparse.TUNE_SECONDS
_READY_SECONDS = 0.3  # of a point: copies to the GPU, capture of a graph, calibration of repeats
# Rate of drawing, pruning and packing weights on an ordinary core: 1.7e7 with 2:4, 2.8e7 with vectors, 4.6e8 with
# blocks; the order of our kernels takes additional time.
_HOST_ELEMENTS_PER_SECOND = 2e7
_SAMPLES = 400  # per row: a dozen bursts of a few dozen

# Rate of the two float64 products of a check. Chips not made for float64 have a sixty-fourth of the float32 rate.
_CHECKED_FLOP_PER_SECOND, _SLOWLY_CHECKED = 5e12, 2.5e11
_MADE_FOR_FLOAT64 = {"v100", "a100", "a30", "h100", "h200", "gh200", "b200", "gb200"}


def estimate_gpu_seconds(wanted: Iterable[Point]) -> float:
    """Return about how long measuring takes in seconds, within a factor of two; see GPU_ESTIMATE_ASSUMPTION.

    It takes longer where a GPU gets hot, because throttled points are measured again.
    """
    every = list(wanted)
    if not every:
        return 0.0
    processes = {GPU_ENGINES[point.backend].process for point in every}
    kernels = {
        (point.backend, point.shape.op, point.pattern, point.dtype)
        for point in every
        if GPU_ENGINES[point.backend].ours
    }
    by_shape: dict[Shape, list[Point]] = {}
    for point in every:
        by_shape.setdefault(point.shape, []).append(point)
    rate = _CHECKED_FLOP_PER_SECOND if _MADE_FOR_FLOAT64.intersection(every[0].device.split("-")) else _SLOWLY_CHECKED
    return (
        _START_SECONDS * 2  # processes start together: those of the engines, and those beside them
        + _CEILINGS_SECONDS
        + _COMPILE_SECONDS * len(kernels)
        + sum(_preparing(points, processes, rate) for points in by_shape.values())
        + GPU_SETTINGS.max_seconds * len(every)
    )


def _preparing(points: Sequence[Point], processes: Iterable[str], rate: float) -> float:
    """Return the seconds to prepare points of one shape: on the GPU in turns, on the host in parallel."""
    shape = points[0].shape
    check = 2 * 2 * math.prod((shape.m, shape.k, shape.n)) / rate
    on_gpu = {
        process: sum(
            _READY_SECONDS + check + _TUNE_SECONDS * point.kernel.endswith("_tuned")
            for point in points if GPU_ENGINES[point.backend].process == process
        )
        for process in processes
    }  # fmt: skip
    drawn = {(GPU_ENGINES[point.backend].process, point.pattern, point.sparsity, point.dtype_w) for point in points}
    weights = Counter(process for process, *_ in drawn)
    drawing = shape.m * shape.k / _HOST_ELEMENTS_PER_SECOND
    alone = max(on_gpu[process] + drawing * weights[process] for process in processes)
    return max(sum(on_gpu.values()), alone)


def estimate_gpu_table_bytes(wanted: Iterable[Point]) -> int:
    """Return about how much disk the table takes."""
    return estimate_bytes(wanted, GPU_SETTINGS.block_points, _SAMPLES)
