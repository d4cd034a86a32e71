"""Few tokens, at most one vector of them, along the vector: all that a layer does in one step.

Each thread lays out all of x for itself, multiplies its panels or rows, and puts what they give in its place in y. In
steps of their own these would take as long as the weights, and each would wait for lines that another core has just
written. Vectors are as short as hold the tokens: x of 4 tokens is a quarter of what it would be with 16 lanes. Only
permuted rows go to their places in a second step.

With weights from memory single rows have 1.7 to 2.2 times the speed of `transpose`'s three steps and whole vectors
for 1 to 8 tokens, 1.4 to 1.7 for 16; rows in fours 1.3 to 1.7 and 1.1 to 1.4 (512 to 2048 columns, 90% sparsity,
Zen 5).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from sparse_kernels.cpu.codegen.cpu_target import NARROWEST, CpuTarget
from sparse_kernels.cpu.codegen.prefetch import fetch_now
from sparse_kernels.cpu.codegen.register_tiles import copy_vector, row_tile, tokens_to_lanes
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PARTIAL
from sparse_kernels.cpu.kernels.token_blocks import put_back
from sparse_kernels.cpu.kernels.token_major import WORTH_SHARING
from sparse_kernels.cpu.kernels.unstructured_rows import BUNDLE, SingleRows, pass_over
from sparse_kernels.cpu.launch.linear_call import KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.runtime.scratch_buffers import LINE
from sparse_kernels.cpu.runtime.work_split import share


def lanes_for(n: int, target: CpuTarget) -> int:
    """Lanes of the narrowest vector that holds n tokens, or of the widest."""
    lanes = NARROWEST
    while lanes < min(n, target.lanes):
        lanes *= 2
    return lanes


def takes(weights: Panels | SingleRows, layout: str, n: int, target: CpuTarget) -> bool:
    """Whether n tokens of these weights are multiplied so: a vector of them at most.

    Of single rows, those whose places become shorter vectors' by halving. A whole vector of feature-major x is read
    where it lies.
    """
    few = n <= target.lanes if layout == "token_major" else layout == "feature_major" and n < target.lanes
    return few and (not isinstance(weights, SingleRows) or weights.stride & (weights.stride - 1) == 0)


def prepared(
    weights: Panels | SingleRows, shape: tuple[int, int], layout: str, target: CpuTarget, n: int, threads: int
) -> KernelWithScratch:
    """How weights of this shape (m, k) that `takes` takes multiply n tokens in this layout."""
    (m, k), lanes = shape, lanes_for(n, target)
    if isinstance(weights, SingleRows):
        single, permuted, rows, halvings = True, False, 1, (weights.stride // lanes).bit_length() - 1
    else:
        single, permuted, rows, halvings = False, not weights.in_order, weights.width, 0
    # Threads that write rows here and there should not share their cache lines.
    stride = max(lanes, LINE) if permuted else lanes
    multiply = kernel(single, rows, lanes, halvings, target.fused, layout == "token_major", permuted)
    bound = multiply.bound(
        "room_at x_at y_at bias_at activation", weights=weights.arrays, n=n, k=k, m=m, stride=stride,
        start=np.zeros(1, np.int64), parts=threads, shares=threads if n * m >= WORTH_SHARING else 1,
    )  # fmt: skip
    return KernelWithScratch(bound, threads * k * lanes + m * stride)


@cache
def kernel(
    single: bool, rows: int, lanes: int, halvings: int, fused: bool, by_token: bool, permuted: bool
) -> ParallelKernel:
    """The compiled step; `single` rows or panels of `rows` rows, `permuted` or in order. halvings: as `pass_over`
    takes them.

    Called with (weights.arrays, addresses of x and y, n, k, m, address of bias (m), activation code, address of room,
    elements from one row of sums to the next, where a vector starts (int64: 0), parts, shares). Room: x for each
    part, then the sums of all rows. Where permuted, so many shares of them are put in their places.
    """
    fuse, nothing, unfinished, bundle = int(fused), 0, PARTIAL, BUNDLE

    def multiply(  # type: ignore[no-untyped-def]
        part, weights, x_at, y_at, n, k, m, bias_at, activation, room_at, stride, start, parts, shares
    ):  # fmt: skip
        work = weights[2] if single else weights[3]
        fetch_now(work.ctypes.data, work.size * 8)
        begin, end = share(work, 1, part, parts), share(work, 1, part + 1, parts)
        if begin == end:
            return
        x_here, sums_at = room_at + part * k * lanes * 4, room_at + parts * k * lanes * 4
        if by_token:
            tokens_to_lanes(lanes, FLOATS, x_at, k, n, k, x_here, lanes)
        else:
            for c in range(k):
                copy_vector(lanes, FLOATS, x_at + c * n * 4, x_here + c * lanes * 4, n)
        if single:
            stream, table, _, bounds = weights
            stages = table.shape[0]
            first, behind = begin * bundle, min(end * bundle, m)
            for stage in range(stages):
                pass_over(
                    1,
                    lanes,
                    fuse,
                    halvings,
                    1,
                    stream.ctypes.data + table[stage, begin] * 4,
                    behind - first,
                    x_here + bounds[stage] * lanes * 4,
                    sums_at,
                    bias_at,
                    min(stage, 1),
                    activation if stage == stages - 1 else unfinished,
                )
        else:
            table, values, columns, _, row_ids = weights
            first = np.int64(row_ids[begin * rows])
            behind = np.int64(row_ids[end * rows]) if end < table.shape[0] else m
            for panel in range(begin, end):
                row_tile(
                    rows,
                    1,
                    lanes,
                    fuse,
                    nothing,
                    nothing,
                    FLOATS,
                    1,
                    values.ctypes.data + table[panel, 0] * 4,
                    columns.ctypes.data + table[panel, 1] * 4,
                    table[panel, 2],
                    x_here,
                    lanes,
                    start.ctypes.data,
                    sums_at,
                    stride,
                    start.ctypes.data,
                    nothing,
                    nothing,
                    row_ids.ctypes.data + panel * rows * 4,
                    bias_at,
                    activation,
                    nothing,
                    nothing,
                    nothing,
                )
        if not permuted:
            sums_here = sums_at + first * stride * 4
            put_back(lanes, by_token, sums_here, start, stride, y_at, 0, 1, n, m, first, behind)

    def put(  # type: ignore[no-untyped-def]
        share, weights, x_at, y_at, n, k, m, bias_at, activation, room_at, stride, start, parts, shares
    ):  # fmt: skip
        begin, end = m * share // shares, m * (share + 1) // shares
        sums_here = room_at + (parts * k * lanes + begin * stride) * 4
        put_back(lanes, by_token, sums_here, start, stride, y_at, 0, 1, n, m, begin, end)

    return in_parts(multiply, put) if permuted else in_parts(multiply)
