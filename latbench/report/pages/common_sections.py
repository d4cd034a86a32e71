"""Sections of the page of one table, some of them shared with the comparison: sentences, tables and charts."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latbench.base.bundled_data import format_place
from latbench.base.engine_version import PACKAGE, list_versions
from latbench.base.number_format import (
    NOTHING,
    format_bytes,
    format_count,
    format_percent,
    format_percent_rounded_up,
    format_ratio,
    format_score,
    format_seconds,
    format_threads,
)
from latbench.report import figures, point_frames
from latbench.report.elements import (
    Cell,
    Chart,
    Section,
    Table,
    build_count_cell,
    build_facts,
    build_share_cell,
    build_table,
)
from latbench.report.pages import overview
from latbench.report.report_data import ReportData
from latbench.report.report_inputs import ReportInputs
from latbench.report.sections import predictions, ranking

if TYPE_CHECKING:
    from cost_models.model_file import ModelFile
    from search.artifacts.profile import Profile
    from search.pipeline.speedup_verdict import SpeedupVerdict

Place = tuple[str, str]

FLAGS = {
    "in_cache": "in_cache (small weights: all copies may have stayed in the cache)",
    "no_roofline": "no_roofline (the limits of the device were unknown)",
    "preempted": "preempted (other programs took the cores, or the host moved them apart, in all tries)",
    "slow_spell": "slow_spell (the machine was slower than in the rest of the sweep)",
    "spike": "spike (far above both neighbouring sparsities, twice)",
}
CHART_POINTS = 12_000  # drawn over all shapes, about 180 bytes each
SLOW = 1.1  # times the usual pace: slower points are counted
FAILURE_REASONS = 200  # rows of the failure table; the counts above it cover all


def build_shapes(content: ReportData, places: Sequence[Place]) -> Section:
    """Build the section with speedups, a map and ranked kernels of each of `places`, and the break-evens of all."""
    choices: list[tuple[str, Mapping[str, figures.Figure]]] = []
    ordered = ranking.select_levels(content.ranked, content.speedups)
    drawn = _select_drawn(places, content.speedups, ordered)
    gains, ranked = (
        point_frames.group_by_place(point_frames.select_places(frame, drawn)) for frame in (content.speedups, ordered)
    )
    starts = point_frames.group_by_place(point_frames.select_places(content.break_evens, places))
    for place in drawn:
        rank = ranking.draw_figure(ranked[place], gains[place][0]["dense_seconds"])
        choices.append(
            (point_frames.format_place(*place), {**figures.draw_shape(gains[place], starts[place]), "rank": rank})
        )
    sentences = [
        "Every sparse kernel is compared with the fastest dense engine of the same shape and setting; each chart "
        "names that engine. Above the line at 1× sparse is faster. A ring marks the break-even sparsity: above it a "
        "pattern stays faster up to the highest measured sparsity (log speedup is interpolated between measured "
        "points). Bars are 95% intervals, from both times at their worst to both at their best. The last chart ranks "
        "every engine and pattern at that shape, dense and at "
        f"{_format_levels(point_frames.select_levels(content.speedups, ranking.LEVELS))}."
    ]
    if len(choices) < len(places):
        sentences.append(f"The chart has the {len(choices)} shapes with the longest dense time; the table has more.")
    if left_out := point_frames.count_without_dense(content.points):
        sentences.append(
            f"{format_count(left_out)} sparse points have no speedup, because no dense time has their shape and "
            "setting: sweep a dense engine at these shapes."
        )
    overall = ranking.build_summary(ordered)
    titles = {
        "lines": "Speedup by sparsity",
        "heat": "The same as a map",
        "rank": "Every engine and pattern in order",
    }
    chart = Chart("shapes", "One shape: speedups and kernels", choices=choices, label="Layer shape", titles=titles)
    tables = [
        (
            "Break-even sparsity: from there up to the highest measured one the pattern is faster than dense (≈: "
            "within the noise; not throughout: only below the highest)",
            _break_even(starts, places),
        ),
        (
            "Kernels over all shapes, with the number of shapes where each is the fastest at its sparsity",
            ranking.build_summary_table(overall),
        ),
    ]
    return Section("shapes", "Shape by shape, kernel by kernel", sentences, [chart], tables)


def _select_drawn(places: Sequence[Place], *frames: pd.DataFrame) -> Sequence[Place]:
    """Select the first of `places`, at least one, that have at most CHART_POINTS rows in these frames."""
    counts = [frame.groupby(point_frames.PLACE, sort=False).size().to_dict() for frame in frames]
    points = np.cumsum([sum(count.get(place, 0) for count in counts) for place in places])
    return places[: max(1, int(np.searchsorted(points, CHART_POINTS, side="right")))]


def _format_levels(levels: Sequence[float]) -> str:
    *others, last = [format_percent(level) for level in levels]
    return f"{', '.join(others)} and {last}" if others else last


def _break_even(break_evens: Mapping[Any, Sequence[Mapping[str, Any]]], places: Sequence[Place]) -> Table:
    patterns = sorted({row["pattern"] for place in places for row in break_evens[place]})
    rows = []
    for place in places:
        starts = {row["pattern"]: _start_cell(row) for row in break_evens[place]}
        cells = [starts.get(pattern, Cell(NOTHING)) for pattern in patterns]
        rows.append([Cell(point_frames.format_place(*place)), *cells])
    return build_table(["layer shape", *(f"#{pattern}" for pattern in patterns)], rows)


def _start_cell(start: Mapping[str, Any]) -> Cell:
    best = f"best {format_ratio(start['best'])} at {format_percent(start['best_sparsity'])}"
    if math.isnan(start["break_even"]):
        if not math.isnan(start["possible"]):
            return Cell("≈ never", 2.0, best, 0.0)  # sorts after every sparsity
        return Cell("not throughout" if start["best"] > 1 else "never", 2.0, best, -0.35)
    text = format_percent_rounded_up(start["break_even"], 3)
    if start["sparsities"] == 1:
        text = f"at {text}"
    elif start["at_lowest"]:
        text = f"≤ {text}"
    unsure = math.isnan(start["certain"])
    return Cell("≈ " * unsure + text, start["break_even"], best, 0.0 if unsure else 1 - start["break_even"])


def build_environment(inputs: ReportInputs) -> Section:
    """Build the section of the device, the software and the settings of measurement."""
    frame = inputs.table
    rows = point_frames.select_layer_rows(frame)
    tables = [("Settings of measurement; several values of one setting are kept apart", _method(frame))]
    backends = [
        [
            Cell(str(backend)),
            Cell(_format_versions(part["backend_version"])),
            build_count_cell(part["point_id"].nunique()),
            Cell(_names(part["kernel_used"])),
        ]
        for backend, part in rows.groupby("backend")
    ]
    tables.append(("Engines", build_table(["backend", "version", "#points", "kernels used"], backends)))
    for number, record in enumerate(inputs.environments, start=1):
        title = "Machine and software" if len(inputs.environments) == 1 else f"Machine and software {number}"
        tables.append((title, build_facts(_fact(name, value) for name, value in record.items() if is_known(value))))
    return Section("environment", "Device and settings of measurement", [], [], tables)


def _format_versions(texts: pd.Series) -> str:
    """Return the versions of an engine's package and of its parts, each once."""
    found = list_versions(texts)
    package = " and ".join(found.pop(PACKAGE, ()))
    parts = ", ".join(f"{name} {' and '.join(own)}" for name, own in found.items())
    return f"{package} ({parts})" if parts else package


