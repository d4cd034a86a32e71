"""The frontier section: the least error at each speedup, with the chosen profile and uniform profiles beside it.

Seconds are those of the whole model: the table's times of its layers, times the correction that the search found by
timing whole models, plus the fixed part. So the chosen profile lies at its prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from latbench.base.engine_registry import PRECISIONS
from latbench.base.number_format import format_ratio, format_seconds
from latbench.errors import BadData
from latbench.report import point_frames
from latbench.report.elements import Cell, Chart, Section, build_table
from latbench.report.figures import (
    GAIN,
    LOSS,
    Figure,
    assign_looks,
    build_line_and_marker,
    build_log_ticks,
    build_time_axis,
    draw_line,
    escape_name,
    round_values,
)
from latbench.workloads.workload import read_workload
from search.artifacts.profile import Profile
from search.inputs import layer_errors, problem_from_table
from search.inputs.gpu_rows import select_gpu_rows
from search.inputs.layer_builder import build_measured_layers
from search.inputs.problem_builder import build_problem
from search.knapsack.arrays import Floats, sum_in_order
from search.knapsack.pareto import frontier
from search.problem.layers import DENSE_OPTION, build_uniform_choice, list_options
from search.problem.problem import Problem
from sparse_kernels.shapes import Shape

if TYPE_CHECKING:
    from search.pipeline.speedup_verdict import SpeedupVerdict

POINTS = 600  # drawn of a frontier that may have 40,000
FINE = 1000  # resolution of the frontier, as a part of the dense time
EFFICIENT, ALONE, UNIFORM = "efficient", "alone", "uniform"
"""Kinds of rows: of all options, of those in one precision, and with one option in all layers."""


def read_trade_offs(swept: pd.DataFrame, profile: Profile, workload: str, database: Path) -> pd.DataFrame:
    """Read the efficient and the uniform profiles of a profile's layers, as `build_frame` returns them.

    `swept` holds rows of the table. `workload` is a file of `latbench trace` or a bundled name. `database` is the
    layer database of the search. Raises BadData where they do not belong to the profile.
    """
    from search.artifacts.layer_database import Database

    layers = read_workload(workload).shapes()
    if missing := [name for name in profile.layers if name not in layers]:
        raise BadData(f"{workload} has no layer {missing[0]} of the profile: give the workload of latbench trace")
    problem = _build_problem(point_frames.convert_categories(swept), profile, layers)
    pruned = Database(database, profile.model_hash)
    problem = replace(problem, layers=tuple(
        layer.take([
            place for place, option in enumerate(layer.options)
            if pruned.has(layer.name, option)
        ])
        for layer in problem.layers
    ))  # fmt: skip
    if not any(len(layer.options) > 1 for layer in problem.layers):
        raise BadData(f"{database} holds no pruned layer of the profile: give the --database of its search")
    return build_frame(problem.with_errors(layer_errors.read_output_errors(problem, pruned)), profile)


def _build_problem(swept: pd.DataFrame, profile: Profile, layers: Mapping[str, Shape]) -> Problem:
    """Return the problem of the profile's layers, as the search saw it in the table."""
    shapes = {name: layers[name] for name in profile.layers}
    dense, fixed = profile.dense_seconds, profile.fixed_seconds
    if profile.deployment.on_gpu:
        measured = build_measured_layers(select_gpu_rows(swept, profile.device).rows, shapes)
        return build_problem(measured, dense_seconds=dense, fixed_seconds=fixed)
    return problem_from_table(
        swept, shapes, device=profile.device, backend=profile.backend, threads=profile.threads, dense_seconds=dense,
        fixed_seconds=fixed, precisions=profile.deployment.precisions,
    )  # fmt: skip


