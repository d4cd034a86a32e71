"""Plot problems, profiles and frontiers with plotly, for notebooks. Plotly is an extra: `latbench[report]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latbench.errors import EnvironmentUnusable
from search.knapsack.arrays import Choice, Floats
from search.problem.layers import DENSE_OPTION, LayerOptions

# From Okabe and Ito 2008: colour-blind readers can distinguish these colours.
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#B0B0B0"

MOST_POINTS = 2000
"""Points of a line at most. A frontier may have 40,000, and the line looks the same."""


def plot_options(layers: Sequence[LayerOptions]) -> Any:
    """Plot seconds over sparsity, a line for each layer and pattern."""
    figure = _figure("sparsity", "ms")
    figure.update_xaxes(tickformat=".0%")
    for layer in layers:
        by_pattern: dict[str, list[int]] = {}
        for j, option in sorted(enumerate(layer.options), key=lambda entry: entry[1].sparsity):
            by_pattern.setdefault(option.pattern, []).append(j)
        for pattern, indices in by_pattern.items():
            figure.add_scatter(
                x=[layer.options[j].sparsity for j in indices], y=[1e3 * float(layer.seconds[j]) for j in indices],
                mode="lines+markers", name=f"{layer.name} {pattern}", legendgroup=layer.name,
            )  # fmt: skip
    return figure


def plot_choice(layers: Sequence[LayerOptions], choice: Choice, title: str) -> Any:
    """Plot the seconds of each layer beside its dense seconds, in the model's order from the top."""
    figure = _figure("ms", "")
    chosen = list(zip(layers, choice, strict=True))
    parts = [(part, j) for layer, j in chosen for part in layer.parts]
    names = [part.name for part, _ in parts]
    dense = [
        1e3 * float(part.seconds[part.options.index(DENSE_OPTION)]) if DENSE_OPTION in part.options else None
        for part, _ in parts
    ]
    figure.add_bar(y=names, x=dense, orientation="h", name="dense", marker_color=GREY)
    figure.add_bar(
        y=names, x=[1e3 * float(part.seconds[j]) for part, j in parts], orientation="h", name="chosen",
        text=[str(part.options[j]) for part, j in parts], marker_color=BLUE,
    )  # fmt: skip
    figure.update_layout(title=title)
    figure.update_yaxes(autorange="reversed")
    return figure


def plot_trade_offs(speedups: Floats, errors: Floats) -> Any:
    """Plot the total error over the speedup that can be promised."""
    figure = _figure("speedup", "total error")
    step = max(1, -(-len(speedups) // MOST_POINTS))
    shown = sorted({*range(0, len(speedups), step), len(speedups) - 1})
    figure.add_scatter(
        x=speedups[shown].tolist(), y=errors[shown].tolist(), mode="lines", line_shape="vh",
        line_color=VERMILION, name="efficient profiles",
    )  # fmt: skip
    return figure


def _figure(x: str, y: str) -> Any:
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise EnvironmentUnusable("plots need plotly: pip install 'latbench[report]'") from error
    return graph_objects.Figure(
        layout={"template": "simple_white", "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    )
