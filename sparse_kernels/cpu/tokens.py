"""Linear layers on token-major activations: x (n, k) -> y (n, m), outputs along the vector, no repacking of x.

A panel of w is as wide as one or two vectors of outputs; its columns are read for 8 tokens at a time. Order of the
loops: chunks of tokens, blocks of panels, stages of columns, tiles of tokens, panels of the block. The x of a chunk
and the weights of a block stay in the second-level cache; between two panels a tile's x stays in the first-level
cache. It is to fit there: long rows are multiplied in stages, and y holds the sums of those before. Threads share
(chunk, panel) pairs by cost.

Permuted rows (Shfl-BW) are first computed in the order in which they are packed, and go to their places when all are
done: threads that wrote here and there in the same rows of y would take its cache lines from each other.
"""

from __future__ import annotations

from functools import cache

from numba import carray

from sparse_kernels.cpu.emitter import PARTIAL
from sparse_kernels.cpu.micro import AHEAD, copy_picked, floats_at, token_tile
from sparse_kernels.cpu.panels import Panels
from sparse_kernels.cpu.parts import Kernel, in_parts
from sparse_kernels.cpu.split import share
from sparse_kernels.cpu.target import Target
from sparse_kernels.cpu.vectors import CACHED

# Elements in the first-level data cache: 48 KB, as Intel's have had it since Ice Lake.
FIRST_LEVEL = 12_288

# Elements from which on threads share the work of putting rows in their places.
WORTH_SHARING = 8_192


def tile(height: int, target: Target) -> tuple[int, int, int] | None:
    """(tokens, vectors, lanes) of the register tile for groups of `height` rows; None where none fits.

    A vector must be filled by rows of one group.
    """
    tokens = 8 if target.registers >= 32 else 4
    for vectors in (2, 1):
        if height % (vectors * target.lanes) == 0:
            return tokens, vectors, target.lanes
    return None


