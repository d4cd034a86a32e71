"""Whether promises are kept: random targets searched on this machine, each then timed anew as `latbench verify` does.

    python tests/benchmarks/guarantee.py TASK --table T --model M --database D [--targets 10] [--risk 0.95]

Targets are uniform from 1.2x to 0.9 of the fastest profile there is. Each search tries few profiles, because what
they cost in accuracy does not matter here. Prints a line a target, then how many were met and by how much they were
overshot. A search that refuses to promise after measuring (exit 1 of `latbench search`) is counted by itself.
Repeated, it goes on: what was searched and verified is kept beside the database.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from latbench import devices, places
from latbench.errors import PromiseMissed
from search import job, overhead, sessions
from search import task as tasks
from search.end_to_end import Engine, cpu_lock, time_engines
from search.profile import Profile
from search.sessions import Session

LEAST, SHARE = 1.2, 0.9


def main() -> None:
    arguments = _arguments()
    inputs = job.read_inputs(
        tasks.load(arguments.task), places.at(arguments.table), arguments.model, arguments.database
    )
    settings = job.Settings(
        LEAST, devices.cores(), evaluations=arguments.evaluations, batches=arguments.batches, risk=arguments.risk,
        patterns=tuple(arguments.patterns.split(",")) if arguments.patterns else None,
    )  # fmt: skip
    problem = job.prepare(inputs, settings).problem.certain()
    fastest = problem.speedup(problem.predict(tuple(int(np.argmin(layer.seconds)) for layer in problem.layers))).value
    ceiling = "unbounded" if problem.ceiling is None else f"{problem.ceiling:.2f}x"
    print(
        f"{inputs.task.name}: the fastest profile {fastest:.2f}x, with free layers {ceiling}; risk {settings.risk:g}"
    )
    targets = np.random.default_rng(arguments.seed).uniform(LEAST, max(LEAST, SHARE * fastest), arguments.targets)
    measured: list[float | None] = []
    for target in np.round(targets, 3).tolist():
        asked = job.Settings(**{**vars(settings), "target": target})
        try:
            profile = job.search(inputs, asked)
        except PromiseMissed as error:
            print(f"  {target:.3f}x refused: {error}", flush=True)
            measured.append(None)
            continue
        value = verified(inputs, asked, profile)
        measured.append(value / target)
        verdict = "met" if value >= target else "MISSED"
        print(
            f"  {target:.3f}x promised, {profile.speedup[1]:.3f}x safe, {profile.speedup[0]:.3f}x in the search, "
            f"{value:.3f}x verified: {verdict} ({value / target - 1:+.1%}); loss {profile.loss:.4f}",
            flush=True,
        )
    found = [ratio for ratio in measured if ratio is not None]
    if not found:
        print("every target was refused")
        return
    print(
        f"met {sum(ratio >= 1 for ratio in found)} of {len(measured)} ({len(measured) - len(found)} refused); "
        f"overshoot {np.mean(found) - 1:+.1%} in the mean, {np.min(found) - 1:+.1%} to {np.max(found) - 1:+.1%}"
    )


def verified(inputs: job.Inputs, settings: job.Settings, profile: Profile) -> float:
    """The speedup over the fastest of all dense engines, everything built anew."""
    path = inputs.database / f"guarantee-{profile.inputs}.json"
    chosen = {name: (choice.pattern, choice.sparsity) for name, choice in profile.layers.items()}
    name = sessions.profile_name(chosen)
    known = sessions.read(path, chosen)
    if not known:
        engines = overhead.dense_engines(inputs.task, settings.threads, settings.backend)
        arguments = (inputs.task.reference, settings.threads, settings.backend, str(inputs.database.resolve()))
        engines[name] = Engine("pruned", "search.engines:database_pruned", (*arguments, inputs.model_hash, chosen))
        with cpu_lock(lambda *_: None):
            timings = time_engines(
                engines, threads=settings.threads, required=["torch", name],
                known={profile.dense_engine: profile.dense_seconds}, order=np.random.default_rng(1),
            )  # fmt: skip
        known = [Session({name: chosen}, timings)]
        sessions.write(known, json.loads(json.dumps(chosen)), path)
    timings = known[0].timings
    dense = timings.fastest([engine for engine in timings.blocks if engine != name])
    return timings.speedup(name, dense, 0.9).value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    for name in ("table", "model", "database"):
        parser.add_argument(f"--{name}", type=Path if name != "table" else str, required=True)
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--risk", type=float, default=0.95)
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--patterns")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
