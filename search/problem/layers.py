"""Layers to choose for and the options they have: a pattern at a sparsity, its seconds and its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from latbench.errors import UsageError
from search.knapsack.arrays import Choice, Floats
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise, parse
from sparse_kernels.shapes import Shape

DENSE = "dense"

FOUR_DIGITS = 5e-5
"""Sparsities in SPDY's files are rounded."""

CLOSE = 1e-6
"""Sparsities as near as this are the same: 2:3 keeps a third, which no text says exactly."""

ROUNDING = 1e-12
"""As a share of seconds: more than adding them up in another way can change."""


@dataclass(frozen=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float, float]:
        """All three numbers."""
        return self.value, self.low, self.high

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.value + other.value, self.low + other.low, self.high + other.high)


def interval(seconds: float | Interval) -> Interval:
    """The same; a number is an interval without width."""
    return seconds if isinstance(seconds, Interval) else Interval(float(seconds), float(seconds), float(seconds))


@dataclass(frozen=True)
class Option:
    """One way to hold a layer."""

    pattern: str
    sparsity: float

    def __str__(self) -> str:
        return self.pattern if self.pattern == DENSE else f"{self.pattern} at {self.sparsity:.6g}"

    def is_close(self, other: Option) -> bool:
        """Whether both are the same but for the digits of a sparsity that a text gives."""
        return self.pattern == other.pattern and abs(self.sparsity - other.sparsity) <= CLOSE


DENSE_OPTION = Option(DENSE, 0.0)


def option(spec: str, sparsity: float | None = None) -> Option:
    """The option of a pattern's spec at a sparsity, which dense and N:M patterns have of their own.

    Raises ValueError for an unknown pattern, and for a sparsity that is missing, out of range or not the pattern's.
    """
    pattern = parse(spec)
    own = 0.0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM | VectorNM) else None
    if sparsity is None and own is None:
        raise ValueError(f"{spec} needs a sparsity, such as `{spec} at 0.75`")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise ValueError(f"a sparsity lies between 0 and 1, not {sparsity}")
    if own is not None and sparsity is not None and abs(own - sparsity) > FOUR_DIGITS:
        raise ValueError(f"{spec} has a sparsity of {own:g} and no other, not {sparsity:g}")
    return Option(str(pattern), float(sparsity) if own is None and sparsity is not None else own or 0.0)


@dataclass(frozen=True, repr=False)
class Layer:
    """A layer to choose for: (options,) arrays of predicted seconds, their intervals, and relative output errors.

    Or several layers of the model that are `tied`, with the same options each: one for all of them. `shape` is the
    layer's, where it is known.
    """

    name: str
    options: tuple[Option, ...]
    seconds: Floats
    low: Floats
    high: Floats
    errors: Floats
    tied: tuple[Layer, ...] = ()
    shape: Shape | None = None

    def __repr__(self) -> str:
        return f"<Layer {self.name} with {len(self.options)} options>"

    @property
    def parts(self) -> tuple[Layer, ...]:
        """The layers of the model that it stands for."""
        return self.tied or (self,)

    def time(self, j: int) -> Interval:
        """The seconds of one option."""
        return Interval(float(self.seconds[j]), float(self.low[j]), float(self.high[j]))

    def changed(self, change: Callable[[Layer], Layer]) -> Layer:
        """The layer with every part of it changed."""
        return tie([change(part) for part in self.tied]) if self.tied else change(self)

    def take(self, places: Sequence[int]) -> Layer:
        """The layer with only these options."""
        index = np.asarray(places, np.intp)

        def taken(part: Layer) -> Layer:
            return replace(
                part, options=tuple(part.options[i] for i in places), seconds=part.seconds[index],
                low=part.low[index], high=part.high[index], errors=part.errors[index],
            )  # fmt: skip

        return self.changed(taken)


