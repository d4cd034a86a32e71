"""An exported model under load: threads of one process and forked workers call it at once, and every result counts.

    python tests/benchmarks/jobs/exported_load.py DEPLOY [--seconds 60] [--callers 8] [--workers 4] [--threads 1]

The workers are forked while the threads call. Inputs and results are those that `latbench export` kept. Prints the
calls of both kinds. Exits 1 if a result was wrong, or if a caller did not come back.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import latbench as lb
from search.export.expected_results import ExpectedResults, read_expected

PATIENCE_SECONDS = 60.0
"""How long a caller may take to come back after the end: a forked worker may compile its model first."""


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deploy", type=Path, help="folder from latbench export")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--callers", type=int, default=8, help="threads of one process")
    parser.add_argument("--workers", type=int, default=4, help="forked processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of a call")
    given = parser.parse_args()
    torch.set_num_threads(1)  # what compares results: its threads are not copied by a fork
    model, expected = lb.load(given.deploy, threads=given.threads), read_expected(given.deploy)
    end = time.monotonic() + given.seconds
    counts: list[int] = []
    callers = [
        threading.Thread(target=lambda: counts.append(call_until(end, model, expected)), daemon=True)
        for _ in range(given.callers)
    ]
    for caller in callers:
        caller.start()
    time.sleep(min(1.0, given.seconds / 4))
    workers = [fork_caller(end, model, expected) for _ in range(given.workers)]
    for caller in callers:
        caller.join(max(end - time.monotonic(), 0.0) + PATIENCE_SECONDS)
    lost = sum(caller.is_alive() for caller in callers)
    found = [wait_for(child, pipe, end) for child, pipe in workers]
    lost += found.count(None)
    wrong = counts.count(-1) + found.count(-1)
    served = [each for each in found if each is not None]
    print(f"{sum(counts)} calls by {len(callers)} threads, {sum(served)} by {len(workers)} forked workers")
    print(f"{wrong} callers saw a wrong result, {lost} did not come back")
    sys.exit(1 if wrong or lost else 0)


def call_until(end: float, model: Callable[..., Any], expected: ExpectedResults) -> int:
    """Call the model until `end`; return how often, or -1 at a wrong result."""
    arrays, calls = [each.numpy() for each in expected.inputs], 0
    while time.monotonic() < end:
        results = model(*arrays)
        if not expected.compare(list(results) if isinstance(results, tuple) else [results])[0]:
            return -1
        calls += 1
    return calls


def fork_caller(end: float, model: Callable[..., Any], expected: ExpectedResults) -> tuple[int, int]:
    """Fork a process that calls the model; return its number, and a pipe from which to read its calls."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(call_until(end, model, expected)).encode())
        os._exit(0)
    os.close(writing)
    return child, reading


def wait_for(child: int, pipe: int, end: float) -> int | None:
    """Return the calls of a forked process; None, after killing it, if it does not come back."""
    while time.monotonic() < end + PATIENCE_SECONDS:
        if os.waitpid(child, os.WNOHANG)[0]:
            return int(os.read(pipe, 100) or b"-1")
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return None


if __name__ == "__main__":
    main()
