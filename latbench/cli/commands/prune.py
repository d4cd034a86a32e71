"""`latbench prune`: the pruned model that a profile describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latbench.cli.options.common_options import TaskArgument
from latbench.cli.options.option_texts import parse_train_budget
from latbench.cli.options.pruning_options import (
    DatabaseInput,
    JointTuning,
    OnnxFile,
    PackedFile,
    ProfileInput,
    PrunedOutput,
    RecipeName,
    TrainBudget,
    TuningSeed,
)

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.task import Task


def prune(
    task: TaskArgument,
    profile: ProfileInput,
    database: DatabaseInput,
    output: PrunedOutput,
    joint: JointTuning = True,
    recipe: RecipeName = None,
    train_budget: TrainBudget = None,
    seed: TuningSeed = 0,
    packed: PackedFile = False,
    onnx: OnnxFile = None,
) -> None:
    """Prune a task's model to a profile. The folder holds weights with exact zeros, masks, profile and manifest.

    Training that is stopped leaves a hidden checkpoint beside the folder; the same command continues from it.
    """
    from latbench.cli.progress_bar import estimate_left, live
    from search.artifacts.profile import read_profile
    from search.pipeline.prune_to_folder import PruneRequest, prune_to_folder
    from search.pruning.storage import model_folder
    from search.pruning.storage.packed_file import save_packed
    from search.task import load_task

    seconds = parse_train_budget(train_budget, recipe)
    searched = read_profile(profile)
    loaded = load_task(task)
    with live() as tell:
        request = PruneRequest(joint, recipe, seconds, seed)
        fresh = prune_to_folder(loaded, profile, database, output, request, progress=estimate_left(tell))
    last_line = f"{output} is {'written' if fresh else 'up to date'}"
    if packed:
        last_line += f", and {save_packed(output)}"
    notes = [] if onnx is None else _export(loaded, output, onnx)
    if onnx is not None:
        last_line += f", and {onnx}"
    _print_stages(model_folder.read_manifest(output), searched, last_line)
    for note in notes:
        typer.echo(note)


def _export(task: Task, pruned: Path, onnx: Path) -> list[str]:
    """Write the pruned model of a folder as an ONNX file, and return what users of the file need to know."""
    from latbench.cli.progress_bar import live
    from search.pruning.storage.model_folder import load_pruned
    from search.whole_model.flexible_onnx import export_flexible_onnx

    with live() as tell:
        tell("exporting to ONNX", None, None)
        model, _ = load_pruned(pruned, task.model())
        example = task.example()
        reason = export_flexible_onnx(model, example, onnx)
    batch = "batches of any size" if reason is None else f"batches of {example.batch} only, because {reason}"
    return [
        f"{onnx} takes {batch}",
        "ONNX Runtime gains no speed from zeros; `latbench export` writes the pruned model with latbench's kernels",
    ]


def _print_stages(manifest: dict[str, Any], profile: Profile, last_line: str) -> None:
    """Print the scores of the stages, the share of weights kept, and the bytes of all weights if they are bounded."""
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column(manifest["score_name"], justify="right")
    table.add_column("calibration loss", justify="right")
    table.add_column("loss on training batches", justify="right")
    table.add_column("training FLOP", justify="right")
    table.add_column("of dense", justify="right")
    table.add_column("")
    for stage in manifest["stages"]:
        mark = "kept" if stage["name"] == manifest["method"] else ""
        flop = stage.get("training_flop")
        spent = (f"{flop['total']:.3g}", f"{flop['total'] / flop['dense_total']:.3f}") if flop else ("", "")
        fresh = f"{stage['fresh_loss']:.4f}" if "fresh_loss" in stage else ""
        score = "none" if stage["score"] is None else f"{stage['score']:.4f}"
        table.add_row(stage["name"], score, f"{stage['loss']:.4f}", fresh, *spent, mark)
    layers = manifest["layers"].values()
    weights, left = (sum(layer[key] for layer in layers) for key in ("weights", "kept_weights"))
    size = sum(layer["packed_bytes"] for layer in layers)
    left_of_all = ""
    if (asked := profile.weights) is not None:
        left_of_all = f"{replace(asked, packed=asked.dense - 4 * weights + size).sentence()}; "
    console = Console()
    console.print(table)
    if any("training_flop" in stage for stage in manifest["stages"]):
        console.print(
            "FLOP: input gradients through N:M layers count as dense, unless their masks are transposable",
            soft_wrap=True,
        )
    console.print(
        f"\n{left:,} of {weights:,} weights kept in {len(layers)} layers ({1 - left / weights:.1%} pruned), "
        f"{size / 1e6:.1f} MB packed, {4 * weights / 1e6:.1f} MB dense; layers pruned by "
        f"{manifest['one_shot'].partition(' ')[0]}; {left_of_all}{last_line}",
        highlight=False,
        soft_wrap=True,
    )
