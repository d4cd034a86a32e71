"""AC/DC: compressed phases under a mask and dense phases alternate (Peste et al. 2021); the last phase is compressed.

A mask is drawn from the weights at the start of each compressed phase and holds through it. In a dense phase all
weights train, the dropped ones from zero, and the layers' momentum starts from zero. The defaults are the paper's for
ResNet50 in 100 epochs: dense to 10, then 5 and 5 in turns, dense from 75 to 85, compressed to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class ACDC(Pruner):
    """AC/DC; lengths of phases are shares of all steps.

    Parameters
    ----------
    warmup : float
        First dense phase.
    period : float
        Each compressed phase, and each dense one.
    last_dense : float
        Last dense phase.
    final : float
        Last compressed phase.
    score : Score
        How much each weight matters.
    """

    warmup: float = 0.10
    period: float = 0.05
    last_dense: float = 0.10
    final: float = 0.15

    def __post_init__(self) -> None:
        if min(self.warmup, self.last_dense, self.final) < 0 or self.period <= 0:
            raise UsageError("AC/DC's phases are shares of all steps: not negative, and the period above 0")
        if self.warmup + self.last_dense + self.final > 1 + 1e-9:
            raise UsageError("AC/DC's first, last dense and final phases take more than all steps")

    def phases(self, total: int) -> list[tuple[int, bool]]:
        """Return the first step of each phase in order, and whether it is compressed; phases alternate."""
        last_dense = 1 - self.final - self.last_dense
        starts = [(0, False)]
        turns = 0
        while (start := self.warmup + turns * self.period) < last_dense - 1e-9:
            starts.append((round(start * total), turns % 2 == 0))
            turns += 1
        starts += [(round(last_dense * total), False), (round((1 - self.final) * total), True)]
        merged: list[tuple[int, bool]] = []
        for start, compressed in starts:
            if merged and merged[-1][0] == start:  # a phase without steps
                merged.pop()
            if not merged or merged[-1][1] != compressed:
                merged.append((start, compressed))
        return merged

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the stage of the current phase."""
        phases = self.phases(moment.total)
        start, compressed = [phase for phase in phases if phase[0] <= moment.step][-1]
        if compressed:
            return Stage(target, fixed_mask=True, last_mask=start == phases[-1][0])
        return Stage(reset_momentum=True) if start > 0 and moment.step == start else DENSE

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the starts of phases."""
        return (start for start, _ in self.phases(moment.total))
