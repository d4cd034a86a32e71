"""Whole-number layers for the N:M kernels, and bugs to plant in them, each of which must be caught."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from mutations import Case, Mutation
from vector_cases import bits, numbers

from sparse_kernels.cuda import nm
from sparse_kernels.cuda.program import Launch
from sparse_kernels.cuda.vector_tiles import convert_to_bits
from sparse_kernels.formats import NMWeight, pack, unpack
from sparse_kernels.patterns import NM, Pattern


def whole_numbers(rng: np.random.Generator, shape: int | tuple[int, ...], most: int) -> np.ndarray:
    """float32, -most to most without 0, so that a product that is lost or repeated shows."""
    return (rng.integers(1, most + 1, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def pruned(rng: np.random.Generator, pattern: Pattern, weight: np.ndarray, sparsity: float, also_drop: float = 0.0):
    """weight (m, k) packed, and as a matrix; a share `also_drop` of what the pattern keeps is dropped as well."""
    mask = pattern.mask(np.abs(weight).astype(float), sparsity) & (rng.random(weight.shape) >= also_drop)
    return pack(weight, mask, pattern), np.where(mask, weight, 0.0)


def exact_case(launches: Sequence[Launch], weight: np.ndarray, x: np.ndarray, bias: np.ndarray, dtype: str) -> Case:
    """A layer of whole numbers whose sums float32 holds in any order: the result is the exact one, rounded once."""
    element = np.float16 if dtype == "float16" else np.uint16
    exact = weight.astype(float) @ x + bias[:, None]
    expected = numbers(convert_to_bits(exact.astype(np.float32), dtype), dtype)
    out = np.empty(exact.shape, element)
    return Case(launches, bits(x, dtype).view(element), bias, out, expected, np.zeros(exact.shape))


def program_on(cores: str, packed: NMWeight, dtype: str) -> nm.TensorCores | nm.OrdinaryCores:
    """The program on "tensor" or "ordinary" cores, whichever would be chosen."""
    if cores == "tensor":
        return nm.TensorCores.of_weight(unpack(packed), dtype, 108)
    return nm.OrdinaryCores.of_weight(unpack(packed), nm.choose_tile_depth(packed.pattern), dtype, 40)


def case_of(
    rng: np.random.Generator,
    cores: str,
    size: tuple[int, int, int],
    pattern: NM = NM(2, 4),  # noqa: B008 - a frozen value
    dtype: str = "float16",
    *,
    tile: nm.NMTile | None = None,
    columns: int | None = None,
    also_drop: float = 0.0,
) -> Case:
    """A layer of size (m, k, n) on these cores, with a chosen tile or number of columns a lane."""
    m, k, n = size
    packed, weight = pruned(rng, pattern, whole_numbers(rng, (m, k), 100), pattern.sparsity, also_drop)
    program = program_on(cores, packed, dtype)
    launches = program.launches(n, None)
    if tile is not None and isinstance(program, nm.TensorCores):
        launches = program.tiled(tile, n, None)
    if columns is not None and isinstance(program, nm.OrdinaryCores):
        launches = program.with_lanes_of(columns, n, None)
    return exact_case(launches, weight, whole_numbers(rng, (k, n), 4), whole_numbers(rng, m, 1000), dtype)


@functools.cache
def tensor() -> Case:
    """Many stages; more tile rows than the raster; the last tile has one of its two groups of rows."""
    return case_of(np.random.default_rng(1), "tensor", (600, 500, 72), tile=nm.TILES[1])


@functools.cache
def tensor_odd() -> Case:
    """Rows of x and out that are not aligned; the last stage lies where the result passes through.

    Nothing lies between the end of x and what nobody may touch.
    """
    return case_of(np.random.default_rng(2), "tensor", (21, 304, 7), tile=nm.TILES[1])


@functools.cache
def ordinary() -> Case:
    """Many tiles of x, several blocks."""
    return case_of(np.random.default_rng(3), "ordinary", (150, 500, 72))


@functools.cache
def ordinary_odd() -> Case:
    """Rows of x and out that are not aligned; x ends as above."""
    return case_of(np.random.default_rng(4), "ordinary", (21, 304, 7))


MUTATIONS = [
    Mutation(bug, case, edit)
    for case, edits in (
        (
            tensor,
            {
                "metadata of the other half of the columns": (
                    "lane / 4 * 2 + lane % 2]",
                    "lane / 4 * 2 + (lane + 1) % 2]",
                ),
                "metadata of the stage's first step for all": (
                    "metadata[place * 16",
                    "metadata[place / STEPS * STEPS * 16",
                ),
                "rows of x read twice": ("step * 32 + lane, ", "step * 32 + lane % 16, "),
                "no barrier once a stage has landed": ("__syncthreads();              // so it has", "// so it has"),
                "waits for one group too few": ("cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),
                "multiplies the next stage": ("multiply(shared + index %", "multiply(shared + (index + 1) %"),
                "copies into the stage in use": ("load(index + STAGES - 1);", "load(index + STAGES);"),
                "copies before the barrier": (
                    "    __syncthreads();              // so it has for all threads, and all are done with "
                    "the stage before\n"
                    "    load(index + STAGES - 1);     // into the place of the stage before\n",
                    "    load(index + STAGES - 1);\n    __syncthreads();\n",
                ),
                "no barrier before the result is read": ("  __syncthreads();\n  store(", "  store("),
                "x is read past its last row": ("first_row + row < k ? n - column : 0;", "n - column;"),
                "out is written past its last row": (
                    "first_row + row < m ? n - first_column - column : 0;",
                    "n - first_column - column;",
                ),
                "weights are read past the last group": (
                    "first_group + i < groups ? first_group + i : groups - 1",
                    "first_group + i",
                ),
                "bias of the block's first rows": ("bias[first_row + row]", "bias[row]"),
                "every strip of a warp is the first": ("    move_up(sums);\n", ""),
                "upper and lower rows exchanged": ("half * 8 + lane / 4", "(1 - half) * 8 + lane / 4"),
                "blocks of the last tile rows overlap": (
                    "int height = tile_rows - first < RASTER ? tile_rows - first : RASTER;",
                    "int height = RASTER;",
                ),
            },
        ),
        (
            tensor_odd,
            {
                "no barrier before the stages are overwritten": ("  __syncthreads();\n  u16* tile", "  u16* tile"),
                "x is read past its last column": (
                    "copy_8<VECTOR>(stage + x_offset(row, chunk), from, columns)",
                    "copy_8<VECTOR>(stage + x_offset(row, chunk), from, columns > 0 ? 8 : 0)",
                ),
                "out is written past its last column": ("e < 8 && e < columns", "e < 8"),
            },
        ),
        (
            ordinary,
            {
                "column of the tile lost": ("(entry >> 16) * WIDTH", "(entry >> 17) * WIDTH"),
                "first of two weights repeated": ("add(sums[r], two.y, tile)", "add(sums[r], two.x, tile)"),
                "no barrier once a tile has landed": ("__syncthreads();     // so it has", "// so it has"),
                "no barrier before a tile is overwritten": (
                    "    __syncthreads();\n  }\n\n  const int first_row",
                    "  }\n\n  const int first_row",
                ),
                "waits for one group too few": ("cp_async_wait<1>", "cp_async_wait<2>"),
                "multiplies the next tile": (
                    "const unsigned char* stage = shared + t % 2",
                    "const unsigned char* stage = shared + (t + 1) % 2",
                ),
                "rows of the warp beside": ("+ warp * WARP_ROWS * slots;", "+ (warp ^ 1) * WARP_ROWS * slots;"),
                "x is read past its last row": ("row < k ? n - column : 0;", "n - column;"),
                "out is written past its last row": ("min(first_row + WARP_ROWS, m)", "first_row + WARP_ROWS"),
                "every row of a warp is the first": ("    move_up(sums);\n", ""),
                "last slots lost": ("slot < slots; slot += 2", "slot < slots - 2; slot += 2"),
                "entries of the tile after": ("* tiles + t) *", "* tiles + (t + 1) % tiles) *"),
            },
        ),
        (
            ordinary_odd,
            {
                "x is read past its last column": ("if (count > 2 * i + 1)", "if (count > 2 * i)"),
                "out is written past its last column": ("if (column + c < n) to[c]", "to[c]"),
            },
        ),
    )
    for bug, edit in edits.items()
]