def tie(layers: Sequence[Layer]) -> Layer:
    """One layer that stands for all of these: the options that all have, in the first's order; the sums in order.

    Raises UsageError where they have none in common.
    """
    shared = [option for option in layers[0].options if all(option in layer.options for layer in layers)]
    if not shared:
        raise UsageError(f"{', '.join(layer.name for layer in layers)} are tied, and no option is one of all of them")
    parts = tuple(
        layer if layer.options == tuple(shared) else layer.take([layer.options.index(option) for option in shared])
        for layer in layers
    )

    def total(values: Callable[[Layer], Floats]) -> Floats:
        summed = np.zeros(len(shared))
        for part in parts:
            summed = summed + values(part)
        return summed

    return Layer(
        f"{layers[0].name} and {len(layers) - 1} tied to it", tuple(shared),
        total(lambda part: part.seconds), total(lambda part: part.low), total(lambda part: part.high),
        total(lambda part: part.errors), parts,
    )  # fmt: skip


def at_least_as_free(a: Pattern, b: Pattern) -> bool:
    """Whether every mask of `b` is one of `a` too, so that `a` need not damage a layer more at the same sparsity.

    Dense, which drops nothing, is the freest.
    """
    if a == b or isinstance(a, Dense | Unstructured):
        return True
    if isinstance(a, VectorNM):
        return False
    if isinstance(a, BlockWise) and isinstance(b, BlockWise):
        return b.rows % a.rows == 0 and b.cols % a.cols == 0
    if isinstance(a, VectorWise | ShflBW):
        if isinstance(b, BlockWise):
            return b.rows % a.v == 0
        if isinstance(b, VectorWise) or (isinstance(a, ShflBW) and isinstance(b, ShflBW)):
            return b.v % a.v == 0
    return False


def options_of(layers: Sequence[Layer], choice: Choice) -> dict[str, Option]:
    """The option of every layer of the model; of tied layers one by one."""
    chosen = zip(layers, choice, strict=True)
    return {part.name: part.options[j] for layer, j in chosen for part in layer.parts}


@cache
def as_free(a: str, b: str) -> bool:
    """`at_least_as_free` of two patterns' specs."""
    return at_least_as_free(parse(a), parse(b))


def every_option(layers: Sequence[Layer]) -> list[Option]:
    """The options that any layer has, by pattern and rising sparsity."""
    every = {option for layer in layers for option in layer.options}
    return sorted(every, key=lambda option: (option.pattern, option.sparsity))


def uniform_choice(layers: Sequence[Layer], option: Option) -> Choice:
    """This option in every layer that has it; elsewhere the fastest that drops no more and is at least as free.

    That is dense where nothing else is, and what took the option's place in `without_hopeless`. A layer that limits
    leave neither has its mildest option.
    """

    def place(layer: Layer) -> int:
        if option in layer.options:
            return layer.options.index(option)
        free = [
            i
            for i, other in enumerate(layer.options)
            if other.sparsity <= option.sparsity and as_free(other.pattern, option.pattern)
        ]
        if not free:
            return min(range(len(layer.options)), key=lambda i: (layer.options[i].sparsity, float(layer.high[i])))
        return min(free, key=lambda i: float(layer.high[i]))

    return tuple(map(place, layers))


def place_of(layer: Layer, wanted: Option | tuple[str, float] | float) -> int:
    """Where the layer has this option, or the one of this sparsity to the four digits of SPDY's files."""
    if isinstance(wanted, tuple):
        wanted = Option(*wanted)
    if isinstance(wanted, Option):
        found = [j for j, option in enumerate(layer.options) if option.is_close(wanted)]
    else:
        found = [j for j, option in enumerate(layer.options) if abs(option.sparsity - wanted) <= FOUR_DIGITS]
    if len(found) == 1:
        return found[0]
    asked = str(wanted) if isinstance(wanted, Option) else f"a sparsity of {wanted:g}"
    if found:
        raise UsageError(f"layer {layer.name} has several options of {asked}: say which pattern")
    raise UsageError(f"layer {layer.name} cannot be had with {asked}: it has {listed(map(str, layer.options))}")


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
