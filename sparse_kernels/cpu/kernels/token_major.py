"""Linear layers on token-major activations: x (n, k) -> y (n, m), outputs along the vector, no repacking of x.

A panel of w is as wide as one or two vectors of outputs; its columns are read for 8 tokens at a time. Order of the
loops: chunks of tokens, blocks of panels, stages of columns, tiles of tokens, panels of the block. The x of a chunk
and the weights of a block stay in the second-level cache. Between two panels a tile's x stays in the first-level
cache. It is to fit there: long rows are multiplied in stages, and y holds the sums of those before. Threads share
(chunk, panel) pairs by cost.

Permuted rows (Shfl-BW) are first computed in the order in which they are packed. They are put back when all rows of a
tile of tokens are done. Where threads share the panels of a chunk, they wait for all tokens. If threads wrote here
and there in the same rows of y, they would take its cache lines from each other. Until then sums wait in fours of
tokens, side by side, so that 16 bytes are read here and there and not 4. With eights it took as long, with few tokens
up to a tenth longer. Two other ways are slower (Zen 5), because they push x out of the first-level cache. One writes
sums here and there and reads them in order; the other puts a tile back while the next one is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.prefetch import LINE_BYTES, fetch_now
from sparse_kernels.cpu.codegen.quantize import QuantizeForm, locate_worth, quantize_row
from sparse_kernels.cpu.codegen.register_tiles import (
    AHEAD,
    FINISHED,
    FOURS,
    ROWS,
    TokenTileForm,
    token_tile,
    tokens_to_lanes,
)
from sparse_kernels.cpu.codegen.scatter_rows import scatter_rows
from sparse_kernels.cpu.codegen.tile_operands import (
    WORTH_OF_FLOATS,
    Epilogue,
    Matrix,
    TileWeights,
    TokenRows,
    TokenSums,
    WaitingSums,
    WeightFetch,
)
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PARTIAL, QUADS, QUADS_BY_BYTE
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.panels import PanelArrays, Panels
from sparse_kernels.cpu.layouts.quads import QuadArrays
from sparse_kernels.cpu.layouts.vector_grid import CACHED
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE
from sparse_kernels.cpu.runtime.work_split import find_part_begin

# Elements in the first-level data cache: 48 KB, as in Intel processors since Ice Lake.
FIRST_LEVEL = 12_288

# Tokens of a thread from which on it has chunks of its own also where rows are in order.
OWN_TOKENS = 32

# Elements of weights that are one block where each thread reads them all: 512 KB.
ONE_BLOCK = 2**17

# Tokens up to which tiles fetch the weights of the next block.
COMING = 256

# Tiles of tokens from which on few columns are worth cutting into stages.
TILES_IN_STAGES = 8

# Length of rows of x from which on few tokens are laid out side by side. An output then has at most this share of the
# columns.
LONG_ROW, THIN = 1024, 0.18

# Elements from which on threads share the work of putting rows in their places.
WORTH_SHARING = 8_192


def choose_tile(height: int, target: CpuTarget) -> tuple[int, int, int] | None:
    """Return (tokens, vectors, lanes) of the register tile for groups of `height` rows; None where none fits.

    A vector must be filled by rows of one group.
    """
    tokens = 8 if target.registers >= 32 else 4
    for vectors in (2, 1):
        if height % (vectors * target.lanes) == 0:
            return tokens, vectors, target.lanes
    return None


def count_stages(tokens: int, k: int, density: float, n: int, target: CpuTarget) -> int:
    """Return in how many stages of columns tiles of `tokens` rows of x, of k elements each, are best multiplied.

    n: rows of x.

    Each panel reads the whole x of a tile. Where that does not fit the first-level cache, Intel's second level slows
    it down. A stage fills half of the first. That takes less time than one stage, or than blocks with tokens along
    the vector: 5% to 10% at 75% sparsity, 15% to 25% at 90% (2048 and 3072 columns, 128 tokens).

    So do vectors of 512 bits at once where few columns are kept: a stage fills three quarters, at 90% sparsity 8% to
    18% less time (the same layers, Zen 5). At 75%, or with 32 tokens, it takes up to a tenth longer.
    """
    if tokens * k <= FIRST_LEVEL:
        return 1
    if target.shared:
        return -(-tokens * k // (FIRST_LEVEL // 2))
    if not target.whole or density >= THIN or n < TILES_IN_STAGES * tokens:
        return 1
    return -(-tokens * k // (3 * FIRST_LEVEL // 4))


def choose_chunks(
    tokens: int, k: int, n: int, weights: Panels, parts: int, own: bool, permuted: bool
) -> tuple[int, int]:
    """Return (tokens of a chunk, in whole tiles of `tokens`; panels of a block), for n rows of k elements.

    Each of the `parts` threads has equally many chunks. All pairs of a chunk and a panel count alike, also those of a
    shorter last chunk. Threads have chunks of their `own`, or one that fits is shared by panels. In stages they have
    their own: only a stage has to stay in a second-level cache, beside as many panels as fit.

    Few weights are one block in two cases, if threads have tokens of their own. Permuted rows keep their sums near
    then (at 90% sparsity 2% to 10% less time, Zen 5). Or tokens are so many that no other block is fetched (1% to
    3%).
    """
    panel = max(1, weights.values.size // len(weights.table))
    most = max(1, CACHED * weights.stages // (k * tokens))
    tiles = -(-n // tokens)
    chunks = -(-tiles // most)
    if own or weights.stages > 1 or chunks > 1:
        chunks = min(-(-chunks // parts) * parts, tiles)
    at_once = own and (permuted or n > COMING) and weights.values.size <= ONE_BLOCK
    block = 3 * CACHED if weights.stages > 1 else ONE_BLOCK if at_once else CACHED // 2
    return -(-tiles // chunks) * tokens, max(1, block // panel)


def gives_own_chunks(n: int, threads: int, permuted: bool, target: CpuTarget, numbers: int = FLOATS) -> bool:
    """Return whether threads do better with tokens of their own than with panels.

    Permuted rows they put in their places out of their own caches. Others come out evenly then: 64 and 128 tokens at
    1.0 to 1.1 times the speed (AMD). With 16 and 32 it is 0.75 to 1.0 times: each thread has to read all weights.
    Where x is read as bytes, each thread that has panels of a chunk reads it: 1.05 to 1.4 times the speed with 128
    tokens, most with long rows (Intel).
    """
    return permuted or ((not target.shared or numbers in QUADS) and n >= OWN_TOKENS * threads)


class WeightPrefetch(NamedTuple):
    """How tiles fetch weights.

    ahead: how many floats ahead, 0 for not at all. close: to the first-level cache, else to the second. coming: those
    of the next block, too. once: ahead only with the first tile of tokens that passes over a block, and what is
    coming only with the others.
    """

    ahead: int
    close: bool
    coming: bool
    once: bool


def choose_prefetch(n: int, tokens: int, target: CpuTarget) -> WeightPrefetch:
    """Return how weights are fetched for n tokens, `tokens` at a time.

    A tile reads whole cache lines of them for each column. Where they are passed over often they lie in the second
    level, which Intel's units wait for: with the first level 3% to 9% less time for 128 tokens. It takes 2% to 6%
    longer where they come from memory, or where x of few tokens needs the first level (8 and 32 tokens).

    One or two tokens AMD's units compute so fast that they read ahead themselves as far as memory gives: fetching
    takes a tenth longer then. Where tokens are many, the first tile of a block waits for memory, and the others have
    nothing to fetch but the next block. Fetching that gives up to 1.1 times the speed for 64 and 128 tokens. Of far
    more tokens that is a small part, and it is 0.95 to 1.0 times.

    Vectors of 512 bits at once feel it where the others fetch what is there: 1.01 to 1.1 times the speed for 32 to
    2,048 tokens if only the first does, where weights are warm and where they are not (Zen 5).
    """
    if target.shared:
        return WeightPrefetch(AHEAD, n >= 8 * tokens, coming=False, once=False)
    coming, ahead = tokens < n <= COMING, AHEAD if n > 2 else 0
    return WeightPrefetch(ahead, close=target.whole, coming=coming, once=target.whole and n > tokens)


class PanelBlock(NamedTuple):
    """Panels of a part that lie in one chunk of tokens and in one block.

    first, stop: panels. item, end: pairs of a chunk and a panel that the part has left. most: panels of a block.
    """

    first: int
    stop: int
    item: int
    end: int
    most: int


@inline
def find_next_panels(block: PanelBlock, stage: int, stages: int, panels: int) -> tuple[int, int]:
    """Return the rows of the table, from one to before another, that a part multiplies after this block of panels."""
    if stage + 1 < stages:
        return block.first + (stage + 1) * panels, block.stop + (stage + 1) * panels
    if block.item == block.end:
        return block.first, block.first
    begin = block.item % panels
    return begin, min(begin + block.most, panels, begin + block.end - block.item)


def packs_tokens(n: int, tokens: int, k: int, density: float, target: CpuTarget) -> bool:
    """Return whether n rows of k elements of x are packed first, (k, tokens).

    density: the share of the columns that counts for an output.

    As x lies, a column is a cache line for each token, most of which hold no other column that is kept; in long rows
    they push each other out of the first level. 1.05 to 1.4 times the speed for 8 tokens of 1024 to 3072 elements at
    90% sparsity, 0.95 to 1.04 times at 75% (AMD); for 16 tokens, in two tiles, 0.85 to 1.2 times.
    """
    one = tokens == 8 and tokens < 2 * n <= 2 * tokens
    return one and not target.shared and k >= LONG_ROW and density < THIN


def waits_in_fours(tokens: int) -> bool:
    """Return whether sums of tiles of so many tokens, whose rows are permuted, wait in fours of them."""
    return tokens % 4 == 0


class TokenMajorForm(NamedTuple):
    """What is known of a kernel when it is compiled.

    tokens, vectors, lanes: of the register tile. fused: multiply-adds are fused. permuted: rows have to be put back.
    size: bytes of a weight. prefetch: how weights are fetched. packed: the tokens of x are packed side by side first
    (`packs_tokens`). whole_chunks: each part has whole chunks, so it puts permuted rows back itself, tile by tile,
    while it finds them in its caches. numbers: what tiles multiply; for quads a chunk of x is read as bytes first.
    own_steps: each token has a step of its own then.
    """

    tokens: int
    vectors: int
    lanes: int
    fused: bool
    permuted: bool
    size: int
    prefetch: WeightPrefetch
    packed: bool
    whole_chunks: bool
    numbers: int = FLOATS
    own_steps: bool = False


class TokenMajorLayer(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels. quads: what sums of quads are worth. n, k, m: tokens, elements of a row of x as
    tiles read it, and of y. features: of x, four to an element of quads. chunk: tokens of a chunk. block: panels of
    a block. parts: threads. positions: uint32 (m), where rows of y wait among the panels' rows, or in fours. shares:
    in how many shares permuted rows are put back, unless chunks are whole. waiting: elements of scratch memory that
    sums take: those of all panels, for n tokens in whole tiles or, if chunks are whole, a chunk of each part. Where x
    is packed or read as bytes, there is room behind them for a chunk of x for each part: `count_chunk_elements`.
    """

    weights: PanelArrays
    quads: QuadArrays
    n: int
    k: int
    m: int
    features: int
    chunk: int
    block: int
    parts: int
    positions: NDArray[np.uint32]
    shares: int
    waiting: int


