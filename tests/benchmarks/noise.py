"""How well times repeat: the same sweep several times, beside torch.utils.benchmark at equal measuring time a point.

    python tests/benchmarks/noise.py repeat [--points 30] [--runs 5] [--threads 2] [--sessions 3]
    python tests/benchmarks/noise.py verdicts [--points 10] [--runs 20] [--seconds 0.4]

`repeat` takes turns: a sweep, then torch's blocked_autorange of the same points for as long as the sweep timed each,
in all its tries, in processes started anew with the same thread settings; neither knows of the other. Printed is the
median over points of the spread between runs of the time reported: the standard deviation, and largest less smallest,
over the mean; and whether the first is at most half of torch's.

`verdicts` measures a table twice, and judges its points by latbench.tables.significance. One point in turn is 5%
slower the second time: its calls end with a busy wait. It counts how often that is caught, and how often a point is
blamed that did not change: by the samples as they were measured, divided by each row's reference_ratio, and
divided by what is common to all points too.
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

from latbench.backends.cpu import prepare_point
from latbench.machines.devices import name_cpu
from latbench.machines.processors import count_cores
from latbench.runners.worker_process import Worker
from latbench.sweeping import sweep_machine
from latbench.sweeping.settings import SweepOptions, SweepSettings
from latbench.sweeping.sweep import run_sweep
from latbench.sweeping.sweep_machine import CpuMachine
from latbench.tables.significance import ChangeVerdict, estimate_spread, judge_change, judge_together
from latbench.tables.table import read_table, select_timed
from latbench.workloads.points import Point, parse_patterns
from latbench.workloads.workload import read_workload

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
    shapes = list(dict.fromkeys(layer.shape for layer in read_workload("cpu_kernels").layers))
    device = name_cpu()
    points = [
        Point(device, backend, kernel, shape, parse_patterns([pattern])[0], sparsity, threads)
        for backend, kernel, pattern, sparsity in WORK
        for shape in shapes
    ]
    return points[:count]


# In the workers -----------------------------------------------------------------------------------------------------


def plain(point: Point, seconds: float) -> float:
    """The median seconds of a call, as torch.utils.benchmark finds it in about `seconds`."""
    from torch.utils.benchmark import Timer

    run = prepare_point.prepare_point(point)
    time.sleep(0.05)  # threads that checked the result may still spin
    run()
    timer = Timer("run()", globals={"run": run}, num_threads=point.threads)
    return float(timer.blocked_autorange(min_run_time=seconds).median)


TORCH = "torch.utils.benchmark"
MOST_OF_TORCHS = 0.5  # spread between runs: what is promised

SLOWED = 1  # the seed of a point whose calls take 5% longer


def prepare(point: Point) -> prepare_point.Rotation:
    """Prepare as latbench does; with the seed SLOWED a busy wait of 5% of its time follows every call."""
    ready = prepare_point.prepare_point(replace(point, seed=0))
    if point.seed != SLOWED:
        return ready
    extra = 0.05 * float(np.median([timed(ready) for _ in range(100)]))

    def slower() -> None:
        ready()
        end = time.perf_counter() + extra
        while time.perf_counter() < end:
            pass

    return prepare_point.Rotation([slower], ready.facts)


def timed(run: Callable[[], object]) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# The comparisons ----------------------------------------------------------------------------------------------------


def measured(points: Sequence[Point], threads: int, settings: SweepSettings, seed: int) -> pd.DataFrame:
    """One sweep of `points`, a row of each that has a time, by point_id; `spent`: the seconds that all its samples
    took, in all its tries, those that do not count among them.
    """
    with tempfile.TemporaryDirectory() as folder:
        machine = CpuMachine(threads)
        run_sweep(
            Path(folder), lambda table: points, machine=machine, settings=settings, options=SweepOptions(seed=seed)
        )
        rows = read_table(Path(folder))
    taken = rows["sample_count"].fillna(0) + rows["discarded_samples"].fillna(0)
    spent = (taken * rows["inner_loops"] * rows["mean_seconds"]).groupby(rows["point_id"]).sum()
    return select_timed(rows).set_index("point_id").assign(spent=spent)


def repeat(points: Sequence[Point], runs: int, threads: int, settings: SweepSettings) -> None:
    """Print how much the times of `points` vary between runs, latbench's and torch's."""
    found: dict[str, list[list[float]]] = {}
    for run in range(runs):
        began = time.monotonic()
        # A point that got no time, which its status says why, has none in any run.
        table = measured(points, threads, settings, seed=run).reindex([point.id for point in points])
        swept = time.monotonic() - began
        began = time.monotonic()
        workers = {name: Worker(threads=threads, name=name) for name in {point.backend for point in points}}
        order = np.random.default_rng(run).permutation(len(points))
        times = [np.nan] * len(points)
        for i in order:
            if table["spent"].iloc[i] > 0:
                args = (points[i], float(table["spent"].iloc[i]))
                times[i] = workers[points[i].backend].call(f"{HERE}:plain", *args)
        for worker in workers.values():
            worker.close()
        found.setdefault(TORCH, []).append(times)
        for column in ("median_seconds", "corrected_seconds"):
            found.setdefault(f"latbench {column}", []).append(list(table[column]))
        told, spent = time.monotonic() - began, table["spent"].sum()
        print(f"run {run + 1}: {spent:.1f} s of samples; the sweep took {swept:.0f} s, torch {told:.0f} s")
        for column in ("status", "stop_reason", "flags"):
            print(f"    {column} {dict(Counter(table[column]))}", flush=True)
    for i, point in enumerate(points):
        each = (f"{name} {' '.join(f'{1e3 * times[i]:.3f}' for times in runs)}" for name, runs in found.items())
        print(f"  {point} (ms): {'; '.join(each)}")
    spreads = {name: np.array(times) for name, times in found.items()}
    whole = np.all([np.isfinite(values).all(axis=0) for values in spreads.values()], axis=0)
    print(f"between runs, median (90th percentile) over {whole.sum()} points with a time in every run:")
    middles: dict[str, float] = {}
    for name, values in spreads.items():
        every = values[:, whole]
        deviation = every.std(axis=0, ddof=1) / every.mean(axis=0)
        extent = np.ptp(every, axis=0) / every.mean(axis=0)
        middles[name] = float(np.median(deviation))
        print(
            f"  {name:26} standard deviation {middles[name]:.2%} ({np.quantile(deviation, 0.9):.2%}), "
            f"extent {np.median(extent):.2%} ({np.quantile(extent, 0.9):.2%}), {middles[name] / middles[TORCH]:.2f} "
            "of torch's"
        )
    share = middles["latbench median_seconds"] / middles[TORCH]
    print(
        f"wanted: at most {MOST_OF_TORCHS} of torch's: {'met' if share <= MOST_OF_TORCHS else 'missed'}, {share:.2f}"
    )


class Count:
    """Verdicts on points that did not change, and on the one that was slowed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.equal: Counter[str] = Counter()
        self.slowed: Counter[str] = Counter()

    def add(self, judged: ChangeVerdict, slowed: bool, point: Point) -> None:
        """Count a verdict; a wrong one is printed."""
        (self.slowed if slowed else self.equal)[judged.kind] += 1
        if judged.kind not in (("SLOWER",) if slowed else ("SAME", "UNCLEAR")):
            text = f"{judged.kind} {judged.ratio:.3f} ({judged.low:.3f}-{judged.high:.3f})"
            print(f"    {self.name}: {text} {'slowed ' if slowed else ''}{point}", flush=True)

    def tell(self) -> None:
        """Print the counts."""
        false = self.equal["SLOWER"] + self.equal["FASTER"]
        print(f"{self.name}: unchanged {dict(self.equal)}, {false / sum(self.equal.values()):.1%} false;", end=" ")
        print(f"5% slower {dict(self.slowed)}, {self.slowed['SLOWER'] / sum(self.slowed.values()):.0%} caught")


