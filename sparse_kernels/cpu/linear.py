"""Linear layers on the CPU: any pattern, both layouts, one of three kernels.

tokens   token-major x as it lies, outputs along the vector: needs groups of rows as tall as a vector.
rows     tokens along the vector, panels of rows. x feature-major as it lies, or any x packed into vectors of tokens
         (`transpose`), both ways counted in the plan's time.
single   the same for rows that share no columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numba
import numpy as np

from sparse_kernels.cpu import rows, single, tokens, transpose
from sparse_kernels.cpu.call import arguments
from sparse_kernels.cpu.panels import Panels, group_height, groups, panels
from sparse_kernels.cpu.scratch import Pool
from sparse_kernels.cpu.single import SingleRows, single_rows
from sparse_kernels.cpu.target import Target, host
from sparse_kernels.cpu.threads import exclusive
from sparse_kernels.cpu.vectors import CACHED, as_it_lies, columns, in_tiles
from sparse_kernels.formats import DenseWeight, Packed
from sparse_kernels.plan import Array

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
        x, y, bias, code = arguments(x, (None, k), bias, activation, out, (None, m), m)
        n = x.shape[0]
        if n == 0:
            return y
        step = _tokens_at_a_time(self.tile, n)
        chunk = min(-(-n // step), max(1, CACHED // (k * step))) * step
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
        return replace(self, panels=self.panels.copy())


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Tokens along the vector: x feature-major as it lies, or any x packed."""

    shape: tuple[int, int]
    panels: Panels | SingleRows
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
        tokens_first = self.layout == "token_major"
        shapes = ((None, k), (None, m)) if tokens_first else ((k, None), (m, None))
        x, y, bias, code = arguments(x, shapes[0], bias, activation, out, shapes[1], m)
        n = x.shape[0 if tokens_first else 1]
        if n == 0:
            return y
        with exclusive():
            if tokens_first or not self.target.lanes <= n < 2**31 // k:
                self._run_packed(x, n, bias, code, y)
            else:
                self._run_in_place(x, n, bias, code, y)
        return y

    def copy(self) -> RowPlan:
        """The same plan with weights of its own."""
        return replace(self, panels=self.panels.copy(), _pool=Pool())

    def _run_in_place(self, x: Array, n: int, bias: Array, code: int, y: Array) -> None:
        k, lanes, fused = self.shape[1], self.target.lanes, self.target.fused
        at, x, y = as_it_lies(n, lanes), x.ravel(), y.ravel()
        if isinstance(self.panels, SingleRows):
            single.multiply_gathered(self.panels, fused, at, x, columns(k, n), y, bias, code, self._pool)
        else:
            rows.multiply(self.panels, self.tile[1], fused, at, x, y, bias, code, k)

    def _run_packed(self, x: Array, n: int, bias: Array, code: int, y: Array) -> None:
        (m, k), lanes, vectors, fused = self.shape, self.target.lanes, self.tile[1], self.target.fused
        pack, unpack = getattr(transpose, self.layout)(lanes)
        threads = numba.get_num_threads()
        at = in_tiles(n, vectors, lanes, k, m)
        size = -(-at.x_starts.size // vectors) * vectors * lanes
        buffer = self._pool.take(size * (k + m))
        x_packed, y_packed = buffer[: size * k], buffer[size * k :]
        pack(x, x_packed, at.x_starts, at.x_stride, threads)
        if isinstance(self.panels, SingleRows):
            single.multiply_packed(self.panels, fused, at, x_packed, y_packed, bias, code)
        else:
            rows.multiply(self.panels, vectors, fused, at, x_packed, y_packed, bias, code, k)
        unpack(y_packed, at.y_starts, at.y_stride, y, threads)
        self._pool.give_back(buffer)


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
    weights: Panels | SingleRows
    if height == 1:
        tile_rows, vectors = 1, max(1, min(single.MOST, -(-n // target.lanes)))
        weights = single_rows(groups(packed), packed.shape[1], vectors * target.lanes)
    else:
        tile_rows, vectors = rows.tile(height, target)
        weights = panels(groups(packed), tile_rows)
    name = f"{name}.rows{tile_rows}x{vectors}.{target.name}"
    return RowPlan(packed.shape, weights, (tile_rows, vectors), target, name, layout)


def _tokens_at_a_time(tile: tuple[int, int, int], n: int) -> int:
    """Tokens of a register tile; one or two would leave most of a large one unused."""
    return tile[0] if n > 2 else 2
