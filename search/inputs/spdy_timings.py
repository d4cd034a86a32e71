"""SPDY's timing files as problems, and problems as timing files; `latbench.importers.text_formats` has the format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from latbench.errors import BadData
from latbench.importers.text_formats import read_spdy
from search.inputs.problem_builder import Seconds, build_problem
from search.problem.layers import DENSE_OPTION, LayerOptions, build_option
from search.problem.problem import Problem


def problem_from_spdy(
    path: str | Path,
    *,
    pattern: str = "unstructured",
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
) -> Problem:
    """The problem of a SPDY timing file, whose sparse options have this pattern; its errors are SPDY's guess.

    By default the dense model takes the file's `base`, and `base` - `prunable` is fixed. A sparsity that is timed
    twice has the median. Raises BadData as `read_spdy` does, and for a sparsity that the pattern cannot have.
    """
    timings = read_spdy(Path(path))
    layers = []
    for name, points in timings.layers.items():
        times: dict[float, list[float]] = {}
        for seconds, sparsity in points:
            times.setdefault(sparsity, []).append(seconds)
        try:
            options = tuple(build_option(pattern, sparsity) if sparsity else DENSE_OPTION for sparsity in times)
        except ValueError as error:
            raise BadData(f"{path}: layer {name}: {error}") from error
        medians = np.array([np.median(samples) for samples in times.values()])
        if options:  # names without any time may follow
            layers.append(LayerOptions(name, options, medians, medians, medians, np.zeros(len(options))))
    return build_problem(
        layers,
        dense_seconds=timings.base if dense_seconds is None else dense_seconds,
        fixed_seconds=timings.fixed if fixed_seconds is None else fixed_seconds,
        dense_engine="the dense model",
    ).with_prior()
