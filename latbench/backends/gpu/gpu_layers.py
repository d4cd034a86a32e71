"""Synthetic layers for a GPU, and the error bounds of float16 and bfloat16 arithmetic.

Weights and activations are rounded to the element type once, so that every kernel multiplies the same numbers. The
product of two of them is exact in float32 (11 + 11 or 8 + 8 significant bits). Tensor cores add in float32. They
align the terms of a step to the largest, and then chop instead of rounding: each addition is off by at most 2**-23 of
the sum of magnitudes. (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer
Science 2021.)

So k terms, added in any order, are off by gamma_k * |w| @ |x| with u = 2**-23. Where sums are rounded, u is 2**-24;
see `sparse_kernels.oracle`. The result is rounded to the element type on top. A kernel that sums in half precision
fails this check, as it should: its times are those of another arithmetic. Only cuBLAS may, by default, split a sum
into `parts` and round each to the element type before it adds them.

Layers in eight bits are such that their sums are exact (`low_precision_layers`). What remains is the rounding of
scales and of the result.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latbench.backends.gpu.low_precision_layers import (
    EIGHT_BITS,
    LOW_PRECISIONS,
    EightBits,
    FourBits,
    draw_eight_bits,
    draw_four_bits,
)
from latbench.backends.installed_engines import Unsupported
from latbench.workloads.points import Point
from sparse_kernels.formats import Packed, bfloat16, pack
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise
from sparse_kernels.shapes import Conv2dShape, Shape

CHOPPED = 2.0**-23
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int32": 0.0}
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "int32": 0.0}  # half the distance of the numbers next to zero
SCALING = 4 * 2.0**-24  # of a sum in float32, two scales and their products
ORACLE = 2.0**-53  # roundoff of the float64 product that results are compared with
MOST_CHOICES = 1000  # of N:M groups, drawn from a list of all

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class GpuLayer:
    """The layer that every engine gets, with values that its element type holds exactly.

    Engines share these arrays and must not write to them.

    Attributes
    ----------
    weight : ndarray
        float32 (m, k), zero where the mask drops.
    mask : ndarray
        bool (m, k)
    pattern : Pattern
        The pattern of the mask.
    x : ndarray
        float32 (k, n) for a linear layer, (batch, c_in, h, w) for a convolution.
    quantised : EightBits or FourBits or None
        Scales of a layer in eight bits, whose weight and x are then whole numbers; codes of a weight in four bits.
    """

    weight: NDArray[np.float32]
    mask: Mask
    pattern: Pattern
    x: NDArray[np.float32]
    quantised: EightBits | FourBits | None = None

    @functools.cached_property
    def packed(self) -> Packed:
        """The weight in its pattern's format, made late because it takes a while and not every engine reads it."""
        return pack(self.weight, self.mask, self.pattern)

    @functools.cached_property
    def nnz(self) -> int:
        """The number of kept elements."""
        return int(np.count_nonzero(self.mask))

    @functools.cached_property
    def terms(self) -> int:
        """The most kept elements in a row."""
        return int(np.count_nonzero(self.mask, axis=1).max(initial=0))


def build_gpu_layer(point: Point) -> GpuLayer:
    """Build random weights and activations for `point`; the same point always gets the same.

    Every pattern of a shape has the same activations, and keeps values of the same weights.
    """
    dtype = point.dtype_w if point.dtype_w in LOW_PRECISIONS else point.dtype
    return _layer(point.shape, point.pattern, point.sparsity, dtype, point.seed)


@functools.lru_cache(maxsize=2)
def _layer(shape: Shape, pattern: Pattern, sparsity: float, dtype: str, seed: int) -> GpuLayer:
    """Build a layer; cached, because kernels for the same weights are prepared one after the other."""
    weight, x, quantised = _dense_layer(shape, dtype, seed)
    rng = np.random.default_rng([seed, zlib.crc32(f"{shape} {pattern} {sparsity}".encode())])
    mask = build_random_mask(rng, pattern, (shape.m, shape.k), sparsity)
    return GpuLayer(weight * mask, mask, pattern, x, quantised)


@functools.lru_cache(maxsize=1)
def _dense_layer(
    shape: Shape, dtype: str, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], EightBits | FourBits | None]:
    """Build weight and x before anything is dropped; cached, because all points of a block have one shape."""
    rng = np.random.default_rng([seed, zlib.crc32(str(shape).encode())])
    if dtype in LOW_PRECISIONS:
        return _low_precision_layer(rng, shape, dtype)
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(shape.k**0.5)
    conv = isinstance(shape, Conv2dShape)
    size = (shape.batch, shape.c_in, shape.h, shape.w) if conv else (shape.k, shape.n)  # type: ignore[union-attr]
    return round_to(weight, dtype), round_to(rng.standard_normal(size, np.float32), dtype), None


def _low_precision_layer(
    rng: np.random.Generator, shape: Shape, dtype: str
) -> tuple[NDArray[np.float32], NDArray[np.float32], EightBits | FourBits]:
    """Draw weight, x and scales in eight or four bits. Raises Unsupported for a shape that has none."""
    if isinstance(shape, Conv2dShape):
        raise Unsupported(f"{dtype} is for linear layers here")
    try:
        if dtype in EIGHT_BITS:
            return draw_eight_bits(rng, shape, dtype)
        weight, four = draw_four_bits(rng, shape)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return weight, round_to(rng.standard_normal((shape.k, shape.n), np.float32), "bfloat16"), four


