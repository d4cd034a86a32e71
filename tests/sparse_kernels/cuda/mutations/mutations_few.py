"""Bugs to plant in vector_few.cu. Each must be caught by one of these layers."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from mutations import Case, Mutation
from vector_cases import case_of, linear

from sparse_kernels import ShflBW, VectorWise
from sparse_kernels.cuda import vector_few
from sparse_kernels.cuda.program import Program
from sparse_kernels.cuda.vector_few import FewTile
from sparse_kernels.formats import Packed


def with_tile(tile: FewTile, packed: Packed, dtype: str, architecture: str, n: int) -> Program:
    """A program whose blocks are of this size, whatever would be chosen."""
    return dataclasses.replace(vector_few.build_program(packed, dtype, architecture, n), tile=tile)


@functools.cache
def aligned() -> Case:
    """Two row tiles a block, four columns a lane, ten steps a warp and one more; rows and columns are missing."""
    build = functools.partial(with_tile, FewTile(2, 4, 4))
    layer = linear(ShflBW(64), 110, 650, 28, sparsity=0)
    return case_of(layer, np.random.default_rng(1), build=build)


@functools.cache
def one_by_one() -> Case:
    """Rows of x that are not aligned, two blocks of columns, and no bias that could hide a row that is none."""
    build = functools.partial(with_tile, FewTile(1, 2, 4))
    layer = linear(VectorWise(32), 50, 190, 21, sparsity=0.2, bias=False)
    return case_of(layer, np.random.default_rng(2), build=build)


COPIES = {
    "waits for one group too few": ("cp_async_wait<DEPTH - 2>", "cp_async_wait<DEPTH - 1>"),
    "names of other lanes are read too early": (
        "    __syncwarp();  // the names of the next",
        "    // the names of the next",
    ),
    "names of the first step are read too early": (
        "  __syncwarp();  // the names of the first",
        "  // the names of the first",
    ),
    "copies into the slot in use": ("copy_step(ring + free_slot *", "copy_step(ring + slot *"),
    "the copies of a step too near": ("step + (DEPTH - 1) * warps, lane", "step + (DEPTH - 2) * warps, lane"),
    "no empty group past the last step": ("  }\n  cp_async_commit();", "    cp_async_commit();\n  }"),
    "warps share a ring": ("shared + warp * DEPTH * STEP_BYTES", "shared"),
    "every part has the first rows": ("number * ROW_TILES * 256,", "0,"),
    "weights of the step before": ("(step) * part.stride;", "(step - step % 2) * part.stride;"),
    "names of the step before": ("part.names + step * 16", "part.names + (step - step % 2) * 16"),
    "steps past the group's end": ("if (step < part.steps) {\n    const", "{\n    const"),
}
PRODUCTS = {
    "a warp takes every step": ("step < part.steps; step += warps)", "step < part.steps; step += 1)"),
    "the last step of a warp has no x": ("(step + warps < part.steps) next", "(step + 2 * warps < part.steps) next"),
    "x of the step after": ("STEP_BYTES, here, lane)", "STEP_BYTES, next, lane)"),
    "a neighbour's fragment": ("step + i * 512 + lane * 16);", "step + i * 512 + (lane ^ 1) * 16);"),
    "both halves have the same names": ("names[i / 2 * 8 + i % 2]", "names[i % 2]"),
    "lanes read the same columns": ("own_column = first_column + g * WIDTH", "own_column = first_column + g"),
    "rows of a pair exchanged": (
        "join(x.row[0].at[j], x.row[1].at[j])", "join(x.row[1].at[j], x.row[0].at[j])",
    ),
    "both halves of the depth exchanged": (
        "{join(x.row[0].at[j], x.row[1].at[j]), join(x.row[2].at[j], x.row[3].at[j])}",
        "{join(x.row[2].at[j], x.row[3].at[j]), join(x.row[0].at[j], x.row[1].at[j])}",
    ),
    "one column of x for all tiles": ("mma_m16n8k16(sums[i][j],", "mma_m16n8k16(sums[i][0],"),
    "padding is read": ("row >= 0 && x.columns > 0", "x.columns > 0"),
    "a lane reads past the last column": ("row >= 0 && x.columns > 0", "row >= 0"),
}  # fmt: skip
RESULTS = {
    "the sums take the place of rings in use": ("  __syncthreads();  // the rings", "  // the rings"),
    "read before all sums are there": ("  __syncthreads();  // all", "  // all"),
    "the last warp is left out": ("other < warps; ++other", "other < warps - 1; ++other"),
    "warps share a patch": ("patches[(warp * PART_ROWS + row)", "patches[(row)"),
    "columns stay in the order of the tiles": ("column % WIDTH * 8 + column / WIDTH", "column"),
    "the lower rows are the upper ones": ("g + c / 2 * 8", "g"),
    "bias of the packed row": ("bias[row_id]", "bias[row]"),
    "rows of the first part": ("+ number * PART_ROWS + row]", "+ row]"),
    "results past the last column": (" || first_column + column >= n", ""),
}
ONE_BY_ONE = {
    "x is read past its last column": ("row >= 0 && x.columns > i", "row >= 0"),
    "padding rows are written": ("row_id < 0 || ", ""),
    "all blocks write the first columns": ("* n + first_column + column]", "* n + column]"),
}

MUTATIONS = [
    *(Mutation(bug, aligned, edit) for bug, edit in {**COPIES, **PRODUCTS, **RESULTS}.items()),
    *(Mutation(bug, one_by_one, edit) for bug, edit in ONE_BY_ONE.items()),
]
