"""Bugs to plant in the kernels for Hopper: what each breaks, and the edit. The emulator must catch every one."""

from __future__ import annotations

import functools

import numpy as np
from mutations import Case, Mutation
from sm90_cases import case_of, packed_of
from vector_cases import drawn

from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, VectorWise


@functools.cache
def vector_128() -> Case:
    """Two tiles a block, each with more stages than the ring holds; a part of the rows and columns is missing."""
    rng = np.random.default_rng(1)
    return case_of(rng, packed_of(rng, VectorWise(128), 100, 400, sparsity=0.1), 264, width=256, blocks=1)


@functools.cache
def vector_64() -> Case:
    """Groups of unequal work, one of them without any, and the last one short of rows."""
    rng = np.random.default_rng(2)
    mask = np.repeat(np.arange(600) < np.array([[30], [600], [0], [70]]), 64, axis=0)[:250]
    packed = pack(drawn(rng, mask.shape, "float16"), mask, VectorWise(64))
    return case_of(rng, packed, 136, width=128, activation="relu", blocks=1)


@functools.cache
def vector_rounds() -> Case:
    """Two blocks with several tiles each: every other round is backwards."""
    rng = np.random.default_rng(7)
    return case_of(rng, packed_of(rng, VectorWise(64), 130, 100), 264, blocks=2)


@functools.cache
def vector_unaligned() -> Case:
    """Copies element by element, of all rows of x: the last one ends where x does."""
    rng = np.random.default_rng(3)
    return case_of(rng, packed_of(rng, VectorWise(64), 70, 104, sparsity=0, dtype="bfloat16"), 37, dtype="bfloat16")


@functools.cache
def vector_split() -> Case:
    """Partial sums and their addition."""
    rng = np.random.default_rng(4)
    return case_of(rng, packed_of(rng, VectorWise(64), 100, 300, sparsity=0.2), 40, splits=3, activation="relu")


@functools.cache
def nm() -> Case:
    """Several tiles a block, more stages than the ring holds, and a part of the last one missing."""
    rng = np.random.default_rng(5)
    return case_of(rng, packed_of(rng, NM(2, 4), 200, 650), 136, blocks=1)


@functools.cache
def nm_split() -> Case:
    """Blocks that begin in the middle of x."""
    rng = np.random.default_rng(6)
    return case_of(rng, packed_of(rng, NM(2, 4), 100, 400), 40, splits=2)


VECTOR = {
    "producer waits for the wrong parity": ("empty[at.slot], at.parity ^ 1)", "empty[at.slot], at.parity)"),
    "producer does not wait for a slot to be read": ("mbarrier_wait(&barriers.empty[at.slot], at.parity ^ 1);", ""),
    "consumer does not wait for a slot to be filled": ("wait_full(&barriers.full[at.slot], at.parity);", ""),
    "a slot is given back while it is read": (
        "if (read >= 0) release(&barriers.empty[read]);\n        read = at.slot;",
        "release(&barriers.empty[at.slot]);\n        read = -1;",
    ),
    "half of the weight's bytes are expected": (
        "expect(&barriers.full[at.slot], WEIGHT_BYTES);",
        "expect(&barriers.full[at.slot], WEIGHT_BYTES / 2);",
    ),
    "the sums are stored before they are finished": ("wgmma_wait<0>();", ""),
    "weights of the first 16 columns for all": ("a + step * 32 / 16", "a"),
    "a step is a row of x too long": ("step * 16 * 128 / 16", "step * 17 * 128 / 16"),
    "blocks of columns are thought closer": (
        "column / 64 * BLOCK_BYTES, BLOCK_BYTES)",
        "column / 64 * BLOCK_BYTES, BLOCK_BYTES / 2)",
    ),
    "row names of the neighbouring warp": (
        "columns + (threadIdx.x & 127) / 32 *",
        "columns + ((threadIdx.x & 127) / 32 ^ 1) *",
    ),
    "weights of the next stage": ("static_cast<u64>(stage) *", "static_cast<u64>(stage ^ 1) *"),
    "the ring starts afresh for every tile": (
        "      int read = -1;  // the slot",
        "      at = {};\n      int read = -1;  // the slot",
    ),
}

GROUPS = {
    "every tile starts with the first names": ("names[tile.first * BK] : -1", "names[0] : -1"),
}

