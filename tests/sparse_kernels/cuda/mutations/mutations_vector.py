"""Bugs to plant in vector.cu. Each must be caught by one of these layers, whatever hides it on another machine."""

from __future__ import annotations

import functools

import numpy as np
from mutations import Case, Mutation
from vector_cases import Layer, case_of, linear

from sparse_kernels import ShflBW, VectorWise
from sparse_kernels.shapes import Conv2dShape


@functools.cache
def ampere() -> Case:
    """cp.async, six tiles a group; a part of the columns and of the last group's rows is missing."""
    return case_of(linear(ShflBW(32), 50, 190, 40, sparsity=0, width=64), np.random.default_rng(1))


@functools.cache
def ampere_tall() -> Case:
    """Several strips of 16 rows a warp, two warps above each other, and out of whole pages of memory."""
    return case_of(linear(ShflBW(64), 96, 90, 64, sparsity=0.4, width=128), np.random.default_rng(2))


@functools.cache
def ampere_flat() -> Case:
    """More threads than 16-byte pieces of a tile's weights."""
    return case_of(linear(VectorWise(16), 40, 90, 40, sparsity=0.1, width=128), np.random.default_rng(7))


@functools.cache
def turing() -> Case:
    """Copies through registers, products 8 deep."""
    return case_of(linear(VectorWise(32), 50, 190, 40, sparsity=0, architecture="sm_75"), np.random.default_rng(3))


@functools.cache
def volta() -> Case:
    """The quad pairs' products."""
    return case_of(linear(VectorWise(32), 50, 90, 40, sparsity=0, architecture="sm_70"), np.random.default_rng(4))


@functools.cache
def any_columns() -> Case:
    """Copies element by element."""
    return case_of(linear(VectorWise(16), 20, 90, 37, sparsity=0.2), np.random.default_rng(5))


def convolution(architecture: str) -> Case:
    """Strides, paddings and dilations differ in both directions; two tiles a group."""
    shape = Conv2dShape(16, 6, 7, 8, 20, 3, 3, (2, 1), (2, 1), (1, 2))
    return case_of(Layer(VectorWise(16), shape, 0.3, architecture=architecture), np.random.default_rng(6))


@functools.cache
def ampere_convolution() -> Case:
    """By cp.async."""
    return convolution("sm_80")


@functools.cache
def turing_convolution() -> Case:
    """Through registers."""
    return convolution("sm_75")


