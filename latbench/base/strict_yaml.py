"""YAML as people write it by hand: a key given twice is an error, and whatever is wrong is said with its line.

1e-3 is a number, as in YAML 1.2; version 1.1, and so PyYAML, takes it for text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from latbench.errors import BadData


def read_yaml(path: Path) -> Any:
    """The document in the file `path`. Raises BadData for a file that is missing or no YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BadData(f"{path}{line}: no YAML that can be read: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise BadData(f"{path}: no YAML that can be read: {error}") from error


def suggest_name(name: object, known: Iterable[str]) -> str:
    """ " (steps?)" for a name such as "step": the known one that is nearest; empty where none is near."""
    return "".join(f" ({near}?)" for near in difflib.get_close_matches(str(name), list(known), 1))


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error; PyYAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
