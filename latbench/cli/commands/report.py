"""`latbench report`: one offline HTML file from a table and the steps done with it, or from two tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from latbench.cli.options.common_options import TableArgument
from latbench.cli.options.report_options import (
    AccuracyFile,
    Against,
    FiguresFolder,
    HtmlOutput,
    MilderTargetsFile,
    ReportDatabase,
    ReportModel,
    ReportProfile,
    ReportPruned,
    ReportVerify,
    ReportWorkload,
    SummaryFile,
)

if TYPE_CHECKING:
    from latbench.report.report_inputs import ReportInputs
    from latbench.tables.compare import Change
    from latbench.tables.storage import Place


def report(
    table: TableArgument,
    output: HtmlOutput = Path("report.html"),
    model: ReportModel = None,
    profile: ReportProfile = None,
    pruned: ReportPruned = None,
    verify: ReportVerify = None,
    database: ReportDatabase = None,
    workload: ReportWorkload = None,
    accuracy: AccuracyFile = None,
    milder_targets: MilderTargetsFile = None,
    against: Against = None,
    figures: FiguresFolder = None,
    summary: SummaryFile = None,
) -> None:
    """Show which sparsity pays, and what was promised and measured, as one HTML file that needs no network."""
    import json
    import sys

    from rich.console import Console

    from latbench.base.files import write_text_atomically
    from latbench.cli.progress_bar import live
    from latbench.errors import UsageError
    from latbench.report import report_data, report_inputs
    from latbench.report.pages import html_page
    from latbench.report.summary import build_summary_table, summarise
    from latbench.tables.storage import hide_secrets, parse_place

    console, command = Console(), ["latbench", *map(hide_secrets, sys.argv[1:])]
    if against is not None:
        if any((model, profile, pruned, verify, database, workload, accuracy, milder_targets, summary)):
            raise UsageError("--against compares two tables and goes with --output and --figures alone")
        with live() as tell:
            tell(f"comparing {hide_secrets(table)} with {hide_secrets(against)}", None, None)
            _compare(parse_place(table), parse_place(against), output, figures, command)
        drawn = "" if figures is None else f", and the figures in {figures}"
        console.print(f"{output} is written{drawn}", highlight=False, soft_wrap=True, markup=False)
        return
    files = report_inputs.ReportFiles(model, profile, pruned, verify, workload, database, accuracy, milder_targets)
    with live() as tell:
        tell(f"reading {hide_secrets(table)} and drawing the report", None, None)
        inputs = report_inputs.read_inputs(parse_place(table), files)
        content = report_data.build_report_data(inputs)
        if figures is not None:  # first, so that a missing library is reported before anything is written
            from latbench.report import paper_figures

            paper_figures.write_figures(content, inputs, figures)
        write_text_atomically(output, html_page.build_html(html_page.build_page(inputs, content, command)))
        if summary:
            write_text_atomically(summary, json.dumps(summarise(inputs), indent=2) + "\n")
    console.print(build_summary_table(inputs, str(output)))


def _compare(table: Place, against: Place, output: Path, figures: Path | None, command: list[str]) -> None:
    """Write the page that compares two tables, and before it the figures if there is a folder for them."""
    from latbench.base.files import write_text_atomically
    from latbench.report import report_inputs
    from latbench.report.pages import comparison, html_page

    first, second = comparison.build_sides(report_inputs.read_inputs(table), report_inputs.read_inputs(against))
    changes = _find_changes(first.inputs, second.inputs)
    if figures is not None:
        from latbench.report import comparison_figures, paper_figures

        paper_figures.write_drawings(comparison_figures.list_comparison_drawings(first, second), figures)
    page = comparison.build_page(first, second, changes, command)
    write_text_atomically(output, html_page.build_html(page))


def _find_changes(first: ReportInputs, second: ReportInputs) -> list[Change] | None:
    """Return what changed from the second table to the first; None for tables of different devices.

    Raises UsageError where they were measured in different modes.
    """
    from latbench.base.bundled_data import format_place
    from latbench.errors import UsageError
    from latbench.tables.comparability import MODES, describe_device_difference, describe_mode_difference
    from latbench.tables.compare import compare_tables, read_compared_rows

    tables = [one.sources[0].path for one in (second, first)]
    frames = [read_compared_rows(path) for path in tables]
    values = {
        format_place(path): {name: set(frame[name].dropna()) for name in ("device", *MODES)}
        for path, frame in zip(tables, frames, strict=True)
    }
    if (unlike := describe_mode_difference(values)) is not None and describe_device_difference(values) is None:
        raise UsageError(f"{unlike}; such times cannot be compared: sweep both in one mode")
    return None if describe_device_difference(values) else compare_tables(*frames)
