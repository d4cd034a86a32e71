"""The figures a script or a person wants first: the summary file and the short table printed at the end."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.markup import escape

from latbench.base.number_format import format_bytes, format_ratio, format_seconds
from latbench.report import overview
from latbench.report.inputs import Inputs

KEYS = (
    "target", "met", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_speedup",
    "score_dense", "score_pruned",
)  # fmt: skip
OF_WEIGHTS = ("weight_bytes", "most_bytes", "dense_bytes")


def summarise(inputs: Inputs) -> dict[str, Any]:
    """The figures under `KEYS`, from the verification or else the profile, and under `OF_WEIGHTS`, from the profile.

    What they do not tell is None.
    """
    known = inputs.verdict or inputs.profile
    return {key: getattr(known, key, None) for key in KEYS} | {
        key: getattr(inputs.profile, key, None) for key in OF_WEIGHTS
    }


def summary_table(inputs: Inputs, path: str) -> rich.table.Table:
    """The summary as rows of name and value; only what is known gets a row."""
    shown = rich.table.Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    promise, verdict = inputs.verdict or inputs.profile, inputs.verdict
    if promise:
        shown.add_row("task", escape(promise.task))
        shown.add_row("target", format_ratio(promise.target))
    if verdict:
        name = verdict.score_name or "score"
        dense, pruned = (overview.score(value, name) for value in (verdict.score_dense, verdict.score_pruned))
        shown.add_row(escape(name), f"{dense} dense, {pruned} pruned")
    if promise:
        predicted = (promise.predicted_seconds, promise.predicted_low, promise.predicted_high)
        shown.add_row("predicted", format_seconds(*predicted))
    if inputs.profile and (weights := inputs.profile.weights):
        packed, most, dense = map(format_bytes, (weights.packed, weights.most, weights.dense))
        shown.add_row("weights", f"{packed} of {most} allowed, {dense} dense")
    if verdict:
        gain = format_ratio(verdict.measured_speedup)
        shown.add_row("measured", f"{format_seconds(verdict.measured_seconds)}, {gain} faster")
        shown.add_row("promise", "[green]met[/]" if verdict.met else "[red]missed[/]")
    shown.add_row("report", escape(path))
    return shown
