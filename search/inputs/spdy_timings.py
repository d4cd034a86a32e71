"""Make a problem from SPDY's timing file; `latbench.importers.text_formats` documents the format."""

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
    """Return the problem of SPDY's timing file, with SPDY's prior as errors.

    A sparsity that was timed several times takes the median.

    Parameters
    ----------
    path
        The file.
    pattern
        The pattern of the sparse options, which the file does not name.
    dense_seconds
        Seconds of the dense model; by default the file's `base`.
    fixed_seconds
        Seconds of the converted model besides these layers; by default `base` - `prunable`.

    Raises
    ------
    BadData
        The file has another format, or a sparsity that the pattern cannot have.
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
