"""Gradual magnitude pruning (Zhu & Gupta 2017): the sparsity rises along a cubic curve while the model trains.

s(t) = final + (initial - final) (1 - (t - begin)/(end - begin))^3; dense before `begin`, and exactly `final` from
`end` on. Every update draws the mask among the remaining weights, so pruned weights stay pruned as far as the pattern
allows. An N:M pattern has one sparsity: its N falls step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage
from sparse_kernels.patterns import NM, VectorNM


def compute_cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """Return the sparsity after `step` optimizer steps: `initial` until `begin`, and exactly `final` from `end`."""
    if step >= end:
        return final
    if step <= begin:
        return initial
    return final + (initial - final) * (1 - (step - begin) / (end - begin)) ** 3


@dataclass(frozen=True, kw_only=True, eq=False)
class GMP(Pruner):
    """Gradual magnitude pruning.

    Parameters
    ----------
    begin, end : float
        First and last update of the masks, as shares of all steps.
    updates : int
        Number of updates, at equal distances.
    initial : float
        Sparsity of the first update.
    score : Score
        How much each weight matters.
    """

    begin: float = 0.0
    end: float = 0.5
    updates: int = 20
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= 1:
            raise UsageError(f"gradual pruning begins and ends within training, not from {self.begin} to {self.end}")
        if self.updates < 1:
            raise UsageError(f"masks are updated at least once, not {self.updates} times")
        if not 0 <= self.initial < 1:
            raise UsageError(f"the initial sparsity lies in [0, 1), not at {self.initial}")

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the stage of the latest update."""
        begin, end = round(self.begin * moment.total), round(self.end * moment.total)
        if moment.step >= end:
            return Stage(target, fixed_mask=True, last_mask=True)
        # Update number u of `updates` is due at the share u/updates of the interval.
        update = max(0, moment.step - begin) * self.updates // max(1, end - begin)
        due = begin + -(-update * (end - begin) // self.updates)
        current = build_intermediate_target(
            target, compute_cubic_sparsity(due, begin, end, target.sparsity, min(self.initial, target.sparsity))
        )
        return DENSE if current is None or moment.step < begin else Stage(current, fixed_mask=True)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the steps of the updates."""
        begin, end = round(self.begin * moment.total), round(self.end * moment.total)
        return (begin + -(-update * (end - begin) // self.updates) for update in range(self.updates + 1))


def build_intermediate_target(target: LayerTarget, sparsity: float) -> LayerTarget | None:
    """Return the target at an intermediate sparsity, at most its own; None for a dense one."""
    if sparsity >= target.sparsity:
        return target
    if not isinstance(target.pattern, NM | VectorNM):
        return replace(target, sparsity=sparsity) if sparsity > 0 else None
    keep = max(target.pattern.keep, math.ceil((1 - sparsity) * target.pattern.of))
    if keep == target.pattern.of:
        return None
    fuller = replace(target.pattern, keep=keep)
    return replace(target, pattern=fuller, sparsity=fuller.sparsity)
