"""Targets of layers: the pattern, the sparsity and the axis of N:M groups that each layer is pruned to.

resolve_targets(profile, model)                                  # a search.artifacts.profile.Profile
resolve_targets({"fc1": (NM(2, 4), 0.5)}, model)                 # by layer; "nm:2:4" is the same pattern
build_uniform_targets(model, "nm:1:16", 15 / 16, exclude=["head"])
build_erk_targets(model, "unstructured", 0.9)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.artifacts.profile import Profile
from search.pruning.masks.transposable import find_transposable_mask
from sparse_kernels.patterns import NM, Dense, Pattern, parse
from sparse_kernels.prunable_layers import FLOATS, find_geometry, refuse_layer, survey_layers, weight_matrix
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

GROUP_AXES = ("inputs", "outputs", "both")


@dataclass(frozen=True)
class LayerTarget:
    """What one layer is pruned to.

    Attributes
    ----------
    pattern : Pattern
        The sparsity pattern.
    sparsity : float
        Share of weights that are dropped, in [0, 1).
    along : {"inputs", "outputs", "both"}
        Direction of N:M groups. "inputs" groups consecutive columns of a row, as this project's kernels do. "outputs"
        groups consecutive rows of a column: groups of the transposed matrix, by which the input gradient is computed.
        "both" is transposable: at most N of M in either direction.
    exact : bool
        Whether transposable masks are optimal; False finds them by sorting.
    """

    pattern: Pattern
    sparsity: float
    along: str = "inputs"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.along not in GROUP_AXES:
            raise UsageError(f"groups run along {', '.join(GROUP_AXES)}, not along {self.along!r}")
        if self.along == "both" and not isinstance(self.pattern, NM):
            raise UsageError(f"only N:M masks can be transposable, not {self.pattern}")
        if not 0 <= self.sparsity < 1:
            raise UsageError(f"sparsity is the share of weights dropped, from 0 to below 1, not {self.sparsity}")
        implied = 0.0 if isinstance(self.pattern, Dense) else getattr(self.pattern, "sparsity", self.sparsity)
        if not math.isclose(implied, self.sparsity, abs_tol=1e-6):
            raise UsageError(f"{self.pattern} has sparsity {implied:g} and no other, not {self.sparsity:g}")

    def __str__(self) -> str:
        along = "" if self.along == "inputs" else f" along {self.along}"
        quick = "" if self.exact else ", quick"
        return f"{self.pattern} at {self.sparsity:.6g}{along}{quick}"

    @property
    def density(self) -> float:
        """Share of weights that are kept."""
        return 1 - self.sparsity

    def mask(self, scores: Tensor) -> Tensor:
        """Return the mask with the highest total score.

        Parameters
        ----------
        scores : Tensor of shape (m, k)
            Non-negative scores of the weights. Of equal scores the one with the lower index is kept.

        Returns
        -------
        bool Tensor of shape (m, k)
            True marks a kept weight; on the device of the scores.

        Raises
        ------
        BadData
            A score is not finite.
        ValueError
            The pattern cannot be drawn at this sparsity.
        """
        if not bool(torch.isfinite(scores).all()):
            raise BadData("the weights hold NaN or infinite values")
        if self.along == "outputs":
            return replace(self, along="inputs").mask(scores.T).T.contiguous()
        if self.along == "both":
            assert isinstance(self.pattern, NM)
            mask = find_transposable_mask(scores.double().cpu().numpy(), self.pattern, exact=self.exact)
        elif isinstance(self.pattern, NM):
            return _draw_nm_mask(scores, self.pattern)
        else:
            mask = self.pattern.mask(scores.double().cpu().contiguous().numpy(), self.sparsity)
        return torch.from_numpy(mask).to(scores.device)

    def refuses(self, shape: Shape) -> str | None:
        """Return why a layer of this shape cannot hold the target, or None."""
        if self.along != "outputs" and (reason := self.pattern.refuses(shape)) is not None:
            return reason
        of = getattr(self.pattern, "of", 1)
        if self.along == "both" and (shape.m % of or shape.k % of):
            return f"transposable {self.pattern} needs both sides in multiples of {of}, not {shape.m}x{shape.k}"
        return None


LayerTargets = Profile | Mapping[str, LayerTarget | tuple[Pattern | str, float]]


def resolve_targets(wanted: LayerTargets, model: nn.Module) -> dict[str, LayerTarget]:
    """Resolve the targets of layers and check them against the model. Dense targets are left out.

    Parameters
    ----------
    wanted : Profile or mapping of str to LayerTarget or (pattern, sparsity)
        Targets by layer.
    model : Module
        The model to prune.

    Returns
    -------
    dict of str to LayerTarget
        The layers to prune.

    Raises
    ------
    UsageError
        The message names a layer that cannot be pruned so. The model lacks it; it has no sparse kernel; its weight is
        shared with another module, such as an embedding, or computed; or its shape cannot hold the pattern.
    """
    if isinstance(wanted, Profile):
        wanted = {name: (choice.pattern, choice.sparsity) for name, choice in wanted.layers.items()}
    modules = dict(model.named_modules())
    survey = survey_layers(model, FLOATS)
    found: dict[str, LayerTarget] = {}
    for name, entry in wanted.items():
        if name not in modules:
            raise UsageError(f"the model has no layer {name!r}: it has {_format_names(list(survey.taken))}")
        if name not in survey.taken:
            raise UsageError(f"layer {name}: {survey.left_out.get(name) or refuse_layer(modules[name])}")
        target = parse_target(name, entry)
        if isinstance(target.pattern, Dense):
            continue
        if (reason := target.refuses(find_layer_shape(modules[name]))) is not None:
            raise UsageError(f"layer {name}: {reason}")
        found[name] = target
    return found


def build_uniform_targets(
    model: nn.Module, pattern: Pattern | str, sparsity: float, exclude: Collection[str] = ()
) -> dict[str, LayerTarget]:
    """Build the same target for every layer that can be pruned, but for those in `exclude`.

    Raises UsageError as `resolve_targets`.
    """
    _check_known(exclude, model)
    return resolve_targets(
        {name: (pattern, sparsity) for name in list_prunable_layers(model) if name not in exclude}, model
    )


def build_erk_targets(
    model: nn.Module, pattern: Pattern | str, sparsity: float, exclude: Collection[str] = ()
) -> dict[str, LayerTarget]:
    """Build Erdős–Rényi-kernel targets (Evci et al. 2020): thin layers keep a larger share of their weights.

    A convolution's density is proportional to (c_out + c_in + kh + kw) / (c_out c_in kh kw). A linear layer's density
    is proportional to (m + k) / (m k). Both are at most 1.

    Parameters
    ----------
    model : Module
        The model to prune.
    pattern : Pattern or str
        A pattern of any sparsity.
    sparsity : float
        Sparsity of all layers together, in [0, 1).
    exclude : collection of str
        Layers that stay dense.

    Returns
    -------
    dict of str to LayerTarget
        The layers to prune.

    Raises
    ------
    UsageError
        The pattern has one sparsity only (N:M), or the sparsity lies outside [0, 1).
    """
    if not 0 <= sparsity < 1:
        raise UsageError(f"sparsity is the share of weights dropped, from 0 to below 1, not {sparsity}")
    if hasattr(parsed := parse(pattern) if isinstance(pattern, str) else pattern, "sparsity"):
        raise UsageError(
            f"{parsed} has one sparsity, but layers need different ones: use build_uniform_targets() instead"
        )
    _check_known(exclude, model)
    modules = dict(model.named_modules())
    sizes = {name: modules[name].weight.shape for name in list_prunable_layers(model) if name not in exclude}
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
    return resolve_targets(wanted_layers, model)


def list_prunable_layers(model: nn.Module) -> list[str]:
    """List the names of the layers that have sparse kernels."""
    return list(survey_layers(model, FLOATS).taken)


def find_layer_shape(module: nn.Module) -> Shape:
    """Return the layer's shape; a convolution gets the smallest image that its kernel fits."""
    m, k = weight_matrix(module).shape
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return LinearShape(m, k, 0)
    kh, kw = find_geometry(module).kernel_size
    return Conv2dShape(1, module.in_channels, kh, kw, m, kh, kw)


