"""Layers, profiles and trade-offs as data frames; `search.inputs.option_frame` documents the columns."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from search.knapsack.arrays import Choice
from search.problem.layers import LayerOptions


def build_layer_frame(layers: Sequence[LayerOptions]) -> pd.DataFrame:
    """Return a row for each option of each layer; tied layers have rows of their own."""
    frames = [
        _build_frame(part).assign(tied=layer.name if layer.tied else "") for layer in layers for part in layer.parts
    ]
    return pd.concat(frames, ignore_index=True)


def build_choice_frame(layers: Sequence[LayerOptions], choice: Choice) -> pd.DataFrame:
    """Return a row for each layer: the option that was chosen for it."""
    chosen = zip(layers, choice, strict=True)
    frames = [_build_frame(part.take([j])) for layer, j in chosen for part in layer.parts]
    return pd.concat(frames, ignore_index=True)


def _build_frame(layer: LayerOptions) -> pd.DataFrame:
    """Return a row for each option of a layer."""
    return pd.DataFrame({
        "layer": layer.name,
        "pattern": [it.pattern for it in layer.options],
        "sparsity": [it.sparsity for it in layer.options],
        "precision": [it.precision for it in layer.options],
        "seconds": layer.seconds, "low_seconds": layer.low, "high_seconds": layer.high, "error": layer.errors,
    })  # fmt: skip
