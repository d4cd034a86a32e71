"""Linear layers a block of tokens at a time: laid out, multiplied and put back by one thread, in its own caches.

Where each thread has tokens enough, only x, y and the weights come from memory: a block's x is laid out with tokens
along the vector, the weights pass over it, and its y is put in its place. Three passes over all tokens would cost
more than the multiplication saves: lines that another core has just written are slow to read.

x that comes in tiles of tokens (layout `token_blocked`) is read as it lies, and y that is wanted so is written there.
But where a thread has several blocks, x is too large for its caches. Then a block of it is copied there first, in
order. That takes half the time of waiting for columns here and there (3072 features, 2,048 tokens). It is copied,
too, where tiles multiply bfloat16: laying out and copying round what they read.

While a block is multiplied, its tiles fetch the x of the next one and the lines of y that it will fill (`prefetch`).
With 2,048 tokens at 90% sparsity that saves up to 12% of the time, less where y is longer than x.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.prefetch import FAR, LINE_BYTES, Walk, advance, start_standing, start_walk
from sparse_kernels.cpu.codegen.quantize import QuantizeForm, locate_worth, quantize_row
from sparse_kernels.cpu.codegen.register_tiles import (
    RowTileForm,
    copy_run,
    copy_vector,
    fetch,
    lanes_to_tokens,
    row_tile,
    tokens_to_lanes,
)
from sparse_kernels.cpu.codegen.tile_operands import (
    NO_QUADS,
    FramedOutput,
    LineWalk,
    Matrix,
    QuadWorth,
    RowEpilogue,
    StreamEpilogue,
    TileWeights,
    VectorInput,
    WeightStream,
    Word,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PAIRS, PAIRS_BY_UNIT, PARTIAL, QUADS
from sparse_kernels.cpu.codegen.weight_stream import multiply_stream
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.layouts.quads import FLOATS_ONLY, QuadArrays
from sparse_kernels.cpu.layouts.vector_grid import (
    CACHED,
    LARGE,
    TILE,
    VectorGrid,
    build_tiled_grid,
    build_token_blocked_grid,
)
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE

# Rows of y that are put in their places together where their order is kept. All rows together would displace weights
# and x in the second-level cache. A quarter as many would go through the pages of y too often (2048 outputs: a tenth
# slower). Where rows are permuted, all of them are needed first.
RUN = 256

# How many columns ahead x is fetched where it is copied out of tiles, each of which has only some lines.
COLUMNS_AHEAD = 32

COPIED = "copied"  # how x in tiles of tokens is read where each thread has several blocks, or rounds x


def fills_threads(n: int, lanes: int, threads: int) -> bool:
    """Return whether n tokens give every thread some, in nearly equal shares of whole vectors."""
    vectors = -(-n // lanes)
    return 4 * threads * -(-vectors // threads) <= 5 * vectors


class BlockSettings(NamedTuple):
    """How tokens are multiplied block by block.

    vectors: of a register tile. target: the vector unit. layouts: of x and of y, each token_major, feature_major, or
    token_blocked in whole tiles; single rows must be laid out for whole tiles then. numbers: what tiles multiply;
    with pairs, weights are `Panels.paired`. quads: what sums of quads are worth. features: of token-major x with
    quads, four to a column. own_steps: each token is read by its own largest value.
    """

    vectors: int
    target: CpuTarget
    layouts: tuple[str, str]
    numbers: int = FLOATS
    quads: QuadArrays = FLOATS_ONLY
    features: int = 0
    own_steps: bool = False


class BlockForm(NamedTuple):
    """What is known of a kernel when it is compiled.

    rows: of a register tile, 1 for single rows. vectors: of a register tile. lanes: of a vector. fused: multiply-adds
    are fused. numbers: what tiles multiply. x_layout: of x, also COPIED. y_layout: of y. fetch_x: tiles fetch x of
    the next block, which is token-major or copied. fetch_y: tiles fetch y, token-major or blocked, before it is
    written. own_steps: with quads, each token has a step of its own.
    """

    rows: int
    vectors: int
    lanes: int
    fused: bool
    numbers: int
    x_layout: str
    y_layout: str
    fetch_x: bool
    fetch_y: bool
    own_steps: bool


class BlockLayer(NamedTuple):
    """What a kernel for blocks of tokens knows before it is called.

    weights: arrays of the panels, or of the single rows. quads: what sums of quads are worth. n, k, m: tokens,
    columns of x as tiles read it, and features of y. features: of x, four to a column of quads. elements: of scratch
    memory for each part, which holds x and some rows of y of a block, less what is blocked. With quads a vector of
    tokens as bytes follows, and the tokens' steps. x_starts, y_starts: int64, where the vectors start in x and in y;
    in those of a block, unless they are blocked. tile_starts: int64, where the vectors start in blocked x. most:
    vectors of a block. tokens: that a block has room for. run: rows of y that are put back together. x_stride,
    y_stride: elements from one column of x, from one row of y to the next. parts: threads.
    """

    weights: Any
    quads: QuadArrays
    n: int
    k: int
    m: int
    features: int
    elements: int
    x_starts: NDArray[np.int64]
    y_starts: NDArray[np.int64]
    tile_starts: NDArray[np.int64]
    most: int
    tokens: int
    run: int
    x_stride: int
    y_stride: int
    parts: int


def bind_kernel(
    weights: Panels | SingleRows, shape: tuple[int, int], settings: BlockSettings, n: int, threads: int
) -> KernelWithScratch:
    """Return how weights of this shape (m, k) multiply n tokens."""
    (m, k), target, numbers = shape, settings.target, settings.numbers
    x_layout, y_layout = settings.layouts
    lanes, single = target.lanes, isinstance(weights, SingleRows)
    if isinstance(weights, SingleRows):
        rows, tile = 1, weights.stride // lanes
        block = tile
    else:
        # The part of a column that a register tile reads lies in one piece. Otherwise every other cache line would
        # stay unused.
        rows, tile = weights.width, settings.vectors
        block = min(-(-n // lanes), max(1, CACHED // ((k + m) * lanes) // tile) * tile)
    # Rows of y that are put back together.
    run = m if isinstance(weights, SingleRows) or not weights.in_order else min(m, max(RUN, rows))
    here = build_tiled_grid(block * lanes, tile, lanes, k, run)
    there = build_token_blocked_grid(-(-n // (TILE * lanes)), lanes, k, m)
    if x_layout == "token_blocked" and not single and (block * threads * lanes < n or numbers != FLOATS):
        x_layout = COPIED
    x_grid: VectorGrid = there if x_layout == "token_blocked" else here
    y_grid: VectorGrid = there if y_layout == "token_blocked" else here
    tokens = -(-block // tile) * tile * lanes
    laid_out = (k if x_layout != "token_blocked" else 0) + (run if y_layout != "token_blocked" else 0)
    # A vector of tokens as bytes, what is written beyond its last row, and the tokens' steps.
    as_bytes = (lanes * k + 2 * LINE - 1) // LINE * LINE + tokens if numbers in QUADS else 0
    needed = threads * (tokens * laid_out + as_bytes)
    far = not single and n * (k + m) >= FAR
    # Copied x with fewer columns than y has rows is read soon. Fetching it takes longer than it saves.
    fetch_x = far and (x_layout == "token_major" or (x_layout == COPIED and k >= m))
    fetch_y = far if y_layout == "token_major" else y_layout == "token_blocked" and n * m >= LARGE
    form = BlockForm(
        rows, settings.vectors, lanes, target.fused, numbers, x_layout, y_layout, fetch_x, fetch_y, settings.own_steps
    )
    layer = BlockLayer(
        weights=weights.arrays, quads=settings.quads, n=n, k=k, m=m, features=settings.features or k,
        elements=needed // threads, x_starts=x_grid.x_starts, y_starts=y_grid.y_starts, tile_starts=there.x_starts,
        most=block, tokens=tokens, run=run, x_stride=x_grid.x_stride, y_stride=y_grid.y_stride, parts=threads,
    )  # fmt: skip
    kernel = build_stream_kernel(form) if single else build_panel_kernel(form)
    return KernelWithScratch(kernel.bind(LinearCall, layer), needed)


# Inlined functions belong to the module and not to the kernels. The values that a kernel encloses are part of its key
# on disk, and a compiled function is another one in each process.


class RowsOfBlock(NamedTuple):
    """Rows of y of a block, tokens along the vector.

    address: of row `begin`. stride: elements from one row to the next. token: the first. width: vectors. begin, end:
    rows of y.
    """

    address: Word
    stride: Word
    token: Word
    width: Word
    begin: Word
    end: Word


class PlainOutput(NamedTuple):
    """y of n tokens and m features, token-major or feature-major. address: of the first element."""

    address: int
    n: int
    m: int


@inline
def put_back(form: Any, block: RowsOfBlock, starts: NDArray[np.int64], y: PlainOutput) -> None:
    """Copy rows of a block, whose vectors start there, to y; form: lanes, and whether y is token-major."""
    lanes, by_token = form
    token = block.token
    for v in range(block.width):
        source_at = block.address + starts[v] * 4
        if by_token:
            target = Matrix(y.address + (token * y.m + block.begin) * 4, y.m)
            source = Matrix(source_at, block.stride)
            lanes_to_tokens((lanes, FLOATS), source, target, y.n - token, block.end - block.begin)
        else:
            for r in range(block.begin, block.end):
                row_at = source_at + (r - block.begin) * block.stride * 4
                copy_run(lanes, FLOATS, row_at, y.address + (r * y.n + token) * 4, min(lanes, y.n - token))
        token += lanes


class BlockInput(NamedTuple):
    """x of n tokens and k features that is laid out block by block.

    address: of the first element. n, k: tokens and features. target: address of the block. stride: elements from one
    column of the block to the next.
    """

    address: int
    n: int
    k: int
    target: int
    stride: int


@inline
def lay_out_block(
    form: Any, x: BlockInput, starts: NDArray[np.int64], tile_starts: NDArray[np.int64], first: int, width: int
) -> None:
    """Lay out the x of `width` vectors from `first` on, tokens along the vector.

    form: lanes, numbers, whether x is token-major, whether it comes in tiles, which start at tile_starts.
    """
    lanes, numbers, by_token, copied = form
    for v in range(width):
        token, target_at = (first + v) * lanes, x.target + starts[v] * 4
        if by_token:
            source = Matrix(x.address + token * x.k * 4, x.k)
            tokens_to_lanes((lanes, numbers), source, Matrix(target_at, x.stride), x.n - token, x.k)
        elif copied:
            for c in range(x.k):
                source_at = x.address + (tile_starts[first + v] + c * TILE * lanes) * 4
                fetch(source_at + COLUMNS_AHEAD * TILE * lanes * 4)
                copy_run(lanes, numbers, source_at, target_at + c * x.stride * 4, lanes)
        else:
            for c in range(x.k):
                source_at = x.address + (c * x.n + token) * 4
                copy_vector(lanes, numbers, source_at, target_at + c * x.stride * 4, x.n - token)


@inline
def lay_out_quads(form: Any, call: LinearCall, layer: BlockLayer, vectors: Any, x_at: int, steps_at: int) -> None:
    """Read the x of some vectors of tokens as bytes, and lay it out as quads, tokens along the vector.

    form: of `quantize_row`. vectors: the first, and how many. x_at: address of the block. steps_at: address of the
    steps of its tokens, before which there is room for a vector of tokens as bytes.
    """
    lanes, (first, width), quads = form[0], vectors, layer.k
    bytes_at = steps_at - (lanes * quads + 2 * LINE - 1) // LINE * LINE * 4
    for v in range(width):
        token = (first + v) * lanes
        left = min(lanes, layer.n - token)
        for t in range(left):
            quantize_row(
                form, call.x_at + (token + t) * layer.features * 4, bytes_at + t * quads * 4, layer.features,
                layer.quads.reading.ctypes.data, steps_at + (v * lanes + t) * 4,
            )  # fmt: skip
        target = Matrix(x_at + layer.x_starts[v] * 4, layer.x_stride)
        tokens_to_lanes((lanes, FLOATS), Matrix(bytes_at, quads), target, left, quads)


@inline
def walk_token_rows(x_at: int, k: int, begin: int, end: int, turns: int) -> Walk:
    """Return the walk over rows `begin` to `end` of x (n, k), which lie one after the other."""
    lines = ((end - begin) * k * 4 + LINE_BYTES - 1) // LINE_BYTES
    return start_walk(x_at + begin * k * 4, LINE_BYTES, lines, 0, lines, turns)


@inline
def walk_output_strips(y_at: int, m: int, begin: int, end: int, turns: int) -> Walk:
    """Return the walk over rows `begin` to `end` of y (n, m): one line of each, then the next, as panels fill
    them."""
    strips = (m * 4 + LINE_BYTES - 1) // LINE_BYTES
    return start_walk(y_at + begin * m * 4, m * 4, end - begin, LINE_BYTES, strips * (end - begin), turns)


@inline
def walk_token_tiles(lanes: int, at: int, k: int, begin: int, end: int, turns: int) -> Walk:
    """Return the walk over vectors of x in tiles from `begin` on, at this address.

    It covers the whole tiles before `end`, or as much as lies in one.
    """
    if begin % TILE == 0 and end - begin >= TILE:
        lines = (end - begin) // TILE * (TILE * lanes * k * 4 // LINE_BYTES)
        return start_walk(at, LINE_BYTES, lines, 0, lines, turns)
    # Vectors may be shorter than a cache line.
    behind = at + (min(end, begin // TILE * TILE + TILE) - begin) * lanes * 4
    line = at // LINE_BYTES * LINE_BYTES
    runs = (behind - line + LINE_BYTES - 1) // LINE_BYTES
    return start_walk(line, TILE * lanes * 4, k, LINE_BYTES, runs * k, turns)


@inline
def start_walks(form: Any, call: LinearCall, layer: BlockLayer, vectors: tuple[int, int, int], turns: int) -> Any:
    """Return the walks over x of the next block, and over the lines of y that this block will fill.

    form: lanes of a vector, whether x is fetched, whether it is token-major, whether y is fetched. vectors: where
    this block begins, where the next one begins and ends. turns: tiles that fetch from each.
    """
    lanes, fetch_x, x_by_token, fetch_y = form
    first, after, end = vectors
    x_walk = y_walk = start_standing(call.bias_at)
    if fetch_x and after < end:
        if x_by_token:
            last = min(end * lanes, layer.n)
            x_walk = walk_token_rows(call.x_at, layer.features, after * lanes, last, turns)
        else:
            x_at = call.x_at + layer.tile_starts[after] * 4
            x_walk = walk_token_tiles(lanes, x_at, layer.k, after, end, turns)
    if fetch_y:
        y_walk = walk_output_strips(call.y_at, layer.m, first * lanes, min(after * lanes, layer.n), turns)
    return x_walk, y_walk


@inline
def multiply_panel(
    form: Any, weights: TileWeights, x: VectorInput, y: FramedOutput, finish: RowEpilogue, walks: Any, per_step: int
) -> Any:
    """Multiply the vectors of a block by a panel, and return the walks behind its tiles, which take turns with them.

    form: of `row_tile`. per_step: columns of a step of a tile, with which it fetches.
    """
    vectors, lanes = form[1], form[2]
    (walk, next_walk), worth = walks, finish.worth
    v = 0
    while v < x.width:
        together = vectors if v + vectors <= x.width else 1
        line, stride, pace, walked = advance(walk, weights.count // per_step)
        walk, next_walk = next_walk, walked
        tile_x = VectorInput(x.address, x.scale, x.starts + v * 8, together)
        tile_y = FramedOutput(y.address, y.stride, y.starts + v * 8, 0, 0, NO_QUADS)
        steps = worth.token_scales and worth.token_scales + v * lanes * 4
        tile_worth = QuadWorth(worth.offsets, worth.scales, steps)
        tile_finish = RowEpilogue(finish.row_ids, finish.bias, finish.activation, tile_worth)
        row_tile(form, weights, tile_x, tile_y, tile_finish, LineWalk(line, stride, pace))
        v += together
    return walk, next_walk


@inline
def fetch_output_rows(y: FramedOutput, rows: NDArray[np.int32], starts: NDArray[np.int64], first: int) -> None:
    """Fetch the lines of these rows of blocked y for all vectors from `first` on that start there."""
    for row in rows:
        for v in range(first, starts.size):
            fetch(y.address + (starts[v] + row * y.stride) * 4)


@cache
def build_panel_kernel(settings: BlockForm) -> ParallelKernel:
    """Return the loop over blocks of tokens and panels. It is called with `LinearCall` and `BlockLayer`."""
    rows, vectors, lanes, fused, numbers, x_layout, y_layout, fetch_x, fetch_y, own_steps = settings
    x_blocked, y_blocked = x_layout == "token_blocked", y_layout == "token_blocked"
    quads, read_form = numbers in QUADS, tuple(QuantizeForm(lanes, int(fused), int(own_steps)))
    x_by_token, y_by_token, copied = x_layout == "token_major", y_layout == "token_major", x_layout == COPIED
    walk_y = fetch_y and y_by_token
    tile_form = tuple(RowTileForm(rows, vectors, lanes, int(fused), 0, int(fetch_x or walk_y), numbers))
    layout_form, output_form = (lanes, numbers, x_by_token, copied), (lanes, y_by_token)
    walk_form = lanes, fetch_x, x_by_token, walk_y
    per_step = 2 if numbers in (PAIRS, PAIRS_BY_UNIT) else 1

    @build_parallel_kernel
    def multiply(part: int, call: LinearCall, layer: BlockLayer) -> None:
        table, values, columns, _, row_ids = layer.weights
        n, k, m, panels = layer.n, layer.k, layer.m, table.shape[0]
        x_starts, y_starts, tile_starts = layer.x_starts, layer.y_starts, layer.tile_starts
        total = (n + lanes - 1) // lanes
        begin, each = total * part // layer.parts, total * (part + 1) // layer.parts - total * part // layer.parts
        scratch_at = call.scratch_at + part * layer.elements * 4
        x_at = call.x_at if x_blocked else scratch_at
        y_at = call.y_at if y_blocked else scratch_at if x_blocked else scratch_at + layer.tokens * k * 4
        steps_at = scratch_at + (layer.elements - layer.tokens) * 4
        # A thread's blocks end at whole tiles, except for the last.
        blocks, grains = (each + layer.most - 1) // layer.most, (each + vectors - 1) // vectors
        for block in range(blocks):
            first = begin + grains * block // blocks * vectors
            after = begin + min(grains * (block + 1) // blocks * vectors, each)
            width, x_first, y_first, done = after - first, first if x_blocked else 0, first if y_blocked else 0, 0
            if quads:
                lay_out_quads(read_form, call, layer, (first, width), x_at, steps_at)
            elif not x_blocked:
                source = BlockInput(call.x_at, n, k, x_at, layer.x_stride)
                lay_out_block(layout_form, source, x_starts, tile_starts, first, width)
            end = begin + min(grains * (block + 2) // blocks * vectors, each) if block + 1 < blocks else after
            turns = (panels * ((width + vectors - 1) // vectors) + 1) // 2
            walk, next_walk = start_walks(walk_form, call, layer, (first, after, end), turns)
            x = VectorInput(x_at, layer.x_stride, x_starts.ctypes.data + x_first * 8, width)
            for panel in range(panels):
                done_at = y_at - done * layer.y_stride * 4
                y = FramedOutput(done_at, layer.y_stride, y_starts.ctypes.data + y_first * 8, 0, 0, NO_QUADS)
                # Fetch the lines of y before they are written, so that stores do not wait for them one by one.
                if fetch_y and y_blocked and panel + 1 < panels:
                    fetch_output_rows(y, row_ids[(panel + 1) * rows : (panel + 2) * rows], y_starts[:after], first)
                weights = TileWeights(
                    values.ctypes.data + table[panel, 0] * 4, columns.ctypes.data + table[panel, 1] * 4,
                    table[panel, 2],
                )  # fmt: skip
                worth = locate_worth(layer.quads, panel * rows, steps_at if own_steps else 0)
                finish = RowEpilogue(row_ids.ctypes.data + panel * rows * 4, call.bias_at, call.activation, worth)
                walk, next_walk = multiply_panel(tile_form, weights, x, y, finish, (walk, next_walk), per_step)
                behind = row_ids[(panel + 1) * rows] if panel + 1 < panels else m
                if not y_blocked and (behind == m or min(behind + rows, m) > done + layer.run):
                    filled = RowsOfBlock(y_at, layer.y_stride, first * lanes, width, done, behind)
                    put_back(output_form, filled, y_starts, PlainOutput(call.y_at, n, m))
                    done = behind

    return multiply


@cache
def build_stream_kernel(settings: BlockForm) -> ParallelKernel:
    """Return the loop over blocks of tokens of single rows. It is called with `LinearCall` and `BlockLayer`."""
    _, vectors, lanes, fused, numbers, x_layout, y_layout, _, _, own_steps = settings
    x_blocked, y_blocked = x_layout == "token_blocked", y_layout == "token_blocked"
    quads, read_form = numbers in QUADS, tuple(QuantizeForm(lanes, int(fused), int(own_steps)))
    stream_form, output_form = (vectors, lanes, int(fused), 0, numbers), (lanes, y_layout == "token_major")
    layout_form = (lanes, numbers, x_layout == "token_major", x_layout == COPIED)
    # Vectors that stay together when blocks are shared: whole tiles where x or y is blocked.
    unit = TILE if x_blocked or y_blocked else 1

    @build_parallel_kernel
    def multiply(part: int, call: LinearCall, layer: BlockLayer) -> None:
        stream, table, _, bounds = layer.weights
        n, k, m, stages = layer.n, layer.k, layer.m, table.shape[0]
        x_starts, y_starts, tile_starts = layer.x_starts, layer.y_starts, layer.tile_starts
        total = (n + lanes - 1) // lanes
        units = (total + unit - 1) // unit
        scratch_at = call.scratch_at + part * layer.elements * 4
        x_at = call.x_at if x_blocked else scratch_at
        y_at = call.y_at if y_blocked else scratch_at if x_blocked else scratch_at + layer.tokens * k * 4
        steps_at = scratch_at + (layer.elements - layer.tokens) * 4
        worth = locate_worth(layer.quads, 0, steps_at if own_steps else 0)
        begin = units * part // layer.parts * unit
        each = min(units * (part + 1) // layer.parts * unit, total) - begin
        blocks, grains = (each + layer.most - 1) // layer.most, (each + unit - 1) // unit
        for block in range(blocks):
            first = begin + grains * block // blocks * unit
            width = begin + min(grains * (block + 1) // blocks * unit, each) - first
            if quads:
                lay_out_quads(read_form, call, layer, (first, width), x_at, steps_at)
            elif not x_blocked:
                source = BlockInput(call.x_at, n, k, x_at, layer.x_stride)
                lay_out_block(layout_form, source, x_starts, tile_starts, first, width)
            x_start, y_start = x_starts[first if x_blocked else 0], y_starts[first if y_blocked else 0]
            for stage in range(stages):
                activation = call.activation if stage == stages - 1 else PARTIAL
                rows = WeightStream(stream.ctypes.data + table[stage, 0] * 4, m)
                source_at = x_at + (x_start + bounds[stage] * layer.x_stride) * 4
                finish = StreamEpilogue(min(stage, 1), call.bias_at, activation, worth)
                multiply_stream(stream_form, width, rows, source_at, y_at + y_start * 4, finish)
            if not y_blocked:
                filled = RowsOfBlock(y_at, layer.y_stride, first * lanes, width, 0, m)
                put_back(output_form, filled, y_starts, PlainOutput(call.y_at, n, m))

    return multiply
