"""How a point is prepared and run: one module an engine, each imported only in the process that runs it.

An engine's module has one function, `prepare(point, layer) -> Engine`: the weights are built into whatever the engine
runs, and `Engine.calls` holds one call a copy of them. Here is what all engines share: the synthetic layer, the check
against the oracle, and taking the copies in turn so that weights come from where they come from in a real network,
not from the cache that the last call filled.
"""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latbench.base.cgroups import read_available_bytes
from latbench.machines.devices import find_version, read_memory_bytes
from latbench.workloads.minimum_work import count_inputs_read
from latbench.workloads.points import Point
from sparse_kernels import oracle
from sparse_kernels.cpu.codegen.cpu_target import rotated_bytes
from sparse_kernels.cpu.runtime.scratch_buffers import at_cache_line
from sparse_kernels.formats import Packed, pack, rounded
from sparse_kernels.patterns import Pattern, ShflBW, VectorWise
from sparse_kernels.shapes import Conv2dShape, Shape

# Each engine: its module, and the packages it cannot run without; the first one's version stands in the table.
BACKENDS = {
    "torch": ("latbench.backends.torch", ("torch",)),
    "onnxruntime": ("latbench.backends.onnxruntime", ("onnxruntime", "onnx")),
    "openvino": ("latbench.backends.openvino", ("openvino",)),
    "numba": ("latbench.backends.numba", ("numba",)),
    "torch_sparse_cpu": ("latbench.backends.torch_sparse_cpu", ("torch",)),
    "scipy": ("latbench.backends.scipy", ("scipy",)),
}

# Copies of a weight at most. Smaller weights than pass the caches so are small beside the layers around them, too.
MOST_COPIES = 256
MOST_SESSIONS = 32  # of an engine that takes milliseconds and megabytes for each
COLD_SHARE = 16  # of the memory, at most: the points of a block, and what each engine makes of them, have to fit
IN_CACHE = "in_cache"  # flag of a row: even so many copies are so small that the caches may hold them
_CHECKED_IMAGES = 2


class Unsupported(Exception):
    """The engine does not do this; the message says why."""


@dataclass(frozen=True)
class Layer:
    """A layer with synthetic weights: what every engine is given.

    weight float32 (m, k) with zeros where mask bool (m, k) drops, packed in the point's pattern; bias float32 (m,);
    x float32, (n, k) for a linear layer and (batch, c_in, h, w) for a convolution, placed as a framework places it.
    """

    weight: NDArray[np.float32]
    packed: Packed
    bias: NDArray[np.float32]
    x: NDArray[np.float32]


@dataclass(frozen=True)
class Engine:
    """A layer built into an engine: `calls` do the same work with weights of their own, `output` makes a NumPy array
    of what they return. room_bytes: what each call has for itself besides, and writes and reads. rest_seconds: how
    long threads go on spinning after a call, see `measure.WallClock`.
    """

    kernel: str
    weight_bytes: int
    calls: Sequence[Callable[[], Any]]
    output: Callable[[Any], np.ndarray] = np.asarray
    rest_seconds: float = 0.0
    room_bytes: int = 0


class Rotation:
    """Calls taken in turn, one each time it is called; `facts` are columns of the point's row."""

    def __init__(self, calls: Sequence[Callable[[], Any]], facts: dict[str, Any], rest_seconds: float = 0.0) -> None:
        self.facts, self.rest_seconds = facts, rest_seconds
        self._next = itertools.cycle(calls).__next__

    def __call__(self) -> Any:
        """The result of the next call."""
        return self._next()()


def available() -> dict[str, str | None]:
    """Every engine with the version that is installed here; None where a package is missing."""
    return {name: version(name) for name in BACKENDS}


def version(name: str) -> str | None:
    """The version of an engine; None unless all of its packages are installed."""
    versions = [find_version(package) for package in BACKENDS[name][1]]
    return versions[0] if all(versions) else None


