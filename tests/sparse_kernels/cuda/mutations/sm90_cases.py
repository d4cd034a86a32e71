"""How the kernels for Hopper are tried: a packed weight and random x, their launches, and what these must give."""

from __future__ import annotations

from dataclasses import replace

import emulator
import numpy as np
from mutations import Case
from vector_cases import bits, drawn, numbers, oracle

from sparse_kernels.cuda import nm_sm90, vector_sm90
from sparse_kernels.cuda.program import Launch
from sparse_kernels.cuda.sm90 import HopperProgram
from sparse_kernels.formats import NMWeight, Packed, pack, unpack
from sparse_kernels.patterns import Pattern


def packed_of(
    rng: np.random.Generator, pattern: Pattern, m: int, k: int, sparsity: float = 0.5, dtype: str = "float16"
) -> Packed:
    """A random weight (m, k), of numbers that dtype holds, pruned to a pattern."""
    weight = drawn(rng, (m, k), dtype)
    return pack(weight, pattern.mask(weight.astype(float) ** 2, sparsity), pattern)


def program_of(packed: Packed, dtype: str = "float16") -> HopperProgram:
    """The program of a weight."""
    prepare = nm_sm90.build_program if isinstance(packed, NMWeight) else vector_sm90.build_program
    return prepare(packed, dtype, "sm_90a", 8)


def case_of(
    rng: np.random.Generator,
    packed: Packed,
    n: int,
    *,
    dtype: str = "float16",
    activation: str | None = None,
    bias: bool = True,
    width: int = 128,
    splits: int = 1,
    blocks: int | None = None,
) -> Case:
    """A product with n columns, in tiles of `width`, split as asked for, on `blocks` multiprocessors."""
    m, k = packed.shape
    program = program_of(packed, dtype)
    kernel = next(kernel for kernel in program.kernels if kernel.width == width)
    launches = program.launches_of(kernel, splits, n, activation)
    if blocks is not None:
        launches = [fewer_blocks(launches[0], blocks), *launches[1:]]
    x = drawn(rng, (k, n), dtype)
    shift = rng.standard_normal(m).astype(np.float32) if bias else None
    element = np.float16 if dtype == "float16" else np.uint16
    expected, bound = oracle(unpack(packed), x, shift, activation, dtype)
    return Case(launches, bits(x, dtype).view(element), shift, np.empty((m, n), element), expected, bound)


def fewer_blocks(launch: Launch, blocks: int) -> Launch:
    """The same launch on fewer blocks, each of which then computes more tiles."""
    return replace(launch, grid=(min(launch.grid[0], blocks), 1, 1))


def run(case: Case, seed: int = 0) -> None:
    """AssertionError where the emulated result is wrong, EmulatorError where the kernel is."""
    emulator.run(case.launches, case.x, case.out, case.bias, seed=seed)
    dtype = "float16" if case.out.dtype == np.float16 else "bfloat16"
    found = numbers(case.out.view(np.uint16), dtype)
    wrong = ~(np.abs(found - case.expected) <= case.bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{np.count_nonzero(wrong)} of {wrong.size} results are wrong, the first at {np.argwhere(wrong)[0]}: "
        f"{found[wrong][0]} in place of {case.expected[wrong][0]}"
    )
