"""Arguments and options of `latbench solve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

TimingsArgument = Annotated[
    str, typer.Argument(help="Times of layers: SPDY's timing file, a CSV or Parquet file of options, or a table.")
]
SolveTarget = Annotated[
    float | None,
    typer.Option("--target", min=1.0, help="Speedup to reach. Default: none, which prints the frontier."),
]
SolveOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File of the profile: .csv, .parquet, or any other suffix for SPDY's text format. File of the frontier: "
        ".csv or .parquet. Default: none.",
    ),
]
ErrorsFile = Annotated[
    Path | None,
    typer.Option(
        "--errors",
        help="CSV or Parquet file with the columns layer, pattern, sparsity, error. Default: SPDY's prior.",
    ),
]
TimedPattern = Annotated[str, typer.Option("--pattern", help="Pattern of the sparse times in a timing file.")]
SolveWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="Workload with the layers of a table, or the shapes of other layers for --most-bytes. Default: the "
        "layers timed inside a network.",
    ),
]
SolveModel = Annotated[
    Path | None,
    typer.Option("--cost-model", help="Cost model from latbench fit of the table. Default: none, times as measured."),
]
SolvePatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--patterns",
        help="Patterns of the table to choose from besides dense, such as vector:32,nm:2:4. Default: all.",
    ),
]
SolveSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        help="Sparsities of the table to choose from, or `fine`; with --cost-model also sparsities between. "
        "Default: all.",
    ),
]
NetworkName = Annotated[str | None, typer.Option("--network", help="Network in the table. Default: the only one.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="Device in the table. Default: the only one.")]
SolveBackend = Annotated[
    str | None, typer.Option("--backend", help="Engine of sparse layers in the table. Default: the only one.")
]
SolveThreads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Number of threads in the table. Default: the only one.")
]
SolveBatch = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Batch size of layers inside a network. Default: the only one in the table."),
]
DenseSeconds = Annotated[
    float | None,
    typer.Option(
        "--dense-seconds", help="Seconds of the whole dense model. Default: as timed, else the sum of its layers."
    ),
]
FixedSeconds = Annotated[
    float | None,
    typer.Option(
        "--fixed-seconds", help="Seconds of the model outside these layers. Default: dense seconds less their sum."
    ),
]
LayerBytes = Annotated[
    float | None,
    typer.Option("--most-bytes", min=0.0, help="Upper bound in bytes on the packed weights. Default: none."),
]
Resolution = Annotated[
    float,
    typer.Option(
        "--resolution", min=0.0, help="Resolution of the frontier in seconds: nearer profiles count as one."
    ),
]
SecondTimings = Annotated[
    str | None,
    typer.Option(
        "--also",
        help="Second table: times of the same layers elsewhere, which reach the target, too. It shares --workload, "
        "--pattern, --patterns, --sparsities and --limits. Default: none.",
    ),
]

SECOND_SETTINGS: dict[str, Callable[[str], Any]] = {
    "target": float, "workload": str, "model": Path, "network": str, "device": str, "backend": str, "threads": int,
    "batch": int, "dense_seconds": float, "fixed_seconds": float,
}  # fmt: skip
"""The settings that --also-with takes.

Both tables are of one model and one profile, so the settings of layers and options hold for both. How times were
taken is each table's own.
"""
SecondSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--also-with",
        metavar="KEY=VALUE",
        help=f"Setting of the second table only, repeatable: {', '.join(SECOND_SETTINGS)}. Default: none.",
    ),
]