def build_random_mask(rng: np.random.Generator, pattern: Pattern, size: tuple[int, int], sparsity: float) -> Mask:
    """Build a random mask bool (m, k) of `pattern` with the number of units that the sparsity asks for.

    Units are drawn directly instead of from scores, which takes a fraction of the time. Shfl-BW needs no search for
    row groups: random rows make a group, which is the hard case for a kernel.
    """
    m, k = size
    match pattern:
        case Dense():
            return np.ones(size, bool)
        case Unstructured():
            return _kept(rng, size, sparsity)
        case BlockWise():
            units = _kept(rng, (-(-m // pattern.rows), -(-k // pattern.cols)), sparsity)
            return units.repeat(pattern.rows, axis=0)[:m].repeat(pattern.cols, axis=1)[:, :k]
        case VectorNM():
            groups = _nm_mask(rng, NM(pattern.keep, pattern.of), (-(-m // pattern.v), k))
            return groups.repeat(pattern.v, axis=0)[:m]
        case VectorWise() | ShflBW():
            cols = pattern.cols if isinstance(pattern, ShflBW) else 1
            units = _kept(rng, (-(-m // pattern.v), -(-k // cols)), sparsity)
            mask = units.repeat(pattern.v, axis=0)[:m].repeat(cols, axis=1)[:, :k]
            if isinstance(pattern, VectorWise):
                return mask
            shuffled = np.empty_like(mask)
            shuffled[rng.permutation(m)] = mask
            return shuffled
        case NM():
            return _nm_mask(rng, pattern, size)
    raise TypeError(f"no random masks of {pattern!r}")


def _kept(rng: np.random.Generator, units: tuple[int, int], sparsity: float) -> Mask:
    count = math.prod(units)
    kept = np.zeros(count, bool)
    kept[rng.choice(count, math.floor((1 - sparsity) * count + 0.5), replace=False, shuffle=False)] = True
    return kept.reshape(units)


def _nm_mask(rng: np.random.Generator, pattern: NM, size: tuple[int, int]) -> Mask:
    m, k = size
    if math.comb(pattern.of, pattern.keep) > MOST_CHOICES:
        return pattern.mask(rng.random(size), pattern.sparsity)
    whole = k // pattern.of
    mask = np.zeros(size, bool)
    mask[:, : whole * pattern.of] = _groups(rng, m, whole, pattern.of, pattern.keep)
    tail = k - whole * pattern.of
    if tail:
        mask[:, -tail:] = _groups(rng, m, 1, tail, pattern.keeps_of(tail))
    return mask


def _groups(rng: np.random.Generator, rows: int, groups: int, of: int, keep: int) -> Mask:
    choices = np.zeros((math.comb(of, keep), of), bool)
    for choice, columns in zip(choices, itertools.combinations(range(of), keep), strict=True):
        choice[list(columns)] = True
    return choices[rng.integers(0, len(choices), (rows, groups))].reshape(rows, groups * of)


# Element types ----------------------------------------------------------------------------------------------------


def convert_to_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return `array` float32 as float16, or as the bits of bfloat16 in uint16; rounded to nearest, ties to even."""
    if dtype == "float16":
        return array.astype(np.float16)
    if dtype != "bfloat16":
        raise ValueError(f"an element is float16 or bfloat16, not {dtype}")
    return bfloat16.round_to_bits(array)


def round_to(array: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return `array` with every element rounded to `dtype`, as float32."""
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    return bfloat16.widen_bits(convert_to_bits(array, dtype))


# The oracle -------------------------------------------------------------------------------------------------------


def check_product(
    y: Any, weight: Any, x: Any, *, terms: int, dtype: str, parts: int = 1, exact: bool = False
) -> float:
    """Raise WrongResult unless y (m, n) is weight (m, k) @ x (k, n) as far as arithmetic in `dtype` allows.

    Float64 arrays of one library (NumPy, CuPy or torch), on whatever device they are. `terms`: the most nonzero
    weights in a row; `parts`: into how many sums of `dtype` each may be split; `exact`: sums have no error, and are
    scaled in float32. Returns the largest error relative to |weight| @ |x|.
    """
    if tuple(y.shape) != (weight.shape[0], x.shape[1]):
        raise WrongResult(f"the result has shape {tuple(y.shape)}, expected {(weight.shape[0], x.shape[1])}")
    expected, scale = weight @ x, abs(weight) @ abs(x)
    sums = _gamma(terms, ORACLE) * scale + SCALING * abs(expected) if exact else _gamma(terms, CHOPPED) * scale
    if parts > 1:
        sums = sums + _gamma(parts, ROUNDOFF[dtype]) * scale
    bound = sums + ROUNDOFF[dtype] * (abs(expected) + sums) + SMALLEST[dtype]
    error = abs(y - expected)
    wrong = ~(error <= bound)  # a NaN is wrong
    if bool(wrong.any()):
        row, column = (int(index[0]) for index in _where(wrong))
        raise WrongResult(
            f"{int(wrong.sum())} of {math.prod(y.shape)} results are wrong; the first is feature {row}, column "
            f"{column}: expected {float(expected[row, column]):.6g}, got {float(y[row, column]):.6g}, which is off "
            f"where {dtype} with {'exact' if exact else 'float32'} sums explains {float(bound[row, column]):.3g}"
        )
    return float((error / (scale + SMALLEST[dtype])).max()) if math.prod(y.shape) else 0.0


def _gamma(terms: int, roundoff: float) -> float:
    """Return the bound on the error of a sum of rounded terms over the sum of magnitudes (Higham 2002, lemma 3.1)."""
    return terms * roundoff / (1 - terms * roundoff)


def _where(flags: Any) -> Any:
    """Return row and column indices; torch calls `nonzero` differently from the other libraries."""
    return flags.nonzero(as_tuple=True) if hasattr(flags, "is_cuda") else flags.nonzero()