LOADS = {
    "waits for one group too few": ("cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),
    "no barrier once a tile has landed": ("    __syncthreads();              // that", "    // that"),
    "copies into the tile in use": ("copy(shared + free_stage *", "copy(shared + stage *"),
    "multiplies the stage that is being filled": (
        "const unsigned char* landed = shared + stage *",
        "const unsigned char* landed = shared + free_stage *",
    ),
    "no empty group after the last copy": (
        "    cp_async_commit();  // an empty",
        "    if (ahead < tiles) cp_async_commit();  //",
    ),
    "places of the tile before": ("next = sources_of(copier, ahead + 1)", "next = sources_of(copier, ahead)"),
    "weights of the tile before": ("STAGE_BYTES, copier, ahead,", "STAGE_BYTES, copier, ahead - 1,"),
    "all threads copy the first rows": ("copier.row = threadIdx.x / PIECES * ROWS", "copier.row = 0"),
    "rows of x in the wrong order": ("sources.offsets.at[i]), reads", "sources.offsets.at[ROWS - 1 - i]), reads"),
    "padding is read": ("return own.inside && offset >= 0;", "return own.inside;"),
    "x is read past its last column": ("own.inside = column < n;", "own.inside = true;"),
    "written with another swizzle than read": (
        "cp_async16(stage + x_byte(copier.row + i, copier.first_column)",
        "cp_async16(stage + x_byte(copier.row, copier.first_column) + i * 128",
    ),
    "the last tile of a group is lost": (
        "tiles = starts[group + 1] - start;",
        "tiles = starts[group + 1] - start - 1;",
    ),
}

WEIGHTS = {"copied past the tile's end": ("if (piece < WEIGHT_BYTES / 16) cp_async16", "cp_async16")}

PRODUCTS = {
    "a neighbour's fragment": ("tile * 512 + lane * 16", "tile * 512 + (lane ^ 1) * 16"),
    "the strips of a warp exchanged": ("warp_m * ROW_TILES + i;", "warp_m * ROW_TILES + (ROW_TILES - 1 - i);"),
    "the upper warps read the lower rows": ("(V / 16) + warp_m * ROW_TILES + i;", "(V / 16) + i;"),
    "both halves of the depth exchanged": ("a[i].word, b[0], b[1]", "a[i].word, b[1], b[0]"),
    "the second 8 columns are the first": ("+ lane / 16 * 8;", ";"),
    "one product of a tile is lost": (
        "step < BK / 16; ++step) {\n      multiply(",
        "step < BK / 16 - 1; ++step) {\n      multiply(",
    ),
}

RESULTS = {
    "the result is written over the last tile": ("  __syncthreads();  // the patches", "  // the patches"),
    "read before the warp has written": ("to_patch(patch, sums[0]);\n    __syncwarp();", "to_patch(patch, sums[0]);"),
    "every strip of a warp is the first": ("    move_up(sums);\n", ""),
    "overwritten before the warp has read": ("    __syncwarp();  // before", "    // before"),
    "warps share a patch": ("shared + warp * PATCH_BYTES", "shared + warp_m * PATCH_BYTES"),
    "bias of the packed row": ("bias[row_id]", "bias[row]"),
    "rows of the strip before": ("rows + 16 * i", "rows"),
    "results past the last column": (" || column >= columns_left", ""),
    "padding rows are written": ("row_id < 0 || ", ""),
    "rows keep their packed place": ("static_cast<long long>(row_id) * n", "static_cast<long long>(row) * n"),
}

THROUGH_REGISTERS = {
    "no barrier after a tile": (
        "% 2 * STAGE_BYTES, held, copier);\n    __syncthreads();",
        "% 2 * STAGE_BYTES, held, copier);",
    ),
    "no barrier after the first tile": (
        "next = sources_of(copier, 1);\n  __syncthreads();",
        "next = sources_of(copier, 1);",
    ),
    "written over the tile in use": ("put(shared + (tile + 1) % 2", "put(shared + tile % 2"),
    "places are one tile late": ("next = sources_of(copier, tile + 2);", "next = sources_of(copier, tile + 1);"),
    "the halves of the weights mixed up": ("a_low[2] = {a[0], a[1]}", "a_low[2] = {a[0], a[2]}"),
}

OUTSIDE = {"what was there before": ("    held.x[i] = Piece{};\n", "")}

QUAD_PAIRS = {
    "columns of the other half": ("half = a[i][quarter / 2]", "half = a[i][quarter % 2]"),
    "the four upper rows are the lower": ("tile + (lane % 8 + 8 * upper) * 16", "tile + (lane % 8) * 16"),
    "columns of the other quad pairs": (
        "quad_pair / 2 * (WARP_COLUMNS / 2) + j",
        "quad_pair % 2 * (WARP_COLUMNS / 2) + j",
    ),
    "rows of the result exchanged": ("row + (c & 2)) *", "row + (c & 4) / 2) *"),
}

IMAGES = {
    "the tap's column is forgotten": ("own.left + (tap & 0xffff)", "own.left"),
    "above the image is read": ("row < static_cast<u32>(image.h) && ", ""),
    "padding of the other side": ("* image.stride_w - image.pad_w", "* image.stride_w - image.pad_h"),
    "strides exchanged": ("* image.stride_h - image.pad_h", "* image.stride_w - image.pad_h"),
    "another image of the batch": ("+ column % image.batch", ""),
    "positions counted by input columns": ("position / image.out_w", "position / image.w"),
    "taps of the group's first tile": ("places_of(copier.taps, tile)", "places_of(copier.taps, 0)"),
}

ELEMENTS = {"neighbours are copied too": ("threadIdx.x % PIECES * COPY", "threadIdx.x % PIECES / 2 * 2 * COPY")}

CASES = (
    (ampere, LOADS),
    (ampere_flat, WEIGHTS),
    (ampere_tall, PRODUCTS | RESULTS),
    (turing, THROUGH_REGISTERS),
    (turing_convolution, OUTSIDE),
    (volta, QUAD_PAIRS),
    (ampere_convolution, IMAGES),
    (any_columns, ELEMENTS),
)

MUTATIONS = [Mutation(bug, case, edit) for case, edits in CASES for bug, edit in edits.items()]
