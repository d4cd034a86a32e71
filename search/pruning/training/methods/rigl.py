"""RigL: sparse from the first step; small weights are dropped, and others grow by their gradient (Evci et al. 2020).

Every `every` steps, until the share `until` of all steps, a share of a layer's weights is dropped by w^2. The share
is alpha/2 (1 + cos(pi t / end)). As many weights grow, from zero, by the square of the dense gradient of that step.
Whole units of the pattern (elements, vectors or blocks) are dropped and grown; N:M groups keep their N.
`layer_targets.build_erk_targets` gives the paper's densities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from latbench import MOST_SEED
from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_every
from search.pruning.training.pruner import Moment, PrunedLayer, Pruner, Stage
from sparse_kernels.patterns import NM, ShflBW, Unstructured, VectorNM, VectorWise
from sparse_kernels.prunable_layers import as_matrix
from sparse_kernels.shapes import Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class RigL(Pruner):
    """RigL.

    Parameters
    ----------
    every : int
        Steps between two updates of the masks.
    until : float
        End of the updates, as a share of all steps.
    alpha : float
        Share of weights that the first update drops.
    trained : bool
        Whether the first mask is drawn by score, from a trained model. Otherwise it is random.
    seed : int
        Seed of the random masks.
    score : Score
        How much each weight matters, for the first mask.
    """

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

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the masked stage; the gradient is dense in the step before an update."""
        return Stage(
            target,
            redraw=self.is_update(moment.step, moment.total),
            fixed_mask=not self.is_update(moment.step + 1, moment.total),
            last_mask=moment.step >= self.until * moment.total,
        )

    def is_update(self, step: int, total: int) -> bool:
        """Return whether masks change after `step` steps."""
        return 0 < step < self.until * total and step % self.every == 0

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the steps of the updates, and the steps before them."""
        updates = range(self.every, math.ceil(self.until * moment.total), self.every)
        return (step for update in updates for step in (update - 1, update))

    def refuses(self, target: LayerTarget, shape: Shape) -> str | None:
        """Return why Shfl-BW is refused: its row groups would have to stay while their members change."""
        return "RigL has no Shfl-BW; take vector, or another method" if isinstance(target.pattern, ShflBW) else None

    def observe(self, layer: PrunedLayer, gradient: Tensor) -> None:
        """Keep the dense gradient for the next update."""
        if self.is_update(self.state.step + 1, self.state.total_steps):
            layer.squared_gradient = as_matrix(layer.module, gradient).double().square()

    def draw(self, layer: PrunedLayer, target: LayerTarget) -> Tensor:
        """Return the first mask, or the next one by dropping and growing."""
        weight = as_matrix(layer.module, layer.values)
        if layer.mask is None and self.trained:
            return super().draw(layer, target)
        if layer.mask is None:
            generator = torch.Generator("cpu").manual_seed(self.seed + layer.number)
            random = torch.rand(weight.shape, dtype=torch.float64, generator=generator, device="cpu")
            return target.mask(random.to(weight.device))
        mask, gradient, layer.squared_gradient = as_matrix(layer.module, layer.mask), layer.squared_gradient, None
        if gradient is None:  # a skipped step has no gradient
            return mask
        share = self.alpha / 2 * (1 + math.cos(math.pi * self.state.step / (self.until * self.state.total_steps)))
        remaining = drop_smallest_units(target, mask, weight.double().square(), share)
        # A remaining weight outweighs any that may grow. In a transposable tile one weight may block several: there
        # it outweighs all that the tile keeps.
        pattern = target.pattern
        outweighed = pattern.keep * pattern.of if target.along == "both" and isinstance(pattern, NM) else 1
        return target.mask(torch.where(remaining, 1.0 + outweighed, gradient / gradient.max().clamp_min(1e-300)))


def drop_smallest_units(target: LayerTarget, mask: Tensor, scores: Tensor, share: float) -> Tensor:
    """Return `mask` (m, k) without the share `share` of its units, those of the lowest scores (m, k)."""
    # Every kept unit outweighs every other one, because its sum lies between its size and twice that.
    ranked = torch.where(mask, 1 + scores / scores.max().clamp_min(1e-300), 0.0)
    density = (1 - share) * float(mask.double().mean())
    if density == 0:  # a mask of few and large units may keep none
        return torch.zeros_like(mask)
    return mask & _build_unit_target(target, 1 - density).mask(ranked)


def _build_unit_target(target: LayerTarget, sparsity: float) -> LayerTarget:
    """Return a target whose pattern has the same units, at any position."""
    if isinstance(target.pattern, NM):
        return LayerTarget(Unstructured(), sparsity)
    pattern = VectorWise(target.pattern.v) if isinstance(target.pattern, VectorNM) else target.pattern
    return replace(target, pattern=pattern, sparsity=sparsity)
