"""Layers, profiles and trade-offs as data frames; `search.inputs.option_frame` documents the columns."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from search.knapsack.arrays import Choice
from search.problem.layers import LayerOptions


def build_layer_frame(layers: Sequence[LayerOptions]) -> pd.DataFrame:
    """Return a row an option of each layer; tied layers have their own rows."""
    frames = [
        _frame_of(part).assign(tied=layer.name if layer.tied else "") for layer in layers for part in layer.parts
    ]
    return pd.concat(frames, ignore_index=True)


def build_choice_frame(layers: Sequence[LayerOptions], choice: Choice) -> pd.DataFrame:
    """Return a row a layer: the option that was chosen for it."""
    chosen = zip(layers, choice, strict=True)
    frames = [_frame_of(part.take([j])) for layer, j in chosen for part in layer.parts]
    return pd.concat(frames, ignore_index=True)


def _frame_of(layer: LayerOptions) -> pd.DataFrame:
    return pd.DataFrame({
        "layer": layer.name,
        "pattern": [it.pattern for it in layer.options],
        "sparsity": [it.sparsity for it in layer.options],
        "seconds": layer.seconds, "low_seconds": layer.low, "high_seconds": layer.high, "error": layer.errors,
    })  # fmt: skip
