"""Linear layers on the CPU: any pattern, both layouts, one of two kernels.

tokens   token-major x as it lies, outputs along the vector: needs groups of rows as tall as a vector.
rows     positions (tokens) along the vector: x feature-major as it lies, or token-major transposed into blocks and
         back, which is counted in the plan's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu import rows, tokens, transpose
from sparse_kernels.cpu.panels import Panels, group_height, groups, panels
from sparse_kernels.cpu.scratch import Pool
from sparse_kernels.cpu.target import Target, host
from sparse_kernels.formats import DenseWeight, Packed, VectorWeight
from sparse_kernels.patterns import ShflBW
from sparse_kernels.plan import ACTIVATIONS, Array, check_call

# Elements of x that stay in the second-level cache beside the weights: 400 KB.
CACHED = 100_000

# From this many columns on, the rows of x that a tile reads crowd the first-level cache: blocks are faster.
LONG_COLUMNS = 2048


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """Token-major x read as it lies; rows of the packed weight in their own order."""

    shape: tuple[int, int]
    panels: Panels
    tile: tuple[int, int, int]  # tokens, vectors, lanes
    fused: bool
    kernel: str
    layout: str

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(x @ w.T + bias), as `Plan` says; x that is not C-contiguous is copied."""
        m, k = self.shape
        check_call(x, (None, k), bias, activation, out, (None, m), m)
        n = x.shape[0]
        y = np.empty((n, m), np.float32) if out is None else out
        if n == 0:
            return y
        step = self.tile[0]
        chunk = min(-(-n // step), max(1, CACHED // (k * step))) * step
        tokens.kernel(*self.tile, self.fused)(
            self.panels.arrays,
            np.ascontiguousarray(x),
            y,
            _contiguous_bias(bias, m),
            ACTIVATIONS.index(activation),
            chunk,
            numba.get_num_threads(),
        )
        return y

    def copy(self) -> TokenPlan:
        """The same plan with weights of its own."""
        return TokenPlan(self.shape, self.panels.copy(), self.tile, self.fused, self.kernel, self.layout)


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Tokens along the vector: x feature-major as it lies, or token-major through blocks."""

    shape: tuple[int, int]
    panels: Panels
    tile: tuple[int, int]  # rows, vectors
    target: Target
    kernel: str
    layout: str
    _pool: Pool = field(default_factory=Pool)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(w @ x + bias) in the plan's layout, as `Plan` says; x that is not C-contiguous is copied."""
        m, k = self.shape
        bias = _contiguous_bias(bias, m) if bias is None else bias
        if self.layout == "token_major":
            check_call(x, (None, k), bias, activation, out, (None, m), m)
            y = np.empty((x.shape[0], m), np.float32) if out is None else out
        else:
            check_call(x, (k, None), bias, activation, out, (m, None), m)
            y = np.empty((m, x.shape[1]), np.float32) if out is None else out
        if y.size == 0:
            return y
        x, bias, code = np.ascontiguousarray(x), np.ascontiguousarray(bias), ACTIVATIONS.index(activation)
        if self.layout == "token_major":
            self._through_blocks(x, y, bias, code)
        elif x.shape[1] >= self.target.lanes:
            self._as_it_lies(x, y, bias, code)
        else:
            # Fewer tokens than lanes: a few more, whose products nobody reads.
            wide = np.zeros((k, self.target.lanes), np.float32)
            wide[:, : x.shape[1]] = x
            product = np.empty((m, self.target.lanes), np.float32)
            self._as_it_lies(wide, product, bias, code)
            y[:] = product[:, : x.shape[1]]
        return y

    def copy(self) -> RowPlan:
        """The same plan with weights of its own."""
        return RowPlan(self.shape, self.panels.copy(), self.tile, self.target, self.kernel, self.layout)

    def _as_it_lies(self, x: Array, y: Array, bias: Array, activation: int) -> None:
        n = x.shape[1]
        starts = _starts(n, self.tile[1], self.target.lanes)
        self._multiply(x, n, starts, y, n, starts, bias, activation)

    def _through_blocks(self, x: Array, y: Array, bias: Array, activation: int) -> None:
        (n, k), m = x.shape, y.shape[1]
        lanes, span = self.target.lanes, self.tile[1] * self.target.lanes
        blocks = -(-n // span)
        buffer = self._pool.take(blocks * span * (k + m))
        x_blocks, y_blocks = buffer[: blocks * span * k], buffer[blocks * span * k :]
        into_blocks, out_of_blocks = transpose.kernels(lanes)
        threads = numba.get_num_threads()
        into_blocks(x, x_blocks, span, threads)
        x_starts, y_starts = _block_starts(blocks, span, k, lanes), _block_starts(blocks, span, m, lanes)
        self._multiply(x_blocks, span, x_starts, y_blocks, span, y_starts, bias, activation)
        out_of_blocks(y_blocks, y, span, threads)
        self._pool.give_back(buffer)

    def _multiply(
        self,
        x: Array,
        x_scale: int,
        x_starts: NDArray[np.int64],
        y: Array,
        y_stride: int,
        y_starts: NDArray[np.int64],
        bias: Array,
        activation: int,
    ) -> None:
        block = max(1, CACHED // (self.shape[1] * self.tile[1] * self.target.lanes))
        rows.kernel(*self.tile, self.target.lanes, self.target.fused)(
            self.panels.arrays,
            x,
            x_scale,
            x_starts,
            y,
            y_stride,
            y_starts,
            bias,
            activation,
            block,
            numba.get_num_threads(),
        )


def prepare(packed: Packed, layout: str, n: int) -> TokenPlan | RowPlan:
    """The plan of a linear layer for about n tokens."""
    target = host()
    height = group_height(packed)
    name = f"numba.{packed.pattern.format}"
    # All rows of a dense weight share all columns: only its last panel is filled up, wherever that ends.
    whole = 2 * target.lanes if height > target.lanes else target.lanes
    tile = tokens.tile(whole if isinstance(packed, DenseWeight) else height, target)
    if layout == "token_major" and tile is not None and _reads_as_it_lies(packed, n, target):
        cut = panels(groups(packed), tile[1] * tile[2])
        name = f"{name}.tokens{tile[0]}x{tile[1]}.{target.name}"
        return TokenPlan(packed.shape, cut, tile, target.fused, name, layout)
    row_tile = rows.tile(height, target)
    name = f"{name}.rows{row_tile[0]}x{row_tile[1]}.{target.name}"
    return RowPlan(packed.shape, panels(groups(packed), row_tile[0]), row_tile, target, name, layout)


def _reads_as_it_lies(packed: Packed, n: int, target: Target) -> bool:
    """Whether token-major x is better read as it lies than through blocks."""
    if isinstance(packed, VectorWeight) and isinstance(packed.pattern, ShflBW):
        return False  # outputs would have to be scattered one by one; a row of a block goes anywhere for nothing
    return n < target.lanes or packed.shape[1] < LONG_COLUMNS


def _contiguous_bias(bias: Array | None, m: int) -> Array:
    return np.zeros(m, np.float32) if bias is None else np.ascontiguousarray(bias)


@lru_cache(maxsize=256)
def _starts(n: int, vectors: int, lanes: int) -> NDArray[np.int64]:
    """Where the vectors of n >= lanes contiguous positions start, in whole tiles.

    The last vector overlaps the one before it, so nothing beyond the end is touched; a tile is filled up with it.
    """
    starts = np.minimum(np.arange(-(-n // lanes), dtype=np.int64) * lanes, n - lanes)
    return np.append(starts, np.full(-starts.size % vectors, n - lanes, np.int64))


@lru_cache(maxsize=256)
def _block_starts(blocks: int, span: int, features: int, lanes: int) -> NDArray[np.int64]:
    """Where the vectors start in blocks (blocks, features, span)."""
    return (np.arange(blocks)[:, None] * (features * span) + np.arange(0, span, lanes)).ravel().astype(np.int64)
