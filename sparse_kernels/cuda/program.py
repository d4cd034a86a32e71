"""What a CUDA kernel is to Python: a source with its settings, and one launch of it, as plain values.

A launch is described, not done. CuPy runs the description on a GPU (`cuda_plan`), and the emulator of the tests runs
it on a CPU. The compile gate goes through the same variants. Packing and launch geometry are NumPy and integer
arithmetic, so tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats import Packed
from sparse_kernels.plan_protocol import ACTIVATIONS
from sparse_kernels.shapes import Conv2dShape

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled.

    source: file of `device_code`. function: its extern "C" kernel. defines: macros that choose tile sizes, element
    type and so on. architectures: those that the kernel is for (sm_80, sm_90a, ...). instruction: what its SASS must
    hold (HMMA, HMMA.SP, HGMMA, ...), empty if any will do.
    """

    source: str
    function: str
    defines: Mapping[str, int]
    architectures: tuple[str, ...]
    instruction: str = ""

    @property
    def name(self) -> str:
        """Function and settings in one word, for rows and reports."""
        settings = "".join(f".{key.lower()}{value}" for key, value in self.defines.items())
        return f"{self.function}{settings}"


class Operand(Enum):
    """What a call brings: activations, result, bias (a null pointer where there is none), scratch.

    Scratch is shared by the call's launches: one may leave sums for the next. What it holds before is undefined.
    """

    X = "x"
    OUT = "out"
    BIAS = "bias"
    SCRATCH = "scratch"


Argument = NDArray[np.generic] | Operand | np.generic
"""A constant array (its pointer is passed; uploaded once), an operand (its pointer), or a NumPy scalar (by value)."""

Dim3 = tuple[int, int, int]


def parse_activation(activation: str | None) -> np.int32:
    """Return the code of an activation, an argument so that one cubin serves all. Raises ValueError if unknown."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are None, relu, gelu")
    return np.int32(ACTIVATIONS.index(activation))


@dataclass(frozen=True)
class Launch:
    """One launch: a variant on a grid.

    `shared_bytes` is dynamic shared memory, `scratch_bytes` what this launch needs of SCRATCH. A scalar argument has
    the parameter's own type: np.int32 for int, np.uint64 for u64, np.float32 for float.
    """

    variant: Variant
    grid: Dim3
    block: Dim3
    shared_bytes: int
    arguments: tuple[Argument, ...]
    scratch_bytes: int = field(default=0)


class Program(Protocol):
    """A packed weight made ready for one architecture and element type; constant arrays are packed once, here."""

    @property
    def nbytes(self) -> int:
        """Bytes of the constant arrays."""

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """Return what multiplies x (k, n) to out (m, n), feature-major, in order; empty where m or n is 0.

        Bias is added where the BIAS pointer is not null. x and out are contiguous. For a convolution n is the batch,
        x is (c_in, h, w, batch) and out (c_out, out_h, out_w, batch).
        """


class Prepare(Protocol):
    """How each kernel family offers itself: a module-level function `build_program`."""

    def __call__(
        self, packed: Packed, dtype: str, architecture: str, n: int, multiprocessors: int | None = None
    ) -> Program:
        """Return the program for about n columns, for a number of multiprocessors or the usual machine (targets.py).

        Raises NotSupported for what it cannot run.
        """


class PrepareConv2d(Protocol):
    """The same for convolutions: a module-level function `build_conv2d_program`."""

    def __call__(
        self, packed: Packed, shape: Conv2dShape, dtype: str, architecture: str, multiprocessors: int | None = None
    ) -> Program:
        """Return the program for about shape.batch images. Raises NotSupported for what it cannot run."""


class NotSupported(ValueError):
    """A kernel does not run this format, shape or architecture; the message says which do."""