SHARED = {
    "the first round is left out": ("return round * blocks +", "return (round + 1) * blocks +"),
    "x is not swizzled": ("BLOCK_BYTES + swizzled(line, chunk % 8)", "BLOCK_BYTES + line * 128 + chunk % 8 * 16"),
    "all lines of a warp are swizzled alike": ("(part.byte ^ (step % 8 << 4))", "part.byte"),
    "half the producer's threads are not waited for": ("WARPGROUP + 1);", "WARPGROUP / 2 + 1);"),
    "one consumer's reading is not waited for": (
        "&barriers.empty[slot], CONSUMER_WARPS)",
        "&barriers.empty[slot], CONSUMER_WARPS / 2)",
    ),
    "a slot is only given back by the first warp": ("(threadIdx.x & 31) == 0", "(threadIdx.x & 127) == 0"),
    "parity never changes": ("at.parity ^= 1;", ""),
    "x is read past its last column": ("exists ? part.left : 0", "exists ? 8 : 0"),
    "x is read for places without a row": ("exists ? part.left : 0", "part.left"),
    "the result is written past its last column": ("if (valid > 0) *", "*"),
    "rows that do not exist are written": ("if (row >= 0) store_chunk", "store_chunk"),
    "lanes do not exchange columns": ("      transpose_quad(words);\n", ""),
    "lower rows are the upper ones": ("lane / 4 + half * 8];", "lane / 4];"),
    "bias of the packed row": ("bias[rows.id[half]] : 0.0f;", "bias[warp] : 0.0f;"),
    "the result is not activated": ("activate(values, activation);", ""),
    "lower rows hold the upper sums": ("sums[i] = sums[i + 2];", ""),
}

ROUNDS = {
    "a backward round has one block's tile twice": ("blocks - 1 - block : block)", "0 : block)"),
    "every other round is left out": ("round * blocks +", "2 * round * blocks +"),
}

UNALIGNED = {
    "an element is written past the last column": ("if (valid > i) out", "if (valid > i - 1) out"),
}

SPLIT = {
    "a split's stages are also the next one's": (
        "count * (split + 1) / schedule.splits",
        "count * (split + 2) / schedule.splits",
    ),
    "all splits write one slice": ("static_cast<u64>(tile.split) * schedule", "static_cast<u64>(0) * schedule"),
}

NM_OWN = {
    "metadata of the other half of the columns": ("lane / 4 * 2 + lane % 2", "lane / 4 * 2 + (lane + 1) % 2"),
    "metadata of the rows above": ("words + rows_16 * 256", "words + (rows_16 ^ 1) * 256"),
    "metadata of the first step for all": ("metadata[part][step])", "metadata[part][0])"),
    "as many bytes as the weights alone are expected": (
        "expect(&barriers.full[at.slot], WEIGHT_BYTES);",
        "expect(&barriers.full[at.slot], ROWS * 128);",
    ),
    "x is read past its last row": ("step < rows_left", "true"),
    "a step is 16 rows of x": ("step * 32 * 128 / 16", "step * 16 * 128 / 16"),
    "rows of x of the next stage": ("(stage - tile.start) * BK", "(stage - tile.start + 1) * BK"),
    "producer does not wait for a slot to be read": ("mbarrier_wait(&barriers.empty[at.slot], at.parity ^ 1);", ""),
}

NM_SPLIT = {
    "every split starts with the first rows of x": ("(stage - tile.start) * BK", "(stage - tile.first) * BK"),
}

MUTATIONS = [
    *(Mutation(bug, vector_128, edit) for bug, edit in VECTOR.items()),
    *(Mutation(bug, vector_64, edit) for bug, edit in GROUPS.items()),
    *(Mutation(bug, vector_64, edit) for bug, edit in SHARED.items()),
    *(Mutation(bug, vector_rounds, edit) for bug, edit in ROUNDS.items()),
    *(Mutation(bug, vector_unaligned, edit) for bug, edit in UNALIGNED.items()),
    *(Mutation(bug, vector_split, edit) for bug, edit in SPLIT.items()),
    *(Mutation(bug, nm, edit) for bug, edit in NM_OWN.items()),
    *(Mutation(bug, nm_split, edit) for bug, edit in NM_SPLIT.items()),
]
