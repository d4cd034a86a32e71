"""How the vector kernels are tried: a random layer, its program in the emulator, and the float64 oracle.

Weights and activations are drawn as the element type holds them, so that the oracle multiplies the same numbers. A
result may be off by the rounding of float32 sums (gamma_k * |w| @ |x|, as in sparse_kernels/oracle.py) and by one
rounding to the element type: half a unit in the last of its 11 (float16) or 8 (bfloat16) bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import emulator
import numpy as np
from mutations import Case

from sparse_kernels import pack
from sparse_kernels.cuda import vector
from sparse_kernels.cuda.program import Program
from sparse_kernels.formats import Packed
from sparse_kernels.oracle import GELU_EVALUATION, GELU_SLOPE, SMALLEST_NORMAL, UNIT_ROUNDOFF
from sparse_kernels.patterns import Pattern
from sparse_kernels.reference import build_patches, finish
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

Build = Callable[[Packed, str, str, int], Program]
"""Makes a weight into a program for an element type, an architecture and about so many columns."""

HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of a normal number, relative to the number, at most."""

HALF_SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Half of the smallest subnormal number."""


@dataclass(frozen=True)
class Layer:
    """What is tried: a shape, a pattern, and how it runs. `width` takes the place of the program's own choice."""

    pattern: Pattern
    shape: Shape
    sparsity: float = 0.5
    dtype: str = "float16"
    architecture: str = "sm_80"
    activation: str | None = None
    bias: bool = True
    width: int | None = None

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in dataclasses.astuple(self.shape)).replace(" ", "")
        how = (self.sparsity, self.dtype, self.architecture, self.activation or "linear", self.width or "any")
        return "-".join(map(str, (self.pattern, sizes, *how)))


def linear(pattern: Pattern, m: int, k: int, n: int, **how) -> Layer:
    """A linear layer to try."""
    return Layer(pattern, LinearShape(m, k, n), **how)


def run(
    layer: Layer, rng: np.random.Generator, seed: int, mask: np.ndarray | None = None,
    build: Build = vector.build_program,
) -> None:  # fmt: skip
    """Run a layer in the emulator: AssertionError where a result is wrong, EmulatorError where the kernel is."""
    case = case_of(layer, rng, mask, build)
    emulator.run(case.launches, case.x, case.out, case.bias, seed=seed)
    y = numbers(case.out.view(np.uint16), layer.dtype)
    wrong = ~(np.abs(y - case.expected) <= case.bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{np.count_nonzero(wrong)} of {wrong.size} results are wrong, the first at {np.argwhere(wrong)[0]}: "
        f"{y[wrong][0]} in place of {case.expected[wrong][0]}"
    )


def case_of(
    layer: Layer, rng: np.random.Generator, mask: np.ndarray | None = None, build: Build = vector.build_program
) -> Case:
    """A layer with random numbers, its launches and what they must give; `mask` in place of the pattern's choice.

    build: of the family that runs a linear layer.
    """
    shape, dtype = layer.shape, layer.dtype
    weight = drawn(rng, (shape.m, shape.k), dtype)
    if mask is None:
        mask = layer.pattern.mask(weight.astype(np.float64) ** 2, layer.sparsity)
    packed = pack(weight, mask, layer.pattern)
    bias = rng.standard_normal(shape.m).astype(np.float32) if layer.bias else None
    program: Program
    if isinstance(shape, Conv2dShape):
        program = vector.build_conv2d_program(packed, shape, dtype, layer.architecture)
        x = drawn(rng, (shape.c_in, shape.h, shape.w, shape.batch), dtype)
        gathered = build_patches(x.transpose(3, 0, 1, 2), shape)  # (k, batch * positions)
        gathered = gathered.reshape(shape.k, shape.batch, -1).swapaxes(1, 2).reshape(shape.k, -1)
        columns = shape.batch
    else:
        program = build(packed, dtype, layer.architecture, shape.n)
        x = gathered = drawn(rng, (shape.k, shape.n), dtype)
        columns = shape.n
    if layer.width is not None:
        program = dataclasses.replace(program, width=layer.width)
    element = np.float16 if dtype == "float16" else np.uint16
    out = np.empty((shape.m, shape.n), element)
    expected, bound = oracle(np.where(mask, weight, 0), gathered, bias, layer.activation, dtype)
    launches = program.launches(columns, layer.activation)
    return Case(launches, bits(x, dtype).view(element), bias, out, expected, bound)


def oracle(
    weight: np.ndarray, x: np.ndarray, bias: np.ndarray | None, activation: str | None, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """activation(weight @ x + bias), float64, and how far from it the arithmetic above may lead."""
    weight, x = weight.astype(np.float64), x.astype(np.float64)
    bias = None if bias is None else bias.astype(np.float64)
    terms = int(np.count_nonzero(weight, axis=1).max(initial=0)) + (bias is not None)
    scale = finish(np.abs(weight) @ np.abs(x), None if bias is None else np.abs(bias), None)
    before = finish(weight @ x, bias, None)
    bound = terms * UNIT_ROUNDOFF / (1 - terms * UNIT_ROUNDOFF) * scale + terms * SMALLEST_NORMAL
    if activation == "gelu":
        bound = GELU_SLOPE * bound + GELU_EVALUATION * (np.abs(before) + bound)
    expected = finish(before, None, activation)
    return expected, bound + HALF_UNIT[dtype] * (np.abs(expected) + bound) + HALF_SMALLEST[dtype]


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal random numbers that the element type holds, as float32."""
    return numbers(bits(rng.standard_normal(shape).astype(np.float32), dtype), dtype).astype(np.float32)


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 as elements, uint16; bfloat16 is cut off: the packing's own rounding is tested against NumPy's."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def numbers(elements: np.ndarray, dtype: str) -> np.ndarray:
    """Elements (uint16) as float64."""
    if dtype == "float16":
        return elements.view(np.float16).astype(np.float64)
    return (elements.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
