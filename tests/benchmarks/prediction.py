"""How well cost models predict what they did not see, on published tables and on tables of this machine.

    python tests/benchmarks/prediction.py neusight [GPU ...]       # GPUs; random shapes, smallest, largest fifth
    python tests/benchmarks/prediction.py transfer                 # a new GPU from a few shapes and the four others
    python tests/benchmarks/prediction.py large                    # the time to fit 100,000 rows
    python tests/benchmarks/prediction.py spdy                     # six anchors a curve
    python tests/benchmarks/prediction.py own TABLE [...] --backend numba   # unseen shapes, beside the noise floor
    python tests/benchmarks/prediction.py tokens TABLE OTHER       # token counts of OTHER by a model of TABLE
    python tests/benchmarks/prediction.py known TABLE [...]        # shapes of which a few times are known

Published data from $LATBENCH_DATA. Errors are |predicted / measured - 1|. Beside the learned models stand three
rooflines: of the data sheet; the larger of work and traffic at fitted rates, plus a fitted call; and `Roofline`,
their sum. Every model is fitted to what is not held out, and nothing was chosen by what is, in published data or in
bundled tables.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

import cost_models
from cost_models import AnchoredLookup, Boosted, Roofline, Transfer
from cost_models.features.layer_work import LayerWork
from cost_models.rows.shape_groups import count_shapes, group_by_shape, split_by_shape
from latbench.importers.kernel_timings import read_kernel_timings
from latbench.importers.text_formats import read_spdy

Truth = tuple[pd.DataFrame, np.ndarray]


def data() -> Path:
    """The folder of published data."""
    return Path(os.environ.get("LATBENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))


def neusight_table(gpu: str) -> Truth:
    """The linear layers of one GPU."""
    file = data() / "neusight_kernels" / "linear_train.csv.gz"
    rows, _ = read_kernel_timings("neusight", file, only={"Device": gpu})
    X = pd.DataFrame(rows).drop(columns=["samples_seconds", "kernel_used"])
    return X, np.array([np.median(row["samples_seconds"]) for row in rows])


def gpus() -> list[str]:
    """The names of the GPUs in the published table."""
    return sorted(set(pd.read_csv(data() / "neusight_kernels" / "linear_train.csv.gz", usecols=["Device"])["Device"]))


def data_sheet(gpu: str) -> Callable[[pd.DataFrame], np.ndarray]:
    """The roofline of the data sheet."""
    sheets = json.loads((data() / "neusight_kernels" / "device_configs.json").read_text())
    sheet = sheets[gpu.replace(" ", "_")]

    def seconds(X: pd.DataFrame) -> np.ndarray:
        work, moved = _work(X)
        return np.asarray(np.maximum(work / (sheet["SingleFLOPs"] * 1e9), moved / (sheet["Mem_Bw"] * 1e9)))

    return seconds


def fitted_maximum(X: pd.DataFrame, y: np.ndarray) -> Callable[[pd.DataFrame], np.ndarray]:
    """call + max(work / rate, traffic / bandwidth), all three fitted by mean |log error|."""

    def seconds(logs: np.ndarray, X: pd.DataFrame) -> np.ndarray:
        work, moved = _work(X)
        rate, bandwidth, call = np.exp(logs)
        return np.asarray(call + np.maximum(work * rate, moved * bandwidth))

    work, moved = _work(X)
    start = np.log([np.quantile(y / work, 0.1), np.quantile(y / moved, 0.1), y.min() / 2])
    best = minimize(lambda logs: np.abs(np.log(seconds(logs, X) / y)).mean(), start, method="Nelder-Mead")
    return lambda X: seconds(best.x, X)


def _work(X: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    work = LayerWork.from_rows(X)
    return work.flop_dense, work.weight_bytes + work.input_bytes + work.output_bytes


def neusight(chosen: list[str]) -> None:
    """A table of errors and intervals a GPU and hold-out, and the ratios to the rooflines."""
    print(f"{'':24} {'':15} median error: {'sheet':>6} {'max':>6} {'sum':>6} {'boosted':>8}   p90  within 10%  90% "
          "interval covers, width   fit s")  # fmt: skip
    rows = []
    for gpu in chosen or gpus():
        X, y = neusight_table(gpu)
        for name, masks in cost_models.build_hold_outs(X).items():
            if name == "layer families":
                continue
            errors: dict[str, list[np.ndarray]] = {"sheet": [], "max": [], "sum": [], "boosted": []}
            inside, widths, seconds = [], [], []
            for held_out in masks:
                rest, kept, asked, truth = X[~held_out].reset_index(drop=True), y[~held_out], X[held_out], y[held_out]
                began = time.perf_counter()
                model = Boosted(allow_extrapolation=True).fit(rest, kept)
                seconds.append(time.perf_counter() - began)
                low, high = model.predict_interval(asked, 0.9)
                inside.append((low <= truth) & (truth <= high))
                widths.append((high - low) / model.predict(asked))
                predicted = {
                    "sheet": data_sheet(gpu)(asked),
                    "max": fitted_maximum(rest, kept)(asked),
                    "sum": Roofline(allow_extrapolation=True).fit(rest, kept).predict(asked),
                    "boosted": model.predict(asked),
                }
                for kind, values in predicted.items():
                    errors[kind].append(np.abs(values / truth - 1))
            whole = {kind: np.concatenate(parts) for kind, parts in errors.items()}
            medians = {kind: float(np.median(values)) for kind, values in whole.items()}
            ours, covered = whole["boosted"], float(np.mean(np.concatenate(inside)))
            rows.append({"hold_out": name, "covered": covered, **medians})
            print(f"{gpu:24} {name:15} {'':13} {medians['sheet']:7.1%} {medians['max']:6.1%} {medians['sum']:6.1%} "
                  f"{medians['boosted']:8.1%} {np.quantile(ours, 0.9):6.1%} {np.mean(ours <= 0.1):9.1%} "
                  f"{covered:14.1%} {np.median(np.concatenate(widths)):14.0%} {np.median(seconds):10.1f}",
                  flush=True)  # fmt: skip
    frame = pd.DataFrame(rows)
    for name, group in frame.groupby("hold_out"):
        better = {kind: group[kind] / group["boosted"] for kind in ("sheet", "max", "sum")}
        said = ", ".join(
            f"{kind} {r.median():.1f}x ({(r >= 2).sum()} of {len(r)} at least 2x)" for kind, r in better.items()
        )
        print(f"{name}: median over GPUs, roofline's error over ours: {said}; coverage {group['covered'].mean():.1%}")


def transfer() -> None:
    """Each GPU from a few of its shapes and all of the others', against its own roofline from these few."""
    tables = {gpu: neusight_table(gpu) for gpu in gpus()}
    print(f"{'':24} shapes: roofline of them, transfer: median error, 90% interval covers")
    for gpu, (X, y) in tables.items():
        others = [tables[other] for other in tables if other != gpu]
        cells = []
        for count in (10, 30, 100):
            figures = [_transferred(X, y, others, count, seed) for seed in range(SEEDS)]
            alone, moved, covered = np.mean(figures, axis=0)
            cells.append(f"{count}: {alone:.1%}, {moved:.1%}, {covered:.0%}")
        print(f"{gpu:24} {' | '.join(cells)}", flush=True)