def build_frame(problem: Problem, profile: Profile) -> pd.DataFrame:
    """Build a frame with a row for each efficient and each uniform profile.

    Columns: kind, name (of a uniform profile; of the one precision), pattern (of a uniform profile), seconds (of the
    whole model), speedup, error.
    """
    scale = _correction(problem, profile)
    seconds = [scale * layer.seconds for layer in problem.layers]
    fine = profile.dense_seconds / FINE
    rows = [(EFFICIENT, "", "", *ends) for ends in _list_efficient(seconds, problem.errors, fine)]
    rows += [(ALONE, name, "", *ends) for name, ends in _list_by_precision(problem, scale, fine)]
    for option in list_options(problem.layers):
        choice = build_uniform_choice(problem.layers, option)
        of = zip(seconds, problem.errors, choice, strict=True)
        spent, lost = map(sum_in_order, zip(*((float(t[j]), float(e[j])) for t, e, j in of), strict=True))
        rows.append((UNIFORM, str(option), option.pattern, spent, lost))
    found = pd.DataFrame(rows, columns=["kind", "name", "pattern", "seconds", "error"])
    found["seconds"] += profile.fixed_seconds
    return found.assign(speedup=profile.dense_seconds / found["seconds"])


def _list_efficient(seconds: Sequence[Floats], errors: Sequence[Floats], fine: float) -> list[tuple[float, float]]:
    """List the layers' seconds and errors of efficient profiles, few enough to be drawn."""
    every = frontier(seconds, errors, resolution=fine)
    kept = np.unique(np.searchsorted(every.seconds, np.linspace(every.seconds[0], every.seconds[-1], POINTS)))
    return [(float(every.seconds[i]), float(every.errors[i])) for i in kept.clip(0, len(every.seconds) - 1)]


def _list_by_precision(problem: Problem, scale: float, fine: float) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the same for the options in each precision, with its name, if layers have several.

    A layer may stay as it is in any case.
    """
    used = {option.precision for layer in problem.layers for option in layer.options}
    for precision in PRECISIONS if len(used) > 1 else ():
        own = [
            layer.take([
                place for place, option in enumerate(layer.options)
                if option.precision == precision or option == DENSE_OPTION
            ])
            for layer in problem.layers
        ]  # fmt: skip
        if precision in used:
            for ends in _list_efficient([scale * it.seconds for it in own], [it.errors for it in own], fine):
                yield precision, ends


def _correction(problem: Problem, profile: Profile) -> float:
    """Return the factor by which the search corrected layer times: the median of prediction over the table's time."""
    ratios = []
    for layer in problem.layers:
        chosen = profile.layers[layer.name]
        for place, option in enumerate(layer.options):
            if option.is_close(chosen.option):
                ratios.append(chosen.seconds / float(layer.seconds[place]))
    return float(np.median(ratios)) if ratios else 1.0


def build_section(rows: pd.DataFrame, profile: Profile, verdict: SpeedupVerdict | None) -> Section:
    """Build the section: least error at each speedup, and the chosen profile."""
    efficient = rows[rows["kind"] == EFFICIENT]
    budget = profile.dense_seconds / profile.target
    sentences = [
        "The line is the least total error at each time of the whole model, over all mixtures of patterns and "
        f"sparsities{_mention_precisions(rows)}. The error of a layer is the relative error of its outputs on the "
        "calibration data. Single points give every layer one pattern and sparsity. The search minimises the loss of "
        "the whole model, so the chosen profile may lie above the line."
    ]
    fastest = efficient["speedup"].max()
    sentences.append(
        f"The chosen profile has a total error of {profile.error:.3g} at {format_ratio(profile.speedup[0])}. The "
        f"fastest efficient profile reaches {format_ratio(fastest)} with an error of {efficient['error'].max():.3g}."
    )
    cells = [
        [Cell(format_ratio(row["speedup"]), row["speedup"]), Cell(format_seconds(row["seconds"]), row["seconds"]),
         Cell(f"{row['error']:.3g}", row["error"])]
        for row in select_steps(efficient).to_dict("records")
    ]  # fmt: skip
    return Section(
        "frontier", "Error at each speedup", sentences,
        [Chart("frontier", "Total error by time of the whole model", draw_figure(rows, profile, verdict, budget))],
        [("Least error at each speedup", build_table(["#speedup", "#whole model", "#total error"], cells))],
    )  # fmt: skip


