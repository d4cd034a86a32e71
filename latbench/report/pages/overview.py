"""The top of the page: the pattern to use at each shape, with its gain and its certainty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from latbench.base.engine_registry import is_deepsparse
from latbench.base.number_format import (
    NOTHING,
    format_bytes,
    format_count,
    format_percent,
    format_percent_rounded_up,
    format_ratio,
    format_score,
    format_seconds,
)
from latbench.report import point_frames
from latbench.report.elements import Cell, FigureTile, Section, Table, build_table
from latbench.report.report_data import ReportData
from search.pipeline.speedup_verdict import INCONCLUSIVE, KEPT, MISSED
from sparse_kernels.patterns import NM, BlockWise, ShflBW, Unstructured, VectorNM, VectorWise, parse

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.speedup_verdict import SpeedupVerdict

MEANINGS = {
    Unstructured: "single weights",
    NM: "{keep} of {of} neighbours in a row are kept",
    VectorWise: "{v} rows of a column at once",
    VectorNM: "{v} rows of a column at once, {keep} of {of} neighbours are kept",
    ShflBW: "{v} rows of a column at once, after a reordering of rows",
    BlockWise: "blocks of {rows} rows and {cols} columns",
}
MOST_CEILING = 100.0  # shown at most: a higher ceiling only says that almost nothing is fixed

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Headline:
    """A title, sentences and tiles; `badge` is (outcome, text) where a promise was verified."""

    title: str
    lead: str
    tiles: list[FigureTile]
    badge: tuple[str, str] | None = None


def build_table_headline(content: ReportData, device: str) -> Headline:
    """Build the headline of a table alone: the patterns to use, their gain and their certainty over all shapes."""
    speedups, shapes = content.speedups, len(content.places)
    uses = count_favourites(content)
    paying = shapes - uses[STAY_DENSE]
    start, at_lowest = find_typical_start(content.starts)
    best = point_frames.select_fastest_patterns(speedups)
    level = min(point_frames.select_levels(speedups), key=lambda sparsity: abs(sparsity - 0.75))
    at_level = best[best["sparsity"] == level]
    middle = float(at_level["speedup"].median())
    worst, top = (format_ratio(at_level["speedup"].agg(how)) for how in ("min", "max"))
    certain = int((at_level["speedup_low"] > 1).sum())
    gains = int((at_level["speedup"] > 1).sum())
    at = format_percent(level)
    spread = f" ({worst} to {top})" if shapes > 1 else ""
    title = f"At {at} sparsity, layers run {format_ratio(middle)} as fast as dense{spread}"
    from_there = "never" if start == math.inf else ("≤ " if at_lowest else "") + format_percent_rounded_up(start)
    lead = (
        f"On {device}: {_uses(uses, shapes)} Every speedup is over the fastest dense engine at the same shape. "
        f"{_only_engine(speedups)}At {at}, {gains} of {_count(len(at_level), 'shape')} gain"
        + (f", {certain} of them with certainty: the whole 95% interval lies above 1×." if gains else ".")
        + (" Only time is compared, not accuracy." if gains else "")
    )  # fmt: skip
    noise = content.noise
    width = format_percent(float(noise["median"].median())) if len(noise) else NOTHING
    sure = int(content.break_evens.groupby(point_frames.PLACE)["certain"].min().notna().sum())
    tiles = [
        FigureTile(
            "Shapes that gain",
            f"{paying} of {shapes}",
            f"{sure} with certainty: a pattern is faster than dense up to its highest measured sparsity",
        ),
        FigureTile(f"Gain at {at}", format_ratio(middle), f"median shape, {worst} to {top}"),
        FigureTile(
            "Pays from",
            from_there,
            "sparsity at the median shape, up to the highest measured one, with the fastest pattern",
        ),
        FigureTile("Noise", width, "typical width of a time's 95% interval: ignore smaller differences"),
    ]
    return Headline(title, lead, tiles)


def _only_engine(speedups: pd.DataFrame) -> str:
    """Warn of shapes with a single dense engine; return an empty text if there are none."""
    engines = speedups.groupby(point_frames.PLACE)[["dense_engine", "dense_engines"]].first()
    alone = engines[engines["dense_engines"] == 1]
    if alone.empty:
        return ""
    names = " or ".join(sorted(set(alone["dense_engine"])))
    where = "all" if len(alone) == len(engines) else f"{len(alone)} of {len(engines)}"
    return f"At {where} shapes {names} is the only dense engine that was timed; others may be faster. "


STAY_DENSE = "dense"


def count_favourites(content: ReportData) -> Counter[str]:
    """Count the shapes for which each pattern, or dense, is the best choice."""
    best = point_frames.select_fastest_patterns(content.speedups)
    wins = best.groupby([*point_frames.PLACE, "pattern"]).size().rename("wins").reset_index()
    paying = content.break_evens.dropna(subset="break_even").merge(
        wins, how="left", on=[*point_frames.PLACE, "pattern"]
    )
    ordered = paying.fillna({"wins": 0}).sort_values(["wins", "best"], ascending=False, kind="stable")
    counts = Counter(ordered.drop_duplicates(point_frames.PLACE)["pattern"])
    dense = len(content.places) - counts.total()
    return counts + Counter({STAY_DENSE: dense})


def find_typical_start(starts: pd.DataFrame) -> tuple[float, bool]:
    """Return the break-even at the median shape (inf: never), and whether it may be lower."""
    found = starts["break_even"].fillna(math.inf)
    start = float(found.quantile(0.5, interpolation="higher"))
    return start, bool((starts["at_lowest"] & (found <= start)).sum() * 2 >= len(found))


def _uses(uses: Counter[str], shapes: int) -> str:
    """Return a sentence with the number of shapes for each pattern."""
    if uses[STAY_DENSE] == shapes:
        return "stay dense, because no pattern stays faster up to the highest sparsity."
    named = [(pattern, count) for pattern, count in uses.most_common() if pattern != STAY_DENSE]
    (first, most), others = named[0], named[1:]
    texts = [f"use {first} at {most} of {_count(shapes, 'layer shape')}"]
    texts += [f"{pattern} at {count}" for pattern, count in others[:2]]
    if rest := sum(count for _, count in others[2:]):
        texts.append(f"others at {rest}")
    if uses[STAY_DENSE]:
        texts.append(f"and stay dense at {uses[STAY_DENSE]}")
    return f"{', '.join(texts)} (the table below gives the sparsities)."


def _count(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")


def format_profile(profile: Profile) -> str:
    """Return a sentence with the patterns of a profile and their numbers of layers."""
    found: dict[str, list[float]] = {}
    for layer in profile.layers.values():
        found.setdefault(layer.pattern, []).append(layer.sparsity)
    texts = []
    for pattern, sparsities in sorted(found.items(), key=lambda item: (item[0] == STAY_DENSE, -len(item[1]))):
        ends = list(dict.fromkeys(format_percent(end) for end in (min(sparsities), max(sparsities))))
        at = "" if pattern == STAY_DENSE else f" at {' to '.join(ends)}"
        texts.append(f"{pattern}{at} in {_count(len(sparsities), 'layer')}")
    return f"It uses {', '.join(texts)}."


def build_promise_headline(verdict: SpeedupVerdict, profile: Profile | None) -> Headline:
    """Build the headline of a verified promise."""
    target, gain = format_ratio(verdict.target), format_ratio(verdict.measured_speedup)
    measured, predicted = format_seconds(verdict.measured_seconds), format_seconds(verdict.predicted_seconds)
    dense = format_seconds(verdict.dense_seconds)
    if gain == target and not verdict.met:
        gain = f"{verdict.measured_speedup:.4f}×"
    title = f"{verdict.task} runs {gain} faster" + {
        KEPT: ", as promised", MISSED: f", not {target} as promised",
        INCONCLUSIVE: f": whether it keeps the promised {target} is inconclusive",
    }[verdict.outcome]  # fmt: skip
    off = verdict.measured_seconds / verdict.predicted_seconds - 1
    difference = f"{format_percent(abs(off))} {'above' if off > 0 else 'below'} it"
    inside = verdict.predicted_low <= verdict.measured_seconds <= verdict.predicted_high
    where = verdict.where
    whose = ", for latbench's own kernels," if is_deepsparse(verdict.backend) else ""
    lead = (
        f"The target was {target} over {verdict.rivals}. Measured end to end, dense and pruned in turn, the "
        f"pruned model takes {measured}{where} where {verdict.dense_engine} takes {dense}: "
        f"{format_ratio(verdict.measured_speedup, verdict.measured_speedup_low, verdict.measured_speedup_high)}. "
        f"{'The target lies within the interval. ' if verdict.outcome == INCONCLUSIVE else ''}"
        f"The prediction{whose} was {predicted}; the measurement lies {difference}, "
        f"{'inside' if inside else 'outside'} the interval." + (f" {format_profile(profile)}" if profile else "")
    )
    interval = f"{format_seconds(verdict.predicted_low)} to {format_seconds(verdict.predicted_high)}"
    sure = f"{verdict.measured_speedup_low:.2f}–{format_ratio(verdict.measured_speedup_high)}"
    name = verdict.score_name or "score"
    tiles = [
        FigureTile("Target", target, f"over {verdict.rivals}, end to end"),
        FigureTile("Measured", gain, f"{measured} instead of {dense} ({verdict.dense_engine})"),
        FigureTile("Interval", sure, "95% interval of the measured speedup, dense and pruned timed in turns"),
        FigureTile("Predicted", predicted, f"interval {interval}"),
        FigureTile(
            name.capitalize(),
            format_score(verdict.score_pruned, name),
            f"pruned; {format_score(verdict.score_dense, name)} dense",
        ),
    ]
    if (over := verdict.over_int8) is not None:
        scored = "" if verdict.score_int8 is None else f"; {format_score(verdict.score_int8, name)}"
        beside = f"the dense model on OpenVINO{scored}; {verdict.beside_int8}"
        tiles.append(FigureTile("Dense in int8", format_seconds(over[0]), beside))
    if profile and profile.ceiling and profile.ceiling < MOST_CEILING:
        tiles.append(FigureTile("Ceiling", format_ratio(profile.ceiling), "if every searched layer took no time"))
    if profile and (weights := profile.weights):
        beside = f"all of them, packed; {format_bytes(weights.most)} allowed, {format_bytes(weights.dense)} dense"
        tiles.append(FigureTile("Weights", format_bytes(weights.packed), beside))
    return Headline(title, lead, tiles, (verdict.outcome, f"promise {verdict.outcome}"))


def build_verdicts(speedups: pd.DataFrame, break_evens: pd.DataFrame, places: Sequence[tuple[str, str]]) -> Table:
    """Build the table with a verdict, the fastest patterns at common sparsities and the dense time of each place."""
    shown = point_frames.select_levels(speedups)
    best = point_frames.select_fastest_patterns(speedups)
    strongest = max(math.log2(max(best["speedup"].max(), 1.01)), 1.0)
    fastest, starts = (
        point_frames.group_by_place(point_frames.select_places(best, places)),
        point_frames.group_by_place(point_frames.select_places(break_evens, places)),
    )
    rows = []
    for place in places:
        first, at = fastest[place][0], {row["sparsity"]: row for row in fastest[place]}
        cells = [_gain(at[level], strongest) if level in at else Cell(NOTHING) for level in shown]
        baseline = point_frames.name_baseline(first["dense_engine"], first["dense_dtype"])
        dense = Cell(format_seconds(first["dense_seconds"]), first["dense_seconds"], baseline)
        start = min((row["break_even"] for row in starts[place] if not math.isnan(row["break_even"])), default=2.0)
        verdict = Cell(format_verdict(starts[place], fastest[place]), start)
        rows.append([Cell(point_frames.format_place(*place)), verdict, *cells, dense])
    headings = [f"#at {format_percent(level)}" for level in shown]
    return replace(build_table(["layer shape", "verdict", *headings, "#fastest dense"], rows), cards=True)


def build_section(content: ReportData, places: Sequence[tuple[str, str]], headline: Headline | None) -> Section:
    """Build the section with a verdict for each shape.

    `headline` is that of the table, given where the page's own headline is about a promise.
    """
    return Section(
        "pays",
        "The pattern to use at each shape",
        [headline.lead] if headline else [],
        tables=[(
            "The fastest pattern at each sparsity, against the fastest dense engine",
            build_verdicts(content.speedups, content.break_evens, places),
        )],
        tiles=headline.tiles if headline else [],
        notes=[
            "≈ marks a difference within the 95% intervals of the two times, or of times without an interval. At "
            "equal sparsity the patterns differ in accuracy: unstructured loses least, then N:M, shuffled and plain "
            "vectors, then blocks. A layer a → b has a inputs and b outputs; n is the number of tokens per call.",
            *_close(content.speedups),
            *filter(None, [format_glossary(content.speedups["pattern"].unique())]),
        ],
    )  # fmt: skip


def _close(speedups: pd.DataFrame) -> list[str]:
    overlap, unknown, several = point_frames.count_contested(speedups)
    said = [
        f"The two fastest patterns differ within the noise at {format_count(overlap)} of {format_count(several)} "
        "shapes and sparsities: either is a good choice there."
    ] if overlap else []  # fmt: skip
    if unknown:
        said.append(
            f"The certainty of the fastest pattern is unknown at {format_count(unknown)} of {format_count(several)} "
            "shapes and sparsities, because too few samples were kept."
        )
    return said


def format_glossary(names: Iterable[str]) -> str:
    """Return a sentence that explains the names of patterns; empty where none is known."""
    texts = []
    for name in sorted(names):
        try:
            pattern = parse(name)
        except ValueError:  # of a table from elsewhere
            continue
        texts.append(f"{name}: {MEANINGS[type(pattern)].format(**vars(pattern))}")
    return f"Weights pruned together: {'; '.join(texts)}." if texts else ""


def _gain(row: Record, strongest: float) -> Cell:
    gain, unsure = float(row["speedup"]), not (row["speedup_low"] > 1 or row["speedup_high"] < 1)
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(gain) / strongest))
    return Cell(("≈ " if unsure else "") + format_ratio(gain), gain, str(row["pattern"]), tint)


def format_verdict(break_evens: Sequence[Record], best: Sequence[Record]) -> str:
    """Return the verdict of one shape: the pattern that is fastest most often, and a pattern that pays earlier.

    `break_evens` holds a row for each pattern at that shape, `best` the fastest pattern at each sparsity.
    """
    use = select_favourite(break_evens, best)
    if use is None:
        top = max(best, key=lambda row: row["speedup"])
        if top["speedup"] <= 1:
            return "Stay dense: no pattern is faster."
        doubt = " beyond the noise" if any(not math.isnan(row["possible"]) for row in break_evens) else ""
        at_best = f"{top['pattern']} at {format_percent(top['sparsity'])}, {format_ratio(top['speedup'])}"
        return f"Stay dense: no pattern stays faster up to the highest sparsity{doubt}; at best {at_best}."
    paying = {str(row["pattern"]): row for row in break_evens if not math.isnan(row["break_even"])}
    earliest = min(paying, key=lambda pattern: paying[pattern]["break_even"])
    sentence = f"Use {use['pattern']} {format_start(use)}{_doubt(use)}"
    if paying[earliest]["break_even"] < use["break_even"]:
        sentence += f"; {earliest} pays {format_start(paying[earliest])}{_doubt(paying[earliest])}"
    said = {str(use["pattern"]), earliest}
    for row in break_evens:
        if row["pattern"] == "unstructured" and "unstructured" not in said:
            sentence += (
                f"; unstructured {format_start(row) + _doubt(row) if 'unstructured' in paying else format_loss(row)}"
            )
    return sentence + "."


def format_loss(start: Record) -> str:
    """Return how a pattern fails that does not stay faster up to the highest sparsity."""
    if not math.isnan(start["possible"]):
        return "never, within the noise"
    if start["best"] <= 1:
        return "never"
    return f"not throughout, at best {format_ratio(start['best'])} at {format_percent(start['best_sparsity'])}"


def select_favourite(break_evens: Sequence[Record], best: Sequence[Record]) -> Record | None:
    """Select the paying pattern that is fastest most often at one shape; None where no pattern pays."""
    wins = Counter(str(row["pattern"]) for row in best)  # as `favourites` counts
    paying = [row for row in break_evens if not math.isnan(row["break_even"])]
    return max(paying, key=lambda row: (wins[str(row["pattern"])], row["best"]), default=None)


def format_start(start: Record) -> str:
    """Return where a pattern starts to pay: `from 62%`, `at 50% and above`."""
    at = format_percent_rounded_up(float(start["break_even"]))
    if start["sparsities"] == 1:
        return f"at {at}"
    return f"at {at} and above" if start["at_lowest"] else f"from {at}"


def _doubt(start: Record) -> str:
    """Return the doubt that the intervals leave in a break-even sparsity."""
    if not start["judged"]:
        return " (not certain: the noise is unknown)"
    if math.isnan(start["certain"]):
        return " (not certain: within the noise)"
    if start["certain"] - start["break_even"] < 0.01:
        return ""
    return f" (certain from {format_percent_rounded_up(float(start['certain']))})"
