"""`latbench merge`: several tables into one."""

from __future__ import annotations

from typing import Annotated

import typer


def merge(
    sources: Annotated[list[str], typer.Argument(help="Tables: folders of parts, Parquet files, or their URIs.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder of the new table, or its URI.")],
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Merge tables of unlike devices or modes all the same.")
    ] = False,
) -> None:
    """Merge tables of one device and mode; equal rows are kept once, and so are the environments that they name."""
    from latbench.errors import UsageError
    from latbench.tables.merge import merge_tables
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import has_table

    if has_table(output):
        shown = hide_secrets(output)
        raise UsageError(f"{shown} exists already: merge writes a new table, give another folder or delete it")
    merged = merge_tables(sources, output, mixed=allow_mixed)
    typer.echo(f"{hide_secrets(output)}: {merged.rows} rows of {merged.read}")
