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
from latbench.report import figures, overview, sections
from latbench.report import frames as data
from latbench.report import speedup_map as maps
from latbench.report.elements import Cell, Chart, Section, Table, Tile, count_cell, table
from latbench.report.figures import Figure, colour, line_at, plain, short, thinned, time_axis
from latbench.report.inputs import Inputs
from latbench.tables.compare import KINDS, Change
from latbench.tables.significance import FASTER, SAME, SLOWER, UNCLEAR

SHAPES = 300  # rows of the table; the figures over all shapes count every one
CHANGES = 300
POINTS = 2500  # that the chart carries
LEVEL = 0.75  # the sparsity that stands for all, or the nearest that both sides have

Place = tuple[str, str]


@dataclass(frozen=True)
class Side:
    """One of the tables: what it is called on the page, and its frames as `data` makes them."""

    name: str
    inputs: Inputs
    points: pd.DataFrame
    speedups: pd.DataFrame
    break_evens: pd.DataFrame
    starts: pd.DataFrame


def sides(first: Inputs, second: Inputs) -> tuple[Side, Side]:
    """Both tables, with settings called alike. Where the devices differ, settings do not name them, nor the threads
    if each side has one number of them. Raises BadData where such a side is of several devices.
    """
    rows = [data.timed_rows(data.layer_rows(one.table)) for one in (first, second)]
    devices = [data.settings(one.table)["device"] for one in (first, second)]
    threads = [data.settings(one.table)["threads"] for one in (first, second)]
    across: tuple[str, ...] = ()
    if devices[0] != devices[1]:
        if several := [name for name in devices if ", " in name]:
            raise BadData(f"one side is of several devices, {several[0]}: compare tables of one device each")
        across = ("device",) if any(", " in count for count in threads) else ("device", "threads")
    apart = [name for name in data.differing(*rows) if name not in across]
    paths = [one.sources[0].path for one in (first, second)]
    brief = [path.name for path in paths]
    names = devices if across else brief if brief[0] != brief[1] else list(map(str, paths))
    found = []
    for name, one in zip(names, (first, second), strict=True):
        points = data.points(one.table, apart)
        speedups = data.speedup(points)
        found.append(Side(name, one, points, speedups, data.break_even(speedups), data.earliest(speedups)))
    return found[0], found[1]


