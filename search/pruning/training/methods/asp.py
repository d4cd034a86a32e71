"""ASP: one mask from trained weights, then training goes on under it (Mishra et al. 2021).

Gradients of dropped weights are zeroed before an update, the weights after it. For N:M and every other pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_dense
from search.pruning.training.pruner import DENSE, Pruner, Stage, When


@dataclass(frozen=True, kw_only=True, eq=False)
class ASP(Pruner):
    """The mask is drawn after `dense`, a share of all steps: 0 for a model that is trained already, else 0.5, say."""

    dense: float = 0.0

    def __post_init__(self) -> None:
        check_dense(self.dense)

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, then the mask."""
        return DENSE if when.step < round(self.dense * when.total) else Stage(target, fixed=True, last=True)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where the mask is drawn."""
        return (round(self.dense * when.total),)
