"""Weights whose rows have a step for every BLOCK columns, as other libraries compress dense layers for few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import BLOCK
from sparse_kernels.oracle import UNIT_ROUNDOFF, compare_results


@dataclass(frozen=True)
class BlockSteps:
    """A weight (m, k) as whole numbers, and what one of them is worth.

    Attributes
    ----------
    whole : ndarray
        int8 (m, k / BLOCK, BLOCK), from -127 to 127 or, in four bits, from -7 to 7.
    steps : ndarray
        float32 (m, k / BLOCK), positive.
    bits : int
        4 or 8.
    """

    whole: NDArray[np.int8]
    steps: NDArray[np.float32]
    bits: int

    @property
    def values(self) -> NDArray[np.float32]:
        """The weight (m, k) that these numbers are worth."""
        return (self.whole * self.steps[..., None]).reshape(len(self.whole), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, packed, and of the steps."""
        return self.whole.size * self.bits // 8 + self.steps.nbytes

    def pack(self, zero: int = 0) -> NDArray[np.uint8]:
        """Return the numbers plus `zero` as bytes, (m, k / BLOCK, BLOCK * bits / 8).

        In four bits, two are in a byte, the first one in its lower half.
        """
        stored: NDArray[np.uint8] = (self.whole.astype(np.int16) + zero).astype(np.uint8)
        if self.bits == 4:
            low, high = stored[..., 0::2] & np.uint8(15), stored[..., 1::2] << np.uint8(4)
            stored = low | high
        return stored


def round_in_blocks(weight: NDArray[np.float32], bits: int) -> BlockSteps:
    """Return a weight rounded to steps of its blocks. Raises Unsupported where blocks do not divide its rows."""
    m, k = weight.shape
    if k % BLOCK:
        raise Unsupported(f"steps for every {BLOCK} columns do not fit a layer of {k} columns")
    most = 2 ** (bits - 1) - 1
    blocks = weight.reshape(m, k // BLOCK, BLOCK)
    steps = np.abs(blocks).max(axis=2) / np.float32(most)
    steps = np.where(steps > 0, steps, np.float32(1))
    return BlockSteps(np.rint(blocks / steps[..., None]).astype(np.int8), steps, bits)


def check_in_blocks(
    y: NDArray[np.float32], weight: BlockSteps, x: NDArray[np.float32], bias: NDArray[np.float32], rounds_inputs: bool
) -> float:
    """Raise WrongResult unless y (n, m) is the product of x (n, k) and this weight, plus the bias.

    rounds_inputs: each block of x may be rounded to 127 steps of its largest value, so that every element may move by
    half a step. Returns the largest error relative to |w| @ |x| + |bias|.
    """
    values = weight.values.astype(np.float64)
    expected, scale = values @ x.T + bias[:, None], np.abs(values) @ np.abs(x.T) + np.abs(bias)[:, None]
    bound = 2 * (x.shape[1] + 2) * UNIT_ROUNDOFF * scale
    if rounds_inputs:
        largest = np.abs(x.reshape(len(x), -1, BLOCK)).max(axis=2).astype(np.float64)
        sums = np.abs(values.reshape(*weight.steps.shape, BLOCK)).sum(axis=2)
        bound += sums @ largest.T / (2 * 127)
    return compare_results(y.T, expected, bound, scale)
