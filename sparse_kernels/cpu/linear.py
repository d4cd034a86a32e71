"""Linear layers on the CPU: any pattern, both layouts, one of two kernels.

tokens   token-major x as it lies, outputs along the vector: needs groups of rows as tall as a vector.
rows     tokens along the vector. x feature-major as it lies, or any x through blocks of tokens (`transpose`), both
         ways counted in the plan's time.
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
from sparse_kernels.cpu.threads import exclusive
from sparse_kernels.formats import DenseWeight, Packed
from sparse_kernels.plan import ACTIVATIONS, Array, check_call

# Elements of x that stay in the second-level cache beside the weights (400 KB), and in the first-level cache (24 KB).
CACHED = 100_000
CLOSE = 6_000

# Columns of a row in a stage below which stages cost more than they save: measured on AVX-512.
WORTHWHILE = 16

# From this many columns on, the rows of x that a tile of tokens reads crowd the first-level cache: blocks are faster.
LONG_COLUMNS = 2048


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """Token-major x read as it lies. Permuted rows (Shfl-BW) are computed in packed order, then put in place."""

    shape: tuple[int, int]
    panels: Panels
    tile: tuple[int, int, int]  # tokens, vectors, lanes
    fused: bool
    kernel: str
    layout: str
    permuted: bool

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
        step = _tokens_at_a_time(self.tile, n)
        chunk = min(-(-n // step), max(1, CACHED // (k * step))) * step
        x, bias, code = np.ascontiguousarray(x), contiguous_bias(bias, m), ACTIVATIONS.index(activation)
        rows_of_y = self.panels.row_ids[:m]
        result = np.empty((n, m), np.float32) if self.permuted else y
        run = tokens.kernel(step, *self.tile[1:], self.fused)
        with exclusive():
            run(
                self.panels.arrays,
                x,
                result,
                bias[rows_of_y] if self.permuted else bias,
                code,
                chunk,
                numba.get_num_threads(),
            )
        if self.permuted:
            y[:, rows_of_y] = result
        return y

    def copy(self) -> TokenPlan:
        """The same plan with weights of its own."""
        panels = self.panels.copy()
        return TokenPlan(self.shape, panels, self.tile, self.fused, self.kernel, self.layout, self.permuted)


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Tokens along the vector: x feature-major as it lies, or any x through blocks."""

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
        if self.layout == "token_major":
            check_call(x, (None, k), bias, activation, out, (None, m), m)
            n = x.shape[0]
            y = np.empty((n, m), np.float32) if out is None else out
        else:
            check_call(x, (k, None), bias, activation, out, (m, None), m)
            n = x.shape[1]
            y = np.empty((m, n), np.float32) if out is None else out
        if n == 0:
            return y
        x, bias, code = np.ascontiguousarray(x), contiguous_bias(bias, m), ACTIVATIONS.index(activation)
        with exclusive():
            self._run(x, n, bias, code, y)
        return y

    def copy(self) -> RowPlan:
        """The same plan with weights of its own."""
        return RowPlan(self.shape, self.panels.copy(), self.tile, self.target, self.kernel, self.layout)

    def _run(self, x: Array, n: int, bias: Array, code: int, y: Array) -> None:
        (m, k), lanes = self.shape, self.target.lanes
        # Stages go on with sums in y, so no vector may overlap another: only blocks have none that does.
        if self.layout == "feature_major" and n >= lanes and self.panels.stages == 1:
            starts = _starts(n, lanes)
            self._multiply(x, n, starts, y, n, starts, bias, code)
            return
        into_blocks, out_of_blocks = getattr(transpose, self.layout)(lanes)
        threads = numba.get_num_threads()
        blocks = -(-n // lanes)
        buffer = self._pool.take(blocks * lanes * (k + m))
        x_blocks, y_blocks = buffer[: blocks * lanes * k], buffer[blocks * lanes * k :]
        into_blocks(x, x_blocks, threads)
        x_starts, y_starts = _block_starts(blocks, k * lanes), _block_starts(blocks, m * lanes)
        self._multiply(x_blocks, lanes, x_starts, y_blocks, lanes, y_starts, bias, code)
        out_of_blocks(y_blocks, y, threads)
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
        vectors, lanes = self.tile[1], self.target.lanes
        threads = numba.get_num_threads()
        cached = CACHED // (self.shape[1] * lanes) if self.panels.stages == 1 else vectors
        rows.kernel(*self.tile, lanes, self.target.fused)(
            self.panels.arrays,
            x,
            x_scale,
            x_starts,
            y,
            y_stride,
            y_starts,
            bias,
            activation,
            rows.block(x_starts.size, vectors, cached, threads),
            threads,
        )


def prepare(packed: Packed, layout: str, n: int) -> TokenPlan | RowPlan:
    """The plan of a linear layer for about n tokens."""
    target = host()
    height = group_height(packed)
    name = f"numba.{packed.pattern.format}"
    if layout == "token_major" and (n < target.lanes or packed.shape[1] < LONG_COLUMNS):
        # All rows of a dense weight share all columns: only its last panel is filled up, wherever that ends.
        whole = 2 * target.lanes if height > target.lanes else target.lanes
        tile = tokens.tile(whole if isinstance(packed, DenseWeight) else height, target)
        # Permuted rows are scattered one by one, but from a block for nothing: blocks, unless tokens are few.
        permuted = packed.pattern.format == "shflbw"
        if tile is not None and (n <= target.lanes or not permuted):
            cut = panels(groups(packed), tile[1] * tile[2])
            name = f"{name}.tokens{_tokens_at_a_time(tile, n)}x{tile[1]}.{target.name}"
            return TokenPlan(packed.shape, cut, tile, target.fused, name, layout, permuted)
    row_tile = rows.tile(height, target)
    cut = panels(groups(packed), row_tile[0], _stages(packed, row_tile, target, n))
    name = f"{name}.rows{row_tile[0]}x{row_tile[1]}.{target.name}"
    return RowPlan(packed.shape, cut, row_tile, target, name, layout)


def _tokens_at_a_time(tile: tuple[int, int, int], n: int) -> int:
    """Tokens of a register tile; one or two would leave most of a large one unused."""
    return tile[0] if n > 2 else 2


def _stages(packed: Packed, tile: tuple[int, int], target: Target, n: int) -> int:
    """How many stages of columns pay.

    A row alone uses what it loads of x once: x should lie in the first-level cache, unless too few columns of a row
    are left in a stage to outweigh fetching and storing the sums.
    """
    m, k = packed.shape
    vectors = max(1, min(tile[1], -(-n // target.lanes)))
    stages = -(-k * vectors * target.lanes // CLOSE)
    return 1 if tile[0] > 1 or packed.nnz < WORTHWHILE * m * stages else stages


def contiguous_bias(bias: Array | None, m: int) -> Array:
    """The bias as kernels read it: m zeros for None."""
    return np.zeros(m, np.float32) if bias is None else np.ascontiguousarray(bias)


@lru_cache(maxsize=256)
def _starts(n: int, lanes: int) -> NDArray[np.int64]:
    """Where the vectors of n >= lanes contiguous positions start.

    The last vector overlaps the one before it, so nothing beyond the end is touched.
    """
    return np.minimum(np.arange(-(-n // lanes), dtype=np.int64) * lanes, n - lanes)


@lru_cache(maxsize=256)
def _block_starts(blocks: int, size: int) -> NDArray[np.int64]:
    """Where the vectors of blocks of `size` elements start: one a block."""
    return np.arange(blocks, dtype=np.int64) * size
