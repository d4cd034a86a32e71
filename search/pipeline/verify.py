"""Verify a promise: time the pruned model and every dense engine end to end on this machine, in turns.

The baseline of the speedup is the dense engine that is the fastest here. The scores belong to the dense model and to
the converted pruned model, the same one that is timed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from latbench.backends import installed_engines
from latbench.backends.cpu import deepsparse_environment
from latbench.base.engine_registry import MODEL_ENGINES, TORCH, is_deepsparse
from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.machines.devices import describe_cpu_environment, name_cpu, read_cpu_times, read_telemetry
from latbench.machines.processors import check_threads
from latbench.runners.worker_process import TaskFailed, Worker
from latbench.tables.table import has_rows, read_table
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.timing.sampling import estimate_burst_error
from search.artifacts.profile import Profile, read_profile
from search.deployment import Deployment
from search.loss.cache import hash_score_code
from search.progress import Progress
from search.pruning.storage.model_folder import read_manifest
from search.task import Task
from search.whole_model.end_to_end import EngineBuilder, lock_cpu, time_engines
from search.whole_model.overhead import build_dense_engines, describe_conditions
from search.whole_model.sessions import OptionsByLayer, Session, name_profile, read_sessions, write_sessions
from search.whole_model.timings import Timings

PRUNED = "pruned"
"""Name of the pruned model among the engines."""

SESSION = "session.json"
"""Name of the file from which a search can go on."""

VERSION = 1
COVERAGE = 0.95

SCORE_SECONDS = 3600.0
"""Time limit for scoring both models."""

BUSY = 1.1
"""A sentence mentions that the dense engine took this many times as long as in the search, or more."""


@dataclass(frozen=True)
class SpeedupVerdict:
    """The content of verify.json: the promise, the measurement, and whether the promise is met.

    Seconds are medians of calls of the whole model. Names that end in _low and _high are the ends of 95% intervals.

    Attributes
    ----------
    task
        Name of the task.
    backend
        The backend that ran the pruned model.
    target, met
        The promised speedup, and whether it was measured.
    predicted_seconds
        The profile's prediction, for the backend of its search.
    measured_seconds, measured_speedup
        The pruned model's measured seconds, and its speedup over the fastest dense engine.
    dense_engine, dense_seconds
        The fastest dense engine, and its seconds.
    engines
        Every engine that ran -> the median and interval of its seconds.
    left_out
        Engine that did not run -> the reason.
    slowdown
        Seconds of the profile's dense engine, divided by its seconds in the search: far from 1 on another machine or
        a busy one. None if that engine did not run.
    score_name, score_dense, score_pruned
        The task's score of both models.
    device, threads, batch
        Name of the CPU, threads, and size of the batch.
    inputs
        Hash of the pruned model's manifest.
    code
        Hash of the files that define the task.
    """

    task: str
    backend: str
    target: float
    met: bool
    predicted_seconds: float
    predicted_low: float
    predicted_high: float
    measured_seconds: float
    measured_low: float
    measured_high: float
    measured_speedup: float
    measured_speedup_low: float
    measured_speedup_high: float
    dense_engine: str
    dense_seconds: float
    engines: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str]
    slowdown: float | None
    score_name: str
    score_dense: float
    score_pruned: float
    device: str
    threads: int
    batch: int
    inputs: str
    code: str

    def sentence(self) -> str:
        """Return the verdict in one line."""
        low, high = self.measured_speedup_low, self.measured_speedup_high
        suffix = MODEL_ENGINES[self.backend].phrase if self.backend in MODEL_ENGINES else ""
        found = f"{self.measured_speedup:.2f}x ({low:.2f}-{high:.2f}x) measured{suffix} against {self.dense_engine}"
        sentence = f"promise {'met' if self.met else 'missed'}: {found}, {self.target:g}x promised"
        if self.slowdown is not None and self.slowdown > BUSY:
            sentence += (
                f" (the dense engine took {self.slowdown:.2f} times as long as in the search: the machine is busy, "
                "or another one)"
            )
        return sentence


def verify(
    task: Task,
    folder: Path,
    output: Path,
    *,
    backend: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> SpeedupVerdict:
    """Time and score a pruned model; write verify.json, rows of purpose "verify", and a session for later searches.

    Parameters
    ----------
    task
        The task of the model.
    folder
        The folder that `latbench prune` wrote.
    output
        Folder for verify.json, the rows and session.json. On deepsparse, the pruned model is left there as
        pruned.onnx.
    backend
        The backend of the pruned model; None for the one that it was searched for. On deepsparse, the dense model is
        timed there, too.
    progress
        Called with the current step.

    Raises
    ------
    BadData
        The folder has no pruned model of this task, or `output` is damaged.
    UsageError
        The task fails, or the profile has more threads than this process has processors.
    EnvironmentUnusable
        The backend is not available.
    """
    inputs = hash_manifest(folder)
    profile = _read_own_profile(task, folder)
    check_threads(
        profile.threads, f"{folder} was searched for {profile.threads} threads", "search again with fewer --threads"
    )
    deployment = Deployment(profile.threads, backend or profile.backend)
    if is_deepsparse(deployment.backend):
        deepsparse_environment.find_environment()
    newest = _find_newest_starts(output)
    exported = output / "pruned.onnx"
    timings, state = _time_pruned(task, profile, folder, exported, deployment, progress)
    progress("scoring", None, None)
    scores = _score_models(task, folder, deployment)
    verdict = build_verdict(task, profile, deployment.backend, timings, scores, inputs)
    environment = describe_cpu_environment(profile.threads)
    identity = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "block": 0}
    write_environment(output, environment)
    rows = [{**row, **identity, **state} for row in build_rows(verdict, profile, timings)]
    write_part(output, date_after(newest, rows))
    options = {name: (choice.pattern, choice.sparsity) for name, choice in profile.layers.items()}
    key = describe_conditions(task, profile.model_hash, deployment)
    write_sessions([build_session(timings, options)], key, output / SESSION)
    content = {"version": VERSION, **asdict(verdict)}
    write_text_atomically(output / "verify.json", json.dumps(content, indent=2) + "\n")
    return verdict


def _find_newest_starts(output: Path) -> dict[str, datetime]:
    """Return the newest start of each point in the table in `output`."""
    if not has_rows(output):
        return {}
    earlier = read_table(output, ["point_id", "started_at"])
    return find_newest_starts(earlier, set(earlier["point_id"]))


def _time_pruned(
    task: Task, profile: Profile, folder: Path, exported: Path, deployment: Deployment, progress: Progress
) -> tuple[Timings, dict[str, Any]]:
    """Time the pruned model beside the dense engines; return the timings, and the columns of the machine's state."""
    engines = build_dense_engines(task, deployment)
    engines[PRUNED] = EngineBuilder(
        PRUNED, "search.whole_model.model_engines:build_folder_pruned",
        (task.reference, deployment.threads, deployment.backend, str(folder.resolve()), str(exported.resolve())),
    )  # fmt: skip
    with lock_cpu(progress):
        before, started = read_cpu_times(), datetime.now(UTC)
        known = {profile.dense_engine: profile.dense_seconds} if profile.device == name_cpu() else {}
        timings = time_engines(
            engines, threads=deployment.threads, required=[TORCH, PRUNED], known=known, progress=progress
        )
    return timings, {"started_at": started, **read_telemetry(before)}


