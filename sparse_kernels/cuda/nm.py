"""N:M weights on CUDA: packing and launches of nm24.cu (sparse tensor cores) and nm.cu (ordinary cores).

A weight that keeps at most 2 of every 4 columns is 2:4, whatever its pattern is called: 1:4, and 1:8, 2:8 or 1:16 as
well. Sparse tensor cores multiply it at the speed of 2:4, reading zeros where a group keeps fewer; ordinary cores
only touch what is kept. Which is faster depends on how much is kept and on the machine: `TENSOR_CORES_UP_TO`.

The tensor cores' layout is that of PTX ISA, "Matrix fragments for sparse mma.m16n8k32": see `pack_fragments`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import DTYPES, Launch, NotSupported, Operand, Variant, parse_activation
from sparse_kernels.cuda.targets import ARCHITECTURES, TARGETS
from sparse_kernels.cuda.vector_tiles import convert_to_bits
from sparse_kernels.formats import NMWeight, Packed, nm
from sparse_kernels.patterns import NM

Words = NDArray[np.uint32]

TENSOR_CORES_UP_TO = {
    "sm_80": 16,
    "sm_86": 8,
    "sm_89": 8,
    "sm_90a": 16,
    "sm_100": 16,
    "sm_103": 16,
    "sm_110": 16,
    "sm_120": 8,
    "sm_121": 8,
}
"""Up to which `of / keep` a weight that is 2:4 runs on sparse tensor cores; sm_70 and sm_75 have none.

