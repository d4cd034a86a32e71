"""The first page: what to use where, what it gains and how sure that is: title, sentences, tiles and one table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from latbench.report import data, units
from latbench.report.views import Cell, Table, Tile, table
from search.profile import Profile
from search.verify import Verdict

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Headline:
    """A title, a sentence or two, tiles; `badge` is (kept | missed, text) where a promise was verified."""

    title: str
    lead: str
    tiles: list[Tile]
    badge: tuple[str, str] | None = None


def what_pays(speedups: pd.DataFrame, break_evens: pd.DataFrame, noise: pd.DataFrame, device: str) -> Headline:
    """What the table alone answers, over all its shapes."""
    shapes = len(data.places(speedups))
    earliest = break_evens.sort_values("break_even").groupby(data.PLACE).first()
    starts = earliest["break_even"].fillna(math.inf)
    paying, start = int((starts < math.inf).sum()), float(starts.median())
    at_lowest = bool((earliest["at_lowest"] & (starts <= start)).sum() * 2 >= shapes)
    best = data.fastest_pattern(speedups)
    level = min(data.levels(speedups), key=lambda sparsity: abs(sparsity - 0.75))
    at_level = best[best["sparsity"] == level]
    favourite = at_level["pattern"].mode().iloc[0]
    middle, worst, top = (units.ratio(at_level["speedup"].agg(how)) for how in ("median", "min", "max"))
    lead = (
        f"{paying} of {shapes} layer shapes run faster sparse than on the fastest dense engine. "
        f"At {units.percent(level)} the pattern that wins most often is {favourite}; the fastest pattern gives "
        f"{middle} at the median shape ({worst} to {top})."
    )
    begins = "never" if start == math.inf else ("≤ " if at_lowest else "") + units.percent(round(start, 2))
    width = units.percent(float(noise["median"].median())) if len(noise) else units.NOTHING
    tiles = [
        Tile("Shapes that gain", f"{paying} of {shapes}", "some pattern is faster than the fastest dense engine"),
        Tile(f"Gain at {units.percent(level)}", middle, f"median shape; {favourite} wins most often"),
        Tile("Pays from", begins, "break-even sparsity at the median shape"),
        Tile("Noise", width, "typical width of a time's 95% interval"),
    ]
    return Headline(f"What sparsity pays on {device}", lead, tiles)


def promise(verdict: Verdict, profile: Profile | None) -> Headline:
    """What was promised and what was measured."""
    target, gain = units.ratio(verdict.target), units.ratio(verdict.measured_speedup)
    measured, predicted = units.seconds(verdict.measured_seconds), units.seconds(verdict.predicted_seconds)
    dense = units.seconds(verdict.dense_seconds)
    title = f"{verdict.task} runs {gain} faster" + (", as promised" if verdict.met else f", not {target} as promised")
    off = verdict.measured_seconds / verdict.predicted_seconds - 1
    difference = f"{units.percent(abs(off))} {'above' if off > 0 else 'below'} it"
    inside = verdict.predicted_low <= verdict.measured_seconds <= verdict.predicted_high
    where, whose = (
        (" on DeepSparse", ", for latbench's own kernels,") if verdict.backend == "deepsparse" else ("", "")
    )
    lead = (
        f"The target was {target} over the fastest dense engine. Measured end to end, dense and pruned in turn, the "
        f"pruned model takes {measured}{where} where {verdict.dense_engine} takes {dense}: "
        f"{units.ratio(verdict.measured_speedup, verdict.measured_speedup_low, verdict.measured_speedup_high)}. "
        f"The prediction{whose} was {predicted}; the measurement lies {difference}, "
        f"{'inside' if inside else 'outside'} the interval."
    )
    interval = f"{units.seconds(verdict.predicted_low)} to {units.seconds(verdict.predicted_high)}"
    name = verdict.score_name or "score"
    tiles = [
        Tile("Target", target, "over the fastest dense engine, end to end"),
        Tile("Measured", gain, f"{measured} instead of {dense} ({verdict.dense_engine})"),
        Tile("Predicted", predicted, f"interval {interval}"),
        Tile(
            name.capitalize(), score(verdict.score_pruned, name), f"pruned; {score(verdict.score_dense, name)} dense"
        ),
    ]
    if profile and profile.ceiling:
        tiles.append(Tile("Ceiling", units.ratio(profile.ceiling), "if every searched layer took no time at all"))
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
    fastest, starts = data.by_place(best), data.by_place(break_evens)
    rows = []
    for place in places:
        first, at = fastest[place][0], {row["sparsity"]: row for row in fastest[place]}
        cells = [_gain(at[level], strongest) if level in at else Cell(units.NOTHING) for level in shown]
        dense = Cell(units.seconds(first["dense_seconds"]), first["dense_seconds"], str(first["dense_engine"]))
        start = min((row["break_even"] for row in starts[place] if not math.isnan(row["break_even"])), default=2.0)
        verdict = Cell(verdict_sentence(starts[place], fastest[place]), start)
        rows.append([Cell(data.place_label(*place)), verdict, *cells, dense])
    headings = [f"#at {units.percent(level)}" for level in shown]
    return table(["layer shape", "verdict", *headings, "#fastest dense"], rows)


def _gain(row: Record, strongest: float) -> Cell:
    gain, unsure = float(row["speedup"]), row["speedup_low"] <= 1 <= row["speedup_high"]
    tint = 0.0 if unsure else max(-1.0, min(1.0, math.log2(gain) / strongest))
    return Cell(("≈ " if unsure else "") + units.ratio(gain), gain, str(row["pattern"]), tint)


def verdict_sentence(break_evens: Sequence[Record], best: Sequence[Record]) -> str:
    """What to use at one shape: the pattern that is fastest most often, and where others pay earlier.

    `break_evens`: of each pattern at that shape; `best`: the fastest pattern at each sparsity there.
    """
    paying = {str(row["pattern"]): row for row in break_evens if not math.isnan(row["break_even"])}
    if not paying:
        top = max(best, key=lambda row: row["speedup"])
        if top["speedup"] <= 1:
            return "Stay dense: nothing measured is faster."
        gain, at = units.ratio(top["speedup"]), units.percent(top["sparsity"])
        return f"Stay dense: {top['pattern']} gains {gain} at {at} and loses again above."
    wins = Counter(str(row["pattern"]) for row in best)
    favourite = max(paying, key=lambda pattern: (wins[pattern], paying[pattern]["best"]))
    earliest = min(paying, key=lambda pattern: paying[pattern]["break_even"])
    sentence = f"Use {favourite} {_from(paying[favourite])}{_doubt(paying[favourite])}"
    if paying[earliest]["break_even"] < paying[favourite]["break_even"]:
        sentence += f"; {earliest} pays {_from(paying[earliest])}"
    if "unstructured" not in {favourite, earliest} and any(row["pattern"] == "unstructured" for row in break_evens):
        sentence += f"; unstructured {_from(paying['unstructured']) if 'unstructured' in paying else 'never'}"
    return sentence + "."


def _from(start: Record) -> str:
    at = units.percent(round(float(start["break_even"]), 2))
    if start["sparsities"] == 1:
        return f"at {at}"
    return f"at {at} and above" if start["at_lowest"] else f"from {at}"


def _doubt(start: Record) -> str:
    """What the intervals leave open of a break-even sparsity."""
    if math.isnan(start["certain"]):
        return " (not certain: within the noise)"
    if start["certain"] - start["break_even"] < 0.01:
        return ""
    return f" (certain from {units.percent(round(float(start['certain']), 2))})"
