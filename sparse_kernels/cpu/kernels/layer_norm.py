"""Layer norm of rows, with an addition before it: what stands between the linear layers of a transformer."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.norm_rows import NormForm, NormRow, NormWeights, normalize_row
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.runtime.threads import count_threads

WORTH_SHARING = 2**13
"""Elements from which on threads share rows."""


class NormCall(NamedTuple):
    """Addresses of the rows, of what is added to them (0 adds nothing), of gain, shift and the results."""

    x_at: int
    added_at: int
    gain_at: int
    shift_at: int
    y_at: int


class NormLayer(NamedTuple):
    """What the kernel knows before it is called. rows, length: how many rows and elements. parts: threads."""

    rows: int
    length: int
    epsilon: float
    parts: int


def normalize_rows(call: NormCall, rows: int, count: int, epsilon: float) -> None:
    """Normalise contiguous rows of `count` elements, float32, at addresses of arrays that are right."""
    threads = count_threads() if rows * count >= WORTH_SHARING else 1
    _bind_norm(bool(call.added_at), rows, count, epsilon, threads)(*call)


@lru_cache(maxsize=256)
def _bind_norm(adds: bool, rows: int, count: int, epsilon: float, threads: int) -> BoundKernel:
    target = find_cpu_target()
    layer = NormLayer(rows, count, epsilon, min(threads, rows))
    return build_kernel(target.lanes, target.fused, adds).bind(NormCall, layer)


@cache
def build_kernel(lanes: int, fused: bool, adds: bool) -> ParallelKernel:
    """Return the loop over rows; it is called with `NormCall`."""
    form = tuple(NormForm(lanes, int(fused), int(adds)))

    @build_parallel_kernel
    def norm(part: int, call: NormCall, layer: NormLayer) -> None:
        epsilon, size = np.float32(layer.epsilon), layer.length * 4
        weights = NormWeights(call.gain_at, call.shift_at)
        for row in range(layer.rows * part // layer.parts, layer.rows * (part + 1) // layer.parts):
            at = row * size
            each = NormRow(call.x_at + at, call.added_at + at, call.y_at + at, layer.length)
            normalize_row(form, each, weights, epsilon)

    return norm
