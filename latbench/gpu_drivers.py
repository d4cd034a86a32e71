"""The drivers of `latbench.gpu_timing`: CUDA streams, events and graphs through torch or CuPy.

A process has one of each at most. Whoever asks for one makes its stream the current one, so that what a library
launches lands on it.
"""

from __future__ import annotations

import functools
from typing import Any

from latbench.gpu_timing import Call

FLUSH_TIMES_L2 = 2  # caches that are hashed over slices need more than their size to be displaced


class TorchDriver:
    """Events and graphs of torch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.flush_bytes = FLUSH_TIMES_L2 * int(torch.cuda.get_device_properties(0).L2_cache_size)
        self._stream = torch.cuda.Stream()  # the default stream cannot be captured
        self.use()
        self._buffer = torch.empty(self.flush_bytes, dtype=torch.int8, device="cuda")

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
        with self._torch.cuda.graph(graph, stream=self._stream):
            work()
        replay: Call = graph.replay
        return replay

    def wait(self) -> None:
        """See Driver."""
        self._stream.synchronize()


class CupyDriver:
    """Events and graphs of CuPy. With `capturable` false it works on the default stream, as Numba's kernels do."""

    def __init__(self, capturable: bool = True) -> None:
        import cupy

        self._cupy = cupy
        self.flush_bytes = FLUSH_TIMES_L2 * int(cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"])
        self._stream = cupy.cuda.Stream(non_blocking=True) if capturable else cupy.cuda.Stream.null
        self._capturable = capturable
        self.use()
        self._buffer = cupy.empty(self.flush_bytes, cupy.int8)

    def use(self) -> None:
        """Make its stream the current one."""
        self._stream.use()

    def flush(self) -> None:
        """See Driver."""
        self._buffer.data.memset_async(0, self.flush_bytes, self._stream)

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
            # Ends a capture that failed as well, and then raises what made it invalid.
            graph = self._stream.end_capture()
        return functools.partial(graph.launch, stream=self._stream)

    def wait(self) -> None:
        """See Driver."""
        self._stream.synchronize()


_torch_driver = functools.cache(TorchDriver)
_cupy_driver = functools.cache(CupyDriver)


def torch_driver() -> TorchDriver:
    """This process's driver through torch, with its stream the current one."""
    driver = _torch_driver()
    driver.use()
    return driver


def cupy_driver(capturable: bool = True) -> CupyDriver:
    """This process's driver through CuPy, with its stream the current one."""
    driver = _cupy_driver(capturable)
    driver.use()
    return driver
