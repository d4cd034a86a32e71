"""What the fault campaign runs in processes of its own: kernels that harm their worker, and sweeps hurt from inside.

python faulty.py ORDER runs `latbench sweep` as the command line does, on points that a JSON object orders, and notes
in a log which parts it has finished.
"""

import ctypes
import errno
import itertools
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from latbench.backends.cpu.prepare_point import Rotation
from latbench.backends.installed_engines import Unsupported
from latbench.base import files
from latbench.cli import main as cli
from latbench.machines.devices import name_cpu
from latbench.runners import worker_process
from latbench.sweeping import bench, settings, sweep, sweep_machine
from latbench.sweeping.settings import SweepSettings
from latbench.sweeping.sweep_machine import CpuMachine
from latbench.tables.schema import TIMED
from latbench.tables.writer import write_part
from latbench.timing.sampling import Burst, sample_burst
from latbench.workloads import points
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

CALL_SECONDS = 3e-4
FACTS = {"kernel_used": "fake", "flop_nnz": 2000, "bytes_min": 10, "kernel_families": ("row_panels",)}


# Kernels: what they do to the worker that they run in -------------------------------------------------------------


def hang() -> None:
    threading.Event().wait()


def spin() -> None:
    while True:
        pass


def exceed_the_memory_limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, limit[1]))
    try:
        np.ones(2**28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def write_to_the_connection(*content: bytes) -> None:
    os.write(int(sys.argv[1]), b"".join(content))
    hang()


def hang_up() -> None:
    os.close(int(sys.argv[1]))
    hang()


def leave_a_child() -> None:
    """It holds the connection open, so that its parent's end does not show there."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(1)


def say_much_and_die() -> None:
    sys.stderr.write("a progress bar\r" * 10**6 + "\nthe last words\n")
    sys.stderr.flush()
    os._exit(7)


def fail(error: BaseException) -> None:
    raise error


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


HARMS: dict[str, tuple[Callable[[], Any], str, str]] = {
    # what it does, the status of its point, a word of the reason
    "segfault": (lambda: ctypes.string_at(0), "error", "SIGSEGV"),
    "illegal instruction": (kill(signal.SIGILL), "error", "SIGILL"),
    "bus error": (kill(signal.SIGBUS), "error", "SIGBUS"),
    "abort": (os.abort, "error", "SIGABRT"),
    "exit 0": (lambda: os._exit(0), "error", "exit code 0"),
    "much output, then death": (say_much_and_die, "error", "the last words"),
    "sys.exit": (lambda: sys.exit("enough"), "error", "enough"),
    "exception": (lambda: fail(RuntimeError("boom")), "error", "boom"),
    "refusal": (lambda: fail(Unsupported("not here")), "unsupported", "not here"),
    "wrong result": (lambda: fail(WrongResult("off by one")), "incorrect", "off by one"),
    "memory limit": (exceed_the_memory_limit, "oom", "allocate"),
    "out-of-memory killer": (kill(signal.SIGKILL), "oom", "memory ran out"),
    "hang": (hang, "timeout", "no answer"),
    "endless loop": (spin, "timeout", "no answer"),
    "stopped": (kill(signal.SIGSTOP), "timeout", "no answer"),
    "death with a child": (leave_a_child, "timeout", "no answer"),
    "garbage on the connection": (
        lambda: write_to_the_connection(struct.pack("!i", 9), b"garbage!!"), "error", "an invalid answer",
    ),
    "half a message": (
        lambda: write_to_the_connection(struct.pack("!i", 9), b"half"), "error", "closed its connection",
    ),
    "a message too long": (
        lambda: write_to_the_connection(struct.pack("!iQ", -1, 2**60)), "error", "closed its connection",
    ),
    "connection closed": (hang_up, "error", "closed its connection"),
}  # fmt: skip
CLOCKS = {"clock goes backwards": -0.5, "clock leaps ahead": 3600.0}
KERNELS = [*HARMS, *CLOCKS]
FINE = 0


def seed(kernel: str, later: bool) -> int:
    """What makes a point's kernel misbehave, when it is prepared or `later`, when it is timed."""
    return 1 + 2 * KERNELS.index(kernel) + later


def expected(kernel: str) -> tuple[set[str], str]:
    """The statuses that its point may have, and a word of the reason."""
    if kernel in HARMS:
        return {HARMS[kernel][1]}, HARMS[kernel][2]
    return ({"impossible"}, "clock went backwards") if CLOCKS[kernel] < 0 else (set(TIMED), "")


class OnABadClock:
    """Timed by a clock that jumps in the first sample, which is the second call."""

    inner_loops = 1
    facts = FACTS

    def __init__(self, jump: float) -> None:
        self._jump, self._calls = jump, 0

    def _clock(self) -> float:
        return time.perf_counter() + (self._jump if self._calls > 1 else 0.0)

    def _run(self) -> None:
        time.sleep(CALL_SECONDS)
        self._calls += 1

    def burst(self, seconds: float) -> Burst:
        return sample_burst(self._run, seconds, 1, clock=self._clock)


def prepare(point: Point) -> Any:
    """What a worker is asked to do with a point."""
    if point.seed == FINE:
        return Rotation([lambda: time.sleep(CALL_SECONDS)], FACTS)
    kind, later = divmod(point.seed - 1, 2)
    if (kernel := KERNELS[kind]) in CLOCKS:
        return OnABadClock(CLOCKS[kernel])
    harm = HARMS[kernel][0]
    if not later:
        harm()
    calls = itertools.count()

    def run() -> None:
        if next(calls) > 5:
            harm()
        time.sleep(CALL_SECONDS)

    return Rotation([run], FACTS)


# Sweeps: what happens to the process that drives one --------------------------------------------------------------


def at_write(number: int, then: Callable[[Path, bytes], None]) -> None:
    """Something happens when the so many-th file is to be written."""
    numbers, write = itertools.count(), files._write_bytes

    def written(path: Path, content: bytes) -> None:
        if next(numbers) == number:
            then(path, bytes(content))
        write(path, content)

    files._write_bytes = written


def die_with_half(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_all(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.kill(os.getpid(), signal.SIGKILL)


def die_once_renamed(path: Path, content: bytes) -> None:
    files._sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)


def allow_half(path: Path, content: bytes) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, limit[1]))


