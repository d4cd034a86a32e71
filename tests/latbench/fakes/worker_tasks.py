"""What the tests ask a worker to do: work, crash, hang, run out of memory, make noise."""

import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from latbench.backends.cpu.prepare_point import Rotation
from latbench.backends.installed_engines import Unsupported
from latbench.timing import sampling
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult


def add(a: int, b: int) -> int:
    return a + b


def environment(name: str) -> str | None:
    return os.environ.get(name)


def make_counter(start: int) -> Callable[[], int]:
    state = [start]

    def count() -> int:
        state[0] += 1
        return state[0]

    count.facts = {"start": start}  # type: ignore[attr-defined]
    return count


def crash() -> None:
    sys.stderr.write("something\nthe last words\n")
    sys.stderr.flush()
    os._exit(7)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def killed_for_memory() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_for_too_much() -> None:
    np.zeros(2**60, np.float32)


def end_well() -> None:
    os._exit(0)


def die_of_a_real_time_signal() -> None:
    os.kill(os.getpid(), 40)


def _connection() -> int:
    """The descriptor that the worker answers on: its first argument."""
    return int(sys.argv[1])


def write_garbage() -> None:
    os.write(_connection(), struct.pack("!i", 30) + b"this was meant for a text file")
    hang()


def announce_too_much() -> None:
    os.write(_connection(), struct.pack("!iQ", -1, 1 << 60))
    hang()


def announce_what_never_comes() -> None:
    os.write(_connection(), struct.pack("!i", 1000) + b"the begin")
    hang()


def die_within_an_answer() -> None:
    os.write(_connection(), struct.pack("!i", 1000) + b"the begin")
    os._exit(9)


def hang_up() -> None:
    os.close(_connection())
    hang()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    threading.Event().wait()


def shout() -> str:
    os.write(1, b"a banner on stdout " * 10_000)
    os.write(2, b"and on stderr")
    return "done"


def unpicklable() -> Callable[[], None]:
    return lambda: None


def start_grandchild() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "600"]).pid


# A backend whose misbehaviour is in the point: the seed says what goes wrong, in preparing or in running.

FINE, REFUSES, IS_WRONG, RAISES, CRASHES, HANGS, EATS_MEMORY, CRASHES_LATER, RAISES_LATER, SPIKES, SPIKES_ONCE = (
    range(11)
)


def prepare(point: Point) -> Rotation:
    # What else this machine is doing is none of these tests' business: a call of theirs only sleeps.
    sampling.find_disturbances = lambda before, after: ()
    match point.seed:
        case 1:
            raise Unsupported("not here")
        case 2:
            raise WrongResult("off by one")
        case 3:
            raise RuntimeError("boom")
        case 4:
            crash()
        case 5:
            hang()
        case 6:
            ask_for_too_much()
    calls = 0
    seconds = 0.0005
    if point.sparsity == 0.75 and (
        point.seed == SPIKES or (point.seed == SPIKES_ONCE and "SPIKED" not in os.environ)
    ):
        os.environ["SPIKED"] = "1"  # of this worker: the module is loaded anew for every point
        seconds = 0.01

    def run() -> None:
        nonlocal calls
        calls += 1
        if point.seed == CRASHES_LATER and calls > 5:
            crash()
        if point.seed == RAISES_LATER and calls > 5:
            raise RuntimeError("boom in the middle")
        time.sleep(seconds)

    facts = {"kernel_used": f"fake.{point.seed}", "nnz": 1, "sparsity_actual": 0.5, "flop_nnz": 2000, "bytes_min": 10,
             "kernel_families": ("row_panels",)}  # fmt: skip
    return Rotation([run], facts)
