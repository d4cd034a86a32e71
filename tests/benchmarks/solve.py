"""How the solver fares on published tables, against a bucket DP and a MILP solver, and how it scales.

    python tests/benchmarks/solve.py [TABLE ...] [--targets 1.25,1.5,2,3,4] [--vectors 20] [--against bucket,milp]
    python tests/benchmarks/solve.py --scale

Without a table, all of $LATBENCH_DATA/spdy_tables. Every layer of a file is searched; the budget is
base / target - (base - prunable); errors are coefficient x the published quadratic prior, the coefficients random,
U(0, 1). `solve` and the bucket DP take turns on the same problem; a time is the least of three. Counted: answers that
are not proven optimal, sums in layer order over the budget, and what MILP says of as many problems as
`--milp-seconds` allow (one vector of every table and target first, then the next).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import optimize, sparse

from latbench.importers.text_formats import read_spdy
from search import Infeasible, Solution, frontier, solve
from search.problem.priors import build_quadratic_prior

DATA = Path(os.environ.get("LATBENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))

Arrays = list[np.ndarray]
Problem = tuple[Arrays, Arrays, float]


def bucket_dp(seconds: Arrays, errors: Arrays, budget: float, buckets: int = 10_000) -> tuple[int, ...]:
    """The published DP: seconds rounded to the nearest bucket, one vector operation an option; the profile."""
    width = budget / buckets
    least = np.full(buckets + 1, np.inf)
    least[0] = 0.0
    taken = []
    for layer_seconds, layer_errors in zip(seconds, errors, strict=True):
        best, option = np.full(buckets + 1, np.inf), np.zeros(buckets + 1, np.int16)
        for j, (used, error) in enumerate(zip(np.rint(layer_seconds / width).astype(int), layer_errors, strict=True)):
            if used <= buckets:
                sums = least[: buckets + 1 - used] + error
                better = sums < best[used:]
                np.copyto(best[used:], sums, where=better)
                np.copyto(option[used:], j, where=better, casting="unsafe")
        least = best
        taken.append(option)
    place = int(np.argmin(least))
    choice = []
    for layer_seconds, option in zip(reversed(seconds), reversed(taken), strict=True):
        choice.append(int(option[place]))
        place -= int(np.rint(layer_seconds[choice[-1]] / width))
    return tuple(reversed(choice))


def milp(seconds: Arrays, errors: Arrays, budget: float, time_limit: float) -> float | None:
    """The error of HiGHS's optimum, summed in layer order; None where its time ran out first."""
    sizes = [len(t) for t in seconds]
    # Its tolerances are absolute, 1e-6: seconds in nanoseconds and errors in millionths put them out of the way.
    result = optimize.milp(
        1e6 * np.concatenate(errors),
        integrality=np.ones(sum(sizes)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(sparse.block_diag([np.ones((1, n)) for n in sizes], format="csr"), 1, 1),
            optimize.LinearConstraint(1e9 * np.concatenate(seconds)[None, :], -np.inf, 1e9 * budget),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": time_limit},
    )
    if result.status != 0:
        return None
    picked = [int(np.argmax(x)) for x in np.split(result.x, np.cumsum(sizes)[:-1])]
    return total(errors, tuple(picked)) if total(seconds, tuple(picked)) <= budget * (1 + 1e-9) else None


def total(values: Arrays, choice: tuple[int, ...]) -> float:
    """Plain float addition in layer order."""
    result = 0.0
    for layer, option in zip(values, choice, strict=True):
        result += float(layer[option])
    return result


def take_turns(solvers: list[Callable[..., object]], problem: Problem, repeat: int = 3) -> list[float]:
    """Each solver's least seconds."""
    times = np.full(len(solvers), np.inf)
    for _ in range(repeat):
        for i, solver in enumerate(solvers):
            start = time.perf_counter()
            solver(*problem)
            times[i] = min(times[i], time.perf_counter() - start)
    return [float(t) for t in times]


@dataclass
class Tally:
    """What was seen on some problems."""

    solve_seconds: list[float] = field(default_factory=list)
    bucket_seconds: list[float] = field(default_factory=list)
    unproven: int = 0
    overruns: int = 0
    bucket_overruns: int = 0

    def add(self, other: Tally) -> None:
        """Count the other's too."""
        self.solve_seconds += other.solve_seconds
        self.bucket_seconds += other.bucket_seconds
        self.unproven += other.unproven
        self.overruns += other.overruns
        self.bucket_overruns += other.bucket_overruns

    def line(self) -> str:
        """Solves, median and worst milliseconds, ratios to the bucket DP, what must be zero."""
        ms = 1e3 * np.array(self.solve_seconds)
        text = f"{len(ms):>7}{np.median(ms):>9.2f}{ms.max():>9.2f}"
        if self.bucket_seconds:
            ratio = np.array(self.solve_seconds) / np.array(self.bucket_seconds)
            text += (
                f"{1e3 * statistics.median(self.bucket_seconds):>11.2f}{np.median(ratio):>9.3f}{ratio.max():>9.3f}"
            )
        else:
            text += f"{'-':>11}{'-':>9}{'-':>9}"
        return text + f"{self.unproven:>10}{self.overruns:>10}{self.bucket_overruns:>12}"


def published(
    tables: list[Path], targets: list[float], vectors: int, against: list[str], milp_seconds: float
) -> None:
    """A line a table and target, and one over all."""
    print(f"{'table':<16}{'target':>7}{'solves':>7}{'med ms':>9}{'max ms':>9}{'bucket ms':>11}{'med /':>9}"
          f"{'worst /':>9}{'unproven':>10}{'overruns':>10}{'of buckets':>12}")  # fmt: skip
    over_all = Tally()
    solved: list[list[tuple[Problem, Solution]]] = [[] for _ in range(vectors)]
    for path in tables:
        rng = np.random.default_rng(0)
        table = read_spdy(path)
        timed = [points for points in table.layers.values() if points]
        seconds = [np.array([t for t, _ in points]) for points in timed]
        prior = [np.asarray(build_quadratic_prior([s for _, s in points])) for points in timed]
        of_table = Tally()
        for target in targets:
            budget = table.base / target - table.fixed
            tally = Tally()
            try:
                for vector in range(vectors):
                    errors = [c * layer for c, layer in zip(rng.random(len(prior)), prior, strict=True)]
                    solution = solve(seconds, errors, budget)
                    used = total(seconds, solution.choice)
                    tally.unproven += solution.bound != solution.error
                    tally.overruns += used > budget or used != solution.seconds
                    times = take_turns(
                        [solve, bucket_dp] if "bucket" in against else [solve], (seconds, errors, budget)
                    )
                    tally.solve_seconds.append(times[0])
                    if "bucket" in against:
                        tally.bucket_seconds.append(times[1])
                        tally.bucket_overruns += total(seconds, bucket_dp(seconds, errors, budget)) > budget
                    solved[vector].append(((seconds, errors, budget), solution))
            except Infeasible as error:
                print(f"{path.stem:<16}{target:>7g}  {error}")
                continue
            print(f"{path.stem:<16}{target:>7g}{tally.line()}", flush=True)
            of_table.add(tally)
        print(f"{path.stem:<16}{'all':>7}{of_table.line()}", flush=True)
        over_all.add(of_table)
    print(f"{'all':<16}{'all':>7}{over_all.line()}")
    if "milp" in against:
        agree_with_milp([problem for of_vector in solved for problem in of_vector], milp_seconds)


def agree_with_milp(problems: list[tuple[Problem, Solution]], milp_seconds: float) -> None:
    """Count where MILP comes to the same error, as far as its time goes."""
    start = time.perf_counter()
    asked, agreed, unfinished = 0, 0, 0
    for problem, solution in problems:
        left = milp_seconds - (time.perf_counter() - start)
        if left <= 0:
            break
        asked += 1
        found = milp(*problem, min(left, 20.0))
        if found is None:
            unfinished += 1
        elif abs(found - solution.error) <= 1e-9 * max(abs(solution.error), 1e-3):
            agreed += 1
        else:
            print(f"  MILP {found!r}, solve {solution.error!r}")
    print(f"MILP: {asked} of {len(problems)} problems asked in {time.perf_counter() - start:.0f} s: "
          f"{agreed} agree, {unfinished} not finished by MILP, {asked - agreed - unfinished} differ")  # fmt: skip


def convex_problem(rng: np.random.Generator, layers: int, options: int) -> tuple[Arrays, Arrays]:
    """Random layers: the faster, the worse, quadratically; sizes and sensitivities differ by layer."""
    seconds = [np.sort(rng.random(options))[::-1] * rng.random() for _ in range(layers)]
    return seconds, [np.linspace(0, 1, options) ** 2 * rng.random() for _ in range(layers)]


def scale(vectors: int) -> None:
    """Seconds of a solve of many layers, median and worst over vectors and three budgets; of a whole frontier."""
    rng = np.random.default_rng(0)
    print(f"{'layers':>7}{'options':>9}{'solves':>8}{'med s':>9}{'max s':>9}{'unproven':>10}")
    for layers, count in ((52, 120), (600, 100), (1000, 100), (1000, 200)):
        times, unproven = [], 0
        for _ in range(vectors):
            seconds, errors = convex_problem(rng, layers, count)
            low, high = sum(t.min() for t in seconds), sum(t.max() for t in seconds)
            for share in (0.2, 0.4, 0.6):
                budget = low + share * (high - low)
                start = time.perf_counter()
                solution = solve(seconds, errors, budget)
                times.append(time.perf_counter() - start)
                assert total(seconds, solution.choice) <= budget
                unproven += solution.bound != solution.error
        print(f"{layers:>7}{count:>9}{len(times):>8}{statistics.median(times):>9.4f}{max(times):>9.4f}{unproven:>10}",
              flush=True)  # fmt: skip
    for name, digits in (("seconds in whole microseconds, of 0.1 s", 6), ("seconds as they come", 17)):
        seconds, errors = convex_problem(rng, 100, 100)
        seconds = [np.round(0.002 * t, digits) for t in seconds]
        start = time.perf_counter()
        found = frontier(seconds, errors)
        print(f"frontier, 100 layers x 100 options, {name}: {len(found.seconds):,} points "
              f"in {time.perf_counter() - start:.2f} s", flush=True)  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--targets", type=lambda text: [float(t) for t in text.split(",")], default="1.25,1.5,2,3,4")
    parser.add_argument("--vectors", type=int, default=20)
    parser.add_argument("--against", type=lambda text: text.split(","), default="bucket,milp")
    parser.add_argument("--milp-seconds", type=float, default=60.0)
    parser.add_argument("--scale", action="store_true", help="many layers and a large frontier instead of the tables")
    options = parser.parse_args()
    frontier([[1.0, 2.0]], [[1.0, 0.0]])  # compiles, or reads what was compiled before
    solve([[1.0, 2.0]], [[1.0, 0.0]], 1.0)
    if options.scale:
        scale(options.vectors)
        return
    tables = options.tables or sorted((DATA / "spdy_tables").glob("*.txt"))
    published(tables, options.targets, options.vectors, options.against, options.milp_seconds)


if __name__ == "__main__":
    main()
