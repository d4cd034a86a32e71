"""How well times repeat: the same sweep several times, beside torch.utils.benchmark at equal measuring time a point.

    python tests/benchmarks/noise.py repeat [--points 30] [--runs 5] [--threads 2]
    python tests/benchmarks/noise.py same [--points 10] [--runs 20]       the same table measured twice and compared
    python tests/benchmarks/noise.py slower [--runs 20]                   one kernel made 5% slower, and compared

`repeat` takes turns: a sweep, then torch's blocked_autorange of the same points for as long as the sweep took each,
in processes started anew with the same thread settings; neither knows of the other. Printed is the median over points
of the spread between runs of the time reported: the standard deviation, and largest less smallest, over the mean.

`same` and `slower` judge by latbench.compare_samples.verdict. 5% are added by a twentieth of the same work done again
(every twentieth call is made twice), not by waiting, which no kernel does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latbench import backends, devices, plan, sweep, tables, workloads
from latbench.compare_samples import verdict
from latbench.plan import Point
from latbench.runners.local import Worker

HERE = str(Path(__file__).resolve())
WORK = (
    ("torch", "prepacked", "dense", 0.0),
    ("numba", "auto", "dense", 0.0),
    ("numba", "auto", "vector:32", 0.75),
    ("numba", "auto", "shflbw:32", 0.9),
    ("numba", "auto", "unstructured", 0.9),
    ("torch", "linear", "dense", 0.0),
)


def chosen(count: int, threads: int) -> list[Point]:
    """`count` points of five layers of BERT and Transformer."""
    shapes = list(dict.fromkeys(layer.shape for layer in workloads.load("cpu_kernels").layers))
    device = devices.cpu_device()
    points = [
        Point(device, backend, kernel, shape, plan.parse_patterns([pattern])[0], sparsity, threads)
        for backend, kernel, pattern, sparsity in WORK
        for shape in shapes
    ]
    return points[:count]


# In the workers -----------------------------------------------------------------------------------------------------


def plain(point: Point, seconds: float) -> float:
    """The median seconds of a call, as torch.utils.benchmark finds it in about `seconds`."""
    from torch.utils.benchmark import Timer

    run = backends.prepare(point)
    timer = Timer("run()", globals={"run": run}, num_threads=point.threads)
    return float(timer.blocked_autorange(min_run_time=seconds).median)


SLOWED = 1  # the seed of a point whose calls take 5% longer


def prepare(point: Point) -> backends.Rotation:
    """As latbench.backends does; with the seed SLOWED every twentieth call does its work twice."""
    ready = backends.prepare(replace(point, seed=0))
    if point.seed != SLOWED:
        return ready
    calls = 0

    def slower() -> None:
        nonlocal calls
        calls += 1
        ready()
        if calls % 20 == 0:
            ready()

    return backends.Rotation([slower], ready.facts)


# The comparisons ----------------------------------------------------------------------------------------------------


def measured(points: Sequence[Point], threads: int, settings: sweep.Settings, seed: int) -> pd.DataFrame:
    """One sweep of `points`, a row each, by point_id."""
    with tempfile.TemporaryDirectory() as folder:
        machine = sweep.Cpu(threads)
        sweep.run(Path(folder), lambda table: points, machine=machine, settings=settings, seed=seed)
        return tables.timed(tables.read(Path(folder))).set_index("point_id")


def spent(row: Any) -> float:
    """The seconds that a row's samples took, those that do not count among them."""
    return float((row["sample_count"] + row.get("discarded_samples", 0)) * row["inner_loops"] * row["mean_seconds"])