def _score_models(task: Task, folder: Path, deployment: Deployment) -> tuple[float, float]:
    """Return the scores of the dense and the pruned model, computed in a process of their own."""
    with Worker(threads=deployment.threads, name="score") as worker:
        try:
            dense, pruned = worker.call(
                "search.whole_model.model_engines:score_models",
                task.reference, deployment.threads, deployment.backend, str(folder.resolve()), timeout=SCORE_SECONDS,
            )  # fmt: skip
        except TaskFailed as error:
            raise BadData(f"the pruned model in {folder} cannot be scored: {error}") from error
    return dense, pruned


def read_current_verdict(task: Task, folder: Path, output: Path, backend: str) -> SpeedupVerdict | None:
    """Return the verdict in `output` if it belongs to this model, this machine and these engines, and was met.

    A promise that was missed is verified again, because the machine may have been busy. Raises BadData as `verify`
    does.
    """
    profile = _read_own_profile(task, folder)
    known = read_verdict(output / "verify.json")
    wanted = hash_manifest(folder), backend, hash_score_code(task)
    if known is None or not known.met or (known.inputs, known.backend, known.code) != wanted:
        return None
    key = describe_conditions(task, profile.model_hash, Deployment(profile.threads, backend))
    return known if read_sessions(output / SESSION, key) else None


