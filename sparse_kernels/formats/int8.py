"""Weights in eight bits: whole numbers from -127 to 127, and for each row what one of them is worth.

A layer in eight bits multiplies whole numbers only: y[t, r] = scales[r] * s * sum over c of w[r, c] * (q[t, c] - z).
Its input x is read as s * (q - z) with q from 0 to 255: one s and z for all tokens, found from calibration data, or
for each token an s of its own, with z = 128. Jacob et al. 2018, "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", section 2; rows have scales of their own as in Krishnamoorthi 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats import Packed, pack, unpack
from sparse_kernels.formats.checks import Mask, Weight, freeze
from sparse_kernels.patterns import Dense, Pattern

QUAD = 4
"""Columns that are multiplied together: as many bytes as a float32 has."""

LARGEST = 127
"""Largest |w|: -128 is left out, so that weights are symmetric."""

STEPS = 255
"""Steps of an input, from the least to the largest."""

MIDDLE = 128
"""Zero of an input whose range is symmetric."""

LARGEST_SUM = 2**31 - 1

LEAST_STEP = 2.0**-126
"""The least step of a token that is read by its own largest value: its reciprocal is finite."""


@dataclass(frozen=True)
class InputRange:
    """How a layer reads its input: x is scale * (q - zero), with q a whole number from 0 to 255.

    Attributes
    ----------
    scale
        What a step is worth, positive and finite.
    zero
        The q of 0.
    """

    scale: float
    zero: int = MIDDLE

    def __post_init__(self) -> None:
        if not (np.isfinite(np.float32(self.scale)) and np.float32(self.scale) > 0):
            raise ValueError(f"a step of an input is positive and finite, not {self.scale}")
        if not 0 <= self.zero <= STEPS:
            raise ValueError(f"the zero of an input is from 0 to {STEPS}, not {self.zero}")
        object.__setattr__(self, "scale", float(self.scale))  # NumPy's numbers have other texts
        object.__setattr__(self, "zero", int(self.zero))

    @classmethod
    def covering(cls, low: float, high: float) -> InputRange:
        """Return the range whose steps go from `low` to `high`, and hold 0 exactly; one of step 1 for only zeros."""
        low, high = min(low, 0.0), max(high, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ValueError(f"an input from {low} to {high} has no finite steps")
        scale = (high - low) / STEPS
        if np.float32(scale) == 0:
            return cls(1.0)
        return cls(scale, int(np.clip(round(-low / scale), 0, STEPS)))


def fill_quad(input_range: InputRange) -> int:
    """Return the 32 bits of four zeros read in this range."""
    return input_range.zero * 0x01010101


def format_range(reading: InputRange) -> str:
    """Return a range as text, "scale,zero"."""
    return f"{reading.scale!r},{reading.zero}"


def parse_range(text: str) -> InputRange:
    """Return the range that `format_range` wrote. Raises ValueError for any other text."""
    scale, zero = text.split(",")
    return InputRange(float(scale), int(zero))


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a layer is read in eight bits.

    Attributes
    ----------
    scales : float32 array (m,)
        What a step of each row of the weight is worth; positive.
    input_range : InputRange or None
        How the input is read; None: for each token by its own largest absolute value.
    largest : float32 array (m,) or None
        How many steps the largest weight of each row is, once that is known.
    """

    scales: NDArray[np.float32]
    input_range: InputRange | None = None
    largest: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A packed weight of whole numbers.

    Attributes
    ----------
    packed : Packed
        The kept weights, whole numbers from -127 to 127, held in float32.
    scales : float32 array (m,)
        What 1 of each row is worth; positive.
    input_range : InputRange or None
        How the input is read; None: for each token by its own largest absolute value.
    """

    packed: Packed
    scales: NDArray[np.float32]
    input_range: InputRange | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.shape

    @property
    def pattern(self) -> Pattern:
        """The pattern of the kept weights."""
        return self.packed.pattern


def find_scales(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale (m,) of each row of a weight (m, k) whose largest absolute value becomes 127; 1 for zeros."""
    largest = np.abs(weight).max(axis=1, initial=0.0)
    scales = (largest / np.float32(LARGEST)).astype(np.float32)
    return freeze(np.where(scales > 0, scales, np.float32(1)))


def pack_int8(
    weight: Weight,
    mask: Mask | None,
    pattern: Pattern,
    scales: NDArray[np.float32],
    input_range: InputRange | None = None,
) -> Int8Weight:
    """Store the kept elements of a weight as whole numbers of steps.

    Parameters
    ----------
    weight : float32 array (m, k)
        Finite numbers.
    mask : bool array (m, k) or None
        True where an element is kept; None keeps everything.
    pattern : Pattern
        The pattern of the mask.
    scales : float32 array (m,)
        The step of each row, positive and finite, as of `find_scales`.
    input_range : InputRange or None
        How the input is read; None: for each token by its own largest absolute value.

    Returns
    -------
    Int8Weight
        The nearest whole numbers (ties to even); what is beyond 127 steps becomes 127.

    Raises
    ------
    NotOfPattern, ValueError, TypeError
        As `pack`. Also if scales are not positive and finite, one a row, or rows are so long that sums could pass 32
        bits.
    """
    rows, k = np.shape(weight)[0], np.shape(weight)[-1]
    if np.shape(scales) != (rows,) or not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError(f"a weight of {rows} rows needs {rows} scales, positive and finite")
    if k * LARGEST * STEPS > LARGEST_SUM:
        raise ValueError(
            f"sums over rows of {k} weights may pass 32 bits: {LARGEST_SUM // (LARGEST * STEPS)} are the most"
        )
    whole = np.clip(np.rint(weight / scales[:, None]), -LARGEST, LARGEST).astype(np.float32)
    return Int8Weight(pack(whole, mask, pattern), freeze(scales.astype(np.float32)), input_range)


def quantize_packed(packed: Packed, quantization: Quantization) -> Int8Weight:
    """Return a packed weight as whole numbers of steps, as `pack_int8` does."""
    kept = unpack(replace(packed, values=np.ones_like(packed.values))) != 0
    return pack_int8(unpack(packed), kept, packed.pattern, quantization.scales, quantization.input_range)


def round_to_steps(weight: Weight, scales: NDArray[np.float32]) -> Weight:
    """Return the weight (m, k) that whole numbers of steps from -127 to 127 stand for, nearest to another."""
    whole: Weight = np.clip(np.rint(weight / scales[:, None]), -LARGEST, LARGEST)
    return (whole * scales[:, None]).astype(np.float32)


def unpack_int8(weight: Int8Weight) -> Weight:
    """Return the weight (m, k) that the whole numbers stand for, float32."""
    return unpack(weight.packed) * weight.scales[:, None]


def fill_up(weight: Int8Weight) -> Int8Weight:
    """Return the same weight as a dense one, which holds its zeros."""
    return replace(weight, packed=pack(unpack(weight.packed), None, Dense()))
