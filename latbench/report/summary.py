"""The figures a script or a person wants first: the summary file and the short table printed at the end."""

from __future__ import annotations

from typing import Any

import rich.table

from latbench.report import sections, units
from latbench.report.inputs import Inputs

KEYS = (
    "target", "met", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_speedup",
    "score_dense", "score_pruned",
)  # fmt: skip


def summarise(inputs: Inputs) -> dict[str, Any]:
    """The figures under `KEYS`; what was not verified or predicted is None."""
    known = {**(inputs.profile or {}), **(inputs.verification or {})}
    return {key: known.get(key) for key in KEYS}


def summary_table(inputs: Inputs, path: str) -> rich.table.Table:
    """The summary as rows of name and value; only what is known gets a row."""
    found = summarise(inputs)
    name = str((inputs.verification or {}).get("score_name") or "score")
    shown = rich.table.Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    if inputs.profile or inputs.verification:
        shown.add_row("task", sections.task_name(inputs))
        shown.add_row("target", units.ratio(found["target"]))
    if found["score_dense"] is not None:
        shown.add_row(name, f"{sections.score(found['score_dense'], name)} dense, {sections.score(found['score_pruned'], name)} pruned")
    if found["predicted_seconds"] is not None:
        shown.add_row("predicted", units.seconds(found["predicted_seconds"], found["predicted_low"], found["predicted_high"]))
    if found["measured_seconds"] is not None:
        shown.add_row("measured", f"{units.seconds(found['measured_seconds'])}, {units.ratio(found['measured_speedup'])} faster")
        shown.add_row("promise", "[green]met[/]" if found["met"] else "[red]missed[/]")
    shown.add_row("report", path)
    return shown
