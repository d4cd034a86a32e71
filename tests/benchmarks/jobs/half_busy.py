"""A program that takes half a core on and off, as others on a shared machine do: what benchmarks run beside.

    python tests/benchmarks/jobs/half_busy.py [--share 0.5] [--on 2] [--off 2]     # until it is stopped

During `on` seconds it computes for `share` of every 40 ms, then it sleeps for `off` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_SECONDS = 0.04


@contextlib.contextmanager
def run_beside(wanted: bool) -> Iterator[None]:
    """Run the program while the context is open, if it is wanted."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, str(Path(__file__).resolve())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def disturb(share: float, on: float, off: float) -> None:
    """Compute and sleep in turns, until whoever started this has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        spell = time.monotonic() + on
        while time.monotonic() < spell:
            busy = time.monotonic() + share * PERIOD_SECONDS
            while time.monotonic() < busy:
                sum(range(1000))
            time.sleep((1 - share) * PERIOD_SECONDS)
        time.sleep(off)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("share", 0.5), ("on", 2.0), ("off", 2.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        disturb(given.share, given.on, given.off)
