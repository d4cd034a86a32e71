"""What milder targets would keep: the scores of profiles for lower speedups, beside the one that was chosen.

A search prunes options near its own target. Only these are used here, so that nothing is pruned and nothing is timed.
A search for the milder target itself may find a profile that keeps more. Scores are one-shot scores: joint tuning and
training come on top.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from latbench.base.files import hash_file, write_text_atomically
from latbench.errors import BadData
from search.artifacts.profile import Profile, read_profile
from search.knapsack.arrays import Choice
from search.loss.cache import hash_score_code
from search.pipeline.profile_scorer import ProfileScorer
from search.pipeline.search_request import SearchInputs, SearchRequest
from search.pipeline.search_setup import set_up_search
from search.problem.calibration import calibrate, ignore_intervals
from search.problem.layers import convert_to_interval
from search.problem.problem import Problem
from search.progress import Progress
from search.pruning.storage.model_folder import read_manifest
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.task import Task
from search.whole_model import overhead
from search.whole_model.end_to_end import ModelTimer

VERSION = 1

SHARES = (0.25, 0.5, 0.75)
"""Milder targets, as shares of the way from 1x to the target."""

EVALUATIONS = 20
"""Profiles that are tried for each, at most."""

LEAST_TARGET = 1.2
"""Below it, milder targets are not worth a search."""

_WANTED = "give milder_targets.json of a latbench run"


@dataclass(frozen=True)
class ScoredTarget:
    """A target, the predicted speedup of its profile, and the one-shot score of that."""

    target: float
    speedup: float
    score: float


@dataclass(frozen=True)
class MilderTargets:
    """The content of milder_targets.json.

    Attributes
    ----------
    score_name
        Name of the score.
    dense_score
        The score of the dense model in float32.
    targets
        The milder targets, and last the target of the profile itself.
    profile
        Hash of that profile's file.
    code
        Hash of the files that define the task.
    """

    score_name: str
    dense_score: float
    targets: tuple[ScoredTarget, ...]
    profile: str
    code: str

    def save(self, path: Path) -> None:
        """Write the file."""
        write_text_atomically(path, json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n")

    def is_of(self, task: Task, profile: Path) -> bool:
        """Return whether these are the milder targets of a profile's file, and of the task as it is now."""
        return (self.profile, self.code) == (hash_file(profile), hash_score_code(task))


def score_milder_targets(
    inputs: SearchInputs, request: SearchRequest, profile: Path, pruned: Path, timer: ModelTimer, progress: Progress
) -> MilderTargets:
    """Search and score a profile for each milder target, after a search.

    Parameters
    ----------
    inputs, request
        Those of the search.
    profile
        The file with the profile that it found.
    pruned
        The folder with the model that was pruned to it.
    timer
        Times whole models. After a search there is nothing to time.
    progress
        Called with the current step.
    """
    chosen, scorer, plan = read_profile(profile), ProfileScorer(inputs), request.plan
    scores = {stage["name"]: stage["score"] for stage in read_manifest(pruned)["stages"]}
    if scores["one-shot"] is None:
        raise BadData("the pruned model has no score before tuning, to compare with")
    setup = set_up_search(inputs, request, timer, progress=progress)
    problem, known = _calibrate_to(setup.problem, chosen)
    found = []
    with setup.evaluator:
        for share in SHARES:
            target = 1 + share * (chosen.target - 1)
            progress(f"scoring a milder target, {target:.2f}x", None, None)
            settings = StrategySettings("staged", EVALUATIONS, plan.seed, plan.batches)
            choice = run_strategy(settings, problem, target, setup.evaluator, known=known).choice
            speedup = problem.speedup(problem.predict(choice)).value
            score = scorer.score(problem, choice)
            if not math.isnan(score):
                found.append(ScoredTarget(target, speedup, score))
    found.append(ScoredTarget(chosen.target, chosen.speedup[0], scores["one-shot"]))
    return MilderTargets(
        inputs.task.score_name, scores["dense"], tuple(found), hash_file(profile), hash_score_code(inputs.task)
    )


def _calibrate_to(problem: Problem, chosen: Profile) -> tuple[Problem, dict[Choice, str]]:
    """Return the problem that predicts the chosen profile's seconds, and that profile, which keeps milder targets."""
    try:
        choice = overhead.find_choice(problem.layers, chosen.options)
    except BadData:  # its options are others now
        return ignore_intervals(problem), {}
    seconds, dense = convert_to_interval(chosen.predicted_seconds), convert_to_interval(chosen.dense_seconds)
    calibrated = calibrate(problem, choice, seconds, dense, chosen.dense_engine)
    return ignore_intervals(calibrated), {choice: chosen.strategy}


def read_milder_targets(path: Path) -> MilderTargets:
    """Read the file. Raises BadData if it is missing, damaged or of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping) or content["version"] != VERSION:
            raise ValueError("it has another version")
        targets = tuple(
            ScoredTarget(**{key: float(value) for key, value in row.items()}) for row in content["targets"]
        )
        dense, texts = float(content["dense_score"]), [str(content[key]) for key in ("score_name", "profile", "code")]
        if not targets or not all(math.isfinite(it.target) and math.isfinite(it.speedup) for it in targets):
            raise ValueError("a target is missing")
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}): {_WANTED}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadData(f"{path} is no list of milder targets ({error}): {_WANTED}") from error
    name, profile, code = texts
    return MilderTargets(name, dense, targets, profile, code)
