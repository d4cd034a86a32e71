"""The child's side of `latbench.runners.worker_process`: serves one parent over a socket, and ends with it.

    python -m latbench.runners.worker DESCRIPTOR PARENT_PID

A request is a pickled tuple (verb, ...), an answer ("ok", value) or ("error", kind, message, traceback). The socket
has a descriptor of its own, because libraries print to stdout and stderr. Their output goes to a log, which the
parent quotes if the worker dies.

A worker that is asked to renew itself forks. The first process then only holds the imported modules and waits. One
child after the other serves in its place. When the last child ends, so does the first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from latbench.base.own_packages import share_names
from latbench.timing.sampling import Timer, WallClock

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve requests until the parent closes the socket or is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    connection = Connection(descriptor)
    if _obey(connection):
        _begin_anew(connection)


def _obey(connection: Connection) -> bool:
    """Serve requests until the parent closes the socket (False) or asks for a new process (True)."""
    prepared: dict[int, Timer] = {}
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return False
        try:
            if request[0] == "renew":
                load_function(request[1])
                return True
            answer = pickle.dumps(("ok", _serve(request, prepared)))
        except BaseException as error:  # noqa: BLE001 - a task may raise anything, and the parent has to hear of it
            kind = "MemoryError" if _is_out_of_memory(error) else type(error).__name__
            answer = pickle.dumps(("error", kind, str(error), traceback.format_exc()))
        connection.send_bytes(answer)


def _begin_anew(connection: Connection) -> NoReturn:
    """Serve in one child after the other, as often as the parent asks for a new one; then end as the last did.

    Only the child holds the connection, so that the parent notices its end. For the next child the connection is
    handed back.
    """
    ours = os.getpid()
    while True:
        back, given = socket.socketpair()
        child = os.fork()
        if not child:
            _die_with(ours)
            connection.send_bytes(pickle.dumps(("ok", None)))
            if _obey(connection):
                socket.send_fds(given, [b"again"], [connection.fileno()])
            os._exit(0)
        connection.close()
        given.close()
        _, status = os.waitpid(child, 0)
        with back:
            back.setblocking(False)  # processes that the child started may keep its end open
            try:
                descriptors = socket.recv_fds(back, len(b"again"), 1)[1]
            except BlockingIOError:
                descriptors = []
        if not descriptors:
            break
        connection = Connection(descriptors[0])
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(ours, os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _serve(request: tuple[Any, ...], prepared: dict[int, Timer]) -> Any:
    match request:
        case ("call", function, args):
            return load_function(function)(*args)
        case ("prepare", key, function, args):
            run = load_function(function)(*args)
            # Work on a GPU brings its own timer, which uses CUDA events.
            timer = run if hasattr(run, "burst") else WallClock(run)
            prepared[key] = timer
            return timer.inner_loops, timer.facts
        case ("burst", key, seconds):
            return prepared[key].burst(seconds)
        case ("path", entries):
            sys.path[:] = entries  # the worker imports from the same places as the parent
            share_names()
            return None
        case ("drop", keys):
            for key in keys:
                prepared.pop(key, None)
            return None
    raise ValueError(f"a worker knows path, renew, call, prepare, burst and drop, not {request[0]!r}")


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "path/to/file.py:function" names."""
    module, _, attribute = name.rpartition(":")
    if module.endswith(".py"):
        path = Path(module).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return _function(loaded, attribute)
    return _function(importlib.import_module(module), attribute)


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module, name)
    return function


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: torch raises a RuntimeError for it."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process with its parent, and first when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):  # a container may forbid it; then the kernel chooses by size
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        sys.exit("the parent is gone")


if __name__ == "__main__":
    main()