def parse_target(name: str, entry: LayerTarget | tuple[Pattern | str, float]) -> LayerTarget:
    """Return the layer's entry as a LayerTarget. Raises UsageError, which names the layer, for a wrong entry."""
    if isinstance(entry, LayerTarget):
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
        return LayerTarget(parse(pattern) if isinstance(pattern, str) else pattern, sparsity)
    except (UsageError, ValueError) as error:
        raise UsageError(f"layer {name}: {error}") from error


def _check_known(exclude: Collection[str], model: nn.Module) -> None:
    known = dict(model.named_modules())
    for name in exclude:
        if name not in known:
            raise UsageError(
                f"the model has no layer {name!r} to exclude: it has {_format_names(list_prunable_layers(model))}"
            )


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _draw_nm_mask(scores: Tensor, pattern: NM) -> Tensor:
    """Return the N:M mask on the scores' device: masks that are drawn at every step must not pass through NumPy."""
    m, k = scores.shape
    whole = k - k % pattern.of
    mask = _select_top(scores[:, :whole].reshape(m, -1, pattern.of), pattern.keep).reshape(m, whole)
    if whole == k:
        return mask
    last = scores[:, whole:]
    return torch.cat([mask, _select_top(last, pattern.keeps_of(k - whole))], dim=1)


def _select_top(scores: Tensor, keep: int) -> Tensor:
    """Select the `keep` largest scores along the last dimension; of equal scores the one with the lower index."""
    if not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(keep, dim=-1).values[..., -1:]
    above, tied = scores > least, scores == least
    room = keep - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))
