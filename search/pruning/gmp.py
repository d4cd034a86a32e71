"""Gradual magnitude pruning (Zhu & Gupta 2017): sparsity rises along a cubic while the model trains.

s(t) = final + (initial - final) (1 - (t - begin)/(end - begin))^3, from 0 before `begin` to exactly `final` from
`end` on. Masks are drawn anew from the magnitudes of the surviving weights at every update, and put back after
every optimizer step: momentum and weight decay cannot revive a pruned weight.

    gmp = GMP(model, {"fc1": (VectorWise(32), 0.75)}, begin=0, end=300, every=10)
    for step, batch in enumerate(batches):
        ... loss.backward(); optimizer.step()
        gmp.step(step)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from search.pruning.magnitude import magnitude
from search.pruning.masks import apply_masks
from sparse_kernels.nn import weight_matrix
from sparse_kernels.patterns import NM, Dense, Pattern, VectorNM


def cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """The sparsity after `step` optimizer steps: `initial` up to `begin`, exactly `final` from `end` on."""
    if step >= end:
        return final
    if step <= begin:
        return initial
    return final + (initial - final) * (1 - (step - begin) / (end - begin)) ** 3


class GMP:
    """Holds the masks of a model that is being pruned while it trains."""

    def __init__(
        self, model: nn.Module, targets: Mapping[str, tuple[Pattern, float]], *, begin: int, end: int, every: int = 10
    ) -> None:
        if not 0 <= begin <= end:
            raise ValueError(f"gradual pruning ends after it begins, not at {end} from {begin}")
        if every < 1:
            raise ValueError(f"masks are updated every so many steps, at least 1, not {every}")
        self.model = model
        self.targets = {name: target for name, target in targets.items() if not isinstance(target[0], Dense)}
        self.begin, self.end, self.every = begin, end, every
        self.masks: dict[str, Tensor] = {}
        self.finished = False

    def step(self, step: int) -> None:
        """Call after the optimizer's step number `step`, from 0: draws new masks if it is time, then applies them."""
        done = step + 1
        rising = self.begin < done < self.end and (done - self.begin) % self.every == 0
        if rising or (done >= self.end and not self.finished):
            self._update(done)
        apply_masks(self.model, self.masks)

    def _update(self, done: int) -> None:
        """Draw the masks that `done` finished steps ask for."""
        self.finished = done >= self.end
        modules = dict(self.model.named_modules())
        for name, (pattern, final) in self.targets.items():
            now, sparsity = _on_the_way(pattern, final, cubic_sparsity(done, self.begin, self.end, final))
            # Zero weights have the lowest score, so what is pruned stays pruned as far as the pattern allows.
            self.masks[name] = magnitude(weight_matrix(modules[name]), now, sparsity)


def _on_the_way(pattern: Pattern, final: float, sparsity: float) -> tuple[Pattern, float]:
    """The pattern and sparsity at an intermediate point: N:M has one sparsity, so its N falls step by step."""
    if not isinstance(pattern, NM | VectorNM) or sparsity == final:
        return pattern, sparsity
    keep = max(pattern.keep, math.ceil((1 - sparsity) * pattern.of))
    if keep == pattern.of:
        return Dense(), 0.0
    fuller = replace(pattern, keep=keep)
    return fuller, fuller.sparsity
