"""Two tables side by side: two devices, or one device before and after a change.

What is compared is the fastest kernel that either side has for a shape, pattern and sparsity, measured in one way
(but for device and threads, where the devices differ). A ratio is the second side's seconds over the first's: above 1
the first is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from latbench.compare import KINDS, Change
from latbench.compare_samples import FASTER, SAME, SLOWER, UNCLEAR
from latbench.errors import BadData
from latbench.report import data, figures, maps, overview, sections, units
from latbench.report.figures import Figure, colour, line_at, plain, short, thinned, time_axis
from latbench.report.inputs import Inputs
from latbench.report.views import Cell, Chart, Section, Table, Tile, count_cell, table

SHAPES = 300  # rows of the table; the figures over all shapes count every one
CHANGES = 300
POINTS = 2500  # that the chart carries
LEVEL = 0.75

Place = tuple[str, str]


@dataclass(frozen=True)
class Side:
    """One of the tables: what it is called on the page, and its frames as `data` makes them."""

    name: str
    inputs: Inputs
    points: pd.DataFrame
    speedups: pd.DataFrame
    break_evens: pd.DataFrame


def sides(first: Inputs, second: Inputs) -> tuple[Side, Side]:
    """Both tables, with settings called alike, and device and threads left out of them where the devices differ."""
    rows = [data.timed_rows(data.layer_rows(one.table)) for one in (first, second)]
    devices = [data.settings(one.table)["device"] for one in (first, second)]
    across = ("device", "threads") if devices[0] != devices[1] else ()
    apart = [name for name in data.differing(*rows) if name not in across]
    paths = [one.sources[0].path for one in (first, second)]
    brief = [path.name for path in paths]
    names = devices if across else brief if brief[0] != brief[1] else list(map(str, paths))
    found = []
    for name, one in zip(names, (first, second), strict=True):
        points = data.points(one.table, apart)
        speedups = data.speedup(points)
        found.append(Side(name, one, points, speedups, data.break_even(speedups)))
    return found[0], found[1]


def paired(first: Side, second: Side) -> pd.DataFrame:
    """One row a shape, pattern and sparsity that both have, the most gained first.

    Columns: setting, shape, pattern, format, sparsity; first, second (seconds), first_engine, second_engine; ratio,
    low, high (both intervals at their worst and at their best). Raises BadData where there is none.
    """
    by = [*data.PLACE, "pattern", "sparsity"]
    best = [data.fastest(side.points, by) for side in (first, second)]
    both = best[0].merge(best[1][[*by, "seconds", "low", "high", "engine"]], on=by, suffixes=("", "_second"))
    if both.empty:
        raise BadData(
            f"{first.name} and {second.name} have no layer shape, pattern and sparsity in common that were measured "
            "in one way: nothing can be compared"
        )
    tidy = both[[*by, "format"]].assign(
        first=both["seconds"], second=both["seconds_second"],
        first_engine=both["engine"], second_engine=both["engine_second"],
        ratio=both["seconds_second"] / both["seconds"],
        low=both["low_second"] / both["high"], high=both["high_second"] / both["low"],
    )  # fmt: skip
    return tidy.sort_values("ratio", ascending=False, kind="stable").reset_index(drop=True)


def build(first: Side, second: Side, changes: Sequence[Change] | None, command: Sequence[str]) -> dict[str, Any]:
    """The page as values, as `html.page_text` reads them. `changes`: of one device, by `compare.compare`."""
    pairs = paired(first, second)
    parts = [
        _changes(changes) if changes is not None else None,
        _shapes(first, second, pairs),
        _map(first, second, pairs),
        _by_pattern(first, second, pairs),
        _environment(first, second),
        _provenance(first, second, command),
    ]
    facts = [f"{units.count(len(pairs))} shared points", f"{pairs['shape'].nunique()} shared layer shapes"]
    return {
        "headline": _headline(first, second, pairs, changes),
        "subtitle": " · ".join([f"{first.name} against {second.name}", *facts]),
        "warnings": [],
        "sections": [part for part in parts if part is not None],
    }


def _headline(first: Side, second: Side, pairs: pd.DataFrame, changes: Sequence[Change] | None) -> overview.Headline:
    dense, sparse = pairs[pairs["pattern"] == "dense"], pairs[pairs["pattern"] != "dense"]
    middle = float(pairs["ratio"].median())
    counts = Counter(change.kind for change in changes or ())
    if changes is not None:
        compared = sum(counts[kind] for kind in (SLOWER, SAME, FASTER, UNCLEAR))
        title = f"{counts[SLOWER]} of {compared} points became slower, {counts[FASTER]} faster"
    elif middle >= 1:
        title = f"{first.name} is {units.ratio(middle)} as fast as {second.name}"
    else:
        title = f"{second.name} is {units.ratio(1 / middle)} as fast as {first.name}"
    certain = int(((pairs["low"] > 1) | (pairs["high"] < 1)).sum())
    kinds = (("dense layers", dense), ("sparse ones", sparse))
    runs = [f"{kind} {_spread_of(own)}" for kind, own in kinds if len(own)]
    lead = (
        f"Each shape, pattern and sparsity with the fastest kernel of either side: {first.name} runs "
        f"{' and '.join(runs)} as fast as {second.name} (median, and least to most). {certain} of "
        f"{units.count(len(pairs))} differences lie outside both 95% intervals."
    )
    if counts[UNCLEAR]:
        lead += f" {units.count(counts[UNCLEAR])} points are too noisy, or too near the noise, to be judged."
    starts = [_start(side) for side in (first, second)]
    tiles = [
        Tile("Dense", _middle(dense), f"{first.name} over {second.name}, median of {len(dense)} shapes"),
        Tile("Sparse", _middle(sparse), f"the same, median of {len(sparse)} points"),
        Tile("Sparsity pays from", f"{starts[0]} / {starts[1]}", f"median shape of {first.name} / {second.name}"),
    ]
    return overview.Headline(title, lead, tiles)


def _middle(pairs: pd.DataFrame) -> str:
    return units.ratio(float(pairs["ratio"].median())) if len(pairs) else units.NOTHING


def _spread_of(pairs: pd.DataFrame) -> str:
    return units.ratio(*(float(pairs["ratio"].agg(how)) for how in ("median", "min", "max")))


def _start(side: Side) -> str:
    if side.break_evens.empty:
        return units.NOTHING
    start, at_lowest = overview.typical_start(side.break_evens)
    return "never" if start == math.inf else ("≤ " if at_lowest else "") + units.percent(round(start, 2))


def _shapes(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Shape by shape: dense times, and what to use on either side."""
    dense = pairs[pairs["pattern"] == "dense"].sort_values("second", ascending=False, kind="stable")
    uses = [_uses(side) for side in (first, second)]
    rows: list[list[Cell | str]] = []
    moved = 0
    for row in dense.to_dict("records"):
        place = (row["setting"], row["shape"])
        ours, theirs = (found.get(place, Cell(units.NOTHING)) for found in uses)
        moved += ours.value != theirs.value
        if len(rows) < SHAPES:
            rows.append([
                Cell(data.place_label(*place)),
                Cell(units.seconds(row["first"]), row["first"], str(row["first_engine"])),
                Cell(units.seconds(row["second"]), row["second"], str(row["second_engine"])),
                _ratio_cell(row), ours, theirs,
            ])  # fmt: skip
    heads = ["layer shape", f"#dense, {first.name}", f"#dense, {second.name}", "#ratio",
             f"use on {first.name}", f"use on {second.name}"]  # fmt: skip
    sentences = [
        f"A ratio above 1× says that {first.name} is faster. Which pattern to use differs at {moved} of {len(dense)} "
        "shapes." if len(dense) else "No shape has a dense time on both sides."
    ]  # fmt: skip
    found = replace(table(heads, rows), cards=True)
    tables = [("Dense times, and the pattern that is fastest most often", found)] if rows else []
    return Section("pays", "What to use where", sentences, tables=tables)


