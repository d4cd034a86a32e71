"""Layers of a model and the options of each: a pattern at a sparsity in a precision, with its seconds and error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from latbench.base.engine_registry import BFLOAT16, FLOAT32, INT8, PRECISIONS
from latbench.errors import UsageError
from search.knapsack.arrays import Choice, Floats
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise, parse
from sparse_kernels.shapes import Shape

DENSE = "dense"

FOUR_DIGITS = 5e-5
"""SPDY's files round sparsities: two that differ by less than this are the same there."""

CLOSE = 1e-6
"""Sparsities nearer to each other than this are equal: no text states the third that 2:3 keeps exactly."""

ROUNDING = 1e-12
"""A share of seconds: more than another order of addition can change."""


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval, in seconds or as a ratio."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float, float]:
        """The value, the lower end and the upper end."""
        return self.value, self.low, self.high

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.value + other.value, self.low + other.low, self.high + other.high)


def convert_to_interval(seconds: float | Interval) -> Interval:
    """Return the interval itself; a number becomes an interval without width."""
    return seconds if isinstance(seconds, Interval) else Interval(float(seconds), float(seconds), float(seconds))


@dataclass(frozen=True)
class Option:
    """One way to store and multiply a layer.

    Attributes
    ----------
    pattern
        The pattern of its weight, such as `vector:32` or `dense`.
    sparsity
        The share of weights that it drops.
    precision
        The type in which weights and inputs are multiplied, one of `latbench.base.engine_registry.PRECISIONS`.
    """

    pattern: str
    sparsity: float
    precision: str = FLOAT32

    def __str__(self) -> str:
        stored = self.pattern if self.pattern == DENSE else f"{self.pattern} at {self.sparsity:.6g}"
        return stored if self.precision == FLOAT32 else f"{stored} in {self.precision}"

    @property
    def in_database(self) -> Option | None:
        """The option whose weights and error the layer database has for this one; None if the layer does not change.

        A weight for bfloat16 is the one for float32, which its kernel rounds: that error is far below those of
        pruning, and is not counted.
        """
        if self.precision == BFLOAT16:
            return replace(self, precision=FLOAT32).in_database
        return self if self.precision == INT8 or self.pattern != DENSE else None

    def is_close(self, other: Option) -> bool:
        """Return whether both are equal up to the digits that a text gives of a sparsity."""
        same = (self.pattern, self.precision) == (other.pattern, other.precision)
        return same and abs(self.sparsity - other.sparsity) <= CLOSE

    def needs_no_more(self, other: Option) -> bool:
        """Return whether this option drops no more weights, with a pattern as free, in a precision as high."""
        return (
            self.sparsity <= other.sparsity
            and PRECISIONS.index(self.precision) <= PRECISIONS.index(other.precision)
            and is_spec_at_least_as_free(self.pattern, other.pattern)
        )


DENSE_OPTION = Option(DENSE, 0.0)


