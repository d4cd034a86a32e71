"""Structure decay: masks are always binary, and their structure tightens step by step (Kao et al. 2022).

"stepwise" goes through M-1:M, M/2:M, M/4:M ... N:M (1:16: 15, 8, 4, 2, 1). "geometric" goes through kN:kM ... N:M at
one sparsity (k = 8: 8:128, 4:64, 2:32, 1:16). A list gives the patterns. Each stage takes an equal share of the steps
between the dense and the final phase; the final phase is at N:M too. Other patterns than N:M go stepwise through the
sparsities 1/2, 3/4, 7/8 ... to their own.

Masks are drawn from dense weights that the pruner holds beside. "scaled" gives dropped weights no gradient, so they
return only when others shrink. "straight_through" gives them all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_decay, find_phase_bounds
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage
from sparse_kernels.patterns import NM, Pattern, VectorNM, parse
from sparse_kernels.shapes import Shape

LARGEST = 256  # columns of a group, the most of a pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class StructureDecay(Pruner):
    """Structure decay.

    Parameters
    ----------
    stages : {"stepwise", "geometric"} or tuple of str
        The structures before the target's; patterns such as ("nm:8:16", "nm:2:16").
    factor : int
        The geometric k, a power of two; less if kM would exceed 256 columns.
    dense, final : float
        First and last phase, as shares of all steps.
    backward : {"scaled", "straight_through"}
        Gradient of dropped weights.
    every : int
        Steps between two masks.
    score : Score
        How much each weight matters.
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
            densities = [1 - _parse_nm(text).sparsity for text in self.stages]
            if densities != sorted(densities, reverse=True):
                raise UsageError(
                    f"structure decay's stages tighten from one to the next, not {', '.join(self.stages)}"
                )
        if self.factor < 1 or self.factor & (self.factor - 1):
            raise UsageError(f"the geometric factor is a power of two, not {self.factor}")
        check_decay(self.dense, self.final, self.backward, self.every)

    def refuses(self, target: LayerTarget, shape: Shape) -> str | None:
        """Return why the layer cannot hold one of the structures, or None."""
        try:
            structures = self.list_structures(target)
        except UsageError as error:
            return str(error)
        refused = ((structure.pattern, structure.refuses(shape)) for structure in structures)
        return next((f"in structure decay's {pattern}: {reason}" for pattern, reason in refused if reason), None)

    def list_structures(self, target: LayerTarget) -> list[LayerTarget]:
        """Return the targets of the masks in order; the last is the target itself."""
        if not isinstance(self.stages, str):
            patterns = [_parse_nm(text) for text in self.stages]
            if patterns and (last := patterns[-1]).sparsity > target.sparsity:
                raise UsageError(f"structure decay's last stage {last} keeps less than the target {target}")
            return [*(replace(target, pattern=p, sparsity=p.sparsity) for p in patterns), target]
        pattern = target.pattern
        if self.stages == "stepwise":
            return _list_stepwise(target)
        if not isinstance(pattern, NM | VectorNM):
            raise UsageError(f"geometric structure decay is for N:M patterns, not {pattern}: let it be stepwise")
        factor = self.factor
        while factor * pattern.of > LARGEST:
            factor //= 2
        wider = []
        while factor > 1:
            wider.append(
                replace(target, pattern=replace(pattern, keep=factor * pattern.keep, of=factor * pattern.of))
            )
            factor //= 2
        return [*wider, target]

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense stage, then stages under tighter and tighter masks."""
        start, end = find_phase_bounds(self.dense, self.final, moment.total)
        if moment.step < start:
            return DENSE
        structures = self.list_structures(target)
        index = len(structures) - 1
        if moment.step < end:
            index = (moment.step - start) * len(structures) // (end - start)
        backward = 0.0 if self.backward == "scaled" else 1.0
        return Stage(structures[index], backward=backward, redraw=(moment.step - start) % self.every == 0)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the starts of the structures, and of the final phase."""
        start, end = find_phase_bounds(self.dense, self.final, moment.total)
        count = len(self.list_structures(target))
        return (start + -(-index * (end - start) // count) for index in range(count + 1))


def _list_stepwise(target: LayerTarget) -> list[LayerTarget]:
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


def _parse_nm(text: str) -> NM | VectorNM:
    try:
        pattern: Pattern = parse(text)
    except ValueError as error:
        raise UsageError(f"structure decay's stages: {error}") from error
    if not isinstance(pattern, NM | VectorNM):
        raise UsageError(f"structure decay's stages are N:M patterns, such as nm:8:16, not {text}")
    return pattern
