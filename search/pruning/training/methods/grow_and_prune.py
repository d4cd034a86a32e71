"""Scheduled grow-and-prune: the layers' partitions take turns to be dense (Ma et al. 2022).

The layers fall into `partitions` runs. One is grown to dense, its dropped weights training from zero, and pruned
again by magnitude when its turn ends; after `rounds` of turns all train on under their masks. What Shfl-BW was
trained with (Huang et al., DAC 2022): row groups are found anew each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.pruner import Pruner, Stage, When


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowAndPrune(Pruner):
    """`final` is the share of all steps, at the end, in which every mask stays."""

    partitions: int = 4
    rounds: int = 2
    final: float = 0.3

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.rounds < 1:
            raise UsageError("grow-and-prune takes at least one partition and one round")
        if not 0 <= self.final <= 1:
            raise UsageError(f"the final phase is a share of all steps, from 0 to 1, not {self.final}")

    def stage(self, target: Target, when: When) -> Stage:
        """Dense while its partition's turn lasts, else under a mask."""
        partitions, turns, growing = self._turns(when)
        if when.step >= growing:
            return Stage(target, fixed=True, last=True)
        turn = when.step * turns // growing
        if turn % partitions != when.layer * partitions // when.layers:
            return Stage(target, fixed=True)
        first = -(-turn * growing // turns)
        return Stage(forget=0 < when.step == first)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where turns begin, and the final phase."""
        _, turns, growing = self._turns(when)
        return (-(-turn * growing // turns) for turn in range(turns + 1))

    def _turns(self, when: When) -> tuple[int, int, int]:
        """The partitions, the turns of all of them, and the steps that those take."""
        partitions = min(self.partitions, when.layers)
        return partitions, partitions * self.rounds, when.total - round(self.final * when.total)
