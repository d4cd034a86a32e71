"""A problem from whatever lies somewhere: a frame, a SPDY timing file, or a table that latbench measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latbench.errors import UsageError
from search import frames
from search.from_table import Layers, from_table, shapes_of
from search.problem import Problem
from search.timing_files import from_spdy


def read(
    source: str,
    *,
    pattern: str = "unstructured",
    layers: Layers | None = None,
    dense_seconds: float | None = None,
    fixed_seconds: float | None = None,
    **of_table: Any,
) -> Problem:
    """The problem of a CSV or Parquet frame, of SPDY's timing file, or of a table of latbench.

    `pattern` is about timing files, `of_table` about tables: what else `from_table` takes, None for its defaults.
    `layers` are as that takes them; elsewhere they say the shapes of the layers that the file names. Raises
    UsageError for arguments about tables where there is none; else as what reads it does.
    """
    path = Path(source)
    whole: dict[str, Any] = {"dense_seconds": dense_seconds, "fixed_seconds": fixed_seconds}
    of_table = {name: value for name, value in of_table.items() if value is not None}
    frame = frames.load(path) if path.is_file() and path.suffix in (".csv", ".parquet") else None
    if not path.is_file() or (path.suffix == ".parquet" and frame is not None and "layer" not in frame.columns):
        return from_table(source, layers, **whole, **of_table)
    if of_table:
        given = ", ".join(of_table)
        raise UsageError(f"{path} is no table that latbench measured: it does not go with {given}")
    if frame is None:
        problem = from_spdy(path, pattern=pattern, **whole)
    else:
        problem = frames.from_frame(frame, **whole)
    return problem if layers is None else problem.with_shapes(shapes_of(layers))
