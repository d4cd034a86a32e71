"""`latbench merge`: several tables in one."""

from __future__ import annotations

import typer

from latbench.cli.options import AllowMixed, MergeOutput, MergeSources


def merge(sources: MergeSources, output: MergeOutput, allow_mixed: AllowMixed = False) -> None:
    """Merge tables of one device and mode. Equal rows, and the environments they name, are kept once."""
    from latbench.errors import UsageError
    from latbench.tables import merge as merging
    from latbench.tables import storage as places
    from latbench.tables import table as tables

    if tables.exists(output):
        raise UsageError(
            f"{places.shown(output)} exists already, and merge writes a new table: name another folder or delete it"
        )
    merged = merging.merge(sources, output, mixed=allow_mixed)
    typer.echo(f"{places.shown(output)}: {merged.rows} rows of {merged.read}")
