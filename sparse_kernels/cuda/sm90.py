"""What the kernels for Hopper share on the host: the shared-memory image of a weight, the schedule, the launches.

The other side is sm90.cuh. A weight is cut into groups of `rows` packed rows and each group into stages of 64 stored
columns. The image of a stage is what the kernel's tensor cores read. So one bulk copy of it is all that the device
does to a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import DTYPES, Argument, Launch, NotSupported, Operand, Variant, parse_activation
from sparse_kernels.cuda.targets import TARGETS

ARCHITECTURE = "sm_90a"
THREADS = 384
STAGE_COLUMNS = 64  # stored columns of a stage: a line of the 128-byte swizzle
FINISH_COLUMNS = 256  # columns of the result a block of finish_sm90 writes

RING_BYTES = TARGETS[ARCHITECTURE].block_shared_bytes - 1024
"""Dynamic shared memory: 226 KiB. The barriers take 1 KiB, as the ring starts aligned."""

MOST_STAGES = 8
MOST_SPLITS = 16

# What a launch costs, in clocks of a multiprocessor, fitted to an H200 (TUNING.md).
PRODUCTS_A_CLOCK = 1680  # multiplications of 16-bit numbers by the tensor cores: 82% of their peak
STAGE_CLOCKS, STAGE_BYTES_A_CLOCK = 400, 82  # copies of a stage: clocks for each stage, and bytes a clock
TILE_CLOCKS, RESULTS_A_CLOCK = 800, 7  # filling the ring, and writing the result
FINISH_CLOCKS = 7500  # a second launch
SUM_BYTES_A_CLOCK = 25  # of unfinished sums, to and from the second-level cache


@dataclass(frozen=True, eq=False)
class HopperKernel:
    """One kernel with one tile size, before element type and alignment are chosen.

    `rows` and `width` are the tile of the result. A stage holds `x_rows` rows of x and `weight_bytes` of the weight,
    and is `products` multiplications of the tensor cores.
    """

    source: str
    function: str
    defines: Mapping[str, int]
    rows: int
    width: int
    x_rows: int
    weight_bytes: int
    products: int
    instruction: str

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.weight_bytes + self.x_rows * self.width * 2

    @property
    def stages(self) -> int:
        """How many stages the ring holds."""
        return min(MOST_STAGES, RING_BYTES // self.stage_bytes)

    @property
    def stage_clocks(self) -> float:
        """What a stage takes, bound by the tensor cores or by the way to shared memory."""
        return max(self.products / PRODUCTS_A_CLOCK, STAGE_CLOCKS + self.stage_bytes / STAGE_BYTES_A_CLOCK)

    @property
    def tile_clocks(self) -> float:
        """What a tile takes beside its stages."""
        return TILE_CLOCKS + self.rows * self.width / RESULTS_A_CLOCK

    def variant(self, dtype: str, align: int) -> Variant:
        """Return the kernel as it is compiled."""
        settings = {
            **self.defines,
            "STAGES": self.stages,
            "ALIGN": align,
            "BF16": DTYPES.index(dtype),
        }
        return Variant(self.source, self.function, settings, (ARCHITECTURE,), self.instruction)


def build_finish_variant(dtype: str) -> Variant:
    """Return what adds up the sums of a split product."""
    return Variant("finish_sm90.cu", "finish_sm90", {"BF16": DTYPES.index(dtype)}, (ARCHITECTURE,))


def list_kernel_variants(kernels: list[HopperKernel]) -> Iterator[Variant]:
    """Yield all that launches may ask for."""
    for kernel in kernels:
        for dtype in DTYPES:
            for align in (16, 8, 2):
                yield kernel.variant(dtype, align)
    for dtype in DTYPES:
        yield build_finish_variant(dtype)


def swizzle(lines: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return lines (stages, rows, 64), 16-byte chunks of row i in the order c ^ (i % 8). Twice is as it was."""
    stages, rows, _ = lines.shape
    chunks = lines.reshape(stages, rows, 8, 8)
    source = np.arange(8) ^ (np.arange(rows) % 8)[:, None]
    return np.take_along_axis(chunks, source[None, :, :, None], axis=2).reshape(lines.shape)


def find_alignment(n: int) -> int:
    """Return the alignment of rows of n elements in bytes: one that kernels are compiled for."""
    return 16 if n % 8 == 0 else 8 if n % 4 == 0 else 2


