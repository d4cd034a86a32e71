"""Whether promises are kept: random targets searched on this machine, each then pruned and verified as users do it.

    python tests/benchmarks/jobs/guarantee.py TASK --table T --cost-model M --database D [--targets 10]
        [--confidence 0.95] [--method auto] [--neighbour]

Targets are uniform from 1.2x to 0.9 of the fastest profile there is. Each search tries few profiles, because what
they cost in accuracy does not matter here, nor does how layers are pruned: `--method magnitude` is done in seconds.
Prints a line a target, then how many were met and by how much they were overshot. A search that refuses to promise
after measuring (exit 1 of `latbench search`) is counted by itself.
Repeated, it goes on: what was searched and verified is kept beside the database.

Last it prints how speedups of the same profile scattered in all searches and verifications that were kept under the
same conditions: from build to build, and from session to session. `search.whole_model.confidence` has constants
for both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from latbench.errors import PromiseMissed
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.artifacts.profile import Profile
from search.deployment import Deployment
from search.pipeline import search_job, verify
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import (
    CandidateOptions,
    Promise,
    SearchInputs,
    SearchPlan,
    SearchRequest,
    read_inputs,
)
from search.pipeline.search_setup import set_up_search
from search.pipeline.speedup_verdict import INCONCLUSIVE, KEPT, SpeedupVerdict, read_verdict
from search.problem.calibration import ignore_intervals
from search.pruning.one_shot.fill_database import DEFAULT_METHOD, ONE_SHOT_METHODS
from search.pruning.one_shot.stitch import stitch
from search.pruning.storage.model_folder import save_pruned
from search.task import load_task
from search.whole_model.confidence import BUILD_SPREAD, SESSION_SPREAD, Spread, estimate_spreads
from search.whole_model.end_to_end import ModelTimer
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import read_session_file

LEAST, SHARE = 1.2, 0.9


def main() -> None:
    """Parse, search, verify, print."""
    arguments = _arguments()
    inputs = read_inputs(
        load_task(arguments.task),
        parse_place(arguments.table),
        arguments.cost_model,
        arguments.database,
        arguments.method,
    )
    request = SearchRequest(
        Promise(LEAST, arguments.confidence),
        Deployment(count_cores()),
        CandidateOptions(tuple(arguments.patterns.split(",")) if arguments.patterns else None),
        SearchPlan(evaluations=arguments.evaluations, batches=arguments.batches),
    )
    from half_busy import run_beside  # here, because tests load this file by its path

    with run_beside(arguments.neighbour):
        report(inputs, request, arguments.targets, arguments.seed)


def report(inputs: SearchInputs, request: SearchRequest, count: int, seed: int) -> None:
    """Search and verify so many random targets, and print what came of it."""
    with ModelTimer(request.deployment.threads) as timer:
        _report(inputs, request, count, seed, timer)


def _report(inputs: SearchInputs, request: SearchRequest, count: int, seed: int, timer: ModelTimer) -> None:
    problem = ignore_intervals(set_up_search(inputs, request, timer).problem)
    fastest = problem.speedup(problem.predict(tuple(int(np.argmin(layer.seconds)) for layer in problem.layers))).value
    ceiling = "unbounded" if problem.ceiling is None else f"{problem.ceiling:.2f}x"
    print(
        f"{inputs.task.name}: the fastest profile {fastest:.2f}x, with free layers {ceiling}; "
        f"confidence {request.promise.confidence:g}"
    )
    targets = np.random.default_rng(seed).uniform(LEAST, max(LEAST, SHARE * fastest), count)
    measured: list[float | None] = []
    outcomes: list[str] = []
    for target in np.round(targets, 3).tolist():
        try:
            asked = replace(request, promise=replace(request.promise, target=target))
            profile = search_job.search(inputs, asked, timer=timer)
        except PromiseMissed as error:
            print(f"  {target:.3f}x refused: {error}", flush=True)
            measured.append(None)
            continue
        verdict = verified(inputs, profile, timer)
        value = verdict.measured_speedup
        outcomes.append(verdict.outcome)
        measured.append(value / target)
        print(
            f"  {target:.3f}x promised, {profile.speedup[1]:.3f}x safe, {profile.speedup[0]:.3f}x in the search, "
            f"{value:.3f}x verified: {verdict.outcome} ({value / target - 1:+.1%}); loss {profile.loss:.4f}",
            flush=True,
        )
    found = [ratio for ratio in measured if ratio is not None]
    if not found:
        print("every target was refused")
        return
    print(
        f"kept {outcomes.count(KEPT)} of {len(measured)} ({outcomes.count(INCONCLUSIVE)} inconclusive, "
        f"{len(measured) - len(found)} refused); "
        f"overshoot {np.mean(found) - 1:+.1%} in the mean, {np.min(found) - 1:+.1%} to {np.max(found) - 1:+.1%}"
    )
    build_spread, session_spread = estimate_from_files(inputs, request)
    print(
        f"the same profile again: {build_spread.value:.2%} between builds of a session ({build_spread.freedom} "
        f"degrees of freedom, the constant is {BUILD_SPREAD:.2%}), {session_spread.value:.2%} more between sessions "
        f"({session_spread.freedom}, the constant is {SESSION_SPREAD:.2%})"
    )


def verified(inputs: SearchInputs, profile: Profile, timer: ModelTimer) -> SpeedupVerdict:
    """What `latbench verify` says of the profile's model, pruned by the database."""
    folder = inputs.database / "guarantee" / profile.inputs
    known = read_verdict(folder / "verify" / "verify.json")
    if known is None:
        model = inputs.task.model()
        stitched = stitch(model, profile.options, Database(inputs.database, inputs.model_hash, inputs.provenance))
        facts = {"task": inputs.task.name}
        save_pruned(folder / "pruned", model, stitched.masks, profile, facts, stitched.quantizations)
        known = verify.verify(inputs.task, folder / "pruned", folder / "verify", timer=timer)
    return known


def estimate_from_files(inputs: SearchInputs, request: SearchRequest) -> tuple[Spread, Spread]:
    """Return `estimate_spreads` of all timings in the database's folder under these conditions."""
    conditions = SearchHistory(inputs, request).conditions()
    speedups: dict[str, list[list[float]]] = {}
    kept = [*inputs.database.glob("sessions-*.json"), *inputs.database.glob(f"guarantee/*/verify/{verify.SESSION}")]
    for path in sorted(kept):
        found = read_session_file(path)
        if found is None or not conditions.items() <= found[0].items():
            continue
        for session in found[1]:
            dense = session.timings.fastest(list(DENSE_ENGINES))
            for name in session.profiles:
                speedups.setdefault(name, []).append(session.timings.speedups(name, dense))
    return estimate_spreads(list(speedups.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    for name in ("table", "cost-model", "database"):
        parser.add_argument(f"--{name}", type=Path if name != "table" else str, required=True)
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--patterns")
    parser.add_argument("--method", choices=sorted(ONE_SHOT_METHODS), default=DEFAULT_METHOD)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--neighbour", action="store_true", help="beside a program that takes half a core on and off")
    return parser.parse_args()


if __name__ == "__main__":
    main()
