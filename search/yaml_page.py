"""The reference page of the YAML files that people write, generated from the keys that their readers declare.

`make docs` writes it to docs/reference/yaml_files.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from latbench.base.declared_keys import Key
from latbench.workloads.workload import LAYER_KEYS, WORKLOAD_KEYS
from search.problem.limits import LIMIT_KEYS
from search.pruning.training.recipe import RECIPE_KEYS, SCORES, TRAINING_METHODS, Recipe, list_setting_keys

_PARTS = {
    "Workload": "`latbench sweep --workload` and other commands read it.",
    "Limits": "`latbench search --limits` and `latbench solve --limits` read it. A layer is a name or a glob.",
    "Recipe": "`latbench prune --recipe` reads it.",
    "Settings": "A method's settings are in `settings` of a recipe. Those of a score are beside its name, as in\n"
    "`score: {name: mfac, gradients: 32}`. A recipe sets `seed` and `trained` of a method itself.",
}
_HEAD = """# YAML files

These are the keys of the YAML files that people write. A file is refused if it has an unknown key, a key twice or a
value of another kind. The message names the file, the key and the allowed values.

This page is generated: `make docs`.
"""


def format_yaml_page() -> str:
    """Return the page as Markdown."""
    keys = {"Workload": WORKLOAD_KEYS, "Limits": LIMIT_KEYS, "Recipe": RECIPE_KEYS}
    tables = {name: _format_keys(declared, list_defaults(Recipe)) for name, declared in keys.items()}
    tables["Workload"] += "".join(
        f"\n### Layer with `op: {op}`\n\n{_format_keys(declared, {})}" for op, declared in LAYER_KEYS.items()
    )
    tables["Settings"] = _format_settings()
    return "\n".join([_HEAD, *(f"## {name}\n\n{text}\n\n{tables[name]}" for name, text in _PARTS.items())])


def list_defaults(record: Any) -> dict[str, str]:
    """Return the defaults of a dataclass by field, as a file would give them; empty for an empty collection."""
    values = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(record)
    }
    return {name: _format_value(value) for name, value in values.items() if value not in ((), [], {})}


def _format_keys(keys: Mapping[str, Key], defaults: Mapping[str, str]) -> str:
    head = "| key | values | default | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        _format_row(f"`{name}`", key.kind.phrase, "required" if key.required else defaults.get(name, ""), key.meaning)
        for name, key in keys.items()
    )


def _format_settings() -> str:
    head = "| method or score | key | values | default |\n|---|---|---|---|\n"
    return head + "".join(
        _format_row(name, f"`{key}`", declared.kind.phrase, list_defaults(record).get(key, ""))
        for name, record in {**TRAINING_METHODS, **SCORES}.items()
        for key, declared in list_setting_keys(record).items()
    )


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _format_value(value: Any) -> str:
    score = next((name for name, kind in SCORES.items() if type(value) is kind), None)
    plain = json.dumps(value) if value is None or isinstance(value, bool) else value
    return f"`{score or plain}`"


if __name__ == "__main__":
    sys.stdout.write(format_yaml_page())
