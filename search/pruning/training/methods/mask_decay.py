"""Mask decay: dropped weights fade out of the forward (Kao et al. 2022; Bambhaniya et al. 2024).

W~ = W (m + D (1 - m)), m the mask of the dense W, drawn anew from it. Three phases: dense (D = 1); decay, whose clock
t starts at its first step, with D = max(1 - rate t, 0) or D = exp(-rate t); and the last, with D = 0 whatever the
rate.

The authors' two codes differ in the backward. "scaled" is the derivative: a dropped weight gets D of the gradient,
less and less of it. "straight_through" gives it all. On vectors, blocks and Shfl-BW groups whole units fade.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_decay, phase_bounds
from search.pruning.training.pruner import DENSE, Pruner, Stage, When

SHAPES = ("linear", "exponential")
FAINT = 0.01  # where an exponential decay without a rate of its own ends


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskDecay(Pruner):
    """`dense` and `final` are the first and last phase, as shares of all steps.

    `rate` is the loss of D a step (linear), or of its logarithm (exponential); without one a linear D reaches 0 with
    the end of its phase, an exponential one 0.01. Masks are drawn every `every` steps.
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

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, faded, masked."""
        start, end = phase_bounds(self.dense, self.final, when.total)
        if when.step < start:
            return DENSE
        fade = 0.0 if when.step >= end else self.decay(when.step - start, end - start)
        backward = fade if self.backward == "scaled" else 1.0
        return Stage(target, fade=fade, backward=backward, redraw=(when.step - start) % self.every == 0)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where weights begin to fade, where nothing is left of them, and the final phase."""
        start, end = phase_bounds(self.dense, self.final, when.total)
        gone = bisect_left(range(start, end), True, key=lambda step: self.decay(step - start, end - start) == 0)
        return start, start + gone, end

    def decay(self, step: int, steps: int) -> float:
        """D after `step` steps of a decay phase of `steps`."""
        if self.shape == "linear":
            return max(0.0, 1 - (self.rate if self.rate is not None else 1 / steps) * step)
        return math.exp(-(self.rate if self.rate is not None else -math.log(FAINT) / steps) * step)
