"""SR-STE: straight-through, with dropped weights pulled to zero (Zhou et al. 2021): g + penalty (1 - m) W.

The penalty stabilizes the masks. It enters the gradient, so the optimizer's momentum and scaling act on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.methods.ste import STE
from search.pruning.training.pruner import Moment, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class SRSTE(STE):
    """SR-STE.

    Parameters
    ----------
    penalty : float
        The paper's lambda_W; the default is its value for SGD on ImageNet.
    dense, every, score
        As of `STE`.
    """

    penalty: float = 2e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.penalty < 0:
            raise UsageError(f"SR-STE's penalty pulls towards zero: it is not negative, as {self.penalty} is")

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the straight-through stage, with the penalty once there is a mask."""
        stage = super().stage(target, moment)
        return stage if stage.target is None else replace(stage, penalty=self.penalty)
