"""Scheduled grow-and-prune: partitions of the layers take turns to be dense (Ma et al. 2022).

The layers are divided into `partitions` runs. In its turn a partition is dense, and its dropped weights train from
zero. At the end of the turn it is pruned again by magnitude. After `rounds` of turns all layers train under their
masks. Shfl-BW was trained so (Huang et al., DAC 2022): its row groups are found again each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.pruner import Moment, Pruner, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowAndPrune(Pruner):
    """Scheduled grow-and-prune.

    Parameters
    ----------
    partitions : int
        Number of partitions of the layers.
    rounds : int
        Turns of each partition.
    final : float
        Share of all steps, at the end, in which every mask stays.
    score : Score
        How much each weight matters.
    """

    partitions: int = 4
    rounds: int = 2
    final: float = 0.3

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.rounds < 1:
            raise UsageError("grow-and-prune takes at least one partition and one round")
        if not 0 <= self.final <= 1:
            raise UsageError(f"the final phase is a share of all steps, from 0 to 1, not {self.final}")

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense stage during the partition's turn, and the masked stage otherwise."""
        partitions, turns, growing = self._count_turns(moment)
        if moment.step >= growing:
            return Stage(target, fixed_mask=True, last_mask=True)
        turn = moment.step * turns // growing
        if turn % partitions != moment.layer * partitions // moment.layers:
            return Stage(target, fixed_mask=True)
        first = -(-turn * growing // turns)
        return Stage(reset_momentum=0 < moment.step == first)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the starts of turns and of the final phase."""
        _, turns, growing = self._count_turns(moment)
        return (-(-turn * growing // turns) for turn in range(turns + 1))

    def _count_turns(self, moment: Moment) -> tuple[int, int, int]:
        """Return the partitions, the turns of all of them, and the steps that the turns take."""
        partitions = min(self.partitions, moment.layers)
        return partitions, partitions * self.rounds, moment.total - round(self.final * moment.total)
