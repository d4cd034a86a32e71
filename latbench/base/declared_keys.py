"""Declared keys of mappings that people write: the values that each key takes, and its meaning.

    KEYS = {"name": Key(TEXT, "Name of the model", required=True), "steps": Key(integer(1), "Optimizer steps")}
    with named_in_errors(path):
        entries = check_mapping(read_yaml(path), "a recipe", KEYS)

Errors and the page `docs/reference/yaml_files.md` come from the same declarations. Nothing here imports a YAML
library: most searches need none.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, NamedTuple

from latbench.errors import BadData, LatbenchError

_LONGEST_QUOTE = 100


class MalformedDocument(Exception):
    """What is wrong in a document, without the name of its file."""


class Kind(NamedTuple):
    """A kind of value.

    Attributes
    ----------
    phrase : str
        The allowed values, such as "a whole number of at least 1".
    parse : callable
        `parse(value, what)` returns the value. It raises MalformedDocument, which names `what`, for another kind.
    """

    phrase: str
    parse: Callable[[Any, str], Any]


class Key(NamedTuple):
    """A key of a mapping: the kind of its value, its meaning for readers, and whether it must be there."""

    kind: Kind
    meaning: str
    required: bool = False


def declare(default: Any, kind: Kind, meaning: str, **facts: Any) -> Any:
    """Return a dataclass field that is a key of a mapping; `facts` are metadata of the field."""
    return field(default=default, metadata={"key": Key(kind, meaning), **facts})


def list_declared(record: Any) -> dict[str, Key]:
    """Return the keys that a dataclass declares, by name."""
    return {each.name: each.metadata["key"] for each in fields(record)}


def check_names(value: Any, what: str, keys: Mapping[str, Key], prefix: str = "") -> Mapping[str, Any]:
    """Return `value` if it is a mapping with known keys alone, and with all that are required.

    Parameters
    ----------
    value
        What a file or a caller gives.
    what
        Its name in messages, such as "a recipe".
    keys
        The known keys.
    prefix
        Begins messages on a key; names the place, such as "layer 'fc1': ".

    Raises
    ------
    MalformedDocument
        The value is no such mapping.
    """
    known = ", ".join(keys) or "none"
    if not isinstance(value, Mapping):
        raise MalformedDocument(f"{what} must be a mapping with keys among {known}, not {quote(value)}")
    for name in value:
        if name not in keys:
            raise MalformedDocument(f"{prefix}unknown key {quote(name)}{suggest_name(name, keys)}; known are {known}")
    if missing := [name for name, key in keys.items() if key.required and name not in value]:
        needed = ", ".join(name for name, key in keys.items() if key.required)
        raise MalformedDocument(f"{prefix}{', '.join(missing)} missing; {what} needs {needed}")
    return value


def check_mapping(value: Any, what: str, keys: Mapping[str, Key], prefix: str = "") -> dict[str, Any]:
    """Return the parsed values of a mapping by key; see `check_names`."""
    entries = check_names(value, what, keys, prefix)
    return {name: keys[name].kind.parse(item, f"{prefix}{name}") for name, item in entries.items()}


@contextlib.contextmanager
def named_in_errors(where: object = "", kind: type[LatbenchError] = BadData) -> Iterator[None]:
    """Turn each MalformedDocument into an error of `kind` that begins with `where`, such as the path of the file."""
    try:
        yield
    except MalformedDocument as error:
        raise kind(f"{where}: {error}" if where else str(error)) from error


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return " (steps?)" for a name such as "step": the nearest known name; empty where none is near."""
    import difflib  # for messages alone

    return "".join(f" ({near}?)" for near in difflib.get_close_matches(str(name), list(known), 1))


def quote(value: object) -> str:
    """Return a value as messages show it, at most a line long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."


def refuse(value: Any, what: str, phrase: str) -> MalformedDocument:
    """Return the error for a value that is not as `phrase` says."""
    return MalformedDocument(f"{what} must be {phrase}, not {quote(value)}")


def satisfying(phrase: str, holds: Callable[[Any], bool]) -> Kind:
    """Return the kind of the values for which `holds` is true."""

    def parse(value: Any, what: str) -> Any:
        if not holds(value):
            raise refuse(value, what, phrase)
        return value

    return Kind(phrase, parse)


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number and no truth value."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above all floats
        return False


def is_list(value: Any) -> bool:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """Return the kind of whole numbers from `least` to `most`."""
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    return satisfying(f"a whole number{bounds}", lambda value: is_integer(value) and low <= value <= high)


def number(
    *, least: float | None = None, above: float | None = None, most: float | None = None, below: float | None = None
) -> Kind:
    """Return the kind of finite numbers within bounds; `above` and `below` are not allowed themselves."""
    bounds = (("of at least", least), ("above", above), ("at most", most), ("below", below))
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    if least is not None and most is not None:
        words = f"from {least:g} to {most:g}"

    def holds(value: Any) -> bool:
        return (
            is_number(value)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
            and (below is None or value < below)
        )

    return satisfying(f"a number {words}".strip(), holds)


def choice(*names: str) -> Kind:
    """Return the kind of some names."""

    def parse(value: Any, what: str) -> str:
        if not isinstance(value, str) or value not in names:
            near = suggest_name(value, names)
            raise MalformedDocument(f"{what} must be one of {', '.join(names)}, not {quote(value)}{near}")
        return value

    return Kind(f"one of {', '.join(names)}", parse)


def optional(kind: Kind) -> Kind:
    """Return the kind of the values of `kind`, and null."""
    phrase = f"{kind.phrase}, or null"

    def parse(value: Any, what: str) -> Any:
        return None if value is None else kind.parse(value, what)

    return Kind(phrase, parse)


def list_of(kind: Kind, phrase: str, least: int = 0) -> Kind:
    """Return the kind of lists of `kind` with at least so many items; values are tuples."""

    def parse(value: Any, what: str) -> tuple[Any, ...]:
        if not is_list(value) or len(value) < least:
            raise refuse(value, what, phrase)
        return tuple(kind.parse(item, f"item {position} of {what}") for position, item in enumerate(value, start=1))

    return Kind(phrase, parse)


def pairs_of(kind: Kind, phrase: str) -> Kind:
    """Return the kind of mappings from a name to `kind`; values are tuples of pairs."""

    def parse(value: Any, what: str) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise refuse(value, what, phrase)
        return tuple((name, kind.parse(item, f"{what} of {name!r}")) for name, item in value.items())

    return Kind(phrase, parse)


TEXT = satisfying("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
FLAG = satisfying("true or false", lambda value: isinstance(value, bool))
NAMES = list_of(TEXT, "a list of names")
MAPPING = satisfying("a mapping", lambda value: isinstance(value, Mapping))
ANYTHING = satisfying("anything", lambda value: True)
