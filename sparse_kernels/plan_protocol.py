"""Plans: packed weights made ready to run. `planner.prepare` does once everything that can be done once.

Layouts of linear layers, with n tokens, k inputs and m outputs:

- `feature_major`: x (k, n) -> y (m, n)
- `token_major`: x (n, k) -> y (n, m)
- `token_blocked`: whole tiles of t tokens, x (tiles, k, t) -> y (tiles, m, t), see `cpu.kernels.transpose_tiles`
- `into_blocks`: x token-major -> y token-blocked
- `out_of_blocks`: x token-blocked -> y token-major, as many tokens as `out` has rows

The last three are for backend `numba`. Layouts of convolutions: `nchw`, x (batch, c_in, h, w) -> y (batch, c_out,
out_h, out_w), and `chwn`, where the batch comes last in both.

Activations: None, `relu`, `gelu` (the exact form, with erf). Backends `reference` and `numba` take NumPy arrays of
float32; `cupy` and `numba_cuda` take arrays on the GPU, as their own plans say.
"""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

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
        """Return activation(w @ x + bias) in the plan's layout; bias (m,). Write it to `out` if given."""

    def copy(self) -> Self:
        """Return a plan with weights of its own at another address."""


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
    """Return the shape with its free length written in."""
    if None not in shape:
        return shape
    at = shape.index(None)
    return (*shape[:at], free, *shape[at + 1 :])
