"""Layers in eight or four bits for a GPU, with values whose products nobody has to round.

Eight bits: weight and x are whole numbers, and a result is their product times a scale of its row and one of its
column. The sums of whole numbers are exact, so a check needs no allowance for them:

- int8 adds in int32. Values fill the type, up to 127.
- fp8 (e4m3) adds in fewer bits than float32: Hopper keeps 14 of a sum (DeepSeek-V3 Technical Report, 2024, section
  3.5.2). Values are so small that no partial sum of |w| @ |x| needs more, whatever the order. Real weights would be
  added with an error that no useful bound tells from a wrong tile.

Four bits: a code of 0 to 15 for each weight. A group of GROUP weights of a row shares a step and a zero, and the
weight is (code - 8) * step + zero. Steps are powers of two, and zeros multiples of them, so that bfloat16 holds the
weight. x is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latbench.base.engine_registry import FP8, INT4, INT8
from sparse_kernels.shapes import LinearShape

Floats = NDArray[np.float32]

GROUP = 128
FP8_SUM = 2.0**13  # the largest whole number whose sums Hopper's fp8 units hold exactly
FILL = 0.75  # of it, that sums have on average: the largest of a layer's is higher
MOST_FP8 = 7  # e4m3 holds every whole number up to 16
MOST_INT8 = 127
MOST_CODE, MIDDLE_CODE = 15, 8


class NoExactSums(ValueError):
    """A layer has so many input features that its sums may overflow."""


@dataclass(frozen=True)
class EightBits:
    """The scales of a layer in eight bits: float32 (m,) of rows of the result, (n,) of its columns."""

    weight_scales: Floats
    x_scales: Floats


@dataclass(frozen=True)
class FourBits:
    """A weight in four bits.

    Attributes
    ----------
    codes : ndarray
        uint8 (m, k), each 0 to 15.
    steps, zeros : ndarray
        float32 (m, k / GROUP), which bfloat16 holds.
    """

    codes: NDArray[np.uint8]
    steps: Floats
    zeros: Floats


def draw_eight_bits(rng: np.random.Generator, shape: LinearShape, dtype: str) -> tuple[Floats, Floats, EightBits]:
    """Draw a weight (m, k), x (k, n) and their scales. Raises NoExactSums."""
    sizes = (shape.m, shape.k), (shape.k, shape.n)
    if dtype == INT8:
        if shape.k * MOST_INT8**2 >= 2**31:
            raise NoExactSums(f"sums of {shape.k} products of int8 may pass what int32 holds")
        weight, x = (rng.integers(-MOST_INT8, MOST_INT8 + 1, size, np.int8).astype(np.float32) for size in sizes)
    else:
        weight, x = _draw_small(rng, *sizes)
    # Like those of real layers: weights of some hundredths, activations of some units, no two rows alike.
    scales = EightBits(_draw_scales(rng, shape.m, 2e-3), _draw_scales(rng, shape.n, 2e-2))
    return weight, x, scales


def _draw_small(rng: np.random.Generator, *sizes: tuple[int, int]) -> list[Floats]:
    """Draw arrays of whole numbers from -most to most, the first (m, k), such that sums of |w| @ |x| stay small."""
    k = sizes[0][1]
    mean = (FILL * FP8_SUM / k) ** 0.5  # of the magnitudes of one operand
    fitting = [most for most in range(1, MOST_FP8 + 1) if most * (most + 1) / (2 * most + 1) <= mean]
    most = max(fitting, default=1)
    kept = 1.0 if fitting else mean * 1.5  # of -1, 0 and 1 two thirds are no zeros
    found = []
    for size in sizes:
        values = rng.integers(-most, most + 1, size, np.int8).astype(np.float32)
        found.append(values if kept == 1.0 else values * (rng.random(size, np.float32) < kept))
    return found


def _draw_scales(rng: np.random.Generator, count: int, typical: float) -> Floats:
    return (typical * rng.uniform(0.5, 2.0, count)).astype(np.float32)


def draw_four_bits(rng: np.random.Generator, shape: LinearShape) -> tuple[Floats, FourBits]:
    """Draw a weight float32 (m, k) and its codes. Raises ValueError unless GROUP divides k."""
    if shape.k % GROUP:
        raise ValueError(f"weights in four bits have steps for {GROUP} columns, which do not divide {shape.k}")
    groups = shape.m, shape.k // GROUP
    codes = rng.integers(0, MOST_CODE + 1, (shape.m, shape.k), np.uint8)
    steps = np.exp2(rng.integers(-10, -6, groups)).astype(np.float32)
    zeros = (steps * rng.integers(-4, 5, groups)).astype(np.float32)
    four = FourBits(codes, steps, zeros)
    return expand_codes(four), four


def expand_codes(four: FourBits) -> Floats:
    """Return the weight float32 (m, k) that codes stand for."""
    steps, zeros = (each.repeat(GROUP, axis=1) for each in (four.steps, four.zeros))
    return (four.codes.astype(np.float32) - MIDDLE_CODE) * steps + zeros


EIGHT_BITS = (FP8, INT8)
LOW_PRECISIONS = (*EIGHT_BITS, INT4)
"""Types of weights that this module draws."""
