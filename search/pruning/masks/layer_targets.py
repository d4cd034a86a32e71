"""What each layer shall become: a pattern, a sparsity, and the axis along which N:M groups run.

targets = targets_of(profile, model)                       # a search.artifacts.profile.Profile: every layer its own
targets = targets_of({"fc1": (NM(2, 4), 0.5)}, model)      # by name; "nm:2:4" will do for the pattern
targets = uniform(model, "nm:1:16", 1 - 1 / 16, exclude=("head",))
targets = erk(model, "unstructured", 0.9)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.profile import Profile
from search.pruning.masks.transposable import transposable_mask
from sparse_kernels.nn import refuses, weight_matrix
from sparse_kernels.patterns import NM, Dense, Pattern, parse
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

ALONG = ("inputs", "outputs", "both")


@dataclass(frozen=True)
class Target:
    """What one layer shall become.

    N:M groups run along "inputs" (a row's consecutive columns, what the kernels of this project run), along "outputs"
    (a column's consecutive rows: the groups of the transposed matrix, which the input gradient multiplies by) or
    along "both" (transposable: at most N of M either way). Those are found exactly, or with `exact=False` by sorting.
    """

    pattern: Pattern
    sparsity: float
    along: str = "inputs"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.along not in ALONG:
            raise UsageError(f"groups run along {', '.join(ALONG)}, not along {self.along!r}")
        if self.along == "both" and not isinstance(self.pattern, NM):
            raise UsageError(f"only N:M masks can be transposable, not {self.pattern}")
        if not 0 <= self.sparsity < 1:
            raise UsageError(f"sparsity is the share of weights dropped, from 0 to below 1, not {self.sparsity}")
        one = 0.0 if isinstance(self.pattern, Dense) else getattr(self.pattern, "sparsity", self.sparsity)
        if not math.isclose(one, self.sparsity, abs_tol=1e-6):
            raise UsageError(f"{self.pattern} has sparsity {one:g} and no other, not {self.sparsity:g}")

    def __str__(self) -> str:
        along = "" if self.along == "inputs" else f" along {self.along}"
        quick = "" if self.exact else ", quick"
        return f"{self.pattern} at {self.sparsity:.6g}{along}{quick}"

    @property
    def density(self) -> float:
        """The share of weights that is kept."""
        return 1 - self.sparsity

    def mask(self, scores: Tensor) -> Tensor:
        """The best mask, bool (m, k), True = kept, for scores (m, k), not negative; on the scores' device.

        Ties go to the lower index. Raises BadData for scores that are not finite, ValueError as the pattern does.
        """
        if not bool(torch.isfinite(scores).all()):
            raise BadData("the weights hold NaN or infinite values")
        if self.along == "outputs":
            return replace(self, along="inputs").mask(scores.T).T.contiguous()
        if self.along == "both":
            assert isinstance(self.pattern, NM)
            found = transposable_mask(scores.double().cpu().numpy(), self.pattern, exact=self.exact)
        elif isinstance(self.pattern, NM):
            return _nm_mask(scores, self.pattern)
        else:
            found = self.pattern.mask(scores.double().cpu().contiguous().numpy(), self.sparsity)
        return torch.from_numpy(found).to(scores.device)

    def refuses(self, shape: Shape) -> str | None:
        """Why a layer of this shape cannot hold it, in a sentence; None if it can."""
        if self.along != "outputs" and (reason := self.pattern.refuses(shape)) is not None:
            return reason
        of = getattr(self.pattern, "of", 1)
        if self.along == "both" and (shape.m % of or shape.k % of):
            return f"transposable {self.pattern} needs both sides in multiples of {of}, not {shape.m}x{shape.k}"
        return None


Targets = Profile | Mapping[str, Target | tuple[Pattern | str, float]]


def targets_of(wanted: Targets, model: nn.Module) -> dict[str, Target]:
    """The layers to prune, checked against the model; dense ones are left out.

    Raises UsageError, naming the layer, for one that the model lacks, that has no sparse kernel, that shares its
    weight with any other module (such as an embedding) or computes it, or whose shape the pattern cannot hold.
    """
    if isinstance(wanted, Profile):
        wanted = {name: (choice.pattern, choice.sparsity) for name, choice in wanted.layers.items()}
    modules = dict(model.named_modules())
    found: dict[str, Target] = {}
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    for name, entry in wanted.items():
        if name not in modules:
            raise UsageError(f"the model has no layer {name!r}: it has {_some(prunable(model))}")
        if (reason := refuses(modules[name])) is not None:
            raise UsageError(f"layer {name}: {reason}")
        target = target_of(name, entry)
        if isinstance(target.pattern, Dense):
            continue
        weight = modules[name]._parameters.get("weight")
        if weight is None:
            raise UsageError(f"layer {name}: its weight is computed by a parametrization; remove that first")
        if others := [other for other in owners[id(weight)] if other != name]:
            raise UsageError(
                f"layer {name}: its weight is shared with {', '.join(others)}, where it would be pruned too: "
                "leave the layer out, or give it a weight of its own"
            )
        if (reason := target.refuses(shape_of(modules[name]))) is not None:
            raise UsageError(f"layer {name}: {reason}")
        found[name] = target
    return found


def uniform(
    model: nn.Module, pattern: Pattern | str, sparsity: float, exclude: Collection[str] = ()
) -> dict[str, Target]:
    """The same for every layer that can be pruned, but those in `exclude`. Raises UsageError as `targets_of` does."""
    _check_known(exclude, model)
    return targets_of({name: (pattern, sparsity) for name in prunable(model) if name not in exclude}, model)


def erk(
    model: nn.Module, pattern: Pattern | str, sparsity: float, exclude: Collection[str] = ()
) -> dict[str, Target]:
    """Erdős–Rényi-kernel densities (Evci et al. 2020): thin layers keep more; `sparsity` is of all layers together.

    A layer's density is proportional to (c_out + c_in + kh + kw) / (c_out c_in kh kw), a linear layer's to
    (m + k) / (m k), and is 1 where that would exceed 1. Raises UsageError for patterns with one sparsity (N:M), and
    for a sparsity that is no share.
    """
    if not 0 <= sparsity < 1:
        raise UsageError(f"sparsity is the share of weights dropped, from 0 to below 1, not {sparsity}")
    if hasattr(chosen := parse(pattern) if isinstance(pattern, str) else pattern, "sparsity"):
        raise UsageError(f"{chosen} has one sparsity, and layers are to have sparsities of their own: use uniform()")
    _check_known(exclude, model)
    modules = dict(model.named_modules())
    sizes = {name: modules[name].weight.shape for name in prunable(model) if name not in exclude}
    raw = {name: sum(size) / math.prod(size) for name, size in sizes.items()}
    full: set[str] = set()
    scale = 0.0
    while len(full) < len(sizes):
        left = [name for name in sizes if name not in full]
        wanted = (1 - sparsity) * sum(map(math.prod, sizes.values())) - sum(math.prod(sizes[name]) for name in full)
        scale = wanted / sum(raw[name] * math.prod(sizes[name]) for name in left)
        over = {name for name in left if scale * raw[name] > 1}
        if not over:
            break
        full |= over
    wanted_layers = {name: (pattern, 1 - scale * raw[name]) for name in sizes if name not in full}
    return targets_of(wanted_layers, model)


def prunable(model: nn.Module) -> list[str]:
    """The names of the layers that have sparse kernels."""
    return [name for name, module in model.named_modules() if refuses(module) is None]


def shape_of(module: nn.Module) -> Shape:
    """The layer's shape; of a convolution on the smallest image that its kernel fits."""
    m, k = weight_matrix(module).shape
    if isinstance(module, nn.Linear):
        return LinearShape(m, k, 0)
    assert isinstance(module, nn.Conv2d)
    kh, kw = module.kernel_size
    return Conv2dShape(1, module.in_channels, kh, kw, m, kh, kw)


def target_of(name: str, entry: Target | tuple[Pattern | str, float]) -> Target:
    """The layer's entry as a Target. Raises UsageError, naming the layer, where it cannot be one."""
    if isinstance(entry, Target):
        return entry
    try:
        pattern, sparsity = entry
        if not (isinstance(pattern, Pattern | str) and isinstance(sparsity, float | int)):
            raise TypeError
    except (TypeError, ValueError):
        raise UsageError(
            f"layer {name}: a target is a pattern and a sparsity, ('nm:2:4', 0.5), not {entry!r}"
        ) from None
    try:
        return Target(parse(pattern) if isinstance(pattern, str) else pattern, sparsity)
    except (UsageError, ValueError) as error:
        raise UsageError(f"layer {name}: {error}") from error


def _check_known(exclude: Collection[str], model: nn.Module) -> None:
    known = dict(model.named_modules())
    for name in exclude:
        if name not in known:
            raise UsageError(f"the model has no layer {name!r} to exclude: it has {_some(prunable(model))}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _nm_mask(scores: Tensor, pattern: NM) -> Tensor:
    """`NM.mask` on the scores' device: masks that are drawn at every step must not pass through NumPy."""
    m, k = scores.shape
    whole = k - k % pattern.of
    mask = _top(scores[:, :whole].reshape(m, -1, pattern.of), pattern.keep).reshape(m, whole)
    if whole == k:
        return mask
    last = scores[:, whole:]
    return torch.cat([mask, _top(last, pattern.keeps_of(k - whole))], dim=1)


def _top(scores: Tensor, keep: int) -> Tensor:
    """The `keep` largest along the last dimension; ties go to the lower index."""
    if not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(keep, dim=-1).values[..., -1:]
    above, tied = scores > least, scores == least
    room = keep - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))
