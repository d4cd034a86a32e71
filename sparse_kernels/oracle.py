"""The right result of a kernel, and how far from it float32 arithmetic may lead.

The oracle is the float64 product of the unpacked weight. A float32 inner product of k terms is off by at most gamma_k
* |w| @ |x|, in any order, with or without fused multiply-add. Here gamma_k = k*u / (1 - k*u) and u = 2**-24 (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). Products with a zero weight are exact, so k is the
largest number of weights that a row keeps, plus 1 for a bias. Products too small for a normal number may be flushed
to zero.

A unit may form products of float32 from products of bfloat16 (`cpu.codegen.bf16_split`). It leaves out up to 2 u of
each. It rounds sums of 32 kept weights at most 18 times, and 6 times more for each 32 others. That is at most k + 2
times. It takes for zero what is too small for a normal number: thirds of factors, and any of three kinds of sums.

Where x and the result may be rounded to another type, of unit roundoff u, that adds up to 2 u * |w| @ |x|. ReLU
adds nothing. GELU changes by at most 1.13 times what its argument does. Its own evaluation may be off by 4 * eps32 of
the argument: erf in float32 is good to a few eps32, and 1 + erf cancels near -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats import BlockWeight, DenseWeight, Packed, VectorWeight, unpack
from sparse_kernels.plan_protocol import ACTIVATIONS, LAYOUTS
from sparse_kernels.reference import build_patches, finish
from sparse_kernels.shapes import Conv2dShape

Result = NDArray[np.float64]

UNIT_ROUNDOFF, BFLOAT16_ROUNDOFF = 2.0**-24, 2.0**-8
SMALLEST_NORMAL = 2.0**-126
OF_THIRDS = 4
GELU_SLOPE = 1.13
GELU_EVALUATION = 4 * 2.0**-23


class WrongResult(ValueError):
    """A kernel's result is further from the oracle than float32 arithmetic can explain."""


def check(
    y: np.ndarray,
    packed: Packed,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    layout: str = "feature_major",
    roundoff: float = 0.0,
) -> float:
    """Raise WrongResult unless y is activation(w @ x + bias), for a linear layer in the given layout.

    roundoff: the unit roundoff of the type that x and y may have been rounded to on the way. Returns the largest
    error relative to |w| @ |x| + |bias|, the scale on which float32 rounds.
    Where the oracle is NaN (a dropped weight times infinity, say) any value passes; a NaN anywhere else does not.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r} of a linear layer: known are {', '.join(LAYOUTS)}")
    m = packed.shape[0]
    if layout == "token_major":
        _check_shape(y, (len(x), m))
        x, y = x.T, y.T
    else:
        _check_shape(y, (m, x.shape[1]))
    return compare_results(y, *_expected(packed, x, bias, activation, roundoff))


def check_conv2d(
    y: np.ndarray,
    packed: Packed,
    shape: Conv2dShape,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    roundoff: float = 0.0,
) -> float:
    """Return the same for a convolution: x (batch, c_in, h, w), y (batch, c_out, out_h, out_w)."""
    _check_shape(y, (len(x), shape.c_out, shape.out_h, shape.out_w))
    columns = y.swapaxes(0, 1).reshape(shape.c_out, len(x) * shape.out_h * shape.out_w)
    return compare_results(columns, *_expected(packed, build_patches(x, shape), bias, activation, roundoff))


def build_exact_operands(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight (m, k) and x (k, n), float32, whose product float32 holds exactly in any order of the sums.

    Small whole numbers, with weights of 12 significant bits, one more than float16 and TF32 keep: a kernel that
    drops, repeats or rounds anything is off by whole units, where its errors do not cancel. ValueError for k above
    4096, where sums could pass 2**24.
    """
    if k > 4096:
        raise ValueError(f"sums of {k} products would pass what float32 holds exactly: k is at most 4096")
    most = min(4, 2**24 // (4095 * k))
    weight = (2 * rng.integers(1024, 2048, (m, k)) + 1) * rng.choice([-1, 1], (m, k))
    x = rng.integers(1, most + 1, (k, n)) * rng.choice([-1, 1], (k, n))
    return weight.astype(np.float32), x.astype(np.float32)


def _expected(
    packed: Packed, x: np.ndarray, bias: np.ndarray | None, activation: str | None, roundoff: float = 0.0
) -> tuple[Result, Result, Result]:
    """Return what y (m, n) must be, how far from it y may be, and the scale of its rounding errors."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
    weight = unpack(packed).astype(np.float64)
    x = x.astype(np.float64)
    bias = None if bias is None else bias.astype(np.float64)
    terms = _kept(packed, weight) + (bias is not None) + OF_THIRDS
    with np.errstate(invalid="ignore"):
        scale = finish(np.abs(weight) @ np.abs(x), None if bias is None else np.abs(bias), None)
        before = finish(weight @ x, bias, None)
        y = finish(before, None, activation)
        flushed = 3 * terms + np.abs(weight).sum(axis=1)[:, None] + (weight != 0) @ np.abs(x)
        bound = terms * UNIT_ROUNDOFF / (1 - terms * UNIT_ROUNDOFF) * scale + flushed * SMALLEST_NORMAL
        bound += 2 * roundoff * scale
        if activation == "gelu":
            bound = GELU_SLOPE * bound + GELU_EVALUATION * (np.abs(before) + bound)
    return y, bound, scale


def _kept(packed: Packed, weight: Result) -> int:
    """Return the most weights that are stored for a row: zeros among them take part in sums."""
    match packed:
        case DenseWeight():
            return packed.shape[1]
        case VectorWeight():
            return int(np.diff(packed.indptr).max(initial=0))
        case BlockWeight():
            return int(np.diff(packed.indptr).max(initial=0)) * packed.pattern.cols
        case _:
            return int(np.count_nonzero(weight, axis=1).max())


def _check_shape(y: np.ndarray, expected: tuple[int, ...]) -> None:
    if y.shape != expected:
        raise WrongResult(f"the result has shape {y.shape}, expected {expected}")


def compare_results(y: np.ndarray, expected: Result, bound: Result, scale: Result) -> float:
    """Raise WrongResult where y (m, n) is further from what is expected than a bound.

    Returns the largest error relative to the scale. Where NaN is expected any value passes.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where((y == expected) | np.isnan(expected), 0.0, np.abs(y - expected))
        excess = np.where(error > 0, error / bound, 0.0)  # NaN counts as infinitely far
        excess[np.isnan(error) | np.isnan(excess)] = np.inf
        relative = np.where(error > 0, error / scale, 0.0)
    if (excess > 1).any():
        row, column = np.unravel_index(np.argmax(excess), excess.shape)
        raise WrongResult(
            f"{np.count_nonzero(excess > 1)} of {excess.size} results are wrong; the worst is feature {row}, column "
            f"{column}: expected {expected[row, column]:.9g}, got {y[row, column]:.9g}, which is off by "
            f"{error[row, column]:.3g} where float32 explains {bound[row, column]:.3g}"
        )
    return float(relative.max(initial=0.0, where=np.isfinite(relative)))
