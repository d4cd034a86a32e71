"""A worker process on this machine: one engine each, with thread settings of its own, isolated from crashes.

    with Worker(threads=2, name="torch") as worker:
        layer = worker.prepare("latbench.backends.cpu.prepare_point:prepare_point", point)
        samples = worker.sample(layer, 0.05)                         # seconds a call

Each engine is timed in a process of its own, because spinning threads of one slow the next. A worker that crashes,
hangs or is killed for memory raises `WorkerDied`. The next request starts a new process, in which everything must be
prepared again. Workers need Linux, and end with their parent, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Self

from latbench.errors import LatbenchError
from latbench.machines.processors import THREAD_VARIABLES
from latbench.timing.sampling import Burst

START_SECONDS = 120.0
CALL_SECONDS = 600.0
LEAST_SECONDS = 1.0  # minimum time limit of a request, even if the caller's time is over
MESSAGE_SECONDS = 60.0  # longest gap within a message
MOST_ANSWERED_BYTES = 1 << 30
END_SECONDS = 5.0  # wait for the end of a process
_SIGNALS = {number.value: number.name for number in signal.Signals}
_QUOTED_BYTES = 1 << 16  # end of a worker's log that is searched for a message


class WorkerDied(LatbenchError):
    """A process that is gone. `reason` is crash, timeout, oom, or late (the caller's own time is over)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TaskFailed(LatbenchError):
    """An exception in a worker that lives on. `kind` is its class name, `details` its traceback.

    The kind is MemoryError whenever an engine runs out of memory.
    """

    def __init__(self, kind: str, message: str, details: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.details = kind, message, details


@dataclass(frozen=True)
class PreparedTask:
    """A callable that waits in a worker. `facts` is its attribute of that name."""

    key: int
    generation: int
    inner_loops: int
    facts: dict[str, Any]


class Worker:
    """One process for one engine; it starts with the first request.

    Parameters
    ----------
    threads
        Threads that OpenMP, MKL, OpenBLAS and Numba may start in it.
    name
        Its name in messages.
    environment
        Additional environment variables.

    Attributes
    ----------
    seconds_left
        Returns the seconds that the caller still has, which bound every request; None: no limit.
    """

    _generations = itertools.count(1)
    _keys = itertools.count(1)

    def __init__(self, *, threads: int, name: str = "worker", environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.threads = threads
        self.generation = 0  # number of the present process; 0 while there is none
        self.seconds_left: Callable[[], float | None] = lambda: None
        self._environment = environment or {}
        self._forks = False  # whether the process only forks, and its child serves
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def renew(self, function: str, timeout: float = START_SECONDS) -> None:
        """Continue in a new process, which holds nothing but the imported module of "module:function".

        The module is imported once, and each new process is a fork from then. torch alone takes two seconds to
        import, which adds up with more workers than cores. Raises as `call` does.
        """
        if not self._forks:  # its work may have left threads, which a fork would lack
            self.close()
        self._request(("renew", function), timeout)
        self._forks = True
        self.generation = next(self._generations)

    def call(self, function: str, *args: Any, timeout: float = CALL_SECONDS) -> Any:
        """Return the result of "module:function" called in the worker. Arguments and result are pickled.

        Raises TaskFailed if it raises, WorkerDied if the process crashes or gives no answer within `timeout` seconds,
        or within `seconds_left`.
        """
        return self._request(("call", function, args), timeout)

    def prepare(self, function: str, *args: Any, timeout: float = CALL_SECONDS) -> PreparedTask:
        """Call "module:function", which returns a callable without arguments or a Timer, and keep that in the worker.

        Raises as `call` does.
        """
        key = next(self._keys)
        inner_loops, facts = self._request(("prepare", key, function, args), timeout)
        return PreparedTask(key, self.generation, inner_loops, facts)

    def holds(self, prepared: PreparedTask) -> bool:
        """Return whether `prepared` still waits in this worker; false once the process died."""
        return prepared.generation == self.generation

    def burst(self, prepared: PreparedTask, seconds: float, timeout: float = CALL_SECONDS) -> Burst:
        """Sample `prepared` for about `seconds`. Raises as `call` does."""
        if not self.holds(prepared):
            raise WorkerDied("crash", f"the {self.name} worker that had this prepared is gone")
        sampled: Burst = self._request(("burst", prepared.key, seconds), timeout)
        return sampled

    def sample(self, prepared: PreparedTask, seconds: float, timeout: float = CALL_SECONDS) -> list[float]:
        """Return the samples of a burst in seconds a call, disturbed or not."""
        return self.burst(prepared, seconds, timeout).samples

    def drop(self, prepared: Iterable[PreparedTask], timeout: float = CALL_SECONDS) -> None:
        """Free these tasks in the worker. Raises as `call` does."""
        keys = [item.key for item in prepared if self.holds(item)]
        if keys:
            self._request(("drop", keys), timeout)

    def kill(self) -> None:
        """Kill the process and return at once. Another thread may call this; its request then raises WorkerDied."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and free its resources."""
        if self._process is not None:
            self.kill()
            # A process that hangs inside a driver cannot even be killed, so the wait is limited.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._log is not None:
            self._log.close()
            self._log = None
        self.generation, self._forks = 0, False

    def _request(self, request: tuple[Any, ...], timeout: float) -> Any:
        if self._process is None:
            self._start()
        assert self._connection is not None
        left = self.seconds_left()
        patience = timeout if left is None else min(timeout, max(left, LEAST_SECONDS))
        try:
            self._connection.send_bytes(pickle.dumps(request))
            if not self._connection.poll(patience):
                self.close()
                reason = "timeout" if patience == timeout else "late"
                raise WorkerDied(reason, f"the {self.name} worker gave no answer for {patience:.3g} s")
            answer = self._connection.recv_bytes(MOST_ANSWERED_BYTES)
        except (EOFError, OSError) as error:
            raise self._obituary(error) from error
        except KeyboardInterrupt:
            # The answer may still arrive, and must not be taken for that of a later request.
            self.close()
            raise
        match _read(answer):
            case ("ok", value):
                return value
            case ("error", str(kind), str(message), str(details)):
                raise TaskFailed(kind, message, details)
        self.close()
        raise WorkerDied("crash", f"the {self.name} worker gave an invalid answer: {answer[:20]!r}")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # A worker may stop within a message, or write nonsense; reading must not wait for the rest.
        patience = struct.pack("ll", int(MESSAGE_SECONDS), int(MESSAGE_SECONDS % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, patience)
        self._log = tempfile.TemporaryFile(prefix="latbench-worker-")  # noqa: SIM115 - closed by close()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "latbench.runners.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **build_thread_variables(self.threads), **self._environment},
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self._connection = Connection(ours.detach())
        self.generation = next(self._generations)
        self._request(("path", sys.path), START_SECONDS)

    def _obituary(self, error: Exception) -> WorkerDied:
        assert self._process is not None and self._log is not None
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.close()
            return WorkerDied("crash", f"the {self.name} worker closed its connection but still runs ({error})")
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _QUOTED_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.close()
        if code == -signal.SIGKILL:
            return WorkerDied("oom", f"the {self.name} worker was killed, most likely because memory ran out")
        how = f"by signal {_SIGNALS.get(-code, -code)}" if code < 0 else f"with exit code {code}"
        return WorkerDied("crash", f"the {self.name} worker ended {how}" + (f": {last}" if last else ""))


def _read(answer: bytes) -> object:
    """Return a worker's answer; None where it is no pickle, because a library wrote to the connection."""
    try:
        return pickle.loads(answer)
    except Exception:  # noqa: BLE001 - bytes that are no pickle raise anything
        return None


def build_thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that give every engine `threads` threads.

    By default GNU OpenMP's threads spin for milliseconds before they sleep. On a core that another process wants,
    that costs whole scheduler slices: a 1 ms layer took 16 ms beside one busy process. Without spinning, waking up
    costs up to 0.3 ms a call. Brief spinning is as fast as the default on a quiet machine and robust on a busy one.
    OpenBLAS's threads spin for 2**26 cycles, 20 ms in which another engine is timed; 2**4 is the least value.
    """
    brief = {"GOMP_SPINCOUNT": "10000", "OPENBLAS_THREAD_TIMEOUT": "4"}
    return {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **brief}
