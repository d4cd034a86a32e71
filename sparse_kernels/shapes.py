"""The two layer kinds that latbench prunes, by shape alone.

Every layer is a matrix product `y (m, n) = w (m, k) @ x (k, n)`: m output features, k input features, n columns. A
linear layer's columns are tokens. A convolution's columns are output positions times batch (implicit GEMM, nothing is
materialised). Its k is kh*kw*c_in, with column (r*kw + s)*c_in + c.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A linear layer: weight (m, k), n tokens a call."""

    m: int
    k: int
    n: int

    op = "linear"

    def __post_init__(self) -> None:
        _check_counts(self, minimum={"m": 1, "k": 1, "n": 0})

    @property
    def flop(self) -> int:
        """Multiplications and additions of the dense product."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class Conv2dShape:
    """A 2-d convolution without groups, NCHW input (batch, c_in, h, w); padding is symmetric with zeros."""

    batch: int
    c_in: int
    h: int
    w: int
    c_out: int
    kh: int
    kw: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    op = "conv2d"

    def __post_init__(self) -> None:
        _check_counts(self, minimum={"batch": 0, "c_in": 1, "h": 1, "w": 1, "c_out": 1, "kh": 1, "kw": 1})
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            if len(pair) != 2 or min(pair) < least:
                raise ValueError(f"{name} must be two numbers of at least {least}, not {pair}")
        if min(self.out_h, self.out_w) < 1:
            raise ValueError(f"a {self.kh}x{self.kw} kernel does not fit a {self.h}x{self.w} input: {self}")

    @property
    def out_h(self) -> int:
        """Rows of the output image."""
        return (self.h + 2 * self.padding[0] - self.dilation[0] * (self.kh - 1) - 1) // self.stride[0] + 1

    @property
    def out_w(self) -> int:
        """Columns of the output image."""
        return (self.w + 2 * self.padding[1] - self.dilation[1] * (self.kw - 1) - 1) // self.stride[1] + 1

    @property
    def m(self) -> int:
        """Output features: rows of the weight matrix."""
        return self.c_out

    @property
    def k(self) -> int:
        """Input features of the implicit product: columns of the weight matrix."""
        return self.kh * self.kw * self.c_in

    @property
    def n(self) -> int:
        """Columns of the implicit product: output positions times batch."""
        return self.batch * self.out_h * self.out_w

    @property
    def flop(self) -> int:
        """Multiplications and additions of the dense product."""
        return 2 * self.m * self.k * self.n


Shape = LinearShape | Conv2dShape


def _check_counts(shape: Shape, minimum: dict[str, int]) -> None:
    for name, least in minimum.items():
        value = getattr(shape, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
