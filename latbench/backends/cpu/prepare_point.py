"""Preparation of a point on a CPU: an engine's layer, checked, with copies that take turns.

Each engine has a module with one function, `prepare(point, layer) -> Engine`, and is imported only in the process
that runs it. The function builds the weights into whatever the engine runs; `Engine.calls` holds one call for each
copy. This module holds what all engines share: the synthetic layer, the check against the oracle, and the rotation of
copies. With it weights come from memory, as in a real network, and not from the cache that the last call filled.
"""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latbench.backends.cpu.block_steps import BlockSteps, check_in_blocks, round_in_blocks
from latbench.backends.installed_engines import Unsupported
from latbench.base.cgroups import read_available_bytes
from latbench.base.engine_registry import BFLOAT16, CPU_ENGINES, INT4, INT8
from latbench.machines.devices import read_memory_bytes
from latbench.workloads.minimum_work import count_inputs_read
from latbench.workloads.points import Point
from sparse_kernels.cpu.codegen.cpu_target import count_rotated_bytes
from sparse_kernels.cpu.runtime.scratch_buffers import copy_to_cache_line
from sparse_kernels.formats import Packed, pack, round_packed
from sparse_kernels.formats.int8 import InputRange, Int8Weight, find_scales, pack_int8, unpack_int8
from sparse_kernels.int8.int8_oracle import check_int8, check_int8_conv2d
from sparse_kernels.oracle import BFLOAT16_ROUNDOFF, UNIT_ROUNDOFF, check, check_conv2d
from sparse_kernels.patterns import Pattern, ShflBW
from sparse_kernels.shapes import Conv2dShape

# Copies of a weight at most. Smaller weights than pass the caches so are small beside the layers around them, too.
MOST_COPIES = 256
MOST_SESSIONS = 32  # of an engine that takes milliseconds and megabytes for each
COLD_SHARE = 16  # of the memory, at most: the points of a block, and what each engine makes of them, have to fit
IN_CACHE = "in_cache"  # flag of a row: even so many copies are so small that the caches may hold them
_CHECKED_IMAGES = 2

OWN_STEPS = "int8-dynamic"
"""The kernel that reads each token by its own largest value."""

BLOCK_STEPS = "int8-blocks"
"""The kernel in eight bits whose weights have a step for each block of columns."""


@dataclass(frozen=True)
class SyntheticLayer:
    """A layer with synthetic weights, which every engine gets.

    Attributes
    ----------
    weight : ndarray
        float32 (m, k), with zeros where the mask drops.
    packed : Packed
        The same weight packed in the point's pattern.
    mask : ndarray
        bool (m, k), True where an element is kept.
    bias : ndarray
        float32 (m,)
    x : ndarray
        float32 (n, k) for a linear layer, (batch, c_in, h, w) for a convolution, aligned as a framework aligns it.
    """

    weight: NDArray[np.float32]
    packed: Packed
    mask: NDArray[np.bool_]
    bias: NDArray[np.float32]
    x: NDArray[np.float32]

    @cached_property
    def input_range(self) -> InputRange:
        """How x is read in eight bits where all of it has one range."""
        return InputRange.covering(float(self.x.min(initial=0)), float(self.x.max(initial=0)))

    def quantize(self, own_steps: bool) -> Int8Weight:
        """Return the weight in eight bits; own_steps: each token is read by its own largest value."""
        reading = None if own_steps else self.input_range
        return pack_int8(self.weight, self.mask, self.packed.pattern, find_scales(self.weight), reading)

    def round_in_blocks(self, bits: int) -> BlockSteps:
        """Return the weight of a linear layer with a step for each block of columns."""
        return round_in_blocks(self.weight, bits)


@dataclass(frozen=True)
class Engine:
    """A layer built into an engine.

    Attributes
    ----------
    kernel : str
        The kernel that runs.
    weight_bytes : int
        Bytes of the weight as the engine holds it.
    calls : sequence of callable
        Calls that do the same work with weights of their own.
    output : callable
        Makes a NumPy array of what a call returns.
    rest_seconds : float
        How long threads go on spinning after a call, see `sampling.WallClock`.
    room_bytes : int
        Scratch memory that each call writes and reads besides.
    families : tuple of str
        The families of latbench's kernels that a call runs.
    """

    kernel: str
    weight_bytes: int
    calls: Sequence[Callable[[], Any]]
    output: Callable[[Any], np.ndarray] = np.asarray
    rest_seconds: float = 0.0
    room_bytes: int = 0
    families: tuple[str, ...] = ()


class Rotation:
    """Calls in turn, one for each call of this object; `facts` are columns of the point's row."""

    def __init__(self, calls: Sequence[Callable[[], Any]], facts: dict[str, Any], rest_seconds: float = 0.0) -> None:
        self.facts, self.rest_seconds = facts, rest_seconds
        self._next = itertools.cycle(calls).__next__

    def __call__(self) -> Any:
        """Return the result of the next call."""
        return self._next()()


