"""How a point is prepared and run on a GPU: one module an engine, each imported only in the process that runs it.

An engine's module has one function, `prepare(point, layer) -> GpuEngine`. Here is what all engines share: which there
are, the timer, and the check against the oracle on the device. What is checked are the results of the very work that
is timed, a graph's replay where there is one, written over NaNs. A kernel that breaks its process's CUDA context ends
the process: nothing that it would compute or time afterwards could be trusted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latbench.backends import Unsupported
from latbench.backends import gpu_layers as layers
from latbench.backends.gpu_layers import GpuLayer
from latbench.machines.devices import find_version
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
from sparse_kernels.reference import patches
from sparse_kernels.shapes import Conv2dShape

MOST_COPIES = {"graph": 512, "call": 64}  # so many launches of calls would outlast any head start of the host
COLUMNS_AT_ONCE = 2048  # of the oracle's product: bounds its memory
IN_L2 = "in_l2"  # flag of a row: even so many copies are so small that the L2 may hold them
SPLIT_SUMS = 16  # parts of a sum that cuBLAS may add in the element type, as torch lets it by default
BROKEN = 86  # exit code of a worker whose CUDA context is gone

UUID = "LATBENCH_GPU_UUID"  # tells a worker which GPU to watch


@dataclass(frozen=True)
class Backend:
    """An engine: its module, the packages of which one must be installed, the process that it shares with others.
    `checked_by`: packages of which one must be there, too, to check its results.

    `libraries`: by kernel, those whose version its times depend on ("" for every other kernel), by the names of
    `latbench.machines.cuda_libraries`. `packed`: the kernels that read weights in their pattern's format.
    """

    module: str
    packages: tuple[str, ...]
    process: str
    libraries: Mapping[str, tuple[str, ...]]
    packed: tuple[str, ...] = ()
    checked_by: tuple[str, ...] = ()
    ours: bool = False
    captured: bool = True  # whether its launches can become a CUDA graph

    @property
    def package(self) -> str | None:
        """The package that is installed; None if none is."""
        return _installed(self.packages)

    def version(self) -> str | None:
        """The version of that package; None where anything that the engine needs is missing."""
        return None if self.package is None or self.missing else find_version(self.package)

    @property
    def used(self) -> tuple[str, ...]:
        """The installed packages that it runs with."""
        return tuple(name for name in (self.package, _installed(self.checked_by)) if name is not None)

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages of which one has to be installed; none where the engine has all that it needs."""
        needed = (self.packages, self.checked_by) if self.checked_by else (self.packages,)
        return next((packages for packages in needed if _installed(packages) is None), ())


def _installed(packages: Sequence[str]) -> str | None:
    return next((name for name in packages if find_version(name)), None)


_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_BLAS = {"": ("cublas",)}
_SPARSE_LT = dict.fromkeys(("cusparselt", "cusparselt_tuned"), ("cusparselt",))
_BSR = dict.fromkeys(("bsr", "bsr_tuned"), ("triton",))

