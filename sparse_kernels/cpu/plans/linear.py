"""Linear layers on the CPU: any pattern, all layouts.

tokens   token-major x as it lies, outputs along the vector: needs groups of rows as tall as a vector, or of few
         tokens as half a vector.
amx      the matrix unit, where the processor has one and threads have tokens enough (`matrix`).
rows     tokens along the vector, panels of rows. x is feature-major or blocked as it lies, or laid out so: of few
         tokens by every thread for itself (`few`), block by block where every thread gets tokens (`blocks`), else in
         a pass of its own (`transpose`).
single   the same for rows that share no columns.
pairs    as rows, two columns at a time in bfloat16: where that is allowed, and the processor multiplies pairs.

Weights may be rounded to bfloat16. Kernel tokens then reads two bytes a weight, which pays for few tokens. Kernel
rows, where tokens are many or lie along the vector as they come, holds the rounded weights in float32, because two
bytes would be no faster there. Where activations may be rounded too, kernel pairs takes 0.58 to 0.75 times as long as
rows or tokens for 128 to 2,048 tokens at 75% and 90% sparsity (Zen 4); the matrix unit, where that is taken, makes
its six products of thirds all the same. Sums and results are float32 either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import amx_tiles as amx
from sparse_kernels.cpu.codegen.cpu_target import NARROWEST, CpuTarget, host
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PAIRS, PAIRS_BY_UNIT
from sparse_kernels.cpu.kernels import (
    amx_linear as matrix,
)
from sparse_kernels.cpu.kernels import (
    row_panels as rows,
)
from sparse_kernels.cpu.kernels import (
    small_batch as few,
)
from sparse_kernels.cpu.kernels import (
    token_blocks as blocks,
)
from sparse_kernels.cpu.kernels import (
    token_major as tokens,
)
from sparse_kernels.cpu.kernels import (
    transpose_tiles as transpose,
)
from sparse_kernels.cpu.kernels import (
    unstructured_rows as single,
)
from sparse_kernels.cpu.kernels.amx_linear import MatrixPlan
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, single_rows
from sparse_kernels.cpu.launch.linear_call import Call, CpuLinearPlan, KernelWithScratch
from sparse_kernels.cpu.layouts.panels import Panels, group_height, groups, panels
from sparse_kernels.cpu.layouts.vector_grid import (
    CACHED,
    LARGE,
    TILE,
    VectorGrid,
    as_it_lies,
    columns,
    in_tiles,
    whole_tiles,
)
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, give_back
from sparse_kernels.formats import DenseWeight, Packed, rounded
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS

PRECISIONS = ("float32", "bfloat16-weights", "bfloat16")

# Share of weights from which on the matrix unit is the faster one; tokens from which on also for long rows of y where
# that share is kept and tokens are not blocked; tokens from which on as for other rows.
LEAST_DENSITY, SOME_TOKENS, ENOUGH_TOKENS = 0.2, 256, 512

# Full vectors of tokens for each thread from which on whole vectors on AMD need no blocks where rows are permuted.
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


@dataclass(frozen=True, eq=False)
class TokenPlan(CpuLinearPlan):
    """Token-major x read as it lies, y written as it lies: also where its rows are permuted (Shfl-BW)."""

    panels: Panels
    tile: tuple[int, int, int]  # tokens, vectors, lanes
    fused: bool
    kernel: str
    permuted: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    @property
    def _lanes(self) -> int:
        return self.tile[2]

    def _prepared(self, n: int, threads: int) -> KernelWithScratch:
        (m, k), panels, permuted = self.shape, self.panels, self.permuted
        step = _tokens_at_a_time(self.tile, n)
        own = tokens.own_chunks(n, threads, permuted, host())
        fetched, order = tokens.fetched(n, step, host()), tokens.order(step, k, n, panels, threads, own, permuted)
        laid = tokens.side_by_side(n, step, k, panels.density(k), host())
        whole_chunks = permuted and -(-n // order[0]) % threads == 0
        multiply = tokens.kernel(
            step, *self.tile[1:], self.fused, permuted, panels.values.itemsize, fetched, laid, whole_chunks
        )
        waits = threads * order[0] if whole_chunks else -(-n // step) * step  # tokens
        waiting = waits * panels.row_ids.size if permuted else 0
        needed = waiting + (threads * order[0] * k if laid else 0)
        constant = {
            "weights": panels.arrays, "n": n, "k": k, "m": m, "chunk": order[0], "block": order[1], "parts": threads,
            "places": panels.places_in_fours(self.tile[2]) if tokens.in_fours(step) else panels.places,
            "shares": threads if n * m >= tokens.WORTH_SHARING else 1, "waiting": waiting,
        }  # fmt: skip
        return KernelWithScratch(multiply.bound("room_at x_at y_at bias_at activation", **constant), needed)

    def copy(self) -> TokenPlan:
        """The same plan with weights of its own."""
        return replace(self, panels=self.panels.copy())


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
        """The same plan with weights of its own."""
        return replace(self, panels=self.panels.copy())

    def _prepared(self, n: int, threads: int) -> Call | KernelWithScratch:
        (m, k), lanes, layout = self.shape, self.target.lanes, self.layout
        if self.numbers == FLOATS and layout == "token_blocked" and not blocks.enough(n, self._tile_tokens, threads):
            return self._multiplied(whole_tiles(n // self._tile_tokens, lanes, k, m), threads)
        if layout in BLOCKED_LAYOUTS:
            x_layout = "token_major" if layout == "into_blocks" else "token_blocked"
            y_layout = "token_major" if layout == "out_of_blocks" else "token_blocked"
            return self._in_blocks((x_layout, y_layout), n, threads)
        if layout == "feature_major" and not self.way and lanes <= n < 2**31 // k:
            return self._in_place(n, threads)
        if not self.way and few.takes(self.panels, layout, n, self.target):
            return few.prepared(self.panels, self.shape, layout, self.target, n, threads)
        if self.way == "blocks" or (not self.way and blocks.enough(n, lanes, threads)):
            return self._in_blocks((layout, layout), n, threads)
        return self._packed(n, threads)

    def _in_blocks(self, layouts: tuple[str, str], n: int, threads: int) -> KernelWithScratch:
        return blocks.prepared(self.panels, self.shape, self.tile[1], self.target, layouts, n, threads, self.numbers)

    def _in_place(self, n: int, threads: int) -> Call:
        return self._multiplied(as_it_lies(n, self.target.lanes), threads, columns(self.shape[1], n))

    def _packed(self, n: int, threads: int) -> Call:
        (m, k), lanes, vectors = self.shape, self.target.lanes, self.tile[1]
        pack, unpack = transpose.kernels(lanes, self.layout == "token_major")
        at = in_tiles(n, vectors, lanes, k, m)
        size = -(-at.x_starts.size // vectors) * vectors * lanes
        product, places = self._multiplied(at, threads), "matrix_at buffer_at"
        to_tiles = pack.bound(places, starts=at.x_starts, stride=at.x_stride, n=n, features=k, parts=threads)
        from_tiles = unpack.bound(places, starts=at.y_starts, stride=at.y_stride, n=n, features=m, parts=threads)

        def call(x: int, y: int, bias: int, activation: int) -> bool:
            packed = borrow(size * (k + m))
            y_packed = packed.at + 4 * size * k
            to_tiles(x, packed.at)
            product(packed.at, y_packed, bias, activation)
            from_tiles(y, y_packed)
            give_back(packed)
            return True

        return call

    def _multiplied(self, at: VectorGrid, threads: int, offsets: NDArray[np.int32] | None = None) -> Call:
        """The product of laid out x, or of x as it lies, whose columns have these offsets."""
        fused = self.target.fused
        if isinstance(self.panels, SingleRows):
            product = single.prepared(self.panels, fused, at, offsets, threads)
        else:
            used = partial(self.panels.used, at.x_stride)
            product = rows.prepared(self.panels, self.tile[1], fused, at, self.shape[1], threads, used)
        return lambda x, y, bias, activation: product(x, y, bias, activation, 0)


def prepare(packed: Packed, layout: str, n: int, precision: str = "float32") -> TokenPlan | RowPlan | MatrixPlan:
    """The plan of a linear layer for about n tokens."""
    return build(packed, layout, n, default(packed, layout, n, precision), precision)


def default(packed: Packed, layout: str, n: int, precision: str = "float32") -> Choice:
    """What is best for a layer and about n tokens as far as that is known without trying."""
    threads = numba.get_num_threads()
    own = layout in BLOCKED_LAYOUTS or (n >= amx.TOKENS * threads and blocks.enough(n, amx.ROWS, threads))
    found = by_matrix(packed, precision) if own and _pays_by_matrix(packed, layout, n) else None
    if found is None and precision == "bfloat16" and _fill_vectors(n, threads):
        found = by_pairs(packed)
    return found or by_vectors(packed, layout, n)


def _fill_vectors(n: int, threads: int) -> bool:
    """Whether n tokens give each thread as many vectors, hardly a lane empty: else kernel tokens takes less time."""
    lanes = host().lanes
    return 4 * n >= 3 * lanes * threads and blocks.enough(n, lanes, threads)


def _pays_by_matrix(packed: Packed, layout: str, n: int) -> bool:
    """Whether the matrix unit multiplies this weight faster than vectors, with n tokens, in a model.

    It costs it more to split x and to begin a panel, so rows must keep something: at 75% sparsity it is 1.0 to 1.4
    times as fast, at 90% 0.7 to 1.1 times (128 to 2,048 tokens). Permuted rows are put in their places for nothing.
    Where rows of y are far longer than those of x, its own copies of them and its weights, half as large again, cost
    few tokens more than it gains: 128 of them take 0.84 to 0.96 times the speed at 75% when weights are cold (1.05 to
    1.2 when they are not), 256 of them 1.03 to 1.3 times, but 0.9 to 1.0 at 90%.
    """
    m, k = packed.shape
    enough = packed.nnz >= LEAST_DENSITY * m * k
    if m > 2 * k and n < ENOUGH_TOKENS:
        return enough and n >= SOME_TOKENS and layout not in BLOCKED_LAYOUTS
    return enough or permuted(packed)


def by_matrix(packed: Packed, precision: str = "float32") -> Choice | None:
    """By the matrix unit; None where there is none, or none for this weight."""
    taken = host().matrix and precision != "bfloat16-weights" and matrix.takes(packed)
    tiles = matrix.row_tiles(packed) if taken else None
    return None if tiles is None else Choice("amx", (tiles * amx.ROWS, amx.TOKENS // amx.ROWS, amx.ROWS))


def by_pairs(packed: Packed) -> Choice | None:
    """By pairs of bfloat16, tokens along the vector; None where that is no faster than float32."""
    target, height = host(), group_height(packed)
    if not target.pairs or height == 1:
        return None
    # No wider than that: to put pairs together takes registers, and with 8 x 3 sums some would not stay in any.
    return Choice("pairs", (*rows.tile(height, target), target.lanes), "blocks")


def by_vectors(packed: Packed, layout: str, n: int) -> Choice:
    """What is best for the vector unit."""
    tile = narrow_tile(packed) if layout == "token_major" else None
    if tile is None or not _few_enough(tile, n) or _better_in_blocks(packed, tile, n):
        return Choice("rows", row_tile(packed, layout, n))
    return Choice("tokens", tile)


def _few_enough(tile: tuple[int, int, int], n: int) -> bool:
    """Whether n tokens are so few that a tile of narrow vectors is no slower than tokens along the vector.

    With groups of 8 rows, half vectors of 16 lanes: up to 8 tokens 0.95 to 1.1 times the speed. Quarters, with groups
    of 4, were 0.7 to 1.05 times as fast for one and two (1 and 2 threads, 50% to 90% sparsity, Zen 5).
    """
    lanes, wide = tile[2], host().lanes
    return lanes == wide or n * wide <= 2 * lanes**2


def _better_in_blocks(packed: Packed, tile: tuple[int, int, int], n: int) -> bool:
    """Whether blocks of tokens beat this tile of kernel tokens.

    A tile one vector wide has half the sums of one in a block that fills two vectors of tokens. Permuted rows are put
    in their places here and there, which from a block costs nothing, but there x has to be laid out; on Intel's
    processors, for their second level, it should not have long rows then. On AMD's, kernel tokens has 1.02 to 1.1
    times the speed where rows of x are twice as long as those of y. Otherwise minutes decided (0.94 to 1.04 times),
    but where vectors of tokens are not full: 1.1 to 1.36 times.
    """
    (size, vectors, lanes), (m, k) = tile, packed.shape
    threads = numba.get_num_threads()
    total = -(-n // lanes)
    if not blocks.enough(n, lanes, threads):
        return False
    if vectors > 1 and permuted(packed) and not host().shared:
        each = -(-total // threads)
        full = 16 * n >= 15 * each * threads * lanes
        if host().whole:
            return full and each < ENOUGH_VECTORS
        # One pass over the weights is enough. Or more lies in memory than kernel tokens fetches ahead: x and y, or x
        # of a tile beside the weights.
        return (full and (k < 2 * m or each <= 2)) or n * (m + k) >= LARGE or 4 * size * k > CACHED
    return total >= 2 * threads and (vectors == 1 or (permuted(packed) and k < 2 * m))


def row_tile(packed: Packed, layout: str, n: int) -> tuple[int, int, int]:
    """(rows, vectors, lanes) of the register tile of kernel rows for this weight, about n tokens, Numba's threads."""
    target, height, threads = host(), group_height(packed), numba.get_num_threads()
    total = -(-n // target.lanes)
    if height > 1:
        size, vectors = rows.tile(height, target)
        if layout not in BLOCKED_LAYOUTS:
            own = layout == "token_major" and blocks.enough(n, target.lanes, threads)
            vectors = rows.even((size, vectors), -(-total // threads) if own else total, target)
        return size, vectors, target.lanes
    most = TILE if layout in BLOCKED_LAYOUTS else min(TILE, total)
    return 1, max(1, most), target.lanes


def token_tile(packed: Packed, target: CpuTarget) -> tuple[int, int, int] | None:
    """The register tile of kernel tokens for this weight; None where rows of a group fill no vector."""
    height = group_height(packed)
    if isinstance(packed, DenseWeight):
        # All rows of a dense weight share all columns: only its last panel is filled up, wherever that ends.
        height = 2 * target.lanes if height > target.lanes else target.lanes
    return tokens.tile(height, target)


def narrow_tile(packed: Packed) -> tuple[int, int, int] | None:
    """As `token_tile`, of halves of vectors where rows of a group fill no whole one."""
    wide = host().lanes
    tiles = (token_tile(packed, replace(host(), lanes=lanes)) for lanes in (wide, wide // 2))
    return next((tile for tile in tiles if tile is not None and tile[2] >= NARROWEST), None)


def build(
    packed: Packed, layout: str, n: int, choice: Choice, precision: str = "float32"
) -> TokenPlan | RowPlan | MatrixPlan:
    """The plan that runs a layer as chosen, named for about n tokens.

    Raises ValueError for a precision that `check_precision` refuses.
    """
    check_precision(packed, precision)
    packed = packed if precision == "float32" else rounded(packed)
    if choice.kernel == "amx":
        return MatrixPlan(
            packed.shape, layout, matrix.linear_panels(packed), packed.pattern.format,
            lambda: build(packed, layout, n, by_vectors(packed, layout, n)),
        )  # fmt: skip
    target, (size, vectors, lanes) = host(), choice.tile
    name = f"numba.{packed.pattern.format}.{choice.kernel}"
    if choice.kernel == "pairs":
        paired, numbers = panels(groups(packed), size).paired(), PAIRS_BY_UNIT if target.pairs else PAIRS
        name = f"{name}{size}x{vectors}.{target.name}"
        return RowPlan(packed.shape, layout, paired, (size, vectors), target, name, choice.way, numbers)
    if choice.kernel == "tokens":
        narrow = precision != "float32" and lanes == target.lanes
        partly = "" if lanes == target.lanes else f"of{lanes}"
        name = f"{name}{_tokens_at_a_time(choice.tile, n)}x{vectors}{partly}{'.bf16' if narrow else ''}.{target.name}"
        cut = panels(groups(packed), vectors * lanes)
        cut = cut.narrowed() if narrow else cut
        k = packed.shape[1]
        cut = cut.in_stages(tokens.stages(size, k, cut.density(k), n, target), k).copy()
        return TokenPlan(packed.shape, layout, cut, choice.tile, target.fused, name, permuted(packed))
    laid_out: Panels | SingleRows
    if size == 1:
        together = few.lanes_for(n, target) if vectors == 1 and not choice.way else None
        laid_out = single_rows(groups(packed), packed.shape[1], vectors * lanes, together).copy()
    else:
        laid_out = panels(groups(packed), size).copy()
    if not choice.way and few.takes(laid_out, layout, n, target):
        name = f"numba.{packed.pattern.format}.few{size}x{few.lanes_for(n, target)}.{target.name}"
    else:
        name = f"{name}{size}x{vectors}{choice.way and '.' + choice.way}.{target.name}"
    return RowPlan(packed.shape, layout, laid_out, (size, vectors), target, name, choice.way)


def check_precision(packed: Packed, precision: str) -> None:
    """ValueError unless this precision is float32, or one that a pattern can gain from."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: known are {', '.join(PRECISIONS)}")
    if precision == "bfloat16-weights" and token_tile(packed, host()) is None:
        raise ValueError(
            f"bfloat16 weights are for rows that share columns and fill vectors of {host().lanes}, which those of "
            f"{packed.pattern} do not: they would gain nothing"
        )
    if precision == "bfloat16" and group_height(packed) == 1 and not isinstance(packed, DenseWeight):
        raise ValueError(
            f"bfloat16 is for rows that share columns, which those of {packed.pattern} do not: it would gain nothing"
        )


def permuted(packed: Packed) -> bool:
    """Whether kernel tokens has to put the rows of this weight in their places one by one."""
    return packed.pattern.format == "shflbw"


def lays_out(packed: Packed) -> bool:
    """Whether many tokens are laid out block by block, so that it saves time to get or give them so."""
    return token_tile(packed, host()) is None or permuted(packed)


def _tokens_at_a_time(tile: tuple[int, int, int], n: int) -> int:
    """Tokens of a register tile; one or two would leave most of a large one unused."""
    return tile[0] if n > 2 else 2
