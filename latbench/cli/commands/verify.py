"""`latbench verify`: time a pruned model whole, and compare it with the promised speedup."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from latbench.cli.json_output import print_json
from latbench.cli.load_warning import note_load
from latbench.cli.options.common_options import Json, ModelGpu, TaskArgument
from latbench.cli.options.pruning_options import RemeasureAll, VerifiedArgument, VerifyBackend, VerifyOutput

if TYPE_CHECKING:
    from search.artifacts.profile import Profile
    from search.pipeline.speedup_verdict import SpeedupVerdict


def verify(
    task: TaskArgument,
    pruned: VerifiedArgument,
    output: VerifyOutput,
    backend: VerifyBackend = None,
    gpu: ModelGpu = None,
    remeasure: RemeasureAll = False,
    as_json: Json = False,
) -> None:
    """Time a pruned or exported model against dense engines, in turns. Exit 1 unless it is as fast as promised."""
    from latbench.base.engine_registry import PRUNED_ENGINES, is_deepsparse
    from latbench.cli.progress_bar import live
    from latbench.errors import PromiseMissed, UsageError
    from search.check_task import check_task
    from search.pipeline import verify as verification
    from search.pipeline.verified_model import read_verified
    from search.task import load_task

    if backend is not None and backend not in PRUNED_ENGINES:
        raise UsageError(f"unknown backend {backend!r}: known are {', '.join(PRUNED_ENGINES)}")

    verified = read_verified(pruned)  # first, so that a folder without such a model is refused before any work
    followed = verified.profile
    with live() as tell:
        tell("reading the task", None, None)
        loaded = load_task(task)
    deployment = verified.choose_deployment(backend, gpu or "", loaded.deploy_dtype)
    with note_load(deployment.threads):
        with live() as tell:
            known = None if remeasure else verification.read_current_verdict(loaded, pruned, output, deployment)
            if known is None:
                tell("checking the task", None, None)
                converted = not (is_deepsparse(deployment.backend) or verified.exported)
                steps = ["copy", "score"] if converted else ["copy"]
                check_task(loaded, steps, threads=deployment.host_threads, by_forward=deployment.on_gpu)
            verdict = known or verification.verify(loaded, pruned, output, deployment=deployment, progress=tell)
        if as_json:
            print_json(asdict(verdict))
        else:
            _print_verdict(verdict, followed, f"{output / 'verify.json'} is {'up to date' if known else 'written'}")
        if not verdict.met:
            raise PromiseMissed(f"{verdict.sentence()}; {verdict.advice}")


def _print_verdict(verdict: SpeedupVerdict, followed: Profile, last_line: str) -> None:
    """Print the time of every engine, the scores, the prediction, the bytes of weights, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    from latbench.backends.cpu.deepsparse_environment import LICENCE
    from latbench.base.engine_registry import is_deepsparse
    from latbench.base.number_format import format_ratio, format_seconds

    table = Table(box=None, pad_edge=False)
    table.add_column("engine")
    for heading in ("time", "speedup"):
        table.add_column(heading, justify="right")
    for name, time in sorted(verdict.engines.items(), key=lambda item: -item[1]["value"]):
        table.add_row(
            name,
            format_seconds(time["value"], time["low"], time["high"]),
            format_ratio(time["speedup"], time["speedup_low"], time["speedup_high"]),
        )
    console = Console()
    console.print(table)
    for name, reason in verdict.left_out.items():
        console.print(f"{name} was left out: {reason}", highlight=False, soft_wrap=True)
    if is_deepsparse(verdict.backend):
        console.print(LICENCE, highlight=False, soft_wrap=True)
    notes = [f"{verdict.score_name}: {verdict.score_dense:.4f} dense, {verdict.score_pruned:.4f} pruned"]
    if verdict.backend == followed.backend:
        predicted = format_seconds(verdict.predicted_seconds, verdict.predicted_low, verdict.predicted_high)
        notes.append(f"the pruned model was predicted to take {predicted}")
    if (over := verdict.over_int8) is not None:
        scored = "" if verdict.score_int8 is None else f", {verdict.score_name} {verdict.score_int8:.4f}"
        notes.append(
            f"the dense model in int8 on OpenVINO takes {format_seconds(over[0])}{scored}; {verdict.beside_int8}"
        )
        notes += [verdict.int8_advice] if verdict.int8_advice else []
    if followed.weights:
        notes.append(followed.weights.sentence())
    console.print(
        "\n" + "\n".join([*notes, f"{verdict.sentence()}; {last_line}"]),
        highlight=False,
        soft_wrap=True,
    )
