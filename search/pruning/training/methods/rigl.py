"""RigL: sparse from the first step; small weights go, others come where the gradient is large (Evci et al. 2020).

Every `every` steps, until `until` of all, a share alpha/2 (1 + cos(pi t / end)) of a layer's weights is dropped by
w^2, and as many grow, from zero, by the square of the dense gradient of that step. Whole units of the pattern,
elements, vectors or blocks, are dropped and grown; N:M groups keep their N. `targets.erk` gives the paper's
densities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from latbench import MOST_SEED
from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_every
from search.pruning.training.pruner import Layer, Pruner, Stage, When
from sparse_kernels.nn import as_matrix
from sparse_kernels.patterns import NM, ShflBW, Unstructured, VectorNM, VectorWise
from sparse_kernels.shapes import Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class RigL(Pruner):
    """The first masks are drawn at random with `seed`, or by score from a model that is trained (`trained`)."""

    every: int = 100
    until: float = 0.75
    alpha: float = 0.3
    trained: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_every(self.every)
        if not 0 <= self.seed <= MOST_SEED:
            raise UsageError(f"RigL's seed is from 0 to {MOST_SEED}, not {self.seed}")
        if not 0 <= self.until <= 1 or not 0 <= self.alpha <= 1:
            raise UsageError("RigL's `until` and `alpha` are shares, from 0 to 1")

    def stage(self, target: Target, when: When) -> Stage:
        """Always under a mask; the gradient is dense in the step before an update."""
        return Stage(
            target,
            redraw=self.updates(when.step, when.total),
            fixed=not self.updates(when.step + 1, when.total),
            last=when.step >= self.until * when.total,
        )

    def updates(self, step: int, total: int) -> bool:
        """Whether masks change after `step` steps."""
        return 0 < step < self.until * total and step % self.every == 0

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """The updates, and the steps before them."""
        updates = range(self.every, math.ceil(self.until * when.total), self.every)
        return (step for update in updates for step in (update - 1, update))

    def refuses(self, target: Target, shape: Shape) -> str | None:
        """Row groups, which would have to stay while their members change."""
        return "RigL has no Shfl-BW; take vector, or another method" if isinstance(target.pattern, ShflBW) else None

    def observe(self, layer: Layer, gradient: Tensor) -> None:
        """Keep the dense gradient for the update that follows."""
        if self.updates(self.state.step + 1, self.state.total_steps):
            layer.seen = as_matrix(gradient).double().square()

    def draw(self, layer: Layer, target: Target) -> Tensor:
        """The first mask, or the next by dropping and growing."""
        weight = as_matrix(layer.values)
        if layer.mask is None and self.trained:
            return super().draw(layer, target)
        if layer.mask is None:
            generator = torch.Generator("cpu").manual_seed(self.seed + layer.number)
            random = torch.rand(weight.shape, dtype=torch.float64, generator=generator, device="cpu")
            return target.mask(random.to(weight.device))
        mask, gradient, layer.seen = as_matrix(layer.mask), layer.seen, None
        if gradient is None:  # a step that was skipped: nothing is known
            return mask
        share = self.alpha / 2 * (1 + math.cos(math.pi * self.state.step / (self.until * self.state.total_steps)))
        left = surviving(target, mask, weight.double().square(), share)
        # What is left outweighs what may grow: one weight another, and in a transposable tile, where one may stand in
        # the way of several, all that the tile keeps.
        pattern = target.pattern
        at_once = pattern.keep * pattern.of if target.along == "both" and isinstance(pattern, NM) else 1
        return target.mask(torch.where(left, 1.0 + at_once, gradient / gradient.max().clamp_min(1e-300)))


def surviving(target: Target, mask: Tensor, scores: Tensor, share: float) -> Tensor:
    """What is left of `mask` when a `share` of its units, those of least score, is dropped; all (m, k)."""
    # Every kept unit outweighs every other, however small its score: sums over a unit are between its size and twice.
    ranked = torch.where(mask, 1 + scores / scores.max().clamp_min(1e-300), 0.0)
    density = (1 - share) * float(mask.double().mean())
    if density == 0:  # of few and large units a mask may keep none
        return torch.zeros_like(mask)
    return mask & _units(target, 1 - density).mask(ranked)


def _units(target: Target, sparsity: float) -> Target:
    """What keeps or drops the same units, wherever they lie."""
    if isinstance(target.pattern, NM):
        return Target(Unstructured(), sparsity)
    pattern = VectorWise(target.pattern.v) if isinstance(target.pattern, VectorNM) else target.pattern
    return replace(target, pattern=pattern, sparsity=sparsity)
