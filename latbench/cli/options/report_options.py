"""Arguments and options of `latbench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HtmlOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")]
ReportModel = Annotated[
    Path | None, typer.Option("--cost-model", metavar="FILE", help="Cost model from latbench fit. Default: none.")
]
ReportProfile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Profile from latbench search. Default: none.")
]
ReportPruned = Annotated[
    Path | None, typer.Option("--pruned", metavar="FOLDER", help="Folder from latbench prune. Default: none.")
]
ReportVerify = Annotated[
    Path | None, typer.Option("--verify", metavar="FOLDER", help="Folder from latbench verify. Default: none.")
]
ReportDatabase = Annotated[
    Path | None,
    typer.Option(
        "--database",
        metavar="FOLDER",
        help="Layer database of the search, for the error at each speedup. Default: none.",
    ),
]
ReportWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="Workload from latbench trace with the profile's layers. Default: none.",
    ),
]
AccuracyFile = Annotated[
    Path | None,
    typer.Option(
        "--accuracy",
        metavar="FILE",
        help="CSV or Parquet file with the columns pattern, method, speedup, accuracy, seed. Default: none.",
    ),
]
MilderTargetsFile = Annotated[
    Path | None,
    typer.Option(
        "--milder-targets", metavar="FILE", help="File milder_targets.json from latbench run. Default: none."
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="TABLE",
        help="Second table to compare with, of another device or of an earlier version; with --output and --figures "
        "only. Default: none.",
    ),
]
FiguresFolder = Annotated[
    Path | None,
    typer.Option(
        "--figures", metavar="FOLDER", help="Folder for figures for papers: PDF, SVG and their data. Default: none."
    ),
]
SummaryFile = Annotated[
    Path | None, typer.Option("--summary", metavar="FILE", help="JSON file for the main figures. Default: none.")
]
