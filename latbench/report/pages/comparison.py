"""The page of two tables side by side: two devices, or one device before and after a change.

It compares the fastest kernels of both sides for a shape, pattern and sparsity in equal settings. Only device and
threads may differ between two devices. A ratio is the second side's seconds over the first's: above 1 the first is
faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
)
from latbench.errors import BadData
from latbench.report import figures, point_frames
from latbench.report.elements import Cell, Chart, FigureTile, Section, Table, build_count_cell, build_table
from latbench.report.figures import (
    Figure,
    build_time_axis,
    draw_line,
    escape_name,
    find_colour,
    round_values,
    select_sample,
)
from latbench.report.pages import common_sections as sections
from latbench.report.pages import overview, speedup_map
from latbench.report.report_inputs import ReportInputs
from latbench.tables.compare import KINDS, Change
from latbench.tables.significance import FASTER, SAME, SLOWER, UNCLEAR

SHAPES = 300  # rows of the table; the figures over all shapes count every one
CHANGES = 300
POINTS = 2500  # drawn
LEVEL = 0.75  # the sparsity shown, or the nearest one of both sides

Place = tuple[str, str]


@dataclass(frozen=True)
class Side:
    """One of the tables: its name on the page, its inputs, and its frames of `point_frames`."""

    name: str
    inputs: ReportInputs
    points: pd.DataFrame
    speedups: pd.DataFrame
    break_evens: pd.DataFrame
    starts: pd.DataFrame


def build_sides(first: ReportInputs, second: ReportInputs) -> tuple[Side, Side]:
    """Build both sides, with equal labels of settings.

    Where the devices differ, settings do not name them, nor the threads if each side has one number of them. Raises
    BadData where such a side is of several devices.
    """
    rows = [point_frames.select_timed_rows(point_frames.select_layer_rows(one.table)) for one in (first, second)]
    devices = [point_frames.summarise_settings(one.table)["device"] for one in (first, second)]
    threads = [point_frames.summarise_settings(one.table)["threads"] for one in (first, second)]
    across: tuple[str, ...] = ()
    if devices[0] != devices[1]:
        if several := [name for name in devices if ", " in name]:
            raise BadData(f"one side is of several devices, {several[0]}: compare tables of one device each")
        across = ("device",) if any(", " in count for count in threads) else ("device", "threads")
    apart = [name for name in point_frames.list_differing_columns(*rows) if name not in across]
    paths = [one.sources[0].path for one in (first, second)]
    brief = [path.name for path in paths]
    names = devices if across else brief if brief[0] != brief[1] else list(map(str, paths))
    found = []
    for name, one in zip(names, (first, second), strict=True):
        points = point_frames.build_points(one.table, apart)
        speedups = point_frames.build_speedups(points)
        found.append(
            Side(
                name,
                one,
                points,
                speedups,
                point_frames.build_break_evens(speedups),
                point_frames.build_earliest_starts(speedups),
            )
        )
    return found[0], found[1]


def build_pairs(first: Side, second: Side) -> pd.DataFrame:
    """Build a frame with a row for each shape, pattern and sparsity of both sides, the highest ratio first.

    Columns: setting, shape, pattern, format, sparsity. Then first and second (seconds), with _low, _high and _engine
    of each. Then ratio, low and high: both intervals at their worst and at their best. Raises BadData where no row is
    common.
    """
    by = [*point_frames.PLACE, "pattern", "sparsity"]
    best = [point_frames.select_fastest(side.points, by) for side in (first, second)]
    both = best[0].merge(best[1][[*by, "seconds", "low", "high", "engine"]], on=by, suffixes=("", "_second"))
    if both.empty:
        raise BadData(
            f"{first.name} and {second.name} have no layer shape, pattern and sparsity in common in equal settings, "
            "so nothing can be compared"
        )
    tidy = both[[*by, "format"]].assign(
        first=both["seconds"], second=both["seconds_second"],
        first_low=both["low"], first_high=both["high"], first_engine=both["engine"],
        second_low=both["low_second"], second_high=both["high_second"], second_engine=both["engine_second"],
        ratio=both["seconds_second"] / both["seconds"],
        low=both["low_second"] / both["high"], high=both["high_second"] / both["low"],
    )  # fmt: skip
    return tidy.sort_values("ratio", ascending=False, kind="stable").reset_index(drop=True)


def build_page(first: Side, second: Side, changes: Sequence[Change] | None, command: Sequence[str]) -> dict[str, Any]:
    """Build the page as values, as `html_page.build_html` reads them; `changes` are those of one device."""
    pairs = build_pairs(first, second)
    parts = [
        _changes(changes) if changes is not None else None,
        _shapes(first, second, pairs),
        _map(first, second, pairs),
        _by_pattern(first, second, pairs),
        _environment(first, second),
        _provenance(first, second, command),
    ]
    facts = [f"{format_count(len(pairs))} shared points", f"{pairs['shape'].nunique()} shared layer shapes"]
    return {
        "headline": _headline(first, second, pairs, changes),
        "subtitle": " · ".join([f"{first.name} against {second.name}", *facts]),
        "warnings": [],
        "sections": [part for part in parts if part is not None],
    }


def _headline(first: Side, second: Side, pairs: pd.DataFrame, changes: Sequence[Change] | None) -> overview.Headline:
    dense, sparse = pairs[pairs["pattern"] == "dense"], pairs[pairs["pattern"] != "dense"]
    counts = Counter(change.kind for change in changes or ())
    if changes is not None:
        compared = sum(counts[kind] for kind in (SLOWER, SAME, FASTER, UNCLEAR))
        title = f"{counts[SLOWER]} of {compared} points became slower, {counts[FASTER]} faster"
    else:
        title = _who_is_faster(first, second, dense, sparse)
    kinds = (("Dense", "shapes", dense), ("Sparse", "points", sparse))
    who = [_sure(kind, things, own, first, second) for kind, things, own in kinds if len(own)]
    lead = f"{' '.join(who)} The page compares the fastest kernel of each side at each shape, pattern and sparsity."
    if counts[UNCLEAR]:
        lead += f" {format_count(counts[UNCLEAR])} points cannot be judged, because the difference is near the noise."
    starts = [_start(side) for side in (first, second)]
    tiles = [
        FigureTile("Dense", _middle(dense), f"{first.name} over {second.name}, median of {len(dense)} shapes"),
        FigureTile("Sparse", _middle(sparse), f"the same, median of {len(sparse)} points"),
        FigureTile(
            "Sparsity pays from", f"{starts[0]} / {starts[1]}", f"median shape of {first.name} / {second.name}"
        ),
    ]
    return overview.Headline(title, lead, tiles)


def _who_is_faster(first: Side, second: Side, dense: pd.DataFrame, sparse: pd.DataFrame) -> str:
    """Return a title with the faster side and its ratio, for dense and for sparse points."""
    found = [_lead(kind, own, first, second) for kind, own in (("dense", dense), ("sparse", sparse)) if len(own)]
    one = found[0]
    title = f"{one.winner} is {one.ratio} as fast as {one.loser}, {one.kind}"
    if one.alike:
        title = f"{first.name} and {second.name} are about equally fast, {one.kind}"
    if len(found) == 1:
        return title
    other = found[1]
    if other.alike:
        return f"{title} and sparse" if one.alike else f"{title}, and about equally fast, sparse"
    if other.winner == one.winner and not one.alike:
        return f"{title}, and {other.ratio}, sparse"
    return f"{title}; {other.winner} is {other.ratio} as fast, sparse"


class _Lead(NamedTuple):
    """The faster side at points of one kind, and its ratio; `alike`: the difference is within a known noise."""

    kind: str
    winner: str
    loser: str
    ratio: str
    alike: bool


def _lead(kind: str, own: pd.DataFrame, first: Side, second: Side) -> _Lead:
    middle = _median(own["ratio"])
    winner, loser = (first, second) if middle >= 1 else (second, first)
    known = own[["low", "high"]].dropna()
    alike = len(known) > 0 and not (_median(known["low"]) > 1 or _median(known["high"]) < 1)
    return _Lead(kind, winner.name, loser.name, format_ratio(max(middle, 1 / middle)), alike)


def _median(ratios: pd.Series) -> float:
    """Return the median of the logarithms as a ratio, which is inverted if the sides change places."""
    return float(np.exp(np.log(ratios).median()))


def _sure(kind: str, things: str, own: pd.DataFrame, first: Side, second: Side) -> str:
    """Return a sentence with the numbers of shapes or points where each side is faster beyond both intervals."""
    ours, theirs = int((own["low"] > 1).sum()), int((own["high"] < 1).sum())
    unknown = int(own[["low", "high"]].isna().any(axis=1).sum())
    unsure = len(own) - ours - theirs - unknown
    if unknown == len(own):
        ours, theirs = int((own["ratio"] > 1).sum()), int((own["ratio"] < 1).sum())
    said = (
        f"{kind}, {first.name} is faster at {format_count(ours)} of {format_count(len(own))} {things}, {second.name} "
        f"at {format_count(theirs)}"
    )
    if unsure:
        said += f"; at {format_count(unsure)} the difference is within the noise"
    if unknown == len(own):
        return f"{said}; the certainty is unknown, because the noise of no point is known."
    return f"{said}; the noise of {format_count(unknown)} is unknown." if unknown else f"{said}."


def _middle(pairs: pd.DataFrame) -> str:
    return format_ratio(_median(pairs["ratio"])) if len(pairs) else NOTHING


def _start(side: Side) -> str:
    if side.starts.empty:
        return NOTHING
    start, at_lowest = overview.find_typical_start(side.starts)
    return "never" if start == math.inf else ("≤ " if at_lowest else "") + format_percent_rounded_up(start)


def _shapes(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Build the section with dense times, patterns to use and break-evens of both sides at each shape."""
    dense = pairs[pairs["pattern"] == "dense"].sort_values("second", ascending=False, kind="stable")
    level = _level(pairs)
    uses = [_uses(side, level) for side in (first, second)]
    sparse = {(row["setting"], row["shape"]): row for row in select_best(pairs, level).to_dict("records")}
    rows: list[list[Cell | str]] = []
    moved = 0
    for row in dense.to_dict("records"):
        place = (row["setting"], row["shape"])
        ours, theirs = (found.get(place, Cell(NOTHING)) for found in uses)
        moved += ours.value != theirs.value
        if len(rows) < SHAPES:
            rows.append([
                Cell(point_frames.format_place(*place)),
                Cell(format_seconds(row["first"]), row["first"], str(row["first_engine"])),
                Cell(format_seconds(row["second"]), row["second"], str(row["second_engine"])),
                _ratio_cell(row),
                _ratio_cell(sparse[place]) if place in sparse else Cell(NOTHING),
                ours, theirs,
            ])  # fmt: skip
    at = format_percent(level)
    heads = ["layer shape", f"#dense, {first.name}", f"#dense, {second.name}", "#ratio, dense", f"#ratio at {at}",
             f"use on {first.name}", f"use on {second.name}"]  # fmt: skip
    sentences = [
        f"A ratio above 1× means that {first.name} is faster; the ratio at {at} is that of the fastest patterns of "
        f"both sides. The pattern to use differs at {moved} of {len(dense)} shapes."
        if len(dense)
        else "No shape has a dense time on both sides."
    ]
    tables = []
    if rows:
        tables.append(
            ("Dense times, and the pattern that is fastest most often", replace(build_table(heads, rows), cards=True))
        )
    starts = build_starts(first, second)
    if len(starts):
        earlier, later = (
            int((starts[name] < starts[other]).sum()) for name, other in (("first", "second"), ("second", "first"))
        )
        sentences.append(
            f"Sparsity pays earlier on {first.name} at {earlier} of {len(starts)} shapes and on {second.name} at "
            f"{later}. At the other shapes it pays from the same sparsity, from the lowest measured one, or never."
        )
        tables.append(
            (
                "Sparsity from which a pattern pays, up to the highest measured one",
                _start_table(starts, first, second),
            )
        )
    return Section("pays", "The pattern to use at each shape", sentences, tables=tables)


