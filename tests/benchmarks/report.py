"""`latbench report` of a long table: seconds, peak memory and size of the page.

    python tests/benchmarks/report.py --rows 100000

The table is made up (see scale.py): dense and three patterns at nine sparsities, each point measured once. The
command runs in a process of its own, as a user runs it, three times; what importing its libraries takes is said too.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCALE = Path(__file__).with_name("scale.py")
RUNS = 3
LIBRARIES = "import latbench.report.pages.html_page, latbench.report.report_inputs, plotly.offline"


def timed(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak resident MiB of a command."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runpy.run_path(str(SCALE))["generate"](folder / "table", 0, rows, rows)
        size = sum(part.stat().st_size for part in (folder / "table").iterdir())
        print(f"{rows} rows, {size / 1e6:.1f} MB of Parquet; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        output = folder / "report.html"
        command = [sys.executable, "-m", "latbench.cli.main", "report", str(folder / "table"), "-o", str(output)]
        for _ in range(RUNS):
            importing, _, _ = timed([sys.executable, "-c", LIBRARIES])
            seconds, cpu, memory = timed(command)
            print(
                f"{seconds:.2f} s ({importing:.2f} s of it libraries), {cpu:.2f} s of processors, {memory:.0f} MiB, "
                f"{output.stat().st_size / 1e6:.2f} MB of HTML"
            )


if __name__ == "__main__":
    main()
