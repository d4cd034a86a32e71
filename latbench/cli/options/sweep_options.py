"""Arguments and options of `latbench plan`, `sweep` and `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED
from latbench.cli.options.common_options import GPU_NAME
from latbench.cli.options.option_texts import split_inputs, split_pairs

PlanCpu = Annotated[bool, typer.Option("--cpu", help="Plan for the CPU of this machine: the default.")]
PlanGpu = Annotated[
    str | None, typer.Option("--gpu", metavar="GPU", help=f"GPU to plan for, here or elsewhere: {GPU_NAME}")
]
SweepCpu = Annotated[bool, typer.Option("--cpu", help="CPU of this machine as the device to measure.")]
SweepGpu = Annotated[str | None, typer.Option("--gpu", metavar="GPU", help=f"GPU to measure: {GPU_NAME}")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="Cluster to measure on. ray: all nodes of a Ray cluster (address in RAY_ADDRESS) with the GPU, or with "
        "none for --cpu. slurm: exclusive nodes of a Slurm cluster. Default: this machine.",
    ),
]
SlurmSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE,...",
        callback=split_pairs,
        help="Slurm settings, comma-separated or repeated, as for sbatch: nodes=4 (default 1), time=120 (minutes "
        "per job, "
        "default 60), partition=..., account=...",
    ),
]
SweepOutput = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", help="Folder or URI of the table. Default: latbench-tables/<device>."
    ),
]
SweepBudget = Annotated[
    str | None,
    typer.Option(
        "--time-budget", metavar="DURATION", help="Time limit in seconds, or such as 90s, 10m, 1.5h. Default: none."
    ),
]
Wait = Annotated[
    str,
    typer.Option(
        "--wait",
        metavar="DURATION",
        help="Longest wait for another sweep of the same device, in seconds or such as 10m, 1.5h.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Short sweep: only the points that tell most about a GPU, about five minutes. The same command without "
        "--quick continues it.",
    ),
]
SweepSeed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, max=MOST_SEED, metavar="SEED", help="Random seed for the weights and the order of points."
    ),
]
RemeasureNoisy = Annotated[
    bool, typer.Option("--remeasure", help="New measurement of the points that are noisy in the table.")
]
RefreshTable = Annotated[
    str | None,
    typer.Option(
        "--refresh",
        metavar="TABLE",
        help="Table whose old times are checked: those of other versions than the installed ones. A few points of "
        "each engine and kernel are timed again, to say which have moved. Default: none.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List of the points only: nothing is measured.")]

TraceTarget = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="Task: digits, my_task.py or package.module. With --input-shape: the function that makes the model, "
        "module:factory.",
    ),
]
InputShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shape",
        metavar="INPUT,...",
        callback=split_inputs,
        help="Inputs of the model, comma-separated or repeated. 1x3x224x224 is given by position, "
        "ids:1x128:int64:30522 by name: SIZES or NAME:SIZES:TYPE:BOUND. Types: float32 (zeros), int64, int32, bool "
        "(ones). BOUND: random integers below it, as token ids are. Default: the task's own example.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", min=1, metavar="SIZE", help="Batch size. Default: the first number of each --input-shape."
    ),
]
WorkloadOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Workload file to write (YAML). Default: none.")
]
