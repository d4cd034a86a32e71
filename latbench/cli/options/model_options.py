"""Arguments and options of `latbench fit` and `predict`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED
from latbench.cli.options.option_texts import COLUMN_VALUE, split_pairs


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


ModelOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Model file to write (JSON).")]
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
    str | None,
    typer.Option(
        "--backend", metavar="ENGINE", help="Engine whose rows are used. Default: all engines of the table."
    ),
]
FitWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar=COLUMN_VALUE,
        callback=split_pairs,
        help="Filters on rows, comma-separated or repeated, such as dtype_w=float32,threads=2. Default: none.",
    ),
]
TransferDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Device to predict, for --estimator transfer. Default: none."),
]
FitSeed = Annotated[
    int,
    typer.Option(
        "--random-state", min=0, max=MOST_SEED, metavar="SEED", help="Random seed of learned models and hold-outs."
    ),
]

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Model file from latbench fit.")]
FittedTable = Annotated[str, typer.Option("--table", metavar="TABLE", help="Table that the model was fitted to.")]
OnePattern = Annotated[
    str, typer.Option("--pattern", metavar="PATTERN", help="Sparsity pattern, such as dense, shflbw:32 or nm:2:4.")
]
ShapeText = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="SIZExSIZE...",
        help="Shape of the layer. Linear: m x k x n (output features, input features, tokens), such as 768x768x128. "
        "Convolution: c_out x c_in x kh x kw of the weight, such as 64x64x3x3.",
    ),
]
OneSparsity = Annotated[
    float | None,
    typer.Option(
        "--sparsity",
        metavar="SPARSITY",
        help="Share of weights dropped, such as 0.75. Default: the only one of the pattern.",
    ),
]
Kind = Annotated[LayerKind, typer.Option("--kind", help="Kind of layer for --shape.")]
InputSize = Annotated[
    str | None,
    typer.Option(
        "--input", metavar="BATCHxHxW", help="Input of a convolution: batch x h x w, such as 1x56x56. Default: none."
    ),
]
Stride = Annotated[
    str | None,
    typer.Option("--stride", metavar="SIZE", help="Stride of a convolution: 2, or 2x1 for h and w. Default: 1."),
]
Padding = Annotated[
    str | None,
    typer.Option(
        "--padding",
        metavar="SIZE",
        help="Padding of a convolution: 1, or 1x0 for h and w. Default: kh/2 and kw/2, rounded down.",
    ),
]
Dilation = Annotated[
    str | None,
    typer.Option("--dilation", metavar="SIZE", help="Dilation of a convolution: 2, or 2x1 for h and w. Default: 1."),
]
PredictBackend = Annotated[
    str | None,
    typer.Option("--backend", metavar="ENGINE", help="Engine. Default: the only one in the table for this layer."),
]
PredictKernel = Annotated[
    str | None,
    typer.Option(
        "--kernel", metavar="KERNEL", help="Requested kernel. Default: the only one in the table for this layer."
    ),
]
PredictThreads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="COUNT", help="Number of threads. Default: the only one in the table."),
]
PredictWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar=COLUMN_VALUE,
        callback=split_pairs,
        help="Values of other columns, comma-separated or repeated, such as dtype_w=float32,layout=nhwc. Default: "
        "the only ones in the table.",
    ),
]
Coverage = Annotated[
    float,
    typer.Option(
        "--coverage",
        metavar="SHARE",
        help="Coverage of the prediction interval: its probability to hold a measurement, or the true time of a "
        "measured layer.",
    ),
]
AllowExtrapolation = Annotated[
    bool, typer.Option("--allow-extrapolation", help="Predictions outside the measured range, too.")
]