SEEDS = 3


def _transferred(
    X: pd.DataFrame, y: np.ndarray, others: list[Truth], count: int, seed: int
) -> tuple[float, float, float]:
    """Median errors of a roofline of `count` shapes, and of the transfer to them; the share of its intervals that
    hold, of shapes within the range of these.
    """
    order = np.random.default_rng(seed).permutation(len(X))
    few, rest = order[:count], order[count : count + 1500]
    anchors, asked, truth = X.iloc[few].reset_index(drop=True), X.iloc[rest], y[rest]
    both = pd.concat([anchors, *(theirs for theirs, _ in others)], ignore_index=True)
    seconds = np.concatenate([y[few], *(theirs for _, theirs in others)])
    model = Transfer(str(X["device"].iloc[0]), allow_extrapolation=True).fit(both, seconds)
    alone = Roofline(allow_extrapolation=True).fit(anchors, y[few])
    error = [float(np.median(np.abs(m.predict(asked) / truth - 1))) for m in (alone, model)]
    inside = np.logical_and.reduce([away == 0 for away in model.octaves_outside(asked).values()])
    low, high = model.predict_interval(asked[inside], 0.9)
    return error[0], error[1], float(((low <= truth[inside]) & (truth[inside] <= high)).mean())


LARGE = 100_000


