"""Linear layers on token-major activations: x (n, k) -> y (n, m), outputs along the vector, no repacking of x.

A panel of w is as wide as one or two vectors of outputs; its columns are read for 8 tokens at a time. Order of the
loops: chunks of tokens, blocks of panels, stages of columns, tiles of tokens, panels of the block. The x of a chunk
and the weights of a block stay in the second-level cache; between two panels a tile's x stays in the first-level
cache. It is to fit there: long rows are multiplied in stages, and y holds the sums of those before. Threads share
(chunk, panel) pairs by cost.

Permuted rows (Shfl-BW) are first computed in the order in which they are packed, and go to their places when all of a
tile of tokens are done, or all of all where threads share the panels of a chunk: if they wrote here and there in the
same rows of y, they would take its cache lines from each other. Until then sums wait in fours of tokens, side by
side, so that 16 bytes are read here and there and not 4. With eights it took as long, with few tokens up to a tenth
longer. To put them here and there already and read them in order then, or to put those of a tile while the next one
is multiplied, is slower: what that reads and writes pushes x out of the first level (Zen 5).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import njit

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget
from sparse_kernels.cpu.codegen.prefetch import LINE_BYTES, fetch_now
from sparse_kernels.cpu.codegen.register_tiles import AHEAD, FINISHED, FOURS, ROWS, token_tile, tokens_to_lanes
from sparse_kernels.cpu.codegen.scatter_rows import put_rows
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PARTIAL
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.panels import Panels
from sparse_kernels.cpu.layouts.vector_grid import CACHED
from sparse_kernels.cpu.runtime.work_split import share

# Elements in the first-level data cache: 48 KB, as Intel's have had it since Ice Lake.
FIRST_LEVEL = 12_288

# Tokens of a thread from which on it has chunks of its own also where rows are in order.
OWN_TOKENS = 32

# Elements of weights that are one block where each thread reads them all: 512 KB.
ONE_BLOCK = 2**17

# Tokens up to which tiles fetch the weights of the next block.
COMING = 256

# Tiles of tokens from which on few columns are worth cutting into stages.
TILES_IN_STAGES = 8

# Few tokens are laid out side by side from rows of x so long on, where an output has no larger share of the columns.
LONG_ROW, THIN = 1024, 0.18

# Elements from which on threads share the work of putting rows in their places.
WORTH_SHARING = 8_192


def tile(height: int, target: CpuTarget) -> tuple[int, int, int] | None:
    """(tokens, vectors, lanes) of the register tile for groups of `height` rows; None where none fits.

    A vector must be filled by rows of one group.
    """
    tokens = 8 if target.registers >= 32 else 4
    for vectors in (2, 1):
        if height % (vectors * target.lanes) == 0:
            return tokens, vectors, target.lanes
    return None


def stages(tokens: int, k: int, density: float, n: int, target: CpuTarget) -> int:
    """In how many stages of columns tiles of so many rows of x, of k elements each, are best multiplied, of n rows.

    Each panel reads the whole x of a tile. Where that does not fit the first-level cache, Intel's second level slows
    it down. A stage fills half of the first: at 75% sparsity 5% to 10% less time than in one stage, or than in blocks
    with tokens along the vector, at 90% 15% to 25% (2048 and 3072 columns, 128 tokens).

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


