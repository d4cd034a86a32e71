"""Linear layers in eight bits whose results float32 holds exactly: weights, and inputs that lie on steps."""

import numpy as np

from sparse_kernels import Pattern
from sparse_kernels.formats.int8 import InputRange, Int8Weight, pack_int8


def draw_weight(
    rng: np.random.Generator, pattern: Pattern, m: int, k: int, reading: InputRange | None, sparsity: float = 0.7
) -> Int8Weight:
    """Whole numbers from -127 to 127, whose rows are worth powers of two."""
    weight = rng.integers(-127, 128, (m, k)).astype(np.float32)
    own = getattr(pattern, "sparsity", 0.0 if pattern.format == "dense" else sparsity)
    mask = pattern.mask(weight.astype(float) ** 2, own)
    scales = (2.0 ** rng.integers(-6, 2, m)).astype(np.float32)
    return pack_int8(weight * scales[:, None], mask, pattern, scales, reading)


def draw_on_steps(rng: np.random.Generator, n: int, k: int, reading: InputRange | None) -> np.ndarray:
    """x (n, k) that lies on steps, of all values that there are."""
    if reading is None:
        q = rng.integers(-127, 128, (n, k))
        q[:, 0] = 127  # the largest of each token is 127 of its steps
        return (q * (2.0 ** rng.integers(-6, 6, (n, 1)))).astype(np.float32)
    return ((rng.integers(0, 256, (n, k)) - reading.zero) * reading.scale).astype(np.float32)
