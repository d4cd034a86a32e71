"""`latbench validate`: a check of a table's files and values."""

from __future__ import annotations

import typer

from latbench.cli.options import TableArgument


def validate(path: TableArgument) -> None:
    """Check every file of a table: damage, identities, medians against samples, units. Exit 5 if one is corrupt."""
    from collections import Counter

    from latbench.errors import BadData
    from latbench.tables import storage as places
    from latbench.tables import table as tables
    from latbench.tables.validate import findings

    counts: Counter[str] = Counter()
    files = len(tables.parts(path))
    for finding in findings(path):
        counts[finding.severity] += 1
        typer.echo(f"{finding.severity}: {places.shown(str(finding.path))}: {finding.text}")
    summary = ", ".join(f"{count} {severity}" for severity, count in counts.items()) or "no faults found"
    shown = places.shown(path)
    typer.echo(f"{shown}: {files} file{'s' if files != 1 else ''}: {summary}")
    if counts["corrupt"]:
        raise BadData(f"{shown}: {counts['corrupt']} findings are corruption; the lines above name them")
