"""`latbench report`: one offline HTML file from a table and whatever was done with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    table: Annotated[str, typer.Argument(help="The table: a folder of parts or one Parquet file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    model: Annotated[Path | None, typer.Option(help="The cost model that latbench fit wrote.")] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that latbench search wrote.")] = None,
    pruned: Annotated[Path | None, typer.Option(help="The folder that latbench prune wrote.")] = None,
    verify: Annotated[Path | None, typer.Option(help="The folder that latbench verify wrote.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write the main figures to this JSON file too.")] = None,
) -> None:
    """Show what pays, what was promised and what was measured, as one HTML file that needs no network."""
    import json
    import sys

    from rich.console import Console

    from latbench import places
    from latbench.files import write_text_atomically
    from latbench.report import html, inputs
    from latbench.report.summary import summarise, summary_table

    console = Console()
    with Console(stderr=True).status(f"Reading {table} and drawing the report"):
        read = inputs.read(places.at(table), model=model, profile=profile, pruned=pruned, verify=verify)
        text = html.render(read, command=["latbench", *sys.argv[1:]])
        write_text_atomically(output, text)
        if summary:
            write_text_atomically(summary, json.dumps(summarise(read), indent=2) + "\n")
    console.print(summary_table(read, str(output)))