def repeat(points: Sequence[Point], runs: int, threads: int, settings: sweep.Settings) -> None:
    """Print how much the times of `points` vary between runs, latbench's and torch's."""
    found: dict[str, list[list[float]]] = {}
    for run in range(runs):
        began = time.monotonic()
        table = measured(points, threads, settings, seed=run)
        swept = time.monotonic() - began
        rows = [table.loc[point.id] for point in points]
        seconds = [spent(row) for row in rows]
        began = time.monotonic()
        workers = {name: Worker(threads=threads, name=name) for name in {point.backend for point in points}}
        order = np.random.default_rng(run).permutation(len(points))
        times = [0.0] * len(points)
        for i in order:
            times[i] = workers[points[i].backend].call(f"{HERE}:plain", points[i], seconds[i])
        for worker in workers.values():
            worker.close()
        found.setdefault("torch.utils.benchmark", []).append(times)
        for column in ("median_seconds", "corrected_seconds"):
            if column in table:
                found.setdefault(f"latbench {column}", []).append([row[column] for row in rows])
        told = time.monotonic() - began
        print(f"run {run + 1}: {sum(seconds):.1f} s of samples; the sweep took {swept:.0f} s, torch {told:.0f} s")
        for column in ("status", "stop_reason", "flags"):
            print(f"    {column} {dict(Counter(row[column] for row in rows))}", flush=True)
    for i, point in enumerate(points):
        each = (f"{name} {' '.join(f'{1e3 * times[i]:.3f}' for times in runs)}" for name, runs in found.items())
        print(f"  {point} (ms): {'; '.join(each)}")
    print("between runs, median (90th percentile) over points:")
    spreads = {name: np.array(times) for name, times in found.items()}
    base = np.nan
    for name, values in spreads.items():
        deviation = values.std(axis=0, ddof=1) / values.mean(axis=0)
        extent = np.ptp(values, axis=0) / values.mean(axis=0)
        middle = float(np.median(deviation))
        base = middle if np.isnan(base) else base
        print(
            f"  {name:26} standard deviation {middle:.2%} ({np.quantile(deviation, 0.9):.2%}), "
            f"extent {np.median(extent):.2%} ({np.quantile(extent, 0.9):.2%}), {middle / base:.2f} of torch's"
        )


def same(points: Sequence[Point], runs: int, threads: int, settings: sweep.Settings) -> None:
    """Print the verdicts on the same points measured again and again, each table compared with the one before."""
    judge(points, points, runs, threads, settings, ("SAME", "UNCLEAR"))


def slower(points: Sequence[Point], runs: int, threads: int, settings: sweep.Settings) -> None:
    """Print the verdicts on the points whose calls were made 5% slower."""
    judge(points, [replace(point, seed=SLOWED) for point in points], runs, threads, settings, ("SLOWER",))


def judge(
    before: Sequence[Point],
    after: Sequence[Point],
    runs: int,
    threads: int,
    settings: sweep.Settings,
    right: Sequence[str],
) -> None:
    """Measure `before` and `after` in sweeps of their own, `runs` times, and count verdicts."""
    sweep.PREPARE = f"{HERE}:prepare"
    counts: Counter[str] = Counter()
    ratios = []
    for run in range(runs):
        old = measured(before, threads, settings, seed=2 * run)
        new = measured(after, threads, settings, seed=2 * run + 1)
        for a, b in zip(before, after, strict=True):
            judged = verdict(old.loc[a.id, "samples_seconds"], new.loc[b.id, "samples_seconds"])
            counts[judged.kind] += 1
            ratios.append(judged.ratio)
            if judged.kind not in right:
                print(f"  {judged.kind} {judged.ratio:.3f} ({judged.low:.3f}-{judged.high:.3f}): {a}", flush=True)
    total = sum(counts.values())
    print(f"{dict(counts)} of {total}: {sum(counts[kind] for kind in right) / total:.1%} as it should be")
    low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95])
    print(f"ratios: median {middle:.4f}, 5% to 95% {low:.4f} to {high:.4f}")


VERBS: dict[str, Callable[..., None]] = {"repeat": repeat, "same": same, "slower": slower}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(VERBS))
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=devices.cores())
    given = parser.parse_args()
    VERBS[given.what](chosen(given.points, given.threads), given.runs, given.threads, sweep.Settings())


if __name__ == "__main__":
    main()