def verdicts(points: Sequence[Point], runs: int, threads: int, settings: SweepSettings) -> None:
    """Measure `points` twice, `runs` times, one of them 5% slower the second time; count the verdicts."""
    sweep_machine.PREPARE = f"{HERE}:prepare"
    counts = [Count("as measured"), Count("at the usual pace"), Count("beside the other points")]
    for run in range(runs):
        which = run % len(points)
        changed = [replace(point, seed=SLOWED) if i == which else point for i, point in enumerate(points)]
        old = measured(points, threads, settings, seed=2 * run)
        new = measured(changed, threads, settings, seed=2 * run + 1)
        rows = [(old.loc[a.id], new.loc[b.id]) for a, b in zip(points, changed, strict=True)]
        raw = [(before["samples_seconds"], after["samples_seconds"]) for before, after in rows]
        paced = [(usual(before), usual(after)) for before, after in rows]
        common = float(np.median(ratios(paced)))
        beside = [(before, after / common) for before, after in paced]
        print(
            f"  run {run}: times {np.median(ratios(raw)):.3f}, at the usual pace {common:.3f}, spread "
            f"{estimate_spread(ratios(raw)):.2%}, {estimate_spread(ratios(paced)):.2%}; "
            f"slowed {ratios(beside)[which]:.3f}",
            flush=True,
        )
        for count, pairs in zip(counts, (raw, paced, beside), strict=True):
            between = estimate_spread(ratios(pairs))
            found = judge_together([judge_change(before, after, between=between) for before, after in pairs])
            for i, each in enumerate(found):
                count.add(each, i == which, points[i])
    for count in counts:
        count.tell()


def ratios(pairs: Sequence[tuple[Any, Any]]) -> list[float]:
    """The median after over the median before of each pair of samples."""
    return [float(np.median(after) / np.median(before)) for before, after in pairs]


def usual(row: Any) -> Any:
    """The samples of a row, in seconds, as they would be on the machine at its usual pace."""
    return row["samples_seconds"] / row["reference_ratio"]


VERBS: dict[str, Callable[..., None]] = {"repeat": repeat, "verdicts": verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(VERBS))
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--seconds", type=float, default=SweepSettings.max_seconds, help="most seconds a point")
    parser.add_argument("--sessions", type=int, default=SweepSettings.sessions, help="as of `latbench sweep`")
    parser.add_argument("--error", type=float, default=SweepSettings.rel_error, help="error at which a point ends")
    given = parser.parse_args()
    settings = SweepSettings(max_seconds=given.seconds, rel_error=given.error, sessions=given.sessions)
    VERBS[given.what](chosen(given.points, given.threads), given.runs, given.threads, settings)


if __name__ == "__main__":
    main()
