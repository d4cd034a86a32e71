"""`latbench validate`: a check of a table's files and values."""

from __future__ import annotations

import typer

from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import Json, TableArgument


def validate(path: TableArgument, as_json: Json = False) -> None:
    """Check every file of a table: damage, identities, medians against samples, units. Exit 5 if one is corrupt."""
    from collections import Counter

    from latbench.errors import BadData
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import list_parts
    from latbench.tables.validate import validate_table

    counts: Counter[str] = Counter()
    files, shown = len(list_parts(path)), hide_secrets(path)
    findings = []
    for finding in validate_table(path):
        counts[finding.severity] += 1
        findings.append({**vars(finding), "path": hide_secrets(str(finding.path))})
        if not as_json:
            typer.echo("{severity}: {path}: {text}".format(**findings[-1]))
    if (old := _describe_old_kernels(path)) is not None:
        counts["note"] += 1
        findings.append({"path": shown, "severity": "note", "text": old})
        if not as_json:
            typer.echo(f"note: {shown}: {old}")
    if as_json:
        print_json({"table": shown, "files": files, "counts": counts, "findings": findings})
    else:
        summary = ", ".join(f"{count} {severity}" for severity, count in counts.items()) or "no faults found"
        typer.echo(f"{shown}: {files} file{'s' if files != 1 else ''}: {summary}")
    if counts["corrupt"]:
        raise BadData(f"{shown}: {counts['corrupt']} findings are corruption; the lines above name them")


def _describe_old_kernels(path: str) -> str | None:
    """Return how many times are of other kernels than the installed ones; None for none, or for a damaged table."""
    from latbench.backends.cpu.cpu_versions import DECIDING, describe_old_kernels
    from latbench.errors import BadData
    from latbench.tables.table import read_table, select_timed

    try:
        return describe_old_kernels(select_timed(read_table(path, [*DECIDING, "point_id", "started_at"])), path)
    except BadData:
        return None
