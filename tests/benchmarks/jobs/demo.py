"""How long `make demo` takes, and whether it keeps its promise: in one checkout, or in several in turns.

    python tests/benchmarks/jobs/demo.py [CHECKOUT ...] [--runs 3] [--neighbour]

Each run starts without results of earlier ones; the environment and the trained network are made before. A line for
each run: seconds until the first line of output, seconds in all, target, measured speedup, accuracies. `--neighbour`
runs `half_busy.py` beside it. The last lines compare the median seconds of the checkouts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path

from half_busy import run_beside

LAST_LINES = 4
"""Of the output of a demo that failed."""


def run_demo(checkout: Path) -> tuple[float, float, int]:
    """Return the seconds until the first line, the seconds in all, and the exit code; print how a failure ended."""
    shutil.rmtree(checkout / "build/demo", ignore_errors=True)
    began = time.monotonic()
    with subprocess.Popen(
        ["make", "-s", "demo"], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.monotonic() - began
        last = deque(process.stdout, maxlen=LAST_LINES)
    if process.returncode:
        print("".join(last), end="")
    return first, time.monotonic() - began, process.returncode


def describe(checkout: Path) -> str:
    """Return what the last run promised and measured."""
    try:
        summary = json.loads((checkout / "build/demo/summary.json").read_text())
    except FileNotFoundError:
        return "no summary"
    target, measured = summary["target"], summary["measured_speedup"]
    drop = 100 * (summary["score_dense"] - summary["score_pruned"])
    return f"{target:g}x promised, {measured:.2f}x measured ({measured / target - 1:+.0%}), {drop:.2f} points lost"


def main() -> None:
    """Run the demos in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[Path()])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--neighbour", action="store_true")
    given = parser.parse_args()
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in given.checkouts}
    with run_beside(given.neighbour):
        for _ in range(given.runs):
            for checkout in given.checkouts:
                first, whole, code = run_demo(checkout)
                seconds[checkout].append(whole)
                print(f"{checkout}: {first:.1f} s, {whole:.0f} s, exit {code}; {describe(checkout)}", flush=True)
    baseline = statistics.median(seconds[given.checkouts[0]])
    for checkout, own in seconds.items():
        middle = statistics.median(own)
        print(f"{checkout}: median {middle:.0f} s ({min(own):.0f}-{max(own):.0f}), ratio {middle / baseline:.2f}")


if __name__ == "__main__":
    main()
