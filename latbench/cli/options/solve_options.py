"""Arguments and options of `latbench solve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.option_texts import SECOND_SETTINGS, split_list, split_pairs

TimingsArgument = Annotated[
    str,
    typer.Argument(
        metavar="TIMINGS", help="Times of layers: SPDY's timing file, a CSV or Parquet file of options, or a table."
    ),
]
SolveTarget = Annotated[
    float | None,
    typer.Option(
        "--target", min=1.0, metavar="SPEEDUP", help="Speedup to reach. Default: none, which prints the frontier."
    ),
]
SolveOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="File of the profile: .csv, .parquet, or any other suffix for SPDY's text format. File of the frontier: "
        ".csv or .parquet. Default: none.",
    ),
]
ErrorsFile = Annotated[
    Path | None,
    typer.Option(
        "--errors",
        metavar="FILE",
        help="CSV or Parquet file with the columns layer, pattern, sparsity, error. Default: SPDY's prior.",
    ),
]
TimedPattern = Annotated[
    str, typer.Option("--pattern", metavar="PATTERN", help="Pattern of the sparse times in a timing file.")
]
SolveWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="Workload with the layers of a table, or the shapes of other layers for --most-bytes. Default: the "
        "layers timed inside a network.",
    ),
]
SolveModel = Annotated[
    Path | None,
    typer.Option(
        "--cost-model",
        metavar="FILE",
        help="Cost model from latbench fit of the table. Default: none, times as measured.",
    ),
]
SolvePatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--patterns",
        metavar="PATTERN,...",
        callback=split_list,
        help="Patterns of the table to choose from besides dense, comma-separated or repeated, such as "
        "vector:32,nm:2:4. Default: all.",
    ),
]
SolvePrecisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="TYPE,...",
        callback=split_list,
        help="Types of the table in which layers may be multiplied, comma-separated or repeated: float32, bfloat16, "
        "int8. float32 is always among them. The others need --errors. Default: float32.",
    ),
]
SolveSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        metavar="SPARSITY,...",
        callback=split_list,
        help="Sparsities of the table to choose from, comma-separated or repeated, or `fine`. With --cost-model "
        "also sparsities between. "
        "Default: all.",
    ),
]
NetworkName = Annotated[
    str | None, typer.Option("--network", metavar="NAME", help="Network in the table. Default: the only one.")
]
DeviceName = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Device in the table. Default: the only one.")
]
SolveBackend = Annotated[
    str | None,
    typer.Option("--backend", metavar="ENGINE", help="Engine of sparse layers in the table. Default: the only one."),
]
SolveThreads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="COUNT", help="Number of threads in the table. Default: the only one."),
]
SolveBatch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        metavar="SIZE",
        help="Batch size of layers inside a network. Default: the only one in the table.",
    ),
]
DenseSeconds = Annotated[
    float | None,
    typer.Option(
        "--dense-seconds",
        metavar="SECONDS",
        help="Seconds of the whole dense model. Default: as timed, else the sum of its layers.",
    ),
]
FixedSeconds = Annotated[
    float | None,
    typer.Option(
        "--fixed-seconds",
        metavar="SECONDS",
        help="Seconds of the model outside these layers. Default: dense seconds less their sum.",
    ),
]
LayerBytes = Annotated[
    float | None,
    typer.Option(
        "--most-bytes", min=0.0, metavar="BYTES", help="Upper bound in bytes on the packed weights. Default: none."
    ),
]
Resolution = Annotated[
    float,
    typer.Option(
        "--resolution",
        min=0.0,
        metavar="SECONDS",
        help="Resolution of the frontier in seconds: nearer profiles count as one.",
    ),
]
SecondTimings = Annotated[
    str | None,
    typer.Option(
        "--also",
        metavar="TIMINGS",
        help="Second table: times of the same layers elsewhere, which reach the target, too. It shares --workload, "
        "--pattern, --patterns, --sparsities and --limits. Default: none.",
    ),
]

SecondSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--also-with",
        metavar="KEY=VALUE,...",
        callback=split_pairs,
        help=f"Settings of the second table only, comma-separated or repeated: {', '.join(SECOND_SETTINGS)}. "
        "Default: none.",
    ),
]
