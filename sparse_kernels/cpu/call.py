"""What every plan does with the arguments of a call before a kernel may have them."""

from __future__ import annotations

import math

import numpy as np

from sparse_kernels.cpu.scratch import aligned
from sparse_kernels.plan import ACTIVATIONS, Array, check_call

# Elements from which on results start at a cache line: NumPy puts large arrays 16 bytes behind one, every vector that
# is stored then crosses two, and a layer of 3072 outputs takes a tenth longer.
LARGE = 2**16


def arguments(
    x: Array,
    x_shape: tuple[int | None, ...],
    bias: Array | None,
    activation: str | None,
    out: Array | None,
    y_shape: tuple[int | None, ...],
    features: int,
) -> tuple[Array, Array, Array, int]:
    """(x, y, bias, code of the activation) as kernels take them; refuses what `check_call` refuses.

    x and bias are C-contiguous, copied where they are not; y is `out` where given; no bias is `features` zeros.
    """
    check_call(x, x_shape, bias, activation, out, y_shape, features)
    free = x.shape[x_shape.index(None)]
    y = _empty([free if length is None else length for length in y_shape]) if out is None else out
    bias = np.zeros(features, np.float32) if bias is None else np.ascontiguousarray(bias)
    return np.ascontiguousarray(x), y, bias, ACTIVATIONS.index(activation)


def linear_arguments(
    layout: str, m: int, k: int, tokens: int, x: Array, bias: Array | None, activation: str | None, out: Array | None
) -> tuple[Array, Array, Array, int, int]:
    """`arguments` of a linear layer (m, k) in any layout, blocked ones in tiles of so many tokens; and the tokens.

    Tokens that fill up a last tile count, unless `out` is token-major and says how many there are. Where x is
    token-major they are 0 in y: what reads them next computes on them.
    """
    if layout == "token_major":
        found = arguments(x, (None, k), bias, activation, out, (None, m), m)
        return *found, found[0].shape[0]
    if layout == "feature_major":
        found = arguments(x, (k, None), bias, activation, out, (m, None), m)
        return *found, found[0].shape[1]
    if layout == "into_blocks":
        n = np.shape(x)[0] if np.ndim(x) else 0
        x, y, bias, code = arguments(x, (None, k), bias, activation, out, (-(-n // tokens), m, tokens), m)
        if n % tokens:
            y[-1, :, n % tokens :] = 0
        return x, y, bias, code, n
    if layout == "out_of_blocks":
        tiles = np.shape(x)[0] if np.ndim(x) else 0
        wanted = np.shape(out)[0] if np.ndim(out) else 0  # type: ignore[arg-type]
        n = wanted if -(-wanted // tokens) == tiles else tiles * tokens
        return *arguments(x, (None, k, tokens), bias, activation, out, (n, m), m), n
    found = arguments(x, (None, k, tokens), bias, activation, out, (None, m, tokens), m)
    return *found, len(found[0]) * tokens


def _empty(shape: list[int]) -> Array:
    """Room for a result, from the start of a cache line on where it is large. Zeros would be written in vain."""
    size = math.prod(shape)
    return aligned(size, allocate=np.empty).reshape(shape) if size > LARGE else np.empty(shape, np.float32)
