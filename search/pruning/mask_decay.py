"""Mask decay: dropped weights fade out of the forward (Kao et al. 2022; Bambhaniya et al. 2024).

W~ = W (m + D (1 - m)), m the mask of the dense W, drawn anew from it. Three phases: dense (D = 1); decay, whose clock
t starts at its first step, with D = max(1 - rate t, 0) or D = exp(-rate t); and the last, with D = 0 whatever the
rate.

The authors' two codes differ in the backward. "scaled" is the derivative: a dropped weight gets D of the gradient,
less and less of it. "straight_through" gives it all. On vectors, blocks and Shfl-BW groups whole units fade.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.pruner import DENSE, Pruner, Stage, When
from search.pruning.targets import Target

SHAPES = ("linear", "exponential")
BACKWARDS = ("scaled", "straight_through")
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
        check_phases(self.dense, self.final, self.backward, self.every)

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, faded, masked."""
        start, end = phase_bounds(self.dense, self.final, when.total)
        if when.step < start:
            return DENSE
        fade = 0.0 if when.step >= end else self.decay(when.step - start, end - start)
        backward = fade if self.backward == "scaled" else 1.0
        return Stage(target, fade=fade, backward=backward, redraw=(when.step - start) % self.every == 0)

    def decay(self, step: int, steps: int) -> float:
        """D after `step` steps of a decay phase of `steps`."""
        if self.shape == "linear":
            return max(0.0, 1 - (self.rate if self.rate is not None else 1 / steps) * step)
        return math.exp(-(self.rate if self.rate is not None else -math.log(FAINT) / steps) * step)


def check_phases(dense: float, final: float, backward: str, every: int) -> None:
    """Raise UsageError for phases that do not fit into training, and for what decays do not know."""
    if min(dense, final) < 0 or dense + final > 1:
        raise UsageError(
            f"the dense and the final phase are shares of all steps, at most 1 together, not {dense}, {final}"
        )
    if backward not in BACKWARDS:
        raise UsageError(f"the backward is {' or '.join(BACKWARDS)}, not {backward!r}")
    if every < 1:
        raise UsageError(f"masks are drawn every so many steps, at least 1, not {every}")


def phase_bounds(dense: float, final: float, total: int) -> tuple[int, int]:
    """The first step of the middle phase, and of the final one."""
    start = round(dense * total)
    return start, max(start, total - round(final * total))
