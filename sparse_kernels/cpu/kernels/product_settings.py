"""How a product at vectors of positions is computed, by row panels or by single rows."""

from __future__ import annotations

from typing import NamedTuple

from sparse_kernels.cpu.codegen.row_results import LEAVES_SUMS
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.layouts.quads import FLOATS_ONLY, LEAVES_NONE, QuadArrays, QuadLayout


class ProductSettings(NamedTuple):
    """How rows are multiplied, and what is left.

    fused: multiply-adds are fused. threads: that share the work. numbers: what is multiplied, weights and x. quads:
    what sums of quads are worth. left: how quads are left. leaves: what is left, as `RowTileForm` says.
    """

    fused: bool
    threads: int
    numbers: int = FLOATS
    quads: QuadArrays = FLOATS_ONLY
    left: QuadLayout = LEAVES_NONE
    leaves: int = LEAVES_SUMS
