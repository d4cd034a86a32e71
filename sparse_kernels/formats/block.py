"""Block-wise weight in block compressed sparse rows (BSR).

Block row b covers the rows b * rows to (b + 1) * rows - 1, and block column c covers columns likewise. The last of
each may reach past the matrix. indptr int64 (ceil(m / rows) + 1): block row b holds the blocks indptr[b] to indptr[b
+ 1]. indices int32 (blocks): their block columns, rising within a block row. values float32 (blocks, rows, cols):
row-major, zero where a block reaches past the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats.checks import Mask, NotOfPattern, Weight, check_compressed, check_weight_and_mask, freeze
from sparse_kernels.patterns import BlockWise


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight kept in whole blocks."""

    shape: tuple[int, int]
    pattern: BlockWise
    nnz: int
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return self.indptr.nbytes + self.indices.nbytes + self.values.nbytes


def pack(weight: Weight, mask: Mask, pattern: BlockWise) -> BlockWeight:
    """Store the blocks of weight float32 (m, k) that mask bool (m, k) keeps.

    NotOfPattern where the mask keeps a part of a block.
    """
    check_weight_and_mask(weight, mask)
    m, k = weight.shape
    kept = mask[:: pattern.rows, :: pattern.cols]
    whole = kept.repeat(pattern.rows, axis=0)[:m].repeat(pattern.cols, axis=1)[:, :k]
    if (whole != mask).any():
        row, column = np.argwhere(whole != mask)[0]
        raise NotOfPattern(
            f"{pattern} keeps whole blocks, and the mask keeps a part of the block at row "
            f"{row - row % pattern.rows}, column {column - column % pattern.cols}"
        )
    block_rows, block_columns = kept.shape
    padded = np.zeros((block_rows * pattern.rows, block_columns * pattern.cols), np.float32)
    padded[:m, :k] = weight
    blocks = padded.reshape(block_rows, pattern.rows, block_columns, pattern.cols).swapaxes(1, 2)
    indptr = np.zeros(block_rows + 1, np.int64)
    np.cumsum(np.count_nonzero(kept, axis=1), out=indptr[1:])
    indices = np.nonzero(kept)[1].astype(np.int32)
    nnz = int(np.count_nonzero(mask))
    return BlockWeight((m, k), pattern, nnz, freeze(indptr), freeze(indices), freeze(blocks[kept]))


def unpack(packed: BlockWeight) -> Weight:
    """Return the weight, float32 (m, k), zero where dropped."""
    m, k = packed.shape
    _, rows, cols = packed.values.shape
    blocks = np.zeros((packed.indptr.size - 1, -(-k // cols), rows, cols), np.float32)
    block_rows = np.repeat(np.arange(packed.indptr.size - 1), np.diff(packed.indptr))
    blocks[block_rows, packed.indices] = packed.values
    return blocks.swapaxes(1, 2).reshape(blocks.shape[0] * rows, -1)[:m, :k].copy()


def check(packed: BlockWeight) -> None:
    """Refuse (ValueError) arrays that contradict each other."""
    check_compressed(packed.indptr, packed.indices, -(-packed.shape[1] // packed.pattern.cols))