@inline
def pack_chunk(tokens: int, x_at: int, n: int, k: int, chunk: Any, target_at: int) -> None:
    """Pack a chunk of tokens side by side, tile by tile; chunk: its first token, and the end."""
    begin, end = chunk
    for token in range(begin, end, tokens):
        target = Matrix(target_at + (token - begin) * k * 4, tokens)
        tokens_to_lanes((tokens, FLOATS), Matrix(x_at + token * k * 4, k), target, n - token, k)


def count_chunk_elements(form: TokenMajorForm, chunk: int, k: int) -> int:
    """Return the elements of scratch memory that a chunk of x takes for each part.

    Bytes are written by whole vectors, so there is a cache line behind them, then the steps of the tokens.
    """
    if form.numbers in QUADS:
        return -(-(chunk * (k + 1) + LINE) // LINE) * LINE
    return chunk * k if form.packed else 0


@inline
def quantize_chunk(
    form: Any, x_at: int, features: int, row: int, chunk: Any, target_at: int, reading_at: int
) -> None:
    """Read a chunk of tokens as bytes, in rows of `row` elements, and leave each token's step behind all rows.

    chunk: its first token, the end, and where the steps begin, in elements.
    """
    begin, end, steps = chunk
    for token in range(begin, end):
        here = token - begin
        quantize_row(
            form, x_at + token * features * 4, target_at + here * row * 4, features, reading_at,
            target_at + (steps + here) * 4,
        )  # fmt: skip


class StageWork(NamedTuple):
    """One stage of columns of a block of panels, for a chunk of tokens.

    stage: of columns. first, stop: panels of the block. begin, behind: rows of the table that come next. chunk_begin,
    chunk_end: tokens of the chunk. packed_at: address of the packed chunk. steps_at: address of its tokens' steps, 0
    where all have the same. sums_at: address of the part's sums.
    """

    stage: int
    first: int
    stop: int
    begin: int
    behind: int
    chunk_begin: int
    chunk_end: int
    packed_at: int
    steps_at: int
    sums_at: int


@inline
def multiply_stage(
    form: Any, scatter_form: Any, whole: bool, call: LinearCall, layer: TokenMajorLayer, work: StageWork
) -> None:
    """Multiply a chunk of tokens by a stage of a block.

    form, scatter_form: of `token_tile` and `scatter_rows`. whole: the part has whole chunks, and puts rows back.
    """
    tokens, vectors, lanes, _, size, _, _, order, fetch_elsewhere, once, packed, numbers = form
    in_chunk = packed or numbers >= QUADS_BY_BYTE
    together = scatter_form[0]
    table, values, columns, costs, _ = layer.weights
    n, k, m, panels, width = layer.n, layer.k, layer.m, costs.size - 1, vectors * lanes
    values_at, columns_at, positions_at = values.ctypes.data, columns.ctypes.data, layer.positions.ctypes.data
    stages, features = table.shape[0] // panels, m if order == FINISHED else panels * width
    per_column = max(1, width * size // LINE_BYTES)  # cache lines
    # Tiles fetch the weights of the next block: every few tiles, a line of each column of a panel. Tiles that fetch
    # ahead `once` do not.
    turns = (work.stop - work.first) * ((work.chunk_end - work.chunk_begin - 1) // tokens + 1 - once)
    lines, asked, due = (work.behind - work.begin) * per_column, 0, 0
    add_present, last = min(work.stage, 1), work.stage == stages - 1
    # Where a tile of tokens meets all panels one after the other, the sums of the next tile reuse the same memory.
    alone = whole and stages == 1 and layer.block >= panels
    for token in range(work.chunk_begin, work.chunk_end, tokens):
        token_in_chunk = token - work.chunk_begin
        sums_at = work.sums_at + (0 if alone else token_in_chunk if whole else token) * features * 4
        x_at = work.packed_at + token_in_chunk * k * 4 if in_chunk else call.x_at + token * k * 4
        cold = int(token_in_chunk == 0)
        for panel in range(work.first, work.stop):
            row, here, elsewhere = panel * width, work.stage * panels + panel, 0
            if fetch_elsewhere and not (once and cold):
                due += lines
                if due >= turns:
                    next_at = table[work.begin + asked // per_column, 0]
                    elsewhere = (next_at - table[here, 0]) * size + asked % per_column * LINE_BYTES
                    asked, due = asked + 1, due - turns
            worth = locate_worth(layer.quads, row, work.steps_at and work.steps_at + token_in_chunk * 4)
            token_tile(
                form, TileWeights(values_at + table[here, 0] * size, columns_at + table[here, 1] * 4, table[here, 2]),
                TokenRows(x_at, k, n - token),
                TokenSums(sums_at + row * together * 4, features, features - row, add_present),
                Epilogue(call.bias_at + row * 4, call.activation if last else PARTIAL, worth),
                WeightFetch(elsewhere, cold),
            )  # fmt: skip
        if whole and work.stop == panels and last:
            for t in range(0, min(tokens, n - token), together):
                waiting = WaitingSums(sums_at + t * features * 4, positions_at, m)
                y = TokenRows(call.y_at + (token + t) * m * 4, m, n - token - t)
                scatter_rows(scatter_form, waiting, y, Epilogue(call.bias_at, call.activation, WORTH_OF_FLOATS))


@inline
def put_back_share(form: Any, width: int, share: int, call: LinearCall, layer: TokenMajorLayer) -> None:
    """Put a share of the waiting rows back; form: of `scatter_rows`; width: rows of a panel.

    A share is whole chunks, which a thread finds in its own caches, if there are enough for all. Otherwise it is
    tokens, whose lines of y no other thread writes, or else some rows.
    """
    together = form[0]
    n, m, features = layer.n, layer.m, (layer.weights.work.size - 1) * width
    grain = layer.chunk if (n + layer.chunk - 1) // layer.chunk >= layer.shares else together
    units = (n + grain - 1) // grain
    first, last, begin, end = 0, n, 0, m
    if units >= layer.shares:
        first, last = units * share // layer.shares * grain, min(n, units * (share + 1) // layer.shares * grain)
    else:
        begin, end = m * share // layer.shares, m * (share + 1) // layer.shares
    positions_at, finish = (
        layer.positions.ctypes.data + begin * 4,
        Epilogue(call.bias_at + begin * 4, call.activation, WORTH_OF_FLOATS),
    )
    for token in range(first, last, together):
        waiting = WaitingSums(call.scratch_at + token * features * 4, positions_at, end - begin)
        y = TokenRows(call.y_at + (token * m + begin) * 4, m, n - token)
        scatter_rows(form, waiting, y, finish)


@cache
def build_kernel(settings: TokenMajorForm) -> ParallelKernel:
    """Return the loops for one tile size. It is called with `LinearCall` and `TokenMajorLayer`."""
    tokens, vectors, lanes, fused, permuted, size, prefetch, packed, whole, numbers, own_steps = settings
    ahead, close, coming, once = (int(each) for each in prefetch)
    order = (FOURS if waits_in_fours(tokens) else ROWS) if permuted else FINISHED
    form = tuple(
        TokenTileForm(
            tokens, vectors, lanes, int(fused), size, ahead, close, order, coming, once, int(packed), numbers
        )
    )  # fmt: skip
    quads, read_form = numbers in QUADS, tuple(QuantizeForm(lanes, int(fused), int(own_steps)))
    scatter_form, width = (4 if order == FOURS else 1, lanes, int(fused)), vectors * lanes

    def multiply(part: int, call: LinearCall, layer: TokenMajorLayer) -> None:
        table, _, _, work, _ = layer.weights
        n, k, chunk, panels = layer.n, layer.k, layer.chunk, work.size - 1
        stages, chunks = table.shape[0] // panels, (n + chunk - 1) // chunk
        # The tables that a part looks up come from memory, as the weights do, and each only tells where the next one
        # lies. Fetching them, together with panels in one piece, makes one token take 0.9 to 1.0 times as long (Zen
        # 5).
        fetch_now(work.ctypes.data, work.size * 8)
        fetch_now(table.ctypes.data, table.size * 8)
        if permuted:
            fetch_now(layer.positions.ctypes.data, layer.m * 4)
        sums_at = call.scratch_at if permuted else call.y_at
        if whole:
            sums_at += part * chunk * panels * width * 4
        elements = (chunk * (k + 1) + 2 * LINE - 1) // LINE * LINE if quads else chunk * k
        packed_at, packed_chunk = call.scratch_at + (layer.waiting + part * elements) * 4, -1
        steps = chunk * k + LINE
        steps_at = packed_at + steps * 4 if own_steps else 0
        item = find_part_begin(work, chunks, part, layer.parts)
        end = find_part_begin(work, chunks, part + 1, layer.parts)
        while item < end:
            # As many panels of this part as lie in one chunk and in one block.
            chunk_begin, first = item // panels * chunk, item % panels
            chunk_end, stop = min(chunk_begin + chunk, n), min(first + layer.block, panels, first + end - item)
            item += stop - first
            if packed and chunk_begin != packed_chunk:
                packed_chunk = chunk_begin
                pack_chunk(tokens, call.x_at, n, k, (chunk_begin, chunk_end), packed_at)
            if quads and chunk_begin != packed_chunk:
                packed_chunk = chunk_begin
                read = (chunk_begin, chunk_end, steps)
                reading_at = layer.quads.reading.ctypes.data
                quantize_chunk(read_form, call.x_at, layer.features, k, read, packed_at, reading_at)
            block = PanelBlock(first, stop, item, end, layer.block)
            for stage in range(stages):
                begin, behind = find_next_panels(block, stage, stages, panels)
                here = StageWork(
                    stage, first, stop, begin, behind, chunk_begin, chunk_end, packed_at, steps_at, sums_at
                )
                multiply_stage(form, scatter_form, whole, call, layer, here)

    def put_back(share: int, call: LinearCall, layer: TokenMajorLayer) -> None:
        put_back_share(scatter_form, width, share, call, layer)

    return build_parallel_kernel(multiply, put_back) if permuted and not whole else build_parallel_kernel(multiply)
