"""float32 as the sum of three bfloat16, its thirds, exactly: x = high + middle + low.

bfloat16 has the exponent of float32 and 8 bits of its 24. What is left after rounding to it has at most 16 bits, and
what is left after rounding that at most 8. A matrix unit that multiplies bfloat16 and sums in float32 then gives
float32 products from the six products of thirds that count:

    w x  ~  wh xh + (wh xm + wm xh) + (wh xl + wl xh + wm xm),      what is left out: at most 2**-23 |w x|

(Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations".) Its limits:

- What the unit takes for 0 is below 2**-126: thirds, which makes a product wrong by up to that times the other
  factor, and sums.
- Infinity, NaN, and numbers that round to infinity (from 3.396e38 on) have no thirds (`has_thirds`): one of those
  that come out is infinity or NaN.
- Products of thirds may overflow where that of their numbers does not, and two that do may leave NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HALF, UPPER = 0x8000, 0xFFFF0000

# Bits of the least |x| whose upper half, rounded, is infinity.
TOO_LARGE = 0x7F7F8000


def has_thirds(values: NDArray[np.float32]) -> bool:
    """Return whether every number is finite and below 3.39e38."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    return not np.any(bits >= TOO_LARGE)


def split_thirds(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of high, middle and low, (3, *shape), of numbers that `has_thirds` accepts."""

    def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
        bits = x.view(np.uint32)
        return ((bits + np.uint32(HALF)) & np.uint32(UPPER)).view(np.float32)

    values = np.ascontiguousarray(values, np.float32)
    high = rounded(values)
    middle = rounded(values - high)
    low = values - high - middle
    return np.stack([(third.view(np.uint32) >> 16).astype(np.uint16) for third in (high, middle, low)])
