"""The frames of one report, computed once for the page, the figures for papers and the summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pandas as pd

from latbench.errors import BadData
from latbench.report import point_frames
from latbench.report.report_inputs import ReportInputs
from latbench.report.sections import accuracy, predictions, ranking
from latbench.report.sections import roofline_chart as roofline
from latbench.tables.table import select_timed

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.speedup_verdict import SpeedupVerdict


@dataclass(frozen=True)
class ReportData:
    """The frames of a report; the functions that build them describe their columns. None where inputs are missing.

    `places` holds (setting, shape) pairs, the longest dense time first.
    """

    points: pd.DataFrame
    speedups: pd.DataFrame
    break_evens: pd.DataFrame
    starts: pd.DataFrame
    places: list[tuple[str, str]]
    ranked: pd.DataFrame
    roofline: pd.DataFrame
    noise: pd.DataFrame
    noise_curve: pd.DataFrame
    held_out: pd.DataFrame | None
    layers: pd.DataFrame | None
    times: pd.DataFrame | None
    trade_offs: pd.DataFrame | None
    accuracy: pd.DataFrame | None
    accuracy_pairs: pd.DataFrame | None


def build_report_data(inputs: ReportInputs) -> ReportData:
    """Build the frames.

    Raises BadData where the table holds no time, or no shape with both a dense and a sparse time.
    """
    points = point_frames.build_points(inputs.table)
    if points.empty:
        timed = select_timed(inputs.table)
        if timed.loc[timed["op"].ne("model") & timed["purpose"].ne("verify"), ["m", "k", "n"]].isna().any(axis=None):
            raise BadData(
                "the table lacks the sizes of its layers, which a report needs to compare them: import it again with "
                "--workload, which holds the sizes by name"
            )
        raise BadData("the table holds no timed layer, only failures or whole models: sweep layers first")
    if (wrong := point_frames.find_impossible(points)).any():
        row = points[wrong].iloc[0]
        raise BadData(
            f"{int(wrong.sum())} rows contain invalid times, such as {row['pattern']} at {row['shape']}: "
            "`latbench validate` lists them"
        )
    speedups = point_frames.build_speedups(points)
    if speedups.empty:
        raise BadData(
            "the table has no shape with both a dense and a sparse time, so there is no speedup: "
            "sweep a dense engine and a pattern at the same shapes"
        )
    model = inputs.model
    held_out = None
    if (
        model is not None and model.table_hash == inputs.table_hash
    ):  # a model of another table has no held-out points here
        held_out = predictions.build_frame(model, inputs.table)
    return ReportData(
        points=points,
        speedups=speedups,
        break_evens=point_frames.build_break_evens(speedups),
        starts=point_frames.build_earliest_starts(speedups),
        places=point_frames.list_places(speedups),
        ranked=ranking.rank_kernels(points),
        roofline=roofline.build_frame(points),
        noise=point_frames.build_noise(inputs.table),
        noise_curve=point_frames.build_noise_curve(inputs.table),
        held_out=None if held_out is None or held_out.empty else held_out,
        layers=build_profile_layers(inputs.profile) if inputs.profile else None,
        times=build_promise_times(inputs.verdict) if inputs.verdict else None,
        trade_offs=inputs.trade_offs,
        accuracy=None if inputs.results is None else accuracy.build_frame(inputs.results),
        accuracy_pairs=None if inputs.results is None else accuracy.build_pairs(inputs.results),
    )


def build_profile_layers(chosen: Profile) -> pd.DataFrame:
    """Build a frame with a row for each layer in order: name, pattern, sparsity, seconds, low, high, error."""
    layers = pd.DataFrame([{"name": name, **asdict(layer)} for name, layer in chosen.layers.items()])
    return layers.rename(columns={"seconds_low": "low", "seconds_high": "high"})


def build_promise_times(verdict: SpeedupVerdict) -> pd.DataFrame:
    """Build a frame of whole models: dense engines (slowest first), prediction and measurement.

    Columns: name, kind (dense, predicted, measured), seconds, low, high, speedup, speedup_low, speedup_high. Speedups
    are those of the verdict, medians of paired rounds; that of the prediction is over the dense engine's seconds.
    """
    from search.pipeline.speedup_verdict import ENGINE_COLUMNS
    from search.pipeline.verify import PRUNED

    def columns(engine: str) -> list[float]:
        return [verdict.engines[engine][name] for name in ENGINE_COLUMNS]

    dense = sorted(verdict.engines.keys() - {PRUNED}, key=lambda name: -verdict.engines[name]["value"])
    predicted = (verdict.predicted_seconds, verdict.predicted_low, verdict.predicted_high)
    gain = (verdict.dense_seconds / predicted[i] for i in (0, 2, 1))
    rows = [
        *((f"dense, {name}", "dense", *columns(name)) for name in dense),
        ("pruned, predicted", "predicted", *predicted, *gain),
        ("pruned, measured", "measured", *columns(PRUNED)),
    ]
    names = ["name", "kind", "seconds", "low", "high", "speedup", "speedup_low", "speedup_high"]
    return pd.DataFrame(rows, columns=names)
