"""`latbench import`: timings of other projects as a table."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from latbench.cli.options.option_texts import parse_column_values
from latbench.cli.options.table_options import (
    ImportColumns,
    ImportDevice,
    ImportDtype,
    ImportFile,
    ImportFormat,
    ImportNetwork,
    ImportOnly,
    ImportOutput,
    ImportPattern,
    ImportThreads,
    ImportWorkload,
)

if TYPE_CHECKING:
    import pandas as pd

_LOG = logging.getLogger(__name__)


class _SpdyOptions(NamedTuple):
    """What only a file of SPDY needs to be told; None where nothing was given."""

    pattern: str | None
    network: str | None
    threads: int | None
    workload: str | None


def import_timings(
    format: ImportFormat,
    path: ImportFile,
    output: ImportOutput,
    only: ImportOnly = None,
    columns: ImportColumns = None,
    pattern: ImportPattern = None,
    network: ImportNetwork = None,
    dtype: ImportDtype = None,
    device: ImportDevice = None,
    threads: ImportThreads = None,
    workload: ImportWorkload = None,
) -> None:
    """Add timings of another project to a table. Rows that the table holds are not added twice."""
    import hashlib

    from latbench.errors import UsageError
    from latbench.importers.benchmark_results import LIBRARIES
    from latbench.importers.kernel_timings import FORMATS
    from latbench.tables.table import has_table, read_table
    from latbench.tables.writer import write_part

    spdy = _SpdyOptions(pattern, network, threads, workload)
    if columns and format not in LIBRARIES:
        raise UsageError(f"--columns: only for {', '.join(LIBRARIES)}; a file of {format} has columns of its own")
    if format == "spdy":
        if only or dtype:
            raise UsageError("--only and --dtype are for kernel timings; a file of spdy has no columns")
        rows = _read_spdy(path, spdy, device or "unknown")
    elif format in FORMATS:
        rows = _read_kernel_timings(format, path, spdy, parse_column_values("--only", only), device, dtype)
    elif format in LIBRARIES:
        chosen = parse_column_values("--only", only)
        rows = _read_results(format, path, spdy, parse_column_values("--columns", columns), chosen, device, dtype)
    else:
        raise UsageError(f"unknown format {format!r}: known are spdy, {', '.join([*FORMATS, *LIBRARIES])}")
    run_id = "import-" + hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    if has_table(output):
        rows = _new_rows(rows, read_table(output), output)
        if not rows:
            typer.echo(f"{output}: up to date, {path} is in it")
            return
    write_part(output, [{**row, "run_id": run_id, "timer": format} for row in rows])
    unknown = len({row["model"] for row in rows if row.get("op") != "model" and row.get("m") is None})
    without = f", {unknown} layers of unknown shape (--workload gives them)" if unknown else ""
    typer.echo(f"{output}: {len(rows)} rows from {path}{without}")


def _read_kernel_timings(
    format: str, path: Path, spdy: _SpdyOptions, only: dict[str, str], device: str | None, dtype: str | None
) -> list[dict[str, Any]]:
    """Read a file of kernel timings, and say which lines are left out. Raises UsageError for an option of SPDY."""
    from latbench.errors import UsageError
    from latbench.importers.kernel_timings import read_kernel_timings

    _refuse_options_of_spdy(format, spdy)
    if dtype is not None and format != "deepbench":
        raise UsageError(f"--dtype: only for deepbench; a file of {format} contains this")
    rows, left_out = read_kernel_timings(format, path, only=only, device=device, dtype=dtype)
    for reason, lines in left_out.items():
        _LOG.warning(f"{path}: {lines} lines left out, {reason}")
    return rows


def _read_results(
    format: str,
    path: Path,
    spdy: _SpdyOptions,
    columns: dict[str, str],
    only: dict[str, str],
    device: str | None,
    dtype: str | None,
) -> list[dict[str, Any]]:
    """Read a file of a benchmark library, and say which results are left out. Raises UsageError as above."""
    from latbench.errors import UsageError
    from latbench.importers.benchmark_results import name_dtype, read_benchmark_results

    try:
        dtype = None if dtype is None else name_dtype(dtype)
    except ValueError as error:
        raise UsageError(f"--dtype: {error}") from None
    _refuse_options_of_spdy(format, spdy._replace(threads=None))
    rows, left_out = read_benchmark_results(
        format, path, columns=columns, only=only, device=device, dtype=dtype, threads=spdy.threads
    )
    for reason, count in left_out.items():
        _LOG.warning(f"{path}: {count} results left out, {reason}")
    return rows


def _refuse_options_of_spdy(format: str, spdy: _SpdyOptions) -> None:
    from latbench.errors import UsageError

    if foreign := [f"--{name}" for name, value in spdy._asdict().items() if value is not None]:
        raise UsageError(f"{', '.join(foreign)}: only for spdy; a file of {format} contains this")


def _new_rows(rows: list[dict[str, Any]], table: pd.DataFrame, output: str) -> list[dict[str, Any]]:
    """Return the rows that the table lacks.

    Raises UsageError for rows that contradict the table. They are of another device or version, or have other shapes
    for the same layers, which a key does not tell apart. Or they have other times of the same point.
    """
    from cost_models.rows.row_keys import describe_point
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
                f"{output} holds other times of {describe_point(row)} than this file: the same points timed again, "
                "or a corrected file; give another folder"
            )
    return fresh


def _read_spdy(path: Path, options: _SpdyOptions, device: str) -> list[dict[str, Any]]:
    """Read a timing file of SPDY as rows. Raises UsageError or BadData for options that do not fit the file."""
    from latbench.errors import BadData, UsageError
    from latbench.importers.text_formats import convert_spdy_to_rows, read_spdy
    from latbench.workloads.points import convert_shape_to_columns, parse_patterns, select_sparsities
    from latbench.workloads.workload import read_workload
    from sparse_kernels.patterns import Dense

    pattern, workload = options.pattern or "unstructured", options.workload
    [parsed] = parse_patterns([pattern])
    if isinstance(parsed, Dense):
        raise UsageError("--pattern names the pattern of the sparse rows; rows at sparsity 0 are dense in any case")
    timings = read_spdy(path)
    found = sorted({sparsity for points in timings.layers.values() for _, sparsity in points if sparsity})
    own = select_sparsities(parsed, found)
    if foreign := [sparsity for sparsity in found if not any(math.isclose(sparsity, s, abs_tol=5e-5) for s in own)]:
        raise UsageError(f"{pattern} has a sparsity of {own[0]:g} and no other, and {path} has {foreign[0]:g}")
    shapes = read_workload(workload).shapes() if workload else {}
    rows = convert_spdy_to_rows(
        timings,
        network=options.network or path.stem,
        pattern=pattern,
        device=device,
        threads=options.threads,
        shapes={name: convert_shape_to_columns(shape) for name, shape in shapes.items()},
    )
    if shapes and not any(row.get("m") for row in rows):
        raise BadData(
            f"no layer of {path} has the name of a layer of workload {workload}: all shapes would be unknown"
        )
    return rows
