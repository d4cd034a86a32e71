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
from latbench.base.engine_registry import (
    CPU_ENGINES,
    DENSE_INT8,
    GPU_ENGINES,
    MODEL_ENGINES,
    find_narrowest,
    find_plain_torch,
    is_deepsparse,
)
from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.machines.devices import find_version, read_cpu_times
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
from search.whole_model.end_to_end import ModelTimer, RoundSchedule
from search.whole_model.engine_builders import (
    build_dense_engines,
    build_folder_engine,
    build_informative_engine,
    name_score_call,
)
from search.whole_model.overhead import describe_conditions
from search.whole_model.sessions import OptionsByLayer, Session, name_profile, read_sessions, write_sessions
from search.whole_model.timed_device import build_model_timer, find_timed_device
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
    deployment: Deployment | None = None,
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
    deployment
        How the pruned model runs (`VerifiedModel.choose_deployment`); None for how it was searched.
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
    profile, deployment = verified.profile, deployment or verified.choose_deployment()
    wanted = f"{folder} was searched for {profile.threads} threads"
    check_threads(deployment.threads, wanted, "search again with fewer --threads")
    if is_deepsparse(deployment.backend):
        deepsparse_environment.find_environment()
    newest = _find_newest_starts(output)
    with contextlib.ExitStack() as stack:
        timer = timer or stack.enter_context(build_model_timer(deployment))
        # Before the timing, where a score may call the model with sizes that it does not take, or timing takes long.
        early = verified.exported or deployment.on_gpu
        scores = _score_models(task, folder, deployment, timer, progress) if early else None
        timings, state = _time_pruned(task, verified, output / "pruned.onnx", deployment, timer, progress)
        scores = scores or _score_models(task, folder, deployment, timer, progress)
        in_bytes = _score_int8(task, deployment, timer) if DENSE_INT8 in timings.blocks else None
    verdict = build_verdict(task, profile, deployment, timings, scores, verified.pruned)
    verdict = replace(verdict, score_int8=in_bytes, form=verified.form, exported=verified.exported)
    _write_rows(output, [{**row, **state} for row in build_rows(verdict, timings)], deployment, newest)
    _write_session(task, profile, deployment, timings, output / SESSION)
    text = json.dumps({"version": VERSION, **asdict(verdict)}, indent=2)
    write_text_atomically(output / "verify.json", f"{text}\n")
    return verdict


def _write_session(task: Task, profile: Profile, deployment: Deployment, timings: Timings, path: Path) -> None:
    """Write the timings for later searches under the same conditions."""
    key = describe_conditions(task, task.model(), profile.model_hash, deployment)
    write_sessions([build_session(timings, profile.options, deployment.rivals)], key, path)


def _write_rows(
    output: Path, rows: list[dict[str, Any]], deployment: Deployment, newest: dict[str, datetime]
) -> None:
    """Write the rows with their environment to the table in `output`."""
    environment = find_timed_device(deployment).describe_environment(deployment.threads)
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
    engines[PRUNED] = build_folder_engine(task, deployment, verified.folder, onnx)
    profile, device = verified.profile, find_timed_device(deployment)
    with device.lock(progress):
        before, started = read_cpu_times(), datetime.now(UTC)
        known = {profile.dense_engine: profile.dense_seconds} if profile.device == device.name else {}
        required = [find_plain_torch(deployment.backend), PRUNED]
        if deployment.on_gpu:  # memory may run out there, and a promise over a slower engine is another one
            required += known.keys() & engines.keys()
        timings = timer.time(
            engines, required=required, schedule=VERIFY_SCHEDULE, known=known,
            is_enough=lambda timings: _judge(timings, profile.target, deployment) != INCONCLUSIVE, progress=progress,
        )  # fmt: skip
    return timings, {"started_at": started, **device.read_state(before)}


def _judge(timings: Timings, target: float, deployment: Deployment) -> str:
    dense = _find_fastest_dense(timings, deployment)
    return judge_speedup(timings.speedup(PRUNED, dense, VERDICT_COVERAGE), target)


def _find_fastest_dense(timings: Timings, deployment: Deployment) -> str:
    return timings.fastest(deployment.rivals)