def paired(first: Side, second: Side) -> pd.DataFrame:
    """One row a shape, pattern and sparsity that both have, the most gained first.

    Columns: setting, shape, pattern, format, sparsity; first, second (seconds) with _low, _high and _engine of each;
    ratio, low, high (both intervals at their worst and at their best). Raises BadData where there is none.
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
        first_low=both["low"], first_high=both["high"], first_engine=both["engine"],
        second_low=both["low_second"], second_high=both["high_second"], second_engine=both["engine_second"],
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
    lead = f"{' '.join(who)} Compared is the fastest kernel of either side at each shape, pattern and sparsity."
    if counts[UNCLEAR]:
        lead += f" {format_count(counts[UNCLEAR])} points are too noisy, or too near the noise, to be judged."
    starts = [_start(side) for side in (first, second)]
    tiles = [
        Tile("Dense", _middle(dense), f"{first.name} over {second.name}, median of {len(dense)} shapes"),
        Tile("Sparse", _middle(sparse), f"the same, median of {len(sparse)} points"),
        Tile("Sparsity pays from", f"{starts[0]} / {starts[1]}", f"median shape of {first.name} / {second.name}"),
    ]
    return overview.Headline(title, lead, tiles)


def _who_is_faster(first: Side, second: Side, dense: pd.DataFrame, sparse: pd.DataFrame) -> str:
    """Which side is faster and by how much, dense and sparse told apart: one may be faster at only one of them."""
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
    """Which side is faster at points of one kind, and how many times; alike: only within the noise, where known."""

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
    """The same, upside down, whichever side comes first."""
    return float(np.exp(np.log(ratios).median()))


def _sure(kind: str, things: str, own: pd.DataFrame, first: Side, second: Side) -> str:
    """At how many shapes or points which side is faster beyond both intervals, in a sentence."""
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
        return f"{said}; how sure that is cannot be told: the noise of none is known."
    return f"{said}; of {format_count(unknown)} the noise is unknown." if unknown else f"{said}."


def _middle(pairs: pd.DataFrame) -> str:
    return format_ratio(_median(pairs["ratio"])) if len(pairs) else NOTHING


def _start(side: Side) -> str:
    if side.starts.empty:
        return NOTHING
    start, at_lowest = overview.typical_start(side.starts)
    return "never" if start == math.inf else ("≤ " if at_lowest else "") + format_percent_rounded_up(start)


def _shapes(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Shape by shape: dense times, what to use on either side, and from which sparsity on it pays there."""
    dense = pairs[pairs["pattern"] == "dense"].sort_values("second", ascending=False, kind="stable")
    level = _level(pairs)
    uses = [_uses(side, level) for side in (first, second)]
    sparse = {(row["setting"], row["shape"]): row for row in best_of(pairs, level).to_dict("records")}
    rows: list[list[Cell | str]] = []
    moved = 0
    for row in dense.to_dict("records"):
        place = (row["setting"], row["shape"])
        ours, theirs = (found.get(place, Cell(NOTHING)) for found in uses)
        moved += ours.value != theirs.value
        if len(rows) < SHAPES:
            rows.append([
                Cell(data.place_label(*place)),
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
        f"A ratio above 1× says that {first.name} is faster; at {at} it is that of the fastest patterns of both. "
        f"Which pattern to use differs at {moved} of {len(dense)} shapes."
        if len(dense)
        else "No shape has a dense time on both sides."
    ]
    tables = []
    if rows:
        tables.append(
            ("Dense times, and the pattern that is fastest most often", replace(table(heads, rows), cards=True))
        )
    starts = earliest_starts(first, second)
    if len(starts):
        earlier, later = (
            int((starts[name] < starts[other]).sum()) for name, other in (("first", "second"), ("second", "first"))
        )
        sentences.append(
            f"Sparsity pays earlier on {first.name} at {earlier} of {len(starts)} shapes and on {second.name} at "
            f"{later}; at the others from the same sparsity on, the lowest measured or never."
        )
        tables.append(
            (
                "From which sparsity on some pattern pays, up to the highest measured",
                _start_table(starts, first, second),
            )
        )
    return Section("pays", "What to use where", sentences, tables=tables)


def _level(pairs: pd.DataFrame) -> float:
    """The sparsity nearest to LEVEL of those that both sides have at most shapes."""
    common = data.common_sparsities(pairs[pairs["pattern"] != "dense"])
    return float(common[np.abs(common - LEVEL).argmin()]) if len(common) else LEVEL


def best_of(pairs: pd.DataFrame, sparsity: float) -> pd.DataFrame:
    """Of each setting and shape the fastest pattern of either side at one sparsity; columns as `paired`.

    Only patterns that both sides have count; engines and pattern are those of the first side.
    """
    return _fastest_of_either(pairs[(pairs["sparsity"] - sparsity).abs() < 0.01], data.PLACE)


def _fastest_of_either(pairs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    ours = pairs.loc[pairs.groupby(by, sort=False)["first"].idxmin()].set_index(by)
    theirs = pairs.loc[pairs.groupby(by, sort=False)["second"].idxmin()].set_index(by).loc[ours.index]
    ratio = theirs["second"] / ours["first"]
    return ours.assign(
        second=theirs["second"], second_engine=theirs["second_engine"], second_pattern=theirs["pattern"], ratio=ratio,
        low=theirs["second_low"] / ours["first_high"], high=theirs["second_high"] / ours["first_low"],
    ).reset_index()  # fmt: skip


def earliest_starts(first: Side, second: Side) -> pd.DataFrame:
    """From where on a pattern pays (`data.earliest`) at each setting and shape of both sides, the widest apart first.

    Columns: setting, shape; first, second (sparsity, inf for never); first_pattern, second_pattern (empty for never);
    first_lowest, second_lowest: whether it pays already at the lowest sparsity measured.
    """
    columns = {"break_even": "", "pattern": "_pattern", "at_lowest": "_lowest"}
    ours, theirs = (
        side.starts.fillna({"break_even": math.inf}).rename(columns={old: name + end for old, end in columns.items()})
        for name, side in (("first", first), ("second", second))
    )
    both = ours.merge(theirs, on=data.PLACE)
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
        rows.append([Cell(data.place_label(row["setting"], row["shape"])), *cells, difference])
    heads = ["layer shape", f"#pays from, {first.name}", f"#pays from, {second.name}",
             f"#percentage points earlier on {first.name}"]  # fmt: skip
    return table(heads, rows)


def _uses(side: Side, level: float) -> dict[Place, Cell]:
    """The pattern to use at each shape and from where, and the gain at a sparsity; cells sort and compare by the
    pattern.
    """
    starts = data.by_place(side.break_evens)
    best = data.by_place(data.fastest_pattern(side.speedups)) if len(side.speedups) else {}
    found = {}
    for place, rows in starts.items():
        use = overview.favourite(rows, best[place])
        gains = [row["speedup"] for row in best[place] if abs(row["sparsity"] - level) < 0.01]
        gain = f"{format_ratio(gains[0])} at {format_percent(level)}" if gains else ""
        if use is None:
            found[place] = Cell("stay dense", "dense", gain)
        else:
            found[place] = Cell(f"{use['pattern']} {overview.begins(use)}", str(use["pattern"]), gain)
    return found


def _ratio_cell(row: Mapping[Any, Any]) -> Cell:
    unsure = not (row["low"] > 1 or row["high"] < 1)
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(row["ratio"])))
    return Cell(("≈ " if unsure else "") + format_ratio(row["ratio"]), row["ratio"], "", tint)


