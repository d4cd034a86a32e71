"""Whether the promise holds: the pruned model and every dense engine, timed end to end on this machine, in turns.

A speedup is over the fastest dense engine, whichever that is here. Scores are of the dense model and of the converted
pruned model, the very thing that was timed.
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
from latbench.base.engine_registry import MODEL_ENGINES, is_deepsparse
from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.machines.devices import describe_cpu_environment, name_cpu, read_cpu_times, read_telemetry
from latbench.runners.worker_process import TaskFailed, Worker
from latbench.tables.table import has_rows, read_table
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.timing.sampling import estimate_burst_error
from search.artifacts.profile import Profile
from search.artifacts.profile import load as load_profile
from search.loss.cache import code_of
from search.progress import Progress
from search.pruning.storage.model_folder import read_manifest
from search.task import Task
from search.whole_model import sessions
from search.whole_model.end_to_end import Engine, Timings, cpu_lock, time_engines
from search.whole_model.overhead import conditions, dense_engines

PRUNED = "pruned"
SESSION = "session.json"
VERSION = 1
COVERAGE = 0.95
BUSY = 1.1


@dataclass(frozen=True)
class Verdict:
    """The content of verify.json: what was promised, what was measured, and whether the promise is met.

    `backend` ran the pruned model; what was predicted is the profile's, for the backend that it was searched for.
    Seconds are medians of whole-model calls with 95% intervals; `engines` holds those of every engine that ran,
    `left_out` why others did not. `slowdown` is what the profile's dense engine took, over what it took in the
    search: far from 1 on another machine or a busy one. `inputs` is the hash of the pruned model's manifest, `code`
    that of the files that define the task.
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
        """The verdict in one line."""
        low, high = self.measured_speedup_low, self.measured_speedup_high
        where = MODEL_ENGINES[self.backend].phrase if self.backend in MODEL_ENGINES else ""
        found = f"{self.measured_speedup:.2f}x ({low:.2f}-{high:.2f}x) measured{where} against {self.dense_engine}"
        sentence = f"promise {'met' if self.met else 'missed'}: {found}, {self.target:g}x promised"
        if self.slowdown is not None and self.slowdown > BUSY:
            sentence += (
                f" (dense took {self.slowdown:.2f} times what it took in the search: a busy machine, or another)"
            )
        return sentence


def verify(
    task: Task,
    folder: Path,
    output: Path,
    *,
    backend: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Verdict:
    """Time and score the pruned model in `folder`; write rows of purpose "verify" and verify.json to `output`.

    Also session.json, from which a search can go on.

    It runs on `backend`, by default the one that it was searched for. On deepsparse the dense model is timed there
    too, and the pruned one is left in `output` as pruned.onnx. Raises BadData for a folder that is no pruned model of
    this task or an `output` that is damaged, UsageError when the task fails, and EnvironmentUnusable where `backend`
    cannot be had.
    """
    inputs = manifest_hash(folder)
    profile = _followed(task, folder)
    backend = backend or profile.backend
    if is_deepsparse(backend):
        deepsparse_environment.find_environment()
    newest: dict[str, datetime] = {}
    if has_rows(output):
        earlier = read_table(output, ["point_id", "started_at"])
        newest = find_newest_starts(earlier, set(earlier["point_id"]))
    engines = dense_engines(task, profile.threads, backend)
    arguments = (task.reference, profile.threads, backend, str(folder.resolve()))
    exported = str((output / "pruned.onnx").resolve())
    engines[PRUNED] = Engine(PRUNED, "search.whole_model.model_engines:folder_pruned", (*arguments, exported))
    with cpu_lock(progress):
        before, started = read_cpu_times(), datetime.now(UTC)
        known = {profile.dense_engine: profile.dense_seconds} if profile.device == name_cpu() else {}
        timings = time_engines(
            engines, threads=profile.threads, required=["torch", PRUNED], known=known, progress=progress
        )
    state = read_telemetry(before)
    progress("scoring", None, None)
    with Worker(threads=profile.threads, name="score") as worker:
        try:
            score_dense, score_pruned = worker.call(
                "search.whole_model.model_engines:scores", *arguments, timeout=3600.0
            )
        except TaskFailed as error:
            raise BadData(f"the pruned model in {folder} cannot be scored: {error}") from error
    verdict = conclude(task, profile, backend, timings, (score_dense, score_pruned), inputs)
    environment = describe_cpu_environment(profile.threads)
    identity = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "started_at": started, "block": 0}
    write_environment(output, environment)
    found = [{**row, **identity, **state} for row in rows(verdict, profile, timings)]
    write_part(output, date_after(newest, found))
    chosen = {name: (choice.pattern, choice.sparsity) for name, choice in profile.layers.items()}
    key = conditions(task, profile.model_hash, profile.threads, backend)
    sessions.write([as_session(timings, chosen)], key, output / SESSION)
    write_text_atomically(
        output / "verify.json", json.dumps({"version": VERSION, **asdict(verdict)}, indent=2) + "\n"
    )
    return verdict


def up_to_date(task: Task, folder: Path, output: Path, backend: str) -> Verdict | None:
    """The verdict in `output`, if measuring again would be the same: of this model, this machine and these engines.

    None also where the promise was missed: the machine may have been busy. Raises BadData as `verify` does.
    """
    profile = _followed(task, folder)
    known = load(output / "verify.json")
    ours = manifest_hash(folder), backend, code_of(task)
    if known is None or not known.met or (known.inputs, known.backend, known.code) != ours:
        return None
    same = sessions.read(output / SESSION, conditions(task, profile.model_hash, profile.threads, backend))
    return known if same else None


def _followed(task: Task, folder: Path) -> Profile:
    """The profile that the pruned model in `folder` follows. Raises BadData where it is one of another task."""
    profile = load_profile(folder / "profile.json")
    if profile.task != task.name:
        raise BadData(f"{folder} is a pruned model of task {profile.task}, not of {task.name}")
    return profile


def conclude(
    task: Task, profile: Profile, backend: str, timings: Timings, scores: tuple[float, float], inputs: str
) -> Verdict:
    """The verdict on timings of the dense engines and of PRUNED."""
    dense = timings.fastest([name for name in timings.blocks if name != PRUNED])
    slowdown = None
    if profile.dense_engine in timings.blocks:
        slowdown = timings.seconds(profile.dense_engine, COVERAGE).value / profile.dense_seconds
    seconds, speedup = timings.seconds(PRUNED, COVERAGE), timings.speedup(PRUNED, dense, COVERAGE)
    return Verdict(
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
        code=code_of(task),
    )


def as_session(timings: Timings, chosen: sessions.Chosen) -> sessions.Session:
    """The timings with the pruned model called by its options, as a search calls it."""
    name = sessions.profile_name(chosen)
    blocks = {name if engine == PRUNED else engine: blocks for engine, blocks in timings.blocks.items()}
    return sessions.Session({name: chosen}, replace(timings, blocks=blocks))


def rows(verdict: Verdict, profile: Profile, timings: Timings) -> list[dict[str, Any]]:
    """A table row for every engine: op "model", purpose "verify"."""
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


def manifest_hash(folder: Path) -> str:
    """What the pruned model in `folder` is: its manifest lists the hashes of its files. Raises BadData.

    The packed file holds nothing of its own, and may come later: it does not count.
    """
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "packed"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path) -> Verdict | None:
    """The verdict in a verify.json; None where there is none, or one that cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            return None
        verdict = Verdict(**content)
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
