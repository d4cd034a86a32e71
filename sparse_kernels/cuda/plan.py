"""Plans on a GPU: CuPy uploads a program's constant arrays once, and launches its kernels on the current stream.

x and out are CuPy arrays of float16, or of uint16 that holds the bits of bfloat16; they are contiguous and lie
feature-major: linear x (k, n) -> out (m, n); convolution, layout `chwn`, x (c_in, h, w, batch) -> out (c_out, out_h,
out_w, batch). The bias is float32. A call returns as soon as the work is on its way.

What needs a GPU is behind `Machine`, so that all else is tested without one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import build, variants
from sparse_kernels.cuda.program import DTYPES, Argument, Dim3, Launch, NotSupported, Operand, Program, Variant
from sparse_kernels.formats import Packed
from sparse_kernels.plan import ACTIVATIONS
from sparse_kernels.registry import MissingLibrary, NoDevice
from sparse_kernels.shapes import Conv2dShape

ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")

STORED_AS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}

LINEAR_LAYOUT = "feature_major"
CONV2D_LAYOUT = "chwn"

# A GPU array; CuPy has no types to check against.
Array = Any

Kernel = Callable[[Dim3, Dim3, tuple[Any, ...]], None]
"""A loaded kernel: called with grid, block and arguments."""


class Machine(Protocol):
    """What a plan asks of a GPU."""

    @property
    def architecture(self) -> str:
        """One of ARCHITECTURES."""

    def upload(self, array: NDArray[np.generic]) -> Array:
        """A copy of the array on the GPU."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new array."""

    def clear(self, array: Array) -> None:
        """Fill with zero bytes, on the current stream."""

    def is_own(self, array: object) -> bool:
        """Whether it is an array of this GPU."""

    def share_memory(self, first: Array, second: Array) -> bool:
        """Whether two arrays may overlap."""

    def kernel(self, variant: Variant, shared_bytes: int) -> Kernel:
        """A variant, compiled and loaded, that may use so much dynamic shared memory."""


@dataclass(frozen=True)
class Prepared:
    """A launch whose kernel is loaded and whose constant arrays are uploaded."""

    kernel: Kernel
    grid: Dim3
    block: Dim3
    arguments: tuple[Any, ...]  # operands are filled in at each call

    def run(self, operands: Mapping[Operand, Any]) -> None:
        """Put it on the stream."""
        filled = (operands[it] if isinstance(it, Operand) else it for it in self.arguments)
        self.kernel(self.grid, self.block, tuple(filled))


@dataclass(frozen=True)
class Calls:
    """What runs for one number of columns and activation.

    The scratch stays: a CUDA graph that was captured from a call goes on using it.
    """

    launches: tuple[Prepared, ...]
    scratch: Array | None


@dataclass(frozen=True, eq=False)
class CudaPlan:
    """A program on a machine, for x of x_shape and out of y_shape; None stands for the free length n, in both.

    Calls follow each other on one stream: they share scratch.
    """

    program: Program
    machine: Machine
    x_shape: tuple[int | None, ...]
    y_shape: tuple[int | None, ...]
    dtype: str
    kernel: str
    layout: str
    _uploads: dict[int, tuple[NDArray[np.generic], Array]] = field(default_factory=dict)
    _calls: dict[tuple[int, str | None], Calls] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernels read them."""
        return self.program.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(w @ x + bias), as `Plan` says, on the current stream."""
        check_call(self.machine, x, self.x_shape, bias, activation, out, self.y_shape, STORED_AS[self.dtype])
        n = int(x.shape[self.x_shape.index(None)])
        if out is None:
            out = self.machine.empty(_with(self.y_shape, n), STORED_AS[self.dtype])
        calls = self.calls(n, activation)
        if calls.scratch is not None:
            self.machine.clear(calls.scratch)
        null = np.uint64(0)
        operands = {
            Operand.X: x,
            Operand.OUT: out,
            Operand.BIAS: null if bias is None else bias,
            Operand.SCRATCH: null if calls.scratch is None else calls.scratch,
        }
        for launch in calls.launches:
            launch.run(operands)
        return out

    def calls(self, n: int, activation: str | None) -> Calls:
        """What runs for n columns; kernels are compiled and weights uploaded when it is first asked for."""
        key = n, activation
        if key not in self._calls:
            launches = self.program.launches(n, activation)
            count = max((launch.scratch_bytes for launch in launches), default=0)
            scratch = self.machine.empty((count,), np.dtype(np.uint8)) if count else None
            self._calls[key] = Calls(tuple(map(self._prepare, launches)), scratch)
        return self._calls[key]

    def copy(self) -> CudaPlan:
        """The same plan with weights of its own at another address."""
        return CudaPlan(self.program, self.machine, self.x_shape, self.y_shape, self.dtype, self.kernel, self.layout)

    def _prepare(self, launch: Launch) -> Prepared:
        kernel = self.machine.kernel(launch.variant, launch.shared_bytes)
        return Prepared(kernel, launch.grid, launch.block, tuple(map(self._on_machine, launch.arguments)))

    def _on_machine(self, argument: Argument) -> Any:
        """A constant array uploaded once; all else as it is."""
        if not isinstance(argument, np.ndarray):
            return argument
        # The array is kept beside its copy: its id stays its own.
        if id(argument) not in self._uploads:
            self._uploads[id(argument)] = argument, self.machine.upload(argument)
        return self._uploads[id(argument)][1]