def stages(tokens: int, k: int, target: Target) -> int:
    """In how many stages of columns tiles of so many rows of x, of k elements each, are best multiplied.

    Each panel reads the whole x of a tile. Where that does not fit the first-level cache, Intel's second level slows
    it down. A stage fills half of the first: at 75% sparsity 5% to 10% less time than in one stage, or than in blocks
    with tokens along the vector, at 90% 15% to 25% (2048 and 3072 columns, 128 tokens).
    """
    if not target.shared or tokens * k <= FIRST_LEVEL:
        return 1
    return -(-tokens * k // (FIRST_LEVEL // 2))


def order(tokens: int, k: int, n: int, weights: Panels, parts: int, permuted: bool) -> tuple[int, int]:
    """(tokens of a chunk, in whole tiles of `tokens`; panels of a block), for n rows of k elements.

    Chunks are as many for each of the `parts` threads, because pairs of a chunk and a panel count alike, also those
    of a last chunk with fewer tokens. One chunk that fits is shared by panels. In stages each thread has tokens of
    its own, of which only a stage has to stay in its second-level cache, beside the weights of as many panels as fit.
    So it is where rows are permuted: a thread finds in its own caches what it puts in their places.
    """
    panel = max(1, weights.values.size // len(weights.table))
    most = max(1, CACHED * weights.stages // (k * tokens))
    tiles = -(-n // tokens)
    own = weights.stages > 1 or permuted
    chunks = -(-tiles // most)
    if own or chunks > 1:
        chunks = min(-(-chunks // parts) * parts, tiles)
    return -(-tiles // chunks) * tokens, max(1, (3 * CACHED if own else CACHED // 2) // panel)


def fetched(n: int, tokens: int, target: Target) -> tuple[int, bool]:
    """How far ahead weights are fetched for n tokens, `tokens` at a time, in floats, and whether to the first level.

    A tile reads whole cache lines of them for each column. Where they are passed over often they lie in the second
    level, which Intel's units wait for: with the first level 3% to 9% less time for 128 tokens. Where they come from
    memory, or where x of few tokens needs the first level for itself, it takes 2% to 6% longer (8 and 32 tokens).

    One or two tokens AMD's units compute so fast that they read ahead themselves as far as memory gives: fetching
    takes a tenth longer then.
    """
    if target.shared:
        return AHEAD, n >= 8 * tokens
    return (AHEAD if n > 2 else 0), False


@cache
def kernel(
    tokens: int,
    vectors: int,
    lanes: int,
    fused: bool,
    permuted: bool,
    size: int = 4,
    ahead: int = AHEAD,
    close: bool = False,
) -> Kernel:
    """The compiled loops for one tile size; `permuted` rows are put in their places; weights of `size` bytes.

    ahead, close: how weights are fetched, as `fetched` says it.

    Called with (panels.arrays, addresses of x (n, k) and y (n, m), n, k, m, address of bias (m), activation code,
    tokens of a chunk, panels of a block, parts, places, address of waiting, shares). Where permuted, places are those
    of the panels, and waiting is room for rows of all panels: n of sums, which are put in their places in so many
    shares, and one of bias for each part. Else these three are not looked at.
    """
    fuse, near, unfinished = int(fused), int(close), PARTIAL
    width = vectors * lanes

    def multiply(  # type: ignore[no-untyped-def]
        part, weights, x_at, y_at, n, k, m, bias_at, activation, chunk, block, parts, places, waiting_at,
        shares,
    ):  # fmt: skip
        table, values, columns, work, row_ids = weights
        panels = work.size - 1
        sums_at, features = (waiting_at, panels * width) if permuted else (y_at, m)
        stages = table.shape[0] // panels
        chunks = (n + chunk - 1) // chunk
        values_at, columns_at = values.ctypes.data, columns.ctypes.data
        item, end = share(work, chunks, part, parts), share(work, chunks, part + 1, parts)
        biases_at = bias_at
        if permuted:
            biases_at = sums_at + (n + part) * features * 4
            bias, sorted_bias = carray(floats_at(bias_at), m), carray(floats_at(biases_at), features)
            # Of the panels from the first to the last one, if they are in the same chunk; else of all.
            first, stop = 0, panels
            if item // panels == (end - 1) // panels:
                first, stop = item % panels, (end - 1) % panels + 1
            for row in range(first * width, stop * width):
                sorted_bias[row] = bias[max(row_ids[row], 0)]
        while item < end:
            # As many panels of this part as lie in one chunk and in one block.
            chunk_begin = item // panels * chunk
            first = item % panels
            stop = min(first + block, panels, first + end - item)
            item += stop - first
            for stage in range(stages):
                for token in range(chunk_begin, min(chunk_begin + chunk, n), tokens):
                    for panel in range(first, stop):
                        row, here = panel * width, stage * panels + panel
                        token_tile(
                            tokens,
                            vectors,
                            lanes,
                            fuse,
                            size,
                            ahead,
                            near,
                            values_at + table[here, 0] * size,
                            columns_at + table[here, 1] * 4,
                            table[here, 2],
                            x_at + token * k * 4,
                            k,
                            n - token,
                            sums_at + (token * features + row) * 4,
                            features,
                            features - row,
                            min(stage, 1),
                            biases_at + row * 4,
                            activation if stage == stages - 1 else unfinished,
                        )

    def put(  # type: ignore[no-untyped-def]
        share, weights, x_at, y_at, n, k, m, bias_at, activation, chunk, block, parts, places, waiting_at, shares
    ):  # fmt: skip
        # A share of the rows that are waiting goes to its places in y: whole chunks, which a thread finds in its
        # own caches, where there are enough for all; else tokens, whose lines of y no other writes; else some rows.
        features = weights[4].size
        grain = chunk if (n + chunk - 1) // chunk >= shares else 1
        units = (n + grain - 1) // grain
        first, last, begin, end = 0, n, 0, m
        if units >= shares:
            first, last = units * share // shares * grain, min(n, units * (share + 1) // shares * grain)
        else:
            begin, end = m * share // shares, m * (share + 1) // shares
        # Rows from 0 on, or whether they are negative would be asked.
        count, here, here_at = end - begin, places[begin:end], places.ctypes.data + begin * 4
        whole = count // lanes * lanes
        for token in range(first, last):
            source_at = waiting_at + token * features * 4
            target_at = y_at + (token * m + begin) * 4
            for row in range(0, whole, lanes):
                copy_picked(lanes, source_at, here_at + row * 4, target_at + row * 4)
            source, target = carray(floats_at(source_at), features), carray(floats_at(target_at), count)
            for row in range(whole, count):
                target[row] = source[here[row]]

    return in_parts(multiply, put) if permuted else in_parts(multiply)
