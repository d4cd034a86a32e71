"""Write SPDY's timing file; `latbench.importers.text_formats` documents the format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from latbench.errors import UsageError
from latbench.importers.text_formats import SpdyTimings, write_spdy
from search.problem.layers import Layer


def write_spdy_timings(layers: Sequence[Layer], dense: float, fixed: float, path: Path) -> None:
    """Write the seconds of a problem; patterns, intervals and errors are lost.

    Raises UsageError for what the format cannot say, BadData for a name that it cannot hold.
    """
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    for part in itertools.chain.from_iterable(layer.parts for layer in layers):
        sparsities = [it.sparsity for it in part.options]
        if len({f"{sparsity:.4f}" for sparsity in sparsities}) < len(sparsities):
            raise UsageError(
                f"layer {part.name} has options of one sparsity, to four digits: SPDY's format tells them apart by "
                "nothing else"
            )
        points[part.name] = tuple(zip(part.seconds.tolist(), sparsities, strict=True))
    if fixed < 0:
        raise UsageError("the layers alone take longer than the model: SPDY's format cannot say that")
    write_spdy(SpdyTimings(dense, dense - fixed, points), path)
