"""Vector-wise, Shfl-BW and block-wise weights on tensor cores by mma.sync: which tile of vector.cu runs, and how.

A block of the kernel brings V rows of weights and BN columns of x, BK deep, from the second-level cache. It does V *
BN * BK multiply-adds with them. Bringing them limits all but the largest tiles (TUNING.md has the arithmetic), so the
tile is chosen by what a multiprocessor has to bring in: see `choose_width`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import DTYPES, Argument, Launch, NotSupported, Operand, Variant, parse_activation
from sparse_kernels.cuda.targets import RESERVED_BYTES, TARGETS, GpuArchitecture
from sparse_kernels.cuda.vector_tiles import BK, HEIGHTS, VectorTiles, pack_tiles
from sparse_kernels.formats import Packed
from sparse_kernels.formats.checks import freeze
from sparse_kernels.shapes import Conv2dShape


class TensorCoreFeatures(NamedTuple):
    """Properties that the choice of a tile depends on."""

    mma_k: int  # depth of one tensor-core product: 16, 8 (sm_75) or 4 (sm_70)
    stages: int  # tiles in shared memory at once; 2 where there is no cp.async
    widths: tuple[int, ...]  # BN

    @property
    def has_cp_async(self) -> bool:
        """Copies to shared memory that go past the registers."""
        return self.mma_k == 16


MOST_STAGES = 4


def select_features(target: GpuArchitecture) -> TensorCoreFeatures:
    """Return what an architecture runs best.

    With cp.async there are as many stages, up to MOST_STAGES, as let a multiprocessor run two blocks of 128 x 128 at
    once: 3 where it has 100 KiB of shared memory (sm_86, sm_89, sm_120, sm_121). Without cp.async, tiles go through
    registers, which hold no more than 128 columns of x beside the results.
    """
    mma_k = {(7, 0): 4, (7, 5): 8}.get(target.capability, 16)
    if mma_k < 16:
        return TensorCoreFeatures(mma_k, 2, (64, 128))
    half = target.shared_bytes // 2 - RESERVED_BYTES
    return TensorCoreFeatures(mma_k, min(MOST_STAGES, half // count_stage_bytes(128, 128)), (64, 128, 256))


def count_stage_bytes(height: int, width: int) -> int:
    """Return the shared memory of one tile: V x BK elements of the weight and BK x BN of x."""
    return (height + width) * BK * 2


MACHINES = {name: select_features(target) for name, target in TARGETS.items()}

WARPS = {
    (16, 64): (1, 2),
    (16, 128): (1, 4),
    (16, 256): (1, 4),
    (32, 64): (1, 2),
    (32, 128): (1, 4),
    (32, 256): (1, 4),
    (64, 64): (2, 2),
    (64, 128): (2, 2),
    (64, 256): (1, 4),
    (128, 64): (2, 2),
    (128, 128): (2, 2),
    (128, 256): (2, 4),
}
"""How warps share V x BN: in rows, in columns. The squarer a warp's part, the less it reads from shared memory."""

NARROW = 64
"""BN for rows of x that are not aligned to 16 bytes, which are copied element by element."""

INSTRUCTIONS = {16: "HMMA.16816.F32", 8: "HMMA.1688.F32", 4: "HMMA.884.F32"}
"""What the SASS of a product is called, by its depth."""


def build_program(
    packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None
) -> LinearProgram:
    """Return a linear layer's weight (m, k); `n` does not matter. NotSupported says what does not run."""
    machine = _machine(dtype, architecture)
    tiles = pack_tiles(packed, dtype, volta=machine.mma_k == 4)
    return LinearProgram(tiles, dtype, architecture, multiprocessors or TARGETS[architecture].multiprocessors)


def build_conv2d_program(
    packed: Packed, shape: Conv2dShape, dtype: str, architecture: str, multiprocessors: int | None = None
) -> Conv2dProgram:
    """Return a convolution's weight (c_out, kh*kw*c_in) for any number of images; NotSupported as above."""
    if packed.shape != (shape.m, shape.k):
        raise ValueError(f"the packed weight is {packed.shape}, and {shape} needs {(shape.m, shape.k)}")
    machine = _machine(dtype, architecture)
    tiles = pack_tiles(packed, dtype, volta=machine.mma_k == 4)
    offsets, taps = locate_columns(tiles.columns, shape)
    count = multiprocessors or TARGETS[architecture].multiprocessors
    return Conv2dProgram(tiles, dtype, architecture, count, shape, offsets, taps)