def fill_the_disk(path: Path, content: bytes) -> None:
    """Until the small file system that the table lies on has room for half the file."""
    with (path.parent.parent / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        filler.truncate(filler.tell() // 4096 * 4096 - len(content) // 2)


HURTS: dict[str, Callable[[Path, bytes], None]] = {
    "killed within a file": die_with_half,
    "killed before a rename": die_with_all,
    "killed after a rename": die_once_renamed,
    "file size limit": allow_half,
    "file system full": fill_the_disk,
    "interrupted within a file": lambda path, content: os.kill(os.getpid(), signal.SIGINT),
    "terminated within a file": lambda path, content: os.kill(os.getpid(), signal.SIGTERM),
    "stopped within a file": lambda path, content: os.kill(os.getpid(), signal.SIGSTOP),
}


def moments(jumps: list[float]) -> Iterator[datetime]:
    """What a clock says that jumps by so many hours, again and again."""
    for hours in itertools.cycle(jumps):
        yield datetime.now(UTC) + timedelta(hours=hours)


def point(m: int, sparsity: float, seed: int) -> Point:
    """One of the campaign's points: a layer of m rows."""
    return Point(name_cpu(), "numba", "auto", LinearShape(m, 8, 4), VectorWise(8), sparsity, 1, seed=seed)


def main() -> None:
    """Sweep as ordered: folder, log, points; hurt and at, jumps, seconds, wait."""
    order = json.loads(sys.argv[1])
    wanted = [point(*which) for which in order["points"]]
    settings.CPU_SETTINGS = SweepSettings(
        rel_error=0.3, max_seconds=0.01, round_seconds=0.001, block_points=1, noisy_chances=1
    )
    sweep_machine.PREPARE = f"{__file__}:prepare"
    bench.MOST_DEATHS = 10**6  # every fault is injected, whatever came before
    CpuMachine.pace = lambda machine, seconds_left: None  # finding the ceilings takes seconds
    if seconds := order.get("seconds"):
        sweep_machine.PREPARE_SECONDS, CpuMachine.burst_seconds = seconds
        worker_process.START_SECONDS = sweep_machine.PREPARE_SECONDS
        worker_process.MESSAGE_SECONDS = worker_process.END_SECONDS = 2.0
    points.select_points = lambda *_, **__: wanted
    if hurt := order.get("hurt"):
        at_write(order["at"], HURTS[hurt])
    if jumps := order.get("jumps"):
        said = moments(jumps)
        bench.datetime = SimpleNamespace(now=lambda zone: next(said))
    write = write_part

    def noted(*arguments: Any) -> Any:
        part = write(*arguments)
        with Path(order["log"]).open("a") as log:
            log.write(f"{part.name}\n")
        return part

    sweep.write_part = noted
    sys.argv = ["latbench", "sweep", "--cpu", "--backends", "numba", "-o", order["folder"]]
    sys.argv += ["--wait", order.get("wait", "1m")]
    cli.main()


if __name__ == "__main__":
    main()
