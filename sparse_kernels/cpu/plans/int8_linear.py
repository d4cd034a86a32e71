"""Linear layers in eight bits on the CPU: x is read as bytes, multiplied in quads of columns, summed in 32 bits.

tokens   outputs along the vector, as kernel tokens of `plans.linear`: for groups of rows as tall as a vector.
rows     tokens along the vector, as kernel rows of `plans.linear`, for lower groups.
amx      the matrix unit, where the processor has one and each thread has a tile of tokens (`byte_linear`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sparse_kernels.cpu.codegen.cpu_target import CpuTarget, find_cpu_target
from sparse_kernels.cpu.codegen.tile_registers import ROWS, count_row_tiles
from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_UNIT
from sparse_kernels.cpu.kernels import row_panels, token_blocks, token_major
from sparse_kernels.cpu.kernels.token_blocks import BlockSettings
from sparse_kernels.cpu.kernels.token_major import TokenMajorForm, TokenMajorLayer
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, build_single_rows
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.layouts.panels import Panels, build_panels, count_group_rows
from sparse_kernels.cpu.layouts.quads import QuadArrays, build_quad_arrays, build_quad_groups
from sparse_kernels.cpu.layouts.vector_grid import TILE, build_column_offsets
from sparse_kernels.cpu.matrix_unit.byte_linear import MatrixBytePlan
from sparse_kernels.cpu.matrix_unit.byte_panels import build_byte_panels
from sparse_kernels.cpu.matrix_unit.byte_tiles import TOKENS
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.formats import DenseWeight
from sparse_kernels.formats.int8 import QUAD, Int8Weight, fill_up
from sparse_kernels.patterns import ShflBW

MOST_SINGLE = 0.4
"""Share of quads from which on rows that share no columns are multiplied as dense ones, zeros included."""


@dataclass(frozen=True, eq=False)
class QuadPlan(CpuLinearPlan):
    """What plans in eight bits share. numbers: how quads are multiplied. own_steps: by each token's own step."""

    panels: Panels | SingleRows
    quads: QuadArrays
    tile: tuple[int, int, int]
    target: CpuTarget
    kernel: str
    own_steps: bool
    numbers: int

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes + sum(array.nbytes for array in self.quads)

    @property
    def _lanes(self) -> int:
        return self.tile[2]

    def copy(self) -> QuadPlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy(), quads=self.quads.copy())


