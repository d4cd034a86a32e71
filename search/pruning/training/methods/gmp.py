"""Gradual magnitude pruning (Zhu & Gupta 2017): sparsity rises along a cubic while the model trains.

s(t) = final + (initial - final) (1 - (t - begin)/(end - begin))^3, dense before `begin` and exactly `final` from
`end` on. Masks are drawn anew among the surviving weights at every update, so what is pruned stays pruned as far as
the pattern allows. N:M patterns have one sparsity: their N falls step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.pruner import DENSE, Pruner, Stage, When
from sparse_kernels.patterns import NM, VectorNM


def cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """The sparsity after `step` optimizer steps: `initial` up to `begin`, exactly `final` from `end` on."""
    if step >= end:
        return final
    if step <= begin:
        return initial
    return final + (initial - final) * (1 - (step - begin) / (end - begin)) ** 3


@dataclass(frozen=True, kw_only=True, eq=False)
class GMP(Pruner):
    """From `begin` to `end`, as shares of all steps, masks are updated `updates` times at even distances."""

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

    def stage(self, target: Target, when: When) -> Stage:
        """The target of the latest update."""
        begin, end = round(self.begin * when.total), round(self.end * when.total)
        if when.step >= end:
            return Stage(target, fixed=True, last=True)
        # The update that came last: number u of `updates` is due u/updates of the way.
        update = max(0, when.step - begin) * self.updates // max(1, end - begin)
        due = begin + -(-update * (end - begin) // self.updates)
        now = on_the_way(target, cubic_sparsity(due, begin, end, target.sparsity, min(self.initial, target.sparsity)))
        return DENSE if now is None or when.step < begin else Stage(now, fixed=True)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """The updates, and the end of them."""
        begin, end = round(self.begin * when.total), round(self.end * when.total)
        return (begin + -(-update * (end - begin) // self.updates) for update in range(self.updates + 1))


def on_the_way(target: Target, sparsity: float) -> Target | None:
    """The target at an intermediate sparsity, at most its own; None while that is dense."""
    if sparsity >= target.sparsity:
        return target
    if not isinstance(target.pattern, NM | VectorNM):
        return replace(target, sparsity=sparsity) if sparsity > 0 else None
    keep = max(target.pattern.keep, math.ceil((1 - sparsity) * target.pattern.of))
    if keep == target.pattern.of:
        return None
    fuller = replace(target.pattern, keep=keep)
    return replace(target, pattern=fuller, sparsity=fuller.sparsity)
