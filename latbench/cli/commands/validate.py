"""`latbench validate`: is this table whole, and does it say what its samples say?"""

from __future__ import annotations

from typing import Annotated

import typer


def validate(
    path: Annotated[str, typer.Argument(help="A table: a folder of parts, a Parquet file, or a URI.")],
) -> None:
    """Check every file of a table: damage, identities, medians against samples, units; exit 5 if any is corrupt."""
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
    said = ", ".join(f"{count} {severity}" for severity, count in counts.items()) or "nothing to complain of"
    shown = hide_secrets(path)
    typer.echo(f"{shown}: {files} file{'s' if files != 1 else ''}: {said}")
    if counts["corrupt"]:
        raise BadData(f"{shown}: {counts['corrupt']} findings are corruption; see above")