def count_copies(each_bytes: int, most: int = MOST_COPIES) -> int:
    """Return how many copies of `each_bytes` bytes pass this machine's caches, at most `most`."""
    return max(1, min(most, -(-count_cold_bytes() // max(1, each_bytes))))


def count_cold_bytes() -> int:
    """Return how many bytes of weight copies take turns: those that pass this machine's caches.

    It is limited to a share of the memory: a virtual machine may show a cache of its host that is as large as that.
    """
    granted = read_available_bytes()
    memory = read_memory_bytes() if granted is None else min(read_memory_bytes(), granted)
    return min(count_rotated_bytes(), int(memory) // COLD_SHARE)


def prepare_point(point: Point) -> Rotation:
    """Build `point` in this process and check its results.

    Raises Unsupported where the pattern or the engine does not run it. Raises WrongResult where a copy's
    result is further from the float64 product than float32 arithmetic explains. Rounded weights and activations are
    allowed where the point has them.
    """
    if (reason := point.pattern.refuses(point.shape)) is not None:
        raise Unsupported(reason)
    layer = build_synthetic_layer(point)
    engine = importlib.import_module(CPU_ENGINES[point.backend].module).prepare(point, layer)
    first = engine.output(engine.calls[0]())
    judge = _build_check(point, layer)
    error = judge(first)
    for call in engine.calls[1:]:  # one result at a time: all of them may be gigabytes
        y = engine.output(call())
        if not np.array_equal(y, first):
            error = max(error, judge(y))
    nnz = layer.packed.nnz
    m, k, n = point.shape.m, point.shape.k, point.shape.n
    inputs = count_inputs_read(point.shape, layer.weight != 0)
    passed = len(engine.calls) * (engine.weight_bytes + engine.room_bytes)
    facts = {
        "kernel_used": engine.kernel,
        "sparsity_actual": 1 - nnz / (m * k),
        "nnz": nnz,
        "flop_dense": 2 * m * k * n,
        "flop_nnz": 2 * nnz * n,
        "bytes_min": engine.weight_bytes + layer.bias.nbytes + 4 * inputs + 4 * m * n,
        "max_rel_err": error,
        "weight_copies": len(engine.calls),
        "flags": IN_CACHE if passed < count_rotated_bytes() else "",
        "kernel_families": engine.families,
    }
    return Rotation(engine.calls, facts, engine.rest_seconds)


def build_synthetic_layer(point: Point) -> SyntheticLayer:
    """Build random weights, bias and activations for `point`; the same point always gets the same."""
    shape = point.shape
    rng = np.random.default_rng([point.seed, zlib.crc32(f"{shape} {point.pattern} {point.sparsity}".encode())])
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(shape.k**0.5)
    mask = build_synthetic_mask(rng, point.pattern, (shape.m, shape.k), point.sparsity)
    weight *= mask
    size = (shape.batch, shape.c_in, shape.h, shape.w) if isinstance(shape, Conv2dShape) else (shape.n, shape.k)
    return SyntheticLayer(
        weight=weight,
        packed=pack(weight, mask, point.pattern),
        mask=mask,
        bias=rng.standard_normal(shape.m, np.float32),
        x=copy_to_cache_line(rng.standard_normal(size, np.float32)),
    )


def build_synthetic_mask(
    rng: np.random.Generator, pattern: Pattern, size: tuple[int, int], sparsity: float
) -> NDArray[np.bool_]:
    """Build a random mask bool (m, k) of `pattern`.

    Shfl-BW needs no search for row groups here: random rows make a group, which is the hard case for a kernel.
    """
    scores = rng.random(size)
    if not isinstance(pattern, ShflBW):
        return pattern.mask(scores, sparsity)
    mask = np.empty(size, bool)
    mask[rng.permutation(size[0])] = pattern.in_order.mask(scores, sparsity)
    return mask


def find_block_bits(point: Point) -> int | None:
    """Return the bits of a weight whose blocks of columns have steps of their own; None for any other weight."""
    if point.dtype_w == INT4:
        return 4
    return 8 if point.kernel == BLOCK_STEPS else None


def _build_check(point: Point, layer: SyntheticLayer) -> Callable[[np.ndarray], float]:
    """Return the function that finds the largest relative error of a result, or raises WrongResult.

    A large batch is checked by its first and last image.
    """
    shape, bias = point.shape, layer.bias
    if (bits := find_block_bits(point)) is not None:
        blocks = layer.round_in_blocks(bits)
        return lambda y: check_in_blocks(y, blocks, layer.x, bias, rounds_inputs=point.dtype_a == INT8)
    if (point.dtype_w, point.dtype_a) == (INT8, "float32"):
        rounded = pack(unpack_int8(layer.quantize(False)), layer.mask, layer.packed.pattern)
        # The rounded weight in float32, and its scale behind the sum, are each one rounding off.
        return lambda y: check(y, rounded, layer.x, bias=bias, layout="token_major", roundoff=UNIT_ROUNDOFF)
    if point.dtype_w == INT8:
        weight = layer.quantize(point.kernel == OWN_STEPS)
        # Other libraries place and round steps in their own ways.
        slack = 0.0 if CPU_ENGINES[point.backend].ours else 1.0
        if isinstance(shape, Conv2dShape):
            return lambda y: check_int8_conv2d(_some(y), weight, shape, _some(layer.x), bias=bias, slack=slack)
        return lambda y: check_int8(y, weight, layer.x, bias=bias, slack=slack)
    packed = round_packed(layer.packed) if point.dtype_w == BFLOAT16 else layer.packed
    roundoff = BFLOAT16_ROUNDOFF if point.dtype_a == BFLOAT16 else 0.0
    if isinstance(shape, Conv2dShape):
        return lambda y: check_conv2d(_some(y), packed, shape, _some(layer.x), bias=bias, roundoff=roundoff)
    return lambda y: check(y, packed, layer.x, bias=bias, layout="token_major", roundoff=roundoff)


def _some(images: np.ndarray) -> np.ndarray:
    return images if len(images) <= _CHECKED_IMAGES else images[[0, -1]]
