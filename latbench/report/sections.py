"""What each section says: from a report's inputs to sentences, tables and charts, still without HTML."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pandas as pd

from latbench.report import data, figures, units
from latbench.report.inputs import Inputs
from latbench.report.views import Cell, Chart, Section, Table, Tile, facts, table

CHART_POINTS = 30_000  # points that the interactive chart of all shapes carries, some 100 bytes each
FAILURE_REASONS = 200  # rows of the failure table; the counts above it cover all


def shapes(speedups: pd.DataFrame, break_evens: pd.DataFrame, left_out: int) -> Section:
    """Speedup over the fastest dense engine: chart and heat map a shape, break-even sparsities of all shapes."""
    choices, points = [], 0
    largest = speedups.groupby(data.PLACE)["dense_seconds"].first().sort_values(ascending=False)
    by_place = dict(iter(speedups.groupby(data.PLACE)))
    starts = dict(iter(break_evens.groupby(data.PLACE)))
    for place in largest.index:
        rows = by_place[place]
        points += len(rows)
        if choices and points > CHART_POINTS:
            break
        choices.append((place_label(*place), figures.shape_view(rows, starts[place])))
    sentences = [
        "Every sparse kernel is set against the fastest dense engine timed at the same shape in the same way; that "
        "engine is named in each chart. Above the line at 1× sparse is faster. A ring marks the break-even sparsity, "
        "above which a pattern stays faster up to the highest sparsity measured (log speedup is interpolated between "
        "measured points). Bars are 95% intervals, both times at their worst and at their best."
    ]
    if len(choices) < len(largest):
        sentences.append(
            f"The chart carries the {len(choices)} shapes with the longest dense time of {len(largest)}; "
            "the tables carry all."
        )
    if left_out:
        sentences.append(
            f"{units.count(left_out)} sparse points have no dense time at their shape and setting, "
            "so no speedup: sweep a dense engine at these shapes to see them."
        )
    return Section(
        "shapes",
        "Speedup by pattern, sparsity and shape",
        sentences,
        [Chart("shapes", "Speedup over sparsity, and the same as a map", choices=choices, label="Layer shape")],
        [("Break-even sparsity of each pattern: from there on it is faster than dense", _break_even(break_evens))],
    )


def place_label(setting: str, shape: str) -> str:
    """A shape with its setting, which is empty when all rows share one."""
    return f"{shape} ({setting})" if setting else shape


def _break_even(break_evens: pd.DataFrame) -> Table:
    patterns = sorted(break_evens["pattern"].unique())
    rows = []
    for place, group in break_evens.groupby(data.PLACE, sort=False):
        starts = group.set_index("pattern").to_dict("index")
        cells = [_start_cell(starts[pattern]) if pattern in starts else Cell(units.NOTHING) for pattern in patterns]
        rows.append([Cell(place_label(*place)), *cells])
    return table(["layer shape", *(f"#{pattern}" for pattern in patterns)], rows)


def _start_cell(start: Mapping[str, Any]) -> Cell:
    best = f"best {units.ratio(start['best'])} at {units.percent(start['best_sparsity'])}"
    if math.isnan(start["break_even"]):
        return Cell("never", 2.0, best, -0.35)  # sorts after every sparsity
    text = units.percent(round(start["break_even"], 3))
    return Cell(f"≤ {text}" if start["at_lowest"] else text, start["break_even"], best, 1 - start["break_even"])


def verdicts(speedups: pd.DataFrame, break_evens: pd.DataFrame) -> Table:
    """One row a shape: what to use in a sentence, the fastest pattern at the common sparsities, the dense time."""
    shown = data.levels(speedups)
    best = data.fastest_pattern(speedups)
    ceiling = max(math.log2(max(best["speedup"].max(), 1.01)), 1.0)
    starts = dict(iter(break_evens.groupby(data.PLACE)))
    rows = []
    for place, group in best.groupby(data.PLACE, sort=False):
        at = {row["sparsity"]: row for row in group.to_dict("records")}
        cells = [_gain_cell(at[level], ceiling) if level in at else Cell(units.NOTHING) for level in shown]
        first = group.iloc[0]
        dense = Cell(units.seconds(first["dense_seconds"]), first["dense_seconds"], str(first["dense_engine"]))
        start = starts[place]["break_even"].min()
        verdict = Cell(verdict_sentence(starts[place], group), 2.0 if math.isnan(start) else start)
        rows.append([Cell(place_label(*place)), verdict, *cells, dense])
    headings = [f"#at {units.percent(level)}" for level in shown]
    return table(["layer shape", "verdict", *headings, "#fastest dense"], rows)


def _gain_cell(row: Mapping[str, Any], ceiling: float) -> Cell:
    gain, pattern = float(row["speedup"]), str(row["pattern"])
    unsure = row["speedup_low"] <= 1 <= row["speedup_high"]
    tint = max(-1.0, min(1.0, math.log2(gain) / ceiling))
    return Cell(("≈ " if unsure else "") + units.ratio(gain), gain, pattern, 0.0 if unsure else tint)


def verdict_sentence(break_evens: pd.DataFrame, best: pd.DataFrame) -> str:
    """What to use at one shape. `best`: the fastest pattern at each sparsity, `break_evens`: of each pattern there."""
    paying = break_evens.dropna(subset="break_even").sort_values("break_even")
    if paying.empty:
        top = best.loc[best["speedup"].idxmax()]
        if top["speedup"] <= 1:
            return "Stay dense: nothing measured is faster."
        gain, at = units.ratio(top["speedup"]), units.percent(top["sparsity"])
        return f"No lasting gain: {gain} with {top['pattern']} at {at}, lost again above."
    earliest = paying.iloc[0]
    start = units.percent(round(float(earliest["break_even"]), 2))
    sentence = f"{earliest['pattern']} pays from {'' if not earliest['at_lowest'] else 'at most '}{start}"
    top = best.iloc[-1]
    if top["pattern"] != earliest["pattern"]:
        sentence += f"; {top['pattern']} is fastest at {units.percent(top['sparsity'])}"
    free = paying[paying["pattern"] == "unstructured"]
    if earliest["pattern"] != "unstructured" and "unstructured" in set(break_evens["pattern"]):
        sentence += (
            "; unstructured never"
            if free.empty
            else f"; unstructured from {units.percent(round(float(free['break_even'].iloc[0]), 2))}"
        )
    return sentence + "."


def overview(speedups: pd.DataFrame, break_evens: pd.DataFrame, noise: pd.DataFrame) -> tuple[str, list[Tile]]:
    """What the table alone answers: a sentence and tiles."""
    count = len(speedups.groupby(data.PLACE))
    best = data.fastest_pattern(speedups)
    starts = break_evens.groupby(data.PLACE)["break_even"].min()
    paying = int(starts.notna().sum())
    level = min(data.levels(speedups), key=lambda sparsity: abs(sparsity - 0.75))
    at_level = best[best["sparsity"] == level]
    gains, favourite = at_level["speedup"], at_level["pattern"].mode().iloc[0]
    lead = (
        f"{paying} of {count} layer shapes run faster sparse than on the fastest dense engine. "
        f"At {units.percent(level)} the pattern that wins most often is {favourite}; the fastest pattern gives "
        f"{units.ratio(gains.median())} at the median shape ({units.ratio(gains.min())} to {units.ratio(gains.max())})."
    )
    width = noise["median"].median() if len(noise) else None
    tiles = [
        Tile("Shapes that gain", f"{paying} of {count}", "some pattern is faster than the fastest dense engine"),
        Tile(f"Gain at {units.percent(level)}", units.ratio(gains.median()), f"median shape; {favourite} wins most often"),
        Tile(
            "Pays from",
            units.percent(round(float(starts.median()), 2)) if paying else "never",
            "median break-even sparsity of the best pattern",
        ),
        Tile("Noise", units.percent(width), "typical width of a time's 95% interval"),
    ]
    return lead, tiles


def promise_overview(inputs: Inputs) -> tuple[str, str, tuple[str, str], list[Tile]]:
    """Title, lead sentence, badge (kind, text) and tiles of a verified promise."""
    found = inputs.verification or {}
    profile = inputs.profile or {}
    task = task_name(inputs)
    target, gain = units.ratio(found["target"]), units.ratio(found["measured_speedup"])
    met = bool(found["met"])
    dense = found["measured_seconds"] * found["measured_speedup"]
    engine = dense_engine(inputs)
    inside = found["predicted_low"] <= found["measured_seconds"] <= found["predicted_high"]
    off = found["measured_seconds"] / found["predicted_seconds"] - 1
    title = f"{task} runs {gain} faster" + (", as promised" if met else f", not the {target} promised")
    lead = (
        f"{target} over the fastest dense engine was the target. Measured end to end, dense and pruned in turn, the "
        f"pruned model takes {units.seconds(found['measured_seconds'])} where {engine} takes {units.seconds(dense)}: "
        f"{gain}. The prediction was {units.seconds(found['predicted_seconds'])}; the measurement lies "
        f"{units.percent(abs(off))} {'above' if off > 0 else 'below'} it, {'inside' if inside else 'outside'} the interval."
    )
    low, high = units.seconds(found["predicted_low"]), units.seconds(found["predicted_high"])
    tiles = [
        Tile("Target", target, "over the fastest dense engine, end to end"),
        Tile("Measured", gain, f"{units.seconds(found['measured_seconds'])} instead of {units.seconds(dense)} ({engine})"),
        Tile("Predicted", units.seconds(found["predicted_seconds"]), f"interval {low} to {high}"),
        score_tile(found),
    ]
    if profile.get("ceiling"):
        tiles.append(Tile("Ceiling", units.ratio(profile["ceiling"]), "if every pruned layer took no time at all"))
    return title, lead, ("kept", "promise kept") if met else ("missed", "promise missed"), tiles


def score_tile(found: Mapping[str, Any]) -> Tile:
    """The task's score before and after."""
    name, dense, pruned = str(found.get("score_name") or "score"), found["score_dense"], found["score_pruned"]
    return Tile(name.capitalize(), score(pruned, name), f"pruned; {score(dense, name)} dense")


