"""What every plan does with the arguments of a call before a kernel may have them."""

from __future__ import annotations

import numpy as np

from sparse_kernels.plan import ACTIVATIONS, Array, check_call


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
    y = np.empty([free if length is None else length for length in y_shape], np.float32) if out is None else out
    bias = np.zeros(features, np.float32) if bias is None else np.ascontiguousarray(bias)
    return np.ascontiguousarray(x), y, bias, ACTIVATIONS.index(activation)