def build_option(spec: str, sparsity: float | None = None, precision: str = FLOAT32) -> Option:
    """Return the option of a pattern at a sparsity in a precision.

    Parameters
    ----------
    spec
        The pattern, such as `vector:32`.
    sparsity
        Between 0 and 1. Dense and N:M patterns have one sparsity of their own and need none.
    precision
        One of `latbench.base.engine_registry.PRECISIONS`.

    Raises
    ------
    ValueError
        The pattern or the precision is unknown, or the sparsity is missing, out of range or another one.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: known are {', '.join(PRECISIONS)}")
    pattern = parse(spec)
    own = 0.0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM | VectorNM) else None
    if sparsity is None and own is None:
        raise ValueError(f"{spec} needs a sparsity, such as `{spec} at 0.75`")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise ValueError(f"a sparsity lies between 0 and 1, not {sparsity}")
    if own is not None and sparsity is not None and abs(own - sparsity) > FOUR_DIGITS:
        raise ValueError(f"{spec} has a sparsity of {own:g} and no other, not {sparsity:g}")
    dropped = float(sparsity) if own is None and sparsity is not None else own or 0.0
    return Option(str(pattern), dropped, precision)


@dataclass(frozen=True, repr=False)
class LayerOptions:
    """A layer of the model and its options, or several `tied` layers that share one choice.

    Attributes
    ----------
    name
        The layer's name in the model.
    options
        Patterns, sparsities and precisions to choose from.
    seconds, low, high
        Arrays (options,): predicted seconds and the ends of their intervals.
    errors
        Array (options,): the error of each option, NaN while it is unknown.
    tied
        The layers that this one stands for, each with the same options; empty for a single layer.
    shape
        The layer's shape, where it is known.
    """

    name: str
    options: tuple[Option, ...]
    seconds: Floats
    low: Floats
    high: Floats
    errors: Floats
    tied: tuple[LayerOptions, ...] = ()
    shape: Shape | None = None

    def __repr__(self) -> str:
        return f"<LayerOptions {self.name} with {len(self.options)} options>"

    @property
    def parts(self) -> tuple[LayerOptions, ...]:
        """The layers of the model that this one stands for."""
        return self.tied or (self,)

    def time(self, j: int) -> Interval:
        """Return the seconds of one option and their interval."""
        return Interval(float(self.seconds[j]), float(self.low[j]), float(self.high[j]))

    def change_parts(self, change: Callable[[LayerOptions], LayerOptions]) -> LayerOptions:
        """Return the layer with `change` applied to each of its parts."""
        return tie_layers([change(part) for part in self.tied]) if self.tied else change(self)

    def take(self, indices: Sequence[int]) -> LayerOptions:
        """Return the layer with only these options."""
        index = np.asarray(indices, np.intp)

        def taken(part: LayerOptions) -> LayerOptions:
            return replace(
                part, options=tuple(part.options[i] for i in indices), seconds=part.seconds[index],
                low=part.low[index], high=part.high[index], errors=part.errors[index],
            )  # fmt: skip

        return self.change_parts(taken)


def tie_layers(layers: Sequence[LayerOptions]) -> LayerOptions:
    """Return one layer that stands for all of these: their common options, with sums in layer order.

    Options come in the order of the first layer. Raises UsageError where the layers have no option in common.
    """
    shared = [option for option in layers[0].options if all(option in layer.options for layer in layers)]
    if not shared:
        raise UsageError(f"{', '.join(layer.name for layer in layers)} are tied, and have no option in common")
    parts = tuple(
        layer if layer.options == tuple(shared) else layer.take([layer.options.index(option) for option in shared])
        for layer in layers
    )

    def total(values: Callable[[LayerOptions], Floats]) -> Floats:
        summed = np.zeros(len(shared))
        for part in parts:
            summed = summed + values(part)
        return summed

    return LayerOptions(
        f"{layers[0].name} and {len(layers) - 1} tied to it", tuple(shared),
        total(lambda part: part.seconds), total(lambda part: part.low), total(lambda part: part.high),
        total(lambda part: part.errors), parts,
    )  # fmt: skip


def is_at_least_as_free(a: Pattern, b: Pattern) -> bool:
    """Return whether pattern `a` allows every mask of pattern `b`.

    If so, `a` need not damage a layer more at the same sparsity. Dense, which drops nothing, counts as the freest.
    """
    if a == b or isinstance(a, Dense | Unstructured):
        return True
    if isinstance(a, VectorNM):
        return False
    if isinstance(a, BlockWise) and isinstance(b, BlockWise):
        return b.rows % a.rows == 0 and b.cols % a.cols == 0
    if isinstance(b, ShflBW) and not isinstance(a, ShflBW):
        return False
    (rows, columns), (height, width) = _measure_unit(a), _measure_unit(b)
    return isinstance(a, VectorWise | ShflBW) and height % rows == 0 and width % columns == 0


def _measure_unit(pattern: Pattern) -> tuple[int, int]:
    """Return the rows and columns that a pattern keeps or drops together."""
    match pattern:
        case BlockWise():
            return pattern.rows, pattern.cols
        case ShflBW():
            return pattern.v, pattern.cols
        case VectorWise():
            return pattern.v, 1
    return 1, 1


def expand_choice(layers: Sequence[LayerOptions], choice: Choice) -> dict[str, Option]:
    """Return the chosen option of every layer of the model; tied layers have one entry each."""
    chosen = zip(layers, choice, strict=True)
    return {part.name: part.options[j] for layer, j in chosen for part in layer.parts}


@cache
def is_spec_at_least_as_free(a: str, b: str) -> bool:
    """Return `is_at_least_as_free` of two patterns in text form."""
    return is_at_least_as_free(parse(a), parse(b))


def list_options(layers: Sequence[LayerOptions]) -> list[Option]:
    """Return the options that any layer has, by pattern, rising sparsity and falling precision."""
    options = {option for layer in layers for option in layer.options}
    return sorted(options, key=lambda it: (it.pattern, it.sparsity, PRECISIONS.index(it.precision)))


def build_uniform_choice(layers: Sequence[LayerOptions], option: Option) -> Choice:
    """Return the profile with one option in all layers.

    A layer without that option takes its fastest option that needs no more (`Option.needs_no_more`). This is dense if
    there is no other, or the option that made `Problem.without_dominated` remove the wanted one. A layer that limits
    leave none of these takes its option of least sparsity.
    """

    def select(layer: LayerOptions) -> int:
        if option in layer.options:
            return layer.options.index(option)
        free = [i for i, other in enumerate(layer.options) if other.needs_no_more(option)]
        if not free:
            return min(range(len(layer.options)), key=lambda i: (layer.options[i].sparsity, float(layer.high[i])))
        return min(free, key=lambda i: float(layer.high[i]))

    return tuple(map(select, layers))


def find_option(layer: LayerOptions, wanted: Option | tuple[str, float] | tuple[str, float, str] | float) -> int:
    """Return the index of this option, or of the only one with this sparsity to the four digits of SPDY's files.

    A pair is an option in float32.

    Raises UsageError where there is none, or several.
    """
    if isinstance(wanted, tuple):
        wanted = Option(*wanted)
    if isinstance(wanted, Option):
        found = [j for j, option in enumerate(layer.options) if option.is_close(wanted)]
    else:
        found = [j for j, option in enumerate(layer.options) if abs(option.sparsity - wanted) <= FOUR_DIGITS]
    if len(found) == 1:
        return found[0]
    asked = str(wanted) if isinstance(wanted, Option) else f"with a sparsity of {wanted:g}"
    if found:
        raise UsageError(f"layer {layer.name} has several options {asked}: name the pattern")
    raise UsageError(f"layer {layer.name} has no option {asked}: it has {format_names(map(str, layer.options))}")


def format_names(names: Iterable[str], most: int = 8) -> str:
    """Return the first names as text, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
