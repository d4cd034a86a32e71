"""Arguments and options of `latbench layers` and `setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED

LayersOutput = Annotated[Path, typer.Option("--output", "-o", help="Folder of the table to add to.")]
LayersSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        help="Sparsities, such as 0.5,0.75,0.9, or `spdy`: the 41 levels of that paper. Default: a standard set.",
    ),
]
Repeats = Annotated[
    int,
    typer.Option("--repeats", min=1, help="Runs of each sparsity, in turns; runs in the table count."),
]
SpdyFile = Annotated[
    Path | None, typer.Option("--spdy", help="SPDY timing file to write with the times. Default: none.")
]
RemeasureLayers = Annotated[bool, typer.Option("--remeasure", help="New timing of what the table holds.")]
LayersSeed = Annotated[
    int, typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed for the order of sparsities.")
]
SetupEngine = Annotated[
    str, typer.Argument(help="Engine to set up: deepsparse, a sparse CPU engine for evaluation only.")
]
PythonProgram = Annotated[
    str | None,
    typer.Option("--python", help="Python interpreter for the environment. Default: the first one that fits."),
]
RemoveEnvironment = Annotated[bool, typer.Option("--remove", help="Removal of the environment.")]
