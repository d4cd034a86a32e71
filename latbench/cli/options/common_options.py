"""Arguments and options of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.option_texts import split_list

TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK", help="Task: a bundled name such as digits, a Python file, or package.module:task."
    ),
]
TableArgument = Annotated[
    str, typer.Argument(metavar="TABLE", help="Table: a folder of parts, a Parquet file, or a URI.")
]
Json = Annotated[
    bool, typer.Option("--json", help="JSON on stdout in place of tables: one object, times in seconds.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Details on stderr: files read and written, points measured, tracebacks of errors.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only: no progress, no notes.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="COUNT", help="Threads of each engine. Default: one per core that this process may use."
    ),
]
Patterns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN,...",
        callback=split_list,
        help="Sparsity patterns, comma-separated or repeated, such as dense,vector:32,nm:2:4. Default: all that a "
        "kernel runs.",
    ),
]
Sparsities = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPARSITY,...",
        callback=split_list,
        help="Sparsities, shares of one, comma-separated or repeated, such as 0.5,0.75,0.9. Default: a standard set.",
    ),
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD,...",
        callback=split_list,
        help="Workloads, comma-separated or repeated: bundled names, or YAML files; NAME@TOKENS for one of the token "
        "counts that it lists. Default: all bundled ones but language models.",
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--backends",
        metavar="ENGINE,...",
        callback=split_list,
        help="Engines, comma-separated or repeated, such as numba,openvino,scipy, or all. Default: those that run "
        "dense layers; on a GPU all.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Adaptive choice of points: six sparsities of each curve, then those that are least certain or near "
        "break-even.",
    ),
]
Tune = Annotated[
    bool, typer.Option("--tune", help="Extra points: latbench's CPU kernels with parameters tuned by measurement.")
]
Bf16 = Annotated[
    bool,
    typer.Option(
        "--bf16",
        help="Extra CPU points in bfloat16: latbench's kernels with rounded weights, or with rounded weights and "
        "activations. Dense engines in bfloat16 are the baseline.",
    ),
]
Int8 = Annotated[
    bool,
    typer.Option(
        "--int8",
        help="Extra CPU points in eight bits: latbench's kernels and patterns that keep columns in fours, with "
        "weights and activations in int8. Dense engines in int8 are the baseline.",
    ),
]
LAYER_TYPES = (
    "Types in which layers may be multiplied, comma-separated or repeated: float32, bfloat16, int8. float32 is "
    "always among them. The promise is over dense engines that round as far, or as --over says."
)
"""What `--precision` means on a CPU."""

Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="TYPE,...",
        callback=split_list,
        help=f"{LAYER_TYPES} On a GPU, the single type of the whole model: float16 or bfloat16. Default: float32, "
        "on a GPU float16.",
    ),
]
RivalType = Annotated[
    str | None,
    typer.Option(
        "--over",
        metavar="TYPE",
        help="Least precise type of the dense engines that the promise is over: float32, bfloat16 or int8. Default: "
        "the least precise of --precision.",
    ),
]
Sessions = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="COUNT",
        help="Processes per point. More average out memory placement and take proportionally longer.",
    ),
]
LimitsFile = Annotated[
    Path | None,
    typer.Option(
        "--limits",
        metavar="FILE",
        help="YAML file of layers that are tied, fixed or excluded; see search/problem/limits.py. Default: none.",
    ),
]

ModelGpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="GPU",
        help="GPU for the backend cupy: NAME or NAME:INDEX, such as h200 or a100:2. Default: for search the "
        "first one, for verify the one named in the profile.",
    ),
]

GPU_NAME = (
    "NAME or NAME:INDEX, such as h200, rtx-4090 or a100:2. INDEX counts from 0 as nvidia-smi does, or within "
    "CUDA_VISIBLE_DEVICES. `latbench doctor` prints the name of each GPU. Default: none."
)
