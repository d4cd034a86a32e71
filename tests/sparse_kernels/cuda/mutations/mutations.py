"""Planted bugs: a kernel with one text changed must be found wrong by the emulator, or its tests prove nothing.

Each kernel family lists its own in mutations_<family>.py, as MUTATIONS; the compile gate runs and counts them all.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import emulator
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import Launch

SEEDS = range(8)


@dataclass(frozen=True, eq=False)
class Case:
    """A call and what it must give: expected float64, in out's shape, within bound elementwise.

    bfloat16 is said by uint16 arrays.
    """

    launches: Sequence[Launch]
    x: NDArray[np.generic]
    bias: NDArray[np.float32] | None
    out: NDArray[np.generic]
    expected: NDArray[np.float64]
    bound: NDArray[np.float64]


@dataclass(frozen=True)
class Mutation:
    """A bug in words, a small case that shows it, and the edit of the source: text, and what stands in its place."""

    bug: str
    case: Callable[[], Case]
    edit: tuple[str, str]


def fails(case: Case, seed: int, edit: tuple[str, str] | None = None) -> bool:
    """Whether the case, with the edit, is refused by the emulator or leaves its expected result."""
    try:
        emulator.run(case.launches, case.x, case.out, case.bias, seed=seed, mutate=edit)
    except emulator.CompilationError:
        raise
    except emulator.EmulatorError:
        return True
    return not bool((np.abs(_values(case.out) - case.expected) <= case.bound).all())


def survives(mutation: Mutation) -> bool:
    """Whether no seed shows the bug. Raises ValueError for a case that fails without it: it would catch anything."""
    _check_sound(mutation.case)
    case = mutation.case()
    return not any(fails(case, seed, mutation.edit) for seed in SEEDS)


def survivors(mutations: Iterable[Mutation]) -> list[Mutation]:
    """Those that no seed shows."""
    return [mutation for mutation in mutations if survives(mutation)]


@functools.cache
def _check_sound(make_case: Callable[[], Case]) -> None:
    case = make_case()
    wrong = [seed for seed in SEEDS if fails(case, seed)]
    if wrong:
        raise ValueError(f"{make_case.__qualname__} is wrong without a planted bug (seeds {wrong})")


def collect() -> list[Mutation]:
    """All planted bugs of all families."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("mutations_*.py"))
    return [mutation for module in modules for mutation in importlib.import_module(module).MUTATIONS]


def _values(out: NDArray[np.generic]) -> NDArray[np.float64]:
    """Elements as float64; uint16 holds the bits of bfloat16."""
    if out.dtype == np.uint16:
        return (out.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return out.astype(np.float64)
