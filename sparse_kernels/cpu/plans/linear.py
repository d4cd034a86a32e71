"""Linear layers on the CPU: any pattern, all layouts.

tokens   token-major x as it lies, outputs along the vector (`token_major`): needs groups of rows as tall as a vector,
         or of few tokens as half a vector.
amx      the matrix unit, where the processor has one and threads have tokens enough (`third_linear`).
rows     tokens along the vector, panels of rows (`row_panels`). x is feature-major or blocked as it lies, or laid out
         so: of few tokens by every thread for itself (`small_batch`), block by block where every thread gets tokens
         (`token_blocks`), else in a pass of its own (`transpose_tiles`). Rows that share no columns have a kernel of
         their own (`unstructured_rows`).
pairs    as rows, two columns at a time in bfloat16: where that is allowed, and the processor multiplies pairs.

Weights may be rounded to bfloat16. Kernel tokens then reads two bytes a weight, which pays for few tokens. Kernel
rows is for many tokens, or tokens that lie along the vector as they come. It holds the rounded weights in float32,
because two bytes would be no faster there. Where activations may be rounded too, kernel pairs takes 0.58 to 0.75
times as long as rows or tokens. That holds for 128 to 2,048 tokens at 75% and 90% sparsity (Zen 4). The matrix unit
makes its six products of thirds all the same. Sums and results are float32 either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import NARROWEST, CpuTarget, find_cpu_target
from sparse_kernels.cpu.codegen.tile_registers import ROWS
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PAIRS, PAIRS_BY_UNIT
from sparse_kernels.cpu.kernels import (
    row_panels,
    small_batch,
    token_blocks,
    token_major,
    transpose_tiles,
    unstructured_rows,
)
from sparse_kernels.cpu.kernels.product_settings import ProductSettings
from sparse_kernels.cpu.kernels.row_panels import PanelReading
from sparse_kernels.cpu.kernels.token_blocks import BlockSettings
from sparse_kernels.cpu.kernels.token_major import TokenMajorForm, TokenMajorLayer
from sparse_kernels.cpu.kernels.transpose_tiles import TileLayer, TransposeCall
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, build_single_rows
from sparse_kernels.cpu.launch.kernel_calls import LinearCall
from sparse_kernels.cpu.launch.linear_call import Call, CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.layouts.panels import Panels, build_groups, build_panels, count_group_rows
from sparse_kernels.cpu.layouts.quads import FLOATS_ONLY, QuadArrays
from sparse_kernels.cpu.layouts.vector_grid import (
    CACHED,
    LARGE,
    TILE,
    VectorGrid,
    build_column_offsets,
    build_feature_major_grid,
    build_tiled_grid,
    build_token_blocked_grid,
)
from sparse_kernels.cpu.matrix_unit import third_linear
from sparse_kernels.cpu.matrix_unit.third_linear import MatrixPlan
from sparse_kernels.cpu.matrix_unit.third_tiles import TOKENS
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, copy_to_cache_line, give_back
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.formats import DenseWeight, Packed, round_packed
from sparse_kernels.formats.int8 import Int8Weight
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS

PRECISIONS = ("float32", "bfloat16-weights", "bfloat16")

# Share of weights from which on the matrix unit is the faster one. Tokens from which on this also holds for long rows
# of y, where that share is kept and tokens are not blocked. Tokens from which on those rows count as any other.
LEAST_DENSITY, SOME_TOKENS, ENOUGH_TOKENS = 0.2, 256, 512

# On AMD, where rows are permuted: full vectors of tokens a thread from which on no blocks are needed.
ENOUGH_VECTORS = 4


@dataclass(frozen=True)
class Choice:
    """What is decided about a layer before its weights are laid out: which kernel runs, and how.

    kernel: tokens, rows, pairs or amx. tile: of tokens or rows, vectors, and lanes of a vector, in registers. way:
    how x comes to kernel rows: laid out in `blocks` or in a `pass` of its own; "" leaves it to each call.
    """

    kernel: str
    tile: tuple[int, int, int]
    way: str = ""


class LinearLayer(NamedTuple):
    """A linear layer for which a kernel is chosen.

    packed: its weight. layout: of x and y. n: about how many tokens a call has. precision: what may be rounded.
    group_rows: how many rows of the weight share their columns. threads: that a call uses.
    """

    packed: Packed
    layout: str
    n: int
    precision: str
    group_rows: int
    threads: int

    @property
    def permuted(self) -> bool:
        """Whether kernel tokens has to put the rows of this weight back one by one."""
        return self.packed.pattern.format == "shflbw"

    @property
    def blocked(self) -> bool:
        """Whether x or y comes in tiles of tokens."""
        return self.layout in BLOCKED_LAYOUTS

    def fills_threads(self, lanes: int) -> bool:
        """Return whether the tokens give every thread some, in nearly equal shares of whole vectors."""
        return token_blocks.fills_threads(self.n, lanes, self.threads)


def describe_layer(packed: Packed, layout: str, n: int, precision: str = "float32") -> LinearLayer:
    """Return what the choice of a kernel needs to know of a layer, worked out once; threads are Numba's of now."""
    return LinearLayer(packed, layout, n, precision, count_group_rows(packed), count_threads())


