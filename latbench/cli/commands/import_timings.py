"""`latbench import`: other projects' timings as a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd


def import_timings(
    format: Annotated[
        str,
        typer.Argument(
            help="spdy: per-layer timings as published with SPDY; kernel timings: neusight and deepbench (csv), "
            "aiconfigurator (Parquet)."
        ),
    ],
    path: Annotated[Path, typer.Argument(help="The file to read.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder or URI of the table to add to.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="COLUMN=VALUE: kernel timings of these lines alone, such as 'Device=Tesla T4'; repeatable."
        ),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="spdy: what the sparse rows hold, such as block:1x4. Default: unstructured.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="spdy: the network's name; by default the file's.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="deepbench: of sheets that do not name one, such as float16; else they are left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The machine that was timed, such as amd-epyc-7742; by default as the file says."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="spdy: threads that were used, if known.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="spdy: gives the layers their shapes, by name: a bundled workload or a YAML file."),
    ] = None,
) -> None:
    """Read timings of another project into a table; what is in it already is not added twice."""
    import hashlib

    from latbench.cli.commands.options import values_by_column
    from latbench.errors import UsageError
    from latbench.importers.kernel_timings import FORMATS, read_kernel_timings
    from latbench.tables.table import has_table, read_table
    from latbench.tables.writer import write_part

    if format == "spdy":
        if only or dtype:
            raise UsageError("--only and --dtype are for kernel timings; a file of spdy has no columns")
        rows = _spdy_rows(path, pattern or "unstructured", network, device or "unknown", threads, workload)
    elif format in FORMATS:
        given = {"--pattern": pattern, "--network": network, "--threads": threads, "--workload": workload}
        if foreign := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(foreign)}: for spdy alone, {format} says it itself")
        if dtype is not None and format != "deepbench":
            raise UsageError(f"--dtype: for deepbench alone, {format} says it itself")
        chosen = values_by_column("--only", only)
        rows, left_out = read_kernel_timings(format, path, only=chosen, device=device, dtype=dtype)
        for reason, lines in left_out.items():
            typer.echo(f"latbench: {path}: {lines} lines left out, {reason}", err=True)
    else:
        raise UsageError(f"unknown format {format!r}: known are spdy, {', '.join(FORMATS)}")
    run_id = "import-" + hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    if has_table(output):
        rows = _new(rows, read_table(output), output)
        if not rows:
            typer.echo(f"{output}: up to date, {path} is in it")
            return
    write_part(output, [{**row, "run_id": run_id, "timer": format} for row in rows])
    unknown = len({row["model"] for row in rows if row.get("op") != "model" and row.get("m") is None})
    without = f", {unknown} layers of unknown shape (--workload gives them)" if unknown else ""
    typer.echo(f"{output}: {len(rows)} rows from {path}{without}")


def _new(rows: list[dict[str, Any]], table: pd.DataFrame, output: str) -> list[dict[str, Any]]:
    """The rows that the table lacks. Raises UsageError for rows that do not belong beside what it holds: of another
    device, of another version or with other shapes for the same layers, which a key does not tell apart, or with
    other times for a point that is there.
    """
    from cost_models.rows import describe
    from latbench.errors import UsageError
    from latbench.tables.point_ids import hash_key

    if others := set(table["device"]) - {rows[0]["device"]}:
        named = ", ".join(sorted(others))
        raise UsageError(f"{output} is a table of {named}, not {rows[0]['device']}: give another folder")
    table = table[table["purpose"] == "import"]
    for backend in {row.get("backend") for row in rows}:
        same = table[table["backend"] == backend]
        found = {version if isinstance(version, str) else "unknown" for version in same["backend_version"]}
        ours = {row.get("backend_version") or "unknown" for row in rows if row.get("backend") == backend}
        if found and found != ours:
            raise UsageError(
                f"{output} holds times of {backend} {', '.join(sorted(found))}, not {', '.join(sorted(ours))}: "
                "give another folder"
            )
    held: dict[str, list[list[float]]] = {}
    for point, samples in zip(table["point_id"], table["samples_seconds"], strict=True):
        if samples is not None:
            held.setdefault(point, []).append(list(samples))
    widths = {model: None if m != m else int(m) for model, m in zip(table["model"], table["m"], strict=True)}
    fresh = []
    for row in rows:
        known = held.get(hash_key(row))
        if known is None:
            if row["model"] and widths.get(row["model"], row.get("m")) != row.get("m"):
                raise UsageError(
                    f"{output} holds {row['model']} with another shape: give the same --workload, or another folder"
                )
            fresh.append(row)
        elif list(row["samples_seconds"]) not in known:
            raise UsageError(
                f"{output} holds other times of {describe(row)} than this file: the same points timed again, or a "
                "corrected file; give another folder"
            )
    return fresh


def _spdy_rows(
    path: Path, pattern: str, network: str | None, device: str, threads: int | None, workload: str | None
) -> list[dict[str, Any]]:
    from latbench.errors import BadData, UsageError
    from latbench.importers.text_formats import convert_spdy_to_rows, read_spdy
    from latbench.workloads.points import convert_shape_to_columns, parse_patterns, select_sparsities
    from latbench.workloads.workload import read_workload
    from sparse_kernels import patterns

    [parsed] = parse_patterns([pattern])
    if isinstance(parsed, patterns.Dense):
        raise UsageError("--pattern is what the sparse rows of the file hold; those at sparsity 0 are dense anyway")
    timings = read_spdy(path)
    found = sorted({sparsity for points in timings.layers.values() for _, sparsity in points if sparsity})
    own = select_sparsities(parsed, found)
    if foreign := [sparsity for sparsity in found if not any(math.isclose(sparsity, s, abs_tol=5e-5) for s in own)]:
        raise UsageError(f"{pattern} has a sparsity of {own[0]:g} and no other, and {path} has {foreign[0]:g}")
    layers = read_workload(workload).layers if workload else ()
    rows = convert_spdy_to_rows(
        timings,
        network=network or path.stem,
        pattern=pattern,
        device=device,
        threads=threads,
        shapes={layer.name: convert_shape_to_columns(layer.shape) for layer in layers},
    )
    if layers and not any(row.get("m") for row in rows):
        raise BadData(f"no layer of {path} is called as one of workload {workload}: the shapes would all be unknown")
    return rows
