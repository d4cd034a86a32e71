"""The first page: what to use where, what it gains and how sure that is: title, sentences, tiles and one table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from latbench.base.number_format import (
    NOTHING,
    format_bytes,
    format_count,
    format_percent,
    format_percent_rounded_up,
    format_ratio,
    format_seconds,
)
from latbench.report import frames as data
from latbench.report.elements import Cell, Section, Table, Tile, table
from latbench.report.report_data import Content
from sparse_kernels import patterns

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.verify import SpeedupVerdict

MEANINGS = {
    patterns.Unstructured: "each weight on its own",
    patterns.NM: "{keep} of {of} neighbours in a row are kept",
    patterns.VectorWise: "{v} rows of a column at once",
    patterns.VectorNM: "{v} rows of a column at once, {keep} of {of} neighbours are kept",
    patterns.ShflBW: "{v} rows of a column at once, after rows were put in a new order",
    patterns.BlockWise: "blocks of {rows} rows and {cols} columns",
}
MOST_TOLD = 100.0  # a ceiling beyond it says no more than that next to nothing is fixed

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Headline:
    """A title, a sentence or two, tiles; `badge` is (kept | missed, text) where a promise was verified."""

    title: str
    lead: str
    tiles: list[Tile]
    badge: tuple[str, str] | None = None


def what_pays(content: Content, device: str) -> Headline:
    """What the table alone answers, over all its shapes: what to use where, what it gains, how sure that is."""
    speedups, shapes = content.speedups, len(content.places)
    uses = favourites(content)
    paying = shapes - uses[STAY_DENSE]
    start, at_lowest = typical_start(content.starts)
    best = data.fastest_pattern(speedups)
    level = min(data.levels(speedups), key=lambda sparsity: abs(sparsity - 0.75))
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
        f"{_alone(speedups)}At {at}, {gains} of {_things(len(at_level), 'shape')} gain"
        + (f", {certain} of them beyond doubt: the whole 95% interval lies above 1×." if gains else ".")
        + (" Only time is compared: what accuracy a pattern costs is another matter." if gains else "")
    )  # fmt: skip
    noise = content.noise
    width = format_percent(float(noise["median"].median())) if len(noise) else NOTHING
    sure = int(content.break_evens.groupby(data.PLACE)["certain"].min().notna().sum())
    tiles = [
        Tile(
            "Shapes that gain",
            f"{paying} of {shapes}",
            f"{sure} beyond doubt: a pattern is faster than dense up to the highest sparsity it was timed at",
        ),
        Tile(f"Gain at {at}", format_ratio(middle), f"median shape, {worst} to {top}"),
        Tile("Pays from", from_there, "the fastest pattern, up to the highest sparsity, median shape"),
        Tile("Noise", width, "typical width of a time's 95% interval: smaller differences are none"),
    ]
    return Headline(title, lead, tiles)


def _alone(speedups: pd.DataFrame) -> str:
    """A warning where the fastest dense engine is the only one that was timed; empty where there were others."""
    engines = speedups.groupby(data.PLACE)[["dense_engine", "dense_engines"]].first()
    alone = engines[engines["dense_engines"] == 1]
    if alone.empty:
        return ""
    names = " or ".join(sorted(set(alone["dense_engine"])))
    where = "all" if len(alone) == len(engines) else f"{len(alone)} of {len(engines)}"
    return f"At {where} shapes {names} is the only one that was timed, and others may be faster. "


STAY_DENSE = "dense"


def favourites(content: Content) -> Counter[str]:
    """How many shapes have each pattern as the one to use, or should stay dense."""
    best = data.fastest_pattern(content.speedups)
    wins = best.groupby([*data.PLACE, "pattern"]).size().rename("wins").reset_index()
    paying = content.break_evens.dropna(subset="break_even").merge(wins, how="left", on=[*data.PLACE, "pattern"])
    ordered = paying.fillna({"wins": 0}).sort_values(["wins", "best"], ascending=False, kind="stable")
    counts = Counter(ordered.drop_duplicates(data.PLACE)["pattern"])
    dense = len(content.places) - counts.total()
    return counts + Counter({STAY_DENSE: dense})


def typical_start(starts: pd.DataFrame) -> tuple[float, bool]:
    """The break-even at the median shape (inf: never), and whether it may be lower. `starts`: a row a shape."""
    found = starts["break_even"].fillna(math.inf)
    start = float(found.quantile(0.5, interpolation="higher"))
    return start, bool((starts["at_lowest"] & (found <= start)).sum() * 2 >= len(found))


def _uses(uses: Counter[str], shapes: int) -> str:
    """What to use at how many shapes, in a sentence."""
    if uses[STAY_DENSE] == shapes:
        return "stay dense, nothing measured is faster for good."
    named = [(pattern, count) for pattern, count in uses.most_common() if pattern != STAY_DENSE]
    (first, most), others = named[0], named[1:]
    texts = [f"use {first} at {most} of {_things(shapes, 'layer shape')}"]
    texts += [f"{pattern} at {count}" for pattern, count in others[:2]]
    if rest := sum(count for _, count in others[2:]):
        texts.append(f"others at {rest}")
    if uses[STAY_DENSE]:
        texts.append(f"and stay dense at {uses[STAY_DENSE]}")
    return f"{', '.join(texts)} (from where on, below)."


def _things(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")


def in_short(profile: Profile) -> str:
    """Which patterns a profile uses in how many layers, in a sentence."""
    found: dict[str, list[float]] = {}
    for layer in profile.layers.values():
        found.setdefault(layer.pattern, []).append(layer.sparsity)
    texts = []
    for pattern, sparsities in sorted(found.items(), key=lambda item: (item[0] == STAY_DENSE, -len(item[1]))):
        ends = list(dict.fromkeys(format_percent(end) for end in (min(sparsities), max(sparsities))))
        at = "" if pattern == STAY_DENSE else f" at {' to '.join(ends)}"
        texts.append(f"{pattern}{at} in {_things(len(sparsities), 'layer')}")
    return f"What it uses: {', '.join(texts)}."


def promise(verdict: SpeedupVerdict, profile: Profile | None) -> Headline:
    """What was promised and what was measured."""
    target, gain = format_ratio(verdict.target), format_ratio(verdict.measured_speedup)
    measured, predicted = format_seconds(verdict.measured_seconds), format_seconds(verdict.predicted_seconds)
    dense = format_seconds(verdict.dense_seconds)
    if gain == target and not verdict.met:
        gain = f"{verdict.measured_speedup:.4f}×"
    title = f"{verdict.task} runs {gain} faster" + (", as promised" if verdict.met else f", not {target} as promised")
    narrow = verdict.measured_speedup_low < verdict.target <= verdict.measured_speedup
    off = verdict.measured_seconds / verdict.predicted_seconds - 1
    difference = f"{format_percent(abs(off))} {'above' if off > 0 else 'below'} it"
    inside = verdict.predicted_low <= verdict.measured_seconds <= verdict.predicted_high
    where, whose = {
        "deepsparse": (" on DeepSparse", ", for latbench's own kernels,"), "numba-bf16": (" in bfloat16", ""),
    }.get(verdict.backend, ("", ""))  # fmt: skip
    lead = (
        f"The target was {target} over the fastest dense engine. Measured end to end, dense and pruned in turn, the "
        f"pruned model takes {measured}{where} where {verdict.dense_engine} takes {dense}: "
        f"{format_ratio(verdict.measured_speedup, verdict.measured_speedup_low, verdict.measured_speedup_high)}. "
        f"{'The interval reaches below the target: it was met, but not beyond the noise. ' if narrow else ''}"
        f"The prediction{whose} was {predicted}; the measurement lies {difference}, "
        f"{'inside' if inside else 'outside'} the interval." + (f" {in_short(profile)}" if profile else "")
    )
    interval = f"{format_seconds(verdict.predicted_low)} to {format_seconds(verdict.predicted_high)}"
    sure = f"{verdict.measured_speedup_low:.2f}–{format_ratio(verdict.measured_speedup_high)}"
    name = verdict.score_name or "score"
    tiles = [
        Tile("Target", target, "over the fastest dense engine, end to end"),
        Tile("Measured", gain, f"{measured} instead of {dense} ({verdict.dense_engine})"),
        Tile("How sure", sure, "95% interval of the measured speedup, dense and pruned timed in turns"),
        Tile("Predicted", predicted, f"interval {interval}"),
        Tile(
            name.capitalize(), score(verdict.score_pruned, name), f"pruned; {score(verdict.score_dense, name)} dense"
        ),
    ]
    if profile and profile.ceiling and profile.ceiling < MOST_TOLD:
        tiles.append(Tile("Ceiling", format_ratio(profile.ceiling), "if every searched layer took no time at all"))
    if profile and (weights := profile.weights):
        beside = f"all of them, packed; {format_bytes(weights.most)} allowed, {format_bytes(weights.dense)} dense"
        tiles.append(Tile("Weights", format_bytes(weights.packed), beside))
    return Headline(title, lead, tiles, ("kept", "promise kept") if verdict.met else ("missed", "promise missed"))


def score(value: float, name: str) -> str:
    """A score as text: a percentage where its name says that it is a share, else four significant digits."""
    is_share = 0 <= value <= 1 and "accuracy" in name.lower()
    return f"{100 * value:.2f}%" if is_share else f"{value:.4g}"


def verdicts(speedups: pd.DataFrame, break_evens: pd.DataFrame, places: Sequence[tuple[str, str]]) -> Table:
    """One row for each of `places`: what to use in a sentence, the fastest pattern at the common sparsities, the
    dense time.
    """
    shown = data.levels(speedups)
    best = data.fastest_pattern(speedups)
    strongest = max(math.log2(max(best["speedup"].max(), 1.01)), 1.0)
    fastest, starts = data.by_place(data.at(best, places)), data.by_place(data.at(break_evens, places))
    rows = []
    for place in places:
        first, at = fastest[place][0], {row["sparsity"]: row for row in fastest[place]}
        cells = [_gain(at[level], strongest) if level in at else Cell(NOTHING) for level in shown]
        dense = Cell(format_seconds(first["dense_seconds"]), first["dense_seconds"], str(first["dense_engine"]))
        start = min((row["break_even"] for row in starts[place] if not math.isnan(row["break_even"])), default=2.0)
        verdict = Cell(verdict_sentence(starts[place], fastest[place]), start)
        rows.append([Cell(data.place_label(*place)), verdict, *cells, dense])
    headings = [f"#at {format_percent(level)}" for level in shown]
    return replace(table(["layer shape", "verdict", *headings, "#fastest dense"], rows), cards=True)


def section(content: Content, places: Sequence[tuple[str, str]], headline: Headline | None) -> Section:
    """Shape by shape what to use; `headline` is about the table, where the page's own is about a promise."""
    return Section(
        "pays",
        "What to use where, shape by shape",
        [headline.lead] if headline else [],
        tables=[(
            "The fastest pattern at each sparsity, against the fastest dense engine",
            verdicts(content.speedups, content.break_evens, places),
        )],
        tiles=headline.tiles if headline else [],
        notes=[
            "≈ marks a difference within the 95% intervals of the two times, or of times without one. At one "
            "sparsity the patterns do not cost the same accuracy: unstructured costs least, then N:M, shuffled and "
            "plain vectors, then blocks. A layer a → b has a inputs and b outputs; n counts the tokens of a call.",
            *_close(content.speedups),
            *filter(None, [glossary(content.speedups["pattern"].unique())]),
        ],
    )  # fmt: skip