def prepare(packed: Packed, layout: str, n: int, dtype: str = "float16", machine: Machine | None = None) -> CudaPlan:
    """The plan of a linear layer for about n columns, on the current GPU unless a machine is given.

    Raises NotSupported for what no kernel runs, MissingLibrary and NoDevice for what is not there.
    """
    if layout != LINEAR_LAYOUT:
        raise NotSupported(f"the CUDA kernels of a linear layer take layout {LINEAR_LAYOUT}, not {layout!r}")
    _check_dtype(dtype)
    machine = machine or CupyMachine.current()
    families = _families(variants.LINEAR, packed, "a linear layer")
    attempts = [partial(variants.linear(family), packed, dtype, machine.architecture, n) for family in families]
    program = _first(packed, machine.architecture, attempts)
    m, k = packed.shape
    return _planned(program, machine, (k, None), (m, None), dtype, layout, n)


def prepare_conv2d(
    packed: Packed, shape: Conv2dShape, layout: str, dtype: str = "float16", machine: Machine | None = None
) -> CudaPlan:
    """The plan of a convolution for about shape.batch images; as `prepare`."""
    if layout != CONV2D_LAYOUT:
        raise NotSupported(f"the CUDA kernels of a convolution take layout {CONV2D_LAYOUT}, not {layout!r}")
    _check_dtype(dtype)
    machine = machine or CupyMachine.current()
    families = _families(variants.CONV2D, packed, "a convolution")
    attempts = [partial(variants.conv2d(family), packed, shape, dtype, machine.architecture) for family in families]
    program = _first(packed, machine.architecture, attempts)
    x_shape = (shape.c_in, shape.h, shape.w, None)
    y_shape = (shape.c_out, shape.out_h, shape.out_w, None)
    return _planned(program, machine, x_shape, y_shape, dtype, layout, shape.batch)


def architecture_of(capability: tuple[int, int]) -> str:
    """What to compile for on a GPU of a compute capability: the newest architecture whose code it runs.

    Code runs on the same major version from its minor version on; that of sm_90a on 9.0 alone.
    """
    major, minor = capability
    if capability == (9, 0):
        return "sm_90a"
    numbers = {known: divmod(int(known[3:]), 10) for known in ARCHITECTURES if known != "sm_90a"}
    fitting = [known for known, number in numbers.items() if number[0] == major and number[1] <= minor]
    if not fitting:
        raise NoDevice(f"no kernel for compute capability {major}.{minor}: there are {', '.join(ARCHITECTURES)}")
    return fitting[-1]


