"""`latbench verify`: whether a pruned model keeps its promise on this machine, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.verify import SpeedupVerdict


def verify(
    task: Annotated[str, typer.Argument(help="A bundled task, a Python file, or package.module:task.")],
    pruned: Annotated[Path, typer.Argument(help="The folder that latbench prune wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for verify.json and the rows measured.")],
    backend: Annotated[
        str | None,
        typer.Option(help="What runs the pruned model: numba, numba-bf16 or deepsparse; default as it was searched."),
    ] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again what was found before.")] = False,
) -> None:
    """Time the pruned model against every dense engine, in turns; exit 1 if it is slower than promised."""
    from latbench.cli.commands.progress import live
    from latbench.errors import PromiseMissed, UsageError
    from search.artifacts.profile import read_profile
    from search.pipeline import verify as verification
    from search.task import load_task
    from search.whole_model.model_engines import BACKENDS

    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}: known are {', '.join(BACKENDS)}")

    verification.hash_manifest(pruned)  # a folder that holds no pruned model is said first
    followed = read_profile(pruned / "profile.json")
    backend = backend or followed.backend
    with live() as tell:
        tell("reading the task", None, None)
        loaded = load_task(task)
        known = None if remeasure else verification.read_current_verdict(loaded, pruned, output, backend)
        verdict = known or verification.verify(loaded, pruned, output, backend=backend, progress=tell)
    _show(verdict, followed, f"{output / 'verify.json'} is {'up to date' if known else 'written'}")
    if not verdict.met:
        raise PromiseMissed(verdict.sentence())


def _show(verdict: SpeedupVerdict, followed: Profile, last_line: str) -> None:
    """Every engine's time, the scores, what was predicted and what the weights take, if anything, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from latbench.backends.deepsparse_environment import LICENCE
    from latbench.base.number_format import format_ratio, format_seconds

    table = Table(box=None, pad_edge=False)
    table.add_column("engine")
    for heading in ("time", "speedup"):
        table.add_column(heading, justify="right")
    for name, time in sorted(verdict.engines.items(), key=lambda item: -item[1]["value"]):
        table.add_row(
            name,
            format_seconds(time["value"], time["low"], time["high"]),
            format_ratio(verdict.dense_seconds / time["value"]),
        )
    console = Console()
    console.print(table)
    for name, reason in verdict.left_out.items():
        console.print(f"{name} was left out: {reason}", highlight=False, soft_wrap=True)
    if verdict.backend == "deepsparse":
        console.print(LICENCE, highlight=False, soft_wrap=True)
    notes = [f"{verdict.score_name}: {verdict.score_dense:.4f} dense, {verdict.score_pruned:.4f} pruned"]
    if verdict.backend == followed.backend:
        predicted = format_seconds(verdict.predicted_seconds, verdict.predicted_low, verdict.predicted_high)
        notes.append(f"the pruned model was predicted to take {predicted}")
    if followed.weights:
        notes.append(followed.weights.sentence())
    console.print(
        "\n" + "\n".join([*notes, f"{verdict.sentence()}; {last_line}"]),
        highlight=False,
        soft_wrap=True,
    )