def _uses(side: Side) -> dict[Place, Cell]:
    """The pattern to use at each shape and from where; cells sort and compare by the pattern."""
    starts = data.by_place(side.break_evens)
    best = data.by_place(data.fastest_pattern(side.speedups)) if len(side.speedups) else {}
    found = {}
    for place, rows in starts.items():
        use = overview.favourite(rows, best[place])
        gains = [row["speedup"] for row in best[place] if abs(row["sparsity"] - LEVEL) < 0.01]
        gain = f"{units.ratio(gains[0])} at {units.percent(LEVEL)}" if gains else ""
        if use is None:
            found[place] = Cell("stay dense", "dense", gain)
        else:
            found[place] = Cell(f"{use['pattern']} {overview.begins(use)}", str(use["pattern"]), gain)
    return found


def _ratio_cell(row: Mapping[Any, Any]) -> Cell:
    unsure = row["low"] <= 1 <= row["high"]
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(row["ratio"])))
    return Cell(("≈ " if unsure else "") + units.ratio(row["ratio"]), row["ratio"], "", tint)


def _map(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Ratios by shape and sparsity, a slice a pattern; and every pair over its time."""
    order = pairs.groupby(data.PLACE)["second"].max().sort_values(ascending=False, kind="stable")
    places = list(order.index[: maps.SHAPES])
    labels = [plain(data.place_label(*place)) for place in places]
    here = data.at(pairs, places)
    limit = max(0.1, float(np.abs(np.log2(here["ratio"])).max()))
    choices = []
    by_pattern = dict(list(here.groupby("pattern", sort=True)))
    for pattern, own in sorted(by_pattern.items(), key=lambda item: -len(item[1])):  # what was measured most first
        columns = maps.spread(np.sort(own["sparsity"].unique()))
        found = {
            (row["setting"], row["shape"], row["sparsity"]): (float(row["ratio"]), _hover(row, first, second))
            for row in own.to_dict("records")
        }
        grid = [[found.get((*place, sparsity)) for sparsity in columns] for place in places]
        heads = [units.percent(sparsity) if sparsity else "dense" for sparsity in columns]
        choices.append((str(pattern), {"map": maps.heat_map(grid, heads, labels, limit)}))
    sentences = [f"Blue: {first.name} is faster; orange: {second.name} is."]
    if len(places) < len(order):
        sentences.append(f"The map has the {len(places)} shapes that take longest, of {len(order)}.")
    charts = [
        Chart("map", f"How much faster {first.name} is, by shape and sparsity", choices=choices, label="Pattern"),
        Chart("pairs", "Every shared point by its time", _scatter(thinned(pairs, POINTS), first, second)),
    ]
    return Section("map", "Where which is faster", sentences, charts)


def _scatter(pairs: pd.DataFrame, first: Side, second: Side) -> Figure:
    traces = []
    known = list(figures.COLOURS)
    for name in [*known, *sorted(set(pairs["format"]) - set(known))]:
        own = pairs[pairs["format"] == name]
        if len(own):
            traces.append({
                "type": "scatter", "mode": "markers", "name": plain(name), "x": short(own["second"]),
                "y": short(own["ratio"]), "marker": {"color": colour(str(name)), "size": 7, "opacity": 0.8},
                "text": [_hover(row, first, second) for row in own.to_dict("records")],
                "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    low, high = min(0.9, float(pairs["ratio"].min())), max(1.1, float(pairs["ratio"].max()))
    shortest, longest = float(pairs["second"].min()), float(pairs["second"].max())
    layout = {
        "xaxis": time_axis(f"time on {plain(second.name)}", shortest, longest),
        "yaxis": {
            "title": {"text": "ratio of times"}, "type": "log",
            "range": [math.log10(low) - 0.03, math.log10(high) + 0.03], **figures.log_ticks(low, high, "×"),
        },
        "shapes": [line_at(y=1)], "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], first: Side, second: Side) -> str:
    what = row["pattern"] + (f" at {units.percent(row['sparsity'])}" if row["sparsity"] else "")
    return (
        f"<b>{plain(row['shape'])}</b><br>{plain(what)}<br>{units.ratio(row['ratio'], row['low'], row['high'])}<br>"
        f"{units.seconds(row['first'])}, {plain(row['first_engine'])} ({plain(first.name)})<br>"
        f"{units.seconds(row['second'])}, {plain(row['second_engine'])} ({plain(second.name)})"
    )


def _by_pattern(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Ratios by pattern, and from where each pays on either side."""
    rows: list[list[Cell | str]] = []
    for pattern, own in pairs.groupby("pattern", sort=True):
        middle, least, most = (float(own["ratio"].agg(how)) for how in ("median", "min", "max"))
        starts = [_pattern_start(side, str(pattern)) for side in (first, second)]
        rows.append([
            str(pattern), count_cell(len(own)), Cell(units.ratio(middle), middle), Cell(units.ratio(least), least),
            Cell(units.ratio(most), most), *starts,
        ])  # fmt: skip
    heads = ["pattern", "#points", "#median ratio", "#least", "#most",
             f"#pays from, {first.name}", f"#pays from, {second.name}"]  # fmt: skip
    sentence = "Break-even sparsities are those of the median shape; never: it does not pay at half of the shapes."
    return Section(
        "patterns",
        "Pattern by pattern",
        [sentence],
        tables=[("Ratios and break-even sparsities", table(heads, rows))],
    )


def _pattern_start(side: Side, pattern: str) -> Cell:
    own = side.break_evens[side.break_evens["pattern"] == pattern]
    if own.empty:
        return Cell(units.NOTHING)
    start, at_lowest = overview.typical_start(own)
    if start == math.inf:
        return Cell("never", 2.0)
    return Cell(("≤ " if at_lowest else "") + units.percent(round(start, 2)), start)


def _changes(changes: Sequence[Change]) -> Section:
    """Every point that became slower or faster, or got lost, judged by its samples."""
    counts = Counter(change.kind for change in changes)
    told = [change for change in changes if change.kind != SAME]
    rows: list[list[Cell | str]] = [
        [change.kind, change_label(change), Cell(units.seconds(change.before), change.before),
         Cell(units.seconds(change.after), change.after),
         Cell(units.ratio(change.ratio, change.low, change.high), change.ratio, change.reason)]
        for change in told[:CHANGES]
    ]  # fmt: skip
    said = ", ".join(f"{units.count(counts[kind])} {kind}" for kind in KINDS if counts[kind])
    sentences = [
        f"Point by point, judged by the samples of both and by how unlike two runs of equal work are: {said}. A time "
        "over the other's above 1× is slower."
    ]
    if len(told) > len(rows):
        sentences.append(f"{len(rows)} of {len(told)} that are not the same are listed, the most slowed first.")
    heads = ["verdict", "point", "#before", "#after", "#after / before"]
    tables = [("What changed", table(heads, rows))] if rows else []
    return Section("changes", "What became slower or faster", sentences, tables=tables)


def change_label(change: Change) -> str:
    """A point in words: shape, pattern, sparsity, engine."""
    key = change.key
    what = key["model"] or "" if key["op"] == "model" or key["m"] is None else data.shape_label(key)
    sparsity = units.percent(key["sparsity_target"]) if key["sparsity_target"] else ""
    engine = data.engine_name(key["backend"], key["kernel_requested"] or "")
    return ", ".join(text for text in (what, f"{key['pattern']} {sparsity}".strip(), engine) if text)


def _environment(first: Side, second: Side) -> Section:
    """Machines, software and ways of measuring in two columns, what differs first."""
    known = [_facts(side) for side in (first, second)]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    rows = [(name, *(found.get(name, units.NOTHING) for found in known)) for name in names]
    rows.sort(key=lambda row: row[1] == row[2])
    differ = sum(row[1] != row[2] for row in rows)
    cells = [[row[0].replace("_", " "), row[1], row[2]] for row in rows]
    sentence = f"{differ} of {len(rows)} facts differ; they come first."
    found: Table = table(["what", first.name, second.name], cells)
    return Section("environment", "Devices and software", [sentence], tables=[("Both sides", found)])


def _facts(side: Side) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for record in side.inputs.environments:
        for name, value in record.items():
            if name != "env_id" and sections.says_something(value):
                values = found.setdefault(name, [])
                text = units.size(value) if name.endswith("_bytes") else str(value)
                if text not in values:
                    values.append(text)
    facts = {name: ", ".join(values) for name, values in found.items()}
    return data.settings(side.inputs.table) | {name.removesuffix("_bytes"): text for name, text in facts.items()}


def _provenance(first: Side, second: Side, command: Sequence[str]) -> Section:
    files = [
        [side.name, source.role, str(source.path), source.digest[:16]]
        for side in (first, second)
        for source in side.inputs.sources
    ]
    tables = [("Files", table(["side", "what", "file", "hash"], files)), *sections.made_with(command)]
    return Section("provenance", "Provenance", tables=tables)