def _read_own_profile(task: Task, folder: Path) -> Profile:
    """Return the profile of the pruned model in `folder`. Raises BadData if it belongs to another task."""
    profile = read_profile(folder / "profile.json")
    if profile.task != task.name:
        raise BadData(f"{folder} is a pruned model of task {profile.task}, not of {task.name}")
    return profile


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
    dense = timings.fastest([name for name in timings.blocks if name != PRUNED])
    slowdown = None
    if profile.dense_engine in timings.blocks:
        slowdown = timings.seconds(profile.dense_engine, COVERAGE).value / profile.dense_seconds
    seconds, speedup = timings.seconds(PRUNED, COVERAGE), timings.speedup(PRUNED, dense, COVERAGE)
    return SpeedupVerdict(
        task=task.name,
        backend=backend,
        target=profile.target,
        met=speedup.value >= profile.target,
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
        dense_seconds=timings.seconds(dense, COVERAGE).value,
        engines={name: asdict(timings.seconds(name, COVERAGE)) for name in timings.blocks},
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
    )


def build_session(timings: Timings, options: OptionsByLayer) -> Session:
    """Return the timings with the name that a search gives to the pruned model, by its options."""
    name = name_profile(options)
    blocks = {name if engine == PRUNED else engine: blocks for engine, blocks in timings.blocks.items()}
    return Session({name: options}, replace(timings, blocks=blocks))


def build_rows(verdict: SpeedupVerdict, profile: Profile, timings: Timings) -> list[dict[str, Any]]:
    """Return a table row for every engine: op "model", purpose "verify"."""
    found = []
    for seq, (name, blocks) in enumerate(timings.blocks.items()):
        engine = MODEL_ENGINES[verdict.backend if name == PRUNED else name]
        found.append({
            "purpose": "verify", "op": "model", "model": verdict.task, "device": verdict.device, "seq": seq,
            "backend": engine.backend, "backend_version": _version(engine.backend), "kernel_requested": engine.kernel,
            "kernel_used": name, "pattern": "profile" if name == PRUNED else "dense",
            "batch": verdict.batch, "dtype_w": engine.precision, "dtype_a": engine.precision,
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


def hash_manifest(folder: Path) -> str:
    """Return a hash of the pruned model in `folder`: its manifest lists the hashes of its files. Raises BadData.

    The packed file is not part of it: it has the same weights, and may be written later.
    """
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "packed"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def read_verdict(path: Path) -> SpeedupVerdict | None:
    """Return the verdict in a verify.json; None if the file is missing or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            return None
        verdict = SpeedupVerdict(**content)
        times = [getattr(verdict, name) for name in _POSITIVE]
        times += [engine[name] for engine in verdict.engines.values() for name in ("value", "low", "high")]
        scores = (verdict.score_dense, verdict.score_pruned)
        return verdict if all(0 < time < math.inf for time in times) and all(map(math.isfinite, scores)) else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


_POSITIVE = (
    "target", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_low",
    "measured_high", "measured_speedup", "measured_speedup_low", "measured_speedup_high", "dense_seconds",
)  # fmt: skip
