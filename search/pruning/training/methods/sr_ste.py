"""SR-STE: straight through, and what is dropped is pulled to zero (Zhou et al. 2021): g + penalty (1 - m) W.

The term steadies the masks: a weight that was dropped has to be worth it to come back. It enters the gradient, so
that the optimizer's momentum and scaling act on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.methods.ste import STE
from search.pruning.training.pruner import Stage, When


@dataclass(frozen=True, kw_only=True, eq=False)
class SRSTE(STE):
    """`penalty` is the paper's lambda_W; its value for SGD on ImageNet is the default."""

    penalty: float = 2e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.penalty < 0:
            raise UsageError(f"SR-STE's penalty pulls towards zero: it is not negative, as {self.penalty} is")

    def stage(self, target: Target, when: When) -> Stage:
        """Straight through, with the penalty once there is a mask."""
        stage = super().stage(target, when)
        return stage if stage.target is None else replace(stage, penalty=self.penalty)
