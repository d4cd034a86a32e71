"""Write SPDY's timing file; `latbench.importers.text_formats` documents the format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from latbench.errors import UsageError
from latbench.importers.text_formats import SpdyTimings, write_spdy
from search.problem.layers import LayerOptions


def write_spdy_timings(layers: Sequence[LayerOptions], dense: float, fixed: float, path: Path) -> None:
    """Write the seconds of a problem; the format has no patterns, intervals or errors.

    Raises UsageError for a problem that the format cannot express, BadData for a name that it cannot hold.
    """
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    for part in itertools.chain.from_iterable(layer.parts for layer in layers):
        sparsities = [it.sparsity for it in part.options]
        if len({f"{sparsity:.4f}" for sparsity in sparsities}) < len(sparsities):
            raise UsageError(
                f"layer {part.name} has several options of one sparsity (to four digits): SPDY's format cannot "
                "distinguish them"
            )
        points[part.name] = tuple(zip(part.seconds.tolist(), sparsities, strict=True))
    if fixed < 0:
        raise UsageError("the layers alone take longer than the model: SPDY's format cannot express that")
    write_spdy(SpdyTimings(dense, dense - fixed, points), path)