def score(value: float | None, name: str = "") -> str:
    """A score as text: a percentage where its name says that it is a share, else four significant digits."""
    if value is None:
        return units.NOTHING
    is_share = 0 <= value <= 1 and any(word in name.lower() for word in ("accuracy", "share", "fraction"))
    return f"{100 * value:.2f}%" if is_share else f"{value:.4g}"


def task_name(inputs: Inputs) -> str:
    """The task as the profile names it."""
    for source in (inputs.verification, inputs.profile, inputs.manifest):
        if source and source.get("task"):
            return str(source["task"])
    return "the model"


def dense_engine(inputs: Inputs) -> str:
    """The fastest dense engine of the verification, or the one the profile was searched against."""
    for source in (inputs.verification, inputs.profile):
        if source and source.get("dense_engine"):
            return str(source["dense_engine"])
    return "the fastest dense engine"


def environment(inputs: Inputs) -> Section:
    """The device, the software, and how every row was measured."""
    frame = inputs.table
    rows = data.layer_rows(frame)
    tables = [("How it was measured: one value holds for all rows, several are kept apart", _method(frame))]
    backends = [
        [str(backend), ", ".join(sorted(set(part["backend_version"].dropna()))), Cell(units.count(len(part)), len(part)),
         ", ".join(sorted(set(part["kernel_used"].dropna()) - {""})[:12])]
        for backend, part in rows.groupby("backend")
    ]  # fmt: skip
    tables.append(("Engines", table(["backend", "version", "#rows", "kernels used"], backends)))
    for number, record in enumerate(inputs.environments, start=1):
        title = "Machine and software" if len(inputs.environments) == 1 else f"Machine and software {number}"
        known = [(name.replace("_", " "), value) for name, value in record.items() if _says_something(value)]
        tables.append((title, facts(known)))
    return Section("environment", "Device, and how it was measured", [], [], tables)