@dataclass(frozen=True, eq=False)
class TokenPlan(CpuLinearPlan):
    """Token-major x read as it lies, y written as it lies: also where its rows are permuted (Shfl-BW)."""

    panels: Panels
    tile: tuple[int, int, int]  # tokens, vectors, lanes
    fused: bool
    kernel: str
    permuted: bool
    worth: QuadArrays = FLOATS_ONLY  # of whole numbers in eight bits: the scales of the panels' rows

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes + self.worth.scales.nbytes

    @property
    def _lanes(self) -> int:
        return self.tile[2]

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        (m, k), panels, permuted, target = self.shape, self.panels, self.permuted, find_cpu_target()
        step = _tokens_at_a_time(self.tile, n)
        own = token_major.gives_own_chunks(n, threads, permuted, target)
        chunk, block = token_major.choose_chunks(step, k, n, panels, threads, own, permuted)
        whole_chunks = permuted and -(-n // chunk) % threads == 0
        form = TokenMajorForm(
            step, *self.tile[1:], self.fused, permuted, panels.values.itemsize,
            token_major.choose_prefetch(n, step, target),
            token_major.packs_tokens(n, step, k, panels.density(k), target), whole_chunks,
        )  # fmt: skip
        waiting_tokens = threads * chunk if whole_chunks else -(-n // step) * step
        waiting = waiting_tokens * panels.row_ids.size if permuted else 0
        in_fours = token_major.waits_in_fours(step)
        layer = TokenMajorLayer(
            weights=panels.arrays, quads=self.worth, n=n, k=k, m=m, features=k, chunk=chunk,
            block=block, parts=threads,
            positions=panels.positions_in_fours(self.tile[2]) if in_fours else panels.positions,
            shares=threads if n * m >= token_major.WORTH_SHARING else 1, waiting=waiting,
        )  # fmt: skip
        needed = waiting + threads * token_major.count_chunk_elements(form, chunk, k)
        return KernelWithScratch(token_major.build_kernel(form).bind(LinearCall, layer), needed)

    def copy(self) -> TokenPlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy(), worth=self.worth.copy())


@dataclass(frozen=True, eq=False)
class RowPlan(CpuLinearPlan):
    """Tokens along the vector: x feature-major or blocked as it lies, or any x laid out so."""

    panels: Panels | SingleRows
    tile: tuple[int, int]  # rows, vectors
    target: CpuTarget
    kernel: str
    way: str = ""
    numbers: int = FLOATS

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    @property
    def _lanes(self) -> int:
        return self.target.lanes

    def copy(self) -> RowPlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy())

    def _prepared(self, n: int, threads: int) -> Call | KernelWithScratch:
        (m, k), lanes, layout = self.shape, self.target.lanes, self.layout
        fills = token_blocks.fills_threads
        if self.numbers == FLOATS and layout == "token_blocked" and not fills(n, self._tile_tokens, threads):
            return self._multiply_grid(build_token_blocked_grid(n // self._tile_tokens, lanes, k, m), threads)
        if layout in BLOCKED_LAYOUTS:
            x_layout = "token_major" if layout == "into_blocks" else "token_blocked"
            y_layout = "token_major" if layout == "out_of_blocks" else "token_blocked"
            return self._multiply_blocks((x_layout, y_layout), n, threads)
        if layout == "feature_major" and not self.way and lanes <= n < 2**31 // k:
            return self._multiply_grid(build_feature_major_grid(n, lanes), threads, build_column_offsets(k, n))
        if not self.way and small_batch.accepts_batch(self.panels, layout, n, self.target):
            return small_batch.bind_kernel(self.panels, self.shape, layout, self.target, n, threads)
        if self.way == "blocks" or (not self.way and fills(n, lanes, threads)):
            return self._multiply_blocks((layout, layout), n, threads)
        return self._multiply_tiles(n, threads)

    def _multiply_blocks(self, layouts: tuple[str, str], n: int, threads: int) -> KernelWithScratch:
        """Return the product block by block."""
        settings = BlockSettings(self.tile[1], self.target, layouts, self.numbers)
        return token_blocks.bind_kernel(self.panels, self.shape, settings, n, threads)

    def _multiply_tiles(self, n: int, threads: int) -> Call:
        """Return the product in three passes: tokens are packed into tiles, multiplied, and unpacked."""
        (m, k), lanes, vectors = self.shape, self.target.lanes, self.tile[1]
        pack, unpack = transpose_tiles.build_kernels(lanes, self.layout == "token_major")
        grid = build_tiled_grid(n, vectors, lanes, k, m)
        size = -(-grid.x_starts.size // vectors) * vectors * lanes
        product = self._multiply_grid(grid, threads)
        pack_x = pack.bind(TransposeCall, TileLayer(grid.x_starts, grid.x_stride, n, k, threads))
        unpack_y = unpack.bind(TransposeCall, TileLayer(grid.y_starts, grid.y_stride, n, m, threads))

        def call(x: int, y: int, bias: int, activation: int) -> bool:
            packed = borrow(size * (k + m))
            y_packed = packed.address + 4 * size * k
            pack_x(x, packed.address)
            product(packed.address, y_packed, bias, activation)
            unpack_y(y, y_packed)
            give_back(packed)
            return True

        return call

    def _multiply_grid(self, grid: VectorGrid, threads: int, offsets: NDArray[np.int32] | None = None) -> Call:
        """Return the product of laid out x, or of x as it lies, whose columns have these offsets."""
        settings = ProductSettings(self.target.fused, threads)
        if isinstance(self.panels, SingleRows):
            product = unstructured_rows.bind_product(self.panels, grid, offsets, settings)
        else:
            used = partial(self.panels.used, grid.x_stride)
            reading = PanelReading(self.tile[1], self.shape[1])
            product = row_panels.bind_product(self.panels, grid, reading, settings, used)
        return lambda x, y, bias, activation: product(x, y, bias, activation, 0, 0)


CpuPlan = TokenPlan | RowPlan | MatrixPlan


def prepare_linear(packed: Packed, layout: str, n: int, precision: str = "float32") -> CpuPlan:
    """Return the plan of a linear layer for about n tokens. Raises ValueError as `check_precision` does."""
    layer = describe_layer(packed, layout, n, precision)
    return build_plan(layer, choose_kernel(layer))


def prepare_int8_weights(weight: Int8Weight, layout: str, n: int) -> TokenPlan:
    """Return the plan of a linear layer that reads its weights as bytes, and x as it is, for about n tokens.

    It pays for few tokens, where a layer waits for its weights. Raises ValueError for a pattern whose rows do not
    share columns and fill vectors, or a layout but token_major.
    """
    layer = describe_layer(weight.packed, layout, n)
    target, tile = find_cpu_target(), choose_narrow_tile(layer)
    if layout != "token_major" or tile is None or tile[2] != target.lanes:
        raise ValueError(
            f"weights in eight bits are for token-major layers whose rows share columns and fill vectors of "
            f"{target.lanes}, which those of {weight.pattern} ({layout}) do not: they would gain nothing"
        )
    size, vectors, lanes = tile
    panels, k = build_panels(build_groups(weight.packed), vectors * lanes).in_bytes(), weight.shape[1]
    stages = token_major.count_stages(size, k, panels.density(k), n, target)
    scales = np.where(panels.row_ids < 0, np.float32(0), weight.scales[panels.row_ids])
    name = f"numba.{weight.pattern.format}.tokens{_tokens_at_a_time(tile, n)}x{vectors}.int8weights.{target.name}"
    worth = FLOATS_ONLY._replace(scales=copy_to_cache_line(scales.astype(np.float32)))
    weights = panels.in_stages(stages, k).copy()
    return TokenPlan(weight.shape, layout, weights, tile, target.fused, name, layer.permuted, worth)


def choose_kernel(layer: LinearLayer) -> Choice:
    """Return what is best for a layer as far as that is known without trying."""
    own = layer.blocked or (layer.n >= TOKENS * layer.threads and layer.fills_threads(ROWS))
    found = choose_matrix_kernel(layer) if own and _pays_by_matrix(layer) else None
    if found is None and layer.precision == "bfloat16" and _fill_vectors(layer):
        found = choose_pair_kernel(layer)
    return found or choose_vector_kernel(layer)


def _fill_vectors(layer: LinearLayer) -> bool:
    """Return whether the tokens give each thread as many vectors, hardly a lane empty.

    Otherwise kernel tokens takes less time.
    """
    lanes = find_cpu_target().lanes
    return 4 * layer.n >= 3 * lanes * layer.threads and layer.fills_threads(lanes)


def _pays_by_matrix(layer: LinearLayer) -> bool:
    """Return whether the matrix unit multiplies this weight faster than vectors, in a model.

    It costs it more to split x and to begin a panel, so rows must keep something: at 75% sparsity it is 1.0 to 1.4
    times as fast, at 90% 0.7 to 1.1 times (128 to 2,048 tokens). Permuted rows are put in their places for nothing.
    Where rows of y are far longer than those of x, its own copies of them and its weights, half as large again, cost
    few tokens more than it gains: 128 of them take 0.84 to 0.96 times the speed at 75% when weights are cold (1.05 to
    1.2 when they are not), 256 of them 1.03 to 1.3 times, but 0.9 to 1.0 at 90%.
    """
    m, k = layer.packed.shape
    dense_enough = layer.packed.nnz >= LEAST_DENSITY * m * k
    if m > 2 * k and layer.n < ENOUGH_TOKENS:
        return dense_enough and layer.n >= SOME_TOKENS and not layer.blocked
    return dense_enough or layer.permuted


def choose_matrix_kernel(layer: LinearLayer) -> Choice | None:
    """Return the matrix unit's kernel; None where there is no such unit, or it cannot multiply this weight."""
    wanted = find_cpu_target().matrix and layer.precision != "bfloat16-weights"
    possible = wanted and third_linear.accepts_weight(layer.packed)
    tiles = third_linear.count_row_tiles(layer.packed) if possible else None
    return None if tiles is None else Choice("amx", (tiles * ROWS, TOKENS // ROWS, ROWS))


def choose_pair_kernel(layer: LinearLayer) -> Choice | None:
    """Return the kernel for pairs of bfloat16, tokens along the vector; None where it is no faster than float32."""
    target = find_cpu_target()
    if not target.pairs or layer.group_rows == 1:
        return None
    # No wider tile: putting pairs together takes registers, and of 8 x 3 sums some would not stay in one.
    return Choice("pairs", (*row_panels.choose_tile(layer.group_rows, target), target.lanes), "blocks")


def choose_vector_kernel(layer: LinearLayer) -> Choice:
    """Return the best kernel for the vector unit."""
    tile = choose_narrow_tile(layer) if layer.layout == "token_major" else None
    if tile is None or not _few_enough(tile, layer.n) or _better_in_blocks(layer, tile):
        return Choice("rows", choose_row_tile(layer))
    return Choice("tokens", tile)


def _few_enough(tile: tuple[int, int, int], n: int) -> bool:
    """Return whether n tokens are so few that a tile of narrow vectors is no slower than tokens along the vector.

    Groups of 8 rows use half vectors of 16 lanes: up to 8 tokens have 0.95 to 1.1 times the speed. Groups of 4 would
    use quarters: one and two tokens had 0.7 to 1.05 times the speed. (1 and 2 threads, 50% to 90% sparsity, Zen 5.)
    """
    lanes, wide = tile[2], find_cpu_target().lanes
    return lanes == wide or n * wide <= 2 * lanes**2


def _better_in_blocks(layer: LinearLayer, tile: tuple[int, int, int]) -> bool:
    """Return whether blocks of tokens beat this tile of kernel tokens.

    A tile one vector wide has half the sums of one in a block that fills two vectors of tokens. To put permuted rows
    back costs nothing from a block, but there x has to be laid out. On Intel's processors x should not have long rows
    then, because of their second-level cache. On AMD's, kernel tokens has 1.02 to 1.1 times the speed where rows of x
    are twice as long as those of y. Otherwise the difference is within the noise (0.94 to 1.04 times), but where
    vectors of tokens are not full: 1.1 to 1.36 times.
    """
    (size, vectors, lanes), (m, k), n, threads = tile, layer.packed.shape, layer.n, layer.threads
    total = -(-n // lanes)
    if not layer.fills_threads(lanes):
        return False
    if vectors > 1 and layer.permuted and not find_cpu_target().shared:
        each = -(-total // threads)
        full = 16 * n >= 15 * each * threads * lanes
        if find_cpu_target().whole:
            return full and each < ENOUGH_VECTORS
        # One pass over the weights is enough. Otherwise more lies in memory than kernel tokens fetches ahead: x and
        # y, or x of a tile beside the weights.
        return (full and (k < 2 * m or each <= 2)) or n * (m + k) >= LARGE or 4 * size * k > CACHED
    return total >= 2 * threads and (vectors == 1 or (layer.permuted and k < 2 * m))


def choose_row_tile(layer: LinearLayer) -> tuple[int, int, int]:
    """Return (rows, vectors, lanes) of the register tile of kernel rows."""
    target, height = find_cpu_target(), layer.group_rows
    total = -(-layer.n // target.lanes)
    if height > 1:
        size, vectors = row_panels.choose_tile(height, target)
        if not layer.blocked:
            own = layer.layout == "token_major" and layer.fills_threads(target.lanes)
            together = -(-total // layer.threads) if own else total
            vectors = row_panels.choose_width((size, vectors), together, target)
        return size, vectors, target.lanes
    most = TILE if layer.blocked else min(TILE, total)
    return 1, max(1, most), target.lanes


def choose_token_tile(packed: Packed, target: CpuTarget) -> tuple[int, int, int] | None:
    """Return the register tile of kernel tokens for this weight; None where rows of a group fill no vector."""
    return _choose_token_tile(packed, count_group_rows(packed), target)


def _choose_token_tile(packed: Packed, height: int, target: CpuTarget) -> tuple[int, int, int] | None:
    if isinstance(packed, DenseWeight):
        # All rows of a dense weight share all columns. Only its last panel is filled up, wherever the rows end.
        height = 2 * target.lanes if height > target.lanes else target.lanes
    return token_major.choose_tile(height, target)


def choose_narrow_tile(layer: LinearLayer) -> tuple[int, int, int] | None:
    """Return the tile of kernel tokens, of halves of vectors where rows of a group fill no whole one."""
    wide = find_cpu_target().lanes
    targets = (replace(find_cpu_target(), lanes=lanes) for lanes in (wide, wide // 2))
    tiles = (_choose_token_tile(layer.packed, layer.group_rows, target) for target in targets)
    return next((tile for tile in tiles if tile is not None and tile[2] >= NARROWEST), None)


def build_plan(layer: LinearLayer, choice: Choice) -> CpuPlan:
    """Return the plan that runs a layer as chosen. Raises ValueError as `check_precision` does."""
    check_precision(layer.packed, layer.precision)
    if layer.precision != "float32":
        layer = layer._replace(packed=round_packed(layer.packed))
    if choice.kernel == "amx":
        return _build_matrix_plan(layer)
    if choice.kernel == "pairs":
        return _build_pair_plan(layer, choice)
    return _build_token_plan(layer, choice) if choice.kernel == "tokens" else _build_row_plan(layer, choice)


def _build_matrix_plan(layer: LinearLayer) -> MatrixPlan:
    """Return the plan by the matrix unit, and by vectors where sums are not finite."""
    packed = layer.packed

    def build_vector_plan() -> CpuLinearPlan:
        exact = describe_layer(packed, layer.layout, layer.n)
        return build_plan(exact, choose_vector_kernel(exact))

    panels = third_linear.build_linear_panels(packed)
    return MatrixPlan(packed.shape, layer.layout, panels, packed.pattern.format, build_vector_plan)


def _build_pair_plan(layer: LinearLayer, choice: Choice) -> RowPlan:
    """Return the plan by pairs of bfloat16."""
    packed, target, (size, vectors, _) = layer.packed, find_cpu_target(), choice.tile
    paired, numbers = build_panels(build_groups(packed), size).paired(), PAIRS_BY_UNIT if target.pairs else PAIRS
    name = f"numba.{packed.pattern.format}.pairs{size}x{vectors}.{target.name}"
    return RowPlan(packed.shape, layer.layout, paired, (size, vectors), target, name, choice.way, numbers)


def _build_token_plan(layer: LinearLayer, choice: Choice) -> TokenPlan:
    """Return the plan by kernel tokens."""
    packed, target, (size, vectors, lanes) = layer.packed, find_cpu_target(), choice.tile
    narrow = layer.precision != "float32" and lanes == target.lanes
    partly = "" if lanes == target.lanes else f"of{lanes}"
    tokens = _tokens_at_a_time(choice.tile, layer.n)
    name = f"numba.{packed.pattern.format}.tokens{tokens}x{vectors}{partly}{'.bf16' if narrow else ''}.{target.name}"
    cut, k = build_panels(build_groups(packed), vectors * lanes), packed.shape[1]
    cut = cut.narrowed() if narrow else cut
    stages = token_major.count_stages(size, k, cut.density(k), layer.n, target)
    weights = cut.in_stages(stages, k).copy()
    return TokenPlan(packed.shape, layer.layout, weights, choice.tile, target.fused, name, layer.permuted)


def _build_row_plan(layer: LinearLayer, choice: Choice) -> RowPlan:
    """Return the plan by kernel rows, or by its counterpart for rows that share no columns."""
    packed, n, target, (size, vectors, lanes) = layer.packed, layer.n, find_cpu_target(), choice.tile
    weights: Panels | SingleRows
    if size == 1:
        together = small_batch.choose_lanes(n, target) if vectors == 1 and not choice.way else None
        weights = build_single_rows(build_groups(packed), packed.shape[1], vectors * lanes, together).copy()
    else:
        weights = build_panels(build_groups(packed), size).copy()
    name = f"numba.{packed.pattern.format}"
    if not choice.way and small_batch.accepts_batch(weights, layer.layout, n, target):
        name = f"{name}.few{size}x{small_batch.choose_lanes(n, target)}.{target.name}"
    else:
        name = f"{name}.rows{size}x{vectors}{choice.way and '.' + choice.way}.{target.name}"
    return RowPlan(packed.shape, layer.layout, weights, (size, vectors), target, name, choice.way)


def check_precision(packed: Packed, precision: str) -> None:
    """Raise ValueError unless this precision is float32, or one that the pattern can gain from."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: known are {', '.join(PRECISIONS)}")
    if precision == "bfloat16-weights" and choose_token_tile(packed, find_cpu_target()) is None:
        raise ValueError(
            f"bfloat16 weights are for rows that share columns and fill vectors of {find_cpu_target().lanes}, which "
            f"those of {packed.pattern} do not: they would gain nothing"
        )
    if precision == "bfloat16" and count_group_rows(packed) == 1 and not isinstance(packed, DenseWeight):
        raise ValueError(
            f"bfloat16 is for rows that share columns, which those of {packed.pattern} do not: it would gain nothing"
        )


def lays_out_tokens(packed: Packed) -> bool:
    """Return whether many tokens are laid out block by block, so that it saves time to get or give them so."""
    return choose_token_tile(packed, find_cpu_target()) is None or packed.pattern.format == "shflbw"


def _tokens_at_a_time(tile: tuple[int, int, int], n: int) -> int:
    """Return the tokens of a register tile; one or two would leave most of a large one unused."""
    return tile[0] if n > 2 else 2
