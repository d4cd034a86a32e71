"""Structure decay: masks are binary all the time, and their structure tightens step by step (Kao et al. 2022).

stepwise: M-1:M, M/2:M, M/4:M ... N:M (1:16: 15, 8, 4, 2, 1); geometric: kN:kM ... N:M at one sparsity (k = 8: 8:128,
4:64, 2:32, 1:16); or a list of patterns. Each stage takes an equal share of the steps between the dense and the final
phase, which is at N:M too. Other patterns than N:M go stepwise through the sparsities 1/2, 3/4, 7/8 ... to their own.

Masks are drawn from dense weights that live on behind them. "scaled" gives dropped weights no gradient (they come
back when others shrink), "straight_through" all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_decay, phase_bounds
from search.pruning.training.pruner import DENSE, Pruner, Stage, When
from sparse_kernels.patterns import NM, Pattern, VectorNM, parse
from sparse_kernels.shapes import Shape

LARGEST = 256  # columns of a group, as patterns have it


@dataclass(frozen=True, kw_only=True, eq=False)
class StructureDecay(Pruner):
    """`stages` is "stepwise", "geometric" or patterns, as ("nm:8:16", "nm:2:16"), to go through before the target's.

    `factor` is the geometric k, less where kM would exceed 256 columns. `dense` and `final` are the first and last
    phase, as shares of all steps. Masks are drawn every `every` steps.
    """

    keeps_dense: ClassVar[bool] = True
    stages: str | tuple[str, ...] = "stepwise"
    factor: int = 8
    dense: float = 0.1
    final: float = 0.2
    backward: str = "scaled"
    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stages, str):
            if self.stages not in ("stepwise", "geometric"):
                raise UsageError(f"stages are stepwise, geometric or a list of patterns, not {self.stages!r}")
        else:
            densities = [1 - _pattern(text).sparsity for text in self.stages]
            if densities != sorted(densities, reverse=True):
                raise UsageError(
                    f"structure decay's stages tighten from one to the next, not {', '.join(self.stages)}"
                )
        if self.factor < 1 or self.factor & (self.factor - 1):
            raise UsageError(f"the geometric factor is a power of two, not {self.factor}")
        check_decay(self.dense, self.final, self.backward, self.every)

    def refuses(self, target: Target, shape: Shape) -> str | None:
        """What the layer could not be at the end of the dense phase, or later on."""
        try:
            structures = self.structures(target)
        except UsageError as error:
            return str(error)
        refused = ((structure.pattern, structure.refuses(shape)) for structure in structures)
        return next((f"in structure decay's {pattern}: {reason}" for pattern, reason in refused if reason), None)

    def structures(self, target: Target) -> list[Target]:
        """What the mask is drawn for in turn; the last is the target."""
        if not isinstance(self.stages, str):
            patterns = [_pattern(text) for text in self.stages]
            if patterns and (last := patterns[-1]).sparsity > target.sparsity:
                raise UsageError(f"structure decay's last stage {last} keeps less than the target {target}")
            return [*(replace(target, pattern=p, sparsity=p.sparsity) for p in patterns), target]
        pattern = target.pattern
        if self.stages == "stepwise":
            return _stepwise(target)
        if not isinstance(pattern, NM | VectorNM):
            raise UsageError(f"geometric structure decay is for N:M patterns, not {pattern}: let it be stepwise")
        factor = self.factor
        while factor * pattern.of > LARGEST:
            factor //= 2
        found = []
        while factor > 1:
            found.append(
                replace(target, pattern=replace(pattern, keep=factor * pattern.keep, of=factor * pattern.of))
            )
            factor //= 2
        return [*found, target]

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, then under ever tighter masks."""
        start, end = phase_bounds(self.dense, self.final, when.total)
        if when.step < start:
            return DENSE
        structures = self.structures(target)
        place = len(structures) - 1 if when.step >= end else (when.step - start) * len(structures) // (end - start)
        backward = 0.0 if self.backward == "scaled" else 1.0
        return Stage(structures[place], backward=backward, redraw=(when.step - start) % self.every == 0)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where each structure begins, the last again with the final phase."""
        start, end = phase_bounds(self.dense, self.final, when.total)
        count = len(self.structures(target))
        return (start + -(-place * (end - start) // count) for place in range(count + 1))


def _stepwise(target: Target) -> list[Target]:
    pattern = target.pattern
    if not isinstance(pattern, NM | VectorNM):
        densities = [1 / 2]
        while densities[-1] / 2 > target.density:
            densities.append(densities[-1] / 2)
        return [*(replace(target, sparsity=1 - d) for d in densities if d > target.density), target]
    keeps = [pattern.of - 1]
    half = pattern.of // 2
    while half > pattern.keep:
        keeps.append(half)
        half //= 2
    fuller = [replace(pattern, keep=keep) for keep in keeps if keep > pattern.keep]
    return [*(replace(target, pattern=p, sparsity=p.sparsity) for p in fuller), target]


def _pattern(text: str) -> NM | VectorNM:
    try:
        pattern: Pattern = parse(text)
    except ValueError as error:
        raise UsageError(f"structure decay's stages: {error}") from error
    if not isinstance(pattern, NM | VectorNM):
        raise UsageError(f"structure decay's stages are N:M patterns, such as nm:8:16, not {text}")
    return pattern
