"""The text in a table's column `backend_version`: what a time depends on, by version.

2.13.0+cpu                                                      torch on a CPU
0.68.1 (row_panels 0da9ec2e, transpose_tiles 46145523)          latbench's kernels on a CPU, by family
14.2.0 (driver 580.159.04, nvrtc 13.0, vector_sm90 caa235b3)    latbench's kernels on a GPU
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_TEXT = re.compile(r"(?P<package>\S+)(?: \((?P<parts>.*)\))?")

PACKAGE = "package"
"""What the package itself is called among the parts of a version."""


@dataclass(frozen=True)
class EngineVersion:
    """The version of an engine.

    Attributes
    ----------
    package
        That of its package.
    parts
        Those of libraries, of the driver, and of the families of latbench's kernels that ran, by name.
    """

    package: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        named = ", ".join(f"{name} {self.parts[name]}" for name in sorted(self.parts))
        return f"{self.package} ({named})" if named else self.package


def parse_engine_version(text: object) -> EngineVersion | None:
    """Return the version that a text names; None if it names none."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    parts = (part.rpartition(" ") for part in (found["parts"] or "").split(", ") if part)
    return EngineVersion(found["package"], {name: version for name, _, version in parts})


def list_versions(texts: Iterable[object]) -> dict[str, list[str]]:
    """Return the versions that some texts name, sorted, by part; those of the package come first."""
    found: dict[str, set[str]] = {PACKAGE: set()}
    for version in filter(None, map(parse_engine_version, set(texts))):
        found[PACKAGE].add(version.package)
        for name, digits in version.parts.items():
            found.setdefault(name, set()).add(digits)
    return {name: sorted(found[name]) for name in [PACKAGE, *sorted(found.keys() - {PACKAGE})] if found[name]}


def describe_mixture(texts: Iterable[object]) -> str:
    """Return which parts some texts of an engine name in several versions, in words; empty if each part has one.

    A text without parts beside one with parts is from before rows named them.
    """
    known = set(texts)
    mixed = [f"{name} {' and '.join(own)}" for name, own in list_versions(known).items() if len(own) > 1]
    versions = list(filter(None, map(parse_engine_version, known)))
    if any(version.parts for version in versions) and not all(version.parts for version in versions):
        mixed.append("with and without versions of parts")
    return ", ".join(mixed)