def _close(speedups: pd.DataFrame) -> list[str]:
    overlap, unknown, several = data.contested(speedups)
    said = [
        f"Which pattern is the fastest is within the noise at {format_count(overlap)} of {format_count(several)} "
        "shapes and sparsities: there the next one is as good a choice."
    ] if overlap else []  # fmt: skip
    if unknown:
        said.append(
            f"How sure the fastest pattern is cannot be told at {format_count(unknown)} of {format_count(several)} "
            "shapes and sparsities: too few samples were kept to know the noise."
        )
    return said


def glossary(names: Iterable[str]) -> str:
    """What the names of patterns mean, in a sentence; empty where none is known."""
    texts = []
    for name in sorted(names):
        try:
            pattern = patterns.parse(name)
        except ValueError:  # of a table from elsewhere
            continue
        texts.append(f"{name}: {MEANINGS[type(pattern)].format(**vars(pattern))}")
    return f"What is pruned together: {'; '.join(texts)}." if texts else ""


def _gain(row: Record, strongest: float) -> Cell:
    gain, unsure = float(row["speedup"]), not (row["speedup_low"] > 1 or row["speedup_high"] < 1)
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(gain) / strongest))
    return Cell(("≈ " if unsure else "") + format_ratio(gain), gain, str(row["pattern"]), tint)


