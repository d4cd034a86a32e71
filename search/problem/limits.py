"""Limits on a search: what a user requires of the layers of a model, whatever it costs.

    tied:                          # one option for all layers of a group
      - [layer1.0.conv2, layer1.1.conv2, layer1.0.downsample]
    tied_in_each:                  # the same, with one group for each text that the stars stand for
      - ["encoder.*.query", "encoder.*.key", "encoder.*.value"]
    fixed: {fc1: "vector:32 at 0.75", "*.output": dense}
    minimum: {"encoder.*": 0.5}    # sparsities
    maximum: {"*.query": 0.9}
    patterns: {"*.value": [vector:32, "nm:2:4"]}    # only these, and dense
    excluded: [pooler, "encoder.0.*"]    # stay dense; their time counts

A key names layers directly or by a glob (`*`, `?`, `[seq]`, as in fnmatch). If several limits name a layer, all of
them hold. A glob does not match excluded layers. A name or glob that matches no layer is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from latbench.base.declared_keys import (
    NAMES,
    Kind,
    MalformedDocument,
    check_mapping,
    declare,
    list_declared,
    list_of,
    named_in_errors,
    number,
    pairs_of,
    refuse,
)
from latbench.errors import UsageError
from search.problem.layer_globs import match_glob, match_layers
from search.problem.layers import CLOSE, DENSE, LayerOptions, Option, build_option, format_names, tie_layers
from sparse_kernels.patterns import parse

Group = tuple[str, ...]


def _parse_option(value: Any, what: str) -> Option:
    """Return an option from its text in limits: `dense`, `nm:2:4`, `vector:32 at 0.75`."""
    if isinstance(value, Option):
        return value
    if not isinstance(value, str):
        raise refuse(value, what, _OPTION_PHRASE)
    spec, _, text = (part.strip() for part in value.partition(" at "))
    try:
        sparsity: Any = float(text) if text else None
    except ValueError:
        sparsity = text
    try:
        return build_option(spec, None if sparsity is None else _SPARSITY.parse(sparsity, f"the sparsity of {what}"))
    except ValueError as error:
        raise MalformedDocument(f"{what}: {error}") from error


def _parse_patterns(value: Any, what: str) -> Group:
    """Return patterns in their canonical text."""
    try:
        return tuple(str(parse(spec)) for spec in NAMES.parse([value] if isinstance(value, str) else value, what))
    except ValueError as error:
        raise MalformedDocument(f"{what}: {error}") from error


_OPTION_PHRASE = "a pattern and its sparsity, such as `vector:32 at 0.75`"
_GROUPS = list_of(NAMES, "a list of groups, which are lists of layers")
_SPARSITY = number(least=0, most=1)
_SPARSITIES = pairs_of(_SPARSITY, "a mapping from layers to sparsities")
_OPTIONS = pairs_of(Kind(_OPTION_PHRASE, _parse_option), "a mapping from layers to a pattern and its sparsity")
_PATTERNS = pairs_of(Kind("patterns", _parse_patterns), "a mapping from layers to lists of patterns")


def _list_grouped(groups: Iterable[Group]) -> list[str]:
    """Return the globs in groups."""
    return [glob for group in groups for glob in group]


def _list_paired(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the globs in pairs of a glob and what holds for its layers."""
    return [glob for glob, _ in pairs]


def _list_none(names: Group) -> list[str]:
    """Return no globs: excluded layers are matched before the others."""
    return []


