"""2:4 products on Hopper: nm_sm90.cu.

The columns are cut into stages of 128, of which 64 are kept; rows and columns are filled up with zeros.
weights  uint16 (stages, 72 * rows): for every group of rows and stage, first 64 kept weights a row as swizzled
         lines, then the metadata, uint32 (rows / 16, 8, 2, 4). Word (b, g, h, s) serves step s, columns 32s + 16h to
         32s + 16h + 15 of the stage: 4 bits for every 4 columns, row 16b + g in the lower half, row 16b + g + 8 in
         the upper. The 4 bits are the places of the two kept weights, the first one in the lower 2 bits.

Source: PTX ISA, "Sparse matrix storage" and "Matrix fragments for wgmma.mma_async.m64nNk32".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import sm90
from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.cuda.vector_tiles import convert_to_bits
from sparse_kernels.formats import NMWeight, Packed
from sparse_kernels.patterns import NM

HEIGHTS = (256, 128)
WIDTH = 128
STAGE = 128
"""Columns of the weight that a stage covers: twice those it stores."""

FOURS = STAGE // 4


def build_hopper_kernel(height: int) -> sm90.HopperKernel:
    """Return the kernel with tiles of `height` rows."""
    return sm90.HopperKernel(
        source="nm_sm90.cu",
        function="nm_sm90",
        defines={"ROWS": height, "BN": WIDTH},
        rows=height,
        width=WIDTH,
        x_rows=STAGE,
        weight_bytes=height * (sm90.STAGE_COLUMNS * 2 + FOURS // 2),
        products=height * WIDTH * sm90.STAGE_COLUMNS,
        instruction="HGMMA.SP",
    )


VARIANTS = list(sm90.list_kernel_variants([build_hopper_kernel(height) for height in HEIGHTS]))


def build_program(
    packed: Packed,
    dtype: str,
    architecture: str,
    n: int,
    multiprocessors: int | None = None,
    height: int | None = None,
) -> sm90.HopperProgram:
    """Return the weight packed for Hopper.

    height: of the tiles; by default the one that is expected to be faster for n columns.

    NotSupported for other formats and machines.
    """
    sm90.check_target(dtype, architecture)
    if not isinstance(packed, NMWeight) or packed.pattern != NM(2, 4):
        raise NotSupported(f"this kernel multiplies 2:4 weights, not {packed.pattern}")
    count = multiprocessors or TARGETS[architecture].multiprocessors
    height = height or min(HEIGHTS, key=lambda height: predict_clocks(packed.shape, height, max(n, 1), count))
    k = packed.shape[1]
    row_ids = np.full(-(-packed.shape[0] // height) * height, -1, np.int32)
    row_ids[: packed.shape[0]] = np.arange(packed.shape[0])
    own = (pack(packed, height, dtype), np.int32(k))
    counts = count_stages(packed.shape, height)
    return sm90.HopperProgram((build_hopper_kernel(height),), dtype, own, counts, row_ids, count)


def count_stages(shape: tuple[int, int], height: int) -> NDArray[np.int64]:
    """Return the stages of each group of `height` rows of a weight (m, k)."""
    return np.full(-(-shape[0] // height), -(-shape[1] // STAGE), np.int64)


def predict_clocks(shape: tuple[int, int], height: int, n: int, multiprocessors: int) -> float:
    """Return what tiles of this height are expected to take, times n columns."""
    counts = count_stages(shape, height)
    splits = sm90.choose_splits(build_hopper_kernel(height), counts, n, multiprocessors)
    return sm90.predict_clocks(build_hopper_kernel(height), counts, splits, n, multiprocessors)


def pack(packed: NMWeight, height: int, dtype: str) -> NDArray[np.uint16]:
    """Return the array `weights` of the module's docstring, with `height` rows a group."""
    values, places = select_pairs(packed)
    m, fours, _ = values.shape
    groups, stages = -(-m // height), -(-fours // FOURS)
    all_values = np.zeros((groups * height, stages * FOURS, 2), np.float32)
    all_values[:m, :fours] = values
    all_places = np.full((groups * height, stages * FOURS), 0b0100, np.uint32)  # places 0 and 1
    all_places[:m, :fours] = places
    lines = convert_to_bits(all_values, dtype).reshape(groups, height, stages, sm90.STAGE_COLUMNS).swapaxes(1, 2)
    lines = sm90.swizzle(np.ascontiguousarray(lines).reshape(groups * stages, height, sm90.STAGE_COLUMNS))
    words = pack_metadata(all_places.reshape(groups, height, stages, FOURS).swapaxes(1, 2))
    halves = words.reshape(groups * stages, -1).view(np.uint16)
    return np.concatenate([lines.reshape(groups * stages, -1), halves], axis=1)


def select_pairs(packed: NMWeight) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Return kept weights (m, fours, 2) and their places (m, fours), 4 bits.

    The hardware needs two places, different and rising. Where a group of 4 keeps fewer, a weight of 0 takes a free
    place: the one after the kept one, or before it where that is the last.
    """
    values, offsets = packed.values.copy(), packed.offsets.astype(np.uint32)
    single = offsets[:, :, 0] == offsets[:, :, 1]
    last = single & (offsets[:, :, 0] == 3)
    offsets[:, :, 1] += single & ~last
    offsets[:, :, 0] -= last
    values[last] = values[last][:, ::-1]
    return values, offsets[:, :, 0] | offsets[:, :, 1] << np.uint32(2)


def pack_metadata(places: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the words of the module's docstring, (..., rows / 16, 8, 2, 4), of the places (..., rows, 32)."""
    *others, rows, _ = places.shape
    shifts = np.arange(0, 16, 4, dtype=np.uint32)
    halves = (places.reshape(*others, rows, 4, 2, 4) << shifts).sum(axis=-1, dtype=np.uint32)
    blocks = halves.reshape(*others, rows // 16, 2, 8, 4, 2)  # 16 rows; half, g; step, h
    words = blocks[..., 0, :, :, :] | blocks[..., 1, :, :, :] << np.uint32(16)
    return np.ascontiguousarray(words.swapaxes(-1, -2))
