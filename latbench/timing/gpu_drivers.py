"""Drivers of `latbench.timing.gpu_events`: CUDA streams, events and graphs through torch or CuPy.

A process has at most one of each. Opening one makes its stream the current one, so that a library's launches land on
it.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

from latbench.timing.gpu_events import FLUSH_TIMES_L2, Call, Driver

STREAMS = 32  # size of torch's pool: c10/cuda/CUDAStream.cpp, kStreamsPerPool
BFLOAT16_NAN = 0xFFFF  # CuPy holds the bits of bfloat16 as uint16
NO_RESULT = -(2**31)  # in place of NaN among whole numbers: no sum of a layer is so low


class TorchDriver:
    """Events and graphs of torch."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self.l2_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)
        self._stream = self._torch.cuda.Stream()  # the default stream cannot be captured
        self.use()
        self._buffer = torch.empty(FLUSH_TIMES_L2 * self.l2_bytes, dtype=torch.int8, device="cuda")
        self._captured_on: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # graphs, by stream

    def use(self) -> None:
        """Make its stream the current one."""
        self._torch.cuda.set_stream(self._stream)

    def flush(self) -> None:
        """See Driver."""
        self._buffer.zero_()

    def mark(self) -> Any:
        """See Driver."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """See Driver."""
        return float(start.elapsed_time(end)) / 1e3

    def capture(self, work: Call) -> Call:
        """See Driver."""
        graph = self._torch.cuda.CUDAGraph()
        stream = self._unused_stream()
        with self._torch.cuda.graph(graph, stream=stream):
            work()
        self._captured_on[stream.cuda_stream] = graph
        replay: Call = graph.replay  # keeps the graph alive
        return replay

    def _unused_stream(self) -> Any:
        """Return a stream on which no living graph was captured. Raises RuntimeError where there is none.

        With a graph, torch since 2.12 frees the cuBLAS workspace of its stream. Other graphs of that stream would go
        on using it (pytorch #193402). torch hands out the streams of a pool in turn.
        """
        for _ in range(STREAMS):
            stream = self._torch.cuda.Stream()
            if stream.cuda_stream not in self._captured_on:
                return stream
        raise RuntimeError(f"{STREAMS} graphs of torch are in use, and it has no more streams: sweep fewer at a time")

    def spoil(self, result: Any) -> None:
        """See Driver."""
        result.fill_(math.nan if result.is_floating_point() else NO_RESULT)

    def wait(self) -> None:
        """See Driver."""
        self._stream.synchronize()


class CupyDriver:
    """Events and graphs of CuPy. Unless `capturable`, it works on the default stream, as Numba's kernels do."""

    def __init__(self, capturable: bool = True) -> None:
        import cupy

        self._cupy = cupy
        self.l2_bytes = int(cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"])
        self._stream = cupy.cuda.Stream(non_blocking=True) if capturable else cupy.cuda.Stream.null
        self._capturable = capturable
        self.use()
        self._buffer = cupy.empty(FLUSH_TIMES_L2 * self.l2_bytes, cupy.int8)

    def use(self) -> None:
        """Make its stream the current one."""
        self._stream.use()

    def flush(self) -> None:
        """See Driver."""
        self._buffer.data.memset_async(0, self._buffer.nbytes, self._stream)

    def mark(self) -> Any:
        """See Driver."""
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """See Driver."""
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def capture(self, work: Call) -> Call:
        """See Driver."""
        if not self._capturable:
            raise RuntimeError("what runs on the default stream cannot be captured")
        self._stream.begin_capture()
        try:
            work()
        finally:
            # This also ends a failed capture, and then raises the cause.
            graph = self._stream.end_capture()
        return functools.partial(graph.launch, stream=self._stream)

    def spoil(self, result: Any) -> None:
        """See Driver."""
        result.fill(BFLOAT16_NAN if result.dtype == self._cupy.uint16 else math.nan)

    def wait(self) -> None:
        """See Driver."""
        self._stream.synchronize()


OPEN_DRIVERS: list[Driver] = []
"""The drivers that this process has: while one can wait, the CUDA context works."""


@functools.cache
def _torch_driver() -> TorchDriver:
    OPEN_DRIVERS.append(driver := TorchDriver())
    return driver


@functools.cache
def _cupy_driver(capturable: bool) -> CupyDriver:
    OPEN_DRIVERS.append(driver := CupyDriver(capturable))
    return driver


def open_torch_driver() -> TorchDriver:
    """Return this process's driver through torch, with its stream the current one."""
    driver = _torch_driver()
    driver.use()
    return driver


def open_cupy_driver(capturable: bool = True) -> CupyDriver:
    """Return this process's driver through CuPy, with its stream the current one."""
    driver = _cupy_driver(capturable)
    driver.use()
    return driver