def verdict_sentence(break_evens: Sequence[Record], best: Sequence[Record]) -> str:
    """What to use at one shape: the pattern that is fastest most often, and where others pay earlier.

    `break_evens`: of each pattern at that shape; `best`: the fastest pattern at each sparsity there.
    """
    use = favourite(break_evens, best)
    if use is None:
        top = max(best, key=lambda row: row["speedup"])
        if top["speedup"] <= 1:
            return "Stay dense: nothing measured is faster."
        doubt = " beyond the noise" if any(not math.isnan(row["possible"]) for row in break_evens) else ""
        at_best = f"{top['pattern']} at {format_percent(top['sparsity'])}, {format_ratio(top['speedup'])}"
        return f"Stay dense: nothing stays faster up to the highest sparsity{doubt}; at best {at_best}."
    paying = {str(row["pattern"]): row for row in break_evens if not math.isnan(row["break_even"])}
    earliest = min(paying, key=lambda pattern: paying[pattern]["break_even"])
    sentence = f"Use {use['pattern']} {begins(use)}{_doubt(use)}"
    if paying[earliest]["break_even"] < use["break_even"]:
        sentence += f"; {earliest} pays {begins(paying[earliest])}{_doubt(paying[earliest])}"
    said = {str(use["pattern"]), earliest}
    for row in break_evens:
        if row["pattern"] == "unstructured" and "unstructured" not in said:
            sentence += f"; unstructured {begins(row) + _doubt(row) if 'unstructured' in paying else loses(row)}"
    return sentence + "."


