"""Arguments and options of `latbench fit` and `predict`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED
from latbench.cli.options.common_options import COLUMN_VALUE


class Estimator(StrEnum):
    """The cost models that `latbench fit` fits."""

    lookup = "lookup"
    roofline = "roofline"
    boosted = "boosted"
    hybrid = "hybrid"
    transfer = "transfer"


class LayerKind(StrEnum):
    """The layers that `latbench predict` predicts."""

    linear = "linear"
    conv2d = "conv2d"


ModelOutput = Annotated[Path, typer.Option("--output", "-o", help="Model file to write (JSON).")]
EstimatorName = Annotated[
    Estimator,
    typer.Option(
        "--estimator",
        help="Cost model. lookup interpolates between measured sparsities. roofline sums work at fitted rates. "
        "boosted learns what these miss, for other shapes. hybrid is lookup where measured, else boosted. transfer "
        "predicts a new device from a few of its rows and many of other devices (merge --allow-mixed).",
    ),
]
FitBackend = Annotated[
    str | None, typer.Option("--backend", help="Engine whose rows are used. Default: all engines of the table.")
]
FitWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar=COLUMN_VALUE, help="Filter on rows, repeatable, such as dtype_w=float32. Default: none."
    ),
]
TransferDevice = Annotated[
    str | None, typer.Option("--device", help="Device to predict, for --estimator transfer. Default: none.")
]
FitSeed = Annotated[
    int, typer.Option("--random-state", min=0, max=MOST_SEED, help="Random seed of learned models and hold-outs.")
]

ModelArgument = Annotated[Path, typer.Argument(help="Model file from latbench fit.")]
FittedTable = Annotated[str, typer.Option("--table", help="Table that the model was fitted to.")]
OnePattern = Annotated[str, typer.Option("--pattern", help="Sparsity pattern, such as dense, shflbw:32 or nm:2:4.")]
ShapeText = Annotated[
    str,
    typer.Option(
        "--shape",
        help="Shape of the layer. Linear: m x k x n (output features, input features, tokens), such as 768x768x128. "
        "Convolution: c_out x c_in x kh x kw of the weight, such as 64x64x3x3.",
    ),
]
OneSparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="Share of weights dropped, such as 0.75. Default: the only one of the pattern."),
]
Kind = Annotated[LayerKind, typer.Option("--kind", help="Kind of layer for --shape.")]
InputSize = Annotated[
    str | None, typer.Option("--input", help="Input of a convolution: batch x h x w, such as 1x56x56. Default: none.")
]
Stride = Annotated[
    str | None, typer.Option("--stride", help="Stride of a convolution: 2, or 2x1 for h and w. Default: 1.")
]
Padding = Annotated[
    str | None,
    typer.Option(
        "--padding",
        help="Padding of a convolution: 1, or 1x0 for h and w. Default: kh/2 and kw/2, rounded down.",
    ),
]
Dilation = Annotated[
    str | None, typer.Option("--dilation", help="Dilation of a convolution: 2, or 2x1 for h and w. Default: 1.")
]
PredictBackend = Annotated[
    str | None, typer.Option("--backend", help="Engine. Default: the only one in the table for this layer.")
]
PredictKernel = Annotated[
    str | None, typer.Option("--kernel", help="Requested kernel. Default: the only one in the table for this layer.")
]
PredictThreads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Number of threads. Default: the only one in the table.")
]
PredictWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar=COLUMN_VALUE,
        help="Value of another column, repeatable, such as dtype_w=float32. Default: the only one in the table.",
    ),
]
Coverage = Annotated[
    float,
    typer.Option(
        "--coverage",
        help="Coverage of the prediction interval: its probability to hold a measurement, or the true time of a "
        "measured layer.",
    ),
]
AllowExtrapolation = Annotated[
    bool, typer.Option("--allow-extrapolation", help="Predictions outside the measured range, too.")
]
