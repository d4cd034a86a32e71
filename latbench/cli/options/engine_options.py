"""Arguments and options of `latbench layers` and `setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED
from latbench.cli.options.option_texts import split_list

LayersOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the table to add to.")
]
LayersSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        metavar="SPARSITY,...",
        callback=split_list,
        help="Sparsities, comma-separated or repeated, such as 0.5,0.75,0.9, or `spdy`: the 41 levels of that "
        "paper. Default: a standard set.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", min=1, metavar="COUNT", help="Runs of each sparsity, in turns; runs in the table count."
    ),
]
SpdyFile = Annotated[
    Path | None,
    typer.Option("--spdy", metavar="FILE", help="SPDY timing file to write with the times. Default: none."),
]
RemeasureLayers = Annotated[bool, typer.Option("--remeasure", help="New timing of what the table holds.")]
LayersSeed = Annotated[
    int, typer.Option("--seed", min=0, max=MOST_SEED, metavar="SEED", help="Random seed for the order of sparsities.")
]
SetupEngine = Annotated[
    str,
    typer.Argument(metavar="ENGINE", help="Engine to set up: deepsparse, a sparse CPU engine for evaluation only."),
]
PythonProgram = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="PROGRAM",
        help="Python interpreter for the environment. Default: the first one that fits.",
    ),
]
RemoveEnvironment = Annotated[bool, typer.Option("--remove", help="Removal of the environment.")]
