"""Options of `latbench export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.option_texts import split_list

ExportOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write: library, weights, examples.")
]
ExportTarget = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORM",
        help="Deployed form. openvino: a model of OpenVINO, and an extension with its sparse layers. torch: a "
        "package that AOTInductor compiled, and an operator. c: a library with a C interface, for chains of layers. "
        "Default: openvino if it is installed, else c.",
    ),
]
ExportLevels = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        metavar="LEVEL,...",
        callback=split_list,
        help="CPU levels, comma-separated or repeated: x86-64-v3, x86-64-v4, x86-64-v4-vnni-bf16. The library takes "
        "the most able one of the machine that loads it. Default: all that this machine has.",
    ),
]
ExportBatches = Annotated[
    list[str] | None,
    typer.Option(
        "--batch",
        metavar="COUNT,...",
        callback=split_list,
        help="Batches for which kernels are chosen beside 1, comma-separated or repeated. Others run as sums "
        "of them. Default: the batch of the task's example.",
    ),
]
ExportThreads = Annotated[
    list[str] | None,
    typer.Option(
        "--threads",
        metavar="COUNT,...",
        callback=split_list,
        help="Numbers of threads for which work is split beside 1, comma-separated or repeated. Default: the threads "
        "of the profile.",
    ),
]
