"""Unstructured weights on CUDA: packing and launches of csr.cu, the baseline that structured patterns must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.nm import check_target
from sparse_kernels.cuda.program import DTYPES, Launch, NotSupported, Operand, Variant, parse_activation
from sparse_kernels.cuda.targets import ARCHITECTURES
from sparse_kernels.cuda.vector_tiles import convert_to_bits
from sparse_kernels.formats import CSRWeight, Packed

THREADS = 128  # of a block
VECTORS = (8, 2, 1)
"""How many columns a lane takes: the most that n is a multiple of."""


def build_program(packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None) -> CSR:
    """Return the program of an unstructured weight; n and the multiprocessors are not needed.

    NotSupported for another format, element type or architecture.
    """
    if not isinstance(packed, CSRWeight):
        raise NotSupported(f"the CSR kernel multiplies unstructured weights, not {packed.pattern}")
    check_target(dtype, architecture)
    return CSR.of_weight(packed, dtype)


@dataclass(frozen=True, eq=False)
class CSR:
    """A weight (m, k) with its rows sorted by their number of elements, the longest first.

    indptr uint64 (m + 1): sorted row i holds the elements indptr[i] to indptr[i + 1].
    entries uint32 (elements, 2): column, and the bits of the value as a float32, rounded to the element type.
    order int32 (m): sorted row i is row order[i] of the weight.
    """

    shape: tuple[int, int]
    dtype: str
    indptr: NDArray[np.uint64]
    entries: NDArray[np.uint32]
    order: NDArray[np.int32]

    @classmethod
    def of_weight(cls, packed: CSRWeight, dtype: str) -> CSR:
        """Sort the rows and round the values."""
        lengths = np.diff(packed.indptr)
        order = np.argsort(-lengths, kind="stable")
        indptr = np.zeros(order.size + 1, np.uint64)
        np.cumsum(lengths[order], out=indptr[1:], dtype=np.uint64)
        moved = np.repeat(packed.indptr[order] - indptr[:-1].astype(np.int64), lengths[order])
        source = np.arange(packed.nnz) + moved  # sorted element -> element
        values = round_values(packed.values[source], dtype)
        columns = packed.indices[source].astype(np.uint32)
        entries = np.stack([columns, values.view(np.uint32)], axis=1)
        return cls(packed.shape, dtype, indptr, entries, order.astype(np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        return self.indptr.nbytes + self.entries.nbytes + self.order.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return one launch; none where n is 0."""
        m = self.shape[0]
        if n == 0:
            return []
        vector = next(it for it in VECTORS if n % it == 0)
        lanes = 8 if vector == 8 else 32
        row_blocks, strips = -(-m // (THREADS // lanes)), -(-n // (lanes * vector))
        arrays = (self.indptr, self.entries, self.order)
        scalars = (np.int32(m), np.int32(n), parse_activation(activation))
        return [
            Launch(
                variant=build_variant(vector, self.dtype),
                grid=(row_blocks * strips, 1, 1),
                block=(THREADS, 1, 1),
                shared_bytes=0,
                arguments=(*arrays, Operand.X, Operand.BIAS, Operand.OUT, *scalars),
            )
        ]


def build_variant(vector: int, dtype: str) -> Variant:
    """Return the variant of csr.cu with these settings."""
    return Variant("csr.cu", "csr", {"VECTOR": vector, "BF16": DTYPES.index(dtype)}, ARCHITECTURES)


VARIANTS = tuple(build_variant(vector, dtype) for vector in VECTORS for dtype in DTYPES)
"""Everything that a launch may ask for."""


def round_values(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return the values as the element type holds them."""
    bits = convert_to_bits(values, dtype)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