class QuadTokenPlan(QuadPlan):
    """Token-major x, read as bytes; outputs along the vector."""

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        (m, features), panels, target, (size, vectors, lanes) = self.shape, self.panels, self.target, self.tile
        assert isinstance(panels, Panels)
        k, permuted = -(-features // QUAD), not panels.in_order
        step = size if n > 2 else 2
        own = token_major.gives_own_chunks(n, threads, permuted, target, self.numbers)
        chunk, block = token_major.choose_chunks(step, k, n, panels, threads, own, permuted)
        whole_chunks = permuted and -(-n // chunk) % threads == 0
        form = TokenMajorForm(
            step, vectors, lanes, target.fused, permuted, 4, token_major.choose_prefetch(n, step, target), False,
            whole_chunks, self.numbers, self.own_steps,
        )  # fmt: skip
        waiting_tokens = threads * chunk if whole_chunks else -(-n // step) * step
        waiting = waiting_tokens * panels.row_ids.size if permuted else 0
        in_fours = token_major.waits_in_fours(step)
        layer = TokenMajorLayer(
            weights=panels.arrays, quads=self.quads, n=n, k=k, m=m, features=features, chunk=chunk, block=block,
            parts=threads, positions=panels.positions_in_fours(lanes) if in_fours else panels.positions,
            shares=threads if n * m >= token_major.WORTH_SHARING else 1, waiting=waiting,
        )  # fmt: skip
        needed = waiting + threads * token_major.count_chunk_elements(form, chunk, k)
        return KernelWithScratch(token_major.build_kernel(form).bind(LinearCall, layer), needed)


class QuadRowPlan(QuadPlan):
    """Token-major x, read as bytes; tokens along the vector, block by block."""

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        (m, features), (_, vectors, _) = self.shape, self.tile
        settings = BlockSettings(
            vectors, self.target, ("token_major", "token_major"), self.numbers, self.quads, features, self.own_steps
        )
        return token_blocks.bind_kernel(self.panels, (m, -(-features // QUAD)), settings, n, threads)


LEAST_TOKENS = 32
"""Tokens of a thread that fill a tile of the matrix unit; with half as many it is no faster than vectors."""

LEAST_KEPT, LEAST_KEPT_PERMUTED = 180, 70
"""Weights of a row from which on the matrix unit is faster than vectors, for rows in order and for permuted ones.

Its sums have to be turned before they are finished, which counts for each row, and costs nothing more where rows are
permuted. In five layers at 75% and 90% sparsity it has 1.0 to 1.9 times the speed above these limits, and 0.7 to 1.1
times below them; dense layers have 1.4 to 2.9 times (128 and 2,048 tokens, Granite Rapids; the command is
`tests/benchmarks/matrix_unit.py --int8`).
"""


def choose_matrix_tiles(weight: Int8Weight, n: int) -> int | None:
    """Return the tiles of rows in a panel of the matrix unit for about n tokens.

    None where vectors are faster, or alone can multiply this weight.
    """
    packed = weight.packed
    permuted = isinstance(packed.pattern, ShflBW)
    least = LEAST_KEPT_PERMUTED if permuted else LEAST_KEPT
    if not find_cpu_target().matrix or n < LEAST_TOKENS * count_threads() or packed.nnz < least * weight.shape[0]:
        return None
    return count_row_tiles(count_group_rows(packed))


def build_matrix_plan(weight: Int8Weight, tiles: int, emulated: bool = False) -> MatrixBytePlan:
    """Return the plan by the matrix unit, with so many tiles of rows in a panel."""
    m, k = weight.shape
    dense = isinstance(weight.packed, DenseWeight)
    groups = build_quad_groups(weight, k)
    quads = build_quad_arrays(weight, np.arange(m, dtype=np.int32), QUADS_BY_UNIT)
    offsets = build_column_offsets(-(-k // QUAD), TOKENS)
    panels = build_byte_panels(groups, tiles, m).placed(offsets)
    name = f"numba.{weight.pattern.format}.int8amx{tiles * ROWS}x{TOKENS}"
    return MatrixBytePlan(
        weight.shape, "token_major", panels, quads, name, not dense, weight.input_range is None, emulated
    )


def prepare_int8_linear(weight: Int8Weight, layout: str, n: int) -> QuadPlan | MatrixBytePlan:
    """Return the plan of a linear layer in eight bits for about n tokens."""
    if layout != "token_major":
        raise ValueError(f"layers in eight bits take x token-major, not {layout}")
    tiles = choose_matrix_tiles(weight, n)
    return build_vector_plan(weight, layout, n) if tiles is None else build_matrix_plan(weight, tiles)


def build_vector_plan(weight: Int8Weight, layout: str, n: int) -> QuadPlan:
    """Return the plan by the vector unit."""
    target, (m, k) = find_cpu_target(), weight.shape
    groups = build_quad_groups(weight, k)
    if groups.height == 1 and groups.columns.size >= MOST_SINGLE * m * -(-k // QUAD):
        groups = build_quad_groups(fill_up(weight), k)
    height = groups.height
    if height == m:  # all rows share all columns
        height = 2 * target.lanes if height > target.lanes else target.lanes
    kind: type[QuadPlan] = QuadTokenPlan
    tile, kernel = token_major.choose_tile(height, target), "tokens"
    if tile is None:
        kind, kernel = QuadRowPlan, "rows"
        size, vectors = row_panels.choose_tile(groups.height, target) if groups.height > 1 else (1, TILE)
        tile = size, min(vectors, -(-n // target.lanes)) or 1, target.lanes
    panels: Panels | SingleRows
    if groups.height == 1:
        panels, rows = build_single_rows(groups, -(-k // QUAD), tile[1] * tile[2]), np.arange(m, dtype=np.int32)
    else:
        panels = build_panels(groups, tile[1] * tile[2] if kernel == "tokens" else tile[0])
        rows = panels.row_ids
    name = f"numba.{weight.pattern.format}.int8{kernel}{tile[0]}x{tile[1]}.{target.byte_name}"
    return kind(
        weight.shape, layout, panels.copy(), build_quad_arrays(weight, rows, target.quads), tile, target, name,
        weight.input_range is None, target.quads,
    )  # fmt: skip