def choose_width(height: int, groups: int, n: int, widths: Sequence[int], multiprocessors: int) -> int:
    """Return the BN with which the busiest multiprocessor reads least: blocks times V + BN elements a kept column.

    A wide tile reads the weights less often; a narrow one makes more blocks and wastes less past the last column.
    Left out: that groups differ, that blocks share a multiprocessor, and what is under 2 % either way.
    """

    def brought(width: int) -> int:
        blocks = groups * -(-n // width)
        return -(-blocks // multiprocessors) * (height + width)

    return min(reversed(widths), key=brought)


def build_variant(height: int, width: int, aligned: bool, conv: bool, dtype: str, arch: str) -> Variant:
    """Return the kernel of a tile for one architecture; `aligned` where rows of x are."""
    machine = MACHINES[arch]
    warps_m, warps_n = WARPS[height, width]
    cp_async = aligned and machine.has_cp_async
    defines = {
        "V": height,
        "BN": width,
        "BK": BK,
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "STAGES": machine.stages if cp_async else 2,
        "COPY": 8 if aligned else 1,
        "ASYNC": int(cp_async),
        "MMA_K": machine.mma_k,
        "CONV": int(conv),
        "BF16": DTYPES.index(dtype),
    }
    function = "vector_conv2d" if conv else "vector_matmul"
    return Variant("vector.cu", function, defines, (arch,), INSTRUCTIONS[machine.mma_k])


def count_shared_bytes(one: Variant) -> int:
    """Return the dynamic shared memory of a block: its stages, or the patches of results in their place."""
    height, width, warps_m, warps_n = (one.defines[name] for name in ("V", "BN", "WARPS_M", "WARPS_N"))
    stages = one.defines["STAGES"] * count_stage_bytes(height, width)
    patches = warps_m * warps_n * 16 * (width // warps_n + 8) * 4
    return max(stages, patches)


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """A linear layer's tiles, for so many multiprocessors; x comes in tiles of `width` columns (None: what pays)."""

    tiles: VectorTiles
    dtype: str
    architecture: str
    multiprocessors: int
    width: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""
        return self.tiles.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return the launch that multiplies x (k, n) to out (m, n), both 16-byte aligned if n is a multiple of 8."""
        if n == 0:
            return []
        tiles = self.tiles
        arrays = (tiles.weights, tiles.columns, tiles.starts, tiles.row_ids)
        one = _variant_for(self, n, n % 8 == 0)
        scalars = (np.int32(tiles.groups), np.int32(n), parse_activation(activation))
        return [_launch(one, tiles.groups, n, (*arrays, *OPERANDS, *scalars))]


@dataclass(frozen=True, eq=False)
class Conv2dProgram:
    """A convolution's tiles, and where their kept columns lie in an image: see `locate_columns`."""

    tiles: VectorTiles
    dtype: str
    architecture: str
    multiprocessors: int
    shape: Conv2dShape
    offsets: NDArray[np.int32]
    taps: NDArray[np.int32]
    width: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays; `offsets` and `taps` take the place of the tiles' columns."""
        return self.tiles.nbytes - self.tiles.columns.nbytes + self.offsets.nbytes + self.taps.nbytes

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return what convolves x (c_in, h, w, n) to out (c_out, out_h, out_w, n), for n images; aligned as above."""
        if n == 0:
            return []
        tiles, shape = self.tiles, self.shape
        arrays = (tiles.weights, self.offsets, self.taps, tiles.starts, tiles.row_ids)
        columns = shape.out_h * shape.out_w * n
        image = (n, shape.h, shape.w, shape.out_w, *shape.stride, *shape.padding)
        sizes = (np.int32(size) for size in (tiles.groups, columns, *image))
        one = _variant_for(self, columns, n % 8 == 0)
        return [_launch(one, tiles.groups, columns, (*arrays, *OPERANDS, *sizes, parse_activation(activation)))]


OPERANDS = (Operand.X, Operand.OUT, Operand.BIAS)


def _variant_for(program: LinearProgram | Conv2dProgram, columns: int, aligned: bool) -> Variant:
    """Return the variant for so many columns of the product: the weight is packed the same for all widths."""
    height, groups = program.tiles.height, program.tiles.groups
    widths = MACHINES[program.architecture].widths
    width = program.width or choose_width(height, groups, columns, widths, program.multiprocessors)
    conv = isinstance(program, Conv2dProgram)
    return build_variant(height, width if aligned else NARROW, aligned, conv, program.dtype, program.architecture)


def locate_columns(columns: NDArray[np.int32], shape: Conv2dShape) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return where kept columns (r * kw + s) * c_in + c lie in an image (c_in, h, w), both as `columns` is shaped.

    offsets: the pixel relative to the first tap of channel 0, (c * h + r * dilation) * w + s * dilation. It is -1
    where the column is padding. taps: (r * dilation << 16) + s * dilation, from which the kernel sees what lies
    outside.
    """
    reach = ((shape.kh - 1) * shape.dilation[0], (shape.kw - 1) * shape.dilation[1])
    if max(reach) >= 2**15 or shape.c_in * shape.h * shape.w + reach[0] * shape.w + reach[1] >= 2**31:
        raise NotSupported(f"places in an image are counted in 32 bits, those of taps in 16: too few for {shape}")
    tap, channel = np.divmod(columns, shape.c_in)
    r, s = np.divmod(tap, shape.kw)
    rows, lefts = r * shape.dilation[0], s * shape.dilation[1]
    offsets = np.where(columns < 0, -1, (channel * shape.h + rows) * shape.w + lefts)
    taps = np.where(columns < 0, 0, (rows << 16) + lefts)
    return freeze(offsets.astype(np.int32)), freeze(taps.astype(np.int32))


def _machine(dtype: str, architecture: str) -> TensorCoreFeatures:
    if architecture not in MACHINES:
        raise NotSupported(f"the vector kernels are for {', '.join(MACHINES)}, not {architecture}")
    if dtype not in DTYPES:
        raise NotSupported(f"elements are {' or '.join(DTYPES)}, not {dtype}")
    if dtype == "bfloat16" and MACHINES[architecture].mma_k < 16:
        raise NotSupported(f"tensor cores multiply bfloat16 from sm_80 on; {architecture} runs float16")
    return MACHINES[architecture]


def _launch(one: Variant, groups: int, columns: int, arguments: tuple[Argument, ...]) -> Launch:
    """Return a block for every group and BN columns of the product."""
    width = one.defines["BN"]
    blocks = groups * -(-columns // width)
    if max(blocks, columns + width) >= 2**31:
        raise NotSupported(f"{columns} columns are more than one launch numbers with 32 bits")
    threads = 32 * one.defines["WARPS_M"] * one.defines["WARPS_N"]
    return Launch(one, (blocks, 1, 1), (threads, 1, 1), count_shared_bytes(one), arguments)


def _variants() -> tuple[Variant, ...]:
    """Return every tile. Variants that several architectures share are one, for all of them."""
    architectures: dict[tuple[tuple[str, int], ...], list[str]] = {}
    merged: dict[tuple[tuple[str, int], ...], Variant] = {}
    for arch, machine in MACHINES.items():
        dtypes = DTYPES if machine.mma_k == 16 else DTYPES[:1]
        tiles = [(width, True) for width in machine.widths] + [(NARROW, False)]
        for height, (width, aligned), conv, dtype in itertools.product(HEIGHTS, tiles, (False, True), dtypes):
            one = build_variant(height, width, aligned, conv, dtype, arch)
            key = tuple(one.defines.items())
            merged[key] = one
            architectures.setdefault(key, []).append(arch)
    return tuple(replace(one, architectures=tuple(architectures[key])) for key, one in merged.items())


VARIANTS = _variants()
