"""`--recipe auto`: win back accuracy within a time budget, without a choice of method, length or learning rate.

The pruned model keeps its masks and learns from the dense model (`search.pruning.training.dense_teacher`). Short
trainings find the learning rate: the rate is moved by a factor of about three as long as that helps. Longer trainings
want larger rates, so the real one takes LONGER times the best of them, and after divergence that divided by SLOWER.
The rest of the budget gives the steps, MOST_STEPS at most. A training that diverges begins again, beyond the budget.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from latbench.base.files import write_text_atomically
from latbench.base.recipe_names import AUTO_RECIPE
from latbench.errors import BadData
from search.pruning.one_shot.stitch import StitchedLayers
from search.pruning.quantization.rounded_inputs import read_inputs_in_steps
from search.pruning.training.dense_teacher import LAYERS, DenseTeacher
from search.pruning.training.recipe import Recipe, read_recipe
from search.pruning.training.train import draw_batches, train
from search.task import Task

_LOG = logging.getLogger(__name__)

BUDGET_SECONDS = 600.0
"""The default budget."""

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates of Adam that are tried, from FIRST_RATE up or down."""

FIRST_RATE, CAREFUL_RATE = 3, 2

FEWEST_STEPS = 120
"""A budget of fewer steps is too short for trials: the training takes CAREFUL_RATE."""

TRIALS_SHARE = 0.2
"""Share of the budget for the trials. Mostly there are three or four of them."""

TRIAL_STEPS = (10, 50)
"""Fewest and most steps of a trial."""

LONGER, SLOWER = 2.0, 4.0

MOST_STEPS = 3000
"""A longer training is rarely worth its time; a recipe file can ask for it."""

WARMUP_SHARE = 0.05

FRESH_BATCHES = 4
"""Training batches that compare trials."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AutoRecipe:
    """A recipe that is chosen when the pruned model is there.

    Attributes
    ----------
    budget_seconds : float
        Seconds for trials and training.
    seed : int
        Seed of the training.
    path : Path or None
        File that keeps the choice, so that an interrupted training goes on with the same one.
    """

    budget_seconds: float = BUDGET_SECONDS
    seed: int = 0
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what the choice depends on, as plain values."""
        return {"method": AUTO_RECIPE, "budget_seconds": self.budget_seconds, "seed": self.seed}

    def keep(self, chosen: Recipe) -> Recipe:
        """Write the choice to the file, if there is one, and return it."""
        if self.path is not None:
            write_text_atomically(self.path, json.dumps(chosen.to_dict()) + "\n")
        return chosen

    def choose_slower(self, chosen: Recipe) -> Recipe:
        """Return the choice with a lower learning rate, after it diverged, and keep that."""
        return self.keep(replace(chosen, learning_rate=chosen.learning_rate / SLOWER))

    @property
    def base(self) -> Recipe:
        """The recipe without the chosen length and rate."""
        return Recipe(method="held", start="one_shot", distill=LAYERS, seed=self.seed)


def read_training(recipe: str | None, budget_seconds: float | None = None) -> Recipe | AutoRecipe | None:
    """Return how a model is trained, as a user asks for it.

    Parameters
    ----------
    recipe : str or None
        AUTO_RECIPE, or what `search.pruning.training.recipe.read_recipe` reads.
    budget_seconds : float or None
        Seconds above 0 for AUTO_RECIPE. They alone ask for it, too; a named recipe has its own length.

    Returns
    -------
    Recipe, AutoRecipe or None
        None for no training.

    Raises
    ------
    UsageError, BadData
        The recipe is wrong.
    """
    if recipe is not None and recipe != AUTO_RECIPE:
        return read_recipe(recipe)
    if recipe is None and budget_seconds is None:
        return None
    return AutoRecipe(BUDGET_SECONDS if budget_seconds is None else budget_seconds)


