"""Limits on a search: what a user knows about the layers of a model, or wants of them, whatever it costs.

    tied:                          # one option for all the layers of a group
      - [layer1.0.conv2, layer1.1.conv2, layer1.0.downsample]
    tied_in_each:                  # the same, apart for each text that the stars stand for
      - ["encoder.*.query", "encoder.*.key", "encoder.*.value"]
    fixed: {fc1: "vector:32 at 0.75", "*.output": dense}
    minimum: {"encoder.*": 0.5}    # sparsities
    maximum: {"*.query": 0.9}
    patterns: {"*.value": [vector:32, "nm:2:4"]}    # only these, and dense
    excluded: [pooler, "encoder.0.*"]    # stay dense; their time is counted

Layers are given by name or by a glob (`*`, `?`, `[seq]`, as in fnmatch). Where several limits speak of a layer, all
of them hold. A glob leaves out the layers that are excluded; a name, or a glob, that matches none is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from latbench.base import strict_yaml
from latbench.errors import BadData, UsageError
from search.problem.layer_globs import matched, with_wildcards
from search.problem.layers import CLOSE, DENSE, Layer, Option, listed, option, tie
from sparse_kernels.patterns import parse

Group = tuple[str, ...]


class _Malformed(Exception):
    """What is wrong in limits, still without their place."""


def _sparsity(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise _Malformed(f"a sparsity lies between 0 and 1, not {value!r}")
    return number


def _names(value: Any) -> Group:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(it, str) for it in value):
        raise _Malformed(f"expected a list of names, not {value!r}")
    return tuple(value)


def _groups(value: Any) -> tuple[Group, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _Malformed(f"expected a list of groups of layers, not {value!r}")
    return tuple(map(_names, value))


def _each(read_one: Callable[[Any], Any]) -> Callable[[Any], tuple[tuple[str, Any], ...]]:
    def pairs(value: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _Malformed(f"expected a mapping from layers to what holds for them, not {value!r}")
        return tuple((key, read_one(one)) for key, one in value.items())

    return pairs


def _option(value: Any) -> Option:
    """As limits write it: `dense`, `nm:2:4`, `vector:32 at 0.75`."""
    spec, _, sparsity = (part.strip() for part in str(value).partition(" at "))
    try:
        return option(spec, _sparsity(sparsity) if sparsity else None)
    except ValueError as error:
        raise _Malformed(str(error)) from error


def _patterns(value: Any) -> Group:
    try:
        return tuple(str(parse(spec)) for spec in _names([value] if isinstance(value, str) else value))
    except ValueError as error:
        raise _Malformed(str(error)) from error


def _limit(read_one: Callable[[Any], Any], globs: Callable[[Any], Iterable[str]]) -> Any:
    """A field that is read by `read_one`, and speaks of the layers that match `globs` of its value."""
    return field(default=(), metadata={"read": read_one, "globs": globs})


def _of_groups(read_one: Callable[[Any], Any]) -> Any:
    return _limit(read_one, itertools.chain.from_iterable)


def _by_glob(read_one: Callable[[Any], Any]) -> Any:
    return _limit(_each(read_one), lambda pairs: [glob for glob, _ in pairs])


@dataclass(frozen=True)
class Limits:
    """As the module says; `fixed` and the like are pairs of a glob and what holds for its layers."""

    tied: tuple[Group, ...] = _of_groups(_groups)
    tied_in_each: tuple[Group, ...] = _of_groups(_groups)
    fixed: tuple[tuple[str, Option], ...] = _by_glob(_option)
    minimum: tuple[tuple[str, float], ...] = _by_glob(_sparsity)
    maximum: tuple[tuple[str, float], ...] = _by_glob(_sparsity)
    patterns: tuple[tuple[str, Group], ...] = _by_glob(_patterns)
    excluded: tuple[str, ...] = _limit(_names, lambda names: ())  # they are matched before the others

    def __add__(self, other: Limits) -> Limits:
        """Both at once."""
        return Limits(*(getattr(self, it.name) + getattr(other, it.name) for it in fields(self)))

    def without(self, names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
        """Those of the layers `names` that are not excluded. Raises UsageError for what matches none of them.

        `others` are layers that could not be pruned anyway: it is no mistake to exclude them.
        """
        gone = {name for glob in self.excluded for name in matched(glob, [*names, *others], "excluded")}
        return [name for name in names if name not in gone]

    def narrow(self, layers: Sequence[Layer], gone: Collection[str] = ()) -> tuple[Layer, ...]:
        """The layers, but for the excluded ones, which are `gone`: with what options are left, and tied.

        Raises UsageError for names that match nothing, for limits that contradict each other, and where they leave a
        layer no option.
        """
        parts = {part.name: part for layer in layers for part in layer.parts}
        names = list(parts)
        matches: dict[str, set[str]] = {}
        for limit in fields(self):
            for glob in limit.metadata["globs"](getattr(self, limit.name)):
                if glob in gone:
                    raise UsageError(f"layer {glob} is excluded, and {limit.name} speaks of it")
                matches[glob] = matched(glob, names, limit.name)
        already = [{part.name for part in layer.tied} for layer in layers]
        narrowed = {name: self._narrowed(part, matches) for name, part in parts.items()}
        return tuple(_tied(narrowed, _joined([*already, *self._groups(names, matches)])))

    def _narrowed(self, layer: Layer, matches: Mapping[str, set[str]]) -> Layer:
        """The layer with the options that it may have; `matches` are the layers of each glob."""

        def of(limit: Iterable[tuple[str, Any]]) -> list[Any]:
            return [value for glob, value in limit if layer.name in matches[glob]]

        low, high = max(of(self.minimum), default=0.0), min(of(self.maximum), default=1.0)
        if low > high + CLOSE:
            raise UsageError(f"layer {layer.name} is to have a sparsity of at least {low:g} and of at most {high:g}")
        allowed = of(self.patterns)
        fixed = of(self.fixed)
        if len({(it.pattern, round(it.sparsity, 6)) for it in fixed}) > 1:
            raise UsageError(f"layer {layer.name} is fixed to {' and to '.join(map(str, fixed))}")

        def may(own: Option) -> bool:
            return (
                low - CLOSE <= own.sparsity <= high + CLOSE
                and all(own.pattern in (DENSE, *some) for some in allowed)
                and all(own.is_close(it) for it in fixed)
            )

        places = [j for j, own in enumerate(layer.options) if may(own)]
        if not places:
            raise UsageError(
                f"the limits leave layer {layer.name} no option: it has {listed(map(str, layer.options), 20)}"
            )
        return layer if len(places) == len(layer.options) else layer.take(places)

    def _groups(self, names: Sequence[str], matches: Mapping[str, set[str]]) -> list[set[str]]:
        """The layers that are tied, a set a group."""
        groups = [{name for glob in group for name in matches[glob]} for group in self.tied]
        for globs in self.tied_in_each:
            by_stars: dict[tuple[str, ...], set[str]] = {}
            for glob in globs:
                for name, stars in with_wildcards(glob, names):
                    by_stars.setdefault(stars, set()).add(name)
            groups += by_stars.values()
        return groups


def _joined(groups: Sequence[set[str]]) -> list[set[str]]:
    """The groups of two or more; those that share a layer are one."""
    joined: list[set[str]] = []
    for group in groups:
        apart = [other for other in joined if not other & group]
        joined = [*apart, group.union(*(other for other in joined if other & group))]
    return [group for group in joined if len(group) > 1]


def _tied(layers: Mapping[str, Layer], groups: Sequence[set[str]]) -> list[Layer]:
    """The layers, those of a group as one in the place of its first."""
    group_of = {name: group for group in groups for name in group}
    found: list[Layer] = []
    done: set[str] = set()
    for name, layer in layers.items():
        if name not in group_of:
            found.append(layer)
        elif name not in done:
            found.append(tie([layers[other] for other in layers if other in group_of[name]]))
            done |= group_of[name]
    return found


def read_limits(path: Path) -> Limits:
    """The limits in a YAML file. Raises BadData for a file that does not state any."""
    return parse_limits(strict_yaml.read(path), str(path))


def parse_limits(content: Any, where: str) -> Limits:
    """Limits from a mapping with the module's keys. Raises BadData, saying `where`, for anything else."""
    known = {limit.name: limit.metadata["read"] for limit in fields(Limits)}
    if not isinstance(content, Mapping):
        raise BadData(f"{where}: limits are a mapping with keys among {', '.join(known)}, not {content!r}")
    if unknown := [key for key in content if key not in known]:
        raise BadData(f"{where}: unknown limit {unknown[0]!r}; known are {', '.join(known)}")
    try:
        return Limits(**{key: known[key](value) for key, value in content.items()})
    except _Malformed as error:
        raise BadData(f"{where}: {error}") from error
