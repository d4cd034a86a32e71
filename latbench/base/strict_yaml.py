"""YAML files that people write by hand, read strictly; `latbench.base.declared_keys` checks what they contain.

A key given twice is an error. 1e-3 is a number, as in YAML 1.2; version 1.1, and so PyYAML, takes it for text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from latbench.errors import BadData


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
