"""`latbench trace`: the layer shapes of a torch model as a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from latbench.cli.options.sweep_options import Batch, InputShapes, TraceTarget, WorkloadOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from latbench.cli.options.option_texts import ModelInput
    from latbench.workloads.workload import Workload
    from search.example_inputs import ExampleInputs
    from search.problem.limits import Limits


def trace(
    target: TraceTarget,
    input_shape: InputShapes = None,
    batch: Batch = None,
    output: WorkloadOutput = None,
) -> None:
    """List the shapes of a model's linear layers and 2-d convolutions, and why other layers are left out."""
    from latbench.errors import UsageError

    traced = _load_task(target, batch) if not input_shape else _load_model(target, input_shape, batch)
    workload, left_out = _trace_layers(traced, target)
    _print_layers(workload, left_out)
    if not workload.layers:
        raise UsageError(f"{target}: no layer can be timed, so there is no workload")
    if output is not None:
        _save(workload, output)


class _TracedModel(NamedTuple):
    """A model to trace with its name, its inputs, and the limits of its task if it has one."""

    name: str
    model: torch.nn.Module
    example: ExampleInputs
    limits: Limits | None = None


def _load_task(target: str, batch: int | None) -> _TracedModel:
    """Load the model and example inputs of a task."""
    from latbench.errors import UsageError
    from search.check_task import check_task
    from search.task import load_task

    if batch is not None:
        raise UsageError("--batch goes with --input-shape, because a task fixes its own batch")
    task = load_task(target)
    facts = check_task(task, ["example"])
    return _TracedModel(task.name, task.model(), facts.example, task.limits)


def _load_model(target: str, input_shapes: Sequence[str], batch: int | None) -> _TracedModel:
    """Load the model that `module:factory` returns, with inputs of these shapes."""
    from latbench.cli.options.option_texts import parse_model_inputs
    from search.example_inputs import ExampleInputs
    from search.model_weights import remove_compilation

    inputs = parse_model_inputs("--input-shape", input_shapes)
    model = remove_compilation(_call_factory(target))
    tensors = [(given.name, _build_tensor(given, batch)) for given in inputs]
    positional = tuple(tensor for name, tensor in tensors if name is None)
    keywords = {name: tensor for name, tensor in tensors if name is not None}
    return _TracedModel(target.rpartition(":")[2], model, ExampleInputs(positional, keywords))


def _build_tensor(given: ModelInput, batch: int | None) -> torch.Tensor:
    """Return random integers below the input's bound; without one, zeros for floats and ones for other types."""
    import torch

    sizes, dtype = [batch or given.sizes[0], *given.sizes[1:]], getattr(torch, given.dtype)
    if given.bound is not None:
        return torch.randint(given.bound, sizes, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return torch.full(sizes, 0 if dtype.is_floating_point else 1, dtype=dtype)


def _trace_layers(traced: _TracedModel, target: str) -> tuple[Workload, list[tuple[str, str]]]:
    """Return the layers as a workload, and those left out with the reason."""
    from latbench.workloads.workload import Workload, trace_model
    from search.user_code import call_user_code

    example = traced.example
    workload, left_out = call_user_code(
        f"{target}: running the model",
        lambda: trace_model(traced.model, example.arguments, traced.name, keywords=example.keywords),
    )
    names = [layer.name for layer in workload.layers]
    if traced.limits is not None:
        names = traced.limits.select_included(names, [name for name, _ in left_out])
    left_out += [(layer.name, "the task excludes it") for layer in workload.layers if layer.name not in names]
    layers = tuple(layer for layer in workload.layers if layer.name in names)
    return Workload(workload.name, workload.source, layers), left_out


def _print_layers(workload: Workload, left_out: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from latbench.workloads.points import format_shape

    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "", "shape, or why it is left out", "MFLOP"):
        table.add_column(heading, justify="right" if heading == "MFLOP" else "left", overflow="fold")
    for layer in workload.layers:
        table.add_row(escape(layer.name), "taken", format_shape(layer.shape), f"{layer.shape.flop / 1e6:.1f}")
    for name, reason in left_out:
        table.add_row(escape(name or "the model"), "left out", escape(reason), "")
    Console().print(table)


def _save(workload: Workload, path: Path) -> None:
    """Write the workload file unless it holds this very workload."""
    from latbench.errors import BadData
    from latbench.workloads.workload import read_workload, write_workload

    try:
        same = path.exists() and read_workload(path) == workload
    except BadData:
        same = False
    if not same:
        write_workload(workload, path)
    typer.echo(f"{path}: {'up to date' if same else f'{len(workload.layers)} layers'}")


def _call_factory(target: str) -> torch.nn.Module:
    """Return the model that `module:factory` or `file.py:factory` returns when called without arguments."""
    import importlib
    import sys

    import torch

    from latbench.errors import UsageError
    from search.user_code import describe_error

    place, _, attribute = target.rpartition(":")
    if not place:
        raise UsageError(
            f"with --input-shape, TARGET is the function that makes the model, module:factory, not {target!r}"
        )
    path = Path(place)
    # As for a script, files beside it or in the current folder can be imported.
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(path.stem if path.suffix == ".py" else place), attribute)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target}: making the model raised {describe_error(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"{target} returned a {type(made).__name__}, not a torch.nn.Module")
    return made
