"""Linear layers a block of tokens at a time: laid out, multiplied and put back by one thread, in its own caches.

Where each thread has tokens enough, only x, y and the weights come from memory: a block's x is laid out with tokens
along the vector, the weights pass over it, and its y is put in its place. The same in three passes over all tokens
would cost more than the multiplication saves, and lines that another core has just written are slow to read.

x that comes in tiles of tokens (layout `token_blocked`) is read as it lies, and y that is wanted so is written there.
But where a thread has several blocks, x is too large for its caches: then a block of it is copied there first, in
order, which takes less time than to wait for columns here and there (3072 features, 2,048 tokens: half the time). It
is copied, too, where tiles multiply bfloat16: laying out and copying round what they read.

While a block is multiplied, its tiles fetch the x of the next one and the lines of y that it will fill (`ahead`):
with 2,048 tokens at 90% sparsity up to 12% less time, the less the longer y is beside x.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.prefetch import FAR, LINE_BYTES, standing, step, walk
from sparse_kernels.cpu.codegen.register_tiles import (
    copy_run,
    copy_vector,
    fetch,
    lanes_to_tokens,
    row_tile,
    tokens_to_lanes,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PARTIAL
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, pass_over
from sparse_kernels.cpu.launch.linear_call import KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.layouts.vector_grid import CACHED, LARGE, TILE, in_tiles, whole_tiles

# Rows of y whose order is kept that are put in their places together. All of them would displace weights and x in the
# second-level cache; a quarter of these would go through the pages of y too often (2048 outputs: a tenth slower).
# Where rows are permuted, all of them have to be there first.
RUN = 256

# How many columns ahead x is fetched that is copied out of tiles, where each has only some lines.
COLUMNS_AHEAD = 32

COPIED = "copied"  # how x in tiles of tokens is read where each thread has several blocks, or rounds it


def enough(n: int, lanes: int, threads: int) -> bool:
    """Whether n tokens give every thread some, in nearly equal shares of whole vectors."""
    vectors = -(-n // lanes)
    return 4 * threads * -(-vectors // threads) <= 5 * vectors


def prepared(
    weights: Panels | SingleRows,
    shape: tuple[int, int],
    vectors: int,
    target: CpuTarget,
    layouts: tuple[str, str],
    n: int,
    threads: int,
    numbers: int = FLOATS,
) -> KernelWithScratch:
    """How weights of this shape (m, k) multiply n tokens, by register tiles of `vectors` vectors.

    layouts: of x and of y, each token_major, feature_major, or token_blocked in whole tiles; single rows must be laid
    out for whole tiles then. numbers: what tiles multiply; unless FLOATS, weights are `Panels.paired`.
    """
    (m, k), lanes = shape, target.lanes
    single = isinstance(weights, SingleRows)
    if isinstance(weights, SingleRows):
        rows, tile = 1, weights.stride // lanes
        block = tile
    else:
        # What a register tile reads of a column lies side by side, or every other cache line would stay unused.
        rows, tile = weights.width, vectors
        block = min(-(-n // lanes), max(1, CACHED // ((k + m) * lanes) // vectors) * vectors)
    # Rows of y that are put in their places together.
    run = m if isinstance(weights, SingleRows) or not weights.in_order else min(m, max(RUN, rows))
    here = in_tiles(block * lanes, tile, lanes, k, run)
    there = whole_tiles(-(-n // (TILE * lanes)), lanes, k, m)
    x_layout, y_layout = layouts
    if x_layout == "token_blocked" and not single and (block * threads * lanes < n or numbers != FLOATS):
        x_layout = COPIED
    x_starts = there.x_starts if x_layout == "token_blocked" else here.x_starts
    y_starts = there.y_starts if y_layout == "token_blocked" else here.y_starts
    tokens = -(-block // tile) * tile * lanes
    laid_out = (k if x_layout != "token_blocked" else 0) + (run if y_layout != "token_blocked" else 0)
    needed = threads * tokens * laid_out
    x_stride = there.x_stride if x_layout == "token_blocked" else here.x_stride
    y_stride = there.y_stride if y_layout == "token_blocked" else here.y_stride
    far = not single and n * (k + m) >= FAR
    # Copied x with fewer columns than y has rows is soon read, and to fetch it gains less than it takes.
    x_fetched = far and (x_layout == "token_major" or (x_layout == COPIED and k >= m))
    y_fetched = far if y_layout == "token_major" else y_layout == "token_blocked" and n * m >= LARGE
    multiply = kernel(single, rows, vectors, lanes, target.fused, numbers, x_layout, y_layout, x_fetched, y_fetched)
    bound = multiply.bound(
        "scratch_at x_at y_at bias_at activation", weights=weights.arrays, n=n, k=k, m=m, elements=needed // threads,
        x_starts=x_starts, y_starts=y_starts, x_from=there.x_starts, most=block, tokens=tokens, run=run,
        x_stride=x_stride, y_stride=y_stride, parts=threads,
    )  # fmt: skip
    return KernelWithScratch(bound, needed)


@njit(inline="always")
def put_back(  # type: ignore[no-untyped-def]
    lanes, by_token, y_here, y_starts, y_stride, y_at, token, width, n, m, begin, end
):  # fmt: skip
    """Copy rows `begin` to `end` of a block of y, `width` vectors from `token` on, to their places in y.

    Of the module, not of `kernel`: what a kernel encloses is part of the key by which it is kept on disk, and a
    compiled function is another in each process.
    """
    for v in range(width):
        source = y_here + y_starts[v] * 4
        if by_token:
            target = y_at + (token * m + begin) * 4
            lanes_to_tokens(lanes, source, y_stride, n - token, end - begin, target, m)
        else:
            for r in range(begin, end):
                target = y_at + (r * n + token) * 4
                copy_run(lanes, FLOATS, source + (r - begin) * y_stride * 4, target, min(lanes, n - token))
        token += lanes


@njit(inline="always")
def token_major_ahead(x_at, k, begin, end, turns):  # type: ignore[no-untyped-def]
    """The walk over rows `begin` to `end` of x (n, k), which lie one after the other."""
    lines = ((end - begin) * k * 4 + LINE_BYTES - 1) // LINE_BYTES
    return walk(x_at + begin * k * 4, LINE_BYTES, lines, 0, lines, turns)


@njit(inline="always")
def strips_ahead(y_at, m, begin, end, turns):  # type: ignore[no-untyped-def]
    """The walk over rows `begin` to `end` of y (n, m): one line of each, then the next, as panels fill them."""
    strips = (m * 4 + LINE_BYTES - 1) // LINE_BYTES
    return walk(y_at + begin * m * 4, m * 4, end - begin, LINE_BYTES, strips * (end - begin), turns)


@njit(inline="always")
def tiles_ahead(lanes, at, k, begin, end, turns):  # type: ignore[no-untyped-def]
    """The walk over vectors of x in tiles from `begin` on, at this address: the whole tiles before `end`, or as much
    as lies in one.
    """
    if begin % TILE == 0 and end - begin >= TILE:
        lines = (end - begin) // TILE * (TILE * lanes * k * 4 // LINE_BYTES)
        return walk(at, LINE_BYTES, lines, 0, lines, turns)
    # Vectors may be shorter than a cache line.
    behind = at + (min(end, begin // TILE * TILE + TILE) - begin) * lanes * 4
    line = at // LINE_BYTES * LINE_BYTES
    runs = (behind - line + LINE_BYTES - 1) // LINE_BYTES
    return walk(line, TILE * lanes * 4, k, LINE_BYTES, runs * k, turns)


@cache
def kernel(
    single: bool,
    rows: int,
    vectors: int,
    lanes: int,
    fused: bool,
    numbers: int,
    x_layout: str,
    y_layout: str,
    x_fetched: bool,
    y_fetched: bool,
) -> ParallelKernel:
    """The compiled loop over blocks of tokens; `single` rows or panels of `rows` rows, of such `numbers`.

    Called with (weights.arrays, addresses of x and y, n, k, m, address of bias (m), activation code, address of
    scratch, its elements for each part, where the vectors start in x and in y (int64; in those of a block, unless
    they are blocked), where they start in blocked x, vectors of a block, tokens that there is room for in one, rows
    of y put in their places together, elements from one column of x to the next, from one row of y to the next,
    parts).
    scratch of a part: x and such rows of y of a block, less what is blocked. x_layout: also COPIED. x_fetched: tiles
    fetch x of the next block, which is token-major or copied. y_fetched: y is, token-major or blocked, before it is
    written.
    """
    y_walks = y_fetched and y_layout == "token_major"
    fuse, busy = int(fused), int(x_fetched or y_walks)
    per_step = 1 if numbers == FLOATS else 2  # columns of a tile's step, with which it fetches
    unfinished, unframed = PARTIAL, 0
    x_blocked, y_blocked = x_layout == "token_blocked", y_layout == "token_blocked"
    x_by_token, y_by_token = x_layout == "token_major", y_layout == "token_major"
    x_copied, x_tile = x_layout == COPIED, TILE * lanes
    # Vectors that blocks are shared by: single rows take whole tiles.
    unit = TILE if single and (x_blocked or y_blocked) else 1
    # A thread's blocks end at whole tiles, except for the last.
    grain = unit if single else vectors

    @in_parts
    def multiply(  # type: ignore[no-untyped-def]
        part, weights, x_at, y_at, n, k, m, bias_at, activation, scratch_at, elements, x_starts, y_starts, x_from,
        most, tokens, run, x_stride, y_stride, parts
    ):  # fmt: skip
        total = (n + lanes - 1) // lanes
        units = (total + unit - 1) // unit
        x_starts_at, y_starts_at = x_starts.ctypes.data, y_starts.ctypes.data
        begin, end = units * part // parts, units * (part + 1) // parts
        here = scratch_at + part * elements * 4
        x_here = x_at if x_blocked else here
        y_here = y_at if y_blocked else here if x_blocked else here + tokens * k * 4
        begin, each = begin * unit, min(end * unit, total) - begin * unit
        blocks, grains = (each + most - 1) // most, (each + grain - 1) // grain
        for block in range(blocks):
            first = begin + grains * block // blocks * grain
            width = begin + min(grains * (block + 1) // blocks * grain, each) - first
            x_first, y_first = first if x_blocked else 0, first if y_blocked else 0
            if not x_blocked:
                for v in range(width):
                    token, there = (first + v) * lanes, x_here + x_starts[v] * 4
                    if x_by_token:
                        source = x_at + token * k * 4
                        tokens_to_lanes(lanes, numbers, source, k, n - token, k, there, x_stride)
                    elif x_copied:
                        for c in range(k):
                            source = x_at + (x_from[first + v] + c * x_tile) * 4
                            fetch(source + COLUMNS_AHEAD * x_tile * 4)
                            copy_run(lanes, numbers, source, there + c * x_stride * 4, lanes)
                    else:
                        for c in range(k):
                            source = x_at + (c * n + token) * 4
                            copy_vector(lanes, numbers, source, there + c * x_stride * 4, n - token)
            if single:
                stream, table, _, bounds = weights
                stages = table.shape[0]
                for stage in range(stages):
                    pass_over(
                        vectors,
                        lanes,
                        fuse,
                        unframed,
                        width,
                        stream.ctypes.data + table[stage, 0] * 4,
                        m,
                        x_here + (x_starts[x_first] + bounds[stage] * x_stride) * 4,
                        y_here + y_starts[y_first] * 4,
                        bias_at,
                        min(stage, 1),
                        activation if stage == stages - 1 else unfinished,
                    )
            else:
                table, values, columns, _, row_ids = weights
                panels, done = table.shape[0], 0
                # Tiles fetch in turns: x of the next block, and lines of y that this block will fill.
                turns = (panels * ((width + vectors - 1) // vectors) + 1) // 2
                after = first + width
                going = waiting = standing(bias_at)
                if x_fetched and block + 1 < blocks:
                    ending = begin + min(grains * (block + 2) // blocks * grain, each)
                    if x_by_token:
                        going = token_major_ahead(x_at, k, after * lanes, min(ending * lanes, n), turns)
                    else:
                        going = tiles_ahead(lanes, x_at + x_from[after] * 4, k, after, ending, turns)
                if y_walks:
                    waiting = strips_ahead(y_at, m, first * lanes, min(after * lanes, n), turns)
                for panel in range(panels):
                    # Lines of y are to be at hand when they are written, not fetched one by one then.
                    if y_fetched and y_blocked and panel + 1 < panels:
                        for row in row_ids[(panel + 1) * rows : (panel + 2) * rows]:
                            for u in range(y_first, y_first + width):
                                fetch(y_at + (y_starts[u] + row * y_stride) * 4)
                    v = 0
                    while v < width:
                        together = vectors if v + vectors <= width else 1
                        line, stride, pace, gone = step(going, table[panel, 2] // per_step)
                        going, waiting = waiting, gone
                        row_tile(
                            rows,
                            vectors,
                            lanes,
                            fuse,
                            unframed,
                            busy,
                            numbers,
                            together,
                            values.ctypes.data + table[panel, 0] * 4,
                            columns.ctypes.data + table[panel, 1] * 4,
                            table[panel, 2],
                            x_here,
                            x_stride,
                            x_starts_at + (x_first + v) * 8,
                            y_here - done * y_stride * 4,
                            y_stride,
                            y_starts_at + (y_first + v) * 8,
                            unframed,
                            unframed,
                            row_ids.ctypes.data + panel * rows * 4,
                            bias_at,
                            activation,
                            line,
                            stride,
                            pace,
                        )
                        v += together
                    behind = row_ids[(panel + 1) * rows] if panel + 1 < panels else m
                    if not y_blocked and (behind == m or min(behind + rows, m) > done + run):
                        put_back(
                            lanes, y_by_token, y_here, y_starts, y_stride, y_at,
                            first * lanes, width, n, m, done, behind,
                        )  # fmt: skip
                        done = behind
            if single and not y_blocked:
                put_back(lanes, y_by_token, y_here, y_starts, y_stride, y_at, first * lanes, width, n, m, 0, m)

    return multiply