def order(tokens: int, k: int, n: int, weights: Panels, parts: int, own: bool, permuted: bool) -> tuple[int, int]:
    """(tokens of a chunk, in whole tiles of `tokens`; panels of a block), for n rows of k elements.

    Chunks are as many for each of the `parts` threads, because pairs of a chunk and a panel count alike, also those
    of a last chunk with fewer tokens. Threads have chunks of their `own`, or one that fits is shared by panels. In
    stages they have their own: only a stage has to stay in a second-level cache, beside as many panels as fit.

    Few weights are one block where threads have tokens of their own, and rows are permuted, whose sums stay near then
    (at 90% sparsity 2% to 10% less time, Zen 5), or tokens are so many that no other block is fetched (1% to 3%).
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


def own_chunks(n: int, threads: int, permuted: bool, target: CpuTarget) -> bool:
    """Whether threads do better with tokens of their own than with panels.

    Permuted rows they put in their places out of their own caches. Others come out evenly then: 64 and 128 tokens at
    1.0 to 1.1 times the speed (AMD). With 16 and 32 it is 0.75 to 1.0 times: each thread has to read all weights.
    """
    return permuted or (not target.shared and n >= OWN_TOKENS * threads)


class Fetching(NamedTuple):
    """How tiles fetch weights: how far `ahead`, in floats, 0 for not at all; to the first level (`close`) or the
    second; whether those of the next block, too, which are `coming`; whether ahead only `once`, with the first tile
    of tokens that passes over a block, and only with the others what is coming.
    """

    ahead: int
    close: bool
    coming: bool
    once: bool


def fetched(n: int, tokens: int, target: CpuTarget) -> Fetching:
    """How weights are fetched for n tokens, `tokens` at a time.

    A tile reads whole cache lines of them for each column. Where they are passed over often they lie in the second
    level, which Intel's units wait for: with the first level 3% to 9% less time for 128 tokens. Where they come from
    memory, or where x of few tokens needs the first level for itself, it takes 2% to 6% longer (8 and 32 tokens).

    One or two tokens AMD's units compute so fast that they read ahead themselves as far as memory gives: fetching
    takes a tenth longer then. Where tokens are many, the first tile of a block waits for memory and the others have
    nothing to fetch, unless it is the next block: up to 1.1 times the speed for 64 and 128 tokens. Of far more
    tokens that is a small part, and it is 0.95 to 1.0 times.

    Vectors of 512 bits at once feel it where the others fetch what is there: 1.01 to 1.1 times the speed for 32 to
    2,048 tokens if only the first does, where weights are warm and where they are not (Zen 5).
    """
    if target.shared:
        return Fetching(AHEAD, n >= 8 * tokens, coming=False, once=False)
    coming, ahead = tokens < n <= COMING, AHEAD if n > 2 else 0
    return Fetching(ahead, close=target.whole, coming=coming, once=target.whole and n > tokens)


@njit(inline="always")
def upcoming(first, stop, stage, stages, panels, item, end, block):  # type: ignore[no-untyped-def]
    """The rows of the table, from one to before another, that a part multiplies after panels `first` to `stop`."""
    if stage + 1 < stages:
        return first + (stage + 1) * panels, stop + (stage + 1) * panels
    if item == end:
        return first, first
    begin = item % panels
    return begin, min(begin + block, panels, begin + end - item)


def side_by_side(n: int, tokens: int, k: int, density: float, target: CpuTarget) -> bool:
    """Whether n rows of k elements of x are laid out first, (k, tokens), where so many of them count for an output.

    As x lies, a column is a cache line for each token, most of which hold no other column that is kept; in long rows
    they push each other out of the first level. 1.05 to 1.4 times the speed for 8 tokens of 1024 to 3072 elements at
    90% sparsity, 0.95 to 1.04 times at 75% (AMD); for 16 tokens, in two tiles, 0.85 to 1.2 times.
    """
    one = tokens == 8 and tokens < 2 * n <= 2 * tokens
    return one and not target.shared and k >= LONG_ROW and density < THIN


def in_fours(tokens: int) -> bool:
    """Whether sums of tiles of so many tokens, whose rows are permuted, wait in fours of them."""
    return tokens % 4 == 0


@cache
def kernel(
    tokens: int,
    vectors: int,
    lanes: int,
    fused: bool,
    permuted: bool,
    size: int,
    fetching: Fetching,
    laid: bool,
    whole: bool,
) -> ParallelKernel:
    """The compiled loops for one tile size; `permuted` rows are put in their places; weights of `size` bytes.

    fetching: how weights are fetched, as `fetched` says it. laid: x is laid out `side_by_side`. whole: each part has
    whole chunks, so it puts permuted rows in their places itself, tile by tile, while it finds them in its caches.

    Called with (panels.arrays, addresses of x (n, k) and y (n, m), n, k, m, address of bias (m), activation code,
    tokens of a chunk, panels of a block, parts, places, address of room, shares, elements of it that sums take).
    Where permuted, the sums of all panels wait there, for n tokens in whole tiles or, where whole, a chunk of each
    part; places are where rows of y wait among the panels' rows, or `in_fours`; and unless whole, in so many shares
    they are finished and put in their places. Else places and shares are not looked at. Where laid, there is room
    behind them for a chunk of x for each part.
    """
    fuse, beside, unfinished = int(fused), int(laid), PARTIAL
    ahead, near, busy, once = (int(each) for each in fetching)
    form = (FOURS if in_fours(tokens) else ROWS) if permuted else FINISHED
    width = vectors * lanes
    per_column = max(1, width * size // LINE_BYTES)  # cache lines
    together = 4 if form == FOURS else 1  # tokens that wait side by side

    def multiply(  # type: ignore[no-untyped-def]
        part, weights, x_at, y_at, n, k, m, bias_at, activation, chunk, block, parts, places, room_at,
        shares, waiting,
    ):  # fmt: skip
        table, values, columns, work, _ = weights
        panels = work.size - 1
        sums_at, features = (room_at, panels * width) if permuted else (y_at, m)
        stages = table.shape[0] // panels
        chunks = (n + chunk - 1) // chunk
        values_at, columns_at = values.ctypes.data, columns.ctypes.data
        # What a part looks up comes from memory as the weights do, and each tells only where the next one lies: one
        # token takes 0.9 to 1.0 times as long so, together with panels in one piece (Zen 5).
        fetch_now(work.ctypes.data, work.size * 8)
        fetch_now(table.ctypes.data, table.size * 8)
        if permuted:
            fetch_now(places.ctypes.data, m * 4)
        item, end = share(work, chunks, part, parts), share(work, chunks, part + 1, parts)
        x_here, laid_chunk = room_at + (waiting + part * chunk * k) * 4, -1
        # Where a tile of tokens meets all panels one after the other, the sums of the next one take the same room.
        alone = whole and stages == 1 and block >= panels
        if whole:
            sums_at += part * chunk * features * 4
        while item < end:
            # As many panels of this part as lie in one chunk and in one block.
            chunk_begin = item // panels * chunk
            first = item % panels
            stop = min(first + block, panels, first + end - item)
            item += stop - first
            chunk_end = min(chunk_begin + chunk, n)
            if laid and chunk_begin != laid_chunk:
                laid_chunk = chunk_begin
                for token in range(chunk_begin, chunk_end, tokens):
                    there = x_here + (token - chunk_begin) * k * 4
                    tokens_to_lanes(tokens, FLOATS, x_at + token * k * 4, k, n - token, k, there, tokens)
            for stage in range(stages):
                # Tiles fetch the weights of the next block, but for those that fetch ahead `once`: every so many of
                # them a line of each column of a panel.
                begin, behind = upcoming(first, stop, stage, stages, panels, item, end, block)
                turns = (stop - first) * ((chunk_end - chunk_begin - 1) // tokens + 1 - once)
                lines, asked, due = (behind - begin) * per_column, 0, 0
                for token in range(chunk_begin, chunk_end, tokens):
                    sums_here = sums_at + (0 if alone else token - chunk_begin if whole else token) * features * 4
                    for panel in range(first, stop):
                        row, here, elsewhere = panel * width, stage * panels + panel, 0
                        cold = int(token == chunk_begin)
                        if busy and not (once and cold):
                            due += lines
                            if due >= turns:
                                there = table[begin + asked // per_column, 0]
                                elsewhere = (there - table[here, 0]) * size + asked % per_column * LINE_BYTES
                                asked, due = asked + 1, due - turns
                        token_tile(
                            tokens,
                            vectors,
                            lanes,
                            fuse,
                            size,
                            ahead,
                            near,
                            form,
                            busy,
                            once,
                            beside,
                            values_at + table[here, 0] * size,
                            columns_at + table[here, 1] * 4,
                            table[here, 2],
                            x_here + (token - chunk_begin) * k * 4 if laid else x_at + token * k * 4,
                            k,
                            n - token,
                            sums_here + row * together * 4,
                            features,
                            features - row,
                            min(stage, 1),
                            bias_at + row * 4,
                            activation if stage == stages - 1 else unfinished,
                            elsewhere,
                            cold,
                        )
                    if whole and stop == panels and stage == stages - 1:
                        for t in range(0, min(tokens, n - token), together):
                            put_rows(
                                together, lanes, fuse, sums_here + t * features * 4, places.ctypes.data, m,
                                n - token - t, y_at + (token + t) * m * 4, m, bias_at, activation,
                            )  # fmt: skip

    def put(  # type: ignore[no-untyped-def]
        share, weights, x_at, y_at, n, k, m, bias_at, activation, chunk, block, parts, places, room_at, shares,
        waiting,
    ):  # fmt: skip
        # A share of the rows that are waiting goes to its places in y: whole chunks, which a thread finds in its
        # own caches, where there are enough for all; else tokens, whose lines of y no other writes; else some rows.
        features = (weights[3].size - 1) * width
        grain = chunk if (n + chunk - 1) // chunk >= shares else together
        units = (n + grain - 1) // grain
        first, last, begin, end = 0, n, 0, m
        if units >= shares:
            first, last = units * share // shares * grain, min(n, units * (share + 1) // shares * grain)
        else:
            begin, end = m * share // shares, m * (share + 1) // shares
        places_at, here_at = places.ctypes.data + begin * 4, bias_at + begin * 4
        for token in range(first, last, together):
            sums_at, target_at = room_at + token * features * 4, y_at + (token * m + begin) * 4
            put_rows(
                together, lanes, fuse,
                sums_at, places_at, end - begin, n - token, target_at, m, here_at, activation,
            )  # fmt: skip

    return in_parts(multiply, put) if permuted and not whole else in_parts(multiply)
