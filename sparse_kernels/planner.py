"""Make a packed weight ready to run, on any backend: the plan of a linear layer or of a convolution."""

from __future__ import annotations

import numpy as np

from sparse_kernels import registry
from sparse_kernels.formats import Packed
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, CONV2D_LAYOUTS, LAYOUTS, Array, Plan
from sparse_kernels.shapes import Conv2dShape


def prepare(
    packed: Packed, backend: str, layout: str, n: int, *, tune: bool = False, precision: str = "float32"
) -> Plan:
    """Make a linear layer's packed weight (m, k) ready for about n columns, on a backend of the registry.

    tune: try a few kernels for n columns and Numba's threads of now, and take the fastest; backend `numba` only. The
    first time takes some seconds, then what was found is kept on disk: see `cpu.tuner`.

    precision: `bfloat16-weights` rounds the weights to the nearest bfloat16, ties to even, and nothing else, for
    patterns whose rows fill vectors: it pays for few tokens, where a layer waits for its weights. `bfloat16` rounds x
    too where that is faster, for patterns whose rows share columns: it pays for many tokens, on processors that
    multiply pairs of bfloat16. Sums and results are float32 either way; backend `numba` only.

    Raises ValueError for an unknown layout or backend, a layout that the backend does not take, a backend that cannot
    be tuned, and a precision that the backend or the pattern does not take.
    """
    if layout not in (*LAYOUTS, *BLOCKED_LAYOUTS):
        known = ", ".join((*LAYOUTS, *BLOCKED_LAYOUTS))
        raise ValueError(f"unknown layout {layout!r} of a linear layer: known are {known}")
    if layout in BLOCKED_LAYOUTS and backend != "numba":
        raise ValueError(f"layout {layout} is for backend numba, not {backend}")
    if not isinstance(n, int | np.integer) or n < 0:
        raise ValueError(f"n is a number of columns, not {n}")
    function = registry.find_kernel(packed.pattern.format, "linear", backend)
    if backend != "numba":
        if tune or precision != "float32":
            said = "tune=True" if tune else f"precision={precision!r}"
            raise ValueError(f"{said} is for backend numba, not {backend}")
        return function(packed, layout, n)
    return function(packed, layout, n, precision, tune=tune)


def prepare_conv2d(
    packed: Packed, shape: Conv2dShape, backend: str, layout: str | None = None, *, precision: str = "float32"
) -> Plan:
    """Make a convolution's packed weight (c_out, kh*kw*c_in) ready for about shape.batch images, on `backend`.

    layout: the backend's own unless given. precision: float32, or `bfloat16` as `prepare` takes it. Raises ValueError
    for an unknown layout or backend, a layout that the backend does not take, a weight that does not fit the shape,
    and a precision that the backend or the pattern does not take.
    """
    own = "chwn" if backend == "cupy" else "nchw"
    layout = layout or own
    if layout not in CONV2D_LAYOUTS:
        raise ValueError(f"unknown layout {layout!r} of a convolution: known are {', '.join(CONV2D_LAYOUTS)}")
    if packed.shape != (shape.m, shape.k):
        raise ValueError(f"the packed weight is {packed.shape}, and {shape} needs {(shape.m, shape.k)}")
    function = registry.find_kernel(packed.pattern.format, "conv2d", backend)
    if layout != own:
        raise ValueError(f"backend {backend} takes convolutions in layout {own}, not {layout}")
    if backend == "numba":
        return function(packed, shape, layout, precision)
    if precision != "float32":
        raise ValueError(f"precision={precision!r} is for backend numba, not {backend}")
    return function(packed, shape, layout)


def matmul(packed: Packed, x: Array, *, backend: str) -> Array:
    """w (m, k) @ x float32 (k, n) -> y float32 (m, n): prepares and runs once."""
    return prepare(packed, backend, "feature_major", x.shape[-1] if x.ndim else 0)(x)
