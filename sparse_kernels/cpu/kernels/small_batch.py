"""Few tokens, at most one vector of them, along the vector: all that a layer does in one step.

Each thread lays out all of x for itself, multiplies its panels or rows, and puts what they give in its place in y. In
steps of their own these would take as long as the weights, and each would wait for lines that another core has just
written. Vectors are as short as hold the tokens: x of 4 tokens is a quarter of what it would be with 16 lanes. Only
permuted rows go to their places in a second step.

The alternative is three passes (`transpose_tiles`) with whole vectors. With weights from memory, single rows have 1.7
to 2.2 times its speed for 1 to 8 tokens, and 1.4 to 1.7 times for 16. Rows in fours have 1.3 to 1.7 and 1.1 to 1.4
times its speed (512 to 2048 columns, 90% sparsity, Zen 5).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import NARROWEST, CpuTarget
from sparse_kernels.cpu.codegen.prefetch import fetch_now
from sparse_kernels.cpu.codegen.register_tiles import RowTileForm, copy_vector, row_tile, tokens_to_lanes
from sparse_kernels.cpu.codegen.tile_operands import (
    NO_QUADS,
    WORTH_OF_FLOATS,
    FramedOutput,
    LineWalk,
    Matrix,
    RowEpilogue,
    StreamEpilogue,
    TileWeights,
    VectorInput,
    WeightStream,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PARTIAL
from sparse_kernels.cpu.codegen.weight_stream import multiply_stream
from sparse_kernels.cpu.kernels.token_blocks import PlainOutput, RowsOfBlock, put_back
from sparse_kernels.cpu.kernels.token_major import WORTH_SHARING
from sparse_kernels.cpu.kernels.unstructured_rows import BUNDLE, SingleRows
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE
from sparse_kernels.cpu.runtime.work_split import find_part_begin


def choose_lanes(n: int, target: CpuTarget) -> int:
    """Return the lanes of the narrowest vector that holds n tokens, or of the widest."""
    lanes = NARROWEST
    while lanes < min(n, target.lanes):
        lanes *= 2
    return lanes


def accepts_batch(weights: Panels | SingleRows, layout: str, n: int, target: CpuTarget) -> bool:
    """Return whether n tokens of these weights are multiplied so: a vector of them at most.

    Single rows must have places that halving turns into those of shorter vectors. A whole vector of feature-major x
    is read where it lies.
    """
    fits = n <= target.lanes if layout == "token_major" else layout == "feature_major" and n < target.lanes
    return fits and (not isinstance(weights, SingleRows) or weights.stride & (weights.stride - 1) == 0)


class SmallBatchLayer(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels, or of the single rows. n, k, m: tokens, features of x and of y. stride: elements
    from one row of sums to the next. start: int64 (1), 0, where the vector of tokens starts. parts: threads. shares:
    in how many shares permuted rows are put back.
    """

    weights: Any
    n: int
    k: int
    m: int
    stride: int
    start: NDArray[np.int64]
    parts: int
    shares: int


