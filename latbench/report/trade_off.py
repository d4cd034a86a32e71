"""The frontier: what error every speed costs, with the profile that was chosen and the uniform ones beside it.

Seconds are the whole model's: the table's times of its layers, corrected by what the search learned from timing whole
models (one factor for all layers, and what is fixed), so that the chosen profile lies where its prediction does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from latbench.base.number_format import format_ratio, format_seconds
from latbench.errors import BadData
from latbench.report import frames as data
from latbench.report.elements import Cell, Chart, Section, table
from latbench.report.figures import (
    GAIN,
    LOSS,
    Figure,
    line_and_marker,
    line_at,
    log_ticks,
    looks,
    plain,
    short,
    time_axis,
)
from latbench.workloads.workload import read_workload
from search.artifacts.profile import Profile
from search.inputs import layer_errors, problem_from_table
from search.knapsack.arrays import sum_in_order
from search.knapsack.pareto import frontier
from search.problem.layers import DENSE, build_uniform_choice, list_options
from search.problem.problem import Problem

if TYPE_CHECKING:
    from search.pipeline.verify import SpeedupVerdict

POINTS = 600  # of a frontier that may have 40,000
FINE = 1000  # finer than this part of the dense time nobody sees
EFFICIENT, UNIFORM = "efficient", "uniform"


def read(swept: pd.DataFrame, profile: Profile, workload: str, database: Path) -> pd.DataFrame:
    """Every efficient trade-off of a profile's layers, and the uniform ones: `tidy` of what these files hold.

    `swept`: rows of the table; `workload`: a file of `latbench trace`, or a workload's name; `database`: the folder
    of pruned layers that the search was given. Raises BadData where they do not go with the profile.
    """
    from search.artifacts.layer_database import Database

    layers = {layer.name: layer.shape for layer in read_workload(workload).layers}
    if missing := [name for name in profile.layers if name not in layers]:
        raise BadData(f"{workload} has no layer {missing[0]}, which the profile has: give its own, of latbench trace")
    problem = problem_from_table(
        data.plain(swept), {name: layers[name] for name in profile.layers},
        device=profile.device, backend=profile.backend,
        threads=profile.threads, dense_seconds=profile.dense_seconds, fixed_seconds=profile.fixed_seconds,
    )  # fmt: skip
    pruned = Database(database, profile.model_hash)
    problem = replace(problem, layers=tuple(
        layer.take([
            place for place, option in enumerate(layer.options)
            if option.pattern == DENSE or pruned.has(layer.name, option.pattern, option.sparsity)
        ])
        for layer in problem.layers
    ))  # fmt: skip
    if not any(len(layer.options) > 1 for layer in problem.layers):
        raise BadData(f"{database} holds no pruned layer of the profile: give the --database of its search")
    return tidy(problem.with_errors(layer_errors.read_output_errors(problem, pruned)), profile)


def tidy(problem: Problem, profile: Profile) -> pd.DataFrame:
    """kind (efficient or uniform), name (of a uniform one), pattern, seconds of the whole model, speedup, error."""
    scale = _correction(problem, profile)
    seconds = [scale * layer.seconds for layer in problem.layers]
    every = frontier(seconds, problem.errors, resolution=profile.dense_seconds / FINE)
    kept = np.unique(np.searchsorted(every.seconds, np.linspace(every.seconds[0], every.seconds[-1], POINTS)))
    kept = kept.clip(0, len(every.seconds) - 1)
    rows = [(EFFICIENT, "", "", float(every.seconds[i]), float(every.errors[i])) for i in kept]
    for option in list_options(problem.layers):
        choice = build_uniform_choice(problem.layers, option)
        of = zip(seconds, problem.errors, choice, strict=True)
        spent, lost = map(sum_in_order, zip(*((float(t[j]), float(e[j])) for t, e, j in of), strict=True))
        rows.append((UNIFORM, str(option), option.pattern, spent, lost))
    found = pd.DataFrame(rows, columns=["kind", "name", "pattern", "seconds", "error"])
    found["seconds"] += profile.fixed_seconds
    return found.assign(speedup=profile.dense_seconds / found["seconds"])


def _correction(problem: Problem, profile: Profile) -> float:
    """By what the search multiplied layers' times: the median of its prediction over the table's time."""
    ratios = []
    for layer in problem.layers:
        chosen = profile.layers[layer.name]
        for place, option in enumerate(layer.options):
            if option.pattern == chosen.pattern and math.isclose(option.sparsity, chosen.sparsity, abs_tol=1e-6):
                ratios.append(chosen.seconds / float(layer.seconds[place]))
    return float(np.median(ratios)) if ratios else 1.0


def section(rows: pd.DataFrame, profile: Profile, verdict: SpeedupVerdict | None) -> Section:
    """What error every speed costs, and where the chosen profile lies."""
    efficient = rows[rows["kind"] == EFFICIENT]
    budget = profile.dense_seconds / profile.target
    sentences = [
        "The line is the least total error of layers (relative error of their outputs on the calibration data, "
        "summed) that any mixture of patterns and sparsities costs at each time of the whole model; nothing lies "
        "below it. Single points give every layer one pattern and sparsity. The search goes by the loss of the whole "
        "model, so what it chose may lie above the line."
    ]
    fastest = efficient["speedup"].max()
    sentences.append(
        f"The chosen profile has a total error of {profile.error:.3g} for {format_ratio(profile.speedup[0])}; the "
        f"fastest efficient one reaches {format_ratio(fastest)} for {efficient['error'].max():.3g}."
    )
    cells = [
        [Cell(format_ratio(row["speedup"]), row["speedup"]), Cell(format_seconds(row["seconds"]), row["seconds"]),
         Cell(f"{row['error']:.3g}", row["error"])]
        for row in steps(efficient).to_dict("records")
    ]  # fmt: skip
    return Section(
        "frontier", "What each speed costs", sentences,
        [Chart("frontier", "Total error over the time of the whole model", figure(rows, profile, verdict, budget))],
        [("The least error at each speedup", table(["#speedup", "#whole model", "#total error"], cells))],
    )  # fmt: skip


def steps(efficient: pd.DataFrame, wanted: int = 8) -> pd.DataFrame:
    """The efficient profiles of least error at a few speedups, evenly spaced."""
    levels = np.linspace(efficient["speedup"].min(), efficient["speedup"].max(), wanted)
    rows = [efficient[efficient["speedup"] >= level - 1e-9].nsmallest(1, "error") for level in levels]
    return pd.concat(rows).drop_duplicates()


def figure(rows: pd.DataFrame, profile: Profile, verdict: SpeedupVerdict | None, budget: float) -> Figure:
    """Error over seconds, both logarithmic: frontier, uniform profiles, the chosen one, and it as measured."""
    shown = rows[rows["error"] > 0]  # dense costs nothing, and lies on no logarithmic axis
    efficient = shown[shown["kind"] == EFFICIENT]
    traces = [{
        "type": "scatter", "mode": "lines", "name": "least error",
        "line": {"color": "@ink", "width": 2, "shape": "hv"},
        "x": short(efficient["seconds"]), "y": short(efficient["error"]),
        "text": [format_ratio(value) for value in efficient["speedup"]],
        "hovertemplate": "%{text}<br>total error %{y:.3~g}<extra>least error</extra>",
    }]  # fmt: skip
    uniform = shown[shown["kind"] == UNIFORM]
    look_of = looks(uniform["pattern"])
    for pattern, own in uniform.groupby("pattern", sort=True):
        traces.append({
            "type": "scatter", "mode": "markers", "name": f"all {plain(pattern)}",
            "x": short(own["seconds"]), "y": short(own["error"]),
            "marker": line_and_marker(look_of[str(pattern)], 8)["marker"],
            "text": [f"all {plain(row['name'])}: {format_ratio(row['speedup'])}" for row in own.to_dict("records")],
            "hovertemplate": "%{text}<br>total error %{y:.3~g}<extra></extra>",
        })  # fmt: skip
    times = [float(shown["seconds"].min()), float(shown["seconds"].max()), budget]
    lost = [*shown["error"], profile.error or math.inf]
    errors = float(min(lost)), float(shown["error"].max())
    promised = profile.predicted_seconds, profile.predicted_low, profile.predicted_high
    if profile.error > 0:
        traces.append(_point("chosen", *promised, profile.error, "star", GAIN))
    if verdict and profile.error > 0:
        ends = verdict.measured_seconds, verdict.measured_low, verdict.measured_high
        traces.append(_point("measured", *ends, profile.error, "circle-open", LOSS))
        times.append(verdict.measured_seconds)
    layout = {
        "xaxis": time_axis("whole model", min(times), max(times)),
        "yaxis": {"title": {"text": "total error of layers"}, "type": "log", **log_ticks(*errors, "")},
        "shapes": [line_at(x=budget)],
        "annotations": [{
            "text": "target", "x": math.log10(budget), "xref": "x", "yref": "paper", "y": 1, "yanchor": "bottom",
            "showarrow": False, "font": {"size": 12, "color": "@muted"},
        }],
        "height": 460,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _point(name: str, seconds: float, low: float, high: float, error: float, symbol: str, fill: str) -> Figure:
    said = format_seconds(seconds, low, high)
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": short([seconds]), "y": short([error]),
        "error_x": {
            "type": "data", "array": short([high - seconds]), "arrayminus": short([seconds - low]), "thickness": 2,
        },
        "marker": {
            "symbol": symbol, "size": 18 if symbol.endswith("open") else 14, "color": fill,
            "line": {"width": 3} if symbol.endswith("open") else {"color": "@ink", "width": 1},
        },
        "hovertemplate": f"<b>{name}</b><br>{said}<br>total error {error:.3g}<extra></extra>",
    }  # fmt: skip
