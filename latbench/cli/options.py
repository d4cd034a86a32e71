"""The arguments and options of all commands, as types of their functions' parameters, and how their texts are read.

Help texts are noun phrases. They name the unit and, unless Typer prints it, the default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from latbench import MOST_SEED
from latbench.errors import UsageError


class Estimator(StrEnum):
    """The cost models that `latbench fit` fits."""

    lookup = "lookup"
    roofline = "roofline"
    boosted = "boosted"
    hybrid = "hybrid"
    transfer = "transfer"


class LayerKind(StrEnum):
    """The layers that `latbench predict` predicts."""

    linear = "linear"
    conv2d = "conv2d"


# Several commands -------------------------------------------------------------------------------------------------

TaskArgument = Annotated[
    str, typer.Argument(help="Task: a bundled name such as digits, a Python file, or package.module:task.")
]
TableArgument = Annotated[str, typer.Argument(help="Table: a folder of parts, a Parquet file, or a URI.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each engine. Default: all cores.")]
Patterns = Annotated[
    list[str] | None,
    typer.Option(help="Sparsity patterns, such as dense,vector:32,nm:2:4. Default: all that a kernel runs."),
]
Sparsities = Annotated[
    list[str] | None, typer.Option(help="Sparsities, shares of one, such as 0.5,0.75,0.9. Default: a standard set.")
]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload", help="Workload, repeatable: a bundled name or a YAML file. Default: all bundled ones."
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--backends",
        help="Engines, such as numba,openvino,scipy, or all. Default: those that run dense layers; on a GPU all.",
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
Sessions = Annotated[
    int,
    typer.Option(
        min=1, help="Processes per point. More average out memory placement and take proportionally longer."
    ),
]
LimitsFile = Annotated[
    Path | None,
    typer.Option(
        "--limits",
        help="YAML file of layers that are tied, fixed or excluded; see search/problem/limits.py. Default: none.",
    ),
]
COLUMN_VALUE = "COLUMN=VALUE"

_GPU_NAME = (
    "NAME or NAME:INDEX, such as h200, rtx-4090 or a100:2. INDEX counts from 0 as nvidia-smi does, or within "
    "CUDA_VISIBLE_DEVICES. `latbench doctor` prints the name of each GPU. Default: none."
)

# plan and sweep ---------------------------------------------------------------------------------------------------

PlanCpu = Annotated[bool, typer.Option("--cpu", help="Plan for the CPU of this machine: the default.")]
PlanGpu = Annotated[str | None, typer.Option("--gpu", help=f"GPU to plan for, here or elsewhere: {_GPU_NAME}")]
SweepCpu = Annotated[bool, typer.Option("--cpu", help="CPU of this machine as the device to measure.")]
SweepGpu = Annotated[str | None, typer.Option("--gpu", help=f"GPU to measure: {_GPU_NAME}")]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Cluster to measure on. ray: all nodes of a Ray cluster (address in RAY_ADDRESS) with the GPU, or with "
        "none for --cpu. slurm: exclusive nodes of a Slurm cluster. Default: this machine.",
    ),
]
SlurmSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE",
        help="Slurm setting, repeatable, as for sbatch: nodes=4 (default 1), time=120 (minutes per job, default 60), "
        "partition=..., account=...",
    ),
]
SweepOutput = Annotated[
    str | None,
    typer.Option("--output", "-o", help="Folder or URI of the table. Default: latbench-tables/<device>."),
]
SweepBudget = Annotated[
    str | None,
    typer.Option("--time-budget", help="Time limit in seconds, or such as 90s, 10m, 1.5h. Default: none."),
]
Wait = Annotated[
    str,
    typer.Option(
        "--wait", help="Longest wait for another sweep of the same device, in seconds or such as 10m, 1.5h."
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
    int, typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed for the weights and the order of points.")
]
RemeasureNoisy = Annotated[
    bool, typer.Option("--remeasure", help="New measurement of the points that are noisy in the table.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List of the points only: nothing is measured.")]

# trace ------------------------------------------------------------------------------------------------------------

TraceTarget = Annotated[
    str,
    typer.Argument(
        help="Task: digits, my_task.py or package.module. With --input-shape: the function that makes the model, "
        "module:factory."
    ),
]
InputShape = Annotated[
    str | None,
    typer.Option(
        "--input-shape", help="Shape of the model's input, such as 1x3x224x224. Default: the task's own example."
    ),
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, help="Batch size. Default: the first number of --input-shape.")
]
WorkloadOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="Workload file to write (YAML). Default: none.")
]

# fit and predict --------------------------------------------------------------------------------------------------

ModelOutput = Annotated[Path, typer.Option("--output", "-o", help="Model file to write (JSON).")]
EstimatorName = Annotated[
    Estimator,
    typer.Option(
        "--estimator",
        help="Cost model. lookup interpolates between measured sparsities. roofline sums work at fitted rates. "
        "boosted learns what these miss, for other shapes. hybrid is lookup where measured, else boosted. transfer "
        "predicts a new device from a few of its rows and many of other devices (merge --allow-mixed).",
    ),
]
FitBackend = Annotated[
    str | None, typer.Option("--backend", help="Engine whose rows are used. Default: all engines of the table.")
]
FitWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar=COLUMN_VALUE, help="Filter on rows, repeatable, such as dtype_w=float32. Default: none."
    ),
]
TransferDevice = Annotated[
    str | None, typer.Option("--device", help="Device to predict, for --estimator transfer. Default: none.")
]
FitSeed = Annotated[
    int, typer.Option("--random-state", min=0, max=MOST_SEED, help="Random seed of learned models and hold-outs.")
]

ModelArgument = Annotated[Path, typer.Argument(help="Model file from latbench fit.")]
FittedTable = Annotated[str, typer.Option("--table", help="Table that the model was fitted to.")]
OnePattern = Annotated[str, typer.Option("--pattern", help="Sparsity pattern, such as dense, shflbw:32 or nm:2:4.")]
ShapeText = Annotated[
    str,
    typer.Option(
        "--shape",
        help="Shape of the layer. Linear: m x k x n (output features, input features, tokens), such as 768x768x128. "
        "Convolution: c_out x c_in x kh x kw of the weight, such as 64x64x3x3.",
    ),
]
OneSparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="Share of weights dropped, such as 0.75. Default: the only one of the pattern."),
]
Kind = Annotated[LayerKind, typer.Option("--kind", help="Kind of layer for --shape.")]
InputSize = Annotated[
    str | None, typer.Option("--input", help="Input of a convolution: batch x h x w, such as 1x56x56. Default: none.")
]
Stride = Annotated[
    str | None, typer.Option("--stride", help="Stride of a convolution: 2, or 2x1 for h and w. Default: 1.")
]
Padding = Annotated[
    str | None,
    typer.Option(
        "--padding",
        help="Padding of a convolution: 1, or 1x0 for h and w. Default: kh/2 and kw/2, rounded down.",
    ),
]
Dilation = Annotated[
    str | None, typer.Option("--dilation", help="Dilation of a convolution: 2, or 2x1 for h and w. Default: 1.")
]
PredictBackend = Annotated[
    str | None, typer.Option("--backend", help="Engine. Default: the only one in the table for this layer.")
]
PredictKernel = Annotated[
    str | None, typer.Option("--kernel", help="Requested kernel. Default: the only one in the table for this layer.")
]
PredictThreads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Number of threads. Default: the only one in the table.")
]
PredictWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar=COLUMN_VALUE,
        help="Value of another column, repeatable, such as dtype_w=float32. Default: the only one in the table.",
    ),
]
Coverage = Annotated[
    float,
    typer.Option(
        "--coverage",
        help="Coverage of the prediction interval: its probability to hold a measurement, or the true time of a "
        "measured layer.",
    ),
]
AllowExtrapolation = Annotated[
    bool, typer.Option("--allow-extrapolation", help="Predictions outside the measured range, too.")
]

# search -----------------------------------------------------------------------------------------------------------

SearchTarget = Annotated[
    float, typer.Option("--target", min=1.0, help="Speedup to promise over the fastest dense engine, such as 1.5.")
]
SearchTable = Annotated[
    str,
    typer.Option("--table", help="Table of this machine, from latbench sweep. For deepsparse: from latbench layers."),
]
SearchDatabase = Annotated[
    Path, typer.Option("--database", help="Folder of pruned layers. Layers that it holds are used again.")
]
ProfileOutput = Annotated[Path, typer.Option("--output", "-o", help="Profile to write (JSON).")]
SearchModel = Annotated[
    Path | None,
    typer.Option("--model", help="Cost model from latbench fit, for numba and numba-bf16. Default: none."),
]
SearchBackend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="Engine of the pruned model: numba (latbench's kernels), numba-bf16 (in bfloat16) or deepsparse.",
    ),
]
SearchPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--patterns",
        help="Patterns to choose from besides dense, such as vector:32,nm:2:4. Default: all in the table.",
    ),
]
SearchSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        help="Sparsities to choose from, such as 0.6,0.7, or `fine`: all that the cost model covers. Default: those "
        "in the table.",
    ),
]
ModelBytes = Annotated[
    float | None,
    typer.Option(
        "--most-bytes",
        min=0.0,
        help="Upper bound in bytes on all weights of the pruned model, packed for numba's kernels. Layers that are "
        "not pruned count at full size. Default: none.",
    ),
]
LayerErrors = Annotated[
    str,
    typer.Option(
        "--errors",
        help="Layer errors: output, weight, or a CSV or Parquet file of layer, pattern, sparsity, error.",
    ),
]
SearchSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=MOST_SEED,
        help="Random seed of the search. The same seed tries the same profiles, unless --remeasure or --time-budget "
        "changes the course.",
    ),
]
Evaluations = Annotated[
    int,
    typer.Option(
        "--evaluations",
        min=1,
        help="Passes over the calibration data in each of up to 4 rounds, or over --batches of it. A part of "
        "the data counts as that part of a pass.",
    ),
]
CalibrationBatches = Annotated[
    int | None,
    typer.Option(
        "--batches",
        min=1,
        help="Calibration batches for the profiles that a search tries. The best profiles see all. Default: all.",
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="Search strategy. staged learns each layer's part in the loss. For comparison: spdy, the published "
        "search; once, by layer errors alone; uniform, one pattern and sparsity for all layers.",
    ),
]
SearchBudget = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        help="Time limit for trying profiles, in seconds or such as 90s, 10m, 1.5h. Pruning layers and timing models "
        "before it do not count. The profiles found are still evaluated and timed, in up to 10 rounds of minutes. "
        "Default: none.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Worker processes. Results differ only by rounding. Default: one per thread, at most 8.",
    ),
]
Evaluators = Annotated[
    str,
    typer.Option(
        "--judges",
        help="Evaluators of profiles. cpu: the worker processes of this machine. gpu: one process per GPU of this "
        "machine. ray: each CPU of the Ray cluster (RAY_ADDRESS), whose nodes share the files.",
    ),
]
PruningMethod = Annotated[
    str,
    typer.Option(
        "--method",
        help="Pruning method of a layer: obs, the most accurate; adaprune, sparsegpt or magnitude, which are faster; "
        "auto, obs if it takes seconds and else adaprune.",
    ),
]
Risk = Annotated[
    float,
    typer.Option("--risk", min=0.6, max=0.999, help="Probability that the verification meets the promised speedup."),
]
Refine = Annotated[
    Path | None,
    typer.Option(
        "--refine", help="Folder of a latbench verify that missed the target, to continue from. Default: none."
    ),
]
RemeasureModels = Annotated[bool, typer.Option("--remeasure", help="New timing of whole models, and a new search.")]

# prune and verify -------------------------------------------------------------------------------------------------

ProfileInput = Annotated[Path, typer.Option("--profile", help="Profile from latbench search.")]
DatabaseInput = Annotated[Path, typer.Option("--database", help="Layer database that latbench search filled.")]
PrunedOutput = Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")]
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
        help="Training recipe: a YAML file, or a method such as gmp or mask_decay. The better of the trained and the "
        "untrained model is kept. Default: no training.",
    ),
]
TuningSeed = Annotated[
    int,
    typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed of the tuning. A recipe has a seed of its own."),
]
PackedFile = Annotated[
    bool, typer.Option("--packed", help="Extra file packed.safetensors: mask bits and kept weights.")
]
OnnxFile = Annotated[
    Path | None,
    typer.Option("--onnx", help="ONNX file of the pruned model, for onnxruntime and DeepSparse. Default: none."),
]
PrunedArgument = Annotated[Path, typer.Argument(help="Folder from latbench prune.")]
VerifyOutput = Annotated[Path, typer.Option("--output", "-o", help="Folder for verify.json and the measured rows.")]
VerifyBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Engine of the pruned model: numba, numba-bf16 or deepsparse. Default: the engine of the search.",
    ),
]
RemeasureAll = Annotated[bool, typer.Option("--remeasure", help="New measurement instead of a stored one.")]

# solve ------------------------------------------------------------------------------------------------------------

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
    typer.Option("--model", help="Cost model from latbench fit of the table. Default: none, times as measured."),
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
        help="Sparsities of the table to choose from, or `fine`; with --model also sparsities between. Default: all.",
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

# report -----------------------------------------------------------------------------------------------------------

HtmlOutput = Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")]
ReportModel = Annotated[Path | None, typer.Option("--model", help="Cost model from latbench fit. Default: none.")]
ReportProfile = Annotated[Path | None, typer.Option("--profile", help="Profile from latbench search. Default: none.")]
ReportPruned = Annotated[Path | None, typer.Option("--pruned", help="Folder from latbench prune. Default: none.")]
ReportVerify = Annotated[Path | None, typer.Option("--verify", help="Folder from latbench verify. Default: none.")]
ReportDatabase = Annotated[
    Path | None,
    typer.Option("--database", help="Layer database of the search, for the error at each speedup. Default: none."),
]
ReportWorkload = Annotated[
    str | None,
    typer.Option("--workload", help="Workload from latbench trace with the profile's layers. Default: none."),
]
AccuracyFile = Annotated[
    Path | None,
    typer.Option(
        "--accuracy",
        help="CSV or Parquet file with the columns pattern, method, speedup, accuracy, seed. Default: none.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        help="Second table to compare with, of another device or of an earlier version. Default: none.",
    ),
]
FiguresFolder = Annotated[
    Path | None,
    typer.Option("--figures", help="Folder for figures for papers: PDF, SVG and their data. Default: none."),
]
SummaryFile = Annotated[Path | None, typer.Option("--summary", help="JSON file for the main figures. Default: none.")]

# compare, merge, validate -----------------------------------------------------------------------------------------

BeforeTable = Annotated[str, typer.Argument(help="Baseline table: a folder of parts, a Parquet file, or a URI.")]
AfterTable = Annotated[str, typer.Argument(help="Table to judge, in the same form.")]
FailOn = Annotated[
    str,
    typer.Option("--fail-on", help="Kinds of points that make the exit code 1, of "
                 "slower,missing,unclear,faster,same,new. Default: none."),
]  # fmt: skip
Threshold = Annotated[
    float, typer.Option("--threshold", help="Threshold for relative changes: smaller ones are ignored; 0.02 is 2%.")
]
CorrectDrift = Annotated[
    bool, typer.Option("--correct-drift", help="Correction of times by the pace of the machine at that moment.")
]
AcrossDevices = Annotated[bool, typer.Option("--across-devices", help="Comparison of points of different devices.")]
AcrossModes = Annotated[
    bool,
    typer.Option(
        "--across-modes", help="Comparison of points with different cache modes, launch modes, threads or timers."
    ),
]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Number of points to list at most; 0 lists all.")]
MergeSources = Annotated[list[str], typer.Argument(help="Tables to merge: folders of parts, Parquet files, or URIs.")]
MergeOutput = Annotated[str, typer.Option("--output", "-o", help="Folder or URI of the new table.")]
AllowMixed = Annotated[bool, typer.Option("--allow-mixed", help="Merge of tables from different devices or modes.")]

# import -----------------------------------------------------------------------------------------------------------

ImportFormat = Annotated[
    str,
    typer.Argument(
        help="Format. spdy: layer timings as published with SPDY. Kernel timings: neusight and deepbench (CSV), "
        "aiconfigurator (Parquet)."
    ),
]
ImportFile = Annotated[Path, typer.Argument(help="File to read.")]
ImportOutput = Annotated[str, typer.Option("--output", "-o", help="Folder or URI of the table to add to.")]
ImportOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar=COLUMN_VALUE,
        help="Filter on lines of kernel timings, repeatable, such as 'Device=Tesla T4'. Default: none.",
    ),
]
ImportPattern = Annotated[
    str | None,
    typer.Option("--pattern", help="Pattern of the sparse rows of spdy, such as block:1x4. Default: unstructured."),
]
ImportNetwork = Annotated[
    str | None, typer.Option("--network", help="Name of the network of spdy. Default: the name of the file.")
]
ImportDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Element type of deepbench sheets without one, such as float16. Default: none, they are left out.",
    ),
]
ImportDevice = Annotated[
    str | None,
    typer.Option("--device", help="Device that was timed, such as amd-epyc-7742. Default: as in the file."),
]
ImportThreads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Number of threads of spdy. Default: unknown.")
]
ImportWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="Workload with the shapes of spdy's layers, by name: a bundled name or a YAML file. Default: none.",
    ),
]

# layers and setup -------------------------------------------------------------------------------------------------

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


# Texts of options -------------------------------------------------------------------------------------------------


def parse_duration(text: str) -> float:
    """Return the seconds of a number with s, m or h behind it, or nothing for seconds.

    Raises UsageError for any other text.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", text.strip())
    if found is None:
        raise UsageError(f"a duration is a number followed by s, m or h, such as 90s or 10m, not {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_column_values(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the value by column of a repeated option COLUMN=VALUE.

    Raises UsageError for a text of another form, or a column that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        column, separator, value = text.partition("=")
        if not (column and separator and value):
            raise UsageError(f"{option} takes COLUMN=VALUE, not {text!r}")
        if column in found:
            raise UsageError(f"{option} {column} is given twice: {found[column]} and {value}")
        found[column] = value
    return found


def parse_second_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --also-with by name. Raises UsageError for an unknown setting or a wrong value."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        key = name.replace("-", "_")
        try:
            found[key] = SECOND_SETTINGS[key](value)
        except (KeyError, ValueError):
            known = ", ".join(SECOND_SETTINGS)
            raise UsageError(f"--also-with takes {known}, as in batch=16, not {text!r}") from None
    return found


def parse_sizes(option: str, form: str, text: str, count: int | None = None) -> list[int]:
    """Return the whole numbers of a text such as 768x768x128.

    `form` describes the text for the message; `count` is how many numbers it has, None for any number of them.
    Raises UsageError for any other text, and for numbers below 1.
    """
    try:
        numbers = [int(number) for number in text.split("x")]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        raise UsageError(f"{option} takes {form}, not {text!r}")
    if min(numbers) < 1:
        raise UsageError(f"{option} takes numbers of at least 1, not {text}")
    return numbers


def check_share(option: str, value: float, *, zero: bool = False) -> None:
    """Raise UsageError unless a number lies between 0 and 1; `zero`: 0 itself is allowed."""
    if not (0 < value < 1 or (zero and value == 0)):
        below = "from 0 up to, but not including, 1" if zero else "between 0 and 1"
        raise UsageError(f"{option} is a share {below}, not {value:g}")


def check_positive(option: str, value: float) -> None:
    """Raise UsageError unless a share is positive and finite."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} is a positive share such as 0.02, not {value:g}")
