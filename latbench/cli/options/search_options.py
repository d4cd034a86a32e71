"""Arguments and options of `latbench search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench import MOST_SEED
from latbench.cli.options.option_texts import split_list

SearchTarget = Annotated[
    float | None,
    typer.Option(
        "--target",
        min=1.0,
        metavar="SPEEDUP",
        help="Speedup to promise over the fastest dense engine, such as 1.5. Default: none, with --max-drop.",
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        "--max-drop",
        metavar="DROP",
        help="Instead of a target, the largest drop of the score: 1% of the dense score, or 0.01 of its units. The "
        "fastest profile is searched. Default: none.",
    ),
]
QuickSearch = Annotated[
    bool, typer.Option("--quick", help="Pruning of likely options only, in a fraction of the time.")
]
SearchTable = Annotated[
    str,
    typer.Option(
        "--table",
        metavar="TABLE",
        help="Table of this machine, from latbench sweep. For deepsparse: from latbench layers.",
    ),
]
SearchDatabase = Annotated[
    Path,
    typer.Option(
        "--database", metavar="FOLDER", help="Folder of pruned layers. Layers that it holds are used again."
    ),
]
ProfileOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Profile to write (JSON).")]
SearchModel = Annotated[
    Path | None,
    typer.Option(
        "--cost-model", metavar="FILE", help="Cost model from latbench fit, for numba and cupy. Default: none."
    ),
]
SearchBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="ENGINE",
        help="Engine of the pruned model: numba (latbench's kernels on a CPU), cupy (those on a GPU) or deepsparse. "
        "Default: numba; cupy where the task has the deploy_device cuda.",
    ),
]
Deploy = Annotated[
    str,
    typer.Option(
        "--deploy",
        metavar="FORM",
        help="Form in which the model will be deployed, and in which the search times it: python (a torch module), "
        "or what `latbench export` writes, openvino, torch or c. The promise holds for this form.",
    ),
]
SearchPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--patterns",
        metavar="PATTERN,...",
        callback=split_list,
        help="Patterns to choose from besides dense, comma-separated or repeated, such as vector:32,nm:2:4. "
        "Default: all in the table.",
    ),
]
SearchSparsities = Annotated[
    list[str] | None,
    typer.Option(
        "--sparsities",
        metavar="SPARSITY,...",
        callback=split_list,
        help="Sparsities to choose from, comma-separated or repeated, such as 0.6,0.7, or `fine`: all that the cost "
        "model covers. Default: those "
        "in the table.",
    ),
]
ModelBytes = Annotated[
    float | None,
    typer.Option(
        "--most-bytes",
        min=0.0,
        metavar="BYTES",
        help="Upper bound in bytes on all weights of the pruned model, packed for numba's kernels. Layers that are "
        "not pruned count at full size. Default: none.",
    ),
]
LayerErrors = Annotated[
    str,
    typer.Option(
        "--errors",
        metavar="KIND|FILE",
        help="Layer errors: output, weight, or a CSV or Parquet file of layer, pattern, sparsity, error and, where "
        "it is not float32, precision.",
    ),
]
SearchSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=MOST_SEED,
        metavar="SEED",
        help="Random seed of the search. The same seed tries the same profiles, unless --remeasure or --time-budget "
        "changes the course.",
    ),
]
Evaluations = Annotated[
    int,
    typer.Option(
        "--evaluations",
        min=1,
        metavar="COUNT",
        help="Passes over the calibration data in each of up to 4 rounds, or over --batches of it. A part of "
        "the data counts as that part of a pass, a gradient as three passes.",
    ),
]
CalibrationBatches = Annotated[
    int | None,
    typer.Option(
        "--batches",
        min=1,
        metavar="COUNT",
        help="Calibration batches for the profiles that a search tries. The best profiles see all. Default: all.",
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Search strategy. staged learns each layer's part in the loss. For comparison: spdy and evopress, "
        "published searches; once, by layer errors alone; uniform, one pattern and sparsity for all layers.",
    ),
]
SearchBudget = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        metavar="DURATION",
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
        metavar="COUNT",
        help="Worker processes. Results differ only by rounding. Default: one per thread, at most 8.",
    ),
]
Evaluators = Annotated[
    str,
    typer.Option(
        "--judges",
        metavar="KIND",
        help="Evaluators of profiles. cpu: the worker processes of this machine. gpu: one process per GPU of this "
        "machine. ray: each CPU of the Ray cluster (RAY_ADDRESS), whose nodes share the files.",
    ),
]
PruningMethod = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Pruning method of a layer: obs, the most accurate; adaprune, sparsegpt or magnitude, which are faster; "
        "auto, obs if it takes seconds and else adaprune.",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence",
        min=0.6,
        max=0.999,
        metavar="SHARE",
        help="Probability that the verification meets the promised speedup.",
    ),
]
Refine = Annotated[
    Path | None,
    typer.Option(
        "--refine",
        metavar="FOLDER",
        help="Folder of a latbench verify that missed the target, to continue from. Default: none.",
    ),
]
RemeasureModels = Annotated[bool, typer.Option("--remeasure", help="New timing of whole models, and a new search.")]
