"""Arguments and options of `latbench compare`, `merge`, `validate` and `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latbench.cli.options.common_options import COLUMN_VALUE

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
