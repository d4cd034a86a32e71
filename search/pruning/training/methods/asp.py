"""ASP: one mask is drawn from trained weights, then training continues under it (Mishra et al. 2021).

Gradients of dropped weights are zeroed before an update, and the weights after it. It works for every pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_dense
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class ASP(Pruner):
    """ASP: automatic sparsity.

    Parameters
    ----------
    dense : float
        Dense phase before the mask is drawn, as a share of all steps: 0 for a trained model, else about 0.5.
    score : Score
        How much each weight matters.
    """

    dense: float = 0.0

    def __post_init__(self) -> None:
        check_dense(self.dense)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense stage, then the masked one."""
        return (
            DENSE
            if moment.step < round(self.dense * moment.total)
            else Stage(target, fixed_mask=True, last_mask=True)
        )

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the step at which the mask is drawn."""
        return (round(self.dense * moment.total),)
