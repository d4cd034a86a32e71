"""SPDY's timing files as problems, and problems as timing files; `latbench.importers.text_formats` has the format."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from latbench.errors import BadData, UsageError
from latbench.importers.text_formats import SpdyTimings, read_spdy, write_spdy
from search.building import Seconds, problem_of
from search.layers import DENSE_OPTION, Layer, option
from search.problem import Problem


def from_spdy(
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
            options = tuple(option(pattern, sparsity) if sparsity else DENSE_OPTION for sparsity in times)
        except ValueError as error:
            raise BadData(f"{path}: layer {name}: {error}") from error
        medians = np.array([np.median(samples) for samples in times.values()])
        if options:  # names without any time may follow
            layers.append(Layer(name, options, medians, medians, medians, np.zeros(len(options))))
    return problem_of(
        layers,
        dense_seconds=timings.base if dense_seconds is None else dense_seconds,
        fixed_seconds=timings.fixed if fixed_seconds is None else fixed_seconds,
        dense_engine="the dense model",
    ).with_prior()


def write(problem: Problem, path: Path) -> None:
    """Write the seconds of a problem; patterns, intervals and errors are lost.

    Raises UsageError for what the format cannot say, BadData for a name that it cannot hold.
    """
    layers: dict[str, tuple[tuple[float, float], ...]] = {}
    for part in itertools.chain.from_iterable(layer.parts for layer in problem.layers):
        sparsities = [it.sparsity for it in part.options]
        if len({f"{sparsity:.4f}" for sparsity in sparsities}) < len(sparsities):
            raise UsageError(
                f"layer {part.name} has options of one sparsity, to four digits: SPDY's format tells them apart by "
                "nothing else"
            )
        layers[part.name] = tuple(zip(part.seconds.tolist(), sparsities, strict=True))
    if problem.fixed.value < 0:
        raise UsageError("the layers alone take longer than the model: SPDY's format cannot say that")
    write_spdy(SpdyTimings(problem.dense.value, problem.dense.value - problem.fixed.value, layers), path)
