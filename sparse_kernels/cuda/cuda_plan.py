"""Plans on a GPU: a program's constant arrays are uploaded once, and its kernels launched on the current stream.

x and out are float16 or bfloat16, contiguous, and lie feature-major: linear x (k, n) -> out (m, n); convolution,
layout `chwn`, x (c_in, h, w, batch) -> out (c_out, out_h, out_w, batch). The bias is float32. Whose arrays they are,
CuPy's or torch's, is the machine's affair. A call returns as soon as the work is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import variants
from sparse_kernels.cuda.machine import Array, CudaMachine, CupyMachine, LoadedKernel
from sparse_kernels.cuda.program import DTYPES, Argument, Dim3, Launch, NotSupported, Operand, Program
from sparse_kernels.formats import Packed
from sparse_kernels.plan_protocol import ACTIVATIONS
from sparse_kernels.shapes import Conv2dShape

LINEAR_LAYOUT = "feature_major"
CONV2D_LAYOUT = "chwn"

NULL = np.uint64(0)


@dataclass(frozen=True)
class LoadedLaunch:
    """A launch whose kernel is loaded and whose constant arrays are uploaded: addresses stand for them."""

    kernel: LoadedKernel
    grid: Dim3
    block: Dim3
    arguments: tuple[np.generic | Operand, ...]  # operands are filled in at each call

    def run(self, addresses: Mapping[Operand, np.generic]) -> None:
        """Put it on the stream."""
        filled = (addresses[it] if isinstance(it, Operand) else it for it in self.arguments)
        self.kernel(self.grid, self.block, tuple(filled))


@dataclass(frozen=True)
class Calls:
    """What runs for one number of columns and activation."""

    launches: tuple[LoadedLaunch, ...]
    scratch_bytes: int


@dataclass(frozen=True, eq=False)
class CudaPlan:
    """A program on a machine, for x of x_shape and out of y_shape; None stands for the free length n, in both.
    `families` are the kernel families that were asked, of which the last one runs it.

    What the first call for a number of columns compiles, uploads and allocates stays. So a call may be captured into
    a CUDA graph after one like it has run on that stream.
    """

    program: Program
    machine: CudaMachine
    x_shape: tuple[int | None, ...]
    y_shape: tuple[int | None, ...]
    dtype: str
    kernel: str
    layout: str
    families: tuple[str, ...] = ()
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
        n = self._check(x, bias, activation, out)
        if out is None:
            out = self.machine.empty(_with(self.y_shape, n), self.dtype)
        calls = self.calls(n, activation)
        scratch = self.machine.scratch(calls.scratch_bytes) if calls.scratch_bytes else None
        addresses = {
            Operand.X: self._address(x),
            Operand.OUT: self._address(out),
            Operand.BIAS: NULL if bias is None else self._address(bias),
            Operand.SCRATCH: NULL if scratch is None else self._address(scratch),
        }
        for launch in calls.launches:
            launch.run(addresses)
        return out

    def calls(self, n: int, activation: str | None) -> Calls:
        """Return what runs for n columns; kernels are compiled and weights uploaded when it is first asked for."""
        key = n, activation
        if key not in self._calls:
            launches = self.program.launches(n, activation)
            scratch_bytes = max((launch.scratch_bytes for launch in launches), default=0)
            self._calls[key] = Calls(tuple(map(self._prepare, launches)), scratch_bytes)
        return self._calls[key]

    def copy(self) -> CudaPlan:
        """Return the same plan with weights of its own at another address."""
        return replace(self, _uploads={}, _calls={})

    def _check(self, x: Array, bias: Array | None, activation: str | None, out: Array | None) -> int:
        """Return the free length. Refuse what cannot be run, in a sentence.

        TypeError for what is no array of the GPU, or of another dtype; ValueError for shapes, strides and addresses.
        """
        views = {}
        for name, array, dtype in (("x", x, self.dtype), ("bias", bias, "float32"), ("out", out, self.dtype)):
            if array is None:
                continue
            view = self.machine.view(array)
            if view is None:
                raise TypeError(f"{name} must be {self.machine.arrays}, not {type(array).__name__}")
            if view.dtype != dtype:
                raise TypeError(f"{name} must be of dtype {dtype}, not {view.dtype}")
            if not view.contiguous:
                raise ValueError(f"{name} must be C-contiguous: a hidden copy would cost more than the product")
            views[name] = view
        shape = views["x"].shape
        wanted = zip(self.x_shape, shape, strict=False)
        if len(shape) != len(self.x_shape) or any(want not in (None, got) for want, got in wanted):
            names = ", ".join("any" if want is None else str(want) for want in self.x_shape)
            raise ValueError(f"x must be of shape ({names}), not {shape}")
        if bias is not None and views["bias"].shape != self.y_shape[:1]:
            raise ValueError(f"bias must be of shape ({self.y_shape[0]},), not {views['bias'].shape}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
        n = shape[self.x_shape.index(None)]
        # Rows of x and out are read and written in pieces of up to 16 bytes, as wide as divide n.
        alignment = {"x": 2 * math.gcd(n, 8), "out": 2 * math.gcd(n, 8), "bias": 4}
        if out is not None:
            expected = _with(self.y_shape, n)
            if views["out"].shape != expected:
                raise ValueError(f"out must be of shape {expected}, not {views['out'].shape}")
            if views["out"].overlaps(views["x"]):
                raise ValueError("out must not share memory with x")
        for name, view in views.items():
            if view.address % alignment[name]:
                raise ValueError(
                    f"{name} must start at a multiple of {alignment[name]} bytes for {n} columns: copy it"
                )
        return n

    def _prepare(self, launch: Launch) -> LoadedLaunch:
        kernel = self.machine.kernel(launch.variant, launch.shared_bytes)
        return LoadedLaunch(kernel, launch.grid, launch.block, tuple(map(self._on_machine, launch.arguments)))

    def _on_machine(self, argument: Argument) -> np.generic | Operand:
        """Return the address of a constant array, uploaded once; all else as it is."""
        if not isinstance(argument, np.ndarray):
            return argument
        # The array is kept beside its copy, so that no other array gets its id.
        if id(argument) not in self._uploads:
            self._uploads[id(argument)] = argument, self.machine.upload(argument)
        return self._address(self._uploads[id(argument)][1])

    def _address(self, array: Array) -> np.uint64:
        view = self.machine.view(array)
        assert view is not None
        return np.uint64(view.address)


def prepare_cuda_linear(
    packed: Packed, layout: str, n: int, dtype: str = "float16", machine: CudaMachine | None = None
) -> CudaPlan:
    """Return the plan of a linear layer for about n columns.

    machine: CuPy's current GPU by default.

    Raises NotSupported for what no kernel runs, MissingLibrary and NoDevice for what is not there.
    """
    if layout != LINEAR_LAYOUT:
        raise NotSupported(f"the CUDA kernels of a linear layer take layout {LINEAR_LAYOUT}, not {layout!r}")
    _check_dtype(dtype)
    machine = machine or CupyMachine.current()
    _check_format(variants.LINEAR, packed, "a linear layer")
    families = variants.list_linear_families(packed.pattern.format, n)
    where = machine.architecture, n, machine.multiprocessors
    attempts = {family: partial(variants.find_linear_builder(family), packed, dtype, *where) for family in families}
    program, asked = _first(packed, machine.architecture, attempts)
    m, k = packed.shape
    return _build_plan(program, machine, _Shapes((k, None), (m, None), layout, n), dtype, asked)


def prepare_conv2d(
    packed: Packed, shape: Conv2dShape, layout: str, dtype: str = "float16", machine: CudaMachine | None = None
) -> CudaPlan:
    """Return the plan of a convolution for about shape.batch images; as `prepare_cuda_linear`."""
    if layout != CONV2D_LAYOUT:
        raise NotSupported(f"the CUDA kernels of a convolution take layout {CONV2D_LAYOUT}, not {layout!r}")
    _check_dtype(dtype)
    machine = machine or CupyMachine.current()
    families = _check_format(variants.CONV2D, packed, "a convolution")
    where = machine.architecture, machine.multiprocessors
    attempts = {
        family: partial(variants.find_conv2d_builder(family), packed, shape, dtype, *where) for family in families
    }
    program, asked = _first(packed, machine.architecture, attempts)
    x_shape = (shape.c_in, shape.h, shape.w, None)
    y_shape = (shape.c_out, shape.out_h, shape.out_w, None)
    return _build_plan(program, machine, _Shapes(x_shape, y_shape, layout, shape.batch), dtype, asked)


def _check_format(candidates: Mapping[str, tuple[str, ...]], packed: Packed, layer: str) -> tuple[str, ...]:
    """Return the families that may run a format. NotSupported where there is none."""
    if packed.pattern.format not in candidates:
        known = ", ".join(candidates)
        raise NotSupported(f"no CUDA kernel runs {layer} of format {packed.pattern.format}: known are {known}")
    return candidates[packed.pattern.format]


def _first(
    packed: Packed, architecture: str, attempts: Mapping[str, Callable[[], Program]]
) -> tuple[Program, tuple[str, ...]]:
    """Return the program of the first family that does not refuse, and the families that were asked.

    Raises NotSupported with all reasons if all refuse.
    """
    reasons: dict[str, str] = {}
    for family, attempt in attempts.items():
        try:
            return attempt(), (*reasons, family)
        except NotSupported as error:
            reasons[family] = str(error)
    raise NotSupported(f"no CUDA kernel runs {packed.pattern} on {architecture}: {'; '.join(reasons.values())}")


class _Shapes(NamedTuple):
    """Shapes of x and y with None for the free length, their layout, and about how many columns a call has."""

    x: tuple[int | None, ...]
    y: tuple[int | None, ...]
    layout: str
    n: int


def _build_plan(
    program: Program, machine: CudaMachine, shapes: _Shapes, dtype: str, families: tuple[str, ...]
) -> CudaPlan:
    """Return the plan, with its kernels for n columns compiled and its weights uploaded."""
    n = max(shapes.n, 1)
    functions = "+".join(dict.fromkeys(launch.variant.function for launch in program.launches(n, None))) or "nothing"
    kernel = f"cuda.{functions}.{machine.architecture}"
    plan = CudaPlan(program, machine, shapes.x, shapes.y, dtype, kernel, shapes.layout, families)
    plan.calls(n, None)
    return plan


def _with(shape: tuple[int | None, ...], n: int) -> tuple[int, ...]:
    """Return a shape with n in place of None."""
    return tuple(n if length is None else length for length in shape)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise NotSupported(f"the CUDA kernels take {' and '.join(DTYPES)}, not {dtype}")
