"""The tidy frames of one report, computed once: the page, the figures for papers and the summary show the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pandas as pd

from latbench.errors import BadData
from latbench.report import accuracy, predictions, ranking, roofline
from latbench.report import frames as data
from latbench.report.inputs import Inputs
from latbench.tables.table import select_timed

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.verify import SpeedupVerdict


@dataclass(frozen=True)
class Content:
    """What the frames hold is said by the functions that make them; None where the inputs do not tell.

    places: (setting, shape) pairs, the one with the longest dense time first.
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


def of(inputs: Inputs) -> Content:
    """Raises BadData where the table holds no time to show, or no shape with both a dense and a sparse one."""
    points = data.points(inputs.table)
    if points.empty:
        timed = select_timed(inputs.table)
        if timed.loc[timed["op"].ne("model") & timed["purpose"].ne("verify"), ["m", "k", "n"]].isna().any(axis=None):
            raise BadData(
                "the table does not say the sizes of its layers, by which a report puts them side by side: import it "
                "again with --workload, which knows them by their names"
            )
        raise BadData("the table holds no timed layer: its rows are failures or whole models; sweep layers first")
    if (wrong := data.impossible(points)).any():
        row = points[wrong].iloc[0]
        raise BadData(
            f"{int(wrong.sum())} rows have times that are none, such as {row['pattern']} at {row['shape']}: "
            "`latbench validate` names them"
        )
    speedups = data.speedup(points)
    if speedups.empty:
        raise BadData(
            "the table has no shape with both a dense and a sparse time, so no speedup can be told: "
            "sweep a dense engine and a pattern at the same shapes"
        )
    model = inputs.model
    held_out = None
    if model is not None and model.table_hash == inputs.table_hash:  # of another table it would say nothing
        held_out = predictions.tidy(model, inputs.table)
    return Content(
        points=points,
        speedups=speedups,
        break_evens=data.break_even(speedups),
        starts=data.earliest(speedups),
        places=data.places(speedups),
        ranked=ranking.ranked(points),
        roofline=roofline.tidy(points),
        noise=data.noise(inputs.table),
        noise_curve=data.noise_curve(inputs.table),
        held_out=None if held_out is None or held_out.empty else held_out,
        layers=profile_layers(inputs.profile) if inputs.profile else None,
        times=promise_times(inputs.verdict) if inputs.verdict else None,
        trade_offs=inputs.trade_offs,
        accuracy=None if inputs.results is None else accuracy.tidy(inputs.results),
    )


def profile_layers(chosen: Profile) -> pd.DataFrame:
    """One row a layer in the model's order: name, pattern, sparsity, seconds, low, high, error."""
    layers = pd.DataFrame([{"name": name, **asdict(layer)} for name, layer in chosen.layers.items()])
    return layers.rename(columns={"seconds_low": "low", "seconds_high": "high"})


def promise_times(verdict: SpeedupVerdict) -> pd.DataFrame:
    """Whole-model times of dense engines (slowest first), prediction, measurement: name, kind, seconds, low, high."""
    from search.pipeline.verify import PRUNED

    dense = {name: found for name, found in verdict.engines.items() if name != PRUNED}
    rows = [
        (f"dense, {name}", "dense", found["value"], found["low"], found["high"])
        for name, found in sorted(dense.items(), key=lambda item: -item[1]["value"])
    ]
    predicted = (verdict.predicted_seconds, verdict.predicted_low, verdict.predicted_high)
    measured = (verdict.measured_seconds, verdict.measured_low, verdict.measured_high)
    rows += [("pruned, predicted", "predicted", *predicted), ("pruned, measured", "measured", *measured)]
    return pd.DataFrame(rows, columns=["name", "kind", "seconds", "low", "high"])
