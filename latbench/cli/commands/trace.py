"""`latbench trace`: the layer shapes of a torch model as a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from search.problem.limits import Limits


def trace(
    target: Annotated[
        str, typer.Argument(help="A task (digits, my_task.py, package.module), or with --input-shape module:factory.")
    ],
    input_shape: Annotated[
        str | None, typer.Option(help="The model's input, such as 1x3x224x224; TARGET is then what makes the model.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Replaces the first number of --input-shape.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Workload file to write (YAML).")] = None,
) -> None:
    """Note the shape of every linear layer and 2-d convolution that a model runs, and what is left out and why."""
    from rich.console import Console
    from rich.table import Table

    from latbench.errors import BadData, UsageError
    from latbench.workloads.points import format_shape
    from latbench.workloads.workload import Workload, read_workload, trace_model, write_workload

    limits: Limits | None = None
    if input_shape is not None:
        name = target.rpartition(":")[2]
        model = _made_by(target)
        inputs: tuple[torch.Tensor, ...] = (_zeros(input_shape, batch),)
    else:
        from search.task import load_task

        if batch is not None:
            raise UsageError("a task fixes its own batch; --batch goes with --input-shape")
        task = load_task(target)
        name, model, inputs, limits = task.name, task.model(), task.example(), task.limits
    try:
        workload, skipped = trace_model(model, inputs, name=name)
    except Exception as error:
        raise UsageError(f"{target}: running the model raised {type(error).__name__}: {error}") from error
    names = [layer.name for layer in workload.layers]
    if limits is not None:
        names = limits.select_included(names, [name for name, _ in skipped])
    skipped += [(layer.name, "the task excludes it") for layer in workload.layers if layer.name not in names]
    workload = Workload(workload.name, workload.source, tuple(it for it in workload.layers if it.name in names))

    console = Console()
    table = Table(box=None, pad_edge=False, show_header=bool(workload.layers))
    for heading in ("layer", "shape", "MFLOP"):
        table.add_column(heading, justify="right" if heading == "MFLOP" else "left", overflow="fold")
    for layer in workload.layers:
        table.add_row(layer.name, format_shape(layer.shape), f"{layer.shape.flop / 1e6:.1f}")
    console.print(table)
    for layer_name, reason in skipped:
        console.print(
            f"left out: {layer_name or 'the model'}: {reason}", highlight=False, soft_wrap=True, markup=False
        )
    if not workload.layers:
        raise UsageError(f"{target}: no layer can be timed, so there is no workload")
    if output is None:
        return
    try:
        same = output.exists() and read_workload(output) == workload
    except BadData:
        same = False
    if not same:
        write_workload(workload, output)
    typer.echo(f"{output}: {'up to date' if same else f'{len(workload.layers)} layers'}")


def _zeros(text: str, batch: int | None) -> torch.Tensor:
    import torch

    from latbench.errors import UsageError

    try:
        size = [int(number) for number in text.split("x")]
    except ValueError:
        size = []
    if not size or min(size) < 1:
        raise UsageError(f"--input-shape is numbers joined by x, such as 1x3x224x224, not {text!r}")
    return torch.zeros([batch or size[0], *size[1:]])


def _made_by(target: str) -> torch.nn.Module:
    """The model that `module:factory` or `file.py:factory` returns when called without arguments."""
    import importlib
    import sys

    import torch

    from latbench.errors import UsageError

    place, _, attribute = target.rpartition(":")
    if not place:
        raise UsageError(f"with --input-shape, say what makes the model: module:factory, not {target!r}")
    path = Path(place)
    # As for a script: what lies beside it, or in the current folder, can be imported.
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(path.stem if path.suffix == ".py" else place), attribute)()
    except Exception as error:
        raise UsageError(f"{target}: making the model raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"{target} returned a {type(made).__name__}, not a torch.nn.Module")
    return made
