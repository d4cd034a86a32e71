"""YAML files that people write by hand: reading, and checks of what they contain.

A key given twice is an error. 1e-3 is a number, as in YAML 1.2; version 1.1, and so PyYAML, takes it for text.

A reader of one kind of file calls the checks inside `named_in_errors`, which adds the name of the file:

    document = read_yaml(path)
    with named_in_errors(path):
        entry = check_keys(document, "a workload", required=("name", "layers"))
        name = check_text(entry["name"], "name")
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from latbench.errors import BadData


class MalformedDocument(Exception):
    """What is wrong in a document, without the name of its file."""


def read_yaml(path: Path) -> Any:
    """Return the document in the file `path`. Raises BadData for a file that is missing or not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadData(f"{path}{line}: not readable YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise BadData(f"{path}: not readable YAML: {error}") from error


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return " (steps?)" for a name such as "step": the nearest known name; empty where none is near."""
    return "".join(f" ({near}?)" for near in difflib.get_close_matches(str(name), list(known), 1))


@contextlib.contextmanager
def named_in_errors(where: object) -> Iterator[None]:
    """Turn each MalformedDocument into BadData that begins with `where`, such as the path of the file."""
    try:
        yield
    except MalformedDocument as error:
        raise BadData(f"{where}: {error}") from error


def check_keys(
    value: Any, what: str, *, required: Collection[str] = (), optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return `value` if it is a mapping with all `required` keys and no others than the `optional` ones."""
    if not isinstance(value, dict):
        raise MalformedDocument(f"{what} must be a mapping with the keys {', '.join(sorted(required))}")
    if missing := set(required) - value.keys():
        raise MalformedDocument(f"{what}: {', '.join(sorted(missing))} missing")
    if unknown := value.keys() - set(required) - set(optional):
        known = ", ".join(sorted({*required, *optional}))
        raise MalformedDocument(f"{what}: unknown key {', '.join(sorted(map(str, unknown)))}; known are {known}")
    return value


def check_text(value: Any, what: str) -> str:
    """Return `value` if it is a text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise MalformedDocument(f"{what} must be a text that is not empty, not {value!r}")
    return value


def check_list(value: Any, what: str) -> list[Any]:
    """Return `value` if it is a list with at least one item."""
    if not isinstance(value, list) or not value:
        raise MalformedDocument(f"{what} must be a list of at least one item")
    return value


def check_integer(value: Any, what: str, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`."""
    if not _is_integer(value) or value < minimum:
        raise MalformedDocument(f"{what} must be a whole number of at least {minimum}, not {value!r}")
    found: int = value
    return found


def check_integer_pair(value: Any, what: str) -> tuple[int, int]:
    """Return `value` as a tuple if it is a list of two integers."""
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_integer, value)):
        raise MalformedDocument(f"{what} must be two whole numbers [rows, columns], not {value!r}")
    return value[0], value[1]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses a key given twice; PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
