"""`latbench merge`: several tables in one."""

from __future__ import annotations

import logging

import typer

from latbench.cli.options.table_options import AllowMixed, MergeOutput, MergeSources

_LOG = logging.getLogger(__name__)


def merge(sources: MergeSources, output: MergeOutput, allow_mixed: AllowMixed = False) -> None:
    """Merge tables of one device and mode. Equal rows, and the environments they name, are kept once."""
    from latbench.errors import UsageError
    from latbench.tables.merge import merge_tables
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import has_table

    if has_table(output):
        raise UsageError(
            f"{hide_secrets(output)} exists already, and merge writes a new table: name another folder or delete it"
        )
    merged = merge_tables(sources, output, mixed=allow_mixed)
    typer.echo(f"{hide_secrets(output)}: {merged.rows} rows of {merged.read}")
    for (device, backend), mixture in merged.mixtures.items():
        _LOG.warning(
            f"times of {backend} on {device} are of several versions ({mixture}): "
            "the latest settled one of a point counts"
        )
