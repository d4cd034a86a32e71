"""Layers by name or by a glob with `*`, `?` and `[seq]`, as fnmatch has them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from latbench.errors import UsageError
from search.problem.layers import listed


def matched(glob: str, names: Sequence[str], limit: str) -> set[str]:
    """The names that match. Raises UsageError, saying of which `limit`, where none does."""
    found = {name for name, _ in with_wildcards(glob, names)}
    if not found:
        raise UsageError(f"{limit}: no layer is called {glob!r}; there are {listed(names)}")
    return found


def with_wildcards(glob: str, names: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The names that match, each with the texts that the wildcards stand for."""
    if glob in names:
        return [(glob, ())]
    pieces = re.split(r"(\*|\?|\[!?\]?[^\]]*\])", glob)
    # Each wildcard as fnmatch translates it, without the mark of the end that it adds, in a group of its own.
    texts = [f"({fnmatch.translate(piece)[:-2]})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)]
    pattern = re.compile("".join(texts))
    return [(name, found.groups()) for name in names if (found := pattern.fullmatch(name))]