def bind_kernel(
    weights: Panels | SingleRows, shape: tuple[int, int], layout: str, target: CpuTarget, n: int, threads: int
) -> KernelWithScratch:
    """Return how weights of this shape (m, k) multiply n tokens in this layout, if `accepts_batch`.

    Scratch memory holds x for each part, then the sums of all rows.
    """
    (m, k), lanes, by_token = shape, choose_lanes(n, target), layout == "token_major"
    permuted = not isinstance(weights, SingleRows) and not weights.in_order
    # Threads that write rows here and there should not share their cache lines.
    stride = max(lanes, LINE) if permuted else lanes
    layer = SmallBatchLayer(
        weights=weights.arrays, n=n, k=k, m=m, stride=stride, start=np.zeros(1, np.int64), parts=threads,
        shares=threads if n * m >= WORTH_SHARING else 1,
    )  # fmt: skip
    if isinstance(weights, SingleRows):
        halvings = (weights.stride // lanes).bit_length() - 1
        kernel = build_stream_kernel(lanes, halvings, target.fused, by_token)
    else:
        kernel = build_panel_kernel(weights.width, lanes, target.fused, by_token, permuted)
    return KernelWithScratch(kernel.bind(LinearCall, layer), threads * k * lanes + m * stride)


@inline
def lay_out_batch(form: Any, x_at: int, n: int, k: int, target_at: int) -> None:
    """Lay out n tokens of k features along one vector; form: its lanes, and whether x is token-major."""
    lanes, by_token = form
    if by_token:
        tokens_to_lanes((lanes, FLOATS), Matrix(x_at, k), Matrix(target_at, lanes), n, k)
    else:
        for c in range(k):
            copy_vector(lanes, FLOATS, x_at + c * n * 4, target_at + c * lanes * 4, n)


@cache
def build_panel_kernel(rows: int, lanes: int, fused: bool, by_token: bool, permuted: bool) -> ParallelKernel:
    """Return the kernel for panels of `rows` rows, `permuted` or in order.

    It is called with `LinearCall` and `SmallBatchLayer`. Where permuted, rows are put back in as many shares as the
    layer says.
    """
    tile_form = tuple(RowTileForm(rows, 1, lanes, int(fused), 0, 0, FLOATS))
    form = (lanes, by_token)

    def multiply(part: int, call: LinearCall, layer: SmallBatchLayer) -> None:
        table, values, columns, work, row_ids = layer.weights
        fetch_now(work.ctypes.data, work.size * 8)
        begin, end = find_part_begin(work, 1, part, layer.parts), find_part_begin(work, 1, part + 1, layer.parts)
        if begin == end:
            return
        start, start_at = layer.start, layer.start.ctypes.data
        x_at = call.scratch_at + part * layer.k * lanes * 4
        sums_at = call.scratch_at + layer.parts * layer.k * lanes * 4
        lay_out_batch(form, call.x_at, layer.n, layer.k, x_at)
        x, y = VectorInput(x_at, lanes, start_at, 1), FramedOutput(sums_at, layer.stride, start_at, 0, 0, NO_QUADS)
        for panel in range(begin, end):
            weights = TileWeights(
                values.ctypes.data + table[panel, 0] * 4, columns.ctypes.data + table[panel, 1] * 4, table[panel, 2]
            )
            finish = RowEpilogue(
                row_ids.ctypes.data + panel * rows * 4, call.bias_at, call.activation, WORTH_OF_FLOATS
            )
            row_tile(tile_form, weights, x, y, finish, LineWalk(0, 0, 0))
        if not permuted:
            first = np.int64(row_ids[begin * rows])
            behind = np.int64(row_ids[end * rows]) if end < table.shape[0] else layer.m
            done = RowsOfBlock(sums_at + first * layer.stride * 4, layer.stride, 0, 1, first, behind)
            put_back(form, done, start, PlainOutput(call.y_at, layer.n, layer.m))

    def put_back_permuted(share: int, call: LinearCall, layer: SmallBatchLayer) -> None:
        begin, end = layer.m * share // layer.shares, layer.m * (share + 1) // layer.shares
        sums_at = call.scratch_at + (layer.parts * layer.k * lanes + begin * layer.stride) * 4
        rows_done = RowsOfBlock(sums_at, layer.stride, 0, 1, begin, end)
        put_back(form, rows_done, layer.start, PlainOutput(call.y_at, layer.n, layer.m))

    return build_parallel_kernel(multiply, put_back_permuted) if permuted else build_parallel_kernel(multiply)


@cache
def build_stream_kernel(lanes: int, halvings: int, fused: bool, by_token: bool) -> ParallelKernel:
    """Return the kernel for single rows; halvings: as in `StreamForm`.

    It is called with `LinearCall` and `SmallBatchLayer`.
    """
    stream_form, form = (1, lanes, int(fused), halvings, FLOATS), (lanes, by_token)

    @build_parallel_kernel
    def multiply(part: int, call: LinearCall, layer: SmallBatchLayer) -> None:
        stream, table, work, bounds = layer.weights
        fetch_now(work.ctypes.data, work.size * 8)
        begin, end = find_part_begin(work, 1, part, layer.parts), find_part_begin(work, 1, part + 1, layer.parts)
        if begin == end:
            return
        x_at = call.scratch_at + part * layer.k * lanes * 4
        sums_at = call.scratch_at + layer.parts * layer.k * lanes * 4
        lay_out_batch(form, call.x_at, layer.n, layer.k, x_at)
        first, behind, stages = begin * BUNDLE, min(end * BUNDLE, layer.m), table.shape[0]
        for stage in range(stages):
            rows = WeightStream(stream.ctypes.data + table[stage, begin] * 4, behind - first)
            activation = call.activation if stage == stages - 1 else PARTIAL
            finish = StreamEpilogue(min(stage, 1), call.bias_at, activation, WORTH_OF_FLOATS)
            multiply_stream(stream_form, 1, rows, x_at + bounds[stage] * lanes * 4, sums_at, finish)
        done = RowsOfBlock(sums_at + first * layer.stride * 4, layer.stride, 0, 1, first, behind)
        put_back(form, done, layer.start, PlainOutput(call.y_at, layer.n, layer.m))

    return multiply
