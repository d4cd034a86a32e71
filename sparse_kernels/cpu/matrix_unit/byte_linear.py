"""Linear layers in eight bits by the matrix unit (`byte_tiles`), a block of tokens at a time; threads share tokens.

A thread reads a block's x as bytes and lays quads of features out with tokens along the vector. It passes panels
over them, each over all tokens of the block before the next one. Their sums wait until rows of y can be written in
long runs: for all panels, or if rows are in order for those that stay in the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.quantize import QuantizeForm, locate_worth, quantize_row
from sparse_kernels.cpu.codegen.register_tiles import tokens_to_lanes
from sparse_kernels.cpu.codegen.tile_operands import (
    Epilogue,
    GatherBuffers,
    Matrix,
    MatrixSums,
    NextQuads,
    QuadInput,
    TileWeights,
    TokenRows,
    WaitingSums,
)
from sparse_kernels.cpu.codegen.tile_registers import ROW_BYTES, ROWS
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.quads import QuadArrays
from sparse_kernels.cpu.matrix_unit.byte_panels import ByteArrays, BytePanels
from sparse_kernels.cpu.matrix_unit.byte_tiles import (
    FINISHED,
    GATHERED_BYTES,
    STEP,
    TOKENS,
    byte_tile,
    finish_byte_tokens,
    gather_quads,
)
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.formats.int8 import QUAD

# Bytes of x and of waiting sums of a block that stay in the second-level cache while weights pass by.
CACHED_BYTES = 700_000

# Bytes of waiting sums of 32 tokens, if rows are in order. The longer the runs in which rows of y are written, the
# better the hardware foresees them: those of 32 rows take 1.2 to 2 times the time of whole rows (2,048 tokens).
RUN_BYTES = 512_000


class ByteScratch(NamedTuple):
    """Scratch memory of a thread.

    tiles: of tokens in a block. panels: whose sums wait together. row_bytes: of a token read as bytes, before it is
    laid out. x_bytes, y_bytes: of x and of waiting sums of a tile. thread_bytes: of all.
    """

    tiles: int
    panels: int
    row_bytes: int
    x_bytes: int
    y_bytes: int
    thread_bytes: int


# Bytes of the steps of a tile's tokens.
STEPS_BYTES = TOKENS * 4


def plan_scratch(panels: BytePanels, k: int, n: int, threads: int) -> ByteScratch:
    """Return the scratch memory for n tokens of k features, shared by so many threads."""
    units = math.ceil(math.ceil(n / ROWS) / threads)
    each = math.ceil(units * ROWS / TOKENS)
    steps = -(-k // (STEP * QUAD))
    x_bytes = steps * STEP * TOKENS * QUAD + STEPS_BYTES
    rows, together = panels.row_tiles * ROWS, len(panels.table)
    if panels.in_order:
        together = max(1, min(together, RUN_BYTES // (rows * TOKENS * 4)))
    y_bytes = together * rows * TOKENS * 4
    tiles = max(1, min(each, CACHED_BYTES // (x_bytes + y_bytes)))
    # A row is written in whole vectors.
    row_bytes = steps * STEP * QUAD + ROW_BYTES
    fixed = tile_registers.SAVED_BYTES + 2 * GATHERED_BYTES + TOKENS * row_bytes
    return ByteScratch(tiles, together, row_bytes, x_bytes, y_bytes, fixed + tiles * (x_bytes + y_bytes))


@dataclass(frozen=True, eq=False)
class MatrixBytePlan(CpuLinearPlan):
    """Token-major x, read as bytes and multiplied by the matrix unit.

    quads: what sums are worth, for the rows of the matrix. gathers: quads are gathered; else all of them are
    multiplied in their order. own_steps: x is read by each token's own step.
    """

    panels: BytePanels
    quads: QuadArrays
    kernel: str
    gathers: bool
    own_steps: bool
    emulated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes + sum(array.nbytes for array in self.quads)

    @property
    def _lanes(self) -> int:
        return ROWS

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        m, k = self.shape
        parts = min(threads, -(-n // ROWS))
        scratch = plan_scratch(self.panels, k, n, parts)
        form = ByteLinearForm(self.panels.row_tiles, int(self.gathers), int(self.own_steps), int(self.emulated))
        layer = ByteLayer(self.panels.arrays, self.panels.positions, self.quads, n, k, m, scratch, parts)
        return KernelWithScratch(build_kernel(form).bind(LinearCall, layer), parts * scratch.thread_bytes // 4)

    def copy(self) -> MatrixBytePlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy(), quads=self.quads.copy())


class ByteLayer(NamedTuple):
    """What the kernel knows before it is called.

    weights: arrays of the panels. positions: uint32, where each row of y lies among the panels' rows. quads: what
    sums are worth. n, k, m: tokens, features of x and of y. scratch: of each thread. parts: threads, at most as many
    as there are vectors of 16 tokens.
    """

    weights: ByteArrays
    positions: NDArray[np.uint32]
    quads: QuadArrays
    n: int
    k: int
    m: int
    scratch: ByteScratch
    parts: int


class ByteLinearForm(NamedTuple):
    """What is known of a kernel when it is compiled.

    row_tiles: of a panel. gathers: as `MatrixByteForm` says. own_steps: of each token. emulated: the matrix unit is.
    """

    row_tiles: int
    gathers: int
    own_steps: int
    emulated: int


class ByteBuffers(NamedTuple):
    """Scratch memory of a part: addresses of gathered quads, of rows of bytes, of x, of waiting sums."""

    gathered_at: int
    rows_at: int
    x_at: int
    y_at: int


@inline
def read_block(form: Any, call: LinearCall, layer: ByteLayer, tokens: tuple[int, int], buffers: ByteBuffers) -> None:
    """Read the x of a block of tokens, from one to before another, as bytes; lay quads out, tokens side by side.

    The steps of a tile's tokens lie behind its quads.
    """
    k, scratch = layer.k, layer.scratch
    quads, reading_at = (k + QUAD - 1) // QUAD, layer.quads.reading.ctypes.data
    x_at = buffers.x_at
    for first in range(tokens[0], tokens[1], TOKENS):
        left = min(tokens[1] - first, TOKENS)
        steps_at = x_at + scratch.x_bytes - STEPS_BYTES
        for t in range(left):
            here = buffers.rows_at + t * scratch.row_bytes
            quantize_row(form, call.x_at + (first + t) * k * 4, here, k, reading_at, steps_at + t * 4)
        for half in range(0, left, ROWS):
            source = Matrix(buffers.rows_at + half * scratch.row_bytes, scratch.row_bytes // 4)
            tokens_to_lanes((ROWS, FLOATS), source, Matrix(x_at + half * 4, TOKENS), left - half, quads)
        x_at += scratch.x_bytes


@inline
def multiply_panels(
    form: Any, layer: ByteLayer, panels: tuple[int, int], tokens: tuple[int, int], buffers: ByteBuffers, phase: int
) -> int:
    """Multiply a block of tokens by panels, from one to before another; return the phase of what is gathered then."""
    row_tiles, gathers, _, emulated = form
    values, columns, table = layer.weights
    values_at, columns_at, scratch = values.ctypes.data, columns.ctypes.data, layer.scratch
    x_bytes, half_bytes = scratch.x_bytes, ROW_BYTES
    first, stop = panels
    for panel in range(first, stop):
        steps = table[panel, 2]
        weights = TileWeights(values_at + table[panel, 0], columns_at + table[panel, 1] * 4, steps)
        x_tile, sums_at = buffers.x_at, buffers.y_at + (panel - first) * row_tiles * ROWS * TOKENS * 4
        behind = min(panel + 1, table.shape[0] - 1)
        for token in range(tokens[0], tokens[1], TOKENS):
            left = tokens[1] - token
            then, next_x = (panel, x_tile + x_bytes) if left > TOKENS else (behind, buffers.x_at)
            following = NextQuads(columns_at + table[then, 1] * 4, next_x, next_x + half_bytes)
            x, gathered = QuadInput(x_tile, x_tile + half_bytes), GatherBuffers(buffers.gathered_at, phase)
            sums = MatrixSums(sums_at, 2 if left > ROWS else 1)
            byte_tile((emulated, row_tiles, gathers), weights, x, following, gathered, sums)
            phase += steps
            x_tile = next_x
            sums_at += scratch.y_bytes
    return phase


@inline
def finish_panels(
    form: Any, call: LinearCall, layer: ByteLayer, rows: tuple[int, int], tokens: tuple[int, int],
    buffers: ByteBuffers,
) -> None:  # fmt: skip
    """Finish rows, from one to before another, of the waiting sums of a block of tokens."""
    first, count = rows[0], rows[1] - rows[0]
    m, scratch, positions_at = layer.m, layer.scratch, layer.positions.ctypes.data
    finish_at, sums_at, x_at = call.bias_at + first * 4, buffers.y_at, buffers.x_at
    for token in range(tokens[0], tokens[1], TOKENS):
        for half in range(0, min(tokens[1] - token, TOKENS), FINISHED):
            worth = locate_worth(layer.quads, first, x_at + scratch.x_bytes - STEPS_BYTES + half * 4)
            sums = WaitingSums(sums_at + half * 4, positions_at, count)
            y = TokenRows(call.y_at + ((token + half) * m + first) * 4, m, tokens[1] - token - half)
            finish_byte_tokens(form, sums, y, Epilogue(finish_at, call.activation, worth))
        x_at += scratch.x_bytes
        sums_at += scratch.y_bytes


@cache
def build_kernel(form: ByteLinearForm) -> ParallelKernel:
    """Return the loops for token-major x and y. It is called with `LinearCall` and `ByteLayer`."""
    if not (form.emulated or tile_registers.is_available()):
        raise RuntimeError("this process has no matrix unit: use the vector unit, or emulate the matrix unit")
    numbers, unit_form, own = tuple(form), (form.emulated,), (form.own_steps,)
    read_form, rows, gathers = tuple(QuantizeForm(ROWS, 1, form.own_steps)), form.row_tiles * ROWS, form.gathers

    @build_parallel_kernel
    def multiply(part: int, call: LinearCall, layer: ByteLayer) -> None:
        scratch, n, panels, columns_at = layer.scratch, layer.n, len(layer.weights[2]), layer.weights[1].ctypes.data
        units = (n + ROWS - 1) // ROWS
        saved_at = call.scratch_at + part * scratch.thread_bytes
        gathered_at = saved_at + tile_registers.SAVED_BYTES
        rows_at = gathered_at + 2 * GATHERED_BYTES
        x_at = rows_at + TOKENS * scratch.row_bytes
        buffers = ByteBuffers(gathered_at, rows_at, x_at, x_at + scratch.tiles * scratch.x_bytes)
        first, end = units * part // layer.parts * ROWS, min(units * (part + 1) // layer.parts * ROWS, n)
        tile_registers.configure_tiles(unit_form, saved_at)
        while first < end:
            tokens = first, min(first + scratch.tiles * TOKENS, end)
            read_block(read_form, call, layer, tokens, buffers)
            phase = 0
            if gathers:
                gather_quads(columns_at, x_at, x_at + ROW_BYTES, gathered_at)
            for panel in range(0, panels, scratch.panels):
                some = panel, min(panel + scratch.panels, panels)
                phase = multiply_panels(numbers, layer, some, tokens, buffers, phase)
                finish_panels(own, call, layer, (panel * rows, min(some[1] * rows, layer.m)), tokens, buffers)
            first = tokens[1]
        tile_registers.restore_tiles(unit_form, saved_at)

    return multiply