def check_call(
    machine: Machine,
    x: Array,
    x_shape: tuple[int | None, ...],
    bias: Array | None,
    activation: str | None,
    out: Array | None,
    y_shape: tuple[int | None, ...],
    dtype: np.dtype[Any],
) -> None:
    """Refuse what a plan cannot run, in a sentence.

    TypeError for what is no array of the GPU, or of another dtype; ValueError for shapes and strides.
    """
    for name, array, wanted in (("x", x, dtype), ("bias", bias, np.dtype(np.float32)), ("out", out, dtype)):
        if array is None:
            continue
        if not machine.is_own(array):
            raise TypeError(f"{name} must be a CuPy array, not {type(array).__name__}")
        if array.dtype != wanted:
            raise TypeError(f"{name} must be of dtype {wanted}, not {array.dtype}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} must be C-contiguous: a hidden copy would cost more than the product")
    if x.ndim != len(x_shape) or any(want not in (None, got) for want, got in zip(x_shape, x.shape, strict=True)):
        wanted_shape = ", ".join("any" if want is None else str(want) for want in x_shape)
        raise ValueError(f"x must be of shape ({wanted_shape}), not {x.shape}")
    if bias is not None and bias.shape != y_shape[:1]:
        raise ValueError(f"bias must be of shape ({y_shape[0]},), not {bias.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
    if out is not None:
        expected = _with(y_shape, x.shape[x_shape.index(None)])
        if out.shape != expected:
            raise ValueError(f"out must be of shape {expected}, not {out.shape}")
        if machine.share_memory(out, x):
            raise ValueError("out must not share memory with x")


@dataclass(frozen=True, eq=False)
class CupyMachine:
    """One GPU, by CuPy."""

    cupy: Any
    architecture: str
    newest: int  # the newest CUDA major version whose cubins the driver loads

    @classmethod
    def current(cls) -> CupyMachine:
        """CuPy's current GPU. Raises MissingLibrary or NoDevice."""
        try:
            cupy = importlib.import_module("cupy")
        except ModuleNotFoundError as error:
            raise MissingLibrary(
                "backend 'cuda' needs cupy, which is not installed: pip install cupy-cuda13x (V100: cupy-cuda12x)"
            ) from error
        try:
            capability = cupy.cuda.Device().compute_capability
            driver = cupy.cuda.runtime.driverGetVersion()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise NoDevice(f"backend 'cuda' found no NVIDIA GPU that it can use: {error}") from error
        return cls(cupy, architecture_of((int(capability[:-1]), int(capability[-1]))), min(13, driver // 1000))

    def upload(self, array: NDArray[np.generic]) -> Array:
        """A copy of the array on the GPU."""
        return self.cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new array."""
        return self.cupy.empty(shape, dtype)

    def clear(self, array: Array) -> None:
        """Fill with zero bytes, on the current stream."""
        array.data.memset_async(0, array.nbytes)

    def is_own(self, array: object) -> bool:
        """Whether it is an array of this GPU."""
        return isinstance(array, self.cupy.ndarray)

    def share_memory(self, first: Array, second: Array) -> bool:
        """Whether two arrays may overlap."""
        return bool(self.cupy.may_share_memory(first, second))

    def kernel(self, variant: Variant, shared_bytes: int) -> Kernel:
        """A variant, compiled and loaded, that may use so much dynamic shared memory."""
        cubin = build.compile(variant, self.architecture, newest=self.newest)
        function = self.cupy.RawModule(path=str(cubin.path)).get_function(variant.function)
        if shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes

        def launch(grid: Dim3, block: Dim3, arguments: tuple[Any, ...]) -> None:
            function(grid, block, arguments, shared_mem=shared_bytes)

        return launch


def _families(candidates: Mapping[str, tuple[str, ...]], packed: Packed, layer: str) -> tuple[str, ...]:
    """Who may run a format."""
    if packed.pattern.format not in candidates:
        known = ", ".join(candidates)
        raise NotSupported(f"no CUDA kernel runs {layer} of format {packed.pattern.format}: known are {known}")
    return candidates[packed.pattern.format]


def _first(packed: Packed, architecture: str, attempts: Sequence[Callable[[], Program]]) -> Program:
    """What the first attempt gives that is not refused; all reasons where all are."""
    reasons = []
    for attempt in attempts:
        try:
            return attempt()
        except NotSupported as error:
            reasons.append(str(error))
    raise NotSupported(f"no CUDA kernel runs {packed.pattern} on {architecture}: {'; '.join(reasons)}")


def _planned(
    program: Program,
    machine: Machine,
    x_shape: tuple[int | None, ...],
    y_shape: tuple[int | None, ...],
    dtype: str,
    layout: str,
    n: int,
) -> CudaPlan:
    """The plan, with its kernels for n columns compiled and its weights uploaded."""
    launches = program.launches(max(n, 1), None)
    functions = "+".join(dict.fromkeys(launch.variant.function for launch in launches)) or "nothing"
    plan = CudaPlan(program, machine, x_shape, y_shape, dtype, f"cuda.{functions}.{machine.architecture}", layout)
    plan.calls(max(n, 1), None)
    return plan


def _with(shape: tuple[int | None, ...], n: int) -> tuple[int, ...]:
    """A shape with n in place of None."""
    return tuple(n if length is None else length for length in shape)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise NotSupported(f"the CUDA kernels take {' and '.join(DTYPES)}, not {dtype}")
