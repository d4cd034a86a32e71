"""The figures a script or a person wants first: the summary file and the short table printed at the end."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.markup import escape

from latbench.report import overview, units
from latbench.report.inputs import Inputs

KEYS = (
    "target", "met", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_speedup",
    "score_dense", "score_pruned",
)  # fmt: skip


def summarise(inputs: Inputs) -> dict[str, Any]:
    """The figures under `KEYS`; what was not verified or predicted is None."""
    found = inputs.verification or {}
    return {key: found.get(key, getattr(inputs.profile, key, None)) for key in KEYS}


def summary_table(inputs: Inputs, path: str) -> rich.table.Table:
    """The summary as rows of name and value; only what is known gets a row."""
    found = summarise(inputs)
    shown = rich.table.Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    if found["target"] is not None:
        shown.add_row("task", escape(overview.task_name(inputs)))
        shown.add_row("target", units.ratio(found["target"]))
    if found["score_dense"] is not None:
        name = str((inputs.verification or {}).get("score_name") or "score")
        dense, pruned = (overview.score(found[f"score_{which}"], name) for which in ("dense", "pruned"))
        shown.add_row(escape(name), f"{dense} dense, {pruned} pruned")
    if found["predicted_seconds"] is not None:
        predicted = (found[f"predicted_{which}"] for which in ("seconds", "low", "high"))
        shown.add_row("predicted", units.seconds(*predicted))
    if found["measured_seconds"] is not None:
        gain = units.ratio(found["measured_speedup"])
        shown.add_row("measured", f"{units.seconds(found['measured_seconds'])}, {gain} faster")
        shown.add_row("promise", "[green]met[/]" if found["met"] else "[red]missed[/]")
    shown.add_row("report", escape(path))
    return shown