def _score_models(
    task: Task, folder: Path, deployment: Deployment, timer: ModelTimer, progress: Progress
) -> tuple[float, float]:
    """Return the scores of the dense and the pruned model, computed in another process."""
    progress("scoring", None, None)
    function, arguments = name_score_call(task, deployment, folder)
    try:
        plain = find_plain_torch(deployment.backend)
        dense, pruned = timer.call(plain, function, *arguments, timeout=SCORE_SECONDS)
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


def read_current_verdict(
    task: Task, folder: Path, output: Path, deployment: Deployment | None = None
) -> SpeedupVerdict | None:
    """Return the verdict in `output` if it belongs to this model, this device and these engines, and was met.

    A promise that was missed is verified again, because the machine may have been busy. Raises BadData as `verify`
    does.
    """
    verified = read_verified(folder)
    verified.check_task(task)
    deployment = deployment or verified.choose_deployment()
    known = read_verdict(output / "verify.json")
    wanted = verified.pruned, verified.exported, deployment.backend, hash_score_code(task)
    if known is None or not known.met or (known.inputs, known.exported, known.backend, known.code) != wanted:
        return None
    key = describe_conditions(task, task.model(), verified.profile.model_hash, deployment)
    return known if read_sessions(output / SESSION, key) else None


def build_verdict(
    task: Task, profile: Profile, deployment: Deployment, timings: Timings, scores: tuple[float, float], inputs: str
) -> SpeedupVerdict:
    """Return the verdict.

    Parameters
    ----------
    task, profile, deployment
        What was verified.
    timings
        Samples of the dense engines and of PRUNED.
    scores
        Scores of the dense and of the pruned model.
    inputs
        Hash of the pruned model's manifest.
    """
    dense = _find_fastest_dense(timings, deployment)
    slowdown = None
    if profile.dense_engine in timings.blocks:
        slowdown = timings.seconds(profile.dense_engine, VERDICT_COVERAGE).value / profile.dense_seconds
    seconds, speedup = timings.seconds(PRUNED, VERDICT_COVERAGE), timings.speedup(PRUNED, dense, VERDICT_COVERAGE)
    return SpeedupVerdict(
        task=task.name,
        backend=deployment.backend,
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
        device=find_timed_device(deployment).name,
        threads=deployment.threads,
        batch=profile.batch,
        over=deployment.over,
        inputs=inputs,
        code=hash_score_code(task),
        precision=_find_precision(profile, deployment),
    )


def _find_precision(profile: Profile, deployment: Deployment) -> str:
    """Return the least precise type in which a layer of the pruned model is multiplied."""
    if deployment.on_gpu:
        return deployment.model_type
    return find_narrowest(choice.precision for choice in profile.layers.values())


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


def build_rows(verdict: SpeedupVerdict, timings: Timings) -> list[dict[str, Any]]:
    """Return a table row for every engine: op "model", purpose "verify".

    The type of the pruned model is the least precise one that a layer has.
    """
    found = []
    for seq, (name, blocks) in enumerate(timings.blocks.items()):
        engine = MODEL_ENGINES[verdict.backend if name == PRUNED else name]
        # Without a type of its own, an engine has that of the whole model.
        precision = verdict.precision if name == PRUNED else engine.precision or verdict.precision
        kernel = verdict.form if name == PRUNED and verdict.form != PYTHON else engine.kernel
        found.append({
            "purpose": "verify", "op": "model", "model": verdict.task, "device": verdict.device, "seq": seq,
            "backend": engine.backend, "backend_version": _version(engine.backend), "kernel_requested": kernel,
            "kernel_used": name, "pattern": "profile" if name == PRUNED else "dense",
            "batch": verdict.batch, "dtype_w": precision, "dtype_a": precision,
            "dtype_out": engine.output_precision or precision,
            "context": "network", "cache_mode": "warm", "launch_mode": "graph" if engine.on_gpu else "call",
            "threads": verdict.threads, "timer": "cuda_event" if engine.on_gpu else "perf_counter",
            "pinning": "none", "status": "ok", "stop_reason": "budget",
            "samples_seconds": [sample for block in blocks for sample in block],
            "burst_error": estimate_burst_error(blocks),
        })  # fmt: skip
    return found


def _version(backend: str) -> str | None:
    if is_deepsparse(backend):
        return deepsparse_environment.VERSION
    if backend in CPU_ENGINES or backend in GPU_ENGINES:
        return installed_engines.find_engine_version(backend)
    return find_version(backend)
