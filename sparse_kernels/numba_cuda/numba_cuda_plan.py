"""Plans of backend numba_cuda: a packed weight on the GPU and its launches, float32 or float16.

x, out: arrays on the GPU of any library (`operands`), of the plan's dtype. bias: float32. Sums are float32 always. A
call returns when its kernels are queued on the default stream, not when they are done. Without `out` it returns an
array of numba.cuda.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sparse_kernels.formats import BlockWeight, CSRWeight, DenseWeight, NMWeight, Packed, VectorWeight
from sparse_kernels.numba_cuda import block, csr, dense, nm, vector
from sparse_kernels.numba_cuda.layouts import IMAGES, MATRIX, ActivationLayout, build_taps
from sparse_kernels.numba_cuda.library import cuda, require_device
from sparse_kernels.numba_cuda.operands import check_apart, view_on_gpu
from sparse_kernels.numba_cuda.tile import ThreadBlockTile
from sparse_kernels.numba_cuda.transpose import transpose
from sparse_kernels.plan_protocol import ACTIVATIONS
from sparse_kernels.shapes import Conv2dShape

DTYPES = ("float32", "float16")
FLOAT32 = np.dtype(np.float32)


class Format(Protocol):
    """What the file of each format offers."""

    def choose_tile(self, packed: Any, n: int) -> ThreadBlockTile:
        """Return what a block of threads computes, where x has about n columns."""

    def count_row_tiles(self, packed: Any, tile: ThreadBlockTile) -> int:
        """Return how many tiles lie on top of each other in y."""

    def build_arguments(self, packed: Any, dtype: np.dtype) -> tuple[np.ndarray | int, ...]:
        """Return the tuple of weights that the kernel takes before (source, n, bias, activation, y)."""

    def build_kernel(self, layout: ActivationLayout, tile: ThreadBlockTile) -> Any:
        """Return the kernel, compiled when it is first run with arguments of new types."""


FORMATS: dict[type, Format] = {
    DenseWeight: dense,
    CSRWeight: csr,
    NMWeight: nm,
    BlockWeight: block,
    VectorWeight: vector,
}


@dataclass(frozen=True, eq=False)
class Weight:
    """A packed weight on the GPU, and how it is multiplied."""

    format: Format
    tile: ThreadBlockTile
    row_tiles: int
    arguments: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(it.size * it.dtype.itemsize for it in self.arguments if not isinstance(it, int))

    def multiply(
        self, layout: ActivationLayout, source: tuple[Any, ...], n: int, bias: Any, activation: int, y: Any
    ) -> None:
        """Queue y = activation(w @ x + bias) for n columns: a block a tile, tiles numbered row of tiles by row."""
        blocks = -(-n // self.tile.width) * self.row_tiles
        launch = self.format.build_kernel(layout, self.tile)[blocks, self.tile.block]
        launch(self.arguments, source, n, bias, activation, y)

    def copy(self) -> Weight:
        """Return the same weight at other addresses."""
        return replace(self, arguments=tuple(it if isinstance(it, int) else _copied(it) for it in self.arguments))


@dataclass(frozen=True, eq=False)
class NumbaCudaLinearPlan:
    """A linear layer's plan. Token-major x and y are turned around on the way in and out, in the plan's time."""

    shape: tuple[int, int]
    weight: Weight
    no_bias: Any
    kernel: str
    layout: str
    dtype: np.dtype
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turned: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the GPU."""
        return self.weight.nbytes

    def __call__(self, x: Any, bias: Any = None, activation: str | None = None, out: Any = None) -> Any:
        """activation(w @ x + bias) in the plan's layout, as `Plan` says, on the GPU."""
        m, k = self.shape
        tokens_first = self.layout == "token_major"
        x = view_on_gpu("x", x, self.dtype, (None, k) if tokens_first else (k, None))
        n = x.shape[0] if tokens_first else x.shape[1]
        y = _result(x, out, self.dtype, (n, m) if tokens_first else (m, n))
        bias, code = _bias(bias, self.no_bias), _code(activation)
        if n == 0:
            return y if out is None else out
        if not tokens_first:
            self.weight.multiply(MATRIX, (x,), n, bias, code, y)
        else:
            with self._lock:  # the three of one call must follow each other in the stream
                x_turned, y_turned = self._buffers(n)
                transpose(x, x_turned)
                self.weight.multiply(MATRIX, (x_turned,), n, bias, code, y_turned)
                transpose(y_turned, y)
        return y if out is None else out

    def copy(self) -> NumbaCudaLinearPlan:
        """Return the same plan with weights of its own."""
        return NumbaCudaLinearPlan(self.shape, self.weight.copy(), self.no_bias, self.kernel, self.layout, self.dtype)

    def _buffers(self, n: int) -> tuple[Any, Any]:
        """x (k, n) and y (m, n), kept for the next call with as many tokens."""
        if n not in self._turned:
            m, k = self.shape
            self._turned.clear()
            self._turned[n] = cuda.device_array((k, n), self.dtype), cuda.device_array((m, n), self.dtype)
        return self._turned[n]


