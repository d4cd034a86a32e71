"""How fast the solver is on published tables: median milliseconds of a solve, seconds of the whole frontier.

    python tests/benchmarks/solve.py ../shared/data/spdy_tables/*.txt [--target 2.0] [--repeat 21]

Every layer of the file is searched, with the published quadratic prior and all coefficients 1; the budget is
base / target - (base - prunable). Checks what it times: never over the budget, and the optimum is proven.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from latbench.interchange import read_spdy
from search import Infeasible, frontier, solve
from search.spdy import quadratic_prior


def main() -> None:
    """Print a line a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--target", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=21)
    options = parser.parse_args()
    frontier([[1.0, 2.0]], [[1.0, 0.0]])  # compiles, or reads what was compiled before
    print(f"{'table':<16}{'layers':>7}{'budget ms':>11}{'used ms':>10}{'error':>10}{'gap':>5}{'solve ms':>10}"
          f"{'points':>9}{'frontier s':>12}")  # fmt: skip
    for path in options.tables:
        table = read_spdy(path)
        timed = [points for points in table.layers.values() if points]
        seconds = [np.array([t for t, _ in points]) for points in timed]
        errors = [quadratic_prior([s for _, s in points]) for points in timed]
        budget = table.base / options.target - table.fixed
        start = time.perf_counter()
        found = frontier(seconds, errors)
        frontier_seconds = time.perf_counter() - start
        try:
            solution = solve(seconds, errors, budget)
        except Infeasible as error:
            print(f"{path.stem:<16}{len(seconds):>7}  {error}; frontier of {len(found.seconds)} points "
                  f"in {frontier_seconds:.2f} s")  # fmt: skip
            continue
        used = 0.0
        for layer, option in zip(seconds, solution.choice, strict=True):
            used += float(layer[option])
        assert used == solution.seconds <= budget
        times = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            solve(seconds, errors, budget)
            times.append(time.perf_counter() - start)
        print(f"{path.stem:<16}{len(seconds):>7}{1e3 * budget:>11.3f}{1e3 * used:>10.3f}{solution.error:>10.6f}"
              f"{solution.error - solution.bound:>5.0g}{1e3 * statistics.median(times):>10.1f}"
              f"{len(found.seconds):>9}{frontier_seconds:>12.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
