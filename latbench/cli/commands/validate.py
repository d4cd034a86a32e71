"""`latbench validate`: a check of a table's files and values."""

from __future__ import annotations

import typer

from latbench.cli.options.common_options import TableArgument


def validate(path: TableArgument) -> None:
    """Check every file of a table: damage, identities, medians against samples, units. Exit 5 if one is corrupt."""
    from collections import Counter

    from latbench.errors import BadData
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import list_parts
    from latbench.tables.validate import validate_table

    counts: Counter[str] = Counter()
    files = len(list_parts(path))
    for finding in validate_table(path):
        counts[finding.severity] += 1
        typer.echo(f"{finding.severity}: {hide_secrets(str(finding.path))}: {finding.text}")
    summary = ", ".join(f"{count} {severity}" for severity, count in counts.items()) or "no faults found"
    shown = hide_secrets(path)
    typer.echo(f"{shown}: {files} file{'s' if files != 1 else ''}: {summary}")
    if counts["corrupt"]:
        raise BadData(f"{shown}: {counts['corrupt']} findings are corruption; the lines above name them")