def select_steps(efficient: pd.DataFrame, wanted: int = 8) -> pd.DataFrame:
    """Select the efficient profiles of least error at a few evenly spaced speedups."""
    levels = np.linspace(efficient["speedup"].min(), efficient["speedup"].max(), wanted)
    rows = [efficient[efficient["speedup"] >= level - 1e-9].nsmallest(1, "error") for level in levels]
    return pd.concat(rows).drop_duplicates()


def draw_figure(rows: pd.DataFrame, profile: Profile, verdict: SpeedupVerdict | None, budget: float) -> Figure:
    """Draw error over seconds on logarithmic axes: frontier, uniform profiles, chosen profile and its measurement."""
    shown = rows[rows["error"] > 0]  # the dense model has no error, and no place on a logarithmic axis
    efficient = shown[shown["kind"] == EFFICIENT]
    traces = [{
        "type": "scatter", "mode": "lines", "name": "least error",
        "line": {"color": "@ink", "width": 2, "shape": "hv"},
        "x": round_values(efficient["seconds"]), "y": round_values(efficient["error"]),
        "text": [format_ratio(value) for value in efficient["speedup"]],
        "hovertemplate": "%{text}<br>total error %{y:.3~g}<extra>least error</extra>",
    }]  # fmt: skip
    for dash, (name, own) in zip(("dot", "dash", "dashdot"), _group_alone(shown), strict=False):
        traces.append({
            "type": "scatter", "mode": "lines", "name": f"in {name} alone",
            "line": {"color": "@ink", "width": 1, "shape": "hv", "dash": dash},
            "x": round_values(own["seconds"]), "y": round_values(own["error"]),
            "text": [format_ratio(value) for value in own["speedup"]],
            "hovertemplate": f"%{{text}}<br>total error %{{y:.3~g}}<extra>{name}</extra>",
        })  # fmt: skip
    uniform = shown[shown["kind"] == UNIFORM]
    look_of = assign_looks(uniform["pattern"])
    for pattern, own in uniform.groupby("pattern", sort=True):
        traces.append({
            "type": "scatter", "mode": "markers", "name": f"all {escape_name(pattern)}",
            "x": round_values(own["seconds"]), "y": round_values(own["error"]),
            "marker": build_line_and_marker(look_of[str(pattern)], 8)["marker"],
            "text": [
                f"all {escape_name(row['name'])}: {format_ratio(row['speedup'])}" for row in own.to_dict("records")
            ],
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
    marked = {"target": budget}
    if verdict and (over := verdict.over_int8) is not None:
        marked["dense int8"] = over[0]
        times.append(over[0])
    layout = {
        "xaxis": build_time_axis("whole model", min(times), max(times)),
        "yaxis": {"title": {"text": "total error of layers"}, "type": "log", **build_log_ticks(*errors, "")},
        "shapes": [draw_line(x=seconds) for seconds in marked.values()],
        "annotations": [{
            "text": name, "x": math.log10(seconds), "xref": "x", "yref": "paper", "y": 1, "yanchor": "bottom",
            "showarrow": False, "font": {"size": 12, "color": "@muted"},
        } for name, seconds in marked.items()],
        "height": 460,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _group_alone(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each precision by itself, from the most precise."""
    alone = rows[rows["kind"] == ALONE]
    return [(name, alone[alone["name"] == name]) for name in PRECISIONS if name in set(alone["name"])]


def _mention_precisions(rows: pd.DataFrame) -> str:
    names = [name for name, _ in _group_alone(rows)]
    return f" and precisions; broken lines are of {', '.join(names)} alone" if names else ""


def _point(name: str, seconds: float, low: float, high: float, error: float, symbol: str, fill: str) -> Figure:
    said = format_seconds(seconds, low, high)
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": round_values([seconds]), "y": round_values([error]),
        "error_x": {
            "type": "data", "array": round_values([high - seconds]), "arrayminus": round_values([seconds - low]),
            "thickness": 2,
        },
        "marker": {
            "symbol": symbol, "size": 18 if symbol.endswith("open") else 14, "color": fill,
            "line": {"width": 3} if symbol.endswith("open") else {"color": "@ink", "width": 1},
        },
        "hovertemplate": f"<b>{name}</b><br>{said}<br>total error {error:.3g}<extra></extra>",
    }  # fmt: skip
