"""Make a packed weight ready to run, on any backend: the plan of a linear layer or of a convolution."""

from __future__ import annotations

import numpy as np

from sparse_kernels.formats import Packed
from sparse_kernels.formats.int8 import Int8Weight
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, CONV2D_LAYOUTS, LAYOUTS, Array, Plan
from sparse_kernels.registry import find_kernel
from sparse_kernels.shapes import Conv2dShape


def prepare(
    packed: Packed | Int8Weight,
    backend: str,
    layout: str,
    n: int,
    *,
    tune: bool = False,
    precision: str = "float32",
) -> Plan:
    """Make a linear layer's packed weight ready to run.

    Parameters
    ----------
    packed : Packed or Int8Weight
        The weight (m, k), from `pack`. From `pack_int8`: ``token_major``, on ``numba`` and ``reference``.
    backend : str
        ``reference``, ``numba``, ``cupy`` or ``numba_cuda``.
    layout : str
        How x and y lie, see `plan_protocol`: ``token_major``, ``feature_major``, or a blocked layout.
    n : int
        About how many tokens a call has; the plan runs any number.
    tune : bool
        Try a few kernels for n tokens and Numba's threads of now, and take the fastest. Only backend ``numba``. The
        first time takes seconds; then the result is kept on disk, see `cpu.plans.autotune`.
    precision : str
        What may be rounded, backend ``numba`` only. ``float32``: nothing. ``bfloat16-weights``: the weights, to the
        nearest bfloat16. It pays for few tokens, for patterns whose rows fill vectors. ``bfloat16``: x too, where
        that is faster. It pays for many tokens, for patterns whose rows share columns, on processors that multiply
        pairs of bfloat16. ``int8-weights``: an `Int8Weight` alone, for few tokens. Sums and results are float32.

    Returns
    -------
    Plan
        Called with x, and optionally bias (m,), an activation and ``out``, it returns activation(w @ x + bias).

    Raises
    ------
    ValueError
        If layout or backend is unknown, or the backend or the pattern does not take layout, tuning or precision.
    MissingLibrary
        If the backend needs a library that is not installed.
    """
    if layout not in (*LAYOUTS, *BLOCKED_LAYOUTS):
        known = ", ".join((*LAYOUTS, *BLOCKED_LAYOUTS))
        raise ValueError(f"unknown layout {layout!r} of a linear layer: known are {known}")
    if layout in BLOCKED_LAYOUTS and backend != "numba":
        raise ValueError(f"layout {layout} is for backend numba, not {backend}")
    if not isinstance(n, int | np.integer) or n < 0:
        raise ValueError(f"n must be a number of columns of at least 0, not {n}")
    if isinstance(packed, Int8Weight):
        _check_int8(precision, tune)
        kernel = "int8" if precision == "float32" else precision
        return find_kernel(kernel, "linear", backend)(packed, layout, n)
    function = find_kernel(packed.pattern.format, "linear", backend)
    if backend != "numba":
        if tune or precision != "float32":
            setting = "tune=True" if tune else f"precision={precision!r}"
            raise ValueError(f"{setting} is for backend numba, not {backend}")
        return function(packed, layout, n)
    return function(packed, layout, n, precision, tune=tune)


def prepare_conv2d(
    packed: Packed | Int8Weight,
    shape: Conv2dShape,
    backend: str,
    layout: str | None = None,
    *,
    precision: str = "float32",
) -> Plan:
    """Make a convolution's packed weight ready to run.

    Parameters
    ----------
    packed : Packed or Int8Weight
        The weight (c_out, kh*kw*c_in), from `pack`. From `pack_int8` with an input range for a product in eight bits,
        with the backends ``numba`` and ``reference``.
    shape : Conv2dShape
        The layer, for about shape.batch images a call; the plan runs any number.
    backend : str
        ``reference``, ``numba``, ``cupy`` or ``numba_cuda``.
    layout : str or None
        ``nchw`` or ``chwn``; by default that of the backend.
    precision : str
        ``float32``, or ``bfloat16`` as in `prepare`.

    Returns
    -------
    Plan
        Called with x, and optionally bias (c_out,), an activation and ``out``, it returns the activation of the
        result.

    Raises
    ------
    ValueError
        If layout or backend is unknown, the weight does not fit the shape, or the backend or the pattern does not
        take layout or precision.
    MissingLibrary
        If the backend needs a library that is not installed.
    """
    own = "chwn" if backend == "cupy" else "nchw"
    layout = layout or own
    if layout not in CONV2D_LAYOUTS:
        raise ValueError(f"unknown layout {layout!r} of a convolution: known are {', '.join(CONV2D_LAYOUTS)}")
    if packed.shape != (shape.m, shape.k):
        raise ValueError(f"the packed weight is {packed.shape}, and {shape} needs {(shape.m, shape.k)}")
    in_bytes = isinstance(packed, Int8Weight)
    function = find_kernel("int8" if in_bytes else packed.pattern.format, "conv2d", backend)
    if layout != own:
        raise ValueError(f"backend {backend} takes convolutions in layout {own}, not {layout}")
    if in_bytes:
        _check_int8(precision)
        return function(packed, shape, layout)
    if backend == "numba":
        return function(packed, shape, layout, precision)
    if precision != "float32":
        raise ValueError(f"precision={precision!r} is for backend numba, not {backend}")
    return function(packed, shape, layout)


def _check_int8(precision: str, tune: bool = False) -> None:
    if tune or precision not in ("float32", "int8-weights"):
        raise ValueError("a weight in eight bits takes neither tune=True nor another precision than int8-weights")


def matmul(packed: Packed, x: Array, *, backend: str) -> Array:
    """Multiply once, without keeping a plan.

    Parameters
    ----------
    packed : Packed
        The weight (m, k).
    x : float32 array (k, n)
        One column a token.
    backend : str
        As in `prepare`.

    Returns
    -------
    float32 array (m, n)
        w @ x.
    """
    return prepare(packed, backend, "feature_major", x.shape[-1] if x.ndim else 0)(x)
