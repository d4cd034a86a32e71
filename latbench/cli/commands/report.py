"""`latbench report`: one offline HTML file from a table and whatever was done with it, or from two tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from latbench.report.inputs import Inputs
    from latbench.tables.compare import Change
    from latbench.tables.storage import Place


def report(
    table: Annotated[str, typer.Argument(help="The table: a folder of parts or one Parquet file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    model: Annotated[Path | None, typer.Option(help="The cost model that latbench fit wrote.")] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that latbench search wrote.")] = None,
    pruned: Annotated[Path | None, typer.Option(help="The folder that latbench prune wrote.")] = None,
    verify: Annotated[Path | None, typer.Option(help="The folder that latbench verify wrote.")] = None,
    database: Annotated[
        Path | None, typer.Option(help="The search's folder of pruned layers: shows what error every speed costs.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="What latbench trace wrote: the layers of the profile, for --database.")
    ] = None,
    accuracy: Annotated[
        Path | None, typer.Option(help="CSV or Parquet of results: pattern, method, speedup, accuracy, seed.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Another table, of another device or of before a change: compare the two.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures for papers into this folder too: PDF, SVG and their data.")
    ] = None,
    summary: Annotated[Path | None, typer.Option(help="Write the main figures to this JSON file too.")] = None,
) -> None:
    """Show what pays, what was promised and what was measured, as one HTML file that needs no network."""
    import json
    import sys

    from rich.console import Console
    from rich.markup import escape

    from latbench.base.files import write_text_atomically
    from latbench.errors import UsageError
    from latbench.report import html, inputs
    from latbench.report import report_data as content
    from latbench.report.summary import summarise, summary_table
    from latbench.tables.storage import hide_secrets, parse_place

    console, command = Console(), ["latbench", *map(hide_secrets, sys.argv[1:])]
    if against is not None:
        if any((model, profile, pruned, verify, database, workload, accuracy, figures, summary)):
            raise UsageError("--against compares two tables and goes with --output alone")
        with Console(stderr=True).status(escape(f"Comparing {table} with {against}")):
            _compare(parse_place(table), parse_place(against), output, command)
        console.print(f"{output} is written", highlight=False, soft_wrap=True, markup=False)
        return
    with Console(stderr=True).status(escape(f"Reading {table} and drawing the report")):
        read = inputs.read(
            parse_place(table), model=model, profile=profile, pruned=pruned, verify=verify,
            workload=workload, database=database, accuracy=accuracy,
        )  # fmt: skip
        shown = content.of(read)
        if figures is not None:  # first: what is missing for it is said before anything is written
            from latbench.report import paper

            paper.write(shown, read, figures)
        write_text_atomically(output, html.page_text(html.build(read, shown, command)))
        if summary:
            write_text_atomically(summary, json.dumps(summarise(read), indent=2) + "\n")
    console.print(summary_table(read, str(output)))


def _compare(table: Place, against: Place, output: Path, command: list[str]) -> None:
    from latbench.base.files import write_text_atomically
    from latbench.report import comparison, html, inputs

    first, second = comparison.sides(inputs.read(table), inputs.read(against))
    changes = _changes(first.inputs, second.inputs)
    write_text_atomically(output, html.page_text(comparison.build(first, second, changes, command)))


def _changes(first: Inputs, second: Inputs) -> list[Change] | None:
    """What became slower or faster from the second table to the first; None for tables of unlike devices.

    Raises UsageError where they were measured in unlike ways.
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
        raise UsageError(f"{unlike}; such times are not of one kind, sweep both in one way")
    return None if describe_device_difference(values) else compare_tables(*frames)