# Each of our own may crash alone. Of other libraries those that are no baseline do not share the baseline's process.
BACKENDS = {
    "torch_gpu": Backend("latbench.backends.torch_gpu", ("torch",), "torch", {**_BLAS, "cudnn": ("cudnn",)}),
    "torch_sparse": Backend(
        "latbench.backends.torch_sparse", ("torch",), "torch_sparse",
        {**_SPARSE_LT, **_BSR, "cutlass": ()}, packed=tuple(_BSR),
    ),
    # CuPy refuses to call libraries while a stream is captured.
    "cublas": Backend("latbench.backends.cublas", _CUPY, "cupy_peers", _BLAS, captured=False),
    "cusparse": Backend(
        "latbench.backends.cusparse", _CUPY, "cupy_peers", {"": ("cusparse",)}, packed=("csr", "bsr"), captured=False
    ),
    "cupy": Backend("latbench.backends.cupy", _CUPY, "cupy", {"": ("nvrtc",)}, packed=("auto",), ours=True),
    # Its launches go to the default stream, which cannot be captured.
    "numba_cuda": Backend(
        "latbench.backends.numba_cuda", ("numba-cuda",), "numba_cuda", {"": ("nvvm",)}, packed=("auto",),
        checked_by=_CUPY, ours=True, captured=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class GpuEngine:
    """A layer built into an engine. `calls` do the same work on weights, activations and results of their own.

    `float64` turns a host array into a float64 array of the engine's library on the device, and `result` what a call
    returns: (m, n) for a linear layer, (batch, c_out, out_h, out_w) for a convolution, in any memory order.
    `parts`: into how many sums of the element type it may split a row's terms. `families`: our kernel families that
    were tried until one ran it.
    """

    kernel: str
    weight_bytes: int
    calls: Sequence[Call]
    driver: Driver
    float64: Callable[[np.ndarray], Any]
    result: Callable[[Any], Any]
    parts: int = 1
    families: tuple[str, ...] | None = None


class Kept:
    """A call that holds on to its last result, so that no other copy writes there. Of a captured call that is what
    every replay of the graph writes to.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.last: Any = None

    def __call__(self) -> None:
        """Run it."""
        self.last = self._call()


def draw(point: Point) -> None:
    """Draw and pack the weight of `point`, which leaves the GPU alone; `prepare` finds it done."""
    if point.pattern.refuses(point.shape) is None:
        layer = layers.synthetic_layer(point)
        if point.kernel in BACKENDS[point.backend].packed:
            _ = layer.packed


def prepare(point: Point) -> Timed:
    """Build `point` in this process, check what it computes, and get it ready to be timed.

    Raises Unsupported where pattern or engine do not do it, timing.NotCaptured where a library will not become a CUDA
    graph (which may be a fault of this moment, and is tried again), and oracle.WrongResult where a copy's result is
    further from the float64 product than the element type explains.
    """
    if (reason := point.pattern.refuses(point.shape)) is not None:
        raise Unsupported(reason)
    layer = layers.synthetic_layer(point)
    with _alive():
        engine = importlib.import_module(BACKENDS[point.backend].module).prepare(point, layer)
        calls = [Kept(call) for call in engine.calls]
        timer = _timer(point, engine, calls)
        for call in calls:
            engine.driver.spoil(call.last)
        timer.run()
        error = check(point, layer, engine, [call.last for call in calls])
    return Timed(timer, {**_facts(point, layer, engine), "max_rel_err": error})


class Timed:
    """An EventTimer that ends its process where the device fails under it; `facts` are columns of the point's row."""

    def __init__(self, timer: EventTimer, facts: dict[str, Any]) -> None:
        self.inner_loops, self.facts = timer.inner_loops, {**timer.facts, **facts}
        self._timer = timer

    def burst(self, seconds: float) -> Burst:
        """Samples taken for about `seconds`."""
        with _alive():
            return self._timer.burst(seconds)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Lets every exception pass, unless the CUDA context did not survive it: then the process ends."""
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
    """Return when the device has done all that this process asked of it; RuntimeError where CUDA is broken."""
    for driver in OPEN_DRIVERS:
        driver.wait()
    if not OPEN_DRIVERS and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.synchronize()  # a library that failed before its first point had a driver


def check(point: Point, layer: GpuLayer, engine: GpuEngine, results: Sequence[Any]) -> float:
    """The largest relative error of what the engine's calls returned; of a convolution by the first and last image.

    Copies whose result equals the first one's, which was checked, need no product of their own.
    """
    weight = engine.float64(layer.weight)
    x, columns_of = _columns(point, layer)
    first, error = None, 0.0
    for result in results:
        y = columns_of(engine.result(result))
        if first is not None and bool((y == first).all()):
            continue
        first = y if first is None else first
        for begin in range(0, x.shape[1], COLUMNS_AT_ONCE):
            part = slice(begin, begin + COLUMNS_AT_ONCE)
            columns = engine.float64(np.ascontiguousarray(x[:, part]))
            worst = layers.check(
                y[:, part], weight, columns, terms=layer.terms, dtype=point.dtype, parts=engine.parts
            )
            error = max(error, worst)
    return error


def _columns(point: Point, layer: GpuLayer) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """The columns of the implicit product that are checked, and what takes the same ones out of a result."""
    shape = point.shape
    if not isinstance(shape, Conv2dShape):
        return layer.x, lambda y: y
    images = sorted({0, shape.batch - 1})
    return patches(layer.x[images], shape), lambda y: y[images].swapaxes(0, 1).reshape(shape.m, -1)


def _timer(point: Point, engine: GpuEngine, calls: Sequence[Kept]) -> EventTimer:
    mode = TimingMode(point.cache_mode, point.launch_mode)
    try:
        return build_event_timer(calls, engine.driver, mode, watch=_watch())
    except NotCaptured as error:
        raise NotCaptured(f"{engine.kernel} cannot be captured into a CUDA graph: {_first_line(error)}") from error


@functools.cache
def _watch() -> StateReader:
    return GpuObserver(os.environ[UUID]) if os.environ.get(UUID) else lambda: None


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
        "bytes_min": engine.weight_bytes + 2 * (count_inputs_read(point.shape, layer.mask) + m * n),
        "weight_copies": len(engine.calls) if point.cache_mode == "rotated" else 1,
        "flags": IN_L2 if stays else "",
        **({} if engine.families is None else {"kernel_families": engine.families}),
    }


def _bytes_each(point: Point, layer: GpuLayer, weight_bytes: int) -> int:
    """What one copy reads and writes, everything once."""
    return weight_bytes + 2 * (layer.x.size + point.shape.m * point.shape.n)


def copies(point: Point, layer: GpuLayer, weight_bytes: int, driver: Driver) -> int:
    """How many copies of a layer the engine should make for the point's cache mode."""
    if point.cache_mode != "rotated":
        return 1
    each = _bytes_each(point, layer, weight_bytes)
    return choose_copies(each, driver.l2_bytes, MOST_COPIES[point.launch_mode])


def only(point: Point, *, format: str, layouts: Sequence[str]) -> None:
    """Raise Unsupported unless the point's pattern has this format, and its activations one of these layouts."""
    if point.pattern.format != format:
        raise Unsupported(f"{point.backend} {point.kernel} multiplies {format} weights, not {point.pattern}")
    if point.layout not in layouts:
        raise Unsupported(
            f"{point.backend} {point.kernel} takes {' or '.join(layouts)} activations, not {point.layout}"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
