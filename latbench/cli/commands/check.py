"""`latbench check`: a task tried in seconds, before anything is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from latbench.cli.options.common_options import Json, TaskArgument, Threads

if TYPE_CHECKING:
    from search.validate_task import TaskFindings


def check(task: TaskArgument, threads: Threads = None, as_json: Json = False) -> None:
    """List every fault of a task with its place, and what latbench sees of the model. Exit 2 if there is a fault."""
    import json

    from latbench.cli.progress_bar import live
    from latbench.errors import UsageError
    from latbench.machines.processors import select_threads
    from search.validate_task import validate_task

    with live() as tell:
        found = validate_task(task, threads=select_threads(threads), progress=lambda step: tell(step, None, None))
    if as_json:
        typer.echo(json.dumps(_describe(found), indent=2, allow_nan=False))
    else:
        _print_findings(found)
    if found.faults:
        count = f"{len(found.faults)} faults" if len(found.faults) > 1 else "1 fault"
        raise UsageError(f"{task}: {count}; correct what is listed, then type `latbench check {task}` again")
    if not as_json:
        # A job measures CPUs; on a GPU its steps are commands.
        on_gpu = found.deploy_device == "cuda"
        following = f"trace {task} -o my_layers.yaml" if on_gpu else f"run {task} --target 2"
        typer.echo(f"\nThe task is ready. Next: latbench {following}")


def _describe(found: TaskFindings) -> dict[str, object]:
    """Return the findings as JSON values; shapes of layers are the texts that tables show."""
    from dataclasses import asdict

    from latbench.workloads.points import format_shape

    shapes = {name: format_shape(shape) for name, shape in found.layers.items()}
    return asdict(found) | {"layers": shapes}


def _print_findings(found: TaskFindings) -> None:
    """Print what was found: a line each, then the layers, the notes and the faults."""
    from latbench.base.number_format import format_seconds
    from latbench.workloads.points import format_shape

    def line(title: str, text: str) -> None:
        typer.echo(f"{title:<12} {text}")

    if found.functions:
        line("functions", ", ".join(found.functions))
    if found.parameters is not None:
        line("model", f"{found.kind}, {found.parameters:,} parameters")
    for place, text in found.inputs.items():
        line("input", f"{place}: {text}")
    if found.batch is not None:
        line("batch", f"{found.batch}, the first dimension of {found.batch_place}")
    if found.batches is not None:
        line("calibration", f"{found.batches} batches" if found.batches > 1 else "1 batch")
    if found.loss is not None:
        line("loss", f"{found.loss:.4g} on the first batch")
    if found.score is not None and found.score_seconds is not None:
        line("score", f"{found.score:.4g} in {format_seconds(found.score_seconds)}")
    if found.layers:
        share = "" if found.share is None else f", with {found.share:.0%} of the model's multiplications"
        line("layers", f"{len(found.layers)} can be pruned{share}")
    width = max(map(len, [*found.layers, *found.left_out]), default=0)
    for name, shape in found.layers.items():
        typer.echo(f"  {name:<{width}}  {format_shape(shape)}")
    for name, reason in found.left_out.items():
        typer.echo(f"  {name or 'the model':<{width}}  left out: {reason}")
    for note in found.notes:
        typer.echo(f"note: {note}")
    for fault in found.faults:
        typer.echo(f"fault: {f'{fault.place}: ' if fault.place else ''}{fault.sentence}")
