"""`latbench import`: other projects' timings as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    format: Annotated[str, typer.Argument(help="spdy: per-layer timings as published with SPDY.")],
    path: Annotated[Path, typer.Argument(help="The file to read.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder or URI of the table to add to.")],
    pattern: Annotated[str, typer.Option(help="What the sparse rows hold, such as block:1x4.")] = "unstructured",
    network: Annotated[str | None, typer.Option(help="The network's name; by default the file's.")] = None,
    device: Annotated[str, typer.Option(help="The machine that was timed, such as amd-epyc-7742.")] = "unknown",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that were used, if known.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Gives the layers their shapes, by name: a bundled workload or a YAML file.")
    ] = None,
) -> None:
    """Read timings of another project into a table; what is in it already is not added twice."""
    import hashlib

    from latbench import interchange, plan, tables, workloads
    from latbench.errors import BadData, UsageError
    from sparse_kernels import patterns

    if format not in interchange.FORMATS:
        raise UsageError(f"unknown format {format!r}: known are {', '.join(interchange.FORMATS)}")
    try:
        patterns.parse(pattern)
    except ValueError as error:
        raise UsageError(str(error)) from error
    layers = workloads.load(workload).layers if workload else ()
    settings = {
        "network": network or path.stem,
        "pattern": pattern,
        "device": device,
        "threads": threads,
        "shapes": {layer.name: plan.shape_columns(layer.shape) for layer in layers},
    }
    rows = interchange.FORMATS[format](path, **settings)
    run_id = "import-" + hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    if tables.exists(output):
        table = tables.read(output)
        if run_id in set(table["run_id"]):
            typer.echo(f"{output}: up to date, {path} is in it")
            return
        if others := set(table["device"]) - {device}:
            raise UsageError(f"{output} is a table of {', '.join(sorted(others))}, not {device}: give another folder")
    if layers and not any(row.get("m") for row in rows):
        raise BadData(f"no layer of {path} is called as one of workload {workload}: the shapes would all be unknown")
    tables.write_part(output, [{**row, "run_id": run_id, "timer": format} for row in rows])
    unknown = len({row["model"] for row in rows if row.get("op") != "model" and row.get("m") is None})
    without = f", {unknown} layers of unknown shape (--workload gives them)" if unknown else ""
    typer.echo(f"{output}: {len(rows)} rows from {path}{without}")
