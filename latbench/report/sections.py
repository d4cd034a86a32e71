"""What each section says: from a report's inputs to sentences, tables and charts, still without HTML."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latbench.base.bundled_data import format_place
from latbench.base.number_format import (
    NOTHING,
    format_bytes,
    format_count,
    format_percent,
    format_percent_rounded_up,
    format_ratio,
    format_seconds,
    format_threads,
)
from latbench.report import figures, overview, predictions, ranking
from latbench.report import frames as data
from latbench.report.elements import Cell, Chart, Section, Table, count_cell, facts, share_cell, table
from latbench.report.inputs import Inputs
from latbench.report.report_data import Content

if TYPE_CHECKING:
    from cost_models.storage import ModelFile
    from search.artifacts.profile import Profile
    from search.pipeline.verify import SpeedupVerdict

Place = tuple[str, str]

FLAGS = {
    "in_cache": "in_cache (small weights, whose copies may all have stayed in the cache)",
    "no_roofline": "no_roofline (the device's limits were unknown)",
    "preempted": "preempted (others took the cores, or a host moved them apart, in all tries)",
    "slow_spell": "slow_spell (the machine was slower than in the rest of the sweep)",
    "spike": "spike (far above both neighbouring sparsities, twice)",
}
CHART_POINTS = 12_000  # that the interactive chart carries over all shapes, some 180 bytes each
SLOW = 1.1  # times as long as usual, from which on a point is pointed at
FAILURE_REASONS = 200  # rows of the failure table; the counts above it cover all


def shapes(content: Content, places: Sequence[Place]) -> Section:
    """Of each of `places`: speedup over sparsity, the same as a map, and all kernels ranked; break-evens of all."""
    choices: list[tuple[str, Mapping[str, figures.Figure]]] = []
    ordered = ranking.at_levels(content.ranked, content.speedups)
    drawn = _that_fit(places, content.speedups, ordered)
    gains, ranked = (data.by_place(data.at(frame, drawn)) for frame in (content.speedups, ordered))
    starts = data.by_place(data.at(content.break_evens, places))
    for place in drawn:
        rank = ranking.figure(ranked[place], gains[place][0]["dense_seconds"])
        choices.append((data.place_label(*place), {**figures.shape_view(gains[place], starts[place]), "rank": rank}))
    sentences = [
        "Every sparse kernel is set against the fastest dense engine timed at the same shape in the same way; that "
        "engine is named in each chart. Above the line at 1× sparse is faster. A ring marks the break-even sparsity, "
        "above which a pattern stays faster up to the highest sparsity measured (log speedup is interpolated between "
        "measured points). Bars are 95% intervals, both times at their worst and at their best. Below, every engine "
        f"and pattern at that shape in order, dense and at {_listed(data.levels(content.speedups, ranking.LEVELS))}."
    ]
    if len(choices) < len(places):
        sentences.append(f"The chart carries the {len(choices)} shapes with the longest dense time, the table more.")
    if left_out := data.without_dense(content.points):
        sentences.append(
            f"{format_count(left_out)} sparse points have no dense time at their shape and setting, "
            "so no speedup: sweep a dense engine at these shapes to see them."
        )
    overall = ranking.summary(ordered)
    titles = {
        "lines": "Speedup over sparsity",
        "heat": "The same as a map",
        "rank": "Every engine and pattern in order",
    }
    chart = Chart("shapes", "One shape: speedups and kernels", choices=choices, label="Layer shape", titles=titles)
    tables = [
        (
            "Break-even sparsity: from there on, up to the highest measured, the pattern is faster than dense (≈: "
            "not beyond the noise; not for good: only below the highest)",
            _break_even(starts, places),
        ),
        ("Kernels over all shapes: how often each is the fastest at its sparsity", ranking.summary_table(overall)),
    ]
    return Section("shapes", "Shape by shape, kernel by kernel", sentences, [chart], tables)


def _that_fit(places: Sequence[Place], *frames: pd.DataFrame) -> Sequence[Place]:
    """The first of `places`, one at least, that have no more than CHART_POINTS rows in these frames."""
    counts = [frame.groupby(data.PLACE, sort=False).size().to_dict() for frame in frames]
    points = np.cumsum([sum(count.get(place, 0) for count in counts) for place in places])
    return places[: max(1, int(np.searchsorted(points, CHART_POINTS, side="right")))]


def _listed(levels: Sequence[float]) -> str:
    *others, last = [format_percent(level) for level in levels]
    return f"{', '.join(others)} and {last}" if others else last


def _break_even(break_evens: Mapping[Any, Sequence[Mapping[str, Any]]], places: Sequence[Place]) -> Table:
    patterns = sorted({row["pattern"] for place in places for row in break_evens[place]})
    rows = []
    for place in places:
        starts = {row["pattern"]: _start_cell(row) for row in break_evens[place]}
        cells = [starts.get(pattern, Cell(NOTHING)) for pattern in patterns]
        rows.append([Cell(data.place_label(*place)), *cells])
    return table(["layer shape", *(f"#{pattern}" for pattern in patterns)], rows)


def _start_cell(start: Mapping[str, Any]) -> Cell:
    best = f"best {format_ratio(start['best'])} at {format_percent(start['best_sparsity'])}"
    if math.isnan(start["break_even"]):
        if not math.isnan(start["possible"]):
            return Cell("≈ never", 2.0, best, 0.0)  # sorts after every sparsity
        return Cell("not for good" if start["best"] > 1 else "never", 2.0, best, -0.35)
    text = format_percent_rounded_up(start["break_even"], 3)
    if start["sparsities"] == 1:
        text = f"at {text}"
    elif start["at_lowest"]:
        text = f"≤ {text}"
    unsure = math.isnan(start["certain"])
    return Cell("≈ " * unsure + text, start["break_even"], best, 0.0 if unsure else 1 - start["break_even"])


def environment(inputs: Inputs) -> Section:
    """The device, the software, and how every row was measured."""
    frame = inputs.table
    rows = data.layer_rows(frame)
    tables = [("How it was measured: one value holds for all rows, several are kept apart", _method(frame))]
    backends = [
        [
            Cell(str(backend)),
            Cell(_names(part["backend_version"])),
            count_cell(part["point_id"].nunique()),
            Cell(_names(part["kernel_used"])),
        ]
        for backend, part in rows.groupby("backend")
    ]
    tables.append(("Engines", table(["backend", "version", "#points", "kernels used"], backends)))
    for number, record in enumerate(inputs.environments, start=1):
        title = "Machine and software" if len(inputs.environments) == 1 else f"Machine and software {number}"
        tables.append((title, facts(_fact(name, value) for name, value in record.items() if says_something(value))))
    return Section("environment", "Device, and how it was measured", [], [], tables)


def _method(frame: pd.DataFrame) -> Table:
    rows = data.layer_rows(frame)
    meanings = {
        "rotated": "rotated (copies of the weights in turn, so that they do not stay in the cache)",
        "isolated": "isolated (one layer alone, in its engine's own process)",
        "call": "call (one call at a time from the host)",
    }
    titles = {"dtype_w": "weight type", "dtype_a": "activation type", "dtype_out": "output type"}
    pairs = [
        (titles.get(name, name.replace("_", " ")), meanings.get(value, value))
        for name, value in data.settings(frame).items()
    ]
    counts = rows["sample_count"].dropna()
    if len(counts):
        middle, fewest, most = (int(counts.agg(how)) for how in ("median", "min", "max"))
        pairs.append(("samples a point", f"{middle} at the median, {fewest} to {most}"))
    if flags := data.flag_counts(frame):
        said = ", ".join(f"{FLAGS.get(flag, flag)} {format_count(found)}" for flag, found in flags.items())
        pairs.append(("points that carry a flag", f"{said}, of {format_count(len(data.timed_rows(rows)))}"))
    first, last = rows["started_at"].min(), rows["started_at"].max()
    if pd.notna(first):
        pairs.append(("measured", f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"))
    return facts(pairs)


def _names(column: pd.Series) -> str:
    return ", ".join(sorted(set(column.dropna()) - {""}))


def _fact(name: str, value: Any) -> tuple[str, object]:
    title = name.removesuffix("_bytes").replace("_", " ")
    return title, format_bytes(value) if name.endswith("_bytes") else value


def says_something(value: object) -> bool:
    """Whether a fact about a machine is known."""
    return value is not None and value != "" and not (isinstance(value, float) and math.isnan(value))


def noise(inputs: Inputs, content: Content) -> Section:
    """How wide the intervals are, how the rows ended and why some failed."""
    frame, widths = inputs.table, content.noise
    ends, failed = data.statuses(frame), data.failures(frame)
    sentences = [
        "The width of the 95% interval of each point's median, relative to the median. "
        "Differences smaller than this are noise."
    ]
    if said := _pace(data.pace(frame)):
        sentences.append(said)
    if len(failed) > FAILURE_REASONS:
        sentences.append(f"The {FAILURE_REASONS} most frequent of {len(failed)} reasons for failures are listed.")
    shares = ["median", "p90", "largest"]
    spread = [
        [row["backend"], row["format"], count_cell(row["rows"]), *(share_cell(row[name]) for name in shares),
         count_cell(row["noisy"])]
        for row in widths.to_dict("records")
    ]  # fmt: skip
    ended = [[row.pop("backend"), *(count_cell(count) for count in row.values())] for row in ends.to_dict("records")]
    heads = ["backend", "format", "#points", "#median width", "#90% below", "#widest", "#still noisy"]
    tables = [
        ("Noise by engine and format", table(heads, spread)),
        (
            "How the points ended; one that was measured again counts once for each end",
            table(["backend", "#ends", *(f"#{name}" for name in ends.columns[2:])], ended),
        ),
    ]
    if len(failed):
        rows = [
            [row["backend"], str(row["pattern"]), row["status"], str(row["reason"]), count_cell(row["rows"])]
            for row in failed.head(FAILURE_REASONS).to_dict("records")
        ]
        tables.append(("Failures by reason", table(["backend", "pattern", "status", "reason", "#points"], rows)))
    else:
        sentences.append("No point failed.")
    drawn = figures.noise(content.noise_curve) if len(widths) else None  # none where samples are too few
    charts = [Chart("noise", "Share of points within a width", drawn)] if drawn else []
    return Section("noise", "Noise and failures", sentences, charts, tables)


def _pace(ratios: pd.Series) -> str:
    """How slow the machine was while points were timed, as the fixed work beside them told; empty where unknown."""
    if ratios.empty:
        return ""
    middle, most = format_ratio(float(ratios.median())), format_ratio(float(ratios.max()))
    slow = int((ratios > SLOW).sum())
    return (
        f"Fixed work that was timed beside the points took {middle} as long as usual at the median point, {most} at "
        f"most; beside {format_count(slow)} of {format_count(len(ratios))} it took over {format_ratio(SLOW)}, and "
        "these may be too slow by as much. Times are shown as they were measured."
    )


def profile(chosen: Profile, layers: pd.DataFrame) -> Section:
    """Layer by layer: pattern, sparsity, predicted time. `layers`: content.profile_layers."""
    total = chosen.predicted_seconds
    predicted = format_seconds(total, chosen.predicted_low, chosen.predicted_high)
    fixed = format_seconds(chosen.fixed_seconds, chosen.fixed_seconds_low, chosen.fixed_seconds_high)
    ceiling = "So nothing but the layers' own times bounds the speedup."
    if chosen.ceiling and chosen.ceiling < overview.MOST_TOLD:
        ceiling = f"So the ceiling is {format_ratio(chosen.ceiling)}: the speedup if searched layers took no time."
    sentences = [
        f"Predicted for the whole model: {predicted}, for a target of {format_ratio(chosen.target)} over "
        f"{chosen.dense_engine} at {format_seconds(chosen.dense_seconds)}; batch {chosen.batch}, "
        f"{format_threads(chosen.threads)}, {chosen.backend} kernels, strategy {chosen.strategy}.",
        f"{fixed} of it, {format_percent(chosen.fixed_seconds / total)}, is fixed: layers and overhead that are not "
        f"searched. {ceiling}",
        f"The sum of the layers' times, each on its own, missed the whole model by "
        f"{format_percent(chosen.additivity_before)} (median); with what was fitted around them, by "
        f"{format_percent(chosen.additivity_after)}. A verification meets the target with a probability of "
        f"{format_percent(chosen.risk)}.",
    ]
    if (weights := chosen.weights) is not None:
        sentences.append(
            f"All weights of the model, packed, take {format_bytes(weights.packed)} of the "
            f"{format_bytes(weights.most)} "
            f"that they were allowed; dense they take {format_bytes(weights.dense)}."
        )
    rows = [
        [row["name"], row["pattern"], Cell(format_percent(row["sparsity"]), row["sparsity"]),
         Cell(format_seconds(row["seconds"], row["low"], row["high"]), row["seconds"]),
         Cell(format_percent(row["seconds"] / total), row["seconds"]), Cell(f"{row['error']:.3g}", row["error"])]
        for row in layers.to_dict("records")
    ]  # fmt: skip
    heads = ["layer", "pattern", "#sparsity", "#predicted time", "#share of the model", "#relative error"]
    charts = [Chart("profile", "Predicted time of each layer, with its interval", figures.profile(layers))]
    return Section("profile", "The profile", sentences, charts, [("Layer by layer", table(heads, rows))])


def pruned(manifest: Mapping[str, Any]) -> Section:
    """What is left of the weights, and what each stage of pruning made of loss and score."""
    layers = list(manifest["layers"].values())
    weights, kept, size = (sum(layer[key] for layer in layers) for key in ("weights", "kept_weights", "packed_bytes"))
    share = format_percent(1 - kept / weights) if weights else NOTHING
    sentence = (
        f"{format_count(kept)} of {format_count(weights)} weights are kept in {len(layers)} layers ({share} pruned); "
        f"packed they take {format_bytes(size)}, dense {format_bytes(4 * weights)}."
    )
    if "stages" not in manifest:  # saved from a user's own training
        return Section("pruned", "The pruned model", [sentence], [], [])
    sentence += " The stage with the least loss on the calibration data is kept."
    name = str(manifest["score_name"])
    trained = any(stage.get("training_flop") for stage in manifest["stages"])
    rows = [
        [Cell(stage["name"]), Cell(f"{stage['loss']:.4g}", stage["loss"]),
         Cell(overview.score(stage["score"], name), stage["score"]),
         *([_flop_cell(stage.get("training_flop"))] if trained else []),
         Cell("kept" if stage["name"] == manifest["method"] else "left")]
        for stage in manifest["stages"]
    ]  # fmt: skip
    heads = ["stage", "#calibration loss", f"#{name}", *(["#training FLOP, of dense"] if trained else []), "result"]
    stages = table(heads, rows)
    return Section("pruned", "The pruned model", [sentence], [], [("Stages", stages)])


def _flop_cell(flop: Mapping[str, Any] | None) -> Cell:
    return share_cell(flop["total"] / flop["dense_total"]) if flop else Cell(NOTHING)


def promise(verdict: SpeedupVerdict, chosen: Profile | None, times: pd.DataFrame) -> Section:
    """Promised and measured, beside the dense engines it was measured against. `times`: content.promise_times."""
    budget = verdict.dense_seconds / verdict.target
    sentences = [
        "Dense engines and pruned model were timed end to end, each engine in a process of its own, in turns. "
        f"The target of {format_ratio(verdict.target)} leaves {format_seconds(budget)}."
    ]
    if chosen and chosen.ceiling and chosen.ceiling < overview.MOST_TOLD:
        ceiling, reached = format_ratio(chosen.ceiling), format_percent(verdict.measured_speedup / chosen.ceiling)
        sentences.append(f"The ceiling, with every searched layer free, is {ceiling}: {reached} of it is reached.")
    sentences += [f"{engine} was left out: {reason}" for engine, reason in verdict.left_out.items()]

    def gain(row: Mapping[Any, Any]) -> Cell:
        # The measured one is that of dense and pruned calls in turns, not of two medians.
        found = verdict.measured_speedup if row["kind"] == "measured" else verdict.dense_seconds / row["seconds"]
        return Cell(format_ratio(found), found)

    rows = [
        [row["name"], Cell(format_seconds(row["seconds"], row["low"], row["high"]), row["seconds"]), gain(row)]
        for row in times.to_dict("records")
    ]
    heads = ["what", "#time", "#speedup"]
    return Section(
        "promise",
        "Promised and measured",
        sentences,
        [Chart("promise", "Whole-model times; the dashed line is the target", figures.promise(times, budget))],
        [("Times", table(heads, rows))],
    )


def provenance(inputs: Inputs, command: Sequence[str]) -> Section:
    """Where it all comes from: files with their hashes, versions, the command; whether the files belong together."""
    files = [[source.role, format_place(source.path), source.digest[:16]] for source in inputs.sources]
    tables = [("Files", table(["what", "file", "hash"], files)), *made_with(command)]
    return Section("provenance", "Provenance", [line for line, _ in belonging(inputs)], [], tables)


def made_with(command: Sequence[str]) -> list[tuple[str, Table]]:
    """What wrote this report: versions and the command."""
    versions = [(name, _version(name)) for name in ("latbench", "plotly", "pandas", "numpy", "torch", "numba")]
    return [
        ("Versions that wrote this report", facts([*versions, ("python", platform.python_version())])),
        ("Command", facts([("this report", " ".join(command))])),
    ]


def belonging(inputs: Inputs) -> list[tuple[str, bool]]:
    """Sentences that say whether the given files were made from each other, and whether that is so."""
    digests = {source.role: source.digest for source in inputs.sources}
    followed = inputs.manifest["files"]["profile.json"] if inputs.manifest else None
    links = [
        ("cost model", "was made from", "table", inputs.model and inputs.model.table_hash, inputs.table_hash),
        ("profile", "was made from", "table", inputs.profile and inputs.profile.table_hash, inputs.table_hash),
        ("pruned model", "follows", "profile", followed, digests.get("profile")),
        ("verification", "is of", "pruned model", inputs.verdict and inputs.verdict.inputs, inputs.manifest_hash),
    ]
    found = [
        (f"The {one} {verb} {'this very' if theirs == ours else 'another'} {other}.", theirs == ours)
        for one, verb, other, theirs, ours in links
        if theirs and ours
    ]
    return [*found, *((sentence, False) for sentence in _strangers(inputs))]


def _strangers(inputs: Inputs) -> list[str]:
    """Where the given files are of unlike devices, threads, tasks or targets."""
    measured = data.settings(inputs.table)
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
    "nominal_coverage": "share that the intervals promise to hold",
    "coverage": "share that they hold",
    "width": "width of the intervals, relative",
    "noise_floor": "noise floor: half of the points for one who knew every true time",
}


def cost_model(model: ModelFile, held_out: pd.DataFrame | None) -> Section:
    """How well the cost model predicts what it has not seen, beside the noise of the measurements themselves.

    held_out: predictions.tidy, None where there is nothing to show.
    """
    settings = ", ".join(f"{name} {value}" for name, value in sorted(model.estimator.get_params().items()))
    methods, title = model.validation, "How well the cost model predicts"
    sentences = [
        f"{type(model.estimator).__name__}" + (f" ({settings})" if settings else "") + ". Errors are those of points "
        "that were held out, whole shapes or whole sparsities at a time. The noise floor is the median error "
        "that knowing every true time would leave, since the measured ones are not exact."
    ]
    charts, tables = [], []
    if held_out is None:
        sentences.append(
            "No point could be held out and predicted anew: the table is another, or has too few shapes."
        )
    else:
        sentences.append(predictions.sentence(held_out))
        caption = f"Predicted against measured, {held_out['held_out'].iloc[0]}; a cross is outside its interval"
        charts.append(Chart("predictions", caption, predictions.figure(held_out)))
    if methods:
        rows = [
            [Cell(meaning), *(share_cell(figures_of.get(key)) for figures_of in methods.values())]
            for key, meaning in ACCURACY.items()
        ]
        counts = [count_cell(int(figures_of.get("held_out") or 0)) for figures_of in methods.values()]
        heads = ["figure", *(f"#{method}" for method in methods)]
        charts.append(
            Chart("model", "Errors of held-out predictions, with the noise floor", figures.accuracy(methods))
        )
        tables.append(("On held-out points", table(heads, [*rows, [Cell("held-out points"), *counts]])))
    else:
        sentences.append("It was saved without a validation.")
    return Section("model", title, sentences, charts, tables)
