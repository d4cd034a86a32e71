"""One-shot scores of profiles: a model is stitched from the layer database, and the task scores it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property

import torch

from search.artifacts.layer_database import Database
from search.knapsack.arrays import Choice
from search.pipeline.search_request import SearchInputs
from search.problem.layers import Option, expand_choice
from search.problem.problem import Problem
from search.pruning.one_shot.stitch import stitch
from search.pruning.prune_model import tune_norms
from search.pruning.quantization.rounded_inputs import read_inputs_in_steps


class ProfileScorer:
    """Scores profiles.

    Parameters
    ----------
    inputs
        The task, its model and the database.
    """

    def __init__(self, inputs: SearchInputs) -> None:
        self._inputs = inputs
        self._database = Database(inputs.database, inputs.model_hash, inputs.provenance)
        self._batches = inputs.task.calibration()

    @cached_property
    def dense(self) -> float:
        """The score of the dense model."""
        with torch.no_grad():
            return self._inputs.task.score(self._inputs.model)

    def score(self, problem: Problem, choice: Choice) -> float:
        """Return the score of a profile; NaN where it has none."""
        return self.score_options(expand_choice(problem.layers, choice))

    def score_options(self, options: Mapping[str, Option]) -> float:
        """Return the score of the model with these options by layer; NaN where it has none."""
        model = copy.deepcopy(self._inputs.model)
        stitched = stitch(model, options, self._database)
        with read_inputs_in_steps(model, stitched.quantizations):
            tune_norms(self._inputs.task, model, self._batches)
            with torch.no_grad():
                return self._inputs.task.score_or_nan(model)
