"""Transpose a matrix, the classic of coalescing: in through rows, out through rows, turned around in shared memory.

Without the detour a warp would read a row in one piece and write a column in 32, or the other way round.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sparse_kernels.numba_cuda.library import cuda, float32
from sparse_kernels.numba_cuda.tile import WARP

WARPS = 8


@cache
def build_kernel(side: int = WARP, warps: int = WARPS) -> Any:
    """Return turn(source (rows, columns), target (columns, rows)), by squares of `side`."""
    # A column more than needed puts the elements of a column into different banks: a warp gets them all at once.
    padded = side + 1

    @cuda.jit
    def turn(source, target):  # type: ignore[no-untyped-def]
        rows, columns = source.shape
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        tiles_across = (columns + side - 1) // side
        top = cuda.blockIdx.x // tiles_across * side
        left = cuda.blockIdx.x % tiles_across * side
        square = cuda.shared.array((side, padded), float32)
        for i in range(warp, side, warps):
            if top + i < rows and left + lane < columns:
                square[i, lane] = source[top + i, left + lane]
        cuda.syncthreads()
        for i in range(warp, side, warps):
            if left + i < columns and top + lane < rows:
                target[left + i, top + lane] = square[lane, i]

    return turn


def transpose(source: Any, target: Any, side: int = WARP, warps: int = WARPS) -> None:
    """Write target (columns, rows) = source (rows, columns), both on the GPU, not empty, float32 or float16."""
    rows, columns = source.shape
    build_kernel(side, warps)[-(-rows // side) * -(-columns // side), (side, warps)](source, target)