def _method(frame: pd.DataFrame) -> Table:
    rows = data.layer_rows(frame)
    meanings = {
        "rotated": "rotated (copies of the weights in turn, so that they do not stay in the cache)",
        "isolated": "isolated (one layer alone, in its engine's own process)",
        "call": "call (one call at a time from the host)",
    }
    pairs = [(name.replace("_", " "), meanings.get(value, value)) for name, value in data.settings(frame).items()]
    counts = rows["sample_count"].dropna()
    if len(counts):
        pairs.append(("samples a point", f"{int(counts.median())} at the median, {int(counts.min())} to {int(counts.max())}"))
    first, last = rows["started_at"].min(), rows["started_at"].max()
    if pd.notna(first):
        pairs.append(("measured", f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"))
    return facts(pairs)


def _says_something(value: object) -> bool:
    return value is not None and value != "" and not (isinstance(value, float) and math.isnan(value))


def noise(inputs: Inputs) -> Section:
    """How wide the intervals are, how the rows ended and why some failed."""
    frame = inputs.table
    widths, ends, failed = data.noise(frame), data.statuses(frame), data.failures(frame)
    sentences = [
        "The width of the 95% interval of each row's median, relative to the median: differences smaller than this are noise."
    ]
    if len(failed) > FAILURE_REASONS:
        sentences.append(f"The {FAILURE_REASONS} most frequent of {len(failed)} reasons for failures are listed.")
    tables = [
        ("Noise by engine and format", table(
            ["backend", "format", "#rows", "#median width", "#90% below", "#widest", "#noisy rows"],
            [[row["backend"], row["format"], _count_cell(row["rows"]), _share_cell(row["median"]), _share_cell(row["p90"]),
              _share_cell(row["largest"]), _count_cell(row["noisy"])] for row in widths.to_dict("records")],
        )),
        ("How the rows ended", table(
            [name if name == "backend" else f"#{name}" for name in ends.columns],
            [[_count_cell(value) if isinstance(value, int) else str(value) for value in row.values()]
             for row in ends.to_dict("records")],
        )),
    ]  # fmt: skip
    if len(failed):
        rows = [
            [row["backend"], str(row["pattern"]), row["status"], str(row["reason"]), _count_cell(row["rows"])]
            for row in failed.head(FAILURE_REASONS).to_dict("records")
        ]
        tables.append(("Failures by reason", table(["backend", "pattern", "status", "reason", "#rows"], rows)))
    else:
        sentences.append("No row failed.")
    charts = [Chart("noise", "Share of rows within a width", figures.noise(data.noise_curve(frame)))]
    return Section("noise", "Noise and failures", sentences, charts, tables)


def _count_cell(value: int) -> Cell:
    return Cell(units.count(value), value)


def _share_cell(value: float) -> Cell:
    return Cell(units.percent(value), value)


def profile(content: Mapping[str, Any]) -> Section:
    """Layer by layer: pattern, sparsity, predicted time."""
    layers = profile_layers(content)
    total = float(layers["seconds"].sum()) + float(content.get("fixed_seconds") or 0)
    sentences = [
        f"Predicted for the whole model: {units.seconds(content['predicted_seconds'], content.get('predicted_low'), content.get('predicted_high'))}"
        f" for a target of {units.ratio(content['target'])} over {content['dense_engine']} at "
        f"{units.seconds(content['dense_seconds'])}."
    ]
    if content.get("fixed_seconds") is not None:
        share = content["fixed_seconds"] / total if total else 0
        sentences.append(
            f"{units.seconds(content['fixed_seconds'])} ({units.percent(share)}) is fixed: layers and overhead that are not pruned."
        )
    if content.get("ceiling"):
        sentences.append(
            f"The ceiling is {units.ratio(content['ceiling'])}: the speedup if every searched layer took no time at all."
        )
    rows = [
        [row["name"], row["pattern"], Cell(units.percent(row["sparsity"]), row["sparsity"]),
         Cell(units.seconds(row["seconds"], row["low"], row["high"]), row["seconds"]),
         Cell(units.percent(row["seconds"] / total if total else 0), row["seconds"]),
         Cell(units.NOTHING if row["error"] is None else f"{row['error']:.3g}", row["error"])]
        for row in layers.to_dict("records")
    ]  # fmt: skip
    heads = ["layer", "pattern", "#sparsity", "#predicted time", "#share of the model", "#relative error"]
    charts = [Chart("profile", "Predicted time of each layer, with its interval", figures.profile(layers))]
    return Section("profile", "The profile", sentences, charts, [("Layer by layer", table(heads, rows))])


def profile_layers(content: Mapping[str, Any]) -> pd.DataFrame:
    """One row a layer in the model's order: name, pattern, sparsity, seconds, low, high, error."""
    rows = []
    for name, layer in content["layers"].items():
        seconds = float(layer["seconds"])
        rows.append({
            "name": name, "pattern": str(layer["pattern"]), "sparsity": float(layer["sparsity"]), "seconds": seconds,
            "low": float(layer.get("seconds_low", seconds)), "high": float(layer.get("seconds_high", seconds)),
            "error": layer.get("error"),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=["name", "pattern", "sparsity", "seconds", "low", "high", "error"])


def promise(inputs: Inputs) -> Section:
    """Promised and measured, beside the dense engines it was measured against."""
    found = inputs.verification or {}
    times = promise_times(inputs)
    budget = float(found["measured_seconds"] * found["measured_speedup"] / found["target"])
    sentences = [
        "Dense engines and pruned model were timed end to end, each in a process of its own, in alternating blocks. "
        f"The target of {units.ratio(found['target'])} leaves {units.seconds(budget)}."
    ]
    ceiling = (inputs.profile or {}).get("ceiling")
    if ceiling:
        sentences.append(
            f"The ceiling, with every searched layer free, is {units.ratio(ceiling)}: "
            f"{units.percent(found['measured_speedup'] / ceiling)} of it is reached."
        )
    rows = [
        [row["name"], row["kind"], Cell(units.seconds(row["seconds"], row["low"], row["high"]), row["seconds"]),
         _ratio_cell(budget * found["target"] / row["seconds"])]
        for row in times.to_dict("records")
    ]  # fmt: skip
    heads = ["what", "kind", "#time", "#speedup"]
    return Section(
        "promise",
        "Promised and measured",
        sentences,
        [Chart("promise", "Whole-model times; the dashed line is what the target allows", figures.promise(times, budget))],
        [("Times", table(heads, rows))],
    )


def promise_times(inputs: Inputs) -> pd.DataFrame:
    """Whole-model seconds: the dense engines, the prediction, the measurement. Columns as figures.promise wants them."""
    found = inputs.verification or {}
    rows = []
    if inputs.model_rows is not None and len(inputs.model_rows):
        timed = inputs.model_rows[inputs.model_rows["status"].isin(data.TIMED)]
        dense = timed[timed["pattern"] == "dense"]
        for (backend, kernel), group in dense.groupby(["backend", "kernel_requested"], dropna=False, sort=True):
            name = str(backend) if kernel in ("", "auto", backend) or pd.isna(kernel) else f"{backend} {kernel}"
            middle = float(group["median_seconds"].median())
            low, high = float(group["low_seconds"].min()), float(group["high_seconds"].max())
            rows.append({"name": f"dense, {name}", "kind": "dense", "seconds": middle, "low": low, "high": high})
    rows.append({
        "name": "pruned, predicted", "kind": "predicted", "seconds": found["predicted_seconds"],
        "low": found["predicted_low"], "high": found["predicted_high"],
    })  # fmt: skip
    measured = found["measured_seconds"]
    rows.append({
        "name": "pruned, measured", "kind": "measured", "seconds": measured,
        "low": found.get("measured_low", measured), "high": found.get("measured_high", measured),
    })  # fmt: skip
    return pd.DataFrame(rows)


def _ratio_cell(value: float) -> Cell:
    return Cell(units.ratio(value), value)


def provenance(inputs: Inputs, command: Sequence[str]) -> Section:
    """Where it all comes from: files with their hashes, versions, the command; and whether the files belong together."""
    origin = table(
        ["what", "file", "hash"], [[source.role, str(source.path), source.digest] for source in inputs.sources]
    )
    sentences = [*belonging(inputs)]
    versions = [(name, _version(name)) for name in ("latbench", "plotly", "pandas", "numpy", "torch", "numba")]
    tables = [
        ("Files", origin),
        ("Versions that wrote this report", facts([*versions, ("python", platform.python_version())])),
        ("Command", facts([("this report", " ".join(command))])),
    ]
    if inputs.manifest:
        plain = [(key.replace("_", " "), value) for key, value in inputs.manifest.items() if not isinstance(value, dict | list)]
        tables.append(("The pruned model", facts(plain)))
    return Section("provenance", "Provenance", sentences, [], tables)


def belonging(inputs: Inputs) -> list[str]:
    """Sentences that say whether the cost model and the profile were made from this table."""
    sentences = []
    for role, content in (("cost model", inputs.model), ("profile", inputs.profile)):
        if content and content.get("table_hash"):
            same = content["table_hash"] == inputs.table_hash
            sentences.append(
                f"The {role} was made from this very table."
                if same
                else f"The {role} was made from another table or an earlier state of it: its figures may differ from these."
            )
    return sentences


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


VALIDATION = {
    "median": "half of the held-out points are predicted within",
    "p90": "nine of ten within",
    "mape": "mean absolute error",
    "within_5": "share within 5%",
    "within_10": "share within 10%",
    "coverage": "share inside the interval",
    "width": "width of the interval",
    "noise_floor": "noise floor: width of the measurements' own intervals",
}


def cost_model(content: Mapping[str, Any]) -> Section:
    """How well the cost model predicts shapes it has not seen, beside the noise of the measurements themselves."""
    found = content["validation"]
    methods = found if all(isinstance(value, Mapping) for value in found.values()) else {"held-out shapes": found}
    heads = ["figure", *(f"#{method}" for method in methods)]
    rows = [
        [meaning, *(_share_cell(values[key]) if values.get(key) is not None else Cell(units.NOTHING) for values in methods.values())]
        for key, meaning in VALIDATION.items()
    ]  # fmt: skip
    sentences = ["Each shape was predicted by a model that had not seen it. No prediction can be better than the noise floor."]
    return Section("model", "How well the cost model predicts", sentences, [], [("Errors on held-out shapes", table(heads, rows))])