@dataclass(frozen=True, eq=False)
class NumbaCudaConv2dPlan:
    """A convolution's plan, NCHW: implicit GEMM, nothing but y is written."""

    shape: Conv2dShape
    weight: Weight
    taps: Any
    no_bias: Any
    kernel: str
    layout: str
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the GPU."""
        return self.weight.nbytes

    def __call__(self, x: Any, bias: Any = None, activation: str | None = None, out: Any = None) -> Any:
        """activation(convolution of x + bias), as `Plan` says, on the GPU."""
        s = self.shape
        x = view_on_gpu("x", x, self.dtype, (None, s.c_in, s.h, s.w))
        batch = x.shape[0]
        y = _result(x, out, self.dtype, (batch, s.c_out, s.out_h, s.out_w))
        bias, code = _bias(bias, self.no_bias), _code(activation)
        if batch > 0:
            self.weight.multiply(IMAGES, (x, self.taps, *s.stride), batch * s.out_h * s.out_w, bias, code, y)
        return y if out is None else out

    def copy(self) -> NumbaCudaConv2dPlan:
        """Return the same plan with weights of its own."""
        return replace(self, weight=self.weight.copy())


def prepare_numba_cuda_linear(
    packed: Packed, layout: str, n: int, dtype: str = "float32", tile: ThreadBlockTile | None = None
) -> NumbaCudaLinearPlan:
    """Return the plan of a linear layer for about n columns. `tile` replaces the one that fits the format.

    Raises NoDevice without a GPU, ValueError for another dtype or weights that float16 cannot hold.
    """
    element = _dtype(dtype)
    require_device()
    weight = _weight(packed, n, element, tile)
    return NumbaCudaLinearPlan(packed.shape, weight, _zeros(packed), _name(packed, "", weight.tile), layout, element)


def prepare_conv2d(
    packed: Packed, shape: Conv2dShape, layout: str, dtype: str = "float32", tile: ThreadBlockTile | None = None
) -> NumbaCudaConv2dPlan:
    """Return the plan of a convolution; otherwise as `prepare_numba_cuda_linear`."""
    element = _dtype(dtype)
    require_device()
    weight = _weight(packed, shape.n, element, tile)
    name = _name(packed, ".conv2d", weight.tile)
    return NumbaCudaConv2dPlan(
        shape, weight, cuda.to_device(build_taps(shape)), _zeros(packed), name, layout, element
    )


def _weight(packed: Packed, n: int, dtype: np.dtype, tile: ThreadBlockTile | None) -> Weight:
    largest = np.abs(packed.values).max(initial=0)
    if largest > np.finfo(dtype).max:
        raise ValueError(
            f"{dtype} cannot hold a weight of {largest:g}: its largest number is {np.finfo(dtype).max:g}"
        )
    format = FORMATS[type(packed)]
    tile = format.choose_tile(packed, n) if tile is None else tile
    arguments = (it if isinstance(it, int) else cuda.to_device(it) for it in format.build_arguments(packed, dtype))
    return Weight(format, tile, format.count_row_tiles(packed, tile), tuple(arguments))


def _name(packed: Packed, op: str, tile: ThreadBlockTile) -> str:
    return f"numba_cuda.{packed.pattern.format}{op}.{tile.height}x{tile.width}"


def _dtype(dtype: str) -> np.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"backend 'numba_cuda' has no {dtype} kernels: known are {', '.join(DTYPES)}")
    return np.dtype(dtype)


def _zeros(packed: Packed) -> Any:
    """Return the bias (m,) of a call without one."""
    return cuda.to_device(np.zeros(packed.shape[0], np.float32))


def _copied(array: Any) -> Any:
    copy = cuda.device_array(array.shape, array.dtype)
    copy.copy_to_device(array)
    return copy


def _result(x: Any, out: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """Return where y goes: `out` as numba.cuda sees it, or a new array."""
    if out is None:
        return cuda.device_array(shape, dtype)
    y = view_on_gpu("out", out, dtype, shape)
    check_apart(x, y)
    return y


def _bias(bias: Any, no_bias: Any) -> Any:
    return no_bias if bias is None else view_on_gpu("bias", bias, FLOAT32, no_bias.shape)


def _code(activation: str | None) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
    return ACTIVATIONS.index(activation)
