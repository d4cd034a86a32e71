"""The main figures of a report: the summary file and the short table that the command prints."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.markup import escape

from latbench.base.number_format import format_bytes, format_ratio, format_score, format_seconds
from latbench.report.report_inputs import ReportInputs

KEYS = (
    "target", "outcome", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds",
    "measured_speedup", "measured_speedup_low", "measured_speedup_high", "score_dense", "score_pruned",
)  # fmt: skip
OUTCOME_COLOURS = {"kept": "green", "missed": "red", "inconclusive": "yellow"}
PROFILE_KEYS = ("aimed", "weight_bytes", "most_bytes", "dense_bytes")


def summarise(inputs: ReportInputs) -> dict[str, Any]:
    """Return the figures of `KEYS`, of the verification or else the profile, and `PROFILE_KEYS` of the profile.

    A missing figure is None.
    """
    known = inputs.verdict or inputs.profile
    return {key: getattr(known, key, None) for key in KEYS} | {
        key: getattr(inputs.profile, key, None) for key in PROFILE_KEYS
    }


def build_summary_table(inputs: ReportInputs, path: str, score_advice: str = "") -> rich.table.Table:
    """Build the summary as rows of name and value, without unknown values. `score_advice` stands below the scores."""
    shown = rich.table.Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    promise, verdict = inputs.verdict or inputs.profile, inputs.verdict
    if promise:
        shown.add_row("task", escape(promise.task))
        shown.add_row("target", format_ratio(promise.target))
    if inputs.profile:
        shown.add_row("aimed at", format_ratio(inputs.profile.aimed))
    if verdict:
        name = verdict.score_name or "score"
        dense, pruned = (format_score(value, name) for value in (verdict.score_dense, verdict.score_pruned))
        shown.add_row(escape(name), f"{dense} dense, {pruned} pruned")
        if score_advice:
            shown.add_row("", score_advice)
    if promise:
        predicted = (promise.predicted_seconds, promise.predicted_low, promise.predicted_high)
        shown.add_row("predicted", format_seconds(*predicted))
    if inputs.profile and (weights := inputs.profile.weights):
        packed, most, dense = map(format_bytes, (weights.packed, weights.most, weights.dense))
        shown.add_row("weights", f"{packed} of {most} allowed, {dense} dense")
    if verdict:
        gain = format_ratio(verdict.measured_speedup, verdict.measured_speedup_low, verdict.measured_speedup_high)
        shown.add_row("measured", f"{gain} faster, {format_seconds(verdict.measured_seconds)}{verdict.where}")
        if (over := verdict.over_int8) is not None:
            scored = f", {format_score(verdict.score_int8, name)}" if verdict.score_int8 is not None else ""
            shown.add_row("dense in int8", f"{format_seconds(over[0])}{scored}; {verdict.beside_int8}")
            if verdict.int8_advice:
                shown.add_row("", verdict.int8_advice)
        shown.add_row("promise", f"[{OUTCOME_COLOURS[verdict.outcome]}]{verdict.outcome}[/]")
    shown.add_row("report", escape(path))
    return shown
