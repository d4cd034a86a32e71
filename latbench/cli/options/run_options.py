"""Arguments and options of `latbench run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.common_options import LAYER_TYPES
from latbench.cli.options.option_texts import split_list

RunTarget = Annotated[
    float,
    typer.Option(
        "--target", min=1.0, metavar="SPEEDUP", help="Speedup to promise over the fastest dense engine, such as 1.5."
    ),
]
JobFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Folder of the job: tables, profile, pruned model, report. Default: latbench-jobs/ and the task's name.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick/--thorough",
        help="Measurement of what a search is likely to choose, or of all engines, patterns and options. Thorough "
        "takes several times as long.",
    ),
]
RunThreads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="COUNT",
        help="Threads of each engine. Default: as many as the job began with, or else one per core that no other "
        "program keeps busy.",
    ),
]
RunPrecisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="TYPE,...",
        callback=split_list,
        help=f"{LAYER_TYPES} Default: float32.",
    ),
]
RunSeed = Annotated[
    int, typer.Option("--seed", min=0, metavar="NUMBER", help="Random seed of synthetic weights and of the search.")
]
RunRecipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="Training recipe for prune: a YAML file, a method, or auto. Default: no training, or auto with "
        "--train-budget.",
    ),
]
