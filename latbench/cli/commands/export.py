"""`latbench export`: a pruned model that runs without Python."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import typer

from latbench.cli.options.common_options import Json, TaskArgument
from latbench.cli.options.export_options import ExportBatches, ExportLevels, ExportOutput, ExportTarget, ExportThreads
from latbench.cli.options.pruning_options import PrunedArgument


def export(
    task: TaskArgument,
    pruned: PrunedArgument,
    output: ExportOutput,
    to: ExportTarget = None,
    level: ExportLevels = None,
    batch: ExportBatches = None,
    threads: ExportThreads = None,
    as_json: Json = False,
) -> None:
    """Export a pruned model in the form in which it is deployed: for OpenVINO, or as a library with a C interface."""
    from latbench.base.deployed_forms import OPENVINO, C
    from latbench.cli.json_output import print_json
    from latbench.cli.progress_bar import live
    from search.export.export_model import check_form, export_model
    from search.export.export_steps import ExportRequest
    from search.export.model_to_export import read_pruned_model
    from search.task import load_task

    form = to or (OPENVINO if find_spec("openvino") else C)
    check_form(form)
    request = ExportRequest(level, _read_counts("--batch", batch), _read_counts("--threads", threads))
    with live() as tell:
        read_model = partial(read_pruned_model, load_task(task), pruned)
        manifest = export_model(form, read_model, output, request, lambda step: tell(step, None, None))
    if as_json:
        print_json(manifest)
    else:
        typer.echo(_describe(manifest))
        typer.echo(f"{output} is written; next: python {output / 'example.py'}")


def _read_counts(option: str, texts: list[str] | None) -> list[int] | None:
    """Return the numbers of an option. Raises UsageError for what is no number from 1 on."""
    from latbench.errors import UsageError

    if texts is None:
        return None
    if wrong := [text for text in texts if not (text.isascii() and text.isdigit()) or int(text) < 1]:
        raise UsageError(f"{option} takes whole numbers of at least 1, not {wrong[0]!r}")
    return [int(text) for text in texts]


def _describe(manifest: dict[str, Any]) -> str:
    """Return lines that say what was exported."""
    width = max(map(len, manifest["layers"]))
    lines = [
        f"{name:<{width}}  {facts['pattern']:<14} {facts.get('kernel', '')}".rstrip()
        for name, facts in manifest["layers"].items()
    ]
    counts = ", ".join(map(str, manifest["batches"])), ", ".join(map(str, manifest["threads"]))
    lines.append(f"\nCPU levels {', '.join(manifest['levels'])}; batches {counts[0]}; threads {counts[1]}")
    lines.append(f"results differ from the converted model's by {manifest['error']:.1e} of the largest at most")
    return "\n".join(lines)