def loses(start: Record) -> str:
    """How a pattern fails that does not stay faster up to the highest sparsity measured."""
    if not math.isnan(start["possible"]):
        return "never, within the noise"
    if start["best"] <= 1:
        return "never"
    return f"not for good, at best {format_ratio(start['best'])} at {format_percent(start['best_sparsity'])}"


def favourite(break_evens: Sequence[Record], best: Sequence[Record]) -> Record | None:
    """Of the patterns that pay at one shape the one that is fastest most often; None where none pays."""
    wins = Counter(str(row["pattern"]) for row in best)  # as `favourites` counts
    paying = [row for row in break_evens if not math.isnan(row["break_even"])]
    return max(paying, key=lambda row: (wins[str(row["pattern"])], row["best"]), default=None)


def begins(start: Record) -> str:
    """From where on a pattern pays: `from 62%`, `at 50% and above`."""
    at = format_percent_rounded_up(float(start["break_even"]))
    if start["sparsities"] == 1:
        return f"at {at}"
    return f"at {at} and above" if start["at_lowest"] else f"from {at}"


def _doubt(start: Record) -> str:
    """What the intervals leave open of a break-even sparsity."""
    if not start["judged"]:
        return " (not certain: the noise is unknown)"
    if math.isnan(start["certain"]):
        return " (not certain: within the noise)"
    if start["certain"] - start["break_even"] < 0.01:
        return ""
    return f" (certain from {format_percent_rounded_up(float(start['certain']))})"
