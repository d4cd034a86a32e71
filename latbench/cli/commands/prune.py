"""`latbench prune`: the model that a profile describes, with weights that make up for what was dropped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latbench import MOST_SEED

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.task import Task


def prune(
    task: Annotated[str, typer.Argument(help="A bundled task, a Python file, or package.module:task.")],
    profile: Annotated[Path, typer.Option(help="The profile that latbench search wrote.")],
    database: Annotated[Path, typer.Option(help="The layer database that latbench search filled.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    joint: Annotated[
        bool,
        typer.Option(
            "--global/--no-global",
            help="Tune all pruned layers together on calibration data; takes the dense model and three numbers a "
            "kept weight in memory.",
        ),
    ] = True,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Also train: a YAML file, or a method such as gmp or mask_decay; the better model is kept."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_SEED, help="Of tuning; a recipe has its own. The same seeds give the same model."
        ),
    ] = 0,
    packed: Annotated[
        bool, typer.Option("--packed", help="Also write packed.safetensors: bits of the masks, and what is kept.")
    ] = False,
    onnx: Annotated[
        Path | None, typer.Option(help="Also write the pruned model here, for onnxruntime and DeepSparse.")
    ] = None,
) -> None:
    """Prune a task's model to a profile; the folder holds weights with exact zeros, masks, profile and manifest.

    Training that is stopped leaves a hidden checkpoint beside the folder, and the same command goes on from it.
    """
    import hashlib
    import json

    from rich.console import Console
    from rich.progress import Progress

    from latbench.base.files import hash_file, is_left_behind
    from search.artifacts.layer_database import Database
    from search.artifacts.profile import read_profile
    from search.pruning import pipeline
    from search.pruning.storage import model_folder as folder
    from search.pruning.storage.packed_file import write_packed
    from search.pruning.training import recipe as recipes
    from search.pruning.training.checkpoint import Checkpoint
    from search.task import load_task

    searched = read_profile(profile)
    loaded = load_task(task)
    training = None if recipe is None else recipes.load(recipe)
    layers = Database(database, searched.model_hash)
    settings = {
        "task_reference": loaded.reference,
        "task_source": loaded.source,
        "profile_sha256": hash_file(profile),
        "model_hash": searched.model_hash,
        "one_shot": layers.provenance,
        "global": joint,
        "recipe": None if training is None else training.facts(),
        "seed": seed,
        "pipeline_version": pipeline.VERSION,
    }
    inputs = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    last_line = f"{output} is up to date"
    if not folder.unchanged(output, inputs):
        folder.check_writable(output)
        checkpoint = Checkpoint(output.parent / f".{output.name}.{inputs}.training")
        with Progress(console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task("reading the model and its data", total=None)
            result = pipeline.prune(
                loaded, searched, layers, seed=seed, joint=joint, recipe=training, checkpoint=checkpoint,
                progress=lambda name, done, total: bars.update(bar, description=name, completed=done, total=total),
            )  # fmt: skip
        facts = {
            "task": loaded.name,
            "score_name": loaded.score_name,
            "score_dense": result.stages[0].score,
            "score_pruned": result.kept.score,
            "method": result.kept.name,
            "stages": [
                {"name": stage.name, "score": stage.score, "loss": stage.loss}
                | ({"training_flop": dict(stage.training_flop)} if stage.training_flop else {})
                for stage in result.stages
            ],
            **settings,
            "inputs": inputs,
        }
        folder.save_pruned(output, result.model, result.masks, searched, facts)
        for left in folder.beside(output, r"[0-9a-f]{16}\.training(\.\d+\.\w+\.tmp)?"):  # of earlier recipes, too
            if left.suffix != ".tmp" or is_left_behind(left):
                left.unlink(missing_ok=True)
        last_line = f"{output} is written"
        del result
    if packed:
        last_line += f", and {write_packed(output)}"
    if onnx is not None:
        _export(loaded, output, onnx)
        last_line += f", and {onnx}"
    _show(folder.read_manifest(output), searched, last_line)


def _export(task: Task, pruned: Path, onnx: Path) -> None:
    """The pruned model in that folder as an ONNX file, for the task's example inputs."""
    from search.artifacts.onnx_export import export_onnx
    from search.pruning.storage.model_folder import load_pruned

    model, _ = load_pruned(pruned, task.model())
    export_onnx(model, task.example(), onnx)


def _show(manifest: dict[str, Any], profile: Profile, last_line: str) -> None:
    """The stages' scores, how much of the searched layers is left, and of all weights where they have a budget."""
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column(manifest["score_name"], justify="right")
    table.add_column("calibration loss", justify="right")
    table.add_column("training FLOP", justify="right")
    table.add_column("of dense", justify="right")
    table.add_column("")
    for stage in manifest["stages"]:
        mark = "kept" if stage["name"] == manifest["method"] else ""
        flop = stage.get("training_flop")
        spent = (f"{flop['total']:.3g}", f"{flop['total'] / flop['dense_total']:.3f}") if flop else ("", "")
        table.add_row(stage["name"], f"{stage['score']:.4f}", f"{stage['loss']:.4f}", *spent, mark)
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
