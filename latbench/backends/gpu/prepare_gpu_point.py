"""Preparation of a point on a GPU: an engine's layer, checked, with a timer.

Each engine has a module with one function, `prepare(point, layer) -> GpuEngine`, and is imported only in the process
that runs it. This module holds what all engines share: the timer, and the check against the oracle on the device. The
checked results are those of the very work that is timed, a graph's replay where there is one, written over NaNs. A
kernel that breaks its process's CUDA context ends the process, because later results and times would be unreliable.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latbench.backends.gpu import gpu_layers
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.low_precision_layers import EIGHT_BITS, LOW_PRECISIONS
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import ELEMENT_BYTES, GPU_ENGINES
from latbench.machines.gpu_discovery import UUID_VARIABLE
from latbench.machines.nvml import GpuObserver
from latbench.timing.gpu_drivers import OPEN_DRIVERS
from latbench.timing.gpu_events import (
    Call,
    Driver,
    EventTimer,
    NotCaptured,
    StateReader,
    TimingMode,
    build_event_timer,
    choose_copies,
    displaces_cache,
)
from latbench.timing.sampling import Burst
from latbench.workloads.minimum_work import count_inputs_read
from latbench.workloads.points import Point
from sparse_kernels.reference import build_patches
from sparse_kernels.shapes import Conv2dShape

MOST_COPIES = {"graph": 512, "call": 64}  # so many launches of calls would outlast any head start of the host
COLUMNS_AT_ONCE = 2048  # of the oracle's product: bounds its memory
IN_L2 = "in_l2"  # flag of a row: even so many copies are so small that the L2 may hold them
SPLIT_SUMS = 16  # parts of a sum that cuBLAS may add in the element type, as torch lets it by default
BROKEN = 86  # exit code of a worker whose CUDA context is gone


@dataclass(frozen=True)
class GpuEngine:
    """A layer built into an engine.

    Attributes
    ----------
    kernel : str
        The kernel that runs.
    weight_bytes : int
        Bytes of the weight as the engine holds it.
    calls : sequence of callable
        Calls that do the same work on weights, activations and results of their own.
    driver : Driver
        The library's stream, events and graphs.
    float64 : callable
        Turns a host array into a float64 array of the engine's library on the device.
    result : callable
        Turns what a call returns into (m, n) for a linear layer, (batch, c_out, out_h, out_w) for a convolution, in
        any memory order.
    parts : int
        The number of sums of the element type into which it may split the terms of a row.
    families : tuple of str or None
        Our kernel families that were tried until one ran it.
    scales : tuple of ndarray or None
        Scales of the rows (m,) and of the columns (n,) of the product that it applies to a layer in eight bits.
    """

    kernel: str
    weight_bytes: int
    calls: Sequence[Call]
    driver: Driver
    float64: Callable[[np.ndarray], Any]
    result: Callable[[Any], Any]
    parts: int = 1
    families: tuple[str, ...] | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None


class LastResult:
    """A call that keeps its last result, so that no other copy writes there.

    For a captured call this is the array that every replay of the graph writes to.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.last: Any = None

    def __call__(self) -> None:
        """Run the call."""
        self.last = self._call()


def pack_gpu_point(point: Point) -> None:
    """Draw and pack the weight of `point` without the GPU; `prepare_gpu_point` then finds it done."""
    if point.pattern.refuses(point.shape) is None:
        layer = gpu_layers.build_gpu_layer(point)
        if point.kernel in GPU_ENGINES[point.backend].packed_kernels:
            _ = layer.packed


def prepare_gpu_point(point: Point) -> TimedPoint:
    """Build `point` in this process, check its results, and make it ready to be timed.

    Raises Unsupported where the pattern or the engine does not run it. Raises timing.NotCaptured where a library
    cannot be captured into a CUDA graph, which may be temporary and is tried again. Raises oracle.WrongResult where a
    copy's result is further from the float64 product than the element type explains.
    """
    if (reason := point.pattern.refuses(point.shape)) is not None:
        raise Unsupported(reason)
    engine_kind = GPU_ENGINES[point.backend]
    if point.dtype_w in LOW_PRECISIONS and point.kernel not in engine_kind.low_precision_kernels:
        raise Unsupported(f"{point.backend} {point.kernel} has no kernel for {point.dtype_w}")
    layer = gpu_layers.build_gpu_layer(point)
    with _alive():
        engine = importlib.import_module(engine_kind.module).prepare(point, layer)
        calls = [LastResult(call) for call in engine.calls]
        timer = _timer(point, engine, calls)
        for call in calls:
            engine.driver.spoil(call.last)
        timer.run()
        error = check_results(point, layer, engine, [call.last for call in calls])
    return TimedPoint(timer, {**_facts(point, layer, engine), "max_rel_err": error})


