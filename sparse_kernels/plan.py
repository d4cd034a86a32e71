"""A plan is a packed weight made ready to run: everything that can be done once is done in `prepare`.

Linear layouts: `feature_major` x (k, n) -> y (m, n); `token_major` x (n, k) -> y (n, m); on backend `numba` also
`token_blocked`, whole tiles of t tokens, x (tiles, k, t) -> y (tiles, m, t), see `cpu.transpose`; `into_blocks`, x
token-major -> y token-blocked, and `out_of_blocks`, the other way, as many tokens as `out` has rows. Convolutions:
`nchw` x (batch, c_in, h, w) -> y (batch, c_out, out_h, out_w); `chwn`, where the batch comes last in both.
Activations: None, `relu`, `gelu` (the exact form, with erf). Backends `reference` and `numba` take NumPy arrays of
float32; `cupy` and `numba_cuda` take arrays on the GPU, as their own plans say.
"""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sparse_kernels import registry
from sparse_kernels.formats import Packed
from sparse_kernels.shapes import Conv2dShape

Array = NDArray[np.float32]

LAYOUTS = ("feature_major", "token_major")
BLOCKED_LAYOUTS = ("token_blocked", "into_blocks", "out_of_blocks")
CONV2D_LAYOUTS = ("nchw", "chwn")
ACTIVATIONS = (None, "relu", "gelu")

_FLOAT32 = np.dtype(np.float32)


class Plan(Protocol):
    """A weight ready to be multiplied. Prepared for n columns (or a batch), it runs any number of them."""

    @property
    def kernel(self) -> str:
        """The name of the kernel that really runs, such as numba.vector.tokens8x2."""

    @property
    def layout(self) -> str:
        """How x and y lie, as it was asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as this plan holds them."""

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(w @ x + bias) in the plan's layout; bias (m,); written to `out` where given, and returned."""

    def copy(self) -> Self:
        """A plan with weights of its own at another address."""


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
    function = registry.find(packed.pattern.format, "linear", backend)
    if backend != "numba":
        if tune or precision != "float32":
            said = "tune=True" if tune else f"precision={precision!r}"
            raise ValueError(f"{said} is for backend numba, not {backend}")
        return function(packed, layout, n)
    if not tune:
        return function(packed, layout, n, precision)
    from sparse_kernels.cpu import tuner  # here, so that `import sparse_kernels` stays light

    return tuner.prepare(packed, layout, n, precision=precision)


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
    function = registry.find(packed.pattern.format, "conv2d", backend)
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


def check_call(
    x: Array,
    x_shape: tuple[int | None, ...],
    bias: Array | None,
    activation: str | None,
    out: Array | None,
    y_shape: tuple[int | None, ...],
    features: int,
) -> None:
    """Refuse what a plan cannot run, in a sentence.

    x_shape, y_shape: None stands for the free length (n tokens, batch), the same in both. features: the length of
    the bias. x may have any strides; out must be C-contiguous, writable and no part of x or bias. TypeError for
    another dtype than float32.
    """
    _check_float32("x", x)
    if bias is not None:
        _check_float32("bias", bias)
    if out is not None:
        _check_float32("out", out)
    free = x.shape[x_shape.index(None)] if None in x_shape and x.ndim == len(x_shape) else None
    if x.shape != _filled(x_shape, free):
        wanted = ", ".join("any" if want is None else str(want) for want in x_shape)
        raise ValueError(f"x must be of shape ({wanted}), not {x.shape}")
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"bias must be of shape ({features},), not {bias.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
    if out is not None:
        if out.shape != _filled(y_shape, free):
            raise ValueError(f"out must be of shape {_filled(y_shape, free)}, not {out.shape}")
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError("out must be C-contiguous and writable")
        for name, array in (("x", x), ("bias", bias)):
            if array is not None and np.may_share_memory(out, array):
                raise ValueError(f"out must not share memory with {name}")


def _check_float32(name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != _FLOAT32:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a float32 array, not {found}")


def _filled(shape: tuple[int | None, ...], free: int | None) -> tuple[int | None, ...]:
    """The shape with its free length written in."""
    if None not in shape:
        return shape
    at = shape.index(None)
    return (*shape[:at], free, *shape[at + 1 :])
