"""The section of milder targets: what they would keep of the score, beside the target of the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latbench.base.number_format import NOTHING, format_ratio, format_score
from latbench.report.elements import Cell, Section, build_table

if TYPE_CHECKING:
    from search.pipeline.milder_targets import MilderTargets


def build_section(milder: MilderTargets) -> Section:
    """Build the section: a row for the dense model, and one for each target."""
    name, dense = milder.score_name, milder.dense_score
    lost = [dense - it.score for it in milder.targets]
    sentences = [
        f"The target of {format_ratio(milder.targets[-1].target)} costs {_format_loss(lost[-1], name)} of the "
        f"{format_score(dense, name)} of the dense model, before any training. Milder targets cost what the table "
        "shows. Their profiles are mixtures of the layers that were pruned for this target: a search for a milder "
        "target may find one that keeps more. Speedups are predicted."
    ]
    rows = [[Cell("dense"), Cell(format_ratio(1.0), 1.0), Cell(format_score(dense, name), dense), Cell(NOTHING, 0.0)]]
    for it, loss in zip(milder.targets, lost, strict=True):
        rows.append([
            Cell(format_ratio(it.target), it.target), Cell(format_ratio(it.speedup), it.speedup),
            Cell(format_score(it.score, name), it.score), Cell(_format_loss(loss, name), loss),
        ])  # fmt: skip
    heads = ["#target", "#predicted speedup", f"#{name}, before training", "#lost"]
    return Section("milder", "What milder targets keep", sentences, [], [("Targets", build_table(heads, rows))])


def _format_loss(loss: float, name: str) -> str:
    """Return a difference of scores as text; what was won has a minus."""
    return ("-" if loss < 0 else "") + format_score(abs(loss), name)
