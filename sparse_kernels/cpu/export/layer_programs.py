"""What a layer does for so many tokens or images and so many threads: a program of kernel calls.

A program is recorded from the layer's own plan. Addresses become places: x, y, the bias, or a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.launch.linear_call import KernelWithScratch
from sparse_kernels.cpu.launch.recording import RecordedStep, Recording, record_calls
from sparse_kernels.cpu.layouts.image_results import Finish, Results
from sparse_kernels.formats import Packed
from sparse_kernels.formats.int8 import Int8Weight
from sparse_kernels.plan_protocol import ACTIVATIONS
from sparse_kernels.planner import prepare, prepare_conv2d
from sparse_kernels.shapes import Conv2dShape

# Where an address points: nowhere (a plain number), x, y, the bias, or the buffer of number FIRST_BUFFER + i.
NUMBER, X, Y, BIAS, FIRST_BUFFER = 0, 1, 2, 3, 16

# Stand-ins for the addresses that a call brings, far from any real one and from each other.
_STAND_INS = {X: 1 << 56, Y: 1 << 57, BIAS: 1 << 58}
_REACH = 1 << 50
_LARGEST_NUMBER = 1 << 20

# The fewest tokens for which a program of the plan for many tokens is better than one token after the other.
_FEWEST = 8


@dataclass(frozen=True)
class ExportedLayer:
    """A layer to export.

    name: as the model has it. weight: packed. bias: float32 (m), or None. activation: None, relu or gelu. precision:
    as `planner.prepare` takes it. image: of a convolution, with any batch; None for a linear layer.
    """

    name: str
    weight: Packed | Int8Weight
    bias: NDArray[np.float32] | None
    activation: str | None = None
    precision: str = "float32"
    image: Conv2dShape | None = None


class Place(NamedTuple):
    """A number (NUMBER, value), or an address: where it points, and bytes behind."""

    where: int
    offset: int


@dataclass(frozen=True)
class ProgramBuffer:
    """Memory of a program. fill: the 32 bits of each element before the first call, kept between calls; or None."""

    size_bytes: int
    fill: int | None


@dataclass(frozen=True, eq=False)
class ProgramStep:
    """A call of a kernel. varying: words of the frame that are places."""

    recorded: RecordedStep
    varying: list[tuple[int, Place]]


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """What a layer does for `size` tokens or images by `threads` threads. kernel: the name of the plan's kernel."""

    size: int
    threads: int
    kernel: str
    buffers: list[ProgramBuffer]
    steps: list[ProgramStep]


def record_programs(layer: ExportedLayer, sizes: Sequence[int], threads: Sequence[int]) -> list[LayerProgram]:
    """Return the programs of a layer for each of these numbers of tokens or images, and of threads.

    A linear layer also gets programs for the powers of two below the most tokens. They are of the same plan, so they
    need no other weights, and any number of tokens is a sum of few.

    Raises ValueError for a layer that no plan runs.
    """
    found = []
    for count in threads:
        numba.set_num_threads(count)
        if layer.image:
            found += [_record_image(layer, size, count) for size in sizes]
            continue
        most = max(sizes)
        powers = {2**i for i in range(_FEWEST.bit_length() - 1, most.bit_length())} - {*sizes}
        found += [_record_tokens(layer, size, size, count) for size in sizes]
        found += [_record_tokens(layer, most, size, count) for size in sorted(powers)]
    return found


def _record_tokens(layer: ExportedLayer, planned: int, size: int, threads: int) -> LayerProgram:
    """Return the program for `size` tokens, by the plan for `planned` tokens."""
    plan: Any = prepare(layer.weight, "numba", "token_major", planned, precision=layer.precision)
    with record_calls() as recording:
        found = plan.prepare_call(size, threads)
        call = _stand_in_call(layer)
        if isinstance(found, KernelWithScratch):
            scratch = _stand_in_scratch(found.needed)
            found.kernel(scratch, *call)
        else:
            found(*call)
    extra = [ProgramBuffer(4 * found.needed, None)] if isinstance(found, KernelWithScratch) else []
    return _build_program(size, threads, plan.kernel, recording, extra)


def _record_image(layer: ExportedLayer, size: int, threads: int) -> LayerProgram:
    assert layer.image is not None
    shape = replace(layer.image, batch=size)
    plan: Any = prepare_conv2d(layer.weight, shape, "numba", "nchw", precision=layer.precision)
    x, y, bias, activation = _stand_in_call(layer)
    with record_calls() as recording:
        plan.run(x, plan.x_places(size), Finish(bias, activation), Results(y, plan.y_places(size)))
    return _build_program(size, threads, plan.kernel, recording, [])


def _stand_in_call(layer: ExportedLayer) -> tuple[int, int, int, int]:
    return _STAND_INS[X], _STAND_INS[Y], _STAND_INS[BIAS], ACTIVATIONS.index(layer.activation)


def _stand_in_scratch(needed: int) -> int:
    return _SCRATCH if needed else 0


_SCRATCH = 1 << 59


def _build_program(
    size: int, threads: int, kernel: str, recording: Recording, extra: list[ProgramBuffer]
) -> LayerProgram:
    """Return what was recorded with places for addresses; extra: the buffer of the scratch memory, if any."""
    buffers = [*extra, *(ProgramBuffer(4 * each.size, each.fill) for each in recording.buffers)]
    known = [(stand_in, _REACH, where) for where, stand_in in _STAND_INS.items()]
    if extra:
        known.append((_SCRATCH, _REACH, FIRST_BUFFER))
    for number, each in enumerate(recording.buffers):
        known.append((each.address, max(4 * each.size, 1), FIRST_BUFFER + len(extra) + number))

    def locate(word: int) -> Place:
        if word < _LARGEST_NUMBER:
            return Place(NUMBER, word)
        for begin, reach, where in known:
            if begin <= word < begin + reach:
                return Place(where, word - begin)
        raise RuntimeError(f"a kernel of {kernel} was called with an address that nobody gave: {word:#x}")

    steps = [ProgramStep(each, [(at, locate(word)) for at, word in each.varying]) for each in recording.steps]
    return LayerProgram(size, threads, kernel, buffers, steps)
