"""Mask decay: dropped weights fade out of the forward (Kao et al. 2022; Bambhaniya et al. 2024).

The forward uses W~ = W (m + D (1 - m)). The mask m is drawn from the dense W again and again. There are three phases.
D is 1 in the dense phase. In the decay phase D = max(1 - rate t, 0) or D = exp(-rate t), where t counts from the
phase's first step. In the final phase D is 0, whatever the rate.

The authors' two implementations differ in the backward. "scaled" is the derivative: a dropped weight gets the share D
of the gradient. "straight_through" gives it all of the gradient. For vectors, blocks and Shfl-BW groups whole units
fade.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_decay, find_phase_bounds
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage

SHAPES = ("linear", "exponential")
FAINT = 0.01  # the last D of an exponential decay without a rate


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskDecay(Pruner):
    """Mask decay.

    Parameters
    ----------
    shape : {"linear", "exponential"}
        Curve of D.
    rate : float or None
        Loss of D a step (linear), or of its logarithm (exponential). Without a rate a linear D reaches 0 at the end
        of its phase, and an exponential one 0.01.
    dense, final : float
        First and last phase, as shares of all steps.
    backward : {"scaled", "straight_through"}
        Gradient of dropped weights.
    every : int
        Steps between two masks.
    score : Score
        How much each weight matters.
    """

    keeps_dense: ClassVar[bool] = True
    shape: str = "linear"
    rate: float | None = None
    dense: float = 0.1
    final: float = 0.2
    backward: str = "scaled"
    every: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UsageError(f"a decay is {' or '.join(SHAPES)}, not {self.shape!r}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"the decay's rate is above 0, not {self.rate}")
        check_decay(self.dense, self.final, self.backward, self.every)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense, the fading or the masked stage."""
        start, end = find_phase_bounds(self.dense, self.final, moment.total)
        if moment.step < start:
            return DENSE
        fade = 0.0 if moment.step >= end else self.decay(moment.step - start, end - start)
        backward = fade if self.backward == "scaled" else 1.0
        return Stage(target, fade=fade, backward=backward, redraw=(moment.step - start) % self.every == 0)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the steps at which weights begin to fade, have faded completely, and the final phase begins."""
        start, end = find_phase_bounds(self.dense, self.final, moment.total)
        faded = bisect_left(range(start, end), True, key=lambda step: self.decay(step - start, end - start) == 0)
        return start, start + faded, end

    def decay(self, step: int, steps: int) -> float:
        """Return D after `step` steps of a decay phase of `steps`."""
        if self.shape == "linear":
            return max(0.0, 1 - (self.rate if self.rate is not None else 1 / steps) * step)
        return math.exp(-(self.rate if self.rate is not None else -math.log(FAINT) / steps) * step)
