"""Arguments and options of `latbench prune` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED

ProfileInput = Annotated[Path, typer.Option("--profile", metavar="FILE", help="Profile from latbench search.")]
DatabaseInput = Annotated[
    Path, typer.Option("--database", metavar="FOLDER", help="Layer database that latbench search filled.")
]
PrunedOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write.")]
JointTuning = Annotated[
    bool,
    typer.Option(
        "--global/--no-global",
        help="Joint tuning of all pruned layers on calibration data. Memory: the dense model and three numbers per "
        "kept weight.",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="Training recipe: a YAML file, a method such as gmp or mask_decay, or auto. The better of the trained "
        "and the untrained model is kept. Default: no training, or auto with --train-budget.",
    ),
]
TrainBudget = Annotated[
    str | None,
    typer.Option(
        "--train-budget",
        metavar="DURATION",
        help="Time limit of a training that wins back accuracy, in seconds or such as 90s, 10m, 1.5h. The pruned "
        "model learns from the dense one under its masks (--recipe auto). Default: 10m for --recipe auto.",
    ),
]
TuningSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=MOST_SEED,
        metavar="SEED",
        help="Random seed of the tuning. A recipe has a seed of its own.",
    ),
]
PackedFile = Annotated[
    bool, typer.Option("--packed", help="Extra file packed.safetensors: mask bits and kept weights.")
]
OnnxFile = Annotated[
    Path | None,
    typer.Option(
        "--onnx", metavar="FILE", help="ONNX file of the pruned model, for onnxruntime and DeepSparse. Default: none."
    ),
]
PrunedArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder from latbench prune.")]
VerifiedArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder from latbench prune or latbench export.")
]
VerifyOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for verify.json and the measured rows.")
]
VerifyBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="ENGINE",
        help="Engine of the pruned model: numba, cupy or deepsparse. Default: the engine of the search.",
    ),
]
RemeasureAll = Annotated[bool, typer.Option("--remeasure", help="New measurement instead of a stored one.")]