@dataclass(frozen=True, eq=False)
class HopperProgram:
    """A weight packed for one kernel (or the same one with tiles of other widths) and element type.

    `own` are the constants that come first among the kernel's arguments. `counts` int64 (groups): the stages of each
    group; `work` int32 (groups, 4): the groups by falling number of stages, as sm90.cuh's Schedule wants them.
    `row_ids` int32 (groups * rows), -1 for none. `multiprocessors`: of the machine.
    """

    kernels: tuple[HopperKernel, ...]
    dtype: str
    own: tuple[Argument, ...]
    counts: NDArray[np.int64]
    row_ids: NDArray[np.int32]
    multiprocessors: int
    work: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort(-self.counts, kind="stable")
        starts = np.cumsum(self.counts) - self.counts
        columns = (order, starts[order], self.counts[order], np.zeros_like(order))
        object.__setattr__(self, "work", np.stack(columns, axis=1).astype(np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        arrays = (*self.own, self.row_ids, self.work)
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return the product, and where it is split the addition of its parts; empty where n is 0."""
        if n == 0:
            return []
        kernel, splits = self.choose(n)
        return self.launches_of(kernel, splits, n, activation)

    def launches_of(self, kernel: HopperKernel, splits: int, n: int, activation: str | None) -> list[Launch]:
        """Return the launches with one of `kernels` and every group's stages shared out among `splits` blocks."""
        groups = self.counts.size
        tiles = groups * splits * -(-n // kernel.width)
        width = -(-n // kernel.width) * kernel.width
        scratch = splits * self.row_ids.size * width * 4 if splits > 1 else 0
        first = Launch(
            kernel.variant(self.dtype, find_alignment(n)),
            (min(tiles, self.multiprocessors), 1, 1),
            (THREADS, 1, 1),
            kernel.stages * kernel.stage_bytes,
            (
                *self.own,
                *(self.work, self.row_ids),
                *(Operand.X, Operand.BIAS, Operand.OUT, Operand.SCRATCH if splits > 1 else np.uint64(0)),
                *(np.int32(groups), np.int32(splits), np.int32(n), parse_activation(activation)),
            ),
            scratch,
        )
        if splits == 1:
            return [first]
        rows = self.row_ids.size
        second = Launch(
            build_finish_variant(self.dtype),
            (rows, -(-n // FINISH_COLUMNS), 1),
            (FINISH_COLUMNS, 1, 1),
            0,
            (
                *(Operand.SCRATCH, self.row_ids, Operand.BIAS, Operand.OUT),
                *(np.int32(rows), np.int32(splits), np.int32(width), np.int32(n), parse_activation(activation)),
            ),
            scratch,
        )
        return [first, second]

    def choose(self, n: int) -> tuple[HopperKernel, int]:
        """Return the tile and the number of splits with the shortest expected time."""
        splits = {kernel: choose_splits(kernel, self.counts, n, self.multiprocessors) for kernel in self.kernels}
        return min(splits.items(), key=lambda it: predict_clocks(it[0], self.counts, it[1], n, self.multiprocessors))


def choose_splits(kernel: HopperKernel, counts: NDArray[np.int64], n: int, multiprocessors: int) -> int:
    """Return the number of blocks that share a tile's stages, for the shortest expected time."""
    most = max(1, min(MOST_SPLITS, int(counts.max())))
    choices = (2**i for i in range(most.bit_length()))
    best: int = min(choices, key=lambda splits: predict_clocks(kernel, counts, splits, n, multiprocessors))
    return best


def predict_clocks(
    kernel: HopperKernel, counts: NDArray[np.int64], splits: int, n: int, multiprocessors: int
) -> float:
    """Return what groups with so many stages each are expected to take, times n columns, in clocks.

    There is a block for each multiprocessor. Tiles are sorted by falling work and blocks take them in rounds, every
    other one backwards. Left out: what blocks that read the same rows of x save each other, and changes of the clock.
    """
    shares = np.arange(splits + 1)[:, None] * np.sort(counts)[::-1] // splits
    stages = np.sort(np.diff(shares, axis=0).ravel())[::-1]
    columns = -(-n // kernel.width)
    rounds = -(-stages.size * columns // multiprocessors)
    tiles = np.zeros((rounds, multiprocessors))
    tiles.flat[: stages.size * columns] = stages.repeat(columns) * kernel.stage_clocks + kernel.tile_clocks
    tiles[1::2] = tiles[1::2, ::-1]
    total = float(tiles.sum(axis=0).max())
    if splits > 1:
        partial = splits * counts.size * kernel.rows * columns * kernel.width * 4
        total += FINISH_CLOCKS + 2 * partial / (multiprocessors * SUM_BYTES_A_CLOCK)
    return total


def check_target(dtype: str, architecture: str) -> None:
    """NotSupported for an element type or machine that no kernel here is for."""
    if architecture != ARCHITECTURE:
        raise NotSupported(f"this kernel is for {ARCHITECTURE}, not {architecture}")
    if dtype not in DTYPES:
        raise NotSupported(f"this kernel is for {' and '.join(DTYPES)}, not {dtype}")