def copies_for(each_bytes: int, most: int = MOST_COPIES) -> int:
    """How many copies of a weight, with what each has for itself, pass this machine's caches, at most `most`."""
    return max(1, min(most, -(-cold_bytes() // max(1, each_bytes))))


def cold_bytes() -> int:
    """How many bytes of copies of a weight take turns: what passes this machine's caches, and no more than a share of
    its memory, because a virtual machine may show a cache of its host's that is as large as all it has.
    """
    granted = read_available_bytes()
    memory = read_memory_bytes() if granted is None else min(read_memory_bytes(), granted)
    return min(rotated_bytes(), int(memory) // COLD_SHARE)


def prepare(point: Point) -> Rotation:
    """Build `point` in this process and check what it computes.

    Raises Unsupported where the pattern or the engine does not do it, and oracle.WrongResult where any copy's result
    is further from the float64 product than float32 arithmetic explains; of the rounded weights, where the point says
    that they are, and than rounded activations explain, where it says so of them.
    """
    if (reason := point.pattern.refuses(point.shape)) is not None:
        raise Unsupported(reason)
    layer = synthetic_layer(point)
    engine = importlib.import_module(BACKENDS[point.backend][0]).prepare(point, layer)
    first = engine.output(engine.calls[0]())
    packed = rounded(layer.packed) if point.dtype_w == "bfloat16" else layer.packed
    roundoff = oracle.BFLOAT16_ROUNDOFF if point.dtype_a == "bfloat16" else 0.0
    error = _check(point.shape, layer, packed, first, roundoff)
    for call in engine.calls[1:]:  # one result at a time: all of them may be gigabytes
        y = engine.output(call())
        if not np.array_equal(y, first):
            error = max(error, _check(point.shape, layer, packed, y, roundoff))
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
        "flags": IN_CACHE if passed < rotated_bytes() else "",
    }
    return Rotation(engine.calls, facts, engine.rest_seconds)


def synthetic_layer(point: Point) -> Layer:
    """Random weights, bias and activations for `point`; the same point always gets the same."""
    shape = point.shape
    rng = np.random.default_rng([point.seed, zlib.crc32(f"{shape} {point.pattern} {point.sparsity}".encode())])
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(shape.k**0.5)
    mask = synthetic_mask(rng, point.pattern, (shape.m, shape.k), point.sparsity)
    weight *= mask
    size = (shape.batch, shape.c_in, shape.h, shape.w) if isinstance(shape, Conv2dShape) else (shape.n, shape.k)
    return Layer(
        weight=weight,
        packed=pack(weight, mask, point.pattern),
        bias=rng.standard_normal(shape.m, np.float32),
        x=at_cache_line(rng.standard_normal(size, np.float32)),
    )


def synthetic_mask(
    rng: np.random.Generator, pattern: Pattern, size: tuple[int, int], sparsity: float
) -> NDArray[np.bool_]:
    """A random mask bool (m, k) of `pattern`.

    Shfl-BW needs no search for row groups here: random rows make a group, which is what a kernel has to cope with.
    """
    scores = rng.random(size)
    if not isinstance(pattern, ShflBW):
        return pattern.mask(scores, sparsity)
    mask = np.empty(size, bool)
    mask[rng.permutation(size[0])] = VectorWise(pattern.v).mask(scores, sparsity)
    return mask


def _check(shape: Shape, layer: Layer, packed: Packed, y: np.ndarray, roundoff: float) -> float:
    """The largest relative error of `y` with these weights; a large batch is checked by its first and last image."""
    if not isinstance(shape, Conv2dShape):
        return oracle.check(y, packed, layer.x, bias=layer.bias, layout="token_major", roundoff=roundoff)
    images = slice(None) if len(y) <= _CHECKED_IMAGES else [0, -1]
    return oracle.check_conv2d(y[images], packed, shape, layer.x[images], bias=layer.bias, roundoff=roundoff)
