"""`latbench merge`: several tables into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    sources: Annotated[list[Path], typer.Argument(help="Tables: folders of parts or Parquet files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new table.")],
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Merge tables of unlike devices all the same.")
    ] = False,
) -> None:
    """Merge tables of one device; equal rows are kept once, and so are the environments that the rows name."""
    from latbench import tables
    from latbench.errors import UsageError

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists already: merge writes a new table, give another folder")
    frames = {source: tables.read(source) for source in sources}
    devices = {source: ", ".join(sorted(set(frame["device"]))) for source, frame in frames.items()}
    if len(set(devices.values())) > 1 and not allow_mixed:
        each = "; ".join(f"{source} is of {device}" for source, device in devices.items())
        raise UsageError(f"unlike devices do not belong in one table: {each}; --allow-mixed merges them all the same")
    part = tables.merge(sources, output)
    typer.echo(f"{output}: {len(tables.read(part))} rows of {sum(map(len, frames.values()))}")
