"""Read a problem from a file of any known format: a frame, a SPDY timing file, or a table that latbench measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latbench.errors import UsageError
from search.inputs.latency_table import Layers, list_shapes, problem_from_table
from search.inputs.option_frame import problem_from_frame, read_frame
from search.inputs.spdy_timings import problem_from_spdy
from search.problem.problem import Problem


def is_table(source: str) -> bool:
    """Return whether a source is a table that latbench measured, not a file with the times of layers."""
    path = Path(source)
    if path.suffix == ".parquet" and path.is_file():
        return "layer" not in read_frame(path).columns
    return not path.is_file()


def read_problem(
    source: str,
    *,
    pattern: str = "unstructured",
    layers: Layers | None = None,
    dense_seconds: float | None = None,
    fixed_seconds: float | None = None,
    **table_options: Any,
) -> Problem:
    """Read the problem in a CSV or Parquet frame, in SPDY's timing file, or in a table of latbench.

    Parameters
    ----------
    source
        A path, or the URI of a table.
    pattern
        The pattern of the sparse options in a timing file.
    layers
        Shapes by layer name, a workload, or its name. For tables see `problem_from_table`; otherwise the shapes of
        the layers that the file names.
    dense_seconds
        Seconds of the dense model.
    fixed_seconds
        Seconds of the converted model besides these layers.
    **table_options
        Further keywords of `problem_from_table`; None stands for their defaults.

    Raises
    ------
    UsageError
        Keywords for tables are given, and the source is no table.
    BadData
        The source has none of these formats.
    """
    path = Path(source)
    whole: dict[str, Any] = {"dense_seconds": dense_seconds, "fixed_seconds": fixed_seconds}
    table_options = {name: value for name, value in table_options.items() if value is not None}
    if is_table(source):
        return problem_from_table(source, layers, **whole, **table_options)
    if table_options:
        given = ", ".join(table_options)
        raise UsageError(f"{path} is no table that latbench measured: it does not take {given}")
    if path.suffix in (".csv", ".parquet"):
        problem = problem_from_frame(read_frame(path), **whole)
    else:
        problem = problem_from_spdy(path, pattern=pattern, **whole)
    return problem if layers is None else problem.with_shapes(list_shapes(layers))
