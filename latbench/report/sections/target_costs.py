"""The section of milder targets: what they would keep of the score, beside the target of the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latbench.base.number_format import NOTHING, format_ratio, format_score, format_score_change
from latbench.report.elements import Cell, Section, build_table

if TYPE_CHECKING:
    from search.pipeline.milder_targets import MilderTargets


def build_section(milder: MilderTargets) -> Section:
    """Build the section: a row for the dense model, and one for each target."""
    name, dense, own = milder.score_name, milder.dense_score, milder.targets[-1]

    def change(score: float) -> str:
        return format_score_change(score - dense, dense, name)

    sentences = [
        f"At {format_ratio(own.target)}, {name} changes from {format_score(dense, name)} to "
        f"{format_score(own.score, name)} ({change(own.score)}) by one-shot pruning alone. The table shows the "
        "same for milder targets, with predicted speedups. Joint tuning and training usually win back a part. The "
        "profiles use only layers that were pruned for this target, so a search for a milder target may find one "
        "that keeps more."
    ]
    rows = [
        [Cell("dense, in float32"), Cell(NOTHING, 1.0), Cell(format_score(dense, name), dense), Cell(NOTHING, 0.0)]
    ]
    for it in milder.targets:
        rows.append([
            Cell(format_ratio(it.target), it.target), Cell(format_ratio(it.speedup), it.speedup),
            Cell(format_score(it.score, name), it.score), Cell(change(it.score), it.score - dense),
        ])  # fmt: skip
    heads = ["#target", "#predicted speedup", f"#{name}, one-shot", "#change"]
    return Section("milder", "What milder targets keep", sentences, [], [("Targets", build_table(heads, rows))])