def _method(frame: pd.DataFrame) -> Table:
    rows = point_frames.select_layer_rows(frame)
    meanings = {
        "rotated": "rotated (copies of the weights in turn, so that they do not stay in the cache)",
        "isolated": "isolated (one layer alone, in its engine's own process)",
        "call": "call (one call at a time from the host)",
    }
    titles = {"dtype_w": "weight type", "dtype_a": "activation type", "dtype_out": "output type"}
    pairs = [
        (titles.get(name, name.replace("_", " ")), meanings.get(value, value))
        for name, value in point_frames.summarise_settings(frame).items()
    ]
    counts = rows["sample_count"].dropna()
    if len(counts):
        middle, fewest, most = (int(counts.agg(how)) for how in ("median", "min", "max"))
        pairs.append(("samples a point", f"{middle} at the median, {fewest} to {most}"))
    if flags := point_frames.count_flags(frame):
        said = ", ".join(f"{FLAGS.get(flag, flag)} {format_count(found)}" for flag, found in flags.items())
        pairs.append(
            ("points that carry a flag", f"{said}, of {format_count(len(point_frames.select_timed_rows(rows)))}")
        )
    first, last = rows["started_at"].min(), rows["started_at"].max()
    if pd.notna(first):
        pairs.append(("measured", f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"))
    return build_facts(pairs)


def _names(column: pd.Series) -> str:
    return ", ".join(sorted(set(column.dropna()) - {""}))


def _fact(name: str, value: Any) -> tuple[str, object]:
    title = name.removesuffix("_bytes").replace("_", " ")
    return title, format_bytes(value) if name.endswith("_bytes") else value


def is_known(value: object) -> bool:
    """Return whether a fact about a machine is known."""
    return value is not None and value != "" and not (isinstance(value, float) and math.isnan(value))


def build_noise(inputs: ReportInputs, content: ReportData) -> Section:
    """Build the section of interval widths, statuses of rows and reasons of failures."""
    frame, widths = inputs.table, content.noise
    ends, failed = point_frames.count_statuses(frame), point_frames.count_failures(frame)
    sentences = [
        "Noise is the width of the 95% interval of each point's median, relative to the median. "
        "Smaller differences are not significant."
    ]
    if said := _pace(point_frames.list_pace(frame)):
        sentences.append(said)
    if len(failed) > FAILURE_REASONS:
        sentences.append(
            f"The table lists the {FAILURE_REASONS} most frequent of {len(failed)} reasons for failures."
        )
    shares = ["median", "p90", "largest"]
    spread = [
        [row["backend"], row["format"], build_count_cell(row["rows"]), *(build_share_cell(row[name]) for name in
        shares),
         build_count_cell(row["noisy"])]
        for row in widths.to_dict("records")
    ]  # fmt: skip
    ended = [
        [row.pop("backend"), *(build_count_cell(count) for count in row.values())] for row in ends.to_dict("records")
    ]
    heads = ["backend", "format", "#points", "#median width", "#90% below", "#widest", "#still noisy"]
    tables = [
        ("Noise by engine and format", build_table(heads, spread)),
        (
            "Statuses of the points; a point that was measured again counts once for each status",
            build_table(["backend", "#statuses", *(f"#{name}" for name in ends.columns[2:])], ended),
        ),
    ]
    if len(failed):
        rows = [
            [row["backend"], str(row["pattern"]), row["status"], str(row["reason"]), build_count_cell(row["rows"])]
            for row in failed.head(FAILURE_REASONS).to_dict("records")
        ]
        tables.append(
            ("Failures by reason", build_table(["backend", "pattern", "status", "reason", "#points"], rows))
        )
    else:
        sentences.append("No point failed.")
    drawn = figures.draw_noise(content.noise_curve) if len(widths) else None  # none where samples are too few
    charts = [Chart("noise", "Share of points by width of the interval", drawn)] if drawn else []
    return Section("noise", "Noise and failures", sentences, charts, tables)


def _pace(ratios: pd.Series) -> str:
    """Return sentences on the pace of the machine by the fixed work beside the points; empty where unknown."""
    if ratios.empty:
        return ""
    middle, most = format_ratio(float(ratios.median())), format_ratio(float(ratios.max()))
    slow = int((ratios > SLOW).sum())
    return (
        f"Fixed work beside the points took {middle} as long as usual at the median point, and {most} at most. "
        f"Beside {format_count(slow)} of {format_count(len(ratios))} points it took over {format_ratio(SLOW)}: their "
        "times may be too long by this factor. Times are shown as measured."
    )


def build_profile(chosen: Profile, layers: pd.DataFrame) -> Section:
    """Build the section of a profile; `layers` is the frame of `report_data.build_profile_layers`."""
    total = chosen.predicted_seconds
    predicted = format_seconds(total, chosen.predicted_low, chosen.predicted_high)
    fixed = format_seconds(chosen.fixed_seconds, chosen.fixed_seconds_low, chosen.fixed_seconds_high)
    ceiling = "Only the times of the layers bound the speedup."
    if chosen.ceiling and chosen.ceiling < overview.MOST_CEILING:
        ceiling = f"The ceiling is {format_ratio(chosen.ceiling)}: the speedup if searched layers took no time."
    sentences = [
        f"The predicted time of the whole model is {predicted}, for a target of {format_ratio(chosen.target)} over "
        f"{chosen.dense_engine} at {format_seconds(chosen.dense_seconds)} (batch {chosen.batch}, "
        f"{format_threads(chosen.threads)}, {chosen.backend} kernels, strategy {chosen.strategy}).",
        f"{fixed} of it, {format_percent(chosen.fixed_seconds / total)}, is fixed: other layers and overhead. "
        f"{ceiling}",
        f"The sum of separate layer times differs from the whole model by {format_percent(chosen.additivity_before)} "
        f"(median), and by {format_percent(chosen.additivity_after)} after the fitted correction. A verification "
        "meets the target with a probability of "
        f"{format_percent(chosen.confidence)}.",
    ]
    if (weights := chosen.weights) is not None:
        sentences.append(
            f"All packed weights take {format_bytes(weights.packed)} of {format_bytes(weights.most)} allowed; dense "
            f"weights take {format_bytes(weights.dense)}."
        )
    rows = [
        [row["name"], row["pattern"], Cell(format_percent(row["sparsity"]), row["sparsity"]),
         Cell(format_seconds(row["seconds"], row["low"], row["high"]), row["seconds"]),
         Cell(format_percent(row["seconds"] / total), row["seconds"]), Cell(f"{row['error']:.3g}", row["error"])]
        for row in layers.to_dict("records")
    ]  # fmt: skip
    heads = ["layer", "pattern", "#sparsity", "#predicted time", "#share of the model", "#relative error"]
    charts = [Chart("profile", "Predicted time of each layer, with its interval", figures.draw_profile(layers))]
    return Section("profile", "The profile", sentences, charts, [("Layer by layer", build_table(heads, rows))])


def build_pruned(manifest: Mapping[str, Any]) -> Section:
    """Build the section of kept weights, and of loss and score after each stage of pruning."""
    layers = list(manifest["layers"].values())
    weights, kept, size = (sum(layer[key] for layer in layers) for key in ("weights", "kept_weights", "packed_bytes"))
    share = format_percent(1 - kept / weights) if weights else NOTHING
    sentence = (
        f"{format_count(kept)} of {format_count(weights)} weights are kept in {len(layers)} layers ({share} pruned); "
        f"packed they take {format_bytes(size)}, dense {format_bytes(4 * weights)}."
    )
    if "stages" not in manifest:  # saved by a training of the user
        return Section("pruned", "The pruned model", [sentence], [], [])
    name = str(manifest["score_name"])
    trained = any(stage.get("training_flop") for stage in manifest["stages"])
    sentence += (
        " The trained model is kept if its loss on training batches is less than that of the best stage before."
        if trained
        else " The stage with the least loss on the calibration data is kept."
    )
    rows = [
        [Cell(stage["name"]), Cell(f"{stage['loss']:.4g}", stage["loss"]),
         Cell(NOTHING) if stage["score"] is None else Cell(format_score(stage["score"], name), stage["score"]),
         *([_fresh_cell(stage), _flop_cell(stage.get("training_flop"))] if trained else []),
         Cell("kept" if stage["name"] == manifest["method"] else "dropped")]
        for stage in manifest["stages"]
    ]  # fmt: skip
    of_training = ["#loss on training batches", "#training FLOP, of dense"] if trained else []
    heads = ["stage", "#calibration loss", f"#{name}", *of_training, "result"]
    stages = build_table(heads, rows)
    return Section("pruned", "The pruned model", [sentence], [], [("Stages", stages)])


def _fresh_cell(stage: Mapping[str, Any]) -> Cell:
    return Cell(f"{stage['fresh_loss']:.4g}", stage["fresh_loss"]) if "fresh_loss" in stage else Cell(NOTHING)


def _flop_cell(flop: Mapping[str, Any] | None) -> Cell:
    return build_share_cell(flop["total"] / flop["dense_total"]) if flop else Cell(NOTHING)


def build_promise(verdict: SpeedupVerdict, chosen: Profile | None, times: pd.DataFrame) -> Section:
    """Build the section of promised and measured times beside the dense engines.

    `times` is the frame of `report_data.build_promise_times`.
    """
    budget = verdict.dense_seconds / verdict.target
    sentences = [
        "Dense engines and the pruned model were timed end to end in turns, each in a process of its own. "
        f"The target of {format_ratio(verdict.target)} leaves {format_seconds(budget)}. A speedup is the median over "
        "rounds in which both models were timed."
    ]
    if verdict.medians_disagree:
        sentences.append(
            f"The ratio of the two median times is {format_ratio(verdict.ratio_of_medians)}, outside the interval: "
            "the machine's speed changed between rounds, and only the paired rounds count."
        )
    if chosen and chosen.ceiling and chosen.ceiling < overview.MOST_CEILING:
        ceiling, reached = format_ratio(chosen.ceiling), format_percent(verdict.measured_speedup / chosen.ceiling)
        sentences.append(f"The ceiling, if searched layers took no time, is {ceiling}; {reached} of it is reached.")
    sentences += [f"{engine} was left out: {reason}" for engine, reason in verdict.left_out.items()]

    rows = [
        [
            row["name"],
            Cell(format_seconds(row["seconds"], row["low"], row["high"]), row["seconds"]),
            Cell(format_ratio(row["speedup"], row["speedup_low"], row["speedup_high"]), row["speedup"]),
        ]
        for row in times.to_dict("records")
    ]
    heads = ["what", "#time", "#speedup"]
    return Section(
        "promise",
        "Promised and measured",
        sentences,
        [
            Chart(
                "promise", "Whole models; the dashed line is the target", figures.draw_promise(times, verdict.target)
            )
        ],
        [("Times", build_table(heads, rows))],
    )


def build_provenance(inputs: ReportInputs, command: Sequence[str]) -> Section:
    """Build the section of files with hashes, versions and the command, and whether the files belong together."""
    files = [[source.role, format_place(source.path), source.digest[:16]] for source in inputs.sources]
    tables = [("Files", build_table(["what", "file", "hash"], files)), *build_versions(command)]
    return Section("provenance", "Provenance", [line for line, _ in check_sources(inputs)], [], tables)


def build_versions(command: Sequence[str]) -> list[tuple[str, Table]]:
    """Build the tables of versions and of the command."""
    versions = [(name, _version(name)) for name in ("latbench", "plotly", "pandas", "numpy", "torch", "numba")]
    return [
        ("Versions that wrote this report", build_facts([*versions, ("python", platform.python_version())])),
        ("Command", build_facts([("this report", " ".join(command))])),
    ]


def check_sources(inputs: ReportInputs) -> list[tuple[str, bool]]:
    """Return a sentence for each pair of files that should belong together, and whether they do."""
    digests = {source.role: source.digest for source in inputs.sources}
    followed = inputs.manifest["files"]["profile.json"] if inputs.manifest else None
    links = [
        ("cost model", "was made from", "table", inputs.model and inputs.model.table_hash, inputs.table_hash),
        ("profile", "was made from", "table", inputs.profile and inputs.profile.table_hash, inputs.table_hash),
        ("pruned model", "follows", "profile", followed, digests.get("profile")),
        ("verification", "is of", "pruned model", inputs.verdict and inputs.verdict.inputs, inputs.manifest_hash),
        (
            "list of milder targets",
            "is of",
            "profile",
            inputs.milder and inputs.milder.profile,
            digests.get("profile"),
        ),
    ]
    found = [
        (f"The {one} {verb} {'this very' if theirs == ours else 'another'} {other}.", theirs == ours)
        for one, verb, other, theirs, ours in links
        if theirs and ours
    ]
    return [*found, *((sentence, False) for sentence in _strangers(inputs))]


def _strangers(inputs: ReportInputs) -> list[str]:
    """Return sentences on files of different devices, threads, tasks or targets."""
    measured = point_frames.summarise_settings(inputs.table)
    sentences = []
    for name, record in (("profile", inputs.profile), ("verification", inputs.verdict)):
        for what, value in (("device", record and record.device), ("threads", record and str(record.threads))):
            if value and value not in measured[what].split(", "):
                sentences.append(f"The {name} is of {what} {value}, the table of {what} {measured[what]}.")
    if inputs.profile and inputs.verdict:
        for what in ("task", "target", "batch"):
            ours, theirs = getattr(inputs.profile, what), getattr(inputs.verdict, what)
            if ours != theirs:
                sentences.append(f"The verification is of {what} {theirs}, the profile of {what} {ours}.")
    return sentences


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


ACCURACY = {
    "median": "half of the points are predicted within",
    "p90": "nine of ten within",
    "mape": "mean absolute error",
    "within_5": "points predicted within 5%",
    "within_10": "points predicted within 10%",
    "nominal_coverage": "nominal coverage of the intervals",
    "coverage": "measured coverage",
    "width": "relative width of the intervals",
    "noise_floor": "noise floor: median error of a model that knows every true time",
}


def build_cost_model(model: ModelFile, held_out: pd.DataFrame | None) -> Section:
    """Build the section of the cost model's errors on held-out points, beside the noise of the measurements.

    `held_out` is the frame of `predictions.build_frame`, None where there is nothing to show.
    """
    settings = ", ".join(f"{name} {value}" for name, value in sorted(model.estimator.get_params().items()))
    methods, title = model.validation, "Errors of the cost model"
    sentences = [
        f"{type(model.estimator).__name__}"
        + (f" ({settings})" if settings else "")
        + ". Errors are those of held-out "
        "points: whole shapes, or whole sparsities. The noise floor is the median error of a model that knows every "
        "true time, because measured times are not exact."
    ]
    charts, tables = [], []
    if held_out is None:
        sentences.append("No point could be held out and predicted: the table is another one, or has too few shapes.")
    else:
        sentences.append(predictions.format_coverage(held_out))
        caption = f"Predicted over measured time, {held_out['held_out'].iloc[0]}; a cross is outside its interval"
        charts.append(Chart("predictions", caption, predictions.draw_figure(held_out)))
    if methods:
        rows = [
            [Cell(meaning), *(build_share_cell(figures_of.get(key)) for figures_of in methods.values())]
            for key, meaning in ACCURACY.items()
        ]
        counts = [build_count_cell(int(figures_of.get("held_out") or 0)) for figures_of in methods.values()]
        heads = ["figure", *(f"#{method}" for method in methods)]
        charts.append(
            Chart("model", "Errors of held-out predictions, with the noise floor", figures.draw_model_errors(methods))
        )
        tables.append(("On held-out points", build_table(heads, [*rows, [Cell("held-out points"), *counts]])))
    else:
        sentences.append("The model file has no validation.")
    return Section("model", title, sentences, charts, tables)