def _level(pairs: pd.DataFrame) -> float:
    """Return the sparsity nearest to LEVEL among those that both sides have at most shapes."""
    common = point_frames.list_common_sparsities(pairs[pairs["pattern"] != "dense"])
    return float(common[np.abs(common - LEVEL).argmin()]) if len(common) else LEVEL


def select_best(pairs: pd.DataFrame, sparsity: float) -> pd.DataFrame:
    """Select the fastest pattern of each side at one sparsity, for each setting and shape; columns as `build_pairs`.

    Only patterns of both sides count; engines and pattern are those of the first side.
    """
    return select_fastest_of_either(pairs[(pairs["sparsity"] - sparsity).abs() < 0.01], point_frames.PLACE)


def select_fastest_of_either(pairs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Select the fastest row of each side for each value of the columns `by`; columns as `build_pairs`."""
    ours = pairs.loc[pairs.groupby(by, sort=False)["first"].idxmin()].set_index(by)
    theirs = pairs.loc[pairs.groupby(by, sort=False)["second"].idxmin()].set_index(by).loc[ours.index]
    ratio = theirs["second"] / ours["first"]
    return ours.assign(
        second=theirs["second"], second_engine=theirs["second_engine"], second_pattern=theirs["pattern"], ratio=ratio,
        low=theirs["second_low"] / ours["first_high"], high=theirs["second_high"] / ours["first_low"],
    ).reset_index()  # fmt: skip


def build_starts(first: Side, second: Side) -> pd.DataFrame:
    """Build a frame of the sparsities from which a pattern pays on both sides, the widest difference first.

    Columns: setting, shape; first, second (sparsity, inf for never); first_pattern, second_pattern (empty for never);
    first_lowest, second_lowest: whether it pays at the lowest measured sparsity already.
    """
    columns = {"break_even": "", "pattern": "_pattern", "at_lowest": "_lowest"}
    ours, theirs = (
        side.starts.fillna({"break_even": math.inf}).rename(columns={old: name + end for old, end in columns.items()})
        for name, side in (("first", first), ("second", second))
    )
    both = ours.merge(theirs, on=point_frames.PLACE)
    apart = (both["first"].clip(upper=2.0) - both["second"].clip(upper=2.0)).abs()
    return both.loc[apart.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)


def _start_table(starts: pd.DataFrame, first: Side, second: Side) -> Table:
    rows: list[list[Cell | str]] = []
    for row in starts.head(SHAPES).to_dict("records"):
        cells = []
        for side in ("first", "second"):
            if row[side] == math.inf:
                cells.append(Cell("never", 2.0))
            else:
                text = ("≤ " if row[f"{side}_lowest"] else "") + format_percent_rounded_up(row[side], 3)
                cells.append(Cell(text, row[side], str(row[f"{side}_pattern"])))
        apart = row["second"] - row["first"]
        if row["first"] == row["second"]:
            difference = Cell("none", 0.0)
        elif math.isinf(apart):
            only = first if apart > 0 else second
            difference = Cell(f"only on {only.name}", math.copysign(2.0, apart), "", math.copysign(0.6, apart))
        else:
            difference = Cell(f"{100 * apart:+.1f}", apart, "", max(-1.0, min(1.0, 3 * apart)))
        rows.append([Cell(point_frames.format_place(row["setting"], row["shape"])), *cells, difference])
    heads = ["layer shape", f"#pays from, {first.name}", f"#pays from, {second.name}",
             f"#percentage points earlier on {first.name}"]  # fmt: skip
    return build_table(heads, rows)


def _uses(side: Side, level: float) -> dict[Place, Cell]:
    """Return a cell for each place with the pattern to use, its break-even and its gain; cells sort by pattern."""
    starts = point_frames.group_by_place(side.break_evens)
    best = (
        point_frames.group_by_place(point_frames.select_fastest_patterns(side.speedups)) if len(side.speedups) else {}
    )
    found = {}
    for place, rows in starts.items():
        use = overview.select_favourite(rows, best[place])
        gains = [row["speedup"] for row in best[place] if abs(row["sparsity"] - level) < 0.01]
        gain = f"{format_ratio(gains[0])} at {format_percent(level)}" if gains else ""
        if use is None:
            found[place] = Cell("stay dense", "dense", gain)
        else:
            found[place] = Cell(f"{use['pattern']} {overview.format_start(use)}", str(use["pattern"]), gain)
    return found


def _ratio_cell(row: Mapping[Any, Any]) -> Cell:
    unsure = not (row["low"] > 1 or row["high"] < 1)
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(row["ratio"])))
    return Cell(("≈ " if unsure else "") + format_ratio(row["ratio"]), row["ratio"], "", tint)


def _map(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Build the section with a map of ratios for each pattern, and a chart of every shared point."""
    order = pairs.groupby(point_frames.PLACE)["second"].max().sort_values(ascending=False, kind="stable")
    places = list(order.index[: speedup_map.SHAPES])
    labels = [escape_name(point_frames.format_place(*place)) for place in places]
    here = point_frames.select_places(pairs, places)
    limit = max(0.1, float(np.abs(np.log2(here["ratio"])).max()))
    kinds = {speedup_map.FASTEST: select_fastest_of_either(here, [*point_frames.PLACE, "sparsity"])}
    by_pattern = dict(list(here.groupby("pattern", sort=True)))
    kinds |= dict(sorted(by_pattern.items(), key=lambda item: -len(item[1])))  # the most measured pattern first
    choices = []
    for pattern, own in kinds.items():
        columns = speedup_map.select_spread(np.sort(own["sparsity"].unique()))
        found = {
            (row["setting"], row["shape"], row["sparsity"]): (float(row["ratio"]), _hover(row, first, second))
            for row in own.to_dict("records")
        }
        grid = [[found.get((*place, sparsity)) for sparsity in columns] for place in places]
        heads = [format_percent(sparsity) if sparsity else "dense" for sparsity in columns]
        choices.append((str(pattern), {"map": speedup_map.draw_heat_map(grid, heads, labels, limit)}))
    sentences = [f"Blue: {first.name} is faster; orange: {second.name} is."]
    if len(places) < len(order):
        sentences.append(f"The map has the {len(places)} slowest of {len(order)} shapes.")
    charts = [
        Chart(
            "map",
            f"Ratio of times ({first.name} is faster above 1×) by shape and sparsity",
            choices=choices,
            label="Pattern",
        ),
        Chart(
            "pairs",
            f"Every shared point by its time; above 1× {first.name} is faster",
            _scatter(select_sample(pairs, POINTS), first, second),
        ),
    ]
    return Section("map", "Map of ratios", sentences, charts)


def _scatter(pairs: pd.DataFrame, first: Side, second: Side) -> Figure:
    traces = []
    known = list(figures.COLOURS)
    for name in [*known, *sorted(set(pairs["format"]) - set(known))]:
        own = pairs[pairs["format"] == name]
        if len(own):
            traces.append({
                "type": "scatter", "mode": "markers", "name": escape_name(name), "x": round_values(own["second"]),
                "y": round_values(own["ratio"]),
                "marker": {
                    "color": find_colour(str(name)), "symbol": figures.find_symbol(str(name)), "size": 7,
                    "opacity": 0.8,
                },
                "text": [_hover(row, first, second) for row in own.to_dict("records")],
                "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    low, high = min(0.9, float(pairs["ratio"].min())), max(1.1, float(pairs["ratio"].max()))
    shortest, longest = float(pairs["second"].min()), float(pairs["second"].max())
    layout = {
        "xaxis": build_time_axis(f"time on {escape_name(second.name)}", shortest, longest),
        "yaxis": {
            "title": {"text": "times as fast"}, "type": "log",
            "range": [math.log10(low) - 0.03, math.log10(high) + 0.03], **figures.build_log_ticks(low, high, "×"),
        },
        "shapes": [draw_line(y=1)], "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], first: Side, second: Side) -> str:
    names = dict.fromkeys([row["pattern"], row.get("second_pattern", row["pattern"])])
    what = " and ".join(names) + (f" at {format_percent(row['sparsity'])}" if row["sparsity"] else "")
    return (
        f"<b>{escape_name(row['shape'])}</b><br>{escape_name(what)}<br>"
        f"{format_ratio(row['ratio'], row['low'], row['high'])}<br>"
        f"{format_seconds(row['first'])}, {escape_name(row['first_engine'])} ({escape_name(first.name)})<br>"
        f"{format_seconds(row['second'])}, {escape_name(row['second_engine'])} ({escape_name(second.name)})"
    )


def _by_pattern(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Build the section with ratios and break-evens by pattern."""
    rows: list[list[Cell | str]] = []
    for pattern, own in pairs.groupby("pattern", sort=True):
        middle, least, most = _median(own["ratio"]), float(own["ratio"].min()), float(own["ratio"].max())
        starts = [_pattern_start(side, str(pattern)) for side in (first, second)]
        rows.append([
            str(pattern), build_count_cell(len(own)), Cell(format_ratio(middle), middle), Cell(format_ratio(least),
            least), Cell(format_ratio(most), most), *starts,
        ])  # fmt: skip
    heads = ["pattern", "#points", "#median ratio", "#least", "#most",
             f"#pays from, {first.name}", f"#pays from, {second.name}"]  # fmt: skip
    sentence = "Break-even sparsities are those of the median shape; never: no gain at half of the shapes."
    return Section(
        "patterns",
        "Pattern by pattern",
        [sentence],
        tables=[("Ratios and break-even sparsities", build_table(heads, rows))],
    )


def _pattern_start(side: Side, pattern: str) -> Cell:
    own = side.break_evens[side.break_evens["pattern"] == pattern]
    if own.empty:
        return Cell(NOTHING)
    start, at_lowest = overview.find_typical_start(own)
    if start == math.inf:
        return Cell("never", 2.0)
    sign = "at " if (own["sparsities"] == 1).all() else "≤ " if at_lowest else ""
    return Cell(sign + format_percent_rounded_up(start), start)


def _changes(changes: Sequence[Change]) -> Section:
    """Build the section of points that became slower or faster, or are missing, judged by their samples."""
    counts = Counter(change.kind for change in changes)
    told = [change for change in changes if change.kind != SAME]
    rows: list[list[Cell | str]] = [
        [change.kind, format_change(change), Cell(format_seconds(change.before), change.before),
         Cell(format_seconds(change.after), change.after),
         Cell(format_ratio(change.ratio, change.low, change.high), change.ratio, change.reason)]
        for change in told[:CHANGES]
    ]  # fmt: skip
    said = ", ".join(f"{format_count(counts[kind])} {kind}" for kind in KINDS if counts[kind])
    sentences = [
        f"Points are judged by the samples of both sides and the usual difference between two equal runs: {said}. A "
        "ratio above 1× is slower."
    ]
    if len(told) > len(rows):
        sentences.append(f"The table lists {len(rows)} of {len(told)} changed points, the largest slowdown first.")
    heads = ["verdict", "point", "#before", "#after", "#after / before"]
    tables = [("Changed points", build_table(heads, rows))] if rows else []
    return Section("changes", "Slower and faster points", sentences, tables=tables)


def format_change(change: Change) -> str:
    """Return a point in words: shape, pattern, sparsity, engine."""
    key = change.key
    what = key["model"] or "" if key["op"] == "model" or key["m"] is None else point_frames.format_shape(key)
    sparsity = format_percent(key["sparsity_target"]) if key["sparsity_target"] else ""
    engine = point_frames.format_engine(key["backend"], key["kernel_requested"] or "")
    return ", ".join(text for text in (what, f"{key['pattern']} {sparsity}".strip(), engine) if text)


def _environment(first: Side, second: Side) -> Section:
    """Build the section of machines, software and settings in two columns, differences first."""
    known = [_facts(side) for side in (first, second)]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    rows = [(name, *(found.get(name, NOTHING) for found in known)) for name in names]
    rows.sort(key=lambda row: row[1] == row[2])
    differ = sum(row[1] != row[2] for row in rows)
    cells = [[row[0].replace("_", " "), row[1], row[2]] for row in rows]
    sentence = f"{differ} of {len(rows)} facts differ. They come first."
    found: Table = build_table(["what", first.name, second.name], cells)
    return Section("environment", "Devices and software", [sentence], tables=[("Both sides", found)])


def _facts(side: Side) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for record in side.inputs.environments:
        for name, value in record.items():
            if name != "env_id" and sections.is_known(value):
                values = found.setdefault(name, [])
                text = format_bytes(value) if name.endswith("_bytes") else str(value)
                if text not in values:
                    values.append(text)
    facts = {name: ", ".join(values) for name, values in found.items()}
    return {name.removesuffix("_bytes"): text for name, text in facts.items()} | point_frames.summarise_settings(
        side.inputs.table
    )


def _provenance(first: Side, second: Side, command: Sequence[str]) -> Section:
    files = [
        [side.name, source.role, format_place(source.path), source.digest[:16]]
        for side in (first, second)
        for source in side.inputs.sources
    ]
    tables = [("Files", build_table(["side", "what", "file", "hash"], files)), *sections.build_versions(command)]
    return Section("provenance", "Provenance", tables=tables)