Peak rates (multiply-adds a clock and multiprocessor, 2:4 against 50 of nm.cu times of / keep) meet near 40 on sm_80,
where tensor cores do 2048, and near 10 on sm_86, sm_89 and sm_120 (GeForce), where they do 512; neither reaches its
peak. The rates of mma.sync on sm_100, sm_103, sm_110 and sm_121 are not known: each is treated as its closest kin.
"""

DEPTH = 64  # columns of a weight that go through nm24.cu in one stage


@dataclass(frozen=True)
class NMTile:
    """What a block of nm24.cu computes, by how many warps, and how many stages are under way."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Of a block: x, weights (a byte an element of w) and metadata (a bit) of every stage."""
        return self.stages * DEPTH * (2 * self.columns + self.rows + self.rows // 8)

    def blocks(self, m: int, n: int) -> int:
        """Return how many tiles cover out (m, n)."""
        return -(-m // self.rows) * -(-n // self.columns)


TILES = (NMTile(128, 128, 2, 2, 3), NMTile(64, 64, 2, 2, 4), NMTile(32, 64, 2, 2, 4))
"""From the one that reads x and weights least often to the one that makes most blocks."""

LANE_COLUMNS = (8, 4, 2)
"""Columns of out that a lane of nm.cu computes: the more, the less its weights cost; the fewer, the more blocks."""

BLOCK_ROWS = 64  # of nm.cu
SHARED_BYTES = 48 * 1024  # what every machine gives a block


def build_program(
    packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None
) -> TensorCores | OrdinaryCores:
    """Return the program of an N:M weight; n is not needed, as tiles are chosen at launch.

    NotSupported for another format, element type or architecture.
    """
    if not isinstance(packed, NMWeight):
        raise NotSupported(f"the N:M kernels multiply N:M weights, not {packed.pattern}")
    check_target(dtype, architecture)
    count = multiprocessors or TARGETS[architecture].multiprocessors
    if runs_on_tensor_cores(packed.pattern, architecture):
        return TensorCores.of_weight(nm.unpack(packed), dtype, count)
    return OrdinaryCores.of_weight(nm.unpack(packed), choose_tile_depth(packed.pattern), dtype, count)


def check_target(dtype: str, architecture: str) -> None:
    """NotSupported for an element type or architecture that no kernel of this file knows."""
    if dtype not in DTYPES:
        raise NotSupported(f"elements are {' or '.join(DTYPES)}, not {dtype}")
    if architecture not in ARCHITECTURES:
        raise NotSupported(f"the kernels are for {', '.join(ARCHITECTURES)}, not {architecture}")


def runs_on_tensor_cores(pattern: NM, architecture: str) -> bool:
    """Return whether a pattern's weights are 2:4 and sparse tensor cores are there and should be faster."""
    is_2_of_4 = pattern.keep <= 2 and pattern.of % 4 == 0
    return is_2_of_4 and pattern.of / pattern.keep <= TENSOR_CORES_UP_TO.get(architecture, 0)


@dataclass(frozen=True, eq=False)
class TensorCores:
    """A 2:4 weight (m, k) for nm24.cu: `fragments` and `metadata` as `pack_fragments` and `pack_metadata` say."""

    shape: tuple[int, int]
    dtype: str
    multiprocessors: int
    fragments: Words
    metadata: Words

    @classmethod
    def of_weight(cls, weight: NDArray[np.float32], dtype: str, multiprocessors: int) -> TensorCores:
        """Pack a weight (m, k) of which every 4 columns hold at most 2 that are not zero."""
        values, places = select_two_of_four(weight)
        shape = (weight.shape[0], weight.shape[1])
        fragments = pack_fragments(convert_to_bits(values, dtype))
        return cls(shape, dtype, multiprocessors, fragments, pack_metadata(places))

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        return self.fragments.nbytes + self.metadata.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return one launch; none where n is 0."""
        return self.tiled(choose_tensor_tile(self.shape[0], n, self.multiprocessors), n, activation) if n else []

    def tiled(self, tile: NMTile, n: int, activation: str | None) -> list[Launch]:
        """Return the launch with blocks of a given tile."""
        m, k = self.shape
        scalars = (np.int32(m), np.int32(n), np.int32(k), parse_activation(activation))
        return [
            Launch(
                variant=build_tensor_variant(tile, self.dtype),
                grid=(tile.blocks(m, n), 1, 1),
                block=(32 * tile.warps_m * tile.warps_n, 1, 1),
                shared_bytes=tile.shared_bytes,
                arguments=(self.fragments, self.metadata, Operand.X, Operand.BIAS, Operand.OUT, *scalars),
            )
        ]


@dataclass(frozen=True, eq=False)
class OrdinaryCores:
    """An N:M weight (m, k) for nm.cu: `entries` as `pack_entries` says, cut along k into tiles of `depth` columns."""

    shape: tuple[int, int]
    dtype: str
    multiprocessors: int
    depth: int
    entries: Words

    @classmethod
    def of_weight(cls, weight: NDArray[np.float32], depth: int, dtype: str, multiprocessors: int) -> OrdinaryCores:
        """Pack any weight (m, k); it should keep about equally many of each `depth` columns of every row."""
        shape = (weight.shape[0], weight.shape[1])
        return cls(shape, dtype, multiprocessors, depth, pack_entries(weight, depth, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        return self.entries.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return one launch; none where n is 0."""
        slots = self.entries.shape[3]
        columns = choose_lane_columns(self.shape[0], n, self.depth, slots, self.multiprocessors)
        return self.with_lanes_of(columns, n, activation) if n else []

    def with_lanes_of(self, columns: int, n: int, activation: str | None) -> list[Launch]:
        """Return the launch in which a lane takes `columns` columns of out."""
        m, k = self.shape
        slots = self.entries.shape[3]
        sizes = (np.int32(m), np.int32(n), np.int32(k), np.int32(self.depth), np.int32(slots))
        scalars = (*sizes, parse_activation(activation))
        return [
            Launch(
                variant=build_ordinary_variant(columns, self.dtype),
                grid=(self.entries.shape[0] * -(-n // (32 * columns)), 1, 1),
                block=(256, 1, 1),
                shared_bytes=count_shared_bytes(columns, self.depth, slots),
                arguments=(self.entries, Operand.X, Operand.BIAS, Operand.OUT, *scalars),
            )
        ]


# ---- Launch settings ----


def choose_tensor_tile(m: int, n: int, multiprocessors: int) -> NMTile:
    """Return the largest tile that n columns fill and that gives every multiprocessor a block, else the smallest."""
    for tile in TILES:
        if tile.columns - n < 64 and tile.blocks(m, n) >= multiprocessors:
            return tile
    return TILES[-1]


def choose_lane_columns(m: int, n: int, depth: int, slots: int, multiprocessors: int) -> int:
    """Return the same for nm.cu, of which two blocks share a multiprocessor."""
    for columns in LANE_COLUMNS:
        blocks = -(-m // BLOCK_ROWS) * -(-n // (32 * columns))
        fits = count_shared_bytes(columns, depth, slots) <= SHARED_BYTES
        if fits and 32 * columns - n < 64 and blocks >= 2 * multiprocessors:
            return columns
    return LANE_COLUMNS[-1]


def count_shared_bytes(columns: int, depth: int, slots: int) -> int:
    """Return the bytes of two tiles of x, and of the entries of 64 rows for each."""
    return 2 * (depth * 32 * columns * 2 + BLOCK_ROWS * slots * 4)


def choose_tile_depth(pattern: NM) -> int:
    """Return how many columns of w nm.cu takes at once: about 32, or 64 if little is kept."""
    about = 32 if pattern.of <= 16 else 64
    return about // pattern.of * pattern.of if pattern.of <= about else about


def build_tensor_variant(tile: NMTile, dtype: str) -> Variant:
    """Return the variant of nm24.cu with these settings."""
    defines = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "STAGES": tile.stages,
        "BF16": DTYPES.index(dtype),
    }
    return Variant("nm24.cu", "nm24", defines, tuple(TENSOR_CORES_UP_TO), "HMMA.SP.16832.F32")


def build_ordinary_variant(columns: int, dtype: str) -> Variant:
    """Return the variant of nm.cu with these settings."""
    return Variant("nm.cu", "nm", {"COLUMNS": columns, "BF16": DTYPES.index(dtype)}, ARCHITECTURES)


VARIANTS = tuple(
    [build_tensor_variant(tile, dtype) for tile in TILES for dtype in DTYPES]
    + [build_ordinary_variant(columns, dtype) for columns in LANE_COLUMNS for dtype in DTYPES]
)
"""Everything that a launch may ask for."""


# ---- Packing ----


def select_two_of_four(weight: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Select two columns of every 4, among them all that are not zero.

    weight (m, k) -> values float32 and places uint8 in 0 to 3, both (m', k' / 2): m' is m and k' is k rounded up to
    multiples of 32 and 64. The two places of a group are different and rise, as the instruction demands even where
    fewer are kept: a lone kept column is paired with a dropped one times 0, so an infinity or NaN in that row of x
    becomes NaN. ValueError where 4 columns hold more than 2.
    """
    m, k = weight.shape
    padded = np.zeros((-(-m // 32) * 32, -(-k // DEPTH) * DEPTH), np.float32)
    padded[:m, :k] = weight
    groups = padded.reshape(padded.shape[0], -1, 4)
    crowded = np.count_nonzero(groups, axis=2) > 2
    if crowded.any():
        row, group = np.argwhere(crowded)[0]
        raise ValueError(f"not 2:4: row {row} keeps more than 2 of the columns {4 * group} to {4 * group + 3}")
    places = np.sort(np.argsort(groups == 0, axis=2, kind="stable")[:, :, :2], axis=2)
    values = np.take_along_axis(groups, places, axis=2)
    half = (padded.shape[0], padded.shape[1] // 2)
    return values.reshape(half), places.astype(np.uint8).reshape(half)


def pack_fragments(bits: NDArray[np.uint16]) -> Words:
    """Return kept elements (m', k' / 2) in the order in which blocks copy them and the lanes of a warp hold them.

    uint32 (m' / 32, k' / 64, 2 tiles, 2 steps, 32 lanes, 4 words). A tile and step is an instruction: 16 rows, 32
    columns, of which 16 are kept. Word r of lane 4 g + t is of row g + 8 (r % 2). Its lower half is kept column 2 t +
    8 (r // 2), its upper half the next.
    """
    groups, stages = bits.shape[0] // 32, bits.shape[1] // 32
    # Axes: group, tile, r % 2, g; stage, step, r // 2, t, half.
    split = bits.reshape(groups, 2, 2, 8, stages, 2, 2, 4, 2)
    by_lane = split.transpose(0, 4, 1, 5, 3, 7, 6, 2, 8).astype(np.uint32)
    words = by_lane[..., 0] | by_lane[..., 1] << np.uint32(16)
    return words.reshape(groups, stages, 2, 2, 32, 4)


def pack_metadata(places: NDArray[np.uint8]) -> Words:
    """Return places (m', k' / 2), 0 to 3, of the kept elements, as the instruction reads them.

    uint32 (m' / 32, k' / 64, 2 tiles, 2 steps, 16 words): Word 2 g + h is for lane 4 g + h. It holds 2 bits a place,
    of columns 16 h to 16 h + 15 of the step: those of row g in the lower half, of row g + 8 in the upper.
    """
    groups, stages = places.shape[0] // 32, places.shape[1] // 32
    # Axes: group, tile, lower or upper half, g; stage, step, h, place.
    split = places.reshape(groups, 2, 2, 8, stages, 2, 2, 8)
    by_word = split.transpose(0, 4, 1, 5, 3, 6, 2, 7).reshape(groups, stages, 2, 2, 16, 16).astype(np.uint32)
    words: Words = (by_word << 2 * np.arange(16, dtype=np.uint32)).sum(axis=5, dtype=np.uint32)
    return words


def pack_entries(weight: NDArray[np.float32], depth: int, dtype: str) -> Words:
    """Return what is not zero of a weight (m, k), for nm.cu.

    uint32 (blocks of 64 rows, tiles of `depth` columns, 64, slots): bits of the value in the lower half, column
    within the tile in the upper. slots is even and enough for any row and tile. Empty ones are 0 times the last
    column that the row keeps in that tile, whose infinities reach the result anyway. Where the row keeps none, it is
    column 0.
    """
    m, k = weight.shape
    blocks, tiles = -(-m // BLOCK_ROWS), -(-k // depth)
    rows, columns = np.nonzero(weight)
    place = rows * tiles + columns // depth
    numbers = np.bincount(place, minlength=m * tiles)
    slots = max(2, -(-int(numbers.max()) // 2) * 2)
    slot = np.arange(rows.size) - (np.cumsum(numbers) - numbers)[place]
    within = columns % depth
    last = np.zeros((blocks * BLOCK_ROWS, tiles), np.uint32)
    np.maximum.at(last, (rows, columns // depth), within)
    words = np.repeat(last[:, :, None] << 16, slots, axis=2)
    bits = convert_to_bits(weight[rows, columns], dtype).astype(np.uint32)
    words[rows, columns // depth, slot] = bits | within.astype(np.uint32) << 16
    return np.ascontiguousarray(words.reshape(blocks, BLOCK_ROWS, tiles, slots).transpose(0, 2, 1, 3))