@dataclass(frozen=True)
class Limits:
    """Limits on a search; the module's docstring shows the keys of a file.

    Attributes
    ----------
    tied
        Groups of names or globs. The layers of a group share one option.
    tied_in_each
        The same, with one group for each text that the wildcards stand for.
    fixed
        Pairs (glob, option): the only option of these layers.
    minimum, maximum
        Pairs (glob, sparsity).
    patterns
        Pairs (glob, patterns): the patterns to allow, besides dense.
    excluded
        Names or globs of layers that stay dense. Their time counts.
    """

    tied: tuple[Group, ...] = declare((), _GROUPS, "Groups of layers that share one option", globs=_list_grouped)
    tied_in_each: tuple[Group, ...] = declare(
        (), _GROUPS, "The same, with one group for each text that the wildcards stand for", globs=_list_grouped
    )
    fixed: tuple[tuple[str, Option], ...] = declare(
        (), _OPTIONS, "The only option of these layers", globs=_list_paired
    )
    minimum: tuple[tuple[str, float], ...] = declare(
        (), _SPARSITIES, "Lowest sparsity of these layers", globs=_list_paired
    )
    maximum: tuple[tuple[str, float], ...] = declare(
        (), _SPARSITIES, "Highest sparsity of these layers", globs=_list_paired
    )
    patterns: tuple[tuple[str, Group], ...] = declare(
        (), _PATTERNS, "Patterns to allow, besides dense", globs=_list_paired
    )
    excluded: tuple[str, ...] = declare((), NAMES, "Layers that stay dense; their time counts", globs=_list_none)

    def __add__(self, other: Limits) -> Limits:
        """Return limits that combine both."""
        return Limits(*(getattr(self, it.name) + getattr(other, it.name) for it in fields(self)))

    def select_included(self, names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
        """Return the layers among `names` that are not excluded.

        Parameters
        ----------
        names
            Layers that can be pruned.
        others
            Layers that cannot be pruned. To exclude them is no mistake.

        Raises
        ------
        UsageError
            An entry of `excluded` matches no layer.
        """
        excluded = {name for glob in self.excluded for name in match_layers(glob, [*names, *others], "excluded")}
        return [name for name in names if name not in excluded]

    def apply(self, layers: Sequence[LayerOptions], excluded: Collection[str] = ()) -> tuple[LayerOptions, ...]:
        """Return the layers with the options that the limits allow, and tied as they require.

        Parameters
        ----------
        layers
            The layers of a problem without the excluded ones.
        excluded
            Names of the excluded layers, for messages.

        Raises
        ------
        UsageError
            A name matches nothing, limits contradict each other, or a layer is left without an option.
        """
        parts = {part.name: part for layer in layers for part in layer.parts}
        names = list(parts)
        matches: dict[str, set[str]] = {}
        for limit in fields(self):
            for glob in limit.metadata["globs"](getattr(self, limit.name)):
                if glob in excluded:
                    raise UsageError(f"layer {glob} is excluded, and {limit.name} names it")
                matches[glob] = match_layers(glob, names, limit.name)
        already = [{part.name for part in layer.tied} for layer in layers]
        limited = {name: self._limit_options(part, matches) for name, part in parts.items()}
        return tuple(_tie_groups(limited, _join_groups([*already, *self._list_groups(names, matches)])))

    def _limit_options(self, layer: LayerOptions, matches: Mapping[str, set[str]]) -> LayerOptions:
        """Return the layer with the options that it may have; `matches` holds the layers of each glob."""

        def select(limit: Iterable[tuple[str, Any]]) -> list[Any]:
            return [value for glob, value in limit if layer.name in matches[glob]]

        low, high = max(select(self.minimum), default=0.0), min(select(self.maximum), default=1.0)
        if low > high + CLOSE:
            raise UsageError(f"layer {layer.name} must have a sparsity of at least {low:g} and of at most {high:g}")
        allowed = select(self.patterns)
        fixed = select(self.fixed)
        if len({(it.pattern, round(it.sparsity, 6)) for it in fixed}) > 1:
            raise UsageError(f"layer {layer.name} is fixed to {' and to '.join(map(str, fixed))}")

        def is_allowed(own: Option) -> bool:
            return (
                low - CLOSE <= own.sparsity <= high + CLOSE
                and all(own.pattern in (DENSE, *patterns) for patterns in allowed)
                and all(own.is_close(it) for it in fixed)
            )

        indices = [j for j, own in enumerate(layer.options) if is_allowed(own)]
        if not indices:
            raise UsageError(
                f"the limits leave layer {layer.name} no option: it has {format_names(map(str, layer.options), 20)}"
            )
        return layer if len(indices) == len(layer.options) else layer.take(indices)

    def _list_groups(self, names: Sequence[str], matches: Mapping[str, set[str]]) -> list[set[str]]:
        """Return the sets of layers that the limits tie."""
        groups = [{name for glob in group for name in matches[glob]} for group in self.tied]
        for globs in self.tied_in_each:
            by_stars: dict[tuple[str, ...], set[str]] = {}
            for glob in globs:
                for name, stars in match_glob(glob, names):
                    by_stars.setdefault(stars, set()).add(name)
            groups += by_stars.values()
        return groups


LIMIT_KEYS = list_declared(Limits)
"""The keys of a file of limits."""


def _join_groups(groups: Sequence[set[str]]) -> list[set[str]]:
    """Return the groups of two or more layers; groups that share a layer become one."""
    joined: list[set[str]] = []
    for group in groups:
        disjoint = [other for other in joined if not other & group]
        joined = [*disjoint, group.union(*(other for other in joined if other & group))]
    return [group for group in joined if len(group) > 1]


def _tie_groups(layers: Mapping[str, LayerOptions], groups: Sequence[set[str]]) -> list[LayerOptions]:
    """Return the layers with each group as one layer, at the position of its first."""
    group_of = {name: group for group in groups for name in group}
    found: list[LayerOptions] = []
    done: set[str] = set()
    for name, layer in layers.items():
        if name not in group_of:
            found.append(layer)
        elif name not in done:
            found.append(tie_layers([layers[other] for other in layers if other in group_of[name]]))
            done |= group_of[name]
    return found


def read_limits(path: Path) -> Limits:
    """Return the limits in a YAML file. Raises BadData for a file with other content."""
    from latbench.base.strict_yaml import read_yaml  # imports a YAML library, which most searches do without

    return parse_limits(read_yaml(path), str(path))


def parse_limits(content: Any, where: str) -> Limits:
    """Return the limits in a mapping with the keys of a file.

    Parameters
    ----------
    content
        The mapping.
    where
        The source of the content, for messages.

    Raises
    ------
    BadData
        The content is no such mapping.
    """
    with named_in_errors(where):
        return Limits(**check_mapping(content, "limits", LIMIT_KEYS))
