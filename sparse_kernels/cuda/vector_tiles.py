"""Weights kept in whole vectors of rows, laid out as vector.cu reads them: tiles of V rows x BK kept columns.

Vector-wise, Shfl-BW and block-wise weights all come to the same: groups of rows that share their kept columns. A
group is cut into tiles of BK kept columns; the last is filled up with columns -1, for which the kernel takes zeros.
Groups with most tiles come first: blocks start in that order, so that the last to finish are short.

Within a tile, 16 rows x 16 kept columns are 256 elements. They lie as the lanes of a warp hold an operand of a
tensor-core product, so each lane reads its own 16 bytes. Source: PTX ISA, "Matrix fragments for mma.m16n8k16" and
"mma.m8n8k4".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.formats import BlockWeight, DenseWeight, Packed, VectorWeight, bfloat16
from sparse_kernels.formats.checks import freeze

HEIGHTS = (16, 32, 64, 128)
"""Rows of a tile. Groups of another number of rows are padded to the next height, or split where there is none."""

BK = 32
"""Kept columns of a tile: two products deep. Twice as many would pad short groups with twice as much."""

Bits = NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class RowVectors:
    """Groups of `v` rows that share their kept columns, whatever the pattern: see `formats/vector.py`.

    indptr (groups + 1), columns (vectors), values float32 (vectors, v), row_ids (groups * v) with -1 for padding.
    """

    v: int
    indptr: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    row_ids: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class VectorTiles:
    """A weight as vector.cu reads it; `height` is its V.

    starts int32 (groups + 1): group g holds the tiles starts[g] to starts[g + 1].
    columns int32 (tiles, BK): the kept columns of a tile, -1 for padding.
    weights uint16 (tiles, BK / 16, height / 16, 256): the bits of the elements in fragment order, 0 in padding.
    row_ids int32 (groups, height): the row of the matrix that a packed row is, -1 for padding.
    """

    shape: tuple[int, int]
    height: int
    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: Bits
    row_ids: NDArray[np.int32]

    @property
    def groups(self) -> int:
        """Groups of `height` rows: rows of blocks of the launch."""
        return len(self.row_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.starts.nbytes + self.columns.nbytes + self.weights.nbytes + self.row_ids.nbytes


def pack_tiles(packed: Packed, dtype: str, *, volta: bool) -> VectorTiles:
    """Lay out a vector-wise, Shfl-BW, block-wise or dense weight; volta chooses the fragments of m8n8k4.

    NotSupported for another format, or a weight that `dtype` cannot hold.
    """
    vectors = _of_any_height(convert_to_vectors(packed))
    height = next(height for height in HEIGHTS if vectors.v <= height)
    counts = np.diff(vectors.indptr)
    tiles = -(-counts // BK)
    order = np.argsort(-tiles, kind="stable")
    ends = np.cumsum(tiles[order])
    if ends[-1] * BK >= 2**31:
        raise NotSupported(f"{vectors.columns.size} vectors are more than 32-bit tile numbers can count")

    first = np.empty_like(tiles)  # tile of each group
    first[order] = ends - tiles[order]
    slots = np.arange(vectors.columns.size) + np.repeat(first * BK - vectors.indptr[:-1], counts)
    columns = np.full(ends[-1] * BK, -1, np.int32)
    columns[slots] = vectors.columns
    values = np.zeros((columns.size, height), np.float32)
    values[slots, : vectors.v] = vectors.values
    row_ids = np.full((tiles.size, height), -1, np.int32)
    row_ids[:, : vectors.v] = vectors.row_ids.reshape(-1, vectors.v)[order]

    fragments = pack_volta_fragments if volta else pack_mma_fragments
    bits = convert_to_bits(values, dtype).reshape(-1, BK, height)
    return VectorTiles(
        packed.shape,
        height,
        freeze(np.concatenate([[0], ends]).astype(np.int32)),
        freeze(columns.reshape(-1, BK)),
        freeze(fragments(bits)),
        freeze(row_ids),
    )


def convert_to_vectors(packed: Packed) -> RowVectors:
    """Return the groups of a weight; NotSupported where it has none."""
    match packed:
        case VectorWeight():
            return RowVectors(packed.pattern.v, packed.indptr, packed.indices, packed.values, packed.row_ids)
        case BlockWeight():
            return _of_blocks(packed)
        case DenseWeight():
            return _of_dense(packed)
    raise NotSupported(f"the vector kernels run vector, shflbw, block and dense weights, not {packed.pattern}")


def pack_mma_fragments(tiles: Bits) -> Bits:
    """Return tiles (tiles, BK, height) in the order of m16n8k16's first operand: (tiles, BK / 16, height / 16, 256).

    Lane 4g + t holds, for each half of the columns, then for each half of the rows, the elements of row g at columns
    2t and 2t + 1. m16n8k8 takes the halves of the columns one after the other.
    """
    number, depth, height = tiles.shape
    parts = tiles.reshape(number, depth // 16, 2, 4, 2, height // 16, 2, 8)  # step, half, t, pair; 16 rows, half, g
    order = (0, 1, 5, 7, 3, 2, 6, 4)
    return np.ascontiguousarray(parts.transpose(order)).reshape(number, depth // 16, height // 16, 256)


def pack_volta_fragments(tiles: Bits) -> Bits:
    """Return the same in the order of m8n8k4's first operand: half the columns of all 16 rows, then the other half.

    Quad pairs 0 and 2 take rows 0 to 7, pairs 1 and 3 rows 8 to 15, and of each 8 rows lanes below 16 take the first
    4: rows 0-3, 8-11, 4-7, 12-15 are the order in which lanes 0-7 and 16-23 read them, 16 bytes each.
    """
    number, depth, height = tiles.shape
    parts = tiles.reshape(number, depth // 16, 2, 8, height // 16, 2, 2, 4)  # step, half, column; 16 rows, 8, 4, row
    order = (0, 1, 4, 2, 6, 5, 7, 3)
    return np.ascontiguousarray(parts.transpose(order)).reshape(number, depth // 16, height // 16, 256)


def convert_to_bits(values: NDArray[np.float32], dtype: str) -> Bits:
    """Return float32 rounded to the nearest float16 or bfloat16 (ties to even), as bits.

    NotSupported where a finite value becomes infinite.
    """
    if dtype == "bfloat16":
        rounded = bfloat16.round_to_bits(values)
        infinite = rounded & 0x7FFF == 0x7F80
    else:
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16).view(np.uint16)
        infinite = rounded & 0x7FFF == 0x7C00
    if infinite.any():
        raise NotSupported(f"{dtype} cannot hold the weight {values[infinite][0]:g}")
    return rounded


def _of_blocks(packed: BlockWeight) -> RowVectors:
    """Blocks of rows x cols are vectors of `rows` rows whose kept columns come in runs of `cols`."""
    m, k = packed.shape
    _, rows, cols = packed.values.shape
    columns = packed.indices[:, None] * np.int64(cols) + np.arange(cols)
    inside = columns < k  # the last block column may reach past the matrix
    indptr = np.concatenate([[0], np.cumsum(inside.sum(axis=1))])[packed.indptr]
    row_ids = np.arange((packed.indptr.size - 1) * rows, dtype=np.int32)
    row_ids[m:] = -1
    values = packed.values.swapaxes(1, 2)[inside]
    return RowVectors(rows, indptr, columns[inside].astype(np.int32), values.reshape(-1, rows), row_ids)


def _of_dense(packed: DenseWeight) -> RowVectors:
    """Return a dense weight is vectors of as many rows as a tile has, all kept: what sparsity is compared with."""
    m, k = packed.shape
    v = next((height for height in HEIGHTS if m <= height), HEIGHTS[-1])
    groups = -(-m // v)
    values = np.zeros((groups * v, k), np.float32)
    values[:m] = packed.values
    row_ids = np.arange(groups * v, dtype=np.int32)
    row_ids[m:] = -1
    columns = np.tile(np.arange(k, dtype=np.int32), groups)
    vectors = values.reshape(groups, v, k).swapaxes(1, 2).reshape(-1, v)
    return RowVectors(v, np.arange(groups + 1) * k, columns, vectors, row_ids)


def _of_any_height(vectors: RowVectors) -> RowVectors:
    """Return the same weight in groups of at most 128 rows: higher ones are split into groups with equal columns."""
    most = HEIGHTS[-1]
    if vectors.v <= most:
        return vectors
    pieces = -(-vectors.v // most)
    groups = vectors.indptr.size - 1
    row_ids = np.full((groups, pieces * most), -1, np.int32)
    row_ids[:, : vectors.v] = vectors.row_ids.reshape(groups, vectors.v)
    values = np.zeros((vectors.columns.size, pieces * most), np.float32)
    values[:, : vectors.v] = vectors.values

    counts = np.repeat(np.diff(vectors.indptr), pieces)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    piece = np.repeat(np.tile(np.arange(pieces), groups), counts)
    source = np.arange(indptr[-1]) + np.repeat(np.repeat(vectors.indptr[:-1], pieces) - indptr[:-1], counts)
    return RowVectors(
        most, indptr, vectors.columns[source], values.reshape(-1, pieces, most)[source, piece], row_ids.ravel()
    )
