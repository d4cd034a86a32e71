"""DeepSparse: whole ONNX models on a CPU with sparse weights, each model in a process of its own.

The process runs `deepsparse_worker.py` in the environment that `latbench setup deepsparse` makes. Requests and
answers are JSON over a socket, and arrays go through files. The process does its own timing, so that communication
does not count.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from latbench.backends.cpu.deepsparse_environment import Environment
from latbench.backends.cpu.prepare_point import build_synthetic_layer
from latbench.base.engine_registry import DEEPSPARSE
from latbench.errors import EnvironmentUnusable
from latbench.timing.sampling import PREEMPTIONS_PER_SECOND, SHORTEST_SAMPLE_SECONDS, Burst
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult, check
from sparse_kernels.patterns import Unstructured
from sparse_kernels.shapes import LinearShape

ANSWER_SECONDS = 600.0
ANALYSED_CALLS = 20
_NUMBERS = re.compile(r"(-[\d.]+%)?_\d+$")  # ks_gemm_hyb-89.8%_2: the sparsity, and the place in the network
_TRIAL_SECONDS = 0.01  # long enough for the threads to wake up

_WORKER = Path(__file__).with_name("deepsparse_worker.py")
_QUIET = {"NM_DISABLE_ANALYTICS": "1", "NM_VERSION_CHECK": "false"}
# Otherwise it runs some layers as one ("tensor columns"), and the time belongs to none of them.
_UNFUSED = {"WAND_OPT_FLAGS": "default,~pyramids"}


@dataclass(frozen=True)
class Operation:
    """An operation of DeepSparse: its kernel, ONNX outputs, the sparsity of its weight, and its mean seconds."""

    kernel: str
    outputs: tuple[str, ...]
    sparsity: float
    seconds: float


class Process:
    """A DeepSparse process with `variables` added to its environment; it ends with its parent, or by `close`.

    Raises EnvironmentUnusable if it dies or DeepSparse refuses a request; the message holds DeepSparse's words.
    """

    def __init__(self, environment: Environment, variables: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(prefix="latbench-deepsparse-")  # noqa: SIM115 - closed by close()
        # Settings of the engine's own that somebody tried in this shell would change what is timed.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WAND_")}
        with theirs:
            self._process = subprocess.Popen(
                [
                    str(environment.python), "-I", str(_WORKER),
                    str(theirs.fileno()), str(os.getpid()), str(environment.engine),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=kept | _QUIET | (variables or {}),
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to one request; `deepsparse_worker` lists the verbs."""
        if self._connection.closed:
            raise EnvironmentUnusable("the DeepSparse process has ended before this")
        try:
            self._connection.send_bytes(json.dumps({"verb": verb, **arguments}).encode())
            if not self._connection.poll(ANSWER_SECONDS):
                self.close()
                raise EnvironmentUnusable(f"DeepSparse gave no answer for {ANSWER_SECONDS:g} s")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise EnvironmentUnusable(self._obituary()) from error
        if "error" in answer:
            raise EnvironmentUnusable(f"DeepSparse refuses this: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill the process: it holds nothing to save."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._connection.close()
        self._log.close()

    def _obituary(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.close()
        return f"the DeepSparse process ended {how}" + (f": {last}" if last else "")


class Model:
    """A model that a DeepSparse process has compiled, ready to be timed; it owns the process."""

    def __init__(self, process: Process, inner_loops: int) -> None:
        self.inner_loops = inner_loops
        self.facts: dict[str, Any] = {}
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def outputs(self) -> list[NDArray[Any]]:
        """Return the outputs of the model for its inputs."""
        with tempfile.TemporaryDirectory(prefix="latbench-deepsparse-") as folder:
            path = Path(folder) / "outputs.npz"
            self._process.ask("run", outputs=str(path))
            with np.load(path) as stored:
                return [stored[name] for name in stored.files]

    def burst(self, seconds: float) -> Burst:
        """Take samples for about `seconds`, at least one; judged preempted as `sampling.burst` does."""
        return _burst(self._process, seconds, self.inner_loops)


def load_model(model: Path, inputs: Sequence[NDArray[Any]], *, threads: int, environment: Environment) -> Model:
    """Compile the ONNX file `model` for these inputs, whose first length is the batch, and time it briefly.

    Raises EnvironmentUnusable where DeepSparse cannot run it.
    """
    process = Process(environment)
    try:
        with _stored(inputs) as path:
            process.ask("load", model=str(model), inputs=path, threads=threads)
        seconds = min(_burst(process, _TRIAL_SECONDS, 1).samples)
        if SHORTEST_SAMPLE_SECONDS <= seconds < 100 * SHORTEST_SAMPLE_SECONDS:  # which may be others' doing
            seconds = min(seconds, *_burst(process, _TRIAL_SECONDS, 1).samples)
        return Model(process, math.ceil(SHORTEST_SAMPLE_SECONDS / seconds))
    except BaseException:
        process.close()
        raise


def time_operations(
    model: Path,
    inputs: Sequence[NDArray[Any]],
    *,
    threads: int,
    environment: Environment,
    sparsity: float | None = None,
    calls: int = ANALYSED_CALLS,
) -> list[Operation]:
    """Return the mean seconds of each operation inside the running model, by DeepSparse's own clock.

    The means are over `calls` calls, after a quarter as many untimed ones. With `sparsity` every weight is treated as
    if it had that share of zeros. Raises EnvironmentUnusable where DeepSparse cannot run the model.
    """
    with Process(environment, _UNFUSED) as process, _stored(inputs) as path:
        found = process.ask(
            "analyse", model=str(model), inputs=path, threads=threads, sparsity=sparsity,
            calls=calls, warm_calls=calls // 4,
        )  # fmt: skip
    return [
        Operation(
            kernel=_NUMBERS.sub("", layer["name"]),
            outputs=tuple(layer["canonical_name"].split(",")),
            sparsity=layer["kernel_sparsity"],
            seconds=layer["average_run_time_in_ms"] / 1e3,
        )
        for layer in found["layer_info"]
    ]


def check_environment(environment: Environment) -> None:
    """Run one small sparse layer. Raises EnvironmentUnusable where that fails or returns a wrong result."""
    try:
        from latbench.backends.cpu.onnxruntime import build_one_node_model
    except ImportError as error:
        raise EnvironmentUnusable("DeepSparse runs ONNX models: `pip install latbench[onnx]` first") from error
    point = Point("cpu", DEEPSPARSE, "auto", LinearShape(32, 64, 8), Unstructured(), 0.75, threads=1)
    layer = build_synthetic_layer(point)
    with tempfile.TemporaryDirectory(prefix="latbench-deepsparse-") as folder:
        path = Path(folder) / "layer.onnx"
        path.write_bytes(build_one_node_model(point.shape, layer))
        with load_model(path, [layer.x], threads=1, environment=environment) as model:
            [y] = model.outputs()
    try:
        check(y, layer.packed, layer.x, bias=layer.bias, layout="token_major")
    except WrongResult as error:
        raise EnvironmentUnusable(f"DeepSparse computes something else than it should: {error}") from error


@contextlib.contextmanager
def _stored(arrays: Sequence[NDArray[Any]]) -> Iterator[str]:
    """Yield the path of a file that holds `arrays` while the context is open."""
    with tempfile.TemporaryDirectory(prefix="latbench-deepsparse-") as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, *arrays)
        yield str(path)


def _burst(process: Process, seconds: float, inner_loops: int) -> Burst:
    taken = process.ask("burst", seconds=seconds, loops=inner_loops)
    allowed = 1 + PREEMPTIONS_PER_SECOND * taken["cpu_seconds"]
    return Burst(taken["samples"], taken["switches"] > allowed)
