"""What a search is given: its inputs, and what the user asks for.

The request consists of small records, so that each part of the search gets only what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latbench.tables.storage import Place
from latbench.tables.table import hash_table
from search.artifacts.layer_database import hash_model
from search.deployment import Deployment
from search.loss.evaluation_conditions import WANTED, EvaluationConditions, find_conditions
from search.loss.parallel import Workers
from search.pruning.one_shot.fill_database import DEFAULT_METHOD, hash_pruning_inputs
from search.task import Task
from search.whole_model.confidence import convert_to_coverage


@dataclass(frozen=True)
class Promise:
    """What the pruned model shall keep.

    Attributes
    ----------
    target
        Speedup over the fastest dense engine.
    confidence
        Probability that a verification confirms the promise.
    most_bytes
        Limit of the bytes of all weights (`search.problem.second_budget.build_model_budget`); None for no limit.
    """

    target: float
    confidence: float = 0.9
    most_bytes: float | None = None

    @property
    def coverage(self) -> float:
        """Coverage of the intervals of predicted and measured seconds."""
        return convert_to_coverage(self.confidence)


@dataclass(frozen=True)
class CandidateOptions:
    """Which options the search considers, and where their errors come from.

    Attributes
    ----------
    patterns
        Patterns to consider; None for all in the table.
    sparsities
        Sparsities to consider, as far as the cost model knows them; None for those in the table.
    errors
        "output" or "weight": errors of the layers' outputs or weights; otherwise a file
        (`search.inputs.layer_errors`).
    """

    patterns: tuple[str, ...] | None = None
    sparsities: tuple[float, ...] | None = None
    errors: str = "output"


@dataclass(frozen=True)
class SearchPlan:
    """How profiles are searched.

    Attributes
    ----------
    strategy
        One of `search.strategies.run_strategy.STRATEGIES`.
    seed
        Seed of the search's random numbers.
    evaluations
        Evaluations of each round.
    batches
        Calibration batches that evaluate a profile; None for all. The best profiles are evaluated on all batches.
    time_budget
        Seconds after which no further profile is tried, counted from when layers are pruned and whole models timed.
        Profiles found by then are still timed. None for no limit.
    quick
        Prune only options that the search is likely to choose (`search.pipeline.likely_options`).
    """

    strategy: str = "staged"
    seed: int = 0
    evaluations: int = 200
    batches: int | None = None
    time_budget: float | None = None
    quick: bool = False


@dataclass(frozen=True)
class SearchRequest:
    """Everything that a user may choose."""

    promise: Promise
    deployment: Deployment
    candidates: CandidateOptions = field(default_factory=CandidateOptions)
    plan: SearchPlan = field(default_factory=SearchPlan)
    workers: Workers = field(default_factory=Workers)

    def to_record(self) -> dict[str, Any]:
        """Return what the result depends on, for a hash. Names and order must stay: files of earlier searches use it.

        The number of processes is no part of it. Nor is the form: it is one of the conditions of what was timed.
        """
        promise, deployment, candidates, plan = self.promise, self.deployment, self.candidates, self.plan
        return {
            "target": promise.target, "threads": deployment.threads, "patterns": candidates.patterns,
            "seed": plan.seed, "evaluations": plan.evaluations, "batches": plan.batches,
            "confidence": promise.confidence, "strategy": plan.strategy, "backend": deployment.backend,
            "sparsities": candidates.sparsities, "errors": candidates.errors, "time_budget": plan.time_budget,
            "processes": 0, "judges": self.workers.pool, "most_bytes": promise.most_bytes, "quick": plan.quick,
            "precisions": deployment.precisions,
        } | ({"over": deployment.over} if deployment.over else {})  # fmt: skip


@dataclass(frozen=True)
class SearchInputs:
    """The task's model and what was measured for its layers, with hashes of them.

    Attributes
    ----------
    task, model
        The task and its dense model.
    table
        The table of latencies.
    cost_model
        The fitted cost model; None where the table has the layers' own times.
    database
        Folder of the layer database.
    model_hash, table_hash
        Hashes of the model's weights and of the table.
    provenance
        Pruning method and calibration data, as `Database.provenance` has them.
    method
        How layers are pruned, one of `search.pruning.one_shot.fill_database.ONE_SHOT_METHODS`.
    conditions
        How losses are evaluated.
    """

    task: Task
    model: Any
    table: Place
    cost_model: Path | None
    database: Path
    model_hash: str
    table_hash: str
    provenance: str
    method: str = DEFAULT_METHOD
    conditions: EvaluationConditions = WANTED


def read_inputs(
    task: Task, table: Place, cost_model: Path | None, database: Path, method: str = DEFAULT_METHOD
) -> SearchInputs:
    """Load the task's model, find how losses are evaluated, and hash the inputs.

    Raises what these raise if they are missing or damaged.
    """
    model, batches = task.model(), task.calibration()
    # Before the model runs, which may change its buffers.
    hashes = hash_model(model), hash_table(table), hash_pruning_inputs(task, method, batches)
    conditions = find_conditions(task, model, batches)
    return SearchInputs(task, model, table, cost_model, database, *hashes, method, conditions)