def choose_recipe(
    auto: AutoRecipe,
    task: Task,
    targets: Any,
    build_start: Callable[[], tuple[nn.Module, StitchedLayers]],
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = lambda stage, done, total: None,
) -> Recipe:
    """Return the recipe for a pruned model: the one in the file, or else what trials find.

    Parameters
    ----------
    auto : AutoRecipe
        The budget.
    task : Task
        The task.
    targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
        Targets by layer.
    build_start : callable
        Returns a new copy of the pruned model, and what one-shot pruning left.
    clock : callable
        Returns seconds.
    progress : callable
        Called with what is done, the trials so far, and all of them at most.

    Returns
    -------
    Recipe
        Its steps fit into what is left of the budget.
    """
    if auto.path is not None and auto.path.exists():
        return _read_choice(auto.path)
    began = clock()
    trials = _Trials(auto, task, targets, build_start, clock, progress)
    rate = trials.find_rate()
    left = auto.budget_seconds - (clock() - began)
    steps = max(TRIAL_STEPS[0], min(MOST_STEPS, int(left / trials.step_seconds)))
    if steps * trials.step_seconds > 2 * max(left, 0.0):
        _LOG.warning(
            f"{steps} steps of training take {steps * trials.step_seconds:.0f} s, more than the budget leaves: "
            "give a longer budget, or use smaller batches"
        )
    warmup = max(1, int(WARMUP_SHARE * steps))
    return auto.keep(replace(auto.base, learning_rate=LONGER * rate, steps=steps, warmup=warmup))


class _Trials:
    """Short trainings at several learning rates. `step_seconds` is the time of a step, once there was a trial."""

    def __init__(
        self, auto: AutoRecipe, task: Task, targets: Any,
        build_start: Callable[[], tuple[nn.Module, StitchedLayers]], clock: Callable[[], float], progress: Progress,
    ) -> None:  # fmt: skip
        self._auto, self._task, self._targets = auto, task, targets
        self._build_start, self._clock, self._progress = build_start, clock, progress
        self._fresh = draw_fresh_batches(task, auto.seed, FRESH_BATCHES)
        self._teacher = DenseTeacher(task, LAYERS)
        self._distances: dict[int, float] = {}
        self._steps = TRIAL_STEPS[0]
        self.step_seconds = math.inf

    def find_rate(self) -> float:
        """Return the best of the rates, by trials from the middle one on to the side that is better."""
        self.step_seconds = self._time_steps()
        if self._auto.budget_seconds < FEWEST_STEPS * self.step_seconds:
            return RATES[CAREFUL_RATE]
        share = TRIALS_SHARE / 4 * self._auto.budget_seconds / self.step_seconds
        self._steps = min(max(int(share), TRIAL_STEPS[0]), TRIAL_STEPS[1])
        best = FIRST_RATE
        for towards in (1, -1):
            while 0 <= best + towards < len(RATES) and self._is_better(best + towards, best):
                best += towards
            if best != FIRST_RATE:
                break
        return RATES[best]

    def _is_better(self, number: int, than: int) -> bool:
        """Return whether a rate is the better one; where the larger one diverged, the smaller one is."""
        return self._try(number) < self._try(than) or (number < than and math.isinf(self._try(than)))

    def _time_steps(self) -> float:
        """Return the seconds of a step, without the first one, which builds what later ones use."""
        times: list[float] = []
        self._train(RATES[0], TRIAL_STEPS[0] // 2, lambda done, total: times.append(self._clock()))
        return max((times[-1] - times[0]) / (len(times) - 1), 1e-6)

    def _try(self, number: int) -> float:
        """Return how far a short training at this rate ends from the dense model; infinity if it diverges."""
        if number not in self._distances:
            try:
                self._distances[number] = self._train(RATES[number], self._steps, lambda done, total: None)
            except BadData:
                self._distances[number] = math.inf
            self._progress("choosing a learning rate", len(self._distances), len(RATES))
        return self._distances[number]

    def _train(self, rate: float, steps: int, progress: Callable[[int, int], None]) -> float:
        model, start = self._build_start()
        recipe = replace(self._auto.base, learning_rate=rate, steps=steps, warmup=1)
        trained = train(self._task, model, self._targets, recipe, start=start, progress=progress)
        with torch.no_grad(), read_inputs_in_steps(model, trained.quantizations):
            distances = [float(self._teacher.compute_loss(model, batch)) for batch in self._fresh]
        mean = sum(distances) / len(distances)
        return mean if math.isfinite(mean) else math.inf


def draw_fresh_batches(task: Task, seed: int, most: int) -> Sequence[Any]:
    """Return training batches in another order than a training with this seed has; fewer if there are no more.

    No one-shot pruning was fitted to them.
    """
    batches = draw_batches(task, seed + 1)
    return [batch for batch, _ in zip(batches, range(most), strict=False)]


def _read_choice(path: Path) -> Recipe:
    """Return the recipe in the file. Raises BadData if it is damaged."""
    try:
        return Recipe(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadData(f"{path}: damaged ({error}); delete it to choose a recipe again") from error