class TimedPoint:
    """An EventTimer that ends its process where the device fails; `facts` are columns of the point's row."""

    def __init__(self, timer: EventTimer, facts: dict[str, Any]) -> None:
        self.inner_loops, self.facts = timer.inner_loops, {**timer.facts, **facts}
        self._timer = timer

    def burst(self, seconds: float) -> Burst:
        """Take samples for about `seconds`."""
        with _alive():
            return self._timer.burst(seconds)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Pass every exception on, unless it broke the CUDA context: then end the process."""
    try:
        yield
    except Exception as error:
        try:
            _wait()
        except RuntimeError:  # CuPy's and torch's
            sys.stderr.write(f"{type(error).__name__}: {_first_line(error)}\n")
            sys.stderr.flush()
            os._exit(BROKEN)
        raise


def _wait() -> None:
    """Wait for all work of this process on the device. Raises RuntimeError where CUDA is broken."""
    for driver in OPEN_DRIVERS:
        driver.wait()
    if not OPEN_DRIVERS and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.synchronize()  # a library that failed before its first point had a driver


def check_results(point: Point, layer: GpuLayer, engine: GpuEngine, results: Sequence[Any]) -> float:
    """Return the largest relative error of the results of the engine's calls.

    Of a convolution the first and the last image are checked. Copies whose result equals the first one's, which was
    checked, need no product of their own.
    """
    weight = engine.float64(layer.weight)
    x, columns_of = _columns(point, layer)
    if engine.scales is not None:
        weight = weight * engine.float64(engine.scales[0])[:, None]
    first, error = None, 0.0
    for result in results:
        y = columns_of(engine.result(result))
        if first is not None and bool((y == first).all()):
            continue
        first = y if first is None else first
        for begin in range(0, x.shape[1], COLUMNS_AT_ONCE):
            part = slice(begin, begin + COLUMNS_AT_ONCE)
            columns = engine.float64(np.ascontiguousarray(x[:, part]))
            if engine.scales is not None:
                columns = columns * engine.float64(engine.scales[1][part])[None, :]
            worst = gpu_layers.check_product(
                y[:, part], weight, columns, terms=layer.terms, dtype=point.dtype, parts=engine.parts,
                exact=point.dtype_w in EIGHT_BITS,
            )  # fmt: skip
            error = max(error, worst)
    return error


def _columns(point: Point, layer: GpuLayer) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """Return the checked columns of the implicit product, and a function that takes the same ones out of a result."""
    shape = point.shape
    if not isinstance(shape, Conv2dShape):
        return layer.x, lambda y: y
    images = sorted({0, shape.batch - 1})
    return build_patches(layer.x[images], shape), lambda y: y[images].swapaxes(0, 1).reshape(shape.m, -1)


def _timer(point: Point, engine: GpuEngine, calls: Sequence[LastResult]) -> EventTimer:
    mode = TimingMode(point.cache_mode, point.launch_mode)
    try:
        return build_event_timer(calls, engine.driver, mode, watch=find_watch())
    except NotCaptured as error:
        raise NotCaptured(f"{engine.kernel} cannot be captured into a CUDA graph: {_first_line(error)}") from error


@functools.cache
def find_watch() -> StateReader:
    """Return what reads the state of the GPU that this process sees; in a process of no worker it reads nothing."""
    return GpuObserver(os.environ[UUID_VARIABLE]) if os.environ.get(UUID_VARIABLE) else lambda: None


def _facts(point: Point, layer: GpuLayer, engine: GpuEngine) -> dict[str, Any]:
    nnz, m, k, n = layer.nnz, point.shape.m, point.shape.k, point.shape.n
    each = _bytes_each(point, layer, engine.weight_bytes)
    stays = point.cache_mode == "rotated" and not displaces_cache(each, engine.driver.l2_bytes, len(engine.calls))
    return {
        "kernel_used": engine.kernel,
        "sparsity_actual": 1 - nnz / (m * k),
        "nnz": nnz,
        "flop_dense": 2 * m * k * n,
        "flop_nnz": 2 * nnz * n,
        "bytes_min": engine.weight_bytes + _count_activation_bytes(point, count_inputs_read(point.shape, layer.mask)),
        "weight_copies": len(engine.calls) if point.cache_mode == "rotated" else 1,
        "flags": IN_L2 if stays else "",
        **({} if engine.families is None else {"kernel_families": engine.families}),
    }


def _bytes_each(point: Point, layer: GpuLayer, weight_bytes: int) -> int:
    """Return the bytes that one copy reads and writes, each once."""
    return weight_bytes + _count_activation_bytes(point, layer.x.size)


def _count_activation_bytes(point: Point, inputs: int) -> int:
    """Return the bytes of so many inputs and of all results."""
    return int(ELEMENT_BYTES[point.dtype_a] * inputs + ELEMENT_BYTES[point.dtype] * point.shape.m * point.shape.n)


def count_gpu_copies(point: Point, layer: GpuLayer, weight_bytes: int, driver: Driver) -> int:
    """Return the number of copies of a layer for the point's cache mode."""
    if point.cache_mode != "rotated":
        return 1
    each = _bytes_each(point, layer, weight_bytes)
    return choose_copies(each, driver.l2_bytes, MOST_COPIES[point.launch_mode])


def check_format(point: Point, *, format: str, layouts: Sequence[str]) -> None:
    """Raise Unsupported unless the point's pattern has this format, and its activations one of these layouts."""
    if point.pattern.format != format:
        raise Unsupported(f"{point.backend} {point.kernel} multiplies {format} weights, not {point.pattern}")
    if point.layout not in layouts:
        raise Unsupported(
            f"{point.backend} {point.kernel} takes {' or '.join(layouts)} activations, not {point.layout}"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
