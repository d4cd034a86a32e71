"""Verify a promise: time the pruned model and every dense engine end to end on this machine, in turns.

The baseline of the speedup is the fastest dense engine here that rounds no further than the pruned model may. The
scores belong to the dense model and to the converted pruned model, the same one that is timed. The dense model in
eight bits is timed and scored in any case, where OpenVINO and its tool are installed: to say what that would give.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from latbench.backends import installed_engines
from latbench.backends.cpu import deepsparse_environment
from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import DENSE_INT8, MODEL_ENGINES, TORCH, find_narrowest, is_deepsparse, list_rivals
from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.machines.devices import describe_cpu_environment, name_cpu, read_cpu_times, read_telemetry
from latbench.machines.processors import check_threads
from latbench.runners.worker_process import TaskFailed, WorkerDied
from latbench.tables.table import has_rows, read_table
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.timing.sampling import estimate_burst_error
from search.artifacts.profile import Profile
from search.deployment import Deployment
from search.loss.cache import hash_score_code
from search.pipeline.speedup_verdict import (
    ENGINE_COLUMNS,
    INCONCLUSIVE,
    VERSION,
    SpeedupVerdict,
    judge_speedup,
    read_verdict,
)
from search.pipeline.verified_model import VerifiedModel, read_verified
from search.progress import Progress
from search.task import Task
from search.whole_model.confidence import VERDICT_COVERAGE
from search.whole_model.end_to_end import EngineBuilder, ModelTimer, RoundSchedule, lock_cpu
from search.whole_model.overhead import build_dense_engines, build_informative_engine, describe_conditions
from search.whole_model.sessions import OptionsByLayer, Session, name_profile, read_sessions, write_sessions
from search.whole_model.timings import Timings

_LOG = logging.getLogger(__name__)

PRUNED = "pruned"
"""Name of the pruned model among the engines."""

SESSION = "session.json"
"""Name of the file from which a search can go on."""

VERIFY_SCHEDULE = RoundSchedule(builds=6)
"""More builds than a plain timing needs are taken while the target lies within the interval."""

SCORE_SECONDS = 3600.0
"""Time limit for scoring both models."""


def verify(
    task: Task,
    folder: Path,
    output: Path,
    *,
    backend: str | None = None,
    timer: ModelTimer | None = None,
    progress: Progress = lambda what, done, total: None,
) -> SpeedupVerdict:
    """Time and score a pruned model; write verify.json, rows of purpose "verify", and a session for later searches.

    Parameters
    ----------
    task
        The task of the model.
    folder
        The folder that `latbench prune` or `latbench export` wrote.
    output
        Folder for verify.json, the rows and session.json. On deepsparse, pruned.onnx is left there, too.
    backend
        The backend of the pruned model; None for the one that it was searched for.
    timer
        Times whole models. Default: one of this verification.
    progress
        Called with the current step.

    Raises
    ------
    BadData
        The folder has no pruned model of this task, or `output` is damaged.
    UsageError
        The task fails or cannot call the exported model. Or the profile has more threads than there are processors.
    EnvironmentUnusable
        The backend is not available.
    """
    verified = read_verified(folder)
    verified.check_task(task)
    profile, deployment = verified.profile, verified.choose_deployment(backend)
    check_threads(
        profile.threads, f"{folder} was searched for {profile.threads} threads", "search again with fewer --threads"
    )
    if is_deepsparse(deployment.backend):
        deepsparse_environment.find_environment()
    newest = _find_newest_starts(output)
    with contextlib.ExitStack() as stack:
        timer = timer or stack.enter_context(ModelTimer(profile.threads))
        # An exported model first, because a score may call it with sizes that it does not take.
        scores = _score_models(task, folder, deployment, timer, progress) if verified.exported else None
        timings, state = _time_pruned(task, verified, output / "pruned.onnx", deployment, timer, progress)
        scores = scores or _score_models(task, folder, deployment, timer, progress)
        in_bytes = _score_int8(task, deployment, timer) if DENSE_INT8 in timings.blocks else None
    verdict = build_verdict(task, profile, deployment.backend, timings, scores, verified.pruned)
    verdict = replace(verdict, score_int8=in_bytes, form=verified.form, exported=verified.exported)
    _write_rows(output, [{**row, **state} for row in build_rows(verdict, profile, timings)], profile.threads, newest)
    key = describe_conditions(task, profile.model_hash, deployment)
    rivals = list_rivals(deployment.backend, deployment.precisions)
    write_sessions([build_session(timings, profile.options, rivals)], key, output / SESSION)
    content = {"version": VERSION, **asdict(verdict)}
    write_text_atomically(output / "verify.json", json.dumps(content, indent=2) + "\n")
    return verdict


def _write_rows(output: Path, rows: list[dict[str, Any]], threads: int, newest: dict[str, datetime]) -> None:
    """Write the rows with their environment to the table in `output`."""
    environment = describe_cpu_environment(threads)
    identity = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "block": 0}
    write_environment(output, environment)
    write_part(output, date_after(newest, [{**row, **identity} for row in rows]))


def _find_newest_starts(output: Path) -> dict[str, datetime]:
    """Return the newest start of each point in the table in `output`."""
    if not has_rows(output):
        return {}
    earlier = read_table(output, ["point_id", "started_at"])
    return find_newest_starts(earlier, set(earlier["point_id"]))


def _time_pruned(
    task: Task, verified: VerifiedModel, onnx: Path, deployment: Deployment, timer: ModelTimer, progress: Progress,
) -> tuple[Timings, dict[str, Any]]:  # fmt: skip
    """Time the pruned model beside the dense engines; return the timings, and the columns of the machine's state.

    The timing goes on while the target lies within the interval of the speedup.
    """
    engines = build_dense_engines(task, deployment) | build_informative_engine(task, deployment)
    folder, profile = str(verified.folder.resolve()), verified.profile
    engines[PRUNED] = EngineBuilder(
        PRUNED, "search.whole_model.model_engines:build_folder_pruned",
        (task.reference, deployment.threads, deployment.backend, folder, str(onnx.resolve())),
    )  # fmt: skip
    if verified.exported:
        function = "search.export.deployed_engine:build_exported"
        engines[PRUNED] = EngineBuilder(PRUNED, function, (folder, deployment.threads))
    with lock_cpu(progress):
        before, started = read_cpu_times(), datetime.now(UTC)
        known = {profile.dense_engine: profile.dense_seconds} if profile.device == name_cpu() else {}
        timings = timer.time(
            engines, required=[TORCH, PRUNED], schedule=VERIFY_SCHEDULE, known=known,
            is_enough=lambda timings: _judge(timings, profile, deployment.backend) != INCONCLUSIVE, progress=progress,
        )  # fmt: skip
    return timings, {"started_at": started, **read_telemetry(before)}


def _judge(timings: Timings, profile: Profile, backend: str) -> str:
    dense = _find_fastest_dense(timings, profile, backend)
    return judge_speedup(timings.speedup(PRUNED, dense, VERDICT_COVERAGE), profile.target)


def _find_fastest_dense(timings: Timings, profile: Profile, backend: str) -> str:
    return timings.fastest(list_rivals(backend, profile.deployment.precisions))


def _score_models(
    task: Task, folder: Path, deployment: Deployment, timer: ModelTimer, progress: Progress
) -> tuple[float, float]:
    """Return the scores of the dense and the pruned model, computed in another process."""
    progress("scoring", None, None)
    where = str(folder.resolve())
    if deployment.form == PYTHON:
        function, arguments = "search.whole_model.model_engines:score_models", [deployment.backend, where]
    else:
        function, arguments = "search.export.deployed_engine:score_exported", [where]
    given = task.reference, deployment.threads, *arguments
    try:
        dense, pruned = timer.call(TORCH, function, *given, timeout=SCORE_SECONDS)
    except TaskFailed as error:
        raise BadData(f"the pruned model in {folder} cannot be scored: {error}") from error
    return dense, pruned


def _score_int8(task: Task, deployment: Deployment, timer: ModelTimer) -> float | None:
    """Return the score of the dense model in eight bits; None, with a line in the log, where it has none."""
    try:
        score: float = timer.call(
            DENSE_INT8, "search.whole_model.int8_engines:score_dense_int8",
            task.reference, deployment.threads, timeout=SCORE_SECONDS,
        )  # fmt: skip
    except (TaskFailed, WorkerDied) as error:
        _LOG.info(f"the dense model in int8 was not scored: {error}")
        return None
    return score


def read_current_verdict(task: Task, folder: Path, output: Path, backend: str) -> SpeedupVerdict | None:
    """Return the verdict in `output` if it belongs to this model, this machine and these engines, and was met.

    A promise that was missed is verified again, because the machine may have been busy. Raises BadData as `verify`
    does.
    """
    verified = read_verified(folder)
    verified.check_task(task)
    known = read_verdict(output / "verify.json")
    wanted = verified.pruned, verified.exported, backend, hash_score_code(task)
    if known is None or not known.met or (known.inputs, known.exported, known.backend, known.code) != wanted:
        return None
    key = describe_conditions(task, verified.profile.model_hash, verified.choose_deployment(backend))
    return known if read_sessions(output / SESSION, key) else None


def build_verdict(
    task: Task, profile: Profile, backend: str, timings: Timings, scores: tuple[float, float], inputs: str
) -> SpeedupVerdict:
    """Return the verdict.

    Parameters
    ----------
    task, profile, backend
        What was verified.
    timings
        Samples of the dense engines and of PRUNED.
    scores
        Scores of the dense and of the pruned model.
    inputs
        Hash of the pruned model's manifest.
    """
    dense = _find_fastest_dense(timings, profile, backend)
    slowdown = None
    if profile.dense_engine in timings.blocks:
        slowdown = timings.seconds(profile.dense_engine, VERDICT_COVERAGE).value / profile.dense_seconds
    seconds, speedup = timings.seconds(PRUNED, VERDICT_COVERAGE), timings.speedup(PRUNED, dense, VERDICT_COVERAGE)
    return SpeedupVerdict(
        task=task.name,
        backend=backend,
        target=profile.target,
        outcome=judge_speedup(speedup, profile.target),
        predicted_seconds=profile.predicted_seconds,
        predicted_low=profile.predicted_low,
        predicted_high=profile.predicted_high,
        measured_seconds=seconds.value,
        measured_low=seconds.low,
        measured_high=seconds.high,
        measured_speedup=speedup.value,
        measured_speedup_low=speedup.low,
        measured_speedup_high=speedup.high,
        dense_engine=dense,
        dense_seconds=timings.seconds(dense, VERDICT_COVERAGE).value,
        engines={name: _build_engine_columns(timings, name, dense) for name in timings.blocks},
        left_out=dict(timings.left_out),
        slowdown=slowdown,
        score_name=task.score_name,
        score_dense=scores[0],
        score_pruned=scores[1],
        device=name_cpu(),
        threads=profile.threads,
        batch=profile.batch,
        inputs=inputs,
        code=hash_score_code(task),
        precision=find_narrowest(choice.precision for choice in profile.layers.values()),
    )


def _build_engine_columns(timings: Timings, name: str, dense: str) -> dict[str, float]:
    """Return the columns of ENGINE_COLUMNS of an engine."""
    seconds, speedup = timings.seconds(name, VERDICT_COVERAGE), timings.speedup(name, dense, VERDICT_COVERAGE)
    return dict(zip(ENGINE_COLUMNS, [*asdict(seconds).values(), *asdict(speedup).values()], strict=True))


def build_session(timings: Timings, options: OptionsByLayer, rivals: Collection[str]) -> Session:
    """Return the timings with the name that a search gives to the pruned model, by its options.

    `rivals` are the dense engines that a search compares with.
    """
    name = name_profile(options)
    blocks = {engine: blocks for engine, blocks in timings.blocks.items() if engine in rivals}
    return Session({name: options}, replace(timings, blocks={**blocks, name: timings.blocks[PRUNED]}))


def build_rows(verdict: SpeedupVerdict, profile: Profile, timings: Timings) -> list[dict[str, Any]]:
    """Return a table row for every engine: op "model", purpose "verify".

    The type of the pruned model is the least precise one that a layer has.
    """
    found = []
    for seq, (name, blocks) in enumerate(timings.blocks.items()):
        engine = MODEL_ENGINES[verdict.backend if name == PRUNED else name]
        precision = verdict.precision if name == PRUNED else engine.precision
        kernel = verdict.form if name == PRUNED and verdict.form != PYTHON else engine.kernel
        found.append({
            "purpose": "verify", "op": "model", "model": verdict.task, "device": verdict.device, "seq": seq,
            "backend": engine.backend, "backend_version": _version(engine.backend), "kernel_requested": kernel,
            "kernel_used": name, "pattern": "profile" if name == PRUNED else "dense",
            "batch": verdict.batch, "dtype_w": precision, "dtype_a": precision,
            "dtype_out": engine.output_precision,
            "context": "network", "cache_mode": "warm", "launch_mode": "call", "threads": verdict.threads,
            "timer": "perf_counter", "pinning": "none", "status": "ok", "stop_reason": "budget",
            "samples_seconds": [sample for block in blocks for sample in block],
            "burst_error": estimate_burst_error(blocks),
        })  # fmt: skip
    return found


def _version(backend: str) -> str | None:
    return (
        deepsparse_environment.VERSION if is_deepsparse(backend) else installed_engines.find_engine_version(backend)
    )