def _map(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Ratios by shape and sparsity, a slice a pattern; and every pair over its time."""
    order = pairs.groupby(data.PLACE)["second"].max().sort_values(ascending=False, kind="stable")
    places = list(order.index[: maps.SHAPES])
    labels = [plain(data.place_label(*place)) for place in places]
    here = data.at(pairs, places)
    limit = max(0.1, float(np.abs(np.log2(here["ratio"])).max()))
    kinds = {maps.FASTEST: _fastest_of_either(here, [*data.PLACE, "sparsity"])}
    by_pattern = dict(list(here.groupby("pattern", sort=True)))
    kinds |= dict(sorted(by_pattern.items(), key=lambda item: -len(item[1])))  # what was measured most first
    choices = []
    for pattern, own in kinds.items():
        columns = maps.spread(np.sort(own["sparsity"].unique()))
        found = {
            (row["setting"], row["shape"], row["sparsity"]): (float(row["ratio"]), _hover(row, first, second))
            for row in own.to_dict("records")
        }
        grid = [[found.get((*place, sparsity)) for sparsity in columns] for place in places]
        heads = [format_percent(sparsity) if sparsity else "dense" for sparsity in columns]
        choices.append((str(pattern), {"map": maps.heat_map(grid, heads, labels, limit)}))
    sentences = [f"Blue: {first.name} is faster; orange: {second.name} is."]
    if len(places) < len(order):
        sentences.append(f"The map has the {len(places)} shapes that take longest, of {len(order)}.")
    charts = [
        Chart(
            "map", f"How many times as fast {first.name} is, by shape and sparsity", choices=choices, label="Pattern"
        ),
        Chart(
            "pairs",
            f"Every shared point by its time; above 1× {first.name} is faster",
            _scatter(thinned(pairs, POINTS), first, second),
        ),
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
                "y": short(own["ratio"]),
                "marker": {
                    "color": colour(str(name)), "symbol": figures.symbol(str(name)), "size": 7, "opacity": 0.8,
                },
                "text": [_hover(row, first, second) for row in own.to_dict("records")],
                "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    low, high = min(0.9, float(pairs["ratio"].min())), max(1.1, float(pairs["ratio"].max()))
    shortest, longest = float(pairs["second"].min()), float(pairs["second"].max())
    layout = {
        "xaxis": time_axis(f"time on {plain(second.name)}", shortest, longest),
        "yaxis": {
            "title": {"text": "times as fast"}, "type": "log",
            "range": [math.log10(low) - 0.03, math.log10(high) + 0.03], **figures.log_ticks(low, high, "×"),
        },
        "shapes": [line_at(y=1)], "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], first: Side, second: Side) -> str:
    names = dict.fromkeys([row["pattern"], row.get("second_pattern", row["pattern"])])
    what = " and ".join(names) + (f" at {format_percent(row['sparsity'])}" if row["sparsity"] else "")
    return (
        f"<b>{plain(row['shape'])}</b><br>{plain(what)}<br>{format_ratio(row['ratio'], row['low'], row['high'])}<br>"
        f"{format_seconds(row['first'])}, {plain(row['first_engine'])} ({plain(first.name)})<br>"
        f"{format_seconds(row['second'])}, {plain(row['second_engine'])} ({plain(second.name)})"
    )


def _by_pattern(first: Side, second: Side, pairs: pd.DataFrame) -> Section:
    """Ratios by pattern, and from where each pays on either side."""
    rows: list[list[Cell | str]] = []
    for pattern, own in pairs.groupby("pattern", sort=True):
        middle, least, most = _median(own["ratio"]), float(own["ratio"].min()), float(own["ratio"].max())
        starts = [_pattern_start(side, str(pattern)) for side in (first, second)]
        rows.append([
            str(pattern), count_cell(len(own)), Cell(format_ratio(middle), middle), Cell(format_ratio(least), least),
            Cell(format_ratio(most), most), *starts,
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
        return Cell(NOTHING)
    start, at_lowest = overview.typical_start(own)
    if start == math.inf:
        return Cell("never", 2.0)
    sign = "at " if (own["sparsities"] == 1).all() else "≤ " if at_lowest else ""
    return Cell(sign + format_percent_rounded_up(start), start)


def _changes(changes: Sequence[Change]) -> Section:
    """Every point that became slower or faster, or got lost, judged by its samples."""
    counts = Counter(change.kind for change in changes)
    told = [change for change in changes if change.kind != SAME]
    rows: list[list[Cell | str]] = [
        [change.kind, change_label(change), Cell(format_seconds(change.before), change.before),
         Cell(format_seconds(change.after), change.after),
         Cell(format_ratio(change.ratio, change.low, change.high), change.ratio, change.reason)]
        for change in told[:CHANGES]
    ]  # fmt: skip
    said = ", ".join(f"{format_count(counts[kind])} {kind}" for kind in KINDS if counts[kind])
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
    sparsity = format_percent(key["sparsity_target"]) if key["sparsity_target"] else ""
    engine = data.engine_name(key["backend"], key["kernel_requested"] or "")
    return ", ".join(text for text in (what, f"{key['pattern']} {sparsity}".strip(), engine) if text)


def _environment(first: Side, second: Side) -> Section:
    """Machines, software and ways of measuring in two columns, what differs first."""
    known = [_facts(side) for side in (first, second)]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    rows = [(name, *(found.get(name, NOTHING) for found in known)) for name in names]
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
                text = format_bytes(value) if name.endswith("_bytes") else str(value)
                if text not in values:
                    values.append(text)
    facts = {name: ", ".join(values) for name, values in found.items()}
    return {name.removesuffix("_bytes"): text for name, text in facts.items()} | data.settings(side.inputs.table)


def _provenance(first: Side, second: Side, command: Sequence[str]) -> Section:
    files = [
        [side.name, source.role, format_place(source.path), source.digest[:16]]
        for side in (first, second)
        for source in side.inputs.sources
    ]
    tables = [("Files", table(["side", "what", "file", "hash"], files)), *sections.made_with(command)]
    return Section("provenance", "Provenance", tables=tables)
