"""A problem from whatever lies somewhere: a frame, a SPDY timing file, or a table that latbench measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latbench.errors import UsageError
from search.inputs import problem_from_frame
from search.inputs.latency_table import Layers, problem_from_table, shapes_of
from search.inputs.option_frame import read_frame
from search.inputs.spdy_timings import problem_from_spdy
from search.problem.problem import Problem


def is_table(source: str) -> bool:
    """Whether `read` takes it for a table that latbench measured, not for a file of layers' times."""
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
    **of_table: Any,
) -> Problem:
    """The problem of a CSV or Parquet frame, of SPDY's timing file, or of a table of latbench.

    `pattern` is about timing files, `of_table` about tables: what else `problem_from_table` takes, None for its
    defaults. `layers` are as that takes them; elsewhere they say the shapes of the layers that the file names. Raises
    UsageError for arguments about tables where there is none; else as what reads it does.
    """
    path = Path(source)
    whole: dict[str, Any] = {"dense_seconds": dense_seconds, "fixed_seconds": fixed_seconds}
    of_table = {name: value for name, value in of_table.items() if value is not None}
    if is_table(source):
        return problem_from_table(source, layers, **whole, **of_table)
    if of_table:
        given = ", ".join(of_table)
        raise UsageError(f"{path} is no table that latbench measured: it does not go with {given}")
    if path.suffix in (".csv", ".parquet"):
        problem = problem_from_frame(read_frame(path), **whole)
    else:
        problem = problem_from_spdy(path, pattern=pattern, **whole)
    return problem if layers is None else problem.with_shapes(shapes_of(layers))
