"""The process inside DeepSparse's own environment: one model. `latbench.backends.cpu.deepsparse` starts it.

    python -I deepsparse_worker.py DESCRIPTOR PARENT_PID ENGINE

ENGINE is DeepSparse's native module (deepsparse_engine.so), loaded by itself: its Python package needs an old onnx
and reports its use. This file uses only the standard library and NumPy, in the syntax of Python 3.9.

A request is a JSON object with a verb and its arguments. An answer holds what was asked for, or "error". Arrays go
through .npz files. The output of the engine goes to stdout, which is a log; the socket is for answers only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SCHEDULER = "single_stream"  # one call at a time has all threads
_VERBS = ("load", "run", "burst", "analyse")


class Server:
    """Holds the loaded model and serves requests for it; each verb is a method."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.network: Any = None
        self.inputs: list[Any] = []

    def serve(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to one request."""
        if verb not in _VERBS:
            raise ValueError(f"a DeepSparse worker knows {', '.join(_VERBS)}, not {verb!r}")
        answer: dict[str, Any] = getattr(self, verb)(**arguments)
        return answer

    def load(self, model: str, inputs: str, threads: int) -> dict[str, Any]:
        """Compile the ONNX file `model` for the arrays in the file `inputs`; the first one's length is the batch."""
        self.inputs = _arrays(inputs)
        batch = len(self.inputs[0])
        self.network = self.native.deepsparse_engine(model, batch, threads, 0, _SCHEDULER, None, None)
        return {}

    def run(self, outputs: str) -> dict[str, Any]:
        """Run once and write the outputs to the file `outputs`."""
        np.savez(outputs, *self.network.execute_list_out(self.inputs))
        return {}

    def burst(self, seconds: float, loops: int) -> dict[str, Any]:
        """Take samples for about `seconds`, at least one, each the mean seconds of `loops` calls.

        As in latbench.timing.sampling.sample_burst, an untimed sample comes first, and no garbage is collected. The
        answer also holds the involuntary context switches and the CPU seconds of this process.
        """
        gc.disable()
        try:
            switches, cpu_seconds = _usage()
            self._time(loops)
            end = time.perf_counter() + seconds
            samples = [self._time(loops) / loops]
            while time.perf_counter() < end:
                samples.append(self._time(loops) / loops)
            now_switches, now_cpu_seconds = _usage()
        finally:
            gc.enable()
        return {"samples": samples, "switches": now_switches - switches, "cpu_seconds": now_cpu_seconds - cpu_seconds}

    def analyse(
        self, model: str, inputs: str, threads: int, sparsity: float | None, calls: int, warm_calls: int
    ) -> dict[str, Any]:
        """Time every layer inside the network, as if each weight had `sparsity` (None: as it is).

        Once a process: the engine aborts the second time.
        """
        arrays = _arrays(inputs)
        network = self.native.deepsparse_engine(
            model, len(arrays[0]), threads, 0, _SCHEDULER, None, "external", calls, warm_calls, 1, None, sparsity
        )
        found: dict[str, Any] = network.benchmark_execute(arrays, None)[1]
        return found

    def _time(self, loops: int) -> float:
        execute, inputs = self.network.execute_list_out, self.inputs
        start = time.perf_counter()
        for _ in range(loops):
            execute(inputs)
        return time.perf_counter() - start


def main() -> None:
    """Serve requests until the parent closes the socket or is gone."""
    descriptor, parent, engine = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    connection = Connection(descriptor)
    server = Server(_native(engine))
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the engine's own threads need not be waited for
        try:
            answer = server.serve(**request)
        except Exception as error:  # noqa: BLE001 - the engine may raise anything, and the parent has to hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(answer).encode())


def _native(path: str) -> Any:
    """Load the module in the file `path` under the name of its entry point."""
    spec = importlib.util.spec_from_file_location("deepsparse_engine", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arrays(path: str) -> list[Any]:
    """Read the arrays of an .npz file in the order in which they were stored."""
    with np.load(path) as stored:
        return [stored[name] for name in stored.files]


def _usage() -> tuple[int, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nivcsw, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
