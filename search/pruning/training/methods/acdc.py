"""AC/DC: phases under a mask and dense phases take turns (Peste et al. 2021); training ends under a mask.

A mask is drawn from the weights at the start of each compressed phase and holds through it. In a dense phase all
weights train, the dropped ones from zero, and the layers' momentum starts from zero. The defaults are the paper's for
ResNet50 in 100 epochs: dense to 10, then 5 and 5 in turns, dense from 75 to 85, compressed to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.pruner import DENSE, Pruner, Stage, When


@dataclass(frozen=True, kw_only=True, eq=False)
class ACDC(Pruner):
    """Lengths of phases as shares of all steps; `period` is that of one compressed, and of one dense phase."""

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
        """(first step, compressed) of each phase, in order; two in a row are never alike."""
        last_dense = 1 - self.final - self.last_dense
        found = [(0, False)]
        turns = 0
        while (start := self.warmup + turns * self.period) < last_dense - 1e-9:
            found.append((round(start * total), turns % 2 == 0))
            turns += 1
        found += [(round(last_dense * total), False), (round((1 - self.final) * total), True)]
        merged: list[tuple[int, bool]] = []
        for start, compressed in found:
            if merged and merged[-1][0] == start:  # a phase of no steps
                merged.pop()
            if not merged or merged[-1][1] != compressed:
                merged.append((start, compressed))
        return merged

    def stage(self, target: Target, when: When) -> Stage:
        """Of the phase that this step is in."""
        phases = self.phases(when.total)
        start, compressed = [phase for phase in phases if phase[0] <= when.step][-1]
        if compressed:
            return Stage(target, fixed=True, last=start == phases[-1][0])
        return Stage(forget=True) if start > 0 and when.step == start else DENSE

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where phases begin."""
        return (start for start, _ in self.phases(when.total))