def large() -> None:
    """Fit the table of one GPU, again and again with its sizes and times a little changed."""
    X, y = neusight_table("NVIDIA A100-PCIE-40GB")
    rng, copies = np.random.default_rng(0), -(-LARGE // len(X))
    moved = [
        X.assign(**{size: X[size] + rng.integers(0, 64, len(X)) for size in ("m", "k", "n")}) for _ in range(copies)
    ]
    rows, times = (
        pd.concat(moved, ignore_index=True)[:LARGE],
        (np.tile(y, copies) * rng.normal(1, 0.02, copies * len(X))),
    )
    seconds = []
    for _ in range(SEEDS):
        began = time.perf_counter()
        model = Boosted().fit(rows, times[:LARGE])
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    model.predict(rows)
    asked = time.perf_counter() - began
    print(f"{LARGE} rows: fitted in {np.median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f}), "
          f"predicted in {asked:.1f} s")  # fmt: skip


def spdy() -> None:
    """Six anchors a curve, spread over it: the rest within 10%?"""
    rows = [
        {"model": f"{file.stem}:{name}", "sparsity_target": sparsity, "seconds": seconds}
        for file in sorted((data() / "spdy_tables").glob("*.txt"))
        for name, points in read_spdy(file).layers.items()
        for seconds, sparsity in points
        if sparsity > 0
    ]
    frame = pd.DataFrame(rows).assign(op="linear", pattern="unstructured", m=np.nan)
    X, y = frame.drop(columns="seconds"), frame["seconds"].to_numpy()
    figures = cost_models.evaluate(AnchoredLookup().fit(X, y), X, y)
    curves = frame["model"].nunique()
    print(f"{curves} curves, {figures['held_out']} held-out points: median {figures['median']:.1%}, "
          f"p90 {figures['p90']:.1%}, within 10% {figures['within_10']:.1%}, 90% intervals cover "
          f"{figures['coverage']:.1%}, width {figures['width']:.0%}")  # fmt: skip


def own(tables: list[str], backend: str) -> None:
    """Unseen shapes of this machine's tables, alone and together, beside their noise."""
    parts = [cost_models.read_training_rows(table, {"backend": backend}) for table in tables]
    X = pd.concat([X for X, _ in parts], ignore_index=True)
    y = np.concatenate([y for _, y in parts])
    found = {"look-up, other sparsities": cost_models.evaluate(AnchoredLookup().fit(X, y), X, y)}
    for model in (Roofline(), Boosted()):
        name = type(model).__name__
        found[f"{name}, shapes"] = cost_models.evaluate(model.fit(X, y), X, y)
        ways = {way: masks for way, masks in cost_models.build_hold_outs(X).items() if way != "shapes"}
        for way, figures in cost_models.evaluate_held_out(model, X, y, ways, n_jobs=-1).items():
            found[f"{name}, {way}"] = figures
    print(f"{len(X)} points of {count_shapes(X)} shapes")
    for name, figures in found.items():
        if figures["median"] is None or figures["noise_floor"] is None:
            print(f"{name:34} nothing could be held out, or what was is refused")
            continue
        ratio = figures["median"] / figures["noise_floor"]
        covers = "no interval" if figures["coverage"] is None else f"90% interval covers {figures['coverage']:.1%}"
        print(f"{name:34} held out {figures['held_out']:5} median {figures['median']:6.1%} p90 {figures['p90']:6.1%} "
              f"within 10% {figures['within_10']:6.1%} noise {figures['noise_floor']:.1%}, so {ratio:.1f} times it; "
              f"{covers}")  # fmt: skip


def known(tables: list[str], backend: str) -> None:
    """Shapes of which no time is known, the dense one, and some others beside it, drawn at random."""
    for table in tables:
        X, y = cost_models.read_training_rows(table, {"backend": backend})
        shapes = group_by_shape(X)
        fold, dense = split_by_shape(shapes, 5, 0), X["pattern"].eq("dense").to_numpy()
        cells = []
        for count in (0, 1, 2, 4, 8):
            rng, errors = np.random.default_rng(0), []
            for held_out in (fold == number for number in range(5)):
                learned = ~held_out
                for shape in np.unique(shapes[held_out]):
                    own = shapes == shape
                    if count:
                        learned[own & dense] = True
                        learned[rng.permutation(np.flatnonzero(own & ~dense))[: count - 1]] = True
                predict = Boosted().learn(X[learned].reset_index(drop=True), y[learned])
                asked = held_out & ~learned & ~dense
                errors.append(np.abs(np.exp(predict(X[asked])) / y[asked] - 1))
            middle, high = np.quantile(np.concatenate(errors), (0.5, 0.9))
            cells.append(f"{count}: {middle:.1%} ({high:.0%})")
        print(f"{table}: times known of each shape, median error and 90th percentile: {', '.join(cells)}", flush=True)


def tokens(table: str, asked: str, backend: str) -> None:
    """Times of one table on token counts that another one does not have, for each of them."""
    model = Boosted().fit(*cost_models.read_training_rows(table, {"backend": backend}))
    X, y = cost_models.read_training_rows(asked, {"backend": backend})
    covered = model.covers(X)
    predicted, (low, high) = np.full(len(X), np.nan), np.full((2, len(X)), np.nan)
    predicted[covered] = model.predict(X[covered])
    low[covered], high[covered] = model.predict_interval(X[covered], 0.9)
    errors, inside = np.abs(predicted / y - 1), (low <= y) & (y <= high)
    for n in [*sorted(set(X["n"])), None]:
        here = np.ones(len(X), bool) if n is None else X["n"].to_numpy() == n
        answered = here & covered
        name = "all" if n is None else f"{n:.0f}"
        if not answered.any():
            print(f"{name:>5} tokens: {here.sum()} refused")
            continue
        middle, high_error = np.quantile(errors[answered], (0.5, 0.9))
        print(f"{name:>5} tokens: median {middle:.1%} p90 {high_error:.1%}, 90% interval covers "
              f"{inside[answered].mean():.0%} of {answered.sum()}, {(here & ~covered).sum()} refused")  # fmt: skip


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("neusight", "transfer", "large", "spdy", "own", "known", "tokens"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", default="numba")
    chosen = parser.parse_args()
    match chosen.what:
        case "neusight":
            neusight(chosen.names)
        case "transfer":
            transfer()
        case "large":
            large()
        case "spdy":
            spdy()
        case "own":
            own(chosen.names, chosen.backend)
        case "known":
            known(chosen.names, chosen.backend)
        case "tokens":
            if len(chosen.names) != 2:
                parser.error("tokens takes two tables: what is known, and what is asked")
            tokens(chosen.names[0], chosen.names[1], chosen.backend)


if __name__ == "__main__":
    main()
