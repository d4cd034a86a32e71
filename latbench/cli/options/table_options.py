"""Arguments and options of `latbench compare`, `merge`, `validate` and `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.option_texts import COLUMN_VALUE, split_list, split_pairs

BeforeTable = Annotated[
    str, typer.Argument(metavar="BEFORE", help="Baseline table: a folder of parts, a Parquet file, or a URI.")
]
AfterTable = Annotated[str, typer.Argument(metavar="AFTER", help="Table to judge, in the same form.")]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="KIND,...",
        callback=split_list,
        help="Kinds of points that make the exit code 1, comma-separated or repeated: "
        "slower, missing, unclear, faster, same, new. Default: none.",
    ),
]
Threshold = Annotated[
    float,
    typer.Option(
        "--threshold", metavar="SHARE", help="Threshold for relative changes: smaller ones are ignored; 0.02 is 2%."
    ),
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
Rows = Annotated[
    int, typer.Option("--rows", min=0, metavar="COUNT", help="Number of points to list at most; 0 lists all.")
]
MergeSources = Annotated[
    list[str], typer.Argument(metavar="TABLE", help="Tables to merge: folders of parts, Parquet files, or URIs.")
]
MergeOutput = Annotated[str, typer.Option("--output", "-o", metavar="FOLDER", help="Folder or URI of the new table.")]
AllowMixed = Annotated[bool, typer.Option("--allow-mixed", help="Merge of tables from different devices or modes.")]

ImportFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="Format. spdy: layer timings as published with SPDY. Kernel timings: neusight and deepbench (CSV), "
        "aiconfigurator (Parquet or CSV). Results of benchmark libraries in JSON: google-benchmark, nvbench, pyperf.",
    ),
]
ImportFile = Annotated[Path, typer.Argument(metavar="FILE", help="File to read.")]
ImportOutput = Annotated[
    str, typer.Option("--output", "-o", metavar="FOLDER", help="Folder or URI of the table to add to.")
]
ImportOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar=COLUMN_VALUE,
        callback=split_pairs,
        help="Filters on lines of kernel timings or on results, comma-separated or repeated, such as "
        "'Device=Tesla T4'. Default: none.",
    ),
]
ImportColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="COLUMN=FIELD,...",
        callback=split_pairs,
        help="Fields of results that hold columns, comma-separated or repeated, such as m=M,k=K,n=batch. Columns "
        "are m, k, n, pattern, sparsity, dtype and threads. Default: fields of the same name.",
    ),
]
ImportPattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="PATTERN",
        help="Pattern of the sparse rows of spdy, such as block:1x4. Default: unstructured.",
    ),
]
ImportNetwork = Annotated[
    str | None,
    typer.Option("--network", metavar="NAME", help="Name of the network of spdy. Default: the name of the file."),
]
ImportDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Element type of results and deepbench sheets without one, such as float16. Default: none, such sheets "
        "are left out.",
    ),
]
ImportDevice = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="Device that was timed, such as amd-epyc-7742. Default: as in the file."
    ),
]
ImportThreads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, metavar="COUNT", help="Number of threads of spdy or of results. Default: unknown."
    ),
]
ImportWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="Workload with the shapes of spdy's layers, by name: a bundled name or a YAML file. Default: none.",
    ),
]
